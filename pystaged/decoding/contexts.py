"""A pool of contexts, which keeps the KV caches of ended sequences for prompts with the same prefix."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from enum import Enum
from heapq import nlargest
from pathlib import Path
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from pystaged._core import DeviceError, Session
from pystaged.decoding.context import Context
from pystaged.decoding.drafter import common_prefix

_MOST_AT_REST = 64  # each new sequence searches all of them, and each reserves the address range of a full context
_WORTH_WAITING = 64  # tokens whose prefill takes longer than to wait for another sequence's and copy it
_SHARE = 16  # a text on disk is read if it saves the prefill of at least its tokens divided by this
_LEAST_KEPT = 32  # tokens; prefill of fewer is quick
SPARE_CELLS = 64  # positions counted per session besides its tokens, for the current tree and partly filled pages
FREE_SHARE = 4  # contexts get the free memory divided by this
_KEPT_SHARE = 16  # states kept of a text may take the memory of contexts divided by this
_MOST_KEPT = 8  # states kept of a text, however small they are
# States are kept so many tokens before the end of a prompt: the next prompt may differ in the last tokens, which begin
# an answer, or in the question at its end.
_BEFORE_END = (16, 256)
_ON_DEVICES = 8  # full contexts, by default
_OUT_OF_REACH = (DeviceError, ValueError, RuntimeError)  # errors of a session that is lost, closed, or in a call


class Wait(Enum):
    """Reason why a sequence must wait for a context."""

    MEMORY = "memory that other sequences hold"
    PROMPT = "another sequence's prefill of the same tokens"


class Prompts(Protocol):
    """Ended texts that are kept on disk; see KeptPrompts."""

    def find(self, prompt: NDArray[np.int32], n_ctx: int) -> tuple[Path, NDArray[np.int32]] | None: ...
    def load(self, path: Path, sessions: Sequence[Session]) -> bool: ...
    def keep(self, sessions: Sequence[Session], *, last: bool = False) -> None: ...


class _Held(NamedTuple):
    """Contents of a context at rest: the target's tokens, int32[n], and bytes of all sessions."""

    tokens: NDArray[np.int32]
    num_bytes: int


class _Loan(NamedTuple):
    """A lent context, referred to weakly so that the loan ends with it; its prompt, int32[n], and the most bytes that
    the sequence can fill. partings: after how many tokens other texts are known to differ from the prompt."""

    context: weakref.ref[Context]
    prompt: NDArray[np.int32]
    num_bytes: int
    partings: set[int]


class _Cells:
    """Memory of sessions like this one. whole: whether all positions are allocated at once, as on devices. num_kept:
    states of recurrent layers that are kept of a text."""

    def __init__(self, session: Session, whole: bool, num_kept: int) -> None:
        self.cell_bytes, self.whole, self._n_ctx = session.cell_bytes, whole, session.n_ctx
        self._windowed_bytes, self._most_windowed = session.windowed_cell_bytes, session.most_windowed
        self._state_bytes = session.state_bytes + num_kept * session.kept_state_bytes
        self._spare = SPARE_CELLS * session.cell_bytes

    def needed(self, tokens: int) -> int:
        """Bytes for a sequence of this many tokens."""
        tokens = self._n_ctx if self.whole else min(tokens, self._n_ctx)
        behind = max(0, tokens - self._most_windowed) * self._windowed_bytes
        return self._spare + self._state_bytes + self.cell_bytes * tokens - behind

    def held(self, session: Session) -> int:
        """Bytes that a session holds."""
        return self.needed(0) if self.whole else self._spare + session.num_bytes


class ContextPool:
    """Lends each context to one sequence at a time and keeps its KV cache for prompts with the same prefix.

    The KV caches of all contexts take at most `memory` bytes. A sequence counts with its prompt and max_tokens, a
    context at rest with its contents; layers with a sliding window hold fewer than all tokens, and recurrent layers
    states of a fixed size. On devices a context counts with all its positions, which are allocated at once. A single
    sequence may exceed the bound if no other context is lent. Contexts at rest are cut to make room, the least recently
    used first, each from its end.

    A recurrent layer can only go back to states that it has kept. They are kept shortly before the end of each prompt,
    where a prompt turned out to differ from another one, and at the last user turn; as many as a share of `memory`
    holds, at least one.

    Thread-safe: calls are serialized.

    Args:
        make: copies the first tokens and the learnt state of a context, or makes an empty one for None; the constructor
            calls it once. Raises DeviceError or MemoryError if there is no room.
        memory: bytes; None for a quarter of `free`, but enough for one full context; on devices, enough for 8.
        free: free bytes of this machine's memory.
        on_device: for each session of a context, the target's first, whether it is on a device.

    Attributes:
        prompts: keeps ended texts on disk; None for none.
    """

    def __init__(
        self,
        make: Callable[[Context | None, int], Context],
        memory: int | None = None,
        *,
        free: int = 0,
        on_device: Sequence[bool] = (False, False),
    ) -> None:
        self._make = make
        self.prompts: Prompts | None = None
        self._lock = threading.RLock()  # the garbage collector may close an engine during a call
        first = make(None, 0)
        kept_bytes = sum(session.kept_state_bytes for session in first.sessions)
        kept_room = (memory or free // FREE_SHARE) // _KEPT_SHARE
        self._num_kept = min(_MOST_KEPT, max(1, kept_room // kept_bytes)) if kept_bytes else 0
        self._cells = [
            _Cells(session, whole, self._num_kept) for session, whole in zip(first.sessions, on_device, strict=False)
        ]
        self.full_bytes = self._needed(first.target.n_ctx)
        usual = _ON_DEVICES * self.full_bytes if any(on_device) else max(free // FREE_SHARE, self.full_bytes)
        self.memory = memory or usual
        self.n_ctx = first.target.n_ctx  # positions of each context
        self._at_rest = {first: self._held(first)}  # least recently used first
        self._lent: list[_Loan] = []
        # For each context, the number of tokens after which recurrent layers keep a state for the next user turn: at
        # that turn a template may drop the reasoning after it. Prompts that extend the whole text, as after tool calls,
        # leave it unchanged.
        self._anchors = weakref.WeakKeyDictionary[Context, int]()
        self.closed = False

    def check_open(self) -> None:
        """Raise ValueError if the pool is closed."""
        if self.closed:
            raise ValueError("the engine is closed")

    @property
    def num_bytes(self) -> int:
        """Most bytes that the running sequences can fill, plus the bytes of contexts at rest."""
        return sum(loan.num_bytes for loan in self._lent) + sum(held.num_bytes for held in self._at_rest.values())

    def take(
        self, prompt: NDArray[np.int32], max_tokens: int, *, most_reused: int, must: bool = False
    ) -> Context | Wait:
        """Lend a context for a prompt, int32[n], and max_tokens more; or return a reason to wait and ask again later.

        The context holds the longest prefix of the prompt that any context holds, lent ones included; their sequences
        must be between steps. A context at rest is lent itself if it holds little more or a copy has no room; otherwise
        a copy is lent.

        Args:
            most_reused: most tokens of the prompt that the context may hold.
            must: do not wait, and exceed the bound if needed.

        Raises:
            ValueError: the pool is closed.
            DeviceError: a device failed, or has no room.
        """
        with self._lock:
            self.check_open()
            self._tidy()
            need = self._needed(len(prompt) + max_tokens)
            if self._lent and not must and sum(loan.num_bytes for loan in self._lent) + need > self.memory:
                return Wait.MEMORY
            wanted = prompt[:most_reused]
            source, length, common = self._most_like(wanted)
            if not must and self._is_being_read(wanted, length):
                return Wait.PROMPT
            if self._restore(wanted, length):
                source, length, common = self._most_like(wanted)
            held = self._at_rest.get(source) if source else None
            goes_on = False
            if source and held and _survives(len(held.tokens), length):
                goes_on = len(held.tokens) - length <= _BEFORE_END[0]
                self._wake(source, length)
                self._make_room(need)
            else:
                self._make_room(need, source if length else None)
                if source in self._at_rest and self.num_bytes + need > self.memory:
                    self._wake(source, length)
                else:
                    source = self._begin(source, length)
            if not goes_on or source not in self._anchors:
                self._anchors[source] = len(prompt) - 1 - _BEFORE_END[0]
            self._lent.append(_Loan(weakref.ref(source), prompt, need, {common}))
            self._keep_states(source, self._lent[-1])
            return source

    def give_back(self, context: Context) -> None:
        """End a loan and keep the context at rest; if the pool is closed, free it."""
        with self._lock:
            self._lent = [loan for loan in self._lent if loan.context() is not context]
            if not self.closed:
                self._keep(context)
            self._rest(context)
            self._tidy()

    def forget(self) -> None:
        """Free all contexts at rest and drop all loans, after their device was lost."""
        with self._lock:
            while self._at_rest:
                self._at_rest.popitem()[0].close()
            self._lent.clear()

    def close(self) -> None:
        """Free the contexts at rest, and each lent one when it is given back; lend no more."""
        self.closed = True
        try:
            with self._lock:
                for context in list(self._at_rest):
                    self._keep(context, last=True)
        finally:  # Ctrl-C ends the writing
            self.forget()

    def _keep(self, context: Context, *, last: bool = False) -> None:
        """Keep a context's text on disk."""
        if self.prompts:
            with suppress(*_OUT_OF_REACH, MemoryError):
                self.prompts.keep(context.sessions, last=last)

    def _rest(self, context: Context) -> None:
        """Keep a context at rest, unless another one at rest can rewind to its tokens."""
        try:
            self.check_open()
            held = self._held(context)
        except (DeviceError, ValueError):  # the pool is closed, or the context, or its device is lost
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

    def _restore(self, prompt: NDArray[np.int32], length: int) -> bool:
        """Read a text from disk into a context at rest, if that saves enough prefill; returns whether it did.
        length: tokens of the prompt that a context here can supply."""
        found = self.prompts.find(prompt, self.n_ctx) if self.prompts else None
        if not self.prompts or not found:
            return False
        path, tokens = found
        # The whole file is read, and other contexts may lose their memory to it.
        if common_prefix(tokens, prompt) - length < max(_WORTH_WAITING, len(tokens) // _SHARE):
            return False
        if any(np.array_equal(held.tokens[: len(tokens)], tokens) for held in self._at_rest.values()):
            return False  # it cannot rewind so far
        need = self._needed(len(tokens))
        self._make_room(need)
        if self._lent and self.num_bytes + need > self.memory:
            return False
        context = self._begin(None, 0)
        if not self.prompts.load(path, context.sessions):
            context.close()
            return False
        self._at_rest[context] = self._held(context)
        return True

    def _tidy(self) -> None:
        """Drop loans whose contexts no longer exist, and free contexts beyond the bounds."""
        self._lent = [loan for loan in self._lent if loan.context() is not None]
        for context in list(self._at_rest)[:-_MOST_AT_REST]:
            self._free(context)
        self._make_room(0)

    def _make_room(self, need: int, spared: Context | None = None) -> None:
        """Cut and free contexts at rest until `need` more bytes are within the bound, or none is left to cut."""
        for context in list(self._at_rest):
            # The bytes that a cut frees in layers with a sliding window are known only afterwards.
            while context is not spared and context in self._at_rest:
                excess = self.num_bytes + need - self.memory
                if excess <= 0:
                    return
                self._shrink(context, excess)

    def _shrink(self, context: Context, excess: int) -> None:
        """Cut about `excess` bytes or fewer from a context at rest; free it if too little would be left."""
        tokens, cells = self._at_rest[context].tokens, self._cells[0]
        length = 0 if cells.whole else max(0, len(tokens) - -(-excess // max(1, cells.cell_bytes)))
        kept = tokens[: context.target.reachable(length)]
        if len(kept) < _LEAST_KEPT or self._covers(kept, but=context):
            self._free(context)
            return
        # Before the cut, which a device error or Ctrl-C may interrupt.
        self._at_rest[context] = self._at_rest[context]._replace(tokens=kept)
        _cut(context, len(kept))
        self._at_rest[context] = self._held(context)

    def _wake(self, context: Context, length: int) -> None:
        """Take a context from rest and keep its first `length` tokens."""
        del self._at_rest[context]
        _cut(context, length)

    def _begin(self, source: Context | None, length: int) -> Context:
        """Make a context with the first `length` tokens of another one; an empty one if memory is short."""
        try:
            return self._make(source, length)
        except (DeviceError, MemoryError):
            if not self._at_rest:
                raise
        # A device may have less memory than the bound.
        for context in list(self._at_rest):
            self._free(context)
        return self._make(source, 0)

    def _most_like(self, prompt: NDArray[np.int32]) -> tuple[Context | None, int, int]:
        """The context that can rewind to the longest prefix of the prompt, that prefix's length, and the length of the
        longest prefix that any context holds. Among equal contexts: one at rest, then one that the prefix nearly fills,
        then the one used last."""
        best: Context | None = None
        most, longest = (-1, False, False), 0
        for context, held, common, length, rests in self._contents(prompt):
            longest = max(longest, common)
            rank = (length, rests, _survives(held, length))
            if rank >= most:
                best, most = context, rank
        return best, max(most[0], 0), longest

    def _is_being_read(self, prompt: NDArray[np.int32], length: int) -> bool:
        """Whether another sequence is prefilling so much more of a prompt that waiting for a copy is faster."""
        for loan in self._lent:
            context = loan.context()
            common = common_prefix(loan.prompt[:-1], prompt)
            if context is not None and common >= length + _WORTH_WAITING:
                with suppress(*_OUT_OF_REACH):
                    # It has read them already; if `length` is less, it cannot rewind to them.
                    if common_prefix(context.target.tokens, prompt) >= common:
                        continue
                    loan.partings.add(common)
                    self._keep_states(context, loan)
                return True
        return False

    def _keep_states(self, context: Context, loan: _Loan) -> None:
        """Let the recurrent layers of a lent context keep states that later prompts may go on from."""
        # A prefill keeps all of them until it ends, so their number is limited here, too.
        partings = nlargest(self._num_kept, loan.partings)
        wanted = [*partings, *(len(loan.prompt) - 1 - before for before in _BEFORE_END)]
        for session in context.sessions:
            if session.kept_state_bytes:
                session.keep_states(wanted, self._num_kept, self._anchors[context])

    def _contents(self, prompt: NDArray[np.int32]) -> Iterator[tuple[Context, int, int, int, bool]]:
        """All contexts: tokens held, those that the prompt begins with, how many of these it can rewind to, and whether
        it is at rest."""
        for loan in self._lent:
            context = loan.context()
            if context is not None:
                with suppress(*_OUT_OF_REACH):
                    tokens = context.target.tokens
                    common = common_prefix(tokens, prompt)
                    yield context, len(tokens), common, context.target.reachable(common), False
        for context, (tokens, _) in list(self._at_rest.items()):
            common = common_prefix(tokens, prompt)
            yield context, len(tokens), common, context.target.reachable(common), True

    def _covers(self, tokens: NDArray[np.int32], but: Context | None = None) -> Context | None:
        """A context at rest that can rewind to exactly these tokens."""
        others = ((other, held.tokens) for other, held in self._at_rest.items() if other is not but)
        return next((other for other, held in others if _reaches(other, held, tokens)), None)

    def _free(self, context: Context) -> None:
        if self._at_rest.pop(context, None):
            context.close()

    def _needed(self, tokens: int) -> int:
        """Bytes of a context with this many tokens."""
        return sum(cells.needed(tokens) for cells in self._cells)

    def _held(self, context: Context) -> _Held:
        sessions = context.sessions
        tokens = [session.tokens for session in sessions]  # of all sessions, to raise if any is in a call
        num_bytes = sum(cells.held(session) for cells, session in zip(self._cells, sessions, strict=True))
        return _Held(tokens[0], num_bytes)


def _cut(context: Context, length: int) -> None:
    """Keep the first tokens of each session of a context; a draft's may hold fewer."""
    for session in context.sessions:
        session.rewind(min(len(session.tokens), length))


def _reaches(context: Context, held: NDArray[np.int32], beginning: NDArray[np.int32]) -> bool:
    """Whether a context that holds the tokens `held` can rewind to exactly `beginning`."""
    length = len(beginning)
    return np.array_equal(beginning, held[:length]) and context.target.reachable(length) == length


def _survives(held: int, length: int) -> bool:
    """Whether the first `length` tokens are nearly all that a context holds."""
    return held - length <= max(16, held // 16)
