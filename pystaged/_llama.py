"""Loads llama-cpp-python's libraries before the extension that is linked against them.

Their ABI moves with every release, and loading them in the other order would put two copies into one process.
"""

from __future__ import annotations

import ctypes
import os  # and not pathlib, which takes several times as long to import as the rest
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


_folder = _package()
check(_installed(_folder) if _folder else None, os.environ.get("LLAMA_CPP_LIB_PATH"))
if _folder:
    _load(_folder)
