#!/usr/bin/env bash
# Cross-compiles the engine and its kernels' tests for 64-bit Arm and runs them under emulation, as CPUs of three
# generations; then repeats the texts of receipts that were made on other CPUs.
# Needs the Debian packages g++-aarch64-linux-gnu and qemu-user, cmake and python3. Usage: arm.sh [BUILD-FOLDER]
set -euo pipefail
cd "$(dirname "$0")/../.."
build=${1:-build/arm}
version=$(sed -n 's/.*llama-cpp-python==\([0-9.]*\)",$/\1/p' pyproject.toml)
sources=$build/llama_cpp_python-$version
mkdir -p "$build"
if [ ! -d "$sources" ]; then
    pip download --quiet --no-binary llama-cpp-python --no-deps --dest "$build" "llama-cpp-python==$version"
    tar -xzf "$build/llama_cpp_python-$version.tar.gz" -C "$build"
fi
cmake -S tests/native -B "$build" -DCMAKE_TOOLCHAIN_FILE="$PWD/cmake/aarch64-linux-gnu.cmake" \
    -DLLAMA_CPP="$(realpath "$sources")/vendor/llama.cpp"
cmake --build "$build" --parallel

run() {
    echo "$1: ${*:2}"
    qemu-aarch64 -L /usr/aarch64-linux-gnu -cpu "$1" "$build/kernel_tests" "${@:2}"
}
repeat() {
    echo "$1: $3"
    python3 tests/native/receipt_numbers.py "$3" |
        qemu-aarch64 -L /usr/aarch64-linux-gnu -cpu "$1" "$build/repeat_tests" models/target.Q8_0.gguf "$2"
}
run max neon-i8mm neon-dotprod neon scalar
run cortex-a76 neon-dotprod neon scalar
run cortex-a72 neon scalar
repeat max neon-i8mm tests/data/greedy.receipt
repeat max neon-dotprod tests/data/sampled.receipt
repeat cortex-a72 neon tests/data/sampled.receipt
