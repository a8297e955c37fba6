"""A context: where texts are decoded, one at a time, and what is learnt from them; and the pool of contexts, which
keeps the KV caches of ended texts for prompts with the same prefix."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import suppress
from enum import Enum
from heapq import nlargest
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pystaged._core import DeviceError, Session
from pystaged.decoding.account import Account, Meter
from pystaged.decoding.cost import PassCost
from pystaged.decoding.drafter import Drafter, common_prefix
from pystaged.decoding.policy import BatchLoad
from pystaged.decoding.requests import Clocks

SPARE_CELLS = 64  # positions counted per session besides its tokens, for the current tree and partly filled pages
BEFORE_END = (16, 256)  # states are kept so long before a prompt's end; the next often differs only after those points
_MOST_IDLE = 64  # each new text searches all of them, and each reserves the address range of a full context
_LEAST_KEPT = 32  # tokens; prefill of fewer is quick
_WORTH_WAITING = 64  # tokens whose prefill takes longer than to wait for another text's and copy it
FREE_DIVISOR = 4  # contexts get a quarter of the free memory
_KEPT_DIVISOR, _MOST_KEPT = 16, 8  # states kept of a text: in a 16th of the memory of contexts, and no more than 8
_OUT_OF_REACH = (DeviceError, ValueError, RuntimeError)  # errors of a session that is lost, closed, or in a call


class Context:
    """The target's session, the drafter with its sessions, and the account. It is lent to one text at a time.

    Between steps the target's session holds all tokens of the text but the last, the root of the next tree.

    Args:
        target: the session to decode in; nobody else may use it meanwhile.
        drafter: proposes the trees; None for plain decoding.
        cost: processor seconds of a target pass, refined here, to decide whether drafting pays. With None every step
            drafts.
        batch: the batch that shares the passes; by default one text alone.
        meter: measures the time of drafting; shared with the drafter.

    Attributes:
        prompt: int32[n], of the text that has it, or had it last.
        num_bytes: most bytes that its text can need; of an idle one, those that it holds.
        partings: after how many tokens other texts are known to differ from the prompt.
        anchor: shortly before the last user turn's end, -1 for unknown; recurrent layers keep a state there.
    """

    def __init__(
        self,
        target: Session,
        drafter: Drafter | None = None,
        *,
        cost: PassCost | None = None,
        batch: BatchLoad | None = None,
        meter: Meter | None = None,
        clocks: Clocks | None = None,
    ) -> None:
        self.target, self.drafter = target, drafter
        self.batch, self.clocks = batch or BatchLoad(), clocks or Clocks()
        self.meter = meter or Meter(self.clocks.processor)
        self.account = Account(cost, self.batch, self.meter)
        self.prompt, self.num_bytes = np.zeros(0, np.int32), 0
        self.partings, self.anchor = set[int](), -1

    @property
    def sessions(self) -> list[Session]:
        """The target's session, then those of the drafter."""
        return [self.target, *(self.drafter.sessions() if self.drafter else [])]

    def rest(self) -> None:
        """Note what it holds. Raises DeviceError or ValueError if it is lost, closed or in a call."""
        self.num_bytes = sum(SPARE_CELLS * session.cell_bytes + session.num_bytes for session in self.sessions)

    def reach(self, tokens: NDArray[np.int32]) -> tuple[int, int]:
        """Of how many of these tokens it can rewind to a prefix, and how many it holds. Raises as `rest`."""
        held = common_prefix(self.target.tokens, tokens)
        return self.target.reachable(held), held

    def cut(self, length: int) -> None:
        """Keep the first tokens of each session; a draft's may hold fewer. Raises as `rest`."""
        for session in self.sessions:
            session.rewind(min(len(session.tokens), length))
        self.rest()

    def keep_states(self, most: int) -> None:
        """Let the recurrent layers keep so many states that later prompts may go on from."""
        # A prefill keeps all of them until it ends, so their number is limited here, too.
        wanted = [*nlargest(most, self.partings), *(len(self.prompt) - 1 - before for before in BEFORE_END)]
        for session in self.sessions:
            if session.kept_state_bytes:
                session.keep_states(wanted, most, self.anchor)

    def close(self) -> None:
        """Close the sessions of target and drafter."""
        for session in self.sessions:
            session.close()


class Wait(Enum):
    """Reason why a text must wait for a context."""

    MEMORY = "memory that other texts hold"
    PROMPT = "another text's prefill of the same tokens"


class ContextPool:
    """Lends each context to one text at a time and keeps its KV cache for prompts with the same prefix.

    The KV caches of all contexts take at most `memory` bytes. A text counts with its prompt and max_tokens, an idle
    context with its contents. A text may exceed the bound if no other can step. Idle contexts make room, the least
    recently used first, each from its end.

    A recurrent layer can only go back to states that it has kept: shortly before the end of each prompt, where a prompt
    turned out to differ from another one, and where the last user turn ended; as many as a share of `memory` holds.

    Thread-safe: calls are serialized.

    Args:
        make: copies the first tokens and the learnt state of a context, or makes an empty one for None; the constructor
            calls it once. Raises DeviceError or MemoryError if there is no room.
        memory: bytes; None for a quarter of `free`, but enough for one full context.
        free: free bytes of this machine's memory.

    Attributes:
        prompts: a KeptPrompts, which keeps ended texts on disk; None for none.
    """

    def __init__(
        self, make: Callable[[Context | None, int], Context], memory: int | None = None, *, free: int = 0
    ) -> None:
        self._make, self.closed = make, False
        self.prompts: Any = None
        self._lock = threading.RLock()  # the garbage collector may close an engine during a call
        first = make(None, 0)
        first.rest()
        self._lent, self._idle = list[Context](), [first]  # the least recently used first
        self._sessions = first.sessions  # like those of all contexts; they may be closed
        self.n_ctx = first.target.n_ctx  # positions of each context
        kept_bytes = sum(session.kept_state_bytes for session in self._sessions)
        kept_room = (memory or free // FREE_DIVISOR) // _KEPT_DIVISOR
        self._num_kept = min(_MOST_KEPT, max(1, kept_room // kept_bytes)) if kept_bytes else 0
        self.full_bytes = self._needed(self.n_ctx)
        self.memory = memory or max(free // FREE_DIVISOR, self.full_bytes)

    def check_open(self) -> None:
        """Raise ValueError if the pool is closed."""
        if self.closed:
            raise ValueError("the engine is closed")

    @property
    def num_bytes(self) -> int:
        """Most bytes that the running texts can fill, plus the bytes of idle contexts."""
        return sum(context.num_bytes for context in (*self._lent, *self._idle))

    def take(
        self, prompt: NDArray[np.int32], max_tokens: int, *, most_reused: int, must: bool = False
    ) -> Context | Wait:
        """Lend a context for a prompt, int32[n], and max_tokens more; or return a reason to wait and ask again later.

        The context holds the longest prefix of the prompt that any context can go back to, lent ones included, whose
        texts must be between steps. An idle one is lent itself if nearly all of it matches, or if there is no room for
        a copy.

        Args:
            most_reused: most tokens of the prompt that the context may hold.
            must: do not wait, and exceed the bound if needed.

        Raises:
            ValueError: the pool is closed.
            DeviceError: a device failed, or has no room.
        """
        with self._lock:
            self.check_open()
            need, wanted = self._needed(len(prompt) + max_tokens), prompt[:most_reused]
            if self._lent and not must and sum(each.num_bytes for each in self._lent) + need > self.memory:
                return Wait.MEMORY
            source, length, common = self._most_like(wanted)
            if not must and self._is_being_read(wanted, length):
                return Wait.PROMPT
            if self._restore(wanted, length):
                source, length, common = self._most_like(wanted)
            dropped = len(source.target.tokens) - length if source in self._idle else -1
            itself = 0 <= dropped <= max(16, (length + dropped) // 16)
            if not itself:
                self._make_room(need, source if length else None)
                itself = source in self._idle and self.num_bytes + need > self.memory
            if source and itself:
                self._idle.remove(source)
                source.cut(length)
                self._make_room(need)
            else:
                try:
                    source = self._begin(source, length)
                except DeviceError:
                    if not self._lent or must:
                        raise
                    return Wait.MEMORY
            # While prompts extend the whole text, as after tool calls, the user's turn is the same.
            if source.anchor < 0 or not 0 <= dropped <= BEFORE_END[0]:
                source.anchor = len(prompt) - 1 - BEFORE_END[0]
            source.prompt, source.num_bytes, source.partings = prompt, need, {common}
            self._lent.append(source)
            source.keep_states(self._num_kept)
            return source

    def give_back(self, context: Context) -> None:
        """Let a context be idle in place of those whose tokens it can rewind to; if the pool is closed, free it."""
        with self._lock:
            if context in self._lent:
                self._lent.remove(context)
            context.batch.texts, context.batch.rows, context.batch.tokens = 1, 0, 0.0
            try:
                self.check_open()
                self._keep(context)
                context.rest()
            except (DeviceError, ValueError):  # the pool is closed, or the context, or its device is lost
                context.close()
                return
            for other in self._idle.copy():
                tokens = other.target.tokens
                if context.reach(tokens)[0] == len(tokens):
                    self._free(other)
            self._idle.append(context)
            for oldest in self._idle[:-_MOST_IDLE]:
                self._free(oldest)
            self._make_room(0)

    def forget(self) -> None:
        """Free all idle contexts."""
        with self._lock:
            for context in self._idle.copy():
                self._free(context)

    def close(self) -> None:
        """Free the idle contexts, and each lent one when it is given back; lend no more."""
        self.closed = True
        try:
            with self._lock:
                for context in self._idle.copy():
                    self._keep(context, last=True)
        finally:  # Ctrl-C ends the writing
            self.forget()
        if self.prompts:
            self.prompts.close()

    def _keep(self, context: Context, *, last: bool = False) -> None:
        """Keep a context's text on disk."""
        if self.prompts:
            with suppress(*_OUT_OF_REACH, MemoryError):
                self.prompts.keep(context.sessions, last=last)

    def _restore(self, prompt: NDArray[np.int32], length: int) -> bool:
        """Read a text from disk into an idle context, if that is worth it; returns whether it tried.
        length: tokens of the prompt that a context here can supply."""
        found = self.prompts.find(prompt, self.n_ctx, length) if self.prompts else None
        if found is None or any(np.array_equal(context.target.tokens, found[1]) for context in self._idle):
            return False  # the same text is here, but cannot rewind to this prefix: reading it again gains nothing
        need = self._needed(len(found[1]))  # all of it is read
        if self._lent and sum(each.num_bytes for each in self._lent) + need > self.memory:
            return False
        self._make_room(need)
        context = self._begin(None, 0)
        self.prompts.load(found[0], context.sessions)
        context.rest()
        self._idle.append(context)  # empty if the file cannot be used
        return True

    def _make_room(self, need: int, spared: Context | None = None) -> None:
        """Cut and free idle contexts until `need` more bytes are within the bound, or none is left to cut."""
        for context in [each for each in self._idle if each is not spared]:
            # The bytes that a cut frees in layers with a sliding window are known only afterwards.
            while context in self._idle and (excess := self.num_bytes + need - self.memory) > 0:
                target = context.target
                length = target.reachable(max(0, len(target.tokens) - -(-excess // max(1, target.cell_bytes))))
                if length < _LEAST_KEPT:
                    self._free(context)
                else:
                    context.cut(length)

    def _begin(self, source: Context | None, length: int) -> Context:
        """Make a context with the first `length` tokens of another one; an empty one if memory is short."""
        with suppress(DeviceError, MemoryError):
            return self._make(source, length)
        self.forget()  # a device may have less memory than the bound
        return self._make(source, 0)

    def _free(self, context: Context) -> None:
        self._idle.remove(context)
        context.close()

    def _most_like(self, prompt: NDArray[np.int32]) -> tuple[Context | None, int, int]:
        """The context that can rewind to the longest prefix of the prompt, that prefix's length, and the length of the
        longest prefix that any context holds. Of equal contexts, the one used last, and an idle one before a lent."""
        best: Context | None = None
        most = longest = 0
        for context in (*self._lent, *self._idle):
            with suppress(*_OUT_OF_REACH):
                length, held = context.reach(prompt)
                longest = max(longest, held)
                if length >= most:
                    best, most = context, length
        return best, most, longest

    def _is_being_read(self, prompt: NDArray[np.int32], length: int) -> bool:
        """Whether another text is prefilling so much more of a prompt that waiting for a copy is faster. That one then
        keeps a state where the prompts part."""
        for context in self._lent:
            common = common_prefix(context.prompt[:-1], prompt)
            with suppress(*_OUT_OF_REACH):
                # If it has read them already, and `length` is less, it cannot rewind to them.
                if common >= length + _WORTH_WAITING and context.reach(prompt)[1] < common:
                    context.partings.add(common)
                    context.keep_states(self._num_kept)
                    return True
        return False

    def _needed(self, tokens: int) -> int:
        """Bytes of a context with this many tokens."""
        needed = 0
        for session in self._sessions:
            held = min(tokens, session.n_ctx)
            needed += session.state_bytes + self._num_kept * session.kept_state_bytes
            needed += session.cell_bytes * (SPARE_CELLS + held)
            needed -= session.windowed_cell_bytes * max(0, held - session.most_windowed)
        return needed
