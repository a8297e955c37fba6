"""The child process in which a way of decoding runs. One JSON object per line: a setup, then jobs; a reply to each.

A way that crashes takes only this process with it. Run as a module; see host.py for the other end.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
from pathlib import Path
from typing import Any, Protocol, TextIO

if sys.platform == "darwin":
    import resource


class Runner(Protocol):
    """What the module that a setup names has as `Runner`; it is made from the setup."""

    def run(self, job: dict[str, Any]) -> dict[str, Any]:
        """Continue one prompt; the reply is a Measurement's fields (see host.py)."""
        ...

    def close(self) -> None:
        """End what was started."""
        ...


def peak_bytes(pid: int | None = None) -> int:
    """Most memory this process, or another one that still runs, ever had; 0 where the system does not tell."""
    try:
        # Not from getrusage: on Linux a process inherits its parent's peak there.
        status = Path(f"/proc/{pid or 'self'}/status").read_text()
        return 1024 * int(status.partition("VmHWM:")[2].split(maxsplit=1)[0])
    except (OSError, IndexError):
        if sys.platform == "darwin" and pid is None:
            return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return 0


def main() -> None:
    """Serve jobs until standard input ends."""
    # Libraries print where they like; the replies have a channel of their own.
    replies = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    setup = json.loads(sys.stdin.readline())
    runner: Runner | None = None
    try:
        runner = importlib.import_module(setup["runner"]).Runner(setup)
        _reply(replies, {})
        for line in sys.stdin:
            _reply(replies, {"peak_bytes": peak_bytes()} | runner.run(json.loads(line)))
    except Exception as error:
        # Whatever a peer raises is a row of the report, not a traceback.
        _reply(replies, {"error": f"{type(error).__name__}: {error}"})
    finally:
        if runner:
            runner.close()


def _reply(replies: TextIO, reply: dict[str, Any]) -> None:
    replies.write(json.dumps(reply) + "\n")
    replies.flush()


if __name__ == "__main__":
    main()
