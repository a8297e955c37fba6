"""Ctrl-C wherever it hits, in a conversation and beside it."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Iterator
from itertools import count
from typing import Any

import pytest

import pystaged
from pystaged import Engine
from pystaged.cli import turns
from pystaged.cli.options import Given
from pystaged.cli.turns import Chat
from pystaged.decoding import scheduler
from pystaged.decoding.readers import Stream
from pystaged.platform import ctrl_c
from pystaged.platform.ctrl_c import Interrupts

GIVEN = {"max_tokens": 8, "stop_loops": False, "temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "seed": 1}


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


def disturb(patch: pytest.MonkeyPatch, owner: Any, name: str, call: int = 0) -> None:
    """A burst at the beginning of a function's call of that number."""
    honest, calls = getattr(owner, name), count()

    def disturbed(*arguments: Any, **options: Any) -> Any:
        if next(calls) == call:
            burst()
        return honest(*arguments, **options)

    patch.setattr(owner, name, disturbed)


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    # One guess a step, so that a turn of eight tokens has at least four pieces, however long passes take.
    with pystaged.load("bundled", policy=pystaged.FixedPolicy(1, 1, 1), report=lambda _: None) as opened:
        yield opened


@pytest.fixture
def interrupts() -> Iterator[Interrupts]:
    with contextlib.suppress(KeyboardInterrupt), Interrupts() as entered:  # one may wait at the end
        yield entered


@pytest.fixture
def made(engine: Engine, interrupts: Interrupts) -> Chat:
    return Chat(engine, Given(GIVEN | {"stats": True}), interrupts)


def text_of(made: Chat, capsys: pytest.CaptureFixture[str]) -> str:
    capsys.readouterr()
    made.take("/text")
    return capsys.readouterr().out.removesuffix("\n")


# ---- A turn ----


@pytest.mark.parametrize(
    ("owner", "name", "call"),
    [(Engine, "stream_chat", 0), (Stream, "__next__", 0), (Stream, "__next__", 2), (Stream, "__exit__", 0)],
)
def test_a_burst_stops_a_turn_and_loses_nothing(
    made: Chat, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, call: int
) -> None:
    monkeypatch.setattr(scheduler, "MOST_UNREAD", 1)  # the text cannot end before its reader stops it
    made.take("a")
    before = text_of(made, capsys)
    assert before.startswith("user: a\n\nassistant: ")
    with monkeypatch.context() as patch:
        disturb(patch, owner, name, call)
        made.take("b")
        shown = capsys.readouterr()
    assert ("stopped" in shown.err) == (name != "__exit__")
    # What was on the screen is in the conversation.
    said = shown.out.removesuffix("\n")
    assert bool(said) == (call > 0 or name == "__exit__")
    assert ("the question is taken back; /retry asks it again" in shown.err) == (not said)
    after = before + (f"\n\nuser: b\n\nassistant: {said}" if said else "")
    assert text_of(made, capsys) == after
    made.take("c")
    assert text_of(made, capsys).startswith(f"{after}\n\nuser: c\n\nassistant: ")


@pytest.mark.parametrize(("owner", "name"), [(turns.typer, "echo"), (turns, "summary"), (turns.errors, "print")])
def test_a_burst_beside_a_turn(
    made: Chat, interrupts: Interrupts, monkeypatch: pytest.MonkeyPatch, owner: Any, name: str
) -> None:
    """While the text is shown, the summary made or printed."""
    made.take("a")
    with monkeypatch.context() as patch:
        disturb(patch, owner, name)
        made.take("/text")
        # As while the next line is read.
        with contextlib.suppress(KeyboardInterrupt), interrupts.allowed():
            pass
        made.take("b")
    assert [message["role"] for message in made.messages] == ["user", "assistant"] * 2
    assert made._last is not None
    assert made._last.finish_reason == "length"


def test_a_press_that_gets_lost_is_seen_at_the_next_check(interrupts: Interrupts) -> None:
    """Python drops what a finalizer raises."""
    with interrupts.allowed():
        with contextlib.suppress(KeyboardInterrupt):
            press()
        with pytest.raises(KeyboardInterrupt):
            interrupts.check()


# ---- Sections ----


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
    with Interrupts() as outer:
        with Interrupts() as entered:
            with pytest.raises(KeyboardInterrupt), entered.allowed():
                press()
            burst()
        assert outer._waiting  # what waits at the end is passed on
        outer._waiting = False


def test_a_drawing_is_finished(interrupts: Interrupts) -> None:
    drawn = []

    def draw() -> None:
        with Interrupts():
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


def test_what_follows_an_interrupt_that_was_handled_is_ignored(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ctrl_c, "_presses", 0)
    ctrl_c.let_tidy_up(1)
    ctrl_c._press(signal.SIGINT, None)  # else KeyboardInterrupt
