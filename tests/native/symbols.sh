#!/usr/bin/env bash
# Fails where a kernel's file defines more for the linker than its kernel: of an inline function that several files
# define, the linker keeps one copy for all, perhaps one compiled for a CPU that is not there.
# Needs a C++ compiler for x86-64 or 64-bit Arm, nm, and llama-cpp-python's headers. Usage: symbols.sh [PYTHON]
set -euo pipefail
cd "$(dirname "$0")/../.."
headers=$("${1:-python3}" -c "import sysconfig; print(sysconfig.get_path('purelib') + '/include')")
object=$(mktemp)
trap 'rm -f "$object"' EXIT
case $(uname -m) in
    x86_64) kernels="avx2 avx_vnni avx512_vnni" machine=sapphirerapids ;;
    *) kernels="neon neon_dotprod neon_i8mm" machine=armv8.2-a+dotprod+i8mm ;;
esac
for kernel in scalar $kernels; do
    # Without optimization every function that is used is there; tables for exceptions, of which there are none, need not.
    "${CXX:-c++}" -std=c++20 -O0 -fno-exceptions -w -march=$machine -I"$headers" -Icpp -c "cpp/kernels/$kernel.cpp" -o "$object"
    found=$(nm -C --defined-only --extern-only "$object" | cut -d' ' -f3-)
    if ! [[ $found =~ ^pystaged::k[A-Za-z0-9]+Kernel$ ]]; then
        echo "$kernel.cpp defines for the linker:"$'\n'"$found" >&2
        exit 1
    fi
done
