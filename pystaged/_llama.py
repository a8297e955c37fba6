"""Loads llama-cpp-python's libraries before the extension that is linked against them.

Their ABI changes with every release, and the other order would load two copies into one process. A wheel that
packaging/build_wheel.py makes has its own copies, under other names, and needs none of this.
"""

from __future__ import annotations

import ctypes
import os  # instead of pathlib, which takes several times as long to import as the rest
import sys
from importlib import util

_core = util.find_spec("pystaged._core")
assert _core is not None and _core.origin is not None  # noqa: PT018  else the package would not have been imported
# The build writes the version of pyproject.toml into this file; packaging/build_wheel.py adds the word "inside" if the
# package has its own copy of the libraries, which the extension finds by itself.
with open(os.path.join(os.path.dirname(_core.origin), "llama_cpp_version.txt")) as _file:  # noqa: PTH118, PTH120, PTH123
    VERSION, *_word = _file.read().split()
IS_INSIDE = bool(_word)


def check(installed: str | None, redirected: str | None) -> None:
    """Check that the installed llama-cpp-python is the one that this build is linked against.

    Args:
        installed: version of llama-cpp-python, None if it is missing.
        redirected: the environment's LLAMA_CPP_LIB_PATH, which makes llama_cpp load another library.

    Raises:
        ImportError: the version differs, or the library is redirected.
    """
    if installed != VERSION:
        found = f"{installed} is installed" if installed else "it is not installed"
        raise ImportError(
            f"pystaged is built for llama-cpp-python {VERSION}, but {found}; "
            f"run: pip install llama-cpp-python=={VERSION}"
        )
    if redirected:
        raise ImportError(
            f"LLAMA_CPP_LIB_PATH is set to {redirected}, so llama_cpp would load a library pystaged is not built for; "
            "unset it"
        )


def check_lock(enabled: bool, wanted_off: bool) -> None:
    """Refuse a free-threaded Python whose lock the user keeps off, because this package is not safe without it. By
    default such a Python turns the lock on when it loads the extension.

    Args:
        enabled: whether the global interpreter lock is on. wanted_off: whether PYTHON_GIL=0 or -X gil=0 is set.

    Raises:
        ImportError: the lock is off and stays off.
    """
    if wanted_off and not enabled:
        raise ImportError(
            "pystaged needs Python's global interpreter lock, which PYTHON_GIL=0 or -X gil=0 keeps off; without these, "
            "Python turns the lock on when it loads pystaged"
        )


def _package() -> str | None:
    """The folder of llama_cpp."""
    spec = util.find_spec("llama_cpp")
    return os.path.dirname(spec.origin) if spec and spec.origin else None  # noqa: PTH120


def _installed(package: str) -> str | None:
    if os.path.isdir(os.path.join(package, "..", f"llama_cpp_python-{VERSION}.dist-info")):  # noqa: PTH112, PTH118
        return VERSION
    from importlib import metadata  # noqa: PLC0415  takes a tenth of a second, so the folder's name is tried first

    try:
        return metadata.version("llama-cpp-python")
    except metadata.PackageNotFoundError:
        return None


def _load(package: str) -> None:
    """Load the library file that `import llama_cpp` loads, without the rest of that package, which takes longer.

    Raises:
        ImportError: the file does not exist.
    """
    files = [os.path.join(package, "lib", name) for name in ("libllama.so", "libllama.dylib", "llama.dll")]  # noqa: PTH118
    found = next((file for file in files if os.path.exists(file)), None)  # noqa: PTH110
    if not found:
        raise ImportError(
            f"there is no libllama in {package}; run: pip install --force-reinstall llama-cpp-python=={VERSION}"
        )
    ctypes.CDLL(found)


check_lock(getattr(sys, "_is_gil_enabled", lambda: True)(), getattr(sys.flags, "gil", None) == 0)
os.environ.setdefault("GGML_NO_BACKTRACE", "1")  # else ggml starts a debugger before it aborts
if not IS_INSIDE:
    _folder = _package()
    check(_installed(_folder) if _folder else None, os.environ.get("LLAMA_CPP_LIB_PATH"))
    if _folder:
        _load(_folder)
