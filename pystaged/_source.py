"""Puts the installed package in the place of its source, which is what Python finds first in the source's folder.

That folder is where the README's commands are typed. It has no compiled module.
"""

from __future__ import annotations

import importlib
import sys
from importlib import util
from pathlib import Path


def use_installed() -> None:
    """Import the pystaged that lies elsewhere on Python's path.

    Raises:
        ImportError: there is none.
    """
    source, before = Path(__file__).resolve().parent, list(sys.path)
    del sys.modules["pystaged"]
    sys.path[:] = [folder for folder in before if Path(folder).resolve() != source.parent]
    try:
        importlib.import_module("pystaged")
    except ModuleNotFoundError as error:
        if error.name != "pystaged":
            raise
        raise ImportError(f"{source} is the source of pystaged, to be installed first: pip install .") from None
    finally:
        sys.path[:] = before


if not util.find_spec("pystaged._core"):
    use_installed()
