#!/usr/bin/env bash
# Cross-compiles the engine, libllama and the native tests for 64-bit Windows and runs them under Wine; then repeats the
# texts of receipts that were made on Linux. test_fork and test_forked_child are left out: Windows has no fork().
# Needs Debian's wine64 and, in the environment, the PyPI packages ziglang, cmake and ninja. Usage: wine.sh [BUILD-FOLDER]
set -euo pipefail
cd "$(dirname "$0")/../.."
build=${1:-build/wine}
version=$(sed -n 's/.*llama-cpp-python==\([0-9.]*\)",$/\1/p' pyproject.toml)
mkdir -p "$build"
build=$(realpath "$build")
sources=$build/llama_cpp_python-$version
if [ ! -d "$sources" ]; then
    pip download --quiet --no-binary llama-cpp-python --no-deps --dest "$build" "llama-cpp-python==$version"
    tar -xzf "$build/llama_cpp_python-$version.tar.gz" -C "$build"
fi
zig=$(python3 -c 'import os, ziglang; print(os.path.dirname(ziglang.__file__))')/zig
options="-target x86_64-windows-gnu -fno-sanitize=undefined -g0"
cmake -S tests/native -B "$build" -G Ninja -DCMAKE_SYSTEM_NAME=Windows -DCMAKE_SYSTEM_PROCESSOR=x86_64 \
    -DCMAKE_C_COMPILER="$zig;cc" -DCMAKE_C_FLAGS="$options" -DCMAKE_C_FLAGS_RELEASE="-O1 -DNDEBUG" \
    -DCMAKE_CXX_COMPILER="$zig;c++" -DCMAKE_CXX_FLAGS="$options" -DCMAKE_CXX_FLAGS_RELEASE="-O1 -DNDEBUG" \
    -DPYSTAGED_KERNEL_LEVEL=-O1 -DLLAMA_CPP="$sources/vendor/llama.cpp"
cmake --build "$build" --parallel

export WINEPREFIX=$build/prefix WINEDEBUG=-all WINEDLLOVERRIDES=winemenubuilder.exe,mscoree,mshtml=
wine=$(command -v wine64 || command -v wine || echo /usr/lib/wine/wine64)
"$wine" "$build/kernel_tests.exe"
"$wine" "$build/native_tests.exe" models/draft.Q8_0.gguf
for receipt in tests/data/{greedy,sampled}.receipt; do
    for kernel in scalar avx2; do
        python3 tests/native/receipt_numbers.py "$receipt" |
            "$wine" "$build/repeat_tests.exe" models/target.Q8_0.gguf $kernel
    done
done
