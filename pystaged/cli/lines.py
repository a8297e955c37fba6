"""What a user types in a chat: lines, or several at once; earlier ones are kept."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from typing import Any

import typer

from pystaged.cli.console import report
from pystaged.platform.ctrl_c import Interrupts
from pystaged.platform.files import cache_folder

_QUOTES = '"""'
_MOST_KEPT = 1000  # lines


class Lines:
    """Reads what a user types: lines, or several at once."""

    def __init__(self, interrupts: Interrupts) -> None:
        self._interrupts = interrupts
        self._marked: Any = None  # the module readline if it marks pastes
        self._prompt = ""  # of the line that is being read
        self._history: Any = None  # the module readline where lines are kept for later chats
        self._typed: list[str] = []  # in this chat
        self._file = cache_folder() / "history"
        with contextlib.suppress(ImportError):
            import readline  # noqa: PLC0415  gives `input` editing and a history where there is one

            if "libedit" in (readline.__doc__ or ""):
                self._marked = readline
                for sequence, mark in (("200~", "^A"), ("201~", "^B")):
                    readline.parse_and_bind(f'bind -s "^[[{sequence}" "^V{mark}"')
            else:
                readline.parse_and_bind("set enable-bracketed-paste on")  # Python switches it off
            if sys.stdin.isatty() and not os.environ.get("PYSTAGED_NOHISTORY"):
                self._history = readline
                readline.set_history_length(_MOST_KEPT)
                with contextlib.suppress(OSError):
                    readline.read_history_file(self._file)
            if hasattr(signal, "SIGCONT"):  # after Ctrl-Z and fg the prompt would be missing
                typed = readline.get_line_buffer
                signal.signal(signal.SIGCONT, lambda *_: typer.echo(self._prompt and self._prompt + typed(), nl=False))

    def keep(self) -> None:
        """Keep the lines for later chats, in a file of the cache folder that the user alone can read."""
        if self._history:
            with contextlib.suppress(OSError):
                self._file.parent.mkdir(parents=True, exist_ok=True)
                self._file.touch(0o600)
                self._history.clear_history()
                self._history.read_history_file(self._file)  # another chat may have ended meanwhile
                for line in filter(None, self._typed):
                    self._history.add_history(line)
                self._history.write_history_file(self._file)

    def read(self) -> tuple[str, bool] | None:
        """A line, or several that are pasted, that \\ joins or that stand between triple quotes, and whether they are
        quoted; None at the end of input."""
        lines: list[str] = []
        quoted = False
        while True:
            try:
                with self._interrupts.allowed():
                    line = self._input(". " if lines else "> ")
            except (EOFError, KeyboardInterrupt) as end:
                typer.echo()
                if isinstance(end, EOFError) and not lines:
                    return None
                # As in a shell, the typed text is dropped.
                report("the message is dropped" if lines else "/bye or Ctrl-D leaves")
                lines, quoted = [], False
                continue
            begins = not lines and line.lstrip().startswith(_QUOTES)
            if begins and ("\n" not in line or line.rstrip().endswith(_QUOTES)):
                quoted, line = True, line.lstrip()[len(_QUOTES) :]
            if quoted:
                if line.rstrip().endswith(_QUOTES):
                    return "\n".join([*lines, line.rstrip()[: -len(_QUOTES)]]).strip("\n"), True
                lines.append(line)
            elif line.endswith("\\"):
                lines.append(line[:-1])
            else:
                return "\n".join([*lines, line]), False

    def _input(self, prompt: str) -> str:
        self._prompt = prompt
        try:
            self._typed.append(self._marked_lines(prompt) if self._marked else input(prompt))
            return self._typed[-1]
        finally:
            self._prompt = ""

    def _marked_lines(self, prompt: str) -> str:
        """A line; or those of a paste, around which libedit was told to type marks, as one."""
        history, begun = self._marked, self._marked.get_current_history_length()
        typer.echo("\x1b[?2004h", nl=False)  # the terminal tells where a paste begins and ends
        try:
            found = input(prompt)
            while found.count("\x01") > found.count("\x02"):
                found += "\n" + input()
        finally:
            typer.echo("\x1b[?2004l", nl=False)
        plain = found.replace("\x01", "").replace("\x02", "")
        if plain != found:
            while (length := history.get_current_history_length()) > begun:
                history.remove_history_item(length - 1)
            history.add_history(plain)
        return plain
