"""A raw text in turns: what a turn keeps, and Ctrl-C wherever it hits."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from types import SimpleNamespace
from typing import Any

import pytest

from pystaged import Stage
from pystaged._core import Tokenizer
from pystaged.cli import turns
from pystaged.cli.interrupts import Interrupts, uninterrupted
from pystaged.cli.options import Color, SamplingOptions
from pystaged.cli.raw import Raw
from pystaged.decoding.tree import TreeBuilder
from pystaged.loading import names
from pystaged.result import Piece


def press() -> None:
    """Ctrl-C; a handler that raises does so here."""
    signal.raise_signal(signal.SIGINT)


def burst() -> None:
    """Three presses, each while the one before is being handled; raises KeyboardInterrupt if any of them did."""
    raised = None
    for _ in range(3):
        try:
            press()
        except KeyboardInterrupt as error:
            raised = error
    if raised:
        raise raised


class Engine:
    """Writes the texts it was given, a token a piece, and remembers the prompts.

    Args:
        answers: tokens of each turn.
        places: names of moments, and what happens there: "encode", "stream", "piece" (its number), "close".
    """

    def __init__(self, answers: Sequence[Sequence[int]], places: dict[str, Callable[[], None]] | None = None) -> None:
        self._answers = iter(answers)
        self._places = {} if places is None else places
        self._own = own_tokenizer()
        self.prompts: list[list[int]] = []
        self.tokenizer: Any = SimpleNamespace(token_bytes=self._own.token_bytes)

    def encode(self, text: str, *, add_special: bool) -> Any:
        """As the engine's own."""
        self._at("encode")
        return self._own.encode(text, add_special)

    def stream(self, prompt: Sequence[int], **_: object) -> Stream:
        self._at("stream")
        self.prompts.append(list(prompt))
        return Stream(next(self._answers), self._own, self._at)

    def _at(self, place: str) -> None:
        self._places.get(place, lambda: None)()


class Stream:
    """A stream of one token after the other, with the text that is whole by then."""

    def __init__(self, tokens: Sequence[int], tokenizer: Tokenizer, at: Callable[[str], None]) -> None:
        self._tokens, self._tokenizer, self._at = tokens, tokenizer, at
        stages = {stage.name.lower(): SimpleNamespace(emitted=0) for stage in Stage}
        self.result = SimpleNamespace(
            finish_reason="cancelled",
            tokens=tokens,
            stats=SimpleNamespace(
                new_tokens=len(tokens),
                tokens_per_second=1.0,
                speedup_estimate=0.0,
                tokens_per_step=1.0,
                stages=stages,
                prompt_tokens=1,
                reused_tokens=0,
            ),
        )

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, *_: object) -> None:
        self._at("close")

    def close(self) -> None:
        pass

    def __iter__(self) -> Iterator[Piece]:
        data, written = b"", 0
        for number, token in enumerate(self._tokens):
            self._at(f"piece {number}")
            data += self._tokenizer.token_bytes(token)
            text = data.decode("utf-8", "ignore")
            tree = TreeBuilder(0).build([])
            yield Piece(text[written:], (token,), (Stage.TARGET,), tree, (0,))
            written = len(text)
        self.result.finish_reason = "stop"


@cache
def own_tokenizer() -> Tokenizer:
    return Tokenizer(str(names.resolve("bundled")))


@pytest.fixture
def tokenizer() -> Tokenizer:
    return own_tokenizer()


@pytest.fixture
def interrupts() -> Iterator[Interrupts]:
    with Interrupts() as entered:
        yield entered


def session(engine: Engine, interrupts: Interrupts) -> Raw:
    return Raw(engine, SamplingOptions(), 8, Color.NONE, interrupts, stats=True)  # type: ignore[arg-type]


def text_of(made: Raw, capsys: pytest.CaptureFixture[str]) -> str:
    capsys.readouterr()
    made.take("/text")
    return capsys.readouterr().out.removesuffix("\n")


# ---- What a turn keeps ----


def test_a_cut_inside_a_character(
    tokenizer: Tokenizer, interrupts: Interrupts, capsys: pytest.CaptureFixture[str]
) -> None:
    """The next turn goes on with the tokens there are, and no replacement character."""
    smiley = tokenizer.encode("\U0001f600").tolist()
    assert len(smiley) > 1
    engine = Engine([smiley[:1], smiley[1:]])
    made = session(engine, interrupts)
    made.take("a")
    assert text_of(made, capsys) == "a"
    made.take("")
    assert engine.prompts == [tokenizer.encode("a").tolist(), [*tokenizer.encode("a").tolist(), smiley[0]]]
    assert text_of(made, capsys) == "a\U0001f600"
    made.take("/undo")
    made.take("/undo")
    assert text_of(made, capsys) == ""


def test_a_line_begins_a_line(tokenizer: Tokenizer, interrupts: Interrupts) -> None:
    answers = ["b", "c\n", "d"]
    engine = Engine([tokenizer.encode(answer).tolist() for answer in answers])
    made = session(engine, interrupts)
    for line in ("a", "x", "y"):
        made.take(line)
    said = b"".join(tokenizer.token_bytes(token) for token in engine.prompts[-1])
    assert said == b"ab\nxc\ny"


# ---- Ctrl-C ----


@pytest.mark.parametrize("place", ["encode", "stream", "piece 0", "piece 1", "piece 2", "close"])
def test_a_burst_stops_a_turn_and_loses_nothing(
    tokenizer: Tokenizer, interrupts: Interrupts, capsys: pytest.CaptureFixture[str], place: str
) -> None:
    places: dict[str, Callable[[], None]] = {}
    answer = tokenizer.encode("one two three").tolist()
    made = session(Engine([answer] * 3, places), interrupts)
    made.take("a")
    before = text_of(made, capsys)
    assert before == "aone two three"
    places[place] = burst
    made.take("b")
    shown = capsys.readouterr()
    assert ("stopped" in shown.err) == (place != "close")
    places.clear()
    after = text_of(made, capsys)
    assert after.startswith(before)
    # What was on the screen is in the text.
    assert shown.out.removesuffix("\n") == after.removeprefix(before + "\nb")
    made.take("")
    assert text_of(made, capsys) == after + "one two three"


@pytest.mark.parametrize("name", ["echo", "summary", "print"])
def test_a_burst_beside_a_turn(
    tokenizer: Tokenizer,
    interrupts: Interrupts,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    name: str,
) -> None:
    """While the text is shown, the summary made or printed."""
    made = session(Engine([tokenizer.encode("one two").tolist()] * 2), interrupts)
    made.take("a")
    module = {"echo": turns.typer, "summary": turns, "print": turns.errors}[name]
    honest = getattr(module, name)

    def disturbed(*arguments: Any, **options: Any) -> Any:
        burst()
        return honest(*arguments, **options)

    with monkeypatch.context() as patch:
        patch.setattr(module, name, disturbed)
        made.take("/text")
        # As while the next line is read.
        with contextlib.suppress(KeyboardInterrupt), interrupts.allowed():
            pass
        made.take("")
    assert text_of(made, capsys) == "aone twoone two"


def test_a_press_that_gets_lost_is_seen_at_the_next_piece(
    tokenizer: Tokenizer, interrupts: Interrupts, capsys: pytest.CaptureFixture[str]
) -> None:
    """Python drops what a finalizer raises."""

    def lose() -> None:
        with contextlib.suppress(KeyboardInterrupt):
            press()

    answer = tokenizer.encode("one two three four five").tolist()
    made = session(Engine([answer], {"piece 1": lose}), interrupts)
    made.take("a")
    shown = "".join(tokenizer.token_bytes(token).decode() for token in answer[:2])
    assert text_of(made, capsys) == "a" + shown


def test_presses_outside_sections_wait(interrupts: Interrupts) -> None:
    burst()
    with pytest.raises(KeyboardInterrupt), interrupts.allowed():
        pytest.fail("the section should not have begun")
    with interrupts.allowed():
        pass


def test_one_press_a_section(interrupts: Interrupts) -> None:
    tidied = []

    def section() -> None:
        try:
            press()
        finally:
            burst()
            tidied.append(True)

    with pytest.raises(KeyboardInterrupt), interrupts.allowed():
        section()
    assert tidied


def test_the_handler_is_interrupted(monkeypatch: pytest.MonkeyPatch) -> None:
    honest, presses = Interrupts._press, iter([1, 2])

    def disturbed(self: Interrupts, number: int, frame: Any) -> None:
        if next(presses, 0):
            press()
        honest(self, number, frame)

    monkeypatch.setattr(Interrupts, "_press", disturbed)
    with Interrupts() as entered:
        with pytest.raises(KeyboardInterrupt), entered.allowed():
            press()
        burst()


def test_a_drawing_is_finished(interrupts: Interrupts) -> None:
    drawn = []

    def draw() -> None:
        with uninterrupted():
            burst()
            drawn.append(True)

    with pytest.raises(KeyboardInterrupt), interrupts.allowed():
        draw()
    assert drawn


def test_handlers_are_put_back() -> None:
    before = signal.getsignal(signal.SIGINT)
    with Interrupts():
        assert signal.getsignal(signal.SIGINT) != before
    assert signal.getsignal(signal.SIGINT) == before


def test_ignored_interrupts_stay_ignored() -> None:
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with Interrupts() as inner, inner.allowed():
            burst()
    finally:
        signal.signal(signal.SIGINT, before)
