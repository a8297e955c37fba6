"""Batched steps: each sequence drafts a tree, and one pass of the target verifies all trees.

The guesses of all trees are ranked together by score, and the n best are verified, where n maximizes

    (sequences + sum of scores) / (T(sequences + n) + drafting time, which is the time since the last pass).

Prefill runs in pieces in the same passes. The values of a row do not depend on the other rows, so batching changes no
token.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Generator, Sequence
from typing import Any

from pystaged._core import run
from pystaged.decoding.cost import PassCost
from pystaged.decoding.decoder import Decoder
from pystaged.decoding.requests import MOST_ROWS, Clocks, Done, Propose, Read, Request, Verify, fulfil, resume
from pystaged.stats import PassStats

PREFILL_BUDGET = 0.25  # longest time of a pass that decodes and prefills, in seconds
_LEAST_PIECE = 8  # least tokens of prefill in such a pass, however long it takes
_UNPRICED_PIECE = 32  # tokens of prefill in such a pass if no costs are known
_DRAFT_PIECE = 64  # tokens that a draft prefills in one step of a batch


class BatchMember:
    """A sequence of a batch: a generator of requests and of steps.

    decoder: its context from `begin` on; nobody else may use it meanwhile. request: its open request. rows: number of
    rows of its last verified tree, root included; gain: tokens that were expected from that tree.

    `on_step` is called with each step, `on_end` once, with the exception that ended the sequence or None.
    """

    def __init__(self) -> None:
        self.decoder: Decoder | None = None
        self.request: Request | None = None
        self.is_over = False
        self.rows, self.gain = 0, 0.0
        self._steps: Generator[Any, Any, None] | None = None

    def begin(self, decoder: Decoder, steps: Generator[Any, Any, None]) -> None:
        """Begin to decode in a context."""
        self.decoder, self._steps = decoder, steps

    def on_step(self, step: Any) -> None:
        raise NotImplementedError

    def on_end(self, error: BaseException | None) -> None:
        raise NotImplementedError

    @property
    def wants_draft(self) -> bool:
        """Whether its request is for a session other than the target's."""
        return bool(self.request and self.decoder and self.request.session is not self.decoder.target)

    def resume(self, answer: Done | BaseException | None) -> None:
        """Go on with the result or error of its request, up to the next request or step."""
        self.request = None
        try:
            if self._steps is None or self._is_running:
                raise RuntimeError("the process forked during a step of this sequence; generate it again")
            said = resume(self._steps, answer)
            if isinstance(said, Request):
                self.request = said
            else:
                self.on_step(said)
        except StopIteration:
            self.close()
        except BaseException as error:
            self.close(error)

    def note_tree(self) -> None:
        """Store the size and gain of the tree being verified, as an estimate of the next one."""
        if isinstance(self.request, Verify):
            self.rows, self.gain = self.request.num_rows, float(self.request.tree.scores.sum())

    def note_batch(self, steps: Sequence[BatchMember]) -> None:
        """Set its batch load to the members that take steps now, which are expected to share its next pass, too."""
        if self.decoder:
            others = [member for member in steps if member is not self]
            batch = self.decoder.batch
            batch.sequences = 1 + len(others)
            batch.rows = sum(member.rows for member in others)
            batch.tokens = sum(member.gain for member in others)

    def close(self, error: BaseException | None = None) -> None:
        """End the sequence; may be called from `on_step`. After a MemoryError it can be called again."""
        if self.is_over:
            return
        self.request = None
        try:
            if self._steps and not self._is_running:
                self._steps.close()
        except BaseException as other:
            error = error or other
        self.on_end(error)
        self.is_over = True

    @property
    def _is_running(self) -> bool:
        return self._steps is not None and inspect.getgeneratorstate(self._steps) == inspect.GEN_RUNNING


class Stepper:
    """Steps the sequences of one target together.

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

    def step(self, texts: Sequence[BatchMember]) -> None:
        """Step the batch by one pass of the target: each sequence takes a step, or prefills a piece of its prompt."""
        for text in texts:
            if text.request is None and not text.is_over:
                text.resume(None)
        self._draft(texts)
        asking = [text for text in texts if text.request and not text.wants_draft]
        steps = [text for text in asking if isinstance(text.request, Verify)]
        self._trim_trees([text.request for text in steps if isinstance(text.request, Verify)])
        self._portion_prompts([text.request for text in asking if isinstance(text.request, Read)], steps)
        asking = [text for text in asking if text.request and text.request.num_rows]
        answers = self._pass(asking)
        self._last = self._clocks.processor()
        self._count([text.request for text in asking if text.request], answers)
        for text in steps:
            text.note_tree()
        for text in asking:
            text.note_batch(steps)
        for text, answer in zip(asking, answers, strict=True):
            text.resume(answer)

    def _count(self, requests: Sequence[Request], answers: Sequence[Done | BaseException]) -> None:
        """Add the results of requests to the statistics of target passes."""
        made = [(each, done) for each, done in zip(requests, answers, strict=True) if isinstance(done, Done)]
        trees = [request.num_rows for request, _ in made if isinstance(request, Verify)]
        rows = sum(request.num_rows for request, _ in made)
        more = PassStats(
            passes=round(sum(done.share for _, done in made)),  # shares of one pass, or each request's own
            seconds=sum(done.share * done.seconds for _, done in made),
            rows=rows,
            prompt_rows=rows - sum(trees),
            guesses=sum(trees) - len(trees),
            steps=len(trees),
        )
        self.passes = self.passes.plus(more)

    def _draft(self, texts: Sequence[BatchMember]) -> None:
        """Make the requested draft passes, level by level; a draft that has more to prefill than a piece waits then.
        Pieces of drafts that read the target's hidden states are larger, as they take a small part of its time."""
        have_read: set[BatchMember] = set()
        while drafting := [text for text in texts if text.wants_draft and text not in have_read]:
            for text in drafting:
                if isinstance(text.request, Read):
                    most = _DRAFT_PIECE if len(texts) > 1 and text.request.hidden is None else MOST_ROWS
                    text.request.num_rows = min(len(text.request.tokens), most)
                    if text.request.num_rows < len(text.request.tokens):
                        have_read.add(text)
            for text, answer in zip(drafting, self._pass(drafting), strict=True):
                text.resume(answer)

    def _trim_trees(self, requests: Sequence[Verify]) -> None:
        """Trim each tree to the nodes that are worth verifying."""
        if self._cost and len(requests) > 1:
            cost, past = self._cost, _mean_past(requests)
            trees = [request.tree.scores.tolist() for request in requests]
            spent = max(0.0, self._clocks.processor() - self._last)  # negative after a change of threads
            rows = best_rows(trees, lambda n: cost(n, past), spent)
            for request, kept in zip(requests, rows, strict=True):
                request.tree = request.tree.head(kept)

    def _portion_prompts(self, requests: Sequence[Read], steps: Sequence[BatchMember]) -> None:
        """Set the rows of each prefill request beside these steps."""
        room = MOST_ROWS
        beside = sum(text.request.num_rows for text in steps if text.request)
        if beside and requests:
            past = _mean_past(requests)
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

    def _pass(self, texts: Sequence[BatchMember]) -> list[Done | BaseException]:
        """Answer requests by one pass; if it fails, by a pass for each, so that only the request at fault fails."""
        requests = [text.request for text in texts if text.request]
        if len(requests) < 2 or not all(request.can_share for request in requests):
            return [fulfil(request, self._clocks) for request in requests]
        pending = [_num_pending(request) for request in requests]
        try:
            return self._share(requests)
        except Exception as error:
            failure = error
        return [
            own_copy(failure) if _was_made(request, before) else fulfil(request, self._clocks)
            for request, before in zip(requests, pending, strict=True)
        ]

    def _share(self, requests: Sequence[Request]) -> list[Done | BaseException]:
        processor = self._clocks.of(requests[0])
        begin, processor_begin = self._clocks.wall(), processor()
        found = self._make([request.work() for request in requests])
        seconds, cost = self._clocks.wall() - begin, processor() - processor_begin
        rows = sum(request.num_rows for request in requests)
        past = _mean_past(requests)
        return [
            Done(request.result(each), request.num_rows / rows, rows, past, seconds, cost)
            for request, each in zip(requests, found, strict=True)
        ]


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


def _num_pending(request: Request) -> int:
    """Pending rows of a draft's session before its pass, -1 where the session is closed."""
    try:
        return request.session.num_pending if isinstance(request, Propose) else 0
    except ValueError:
        return -1


def _was_made(request: Request, pending: int) -> bool:
    """Whether a failed pass has changed its session, because memory for the result was short; it cannot be repeated.
    pending: the session's pending rows before it."""
    try:
        if isinstance(request, Propose):
            return request.session.num_pending != pending
        return len(request.session.tokens) != request.past
    except MemoryError:  # too short even for the tokens
        return True
    except (ValueError, RuntimeError, OSError):  # closed, in a call, or its device lost: its own pass raises that
        return False


def _mean_past(requests: Sequence[Request]) -> float:
    """Mean number of tokens before a row; a read whose num_rows is not set yet counts as one row."""
    rows = sum(max(1, request.num_rows) for request in requests)
    return sum(max(1, request.num_rows) * request.past for request in requests) / rows
