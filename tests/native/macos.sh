#!/usr/bin/env bash
# Compiles every C++ file for arm64 macOS, without a Mac: with the compiler in the PyPI package ziglang and the headers of
# pybind11, Python and llama-cpp-python in the environment. Usage: macos.sh [PYTHON]
set -euo pipefail
cd "$(dirname "$0")/../.."
python=${1:-python3}
version=$(sed -n 's/.*llama-cpp-python==\([0-9.]*\)",$/\1/p' pyproject.toml)
headers=$("$python" -c "
import sysconfig, pybind11
for folder in sysconfig.get_path('include'), pybind11.get_include(), sysconfig.get_path('purelib') + '/include':
    print('-isystem' + folder)")
mapfile -t headers <<<"$headers"

object=$(mktemp --suffix=.o)
trap 'rm -f "$object"' EXIT

compile() {
    local options=()
    case $1 in
        */kernels/avx*) return ;;
        */kernels/neon_i8mm.cpp) options=(-O1 -mcpu=apple_m2) ;;
        */kernels/neon*.cpp) options=(-O1 -mcpu=apple_m1) ;;
    esac
    echo "$1"
    "$python" -m ziglang c++ -target aarch64-macos -std=c++17 -Wall -Wextra -ffp-contract=off -fvisibility=hidden \
        -DPYSTAGED_ARM -DLLAMA_CPP_PYTHON_VERSION="\"$version\"" "${options[@]}" -Icpp \
        "${headers[@]}" -c "$1" -o "$object"
}
while read -r file; do
    compile "$file"
done < <(find cpp tests/native -name '*.cpp' | sort)
