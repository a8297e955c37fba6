"""The loop: in a step each text drafts a tree, and one pass of the target verifies all trees.

The guesses of all trees are ranked together by score, and the n best are verified, where n maximizes

    (texts + sum of scores) / (T(texts + n) + processor time since the last pass, which is that of drafting).

Prefill runs in pieces in the same passes. The values of a row do not depend on the other rows, so batching changes no
token.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from queue import SimpleQueue
from typing import Any

from pystaged.decoding.context import Context
from pystaged.decoding.cost import PassCost
from pystaged.decoding.policy import best_size
from pystaged.decoding.requests import MOST_ROWS, AnyRequest, Clocks, Make, Read, Verify, fulfil, make_pass, mean_past
from pystaged.decoding.text import Text
from pystaged.options.table import PREFILL_BUDGET
from pystaged.result import Piece
from pystaged.stats import PassStats

_LEAST_PIECE = 8  # least tokens of prefill in a pass that decodes, too, however long it takes
_UNPRICED_PIECE = 32  # tokens of prefill in such a pass if no costs are known
_DRAFT_PIECE = 64  # tokens that a draft prefills in one step of a batch


class Stepper:
    """Steps the texts of one target together.

    Args:
        cost: seconds of a target pass; None verifies all drafted nodes.
        prefill_budget: longest time of a pass that decodes and prefills, in seconds.
    """

    def __init__(
        self,
        cost: PassCost | None,
        prefill_budget: float = PREFILL_BUDGET,
        *,
        make: Make = make_pass,
        clocks: Clocks | None = None,
    ) -> None:
        self.passes = PassStats()  # the target's
        self._cost = cost
        self._prefill_budget = prefill_budget
        self._make = make
        self._clocks = clocks or Clocks()
        self._last = self._clocks.processor()  # when the last pass of the target ended

    def step(self, texts: Sequence[Text]) -> None:
        """Step the batch by one pass of the target: each text takes a step, reads a piece of its prompt, or waits
        while its draft reads."""
        # Begin a tree of guesses for each text and grow it: by lookups, and by the passes that other proposers want.
        for text in texts:
            text.ask()
        have_read = set[Text]()  # texts whose drafts have read a piece in this step
        while asked := self._drafts(texts, have_read):
            fulfil([*asked.values()], self._clocks, self._make)
            for text in asked:
                text.take()
                text.ask()

        # Choose rows: the best nodes of all trees, and pieces of prompts.
        asked = {text: text.request for text in texts if text.request and not text.wants_draft}
        trees = {text: request for text, request in asked.items() if isinstance(request, Verify)}
        prompts = [request for request in asked.values() if isinstance(request, Read)]
        self._trim_trees([*trees.values()])
        self._portion_prompts(prompts, [*trees.values()])
        asked = {text: request for text, request in asked.items() if request.num_rows}

        # Verify: one pass of the target over all rows.
        if asked:
            fulfil([*asked.values()], self._clocks, self._make)
        self._last = self._clocks.processor()
        self._count(asked.values())
        note_batch([*asked], trees)

        # Accept: each text takes its path and the bonus token, and tells its drafter.
        for text in asked:
            text.take()

    def _count(self, requests: Iterable[AnyRequest]) -> None:
        """Add the results of requests to the statistics of target passes."""
        done = [request for request in requests if request.error is None]
        steps = [request for request in done if isinstance(request, Verify)]
        rows, of_steps = (sum(request.num_rows for request in some) for some in (done, steps))
        passes = sum(request.share for request in done)  # of one pass, or each request's own
        seconds = sum(request.share * request.seconds for request in done)
        more = PassStats(round(passes), seconds, rows, rows - of_steps, of_steps - len(steps), len(steps))
        self.passes = self.passes.plus(more)

    def _drafts(self, texts: Sequence[Text], have_read: set[Text]) -> dict[Text, AnyRequest]:
        """The passes that drafts want to make; a draft that has more to read than a piece waits then. Pieces of
        drafts that read the target's hidden states are larger, as they take a small part of its time."""
        found = {}
        for text in texts:
            request = text.request
            if request is None or not text.wants_draft or text in have_read:
                continue
            if isinstance(request, Read):
                if len(texts) > 1 and request.hidden is None:
                    request.num_rows = min(request.num_rows, _DRAFT_PIECE)
                if request.num_rows < len(request.tokens):
                    have_read.add(text)
            found[text] = request
        return found

    def _trim_trees(self, requests: Sequence[Verify]) -> None:
        """Trim each tree to the nodes that are worth verifying."""
        cost = self._cost
        if cost is None or len(requests) < 2 or all(request.num_rows == 1 for request in requests):
            return
        if hasattr(requests[0].session, "run"):  # on RPC servers each has a pass of its own
            return
        _, past = mean_past(requests)
        spent = max(0.0, self._clocks.processor() - self._last)  # negative after a change of threads
        trees = [request.tree.scores.tolist() for request in requests]
        for request, rows in zip(requests, best_rows(trees, lambda n: cost(n, past), spent), strict=True):
            request.trim(rows)

    def _portion_prompts(self, requests: Sequence[Read], steps: Sequence[Verify]) -> None:
        """Set the rows of each prefill request beside these steps."""
        if not requests:
            return
        room, beside = MOST_ROWS, sum(request.num_rows for request in steps)
        if beside:
            past = sum(request.past for request in requests) / len(requests)
            room = _LEAST_PIECE if self._cost else _UNPRICED_PIECE
            while self._cost and room < MOST_ROWS and self._cost(beside + room + 1, past) <= self._prefill_budget:
                room += 1
        # Half for the oldest prompt, so that none waits for ever, then the shortest first.
        asked = [(request, (room + 1) // 2) for request in requests[:1]]
        asked += [(request, room) for request in sorted(requests, key=lambda request: len(request.tokens))]
        for request in requests:
            request.num_rows = 0
        for request, most in asked:
            more = min(most, room, len(request.tokens) - request.num_rows)
            request.num_rows += more
            room -= more


def generate(context: Context, text: Text) -> Generator[Piece, None, None]:
    """Decode a text alone, step by step. Raises the error that ends it."""
    queue, stepper = SimpleQueue[Any](), Stepper(None, clocks=context.clocks)
    text.queue = queue
    try:
        text.begin(context)
        while not text.finish:
            stepper.step([text])
            while not queue.empty():
                yield queue.get()[1]
            if text.error is not None:
                raise text.error
    finally:
        text.end()


def note_batch(texts: Sequence[Text], steps: Mapping[Text, Verify]) -> None:
    """Tell each text the size of the batch that shared this pass; its next step assumes the same."""
    steps = {text: request for text, request in steps.items() if request.share < 1}
    tokens = {text: sum(request.tree.scores.tolist()) for text, request in steps.items()}
    all_rows, all_tokens = sum(request.num_rows for request in steps.values()), sum(tokens.values())
    for text in texts:
        assert text.context
        batch = text.context.batch
        batch.texts = 1 + len(steps) - (text in steps)
        batch.rows = all_rows - (steps[text].num_rows if text in steps else 0)
        batch.tokens = all_tokens - tokens.get(text, 0.0)


def best_rows(trees: Sequence[Sequence[float]], cost: Callable[[int], float], spent: float) -> list[int]:
    """Number of nodes of each tree to verify for the most tokens per second.

    Args:
        trees: the scores of each tree's nodes, the root first; no score is above its parent's.
        cost: seconds of a pass by its number of rows.
        spent: seconds of drafting.

    Returns:
        Rows of each tree, the root included.
    """
    rows = [1] * len(trees)
    guesses = sorted((-score, i, tree) for tree, scores in enumerate(trees) for i, score in enumerate(scores) if i)
    costs = [cost(len(trees) + n) for n in range(len(guesses) + 1)]
    best, _ = best_size(len(trees), [-score for score, _, _ in guesses], costs, spent)
    for _, _, tree in guesses[:best]:
        rows[tree] += 1
    return rows
