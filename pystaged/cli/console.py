"""What the commands share: the console of standard error, and words of their options."""

from __future__ import annotations

from rich.console import Console

errors = Console(stderr=True, highlight=False, soft_wrap=True)


def report(line: str) -> None:
    """Say on standard error what is being done."""
    errors.print(line, style="dim", markup=False)


def draft_name(name: str) -> str | None:
    """The draft an option names; 'none' is None."""
    return None if name == "none" else name
