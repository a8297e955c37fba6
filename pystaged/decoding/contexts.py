"""Contexts: lent to texts, and kept afterwards for texts that begin alike, within a bound of memory."""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from enum import Enum
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from pystaged._core import DeviceError, Session
from pystaged.decoding.drafter import common_prefix
from pystaged.decoding.loop import Decoder
from pystaged.process import ProcessLock

_MOST_AT_REST = 64  # all are looked through for each text, and each has the addresses of a full context
_WORTH_WAITING = 64  # tokens that another text is just reading, from which on copying them later is faster
_LEAST_KEPT = 32  # tokens; fewer are soon read again
SPARE_CELLS = 64  # reckoned for each session besides its tokens: of the tree in hand, and the rest of memory pages
_SHARE = 4  # one part in so many of the memory that is free is for contexts
_ON_DEVICES = 8  # full contexts, by default
_OUT_OF_REACH = (DeviceError, ValueError, RuntimeError)  # a session's that is lost, closed, or in the middle of a call


class Wait(Enum):
    """What a text waits for before it is lent a context."""

    MEMORY = "memory that other texts have"
    PROMPT = "a text that is just reading what this one would read, too"


class _Held(NamedTuple):
    """What a context at rest holds: the target's tokens, int32[n], and bytes in all."""

    tokens: NDArray[np.int32]
    num_bytes: int


class _Loan(NamedTuple):
    """A context that is lent, which counts for as long as anybody holds it; the prompt that it is lent for, int32[n],
    and the bytes that prompt and text may come to fill."""

    context: weakref.ref[Decoder]
    prompt: NDArray[np.int32]
    num_bytes: int


class _Cells(NamedTuple):
    """What a session takes: `whole` on a device, which gives it the memory of all its positions at once; the others as
    Session has them."""

    cell_bytes: int
    windowed_cell_bytes: int
    most_windowed: int
    n_ctx: int
    whole: bool

    @classmethod
    def of(cls, session: Session, whole: bool) -> _Cells:
        windowed = session.windowed_cell_bytes
        return cls(session.cell_bytes, windowed, session.most_windowed, session.n_ctx, whole)

    @property
    def spare(self) -> int:
        return SPARE_CELLS * self.cell_bytes

    def needed(self, tokens: int) -> int:
        """Bytes for a text of so many tokens."""
        tokens = self.n_ctx if self.whole else min(tokens, self.n_ctx)
        behind = max(0, tokens - self.most_windowed) * self.windowed_cell_bytes
        return self.spare + self.cell_bytes * tokens - behind

    def held(self, session: Session) -> int:
        """Bytes that a session has."""
        return self.needed(0) if self.whole else self.spare + session.num_bytes


class ContextPool:
    """Lends contexts, each to one text at a time, and keeps what they held for texts that begin alike.

    The keys and values of all contexts never take more than `memory` bytes: of a text, what its prompt and all tokens
    that it may write need, and of a context at rest, what it holds; layers with a window hold less than all tokens. On
    devices, where a context takes its memory at once, it is all positions. Only a text that is larger than that by
    itself is lent a context nevertheless, when no other one is. Contexts at rest make room for texts, the least
    recently used first, their ends before their beginnings.

    Calls from several threads wait for each other.

    Args:
        make: makes a context that begins with as many tokens of another one, and believes what that has learnt; the
            first is made at once. Raises DeviceError or MemoryError where there is no room for one.
        memory: bytes; None for a quarter of `free`, but enough for one full context; on devices, enough for 8.
        free: bytes that are free on this machine.
        on_device: of each session of a context, the target's first, whether it is on a device.
    """

    def __init__(
        self,
        make: Callable[[Decoder | None, int], Decoder],
        memory: int | None = None,
        *,
        free: int = 0,
        on_device: Sequence[bool] = (False, False),
    ) -> None:
        self._make = make
        self._lock = ProcessLock(threading.RLock)  # the collector may close an engine in the middle of a call
        first = make(None, 0)
        self._cells = [_Cells.of(session, whole) for session, whole in zip(first.sessions, on_device, strict=False)]
        self.full_bytes = self._needed(first.target.n_ctx)
        usual = _ON_DEVICES * self.full_bytes if any(on_device) else max(free // _SHARE, self.full_bytes)
        self.memory = memory or usual
        self._n_ctx = first.target.n_ctx
        self._at_rest = {first: self._held(first)}  # least recently used first
        self._lent: list[_Loan] = []
        self._closed = False
        self._process = os.getpid()

    def check_open(self) -> None:
        """Raises ValueError: the pool is closed."""
        if self._closed:
            raise ValueError("the engine is closed")

    @property
    def closed(self) -> bool:
        return self._closed

    @property
    def n_ctx(self) -> int:
        """Positions of each context."""
        return self._n_ctx

    @property
    def num_bytes(self) -> int:
        """Bytes that texts may come to fill, and contexts at rest hold."""
        return sum(loan.num_bytes for loan in self._lent) + sum(held.num_bytes for held in self._at_rest.values())

    def take(
        self, prompt: NDArray[np.int32], max_tokens: int, *, must: bool = False, reuse: bool = True
    ) -> Decoder | Wait:
        """A context for a prompt, int32[n], and as many tokens after it, or what to wait for: ask again later.

        It begins with as much of the prompt as any context can go back to, lent ones included, whose texts must be
        between steps. One at rest is lent itself where the rest of what it holds is little or has no room, otherwise a
        copy.

        Args:
            must: at once, and beyond the bound if there is no room within.
            reuse: begin with what other contexts hold; False for an empty one.

        Raises:
            ValueError: the pool is closed.
            DeviceError: a device failed, or has no room.
        """
        with self._lock.here():
            self.check_open()
            self._tidy()
            need = self._needed(len(prompt) + max_tokens)
            if self._lent and not must and sum(loan.num_bytes for loan in self._lent) + need > self.memory:
                return Wait.MEMORY
            source, length = self._most_like(prompt[: -1 if reuse else 0])
            if reuse and not must and self._is_being_read(prompt, length):
                return Wait.PROMPT
            held = self._at_rest.get(source) if source else None
            if source and held and _survives(len(held.tokens), length):
                self._wake(source, length)
                self._make_room(need)
            else:
                self._make_room(need, source if length else None)
                if source in self._at_rest and self.num_bytes + need > self.memory:
                    self._wake(source, length)
                else:
                    source = self._begin(source, length)
            self._lent.append(_Loan(weakref.ref(source), prompt, need))
            return source

    def give_back(self, context: Decoder) -> None:
        """End a loan, and let the context rest; free it once the pool is closed."""
        with self._lock.here():
            self._look_again()
            self._lent = [loan for loan in self._lent if loan.context() is not context]
            self._rest(context)
            self._tidy()

    def forget(self) -> None:
        """Free all contexts at rest: the device that they are on is lost, and with it those that are lent."""
        with self._lock.here():
            while self._at_rest:
                self._at_rest.popitem()[0].close()
            self._lent.clear()

    def close(self) -> None:
        """Lend no more, and free each context when it is at rest."""
        self._closed = True
        self.forget()

    def _rest(self, context: Decoder) -> None:
        """Let a context rest, unless another one at rest can go back to what it holds."""
        try:
            held = self._held(context)
        except (DeviceError, ValueError):  # its device is lost, or it is closed
            context.close()
            return
        except RuntimeError:  # fork() came in the middle of a call, in which it stays
            return
        if self._closed:
            context.close()
            return
        for other, (tokens, _) in list(self._at_rest.items()):
            if _reaches(context, held.tokens, tokens):
                self._free(other)
        whole = self._covers(held.tokens)
        if whole is None:
            self._at_rest[context] = held
        else:
            self._at_rest[whole] = self._at_rest.pop(whole)
            context.close()

    def _tidy(self) -> None:
        """Keep within the bounds, without loans that nobody has any more."""
        self._look_again()
        self._lent = [loan for loan in self._lent if loan.context() is not None]
        for context in list(self._at_rest)[:-_MOST_AT_REST]:
            self._free(context)
        self._make_room(0)

    def _look_again(self) -> None:
        """In a child of fork(), which may have come in the middle of anything: drop contexts that are in a call."""
        if self._process == os.getpid():
            return
        self._process = os.getpid()
        for context in list(self._at_rest):
            try:
                self._at_rest[context] = self._held(context)
            except RuntimeError:
                del self._at_rest[context]

    def _make_room(self, need: int, spared: Decoder | None = None) -> None:
        """Cut and free contexts at rest until so many bytes more are within the bound, or there are none."""
        for context in list(self._at_rest):
            # What a cut frees of layers with a window is known afterwards.
            while context is not spared and context in self._at_rest:
                excess = self.num_bytes + need - self.memory
                if excess <= 0:
                    return
                self._shrink(context, excess)

    def _shrink(self, context: Decoder, excess: int) -> None:
        """Cut about so many bytes from a context at rest, perhaps less, or free it where nothing worth keeping would be
        left."""
        tokens, cells = self._at_rest[context].tokens, self._cells[0]
        length = 0 if cells.whole else max(0, len(tokens) - -(-excess // cells.cell_bytes))
        kept = tokens[: context.target.reachable(length)]
        if len(kept) < _LEAST_KEPT or self._covers(kept, but=context):
            self._free(context)
            return
        # First, because a cut may be broken off: a device fails, or Ctrl-C.
        self._at_rest[context] = self._at_rest[context]._replace(tokens=kept)
        _cut(context, len(kept))
        self._at_rest[context] = self._held(context)

    def _wake(self, context: Decoder, length: int) -> None:
        """Take a context from rest with the first tokens of what it holds."""
        del self._at_rest[context]
        _cut(context, length)

    def _begin(self, source: Decoder | None, length: int) -> Decoder:
        """A context that begins like another one."""
        try:
            return self._make(source, length)
        except (DeviceError, MemoryError):
            if not self._at_rest:
                raise
        # A device may have less room than the bound.
        for context in list(self._at_rest):
            self._free(context)
        return self._make(source, 0)

    def _most_like(self, prompt: NDArray[np.int32]) -> tuple[Decoder | None, int]:
        """The context that can go back to the longest common beginning, and its length: of several one at rest, one
        that survives, the one used last."""
        best: Decoder | None = None
        most = (-1, False, False)
        for context, held, length, rests in self._contents(prompt):
            rank = (length, rests, _survives(held, length))
            if rank >= most:
                best, most = context, rank
        return best, max(most[0], 0)

    def _is_being_read(self, prompt: NDArray[np.int32], length: int) -> bool:
        """Whether a text is about to hold more of a prompt than so many tokens, so that copying will be faster."""
        for loan in self._lent:
            context = loan.context()
            common = common_prefix(loan.prompt[:-1], prompt[:-1])
            if context is not None and common >= length + _WORTH_WAITING:
                with suppress(*_OUT_OF_REACH):
                    # What it has read already, it may have given up since.
                    if common_prefix(context.target.tokens, prompt) >= common:
                        continue
                return True
        return False

    def _contents(self, prompt: NDArray[np.int32]) -> Iterator[tuple[Decoder, int, int, bool]]:
        """All contexts: how many tokens each holds, to how many of a prompt's it can go back, and whether it rests."""
        for loan in self._lent:
            context = loan.context()
            if context is not None:
                try:
                    tokens = context.target.tokens
                    length = context.target.reachable(common_prefix(tokens, prompt))
                except _OUT_OF_REACH:
                    continue
                yield context, len(tokens), length, False
        for context, (tokens, _) in list(self._at_rest.items()):
            yield context, len(tokens), context.target.reachable(common_prefix(tokens, prompt)), True

    def _covers(self, tokens: NDArray[np.int32], but: Decoder | None = None) -> Decoder | None:
        """A context at rest that can go back to just these tokens."""
        found = (
            other for other, held in self._at_rest.items() if other is not but and _reaches(other, held.tokens, tokens)
        )
        return next(found, None)

    def _free(self, context: Decoder) -> None:
        if self._at_rest.pop(context, None):
            context.close()

    def _needed(self, tokens: int) -> int:
        """Bytes of a context with so many tokens."""
        return sum(cells.needed(tokens) for cells in self._cells)

    def _held(self, context: Decoder) -> _Held:
        sessions = context.sessions
        tokens = [session.tokens for session in sessions]  # of all, because none may be in the middle of a call
        num_bytes = sum(cells.held(session) for cells, session in zip(self._cells, sessions, strict=True))
        return _Held(tokens[0], num_bytes)


def _cut(context: Decoder, length: int) -> None:
    """Keep the first tokens of a context, in its draft too, which may have read less of the text."""
    for session in context.sessions:
        session.rewind(min(len(session.tokens), length))


def _reaches(context: Decoder, held: NDArray[np.int32], beginning: NDArray[np.int32]) -> bool:
    """Whether a context that holds some tokens can go back to just these."""
    length = len(beginning)
    return np.array_equal(beginning, held[:length]) and context.target.reachable(length) == length


def _survives(held: int, length: int) -> bool:
    """Whether nearly all tokens of a context are among the first `length`."""
    return held - length <= max(16, held // 16)
