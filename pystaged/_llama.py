"""Loads llama-cpp-python's libraries before the extension that is linked against them.

Their ABI moves with every release, and loading them in the other order would put two copies into one process.
"""

from __future__ import annotations

import os
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path

VERSION = "0.3.36"


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


def _installed() -> str | None:
    try:
        return metadata.version("llama-cpp-python")
    except metadata.PackageNotFoundError:
        return None


# Python finds the source's folder before an installed package when it is started beside it.
if find_spec("pystaged._core") is None:
    folder = Path(__file__).resolve().parents[1]
    raise ImportError(
        f"{folder} holds pystaged's source without its compiled module; run: pip install -e {folder}, "
        "or start Python in another folder if pystaged is installed"
    )
check(_installed(), os.environ.get("LLAMA_CPP_LIB_PATH"))

import llama_cpp  # noqa: E402, F401
