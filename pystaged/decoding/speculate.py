"""Speculative decoding: the whole idea, for one text.

Everything else in this package is added to these lines: `loop` steps many texts in shared passes, `budget` asks whether
a step should draft at all, `constraint` keeps a text to a grammar, and contexts are used again for texts that begin
alike. None of them changes a token, so `speculate` writes what the whole engine writes; the tests hold it to that.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from pystaged._core import Session
from pystaged.config import SamplingConfig
from pystaged.decoding.drafter import Drafter
from pystaged.decoding.requests import finish
from pystaged.decoding.tree import TokenTree


def speculate(
    target: Session,
    drafter: Drafter,
    prompt: NDArray[np.int32],
    sampling: SamplingConfig,
    max_tokens: int,
    is_end: Callable[[int], bool] = lambda _: False,
) -> list[list[int]]:
    """Continue a prompt. The tokens are those of plain decoding, whatever the drafter proposes.

    Args:
        target: decides every token.
        drafter: proposes trees of tokens.
        prompt: int32[n], n >= 1.
        max_tokens: at most so many.
        is_end: whether a token ends the text; it is not part of it.

    Returns:
        The tokens of each step: of its accepted path, and the bonus token.
    """
    target.rewind(0)
    target.prefill(prompt[:-1])
    drafter.start(prompt)
    steps: list[list[int]] = []
    room = min(max_tokens, target.n_ctx - len(prompt) + 1)
    while room > 0:
        # Draft: a tree of guesses. Its root is the last token of the text, which the target has not read yet.
        tree = finish(drafter.draft(sampling, room - 1))

        # Verify: one pass of the target over all nodes, then `follow`; the path stays in the context, the rest goes.
        _, tokens = target.verify(tree.tokens, tree.parents, sampling.native)[:2]
        tokens = tokens.tolist()

        # Tell the drafter. The bonus token, the last one, is the next root.
        drafter.advance(tokens)
        ends = [i for i, token in enumerate(tokens) if is_end(token)]
        steps.append(tokens[: ends[0]] if ends else tokens)
        room = 0 if ends else room - len(tokens)
    drafter.end()
    return steps


def follow(target: Session, tree: TokenTree, sampling: SamplingConfig) -> tuple[list[int], list[int]]:
    """The accepted path of a tree whose nodes are pending rows of the target, and the target's own token after each.

    This is Session.follow, spelled out. The acceptance rule: take the target's own token; where a child holds it, go on
    from there; where none does, it is the bonus token. The own token is the one of the largest log p + noise, and noise
    depends on seed and position alone (the Gumbel-max trick), so it is the one that plain decoding would have sampled.
    """
    children = {
        (parent, token): node
        for node, (parent, token) in enumerate(zip(tree.parents.tolist(), tree.tokens.tolist(), strict=True))
    }
    path, tokens = [0], list[int]()
    while True:
        best, _ = target.candidates([path[-1]], 1, sampling.native)
        tokens.append(int(best[0, 0]))
        child = children.get((path[-1], tokens[-1]))
        if child is None:
            return path, tokens
        path.append(child)
