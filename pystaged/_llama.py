"""Loads llama-cpp-python's libraries before the extension that is linked against them.

Their ABI moves with every release, and loading them in the other order would put two copies into one process.
"""

from __future__ import annotations

import ctypes
import os  # and not pathlib, which takes several times as long to import as the rest
import sys
from importlib import util

_core = util.find_spec("pystaged._core")
assert _core is not None and _core.origin is not None  # noqa: PT018  else the package would not have been imported
# The build writes it beside the module: the version that pyproject.toml names.
with open(os.path.join(os.path.dirname(_core.origin), "llama_cpp_version.txt")) as _file:  # noqa: PTH118, PTH120, PTH123
    VERSION = _file.read().strip()


def check(installed: str | None, redirected: str | None) -> None:
    """Refuse a llama-cpp-python this build does not fit.

    Args:
        installed: version of llama-cpp-python, None where it is missing.
        redirected: the environment's LLAMA_CPP_LIB_PATH, with which llama_cpp loads another library.

    Raises:
        ImportError: naming what is wrong and what to do.
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
    """Refuse a Python of free threads that is told to stay without its lock: objects of this package count on it.
    Otherwise such a Python turns the lock on by itself when it loads the extension.

    Args:
        enabled: whether the global interpreter lock is on. wanted_off: by PYTHON_GIL=0 or -X gil=0.

    Raises:
        ImportError: it is off, and stays so.
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
    from importlib import metadata  # noqa: PLC0415  reads what the name of a folder usually says, in a tenth of a second

    try:
        return metadata.version("llama-cpp-python")
    except metadata.PackageNotFoundError:
        return None


def _load(package: str) -> None:
    """Load the very file that `import llama_cpp` loads, without the rest of that package, which takes longer.

    Raises:
        ImportError: it is not there.
    """
    files = [os.path.join(package, "lib", name) for name in ("libllama.so", "libllama.dylib")]  # noqa: PTH118
    found = next((file for file in files if os.path.exists(file)), None)  # noqa: PTH110
    if not found:
        raise ImportError(
            f"there is no libllama in {package}; run: pip install --force-reinstall llama-cpp-python=={VERSION}"
        )
    ctypes.CDLL(found)


check_lock(getattr(sys, "_is_gil_enabled", lambda: True)(), getattr(sys.flags, "gil", None) == 0)
_folder = _package()
check(_installed(_folder) if _folder else None, os.environ.get("LLAMA_CPP_LIB_PATH"))
if _folder:
    _load(_folder)
