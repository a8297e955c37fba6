"""The runner of our own ways to decode, which share a pair's weights; each has contexts of its own."""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate, cycle, product
from operator import mul
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from pystaged._core import RecycledCandidates, Session
from pystaged.bench.suite import SAMPLINGS
from pystaged.bench.worker import Measurement
from pystaged.config import SamplingConfig
from pystaged.decoding.constraint import Constraint
from pystaged.decoding.loop import Decoder, Progress
from pystaged.decoding.opening import Opening
from pystaged.decoding.policy import FixedPolicy, GainPolicy, TreePolicy
from pystaged.decoding.requests import Requests, finish
from pystaged.decoding.tree import Stage, TokenTree, TreeBuilder
from pystaged.drafting.model import ModelDrafter
from pystaged.drafting.ngrams import NgramDrafter
from pystaged.loading.bundle import Bundle
from pystaged.loading.factory import DecoderFactory
from pystaged.stats import DrafterStats, GenerationStats

_DRAFTING = "staged", "n-grams"  # the ways that remember


class _Ready(Decoder):
    """Its drafters read the prompt before decoding is timed: they draft whatever it gains."""

    def start(
        self,
        prompt: NDArray[np.int32],
        *,
        speculate: bool = True,
        progress: Progress | None = None,
        greedy: bool = True,
        constraint: Constraint | None = None,
        opening: Opening | None = None,
    ) -> Requests[int]:
        reused = yield from super().start(
            prompt, speculate=speculate, progress=progress, greedy=greedy, constraint=constraint, opening=opening
        )
        for drafter in self.drafters:
            yield from drafter.catch_up()
        return reused


class Runner:
    """Decodes in the ways of Spector & Ré's Table 2, and some more.

    Args:
        setup: model, draft (path or None), threads, n_ctx; accept: acceptance at depth for the way "synthetic"; warm:
            prompts, lists of tokens, that what drafts has continued before, by max_tokens each, and remembers; without
            any it has no memory.
    """

    def __init__(self, setup: dict[str, Any]) -> None:
        self._bundle = Bundle(setup["model"], setup["draft"], setup["threads"], lambda _: None)
        self._factory = DecoderFactory(self._bundle)
        self._n_ctx = setup["n_ctx"]
        self._accept = setup["accept"]
        self._warm, self._warm_tokens = setup.get("warm", []), setup.get("max_tokens", 0)
        # Rates of acceptance learnt under one sampling do not help another.
        self._decoders: dict[tuple[str, SamplingConfig], Decoder] = {}
        # What all that draft share, and as it was before the first prompt measured.
        self._memory: tuple[RecycledCandidates, RecycledCandidates] | None = None
        # Now, not while another way is being timed.
        self._factory.target_cost()
        self._factory.draft_cost()

    def run(self, job: dict[str, Any]) -> Measurement:
        if self._warm and job["way"] in _DRAFTING:
            self._remember()
        key = job["way"], job["sampling"]
        if key not in self._decoders:
            self._decoders[key] = self._decoder(job["way"])
        return self._generate(self._decoders[key], job)

    def close(self) -> None:
        for decoder in self._decoders.values():
            decoder.close()
        self._decoders.clear()
        self._memory = self._bundle.recycled = None

    def _remember(self) -> None:
        """The memory as the prompts of `warm` leave it, which the ways that draft continue in turn."""
        if self._memory is None:
            memory = self._bundle.recycled = RecycledCandidates()
            keys = list(product(_DRAFTING, SAMPLINGS.values()))
            self._decoders |= {(way, sampling): self._decoder(way) for way, sampling in keys}
            for prompt, (way, sampling) in zip(self._warm, cycle(keys), strict=False):
                job = {"prompt": prompt, "sampling": sampling, "max_tokens": self._warm_tokens}
                self._generate(self._decoders[way, sampling], job)
            at_first = RecycledCandidates()
            at_first.copy_from(memory)
            self._memory = memory, at_first
        memory, at_first = self._memory
        memory.copy_from(at_first)

    def _decoder(self, way: str) -> Decoder:
        bundle = self._bundle
        if way == "staged":
            return self._factory.decoder(self._n_ctx, None)
        target, vocab_size = Session(bundle.target, self._n_ctx), bundle.target.vocab_size
        if way == "plain":
            return Decoder(target)
        if way == "n-grams":
            policy = GainPolicy(self._factory.target_cost(), self._factory.ngram_cost.lookup)
            drafter = NgramDrafter(bundle.table, policy, vocab_size, recycled=bundle.recycled)
            return _Ready(target, drafter)
        draft = Session(bundle.draft, self._n_ctx) if bundle.draft else None
        draft_cost = self._factory.draft_cost() or (lambda *_: 0.0)
        if way == "synthetic":
            return _Ready(
                target,
                ScriptedDrafter(
                    self._accept,
                    draft,
                    self._factory.target_cost(),
                    draft_cost,
                    vocab_size=vocab_size,
                    substitutes=bundle.substitutes,
                ),
            )
        if draft is None:
            raise ValueError(f"{way} needs a draft")
        policy = GainPolicy(self._factory.target_cost(), draft_cost, children={"tree": 4, "chain": 1}[way])
        return _Ready(target, self._model(draft, policy))

    def _model(self, draft: Session, policy: TreePolicy) -> ModelDrafter:
        bundle = self._bundle
        return ModelDrafter(
            draft,
            policy,
            cost=self._factory.draft_cost(),
            vocab_size=bundle.target.vocab_size,
            substitutes=bundle.substitutes,
        )

    def _generate(self, decoder: Decoder, job: dict[str, Any]) -> Measurement:
        prompt, stats = np.array(job["prompt"], np.int32), GenerationStats()
        # Forget the last text, so that no way finds a part of this prompt in its context.
        finish(decoder.start(prompt[:1]))
        for drafter in decoder.drafters:
            if isinstance(drafter, ScriptedDrafter):
                drafter.script = job["script"]
        tokens, first, ended = list[int](), 0.0, False
        begin, is_end = time.perf_counter(), self._bundle.tokenizer.is_end
        for step in decoder.generate(prompt, job["sampling"], job["max_tokens"], is_end=is_end, stats=stats):
            first = first or time.perf_counter() - begin
            tokens += step.tokens
            ended = step.finish_reason == "stop"
        return Measurement(
            len(tokens) + ended,  # the end is a token, too
            stats.decode_seconds,
            first,
            tokens,
            stats.steps,
            parts={
                "target passes": stats.target_seconds,
                "draft passes": stats.native_seconds - stats.target_seconds,
                "n-grams, policy, Python": stats.decode_seconds - stats.native_seconds,
            },
            emitted={name: stage.emitted for name, stage in stats.stages.items()},
            offered=dict(stats.offered),
            taken=dict(stats.taken),
        )


class ScriptedDrafter(ModelDrafter):
    """Proposes a chain that is right with given probabilities: what a draft would gain that one does not have.

    It knows what plain decoding writes (`script`, from the prompt on), and makes the passes of a draft for their cost
    alone.

    Args:
        accept: probability that the node at depth 1, 2, ... is right if the one above it is.
        session: of the draft, None where drafting costs nothing.
        target_cost: seconds of a target pass over n rows where a text begins. draft_cost: of a draft pass. They set the
            chain's length: the one with the most expected tokens per second.
        vocab_size: wrong tokens are drawn below this.
        substitutes: as in ModelDrafter.
        seed: of what is right and what is wrong.
    """

    def __init__(
        self,
        accept: Sequence[float],
        session: Session | None,
        target_cost: Callable[[int], float],
        draft_cost: Callable[[int], float],
        *,
        vocab_size: int,
        substitutes: Mapping[int, int] | None = None,
        seed: int = 0,
    ) -> None:
        self._accept, self._scores = list(accept), list(accumulate(accept, mul))
        expected = [
            (1 + sum(self._scores[:depth])) / (target_cost(depth + 1) + depth * draft_cost(1))
            for depth in range(len(accept) + 1)
        ]
        self.length = expected.index(max(expected))
        self.script: Sequence[int] = ()
        self._at = 0  # of the script
        self._right = True
        self._is_free = session is None
        self._random = random.Random(seed)
        policy = FixedPolicy(width=1, depth=max(1, self.length), budget=max(1, self.length), children=1)
        session = session or cast(Session, _Free())
        super().__init__(session, policy, vocab_size=vocab_size, substitutes=substitutes)

    def work(self) -> dict[str, DrafterStats]:
        return {"draft": DrafterStats(seconds=self.stats.seconds)} if self._is_free else super().work()

    def start(self, context: NDArray[np.int32]) -> None:
        super().start(context)
        self._at = 0

    def draft(self, sampling: SamplingConfig, max_depth: int, seconds: float = math.inf) -> Requests[TokenTree]:
        self._right = True
        return super().draft(sampling, min(max_depth, self.length, len(self.script) - self._at), seconds)

    def advance(self, tokens: Sequence[int]) -> None:
        super().advance(tokens)
        self._at += len(tokens)

    def _expand(self, builder: TreeBuilder, node: int, *_: object) -> None:
        depth = builder.nodes[node].depth
        self._right = self._right and self._random.random() < self._accept[depth]
        token = self.script[self._at + depth]
        if not self._right:
            token = (token + self._random.randrange(1, self._vocab_size)) % self._vocab_size
        builder.add(node, token, self._scores[depth], Stage.DRAFT, (Stage.DRAFT, 0, 0))


class _Free:
    """A session that costs nothing."""

    n_ctx = vocab_size = 2**31 - 1
    weight_bytes = num_pending = 0
    tokens = np.empty(0, np.int32)

    def candidates(self, rows: list[int], *_: object) -> tuple[NDArray[np.int32], NDArray[np.float32]]:
        return np.zeros((len(rows), 1), np.int32), np.zeros((len(rows), 1), np.float32)

    def truncate(self, length: int) -> int:
        return length

    def __getattr__(self, name: str) -> Any:
        return lambda *_: 0
