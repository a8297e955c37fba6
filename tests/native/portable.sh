#!/usr/bin/env bash
# Compiles every C++ file for arm64 macOS and 64-bit Windows, on neither: with the compiler in the PyPI package ziglang and
# the headers of pybind11, Python and llama-cpp-python in the environment. Usage: portable.sh [PYTHON]
set -euo pipefail
cd "$(dirname "$0")/../.."
python=${1:-python3}
version=$(sed -n 's/.*llama-cpp-python==\([0-9.]*\)",$/\1/p' pyproject.toml)
mapfile -t headers < <("$python" -c "
import sysconfig, pybind11
print(sysconfig.get_path('include'), pybind11.get_include(), sysconfig.get_path('purelib') + '/include', sep='\n')")
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

# Python's headers with what they are configured for on Windows, as far as compiling asks for it.
cp -rL "${headers[0]}" "$work/python"
cat >"$work/python/pyconfig.h" <<'HEADER'
#define MS_WIN32
#define MS_WIN64
#define MS_WINDOWS
#define NT_THREADS
#define WITH_THREAD
#define HAVE_DECLSPEC_DLL
#define Py_NO_ENABLE_SHARED
#define PLATFORM "win32"
#define SIZEOF_SHORT 2
#define SIZEOF_INT 4
#define SIZEOF_LONG 4
#define SIZEOF_LONG_LONG 8
#define SIZEOF_VOID_P 8
#define SIZEOF_SIZE_T 8
#define SIZEOF_TIME_T 8
#define SIZEOF_OFF_T 4
#define SIZEOF_WCHAR_T 2
#define SIZEOF_PID_T 4
#define ALIGNOF_MAX_ALIGN_T 8
#define HAVE_PY_SSIZE_T 1
typedef long long Py_ssize_t;
#define PY_SSIZE_T_MAX 0x7fffffffffffffffLL
#define HAVE_STDDEF_H 1
#define HAVE_SYS_TYPES_H 1
#define HAVE_SYS_STAT_H 1
#define HAVE_WCHAR_H 1
HEADER

compile() {
    local options=() include=$work/python define=-DPYSTAGED_KERNELS=kAvx2Kernel,kScalarKernel
    case $1 in *macos) include=${headers[0]} ;; esac
    case $1:$2 in
        *macos:*/windows.cpp | *macos:*/kernels/avx* | *macos:*/kernels/x86*) return ;;
        *windows*:*/posix.cpp | *windows*:*/kernels/neon* | *windows*:*/arm_features.cpp) return ;;
        *:*/kernels/neon_i8mm.cpp) options=(-mcpu=apple_m2) ;;
        *:*/kernels/neon*.cpp) options=(-mcpu=apple_m1) ;;
        *:*/kernels/avx2.cpp) options=(-mcpu=haswell) ;;
        *:*/kernels/avx_vnni.cpp) options=(-mcpu=alderlake) ;;
        *:*/kernels/avx512_vnni.cpp) options=(-mcpu=icelake_server) ;;
    esac
    echo "$*"
    "$python" -m ziglang c++ -target "$1" -std=c++20 -O0 -g0 -Wall -Wextra -ffp-contract=off -fvisibility=hidden "$define" \
        -fno-sanitize=undefined -DLLAMA_CPP_PYTHON_VERSION="\"$version\"" "${options[@]}" -Icpp -isystem "$include" \
        -isystem "${headers[1]}" -isystem "${headers[2]}" -c "$2" -o "$work/$1.o"
}
all() {
    local file
    while read -r file; do
        compile "$1" "$file"
    done < <(find cpp tests/native -name '*.cpp' | sort)
}
# Kept at once: the list of files that the other loop reads is a process too, and takes $!.
all aarch64-macos &
macos=$!
all x86_64-windows-gnu
wait $macos
