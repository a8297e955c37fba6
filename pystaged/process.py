"""Python processes of our own: what may crash, or must end at once, runs in one."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any


def start(module: str, *args: str | os.PathLike[str], **popen_options: Any) -> subprocess.Popen[Any]:
    """Call `main()` of a module in a new Python; what it returns is the exit status.

    The child finds modules where this process does, so it gets the same pystaged whatever the current folder holds.

    Args:
        module: full name, such as "pystaged.loading.quantize".
        args: become sys.argv[1:].
        popen_options: as in subprocess.Popen.
    """
    path = [os.path.abspath(folder) for folder in sys.path]  # noqa: PTH100  "" is the current folder
    code = f"import sys; sys.path[:] = {path!r}; sys.argv[0] = {module!r}; from {module} import main; sys.exit(main())"
    return subprocess.Popen([sys.executable, "-c", code, *args], **popen_options)
