"""Speculative decoding of one text in its simplest form.

The rest of this package adds to it: `stepper` makes the same step for all texts of a batch and `text` that of one,
`account` decides whether a step drafts, `context` reuses KV caches, and grammars cut trees. Only grammars change
tokens, so `speculate` emits the tokens that the engine emits, which tests check. Both begin a tree, grow it, verify it,
and accept its path.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from pystaged._core import Session, Work, run
from pystaged.decoding.drafter import Drafter, fulfil_all
from pystaged.options.config import SamplingConfig


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
        max_tokens: most tokens to decode.
        is_end: whether a token ends the text; it is not emitted.

    Returns:
        For each step, the tokens of its accepted path and the bonus token.
    """
    target.rewind(0)
    run([Work.read(target, prompt[:-1])])
    drafter.start(prompt)
    steps: list[list[int]] = []
    room = min(max_tokens, target.n_ctx - len(prompt) + 1)
    while room > 0:
        # Begin a tree of guesses and grow it. Its root is the last token, which the target has not read yet.
        drafter.draft(sampling, min(room, target.most_pending) - 1)
        fulfil_all(drafter)
        tree = drafter.tree

        # Verify: one pass of the target over all nodes. From the root on, take the target's own token; if a child holds
        # it, go on from there; otherwise it is the bonus token. The own token has the largest log p + noise. The noise
        # depends on seed, position and token alone (the Gumbel-max trick), so it is the token that plain decoding would
        # have sampled. Only the path stays in the KV cache.
        [(_, accepted, *_)] = run([Work.verify(target, tree.tokens, tree.parents, sampling.native)])
        tokens = accepted.tolist()

        # Accept: the path and the bonus token; tell the drafter. The bonus token, the last one, is the next root.
        drafter.advance(tokens)
        ends = [i for i, token in enumerate(tokens) if is_end(token)]
        steps.append(tokens[: ends[0]] if ends else tokens)
        room = 0 if ends else room - len(tokens)
    drafter.end()
    return steps
