"""Loads llama-cpp-python's libraries before the extension that is linked against them.

Their ABI moves with every release, and loading them in the other order would put two copies into one process.
"""

from __future__ import annotations

import os
import re
from importlib import metadata
from pathlib import Path


def _needed() -> str:
    """The version that pystaged's own metadata asks for; in a clone that is not installed, its pyproject.toml."""
    try:
        requirements = "\n".join(metadata.requires("pystaged") or ())
    except metadata.PackageNotFoundError:
        requirements = (Path(__file__).parent.parent / "pyproject.toml").read_text("utf-8")
    found = re.search(r"llama-cpp-python==([0-9.]+)", requirements)
    if not found:
        raise ImportError("pystaged's metadata names no version of llama-cpp-python; install pystaged again")
    return found[1]


VERSION = _needed()


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


check(_installed(), os.environ.get("LLAMA_CPP_LIB_PATH"))

import llama_cpp  # noqa: E402, F401
