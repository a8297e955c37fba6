"""Contexts at rest, with what they last held: the next prompt may begin like one of them."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from pystaged.decoding.drafter import common_prefix
from pystaged.decoding.loop import Decoder

_MOST_AT_REST = 4


class ContextPool:
    """Lends contexts, each to one text at a time.

    Args:
        make: makes a context; the first is made at once.
    """

    def __init__(self, make: Callable[[], Decoder]) -> None:
        self._make = make
        self._lock = threading.Lock()
        self._at_rest = [make()]  # least recently used first
        self._n_ctx = self._at_rest[0].target.n_ctx
        self._given_back: deque[Decoder] = deque()
        self._closed = False

    @property
    def closed(self) -> bool:
        return self._closed

    @property
    def n_ctx(self) -> int:
        """Positions of each context."""
        return self._n_ctx

    def take(self, prompt: NDArray[np.int32]) -> Decoder:
        """The context most like the prompt, int32[n]; a new one where all are lent.

        Raises:
            ValueError: the pool is closed.
        """
        while True:
            with self._lock:
                if self._closed:
                    raise ValueError("the engine is closed")
                self._collect()
                candidates = list(self._at_rest)
            # Outside of the lock: making a context takes a while, and on a device even looking at one does.
            if not candidates:
                return self._make()
            best = max(candidates, key=lambda context: common_prefix(context.target.tokens, prompt))
            with self._lock:
                if best not in self._at_rest:
                    continue
                self._at_rest.remove(best)
            # Streams that were dropped have given back theirs without tidying.
            self.tidy()
            return best

    def give_back(self, context: Decoder) -> None:
        """End a loan. Takes no lock, because the collector may call it in the middle of anything."""
        # Nobody tidies a closed pool; there the context goes with the caller's reference.
        if not self._closed:
            self._given_back.append(context)

    def tidy(self) -> None:
        """Free the contexts that are too many, the least recently used first; all of them once the pool is closed."""
        self._free(0 if self._closed else _MOST_AT_REST)

    def forget(self) -> None:
        """Free all contexts at rest: the device that they are on is lost."""
        self._free(0)

    def close(self) -> None:
        """Lend no more, and free each context when it is at rest."""
        self._closed = True
        self.tidy()

    def _free(self, kept: int) -> None:
        with self._lock:
            self._collect()
            surplus = self._at_rest[: max(0, len(self._at_rest) - kept)]
            del self._at_rest[: len(surplus)]
        for context in surplus:
            context.close()

    def _collect(self) -> None:
        while self._given_back:
            self._at_rest.append(self._given_back.popleft())
