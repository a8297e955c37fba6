"""What the command line looks like in a terminal and in a pipe."""

from __future__ import annotations

import contextlib
import io
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
from rich.console import Console
from rich.style import Style
from rich.text import Text

import pystaged
from pystaged import Stage
from pystaged._core import Tokenizer
from pystaged.cli import console
from pystaged.cli.painting import Wrap
from pystaged.decoding.cost import PassCost
from pystaged.loading import costs, names
from pystaged.stats import StageSpans

if sys.platform == "win32":
    pytest.skip("there are no pseudo-terminals", allow_module_level=True)

import pyte
from support.terminal import Terminal

PROMPT = "def fibonacci(n):"
GENERATE = ("generate", PROMPT, "--model", "bundled", "--max-tokens", "40")
PROGRAM = [sys.executable, "-m", "pystaged"]
SLOWLY = ("--threads", "1")  # beside the slowest kernel, so that there is text left to stop
SECONDS = {"target.Q8_0.gguf": {1: 0.5, 32: 0.51}, "draft.Q8_0.gguf": {1: 1e-4, 32: 2e-4}}
# pyte's names; brown is ANSI yellow.
COLORS = {"target": "default", "draft": "green", "n-gram": "brown", "confirmed": "magenta"}


def environment(**changes: str) -> dict[str, str]:
    dropped = ("NO_COLOR", "FORCE_COLOR", "COLUMNS", "LINES", "COLORTERM", "TTY_COMPATIBLE")
    usual = {key: value for key, value in os.environ.items() if key not in dropped}
    return usual | {"PYTHONUTF8": "1", "TERM": "xterm-256color"} | changes


def terminal(*arguments: str, columns: int = 80, lines: int = 24, **changes: str) -> Terminal:
    return Terminal([*PROGRAM, *arguments], environment(**changes), columns=columns, lines=lines)


def piped(*arguments: str, **changes: str) -> subprocess.CompletedProcess[str]:
    options: Any = {"stdin": subprocess.DEVNULL, "capture_output": True, "env": environment(**changes), "timeout": 600}
    return subprocess.run([*PROGRAM, *arguments], encoding="utf-8", check=False, **options)


@pytest.fixture(scope="module")
def result() -> pystaged.GenerationResult:
    return pystaged.generate(PROMPT, model="bundled", max_tokens=40)


@pytest.fixture(scope="module")
def long_text() -> str:
    return pystaged.generate(PROMPT, model="bundled", max_tokens=900).text


@pytest.fixture(scope="module")
def known() -> dict[str, PassCost]:
    """What the pair's passes cost for drafting to pay however busy the machine is, by keys of the user's cache."""
    keys, load = set[str](), costs.kept_cost

    def told(key: str) -> PassCost | None:
        keys.add(key)
        return load(key)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(costs, "kept_cost", told)
        with pystaged.load("bundled") as engine:
            engine.generate(PROMPT, max_tokens=8)
    found = {}
    for each in keys:
        *machine, kernel, threads, kv, file = each.split("|")
        for seconds in (SECONDS[name] for name in SECONDS if name in file):
            for runs in ((kernel, threads), ("scalar", "1")):  # and of tests that run SLOWLY
                key = "|".join([*machine, *runs, kv, file])
                found[key] = PassCost(seconds, dict.fromkeys(seconds, 0.0))
    assert len(found) >= len(SECONDS)
    return found


@pytest.fixture(autouse=True)
def _drafting_pays(known: dict[str, PassCost]) -> None:
    """Whatever the test before has learnt."""
    for key, cost in known.items():
        costs.keep_cost(key, cost)


# ---- Colours ----


@pytest.mark.slow
def test_each_token_has_its_stages_color(result: pystaged.GenerationResult) -> None:
    window = terminal(*GENERATE, "--color", "stages", columns=200, lines=60)
    assert window.finish() == 0
    lines = result.text.split("\n")
    assert window.shown[: len(lines)] == [line.rstrip() for line in lines]
    # The stages of this very run cannot be known, but its last line says them.
    said = re.search(r"target \d+(, [a-z-]+ \d+)+", " ".join(window.shown))
    assert said
    counts = {name: int(count) for name, count in re.findall(r"([\w-]+) (\d+)", said[0])}
    assert sum(counts.values()) == 40
    seen = {window.color(y, x) for y, line in enumerate(lines) for x, each in enumerate(line) if not each.isspace()}
    assert seen <= set(COLORS.values())
    assert "default" in seen
    assert len(seen) > 1
    painted = len(re.findall(rb"\x1b\[3[235]m", window.output.partition(b" tokens, ")[0]))
    # Line breaks are not painted.
    assert 0 < painted <= 40 - counts["target"]


@pytest.mark.slow
def test_no_color_is_respected(result: pystaged.GenerationResult) -> None:
    window = terminal(*GENERATE, "--color", "stages", NO_COLOR="1")
    assert window.finish() == 0
    assert not re.search(rb"\x1b\[[0-9;]*3\dm", window.output)
    assert result.text.rstrip().encode() in window.output.replace(b"\r\n", b"\n")


@pytest.mark.slow
@pytest.mark.parametrize("extra", [["--color", "stages"], ["--color", "stages", "--show-tree"], []], ids=str)
def test_a_pipe_gets_the_text_alone(result: pystaged.GenerationResult, extra: list[str]) -> None:
    done = piped(*GENERATE, *extra)
    assert (done.returncode, done.stdout) == (0, result.text + "\n")
    assert "\x1b" not in done.stderr
    assert re.search(r"40 tokens, [\d.]+ per second( \(about [\d.]+x plain\))?, [\d.]+ per step", done.stderr)
    assert ("\u2514" in done.stderr) == ("--show-tree" in extra)


def test_text_that_lags_keeps_its_stages() -> None:
    """A stop string may hold text back, and a character may be spread over tokens."""
    tokenizer = Tokenizer(str(names.resolve("bundled")))
    tokens = tokenizer.encode("ab \U0001f600c").tolist()
    words = [tokenizer.token_bytes(token) for token in tokens]
    assert b"".join(words) == "ab \U0001f600c".encode()
    stages = [Stage(i % 3) for i in range(len(tokens))]
    spans = StageSpans()
    found = [*spans.split("a", words[:-1], stages[:-1]), *spans.split("b \U0001f600c", words[-1:], stages[-1:])]
    assert "".join(text for text, _ in found) == "ab \U0001f600c"
    assert found[0] == ("a", stages[0])
    assert found[1][1] == stages[0]
    assert found[-1] == ("c", stages[-1])
    # The smiley is whole with the last of its bytes.
    last = max(i for i, word in enumerate(words) if any(byte >= 0x80 for byte in word))
    assert [stage for text, stage in found if "\U0001f600" in text] == [stages[last]]


# ---- Lines ----

TEXTS = [
    "one two three four",
    "  indented   twice\n\tand by a tab",
    "averylongwordthatfitsnoline and more",
    "\u4e00\u4e8c\u4e09\u56db\u4e94\u516d\u4e03\u516b\u4e5d\u5341\u767e\u5343 and \u4e00",
    "exactly ten. and",
    "0123456789 0123456789\n",
]


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("size", [1, 3, 100])
def test_lines_break_between_words(text: str, size: int) -> None:
    """However the text comes: no line is too long, no word is broken that fits, and none is lost."""
    columns = 10
    breaking = Wrap(lambda: columns)
    pieces = [text[i : i + size] for i in range(0, len(text), size)]
    shown = "".join(part for piece in pieces for part, _ in breaking.feed(piece))
    shown += "".join(part for part, _ in breaking.rest())
    assert shown.split() == text.split() or not text.isascii() or columns < max(map(len, text.split()))
    assert "".join(shown.split()) == "".join(text.split())
    screen = pyte.Screen(columns, 20)
    pyte.Stream(screen).feed(shown.replace("\n", "\r\n"))
    lines = [line.rstrip() for line in screen.display]
    assert not any(line.startswith(" ") for line in lines[1:])
    words = [word for word in text.split() if len(word) <= columns and word.isascii()]
    assert all(any(word in line for line in lines) for word in words)


def test_a_word_of_two_colors_is_one() -> None:
    green, none = Style(color="green"), None
    breaking = Wrap(lambda: 8)
    given = [("abc de", none), ("fgh", green), (" i", none)]
    spans = [each for text, style in given for each in breaking.feed(text, style)] + list(breaking.rest())
    assert spans == [("abc", none), (" ", none), ("\n", none), ("de", none), ("fgh", green), (" ", none), ("i", none)]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("extra", "lines"),
    [(["--chat"], ["spoken words keep", "their whole letters"]), ([], ["spoken words keep th", "eir whole letters"])],
    ids=["answer", "text"],
)
def test_answers_break_between_words_and_texts_do_not(extra: list[str], lines: list[str]) -> None:
    text = "spoken words keep their whole letters"
    arguments = ("generate", "Which?", "--model", "bundled", "--regex", text, *extra)
    window = terminal(*arguments, columns=20, lines=40)
    assert window.finish() == 0
    begin = window.shown.index(lines[0])
    assert window.shown[begin : begin + len(lines)] == lines
    assert piped(*arguments, COLUMNS="20").stdout == text + "\n"


@pytest.mark.slow
def test_a_conversation_says_what_is_in_force_and_leaves_a_clean_line() -> None:
    window = terminal("chat", "bundled", "--temperature", "0.5", "--max-tokens", "40", columns=40, lines=60)
    window.wait_for(b"> ")
    shown = " ".join(window.shown)
    assert b"loading the model ..." in window.output
    assert "loading" not in shown
    assert "bundled: gpt2, 30 MB;" in shown
    assert "temperature 0.5, top-k 40, top-p 0.95, min-p 0.05; 40 tokens at most; /help for help" in shown
    window.type(b"/set temperature 0\n")
    window.wait_for(b"temperature 0: always")
    window.type(b"/clear\n")
    window.wait_for(b"is forgotten")
    # An end of input that comes before readline begins is lost.
    window.wait_for(b"> ", start=window.output.index(b"is forgotten"))
    window.type(b"\x04")
    assert window.finish() == 0
    assert window.output.endswith(b"\r\n")
    text = [line for line in window.shown if line]
    assert text[-1] == ">"


# ---- Long prompts ----

BAR = "\N{BOX DRAWINGS HEAVY HORIZONTAL}"


@pytest.mark.parametrize(("is_terminal", "seconds"), [(True, 0.0), (True, 1e9), (False, 0.0)])
def test_a_bar_while_a_long_prompt_is_read(monkeypatch: pytest.MonkeyPatch, is_terminal: bool, seconds: float) -> None:
    out = io.StringIO()
    without_colors = Console(file=out, force_terminal=is_terminal, width=100, color_system=None)
    monkeypatch.setattr(console, "errors", without_colors)
    monkeypatch.setattr(console, "_LONG", seconds)
    with console.reading_bar() as progress:
        for done in (0, 256, 512, 599):
            progress(done, 599)
        shown = out.getvalue()
    assert out.getvalue() == shown  # it is gone before the text begins
    if is_terminal and seconds == 0:
        assert f"{34 * BAR}  " in shown  # of 40
        assert "512 of 599 tokens" in shown
        assert "per second" in shown
    else:
        assert shown == ""


def test_a_bar_of_what_nobody_knows_how_long_it_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    out = io.StringIO()
    monkeypatch.setattr(console, "errors", Console(file=out, force_terminal=True, width=100, no_color=True))
    monkeypatch.setattr(console, "_LONG", 0.0)
    with console.late_bar("{task.fields[doing]}", "{task.elapsed:.0f} s", doing="") as (show, _):
        show(90.0, None, doing="measuring")
        assert "measuring" in out.getvalue()
        assert " 0 s" in out.getvalue()
        assert 20 * BAR not in out.getvalue()  # a part of it moves
        show(90.0, 100.0)
    assert f"{36 * BAR}" in out.getvalue()  # of 40


@pytest.mark.parametrize(("is_terminal", "lines"), [(True, ["spoken words keep", "their letters"]), (False, None)])
def test_a_line_breaks_between_words(monkeypatch: pytest.MonkeyPatch, is_terminal: bool, lines: Any) -> None:
    out, text = io.StringIO(), "spoken words keep their letters"
    monkeypatch.setattr(out, "isatty", lambda: is_terminal)
    monkeypatch.setattr(sys, "stdout", out)
    for name, value in environment(COLUMNS="20").items():
        monkeypatch.setenv(name, value)
    console.print_table(Text(text, "dim"))
    shown = re.sub(r"\x1b\[[0-9;]*m", "", out.getvalue()).splitlines()
    assert [line.rstrip() for line in shown] == (lines or [text])


# ---- Trees ----


@pytest.mark.slow
@pytest.mark.parametrize("columns", [80, 24])
def test_trees_and_text_stay(result: pystaged.GenerationResult, columns: int) -> None:
    window = terminal(*GENERATE, "--show-tree", columns=columns, lines=60)
    assert window.finish() == 0
    shown, wrapped = window.shown, list(wrap(result.text, columns))
    begin = next(i for i in range(len(shown)) if shown[i : i + len(wrapped)] == wrapped)
    assert any("\u2514\u2500\u2500" in line for line in shown[:begin])
    assert not window.screen.cursor.hidden


def wrap(text: str, columns: int) -> Iterator[str]:
    for line in text.split("\n"):
        for start in range(0, max(1, len(line)), columns):
            yield line[start : start + columns].rstrip()


@pytest.mark.slow
def test_a_window_that_changes_its_size() -> None:
    window = terminal("generate", PROMPT, "--model", "bundled", "--max-tokens", "200", "--show-tree", lines=30)
    window.wait_for("\u2514".encode())
    window.resize(30, 12)
    window.wait_for(b" ")
    window.resize(70, 20)
    assert window.finish() == 0
    assert not window.screen.cursor.hidden
    assert any("200 tokens" in line for line in window.shown)


@pytest.mark.slow
@pytest.mark.parametrize(("extra", "presses"), [([], 1), (["--color", "stages"], 3), (["--show-tree"], 3)], ids=str)
def test_ctrl_c_leaves_cursor_and_text(long_text: str, extra: list[str], presses: int) -> None:
    arguments = ("generate", PROMPT, "--model", "bundled", "--max-tokens", "900", *extra)
    window = terminal(*arguments, *SLOWLY, lines=200, columns=300, PYSTAGED_KERNEL="scalar")
    # Stops in the middle: the first line of the text is there, the last is not.
    window.wait_for(long_text.split("\n")[1].strip().split()[-1].encode())
    window.type(b"\x03" * presses)
    assert window.finish() == 130
    assert not window.screen.cursor.hidden
    # The terminal itself shows ^C.
    shown = "\n".join(window.shown).replace("^C", "").rstrip()
    assert "Traceback" not in shown
    text, said = shown.rsplit("\n", 1)
    assert said == "interrupted"
    written = text.rstrip().split("\n")
    lines = [line.rstrip() for line in long_text.split("\n")]
    # Trees stay above the text.
    written = written[max(i for i in range(len(written)) if written[i : i + 2] == lines[:2]) :]
    assert written[:-1] == lines[: len(written) - 1]
    assert lines[len(written) - 1].startswith(written[-1])


# ---- Sessions ----


def type_until(window: Terminal, keys: bytes, words: bytes) -> None:
    """Type keys, again and again, until the program answers with these bytes: readline sleeps through a Ctrl-C that
    comes while it begins, and one that comes late drops the line being typed.
    """
    before = len(window.output)
    for _ in range(200):
        window.type(keys)
        with contextlib.suppress(AssertionError):
            window.wait_for(words, 3.0, start=before)
            return
    raise AssertionError(window.output)


@pytest.mark.slow
def test_bursts_of_ctrl_c_do_not_end_a_session() -> None:
    options = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "seed": 1}
    with pystaged.load("bundled", report=lambda _: None) as engine:
        answer = engine.chat([{"role": "user", "content": PROMPT}], max_tokens=20, **options).text
    begin = answer.split()[0].encode()
    sampling = [word for name, value in options.items() for word in (f"--{name.replace('_', '-')}", str(value))]
    window = terminal("chat", "bundled", *sampling, "--no-stop-loops", *SLOWLY, lines=100, PYSTAGED_KERNEL="scalar")
    window.wait_for(b"> ")
    window.type(PROMPT.encode() + b"\n")
    window.wait_for(begin)
    window.type(b"\x03\x03\x03")
    window.wait_for(b"stopped")
    for _ in range(3):
        type_until(window, b"\x03\x03\x03", b"/bye or Ctrl-D leaves")
    # What was on the screen when it stopped is in the conversation.
    type_until(window, b"/text\n", b"assistant: " + begin)
    window.type(b"/quit\n")
    assert window.finish() == 0
