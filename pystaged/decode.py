"""Decoding: a step verifies one tree of tokens; a context takes steps until the text is done."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from pystaged._core import ContextFullError, Sampling, Session
from pystaged.tree import TokenTree


class Decoder:
    """One context being continued.

    Between steps the session holds all tokens but the last, which is the root of the next tree.

    Args:
        target: the session to continue in; nobody else may use it meanwhile.
    """

    def __init__(self, target: Session) -> None:
        self.target = target
        self._root = -1

    def start(self, prompt: NDArray[np.int32]) -> int:
        """Bring the context to a prompt, int32[n] with n >= 1; returns how many of its tokens were there already.

        Raises:
            ContextFullError: the prompt is longer than the context.
        """
        if len(prompt) > self.target.n_ctx:
            raise ContextFullError(
                f"the prompt has {len(prompt)} tokens, but the context holds {self.target.n_ctx}; shorten the prompt"
            )
        reused = min(common_prefix(self.target.tokens, prompt), len(prompt) - 1)
        self.target.truncate(reused)
        self.target.prefill(prompt[reused:-1])
        self._root = int(prompt[-1])
        return reused

    @property
    def is_full(self) -> bool:
        """Whether the context has no position left to evaluate the root at."""
        return len(self.target.tokens) >= self.target.n_ctx

    def step(self, sampling: Sampling) -> list[int]:
        """Verify a tree with one pass of the target; returns the tokens that stand, at least one."""
        tree = TokenTree.root(self._root)
        try:
            self.target.evaluate(tree.tokens, tree.parents)
            path, tokens = self.target.follow(sampling)
            self.target.commit(path)
        finally:
            self.target.discard()
        self._root = int(tokens[-1])
        emitted: list[int] = tokens.tolist()
        return emitted


def common_prefix(a: NDArray[np.int32], b: NDArray[np.int32]) -> int:
    """How many tokens both begin with."""
    length = min(len(a), len(b))
    different = np.nonzero(a[:length] != b[:length])[0]
    return int(different[0]) if len(different) else length
