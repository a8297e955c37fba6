"""The loop: in a step each text drafts a tree, and one pass of the target verifies all trees.

The guesses of all trees are ranked together by score, and the n best are verified, where n maximizes

    (texts + sum of scores) / (T(texts + n) + drafting time, which is the time since the last pass).

Prefill runs in pieces in the same passes. The values of a row do not depend on the other rows, so batching changes no
token.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Generator, Mapping, Sequence
from queue import SimpleQueue
from typing import Any

from pystaged._core import run
from pystaged.decoding.context import Context
from pystaged.decoding.cost import PassCost
from pystaged.decoding.requests import MOST_ROWS, AnyRequest, Clocks, Propose, Read, Verify, fulfil, mean_past, share
from pystaged.decoding.text import Text
from pystaged.options.table import PREFILL_BUDGET
from pystaged.result import Piece
from pystaged.stats import PassStats

_LEAST_PIECE = 8  # least tokens of prefill in such a pass, however long it takes
_UNPRICED_PIECE = 32  # tokens of prefill in such a pass if no costs are known
_DRAFT_PIECE = 64  # tokens that a draft prefills in one step of a batch


class Stepper:
    """Steps the texts of one target together.

    Args:
        cost: seconds of a target pass; None verifies all drafted nodes.
        prefill_budget: longest time of a pass that decodes and prefills, in seconds.
        make: does all works in one pass or none of them, as _core.run.
        clocks: wall time and processor time.
    """

    def __init__(
        self,
        cost: PassCost | None,
        prefill_budget: float = PREFILL_BUDGET,
        *,
        make: Callable[[list[Any]], list[Any]] = run,
        clocks: Clocks | None = None,
    ) -> None:
        self.passes = PassStats()  # the target's
        self._cost = cost
        self._prefill_budget = prefill_budget
        self._make = make
        self._clocks = clocks or Clocks()
        self._last = self._clocks.processor()  # when the last pass of the target ended

    def step(self, texts: Sequence[Text]) -> None:
        """Step the batch by one pass of the target: each text takes a step, or reads a piece of its prompt."""
        # Begin a tree of guesses for each text and grow it: by lookups, and by the passes that other proposers want.
        for text in texts:
            text.ask()
        have_read = set[Text]()  # texts whose drafts have read a piece in this step
        while asked := self._drafts(texts, have_read):
            self._pass(asked)
            for text in asked:
                text.take()
                text.ask()

        # Choose rows: the best nodes of all trees, and pieces of prompts.
        asked = [text for text in texts if text.request and not text.wants_draft]
        trees = {text: text.request for text in asked if isinstance(text.request, Verify)}
        self._trim_trees([*trees.values()])
        self._portion_prompts([text.request for text in asked if isinstance(text.request, Read)], [*trees.values()])
        asked = [text for text in asked if text.request and text.request.num_rows]

        # Verify: one pass of the target over all rows.
        requests = self._pass(asked)
        self._last = self._clocks.processor()
        self._count(requests)
        note_batch(asked, trees)

        # Accept: each text takes its path and the bonus token, and tells its drafter.
        for text in asked:
            text.take()

    def _count(self, requests: Sequence[AnyRequest]) -> None:
        """Add the results of requests to the statistics of target passes."""
        passes = seconds = 0.0
        rows = nodes = steps = 0
        for request in requests:
            if request.error is None:
                passes += request.share  # of one pass, or each request's own
                seconds += request.share * request.seconds
                rows += request.num_rows
                if isinstance(request, Verify):
                    nodes, steps = nodes + request.num_rows, steps + 1
        more = PassStats(round(passes), seconds, rows, rows - nodes, nodes - steps, steps)
        self.passes = self.passes.plus(more)

    def _drafts(self, texts: Sequence[Text], have_read: set[Text]) -> list[Text]:
        """The texts whose drafts have a pass to make; a draft that has more to read than a piece waits then. Pieces of
        drafts that read the target's hidden states are larger, as they take a small part of its time."""
        found = []
        for text in texts:
            request = text.request
            if request is None or not text.wants_draft or text in have_read:
                continue
            if isinstance(request, Read):
                if len(texts) > 1 and request.hidden is None:
                    request.num_rows = min(request.num_rows, _DRAFT_PIECE)
                if request.num_rows < len(request.tokens):
                    have_read.add(text)
            found.append(text)
        return found

    def _trim_trees(self, requests: Sequence[Verify]) -> None:
        """Trim each tree to the nodes that are worth verifying."""
        if self._cost and len(requests) > 1:
            cost, (_, past) = self._cost, mean_past(requests)
            trees = [request.tree.scores.tolist() for request in requests]
            spent = max(0.0, self._clocks.processor() - self._last)  # negative after a change of threads
            rows = best_rows(trees, lambda n: cost(n, past), spent)
            for request, kept in zip(requests, rows, strict=True):
                request.tree = request.tree.head(kept)

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

    def _pass(self, texts: Sequence[Text]) -> list[AnyRequest]:
        """Make one pass for the requests of texts; if it fails, one for each, so that only the request at fault
        fails."""
        requests = [text.request for text in texts if text.request]
        if len(requests) < 2 or not all(request.can_share for request in requests):
            for request in requests:
                fulfil(request, self._clocks)
            return requests
        before = [_extent(request) if isinstance(request, Propose) else request.past for request in requests]
        try:
            share(requests, self._clocks, self._make)
        except Exception as error:
            for request, extent in zip(requests, before, strict=True):
                if _extent(request) in (extent, -1):
                    fulfil(request, self._clocks)
                else:  # memory for the result was short: a pass that has changed its session cannot be repeated
                    request.error = own_copy(error)
        return requests


def generate(context: Context, text: Text) -> Generator[Piece, None, None]:
    """Decode a text alone, step by step. Raises the error that ends it, and as Text.begin."""
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
    """Set the batch load of texts to those that take steps now, which are expected to share their next pass, too."""
    rows = tokens = 0.0
    loads = {}
    for text, request in steps.items():
        loads[text] = request.num_rows, float(request.tree.scores.sum())
        rows, tokens = rows + loads[text][0], tokens + loads[text][1]
    for text in texts:
        own_rows, own_tokens = loads.get(text, (0, 0.0))
        assert text.context
        batch = text.context.batch
        batch.sequences = 1 + len(loads) - (text in loads)
        batch.rows, batch.tokens = int(rows) - own_rows, tokens - own_tokens


def own_copy(error: BaseException) -> BaseException:
    """A copy of an error that ends several sequences, for one of them; each reader that raises an exception adds to its
    traceback. Errors that cannot be copied are returned themselves."""
    if isinstance(error, MemoryError):  # there may be no memory for it
        return error
    try:
        copied = copy.copy(error)
    except Exception:  # its constructor takes other arguments
        return error
    copied.__cause__ = error.__cause__
    return copied.with_traceback(error.__traceback__)


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
    tokens = float(len(trees))
    best, best_rate = 0, tokens / (spent + cost(len(trees)))
    guesses = sorted((-score, i, tree) for tree, scores in enumerate(trees) for i, score in enumerate(scores) if i)
    for n, (score, _, _) in enumerate(guesses, 1):
        tokens -= score
        if (rate := tokens / (spent + cost(len(trees) + n))) > best_rate:
            best, best_rate = n, rate
    for _, _, tree in guesses[:best]:
        rows[tree] += 1
    return rows


def _extent(request: AnyRequest) -> int:
    """What a pass changes: the pending rows of a draft's session, or the tokens of the target's. -1 if it is closed, in
    a call, or its device lost, which its own pass raises; -2 if memory is too short even for the tokens."""
    try:
        return request.session.num_pending if isinstance(request, Propose) else len(request.session.tokens)
    except MemoryError:
        return -2
    except (ValueError, RuntimeError, OSError):
        return -1
