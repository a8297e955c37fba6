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
# What repeat_tests reads. Texts with other options than these are not repeated here.
numbers() {
    python3 - "$1" <<'END'
import json, sys
receipt = json.load(open(sys.argv[1]))
sampling = receipt["options"]["sampling"]
names = ["temperature", "top_k", "top_p", "min_p", "seed", "repeat_penalty", "repeat_last_n"]
print(receipt["n_ctx"], *(sampling[name] for name in names))
for tokens in receipt["prompt"]["tokens"], receipt["text"]["tokens"]:
    print(len(tokens), *tokens)
END
}
repeat() {
    echo "$1: $3"
    numbers "$3" | qemu-aarch64 -L /usr/aarch64-linux-gnu -cpu "$1" "$build/repeat_tests" models/target.Q8_0.gguf "$2"
}
run max neon-i8mm neon-dotprod neon scalar
run cortex-a76 neon-dotprod neon scalar
run cortex-a72 neon scalar
repeat max neon-i8mm tests/data/greedy.receipt
repeat max neon-dotprod tests/data/sampled.receipt
repeat cortex-a72 neon tests/data/sampled.receipt
