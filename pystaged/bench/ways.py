"""The runner of our own ways to decode, which share a pair's weights; each has contexts of its own."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pystaged._core import Session
from pystaged.bench.synthetic import ScriptedDrafter
from pystaged.bench.worker import Measurement
from pystaged.config import SamplingConfig
from pystaged.decoding.loop import Decoder
from pystaged.decoding.policy import GainPolicy
from pystaged.drafting.model import ModelDrafter
from pystaged.drafting.ngrams import NgramDrafter
from pystaged.loading.pair import Pair
from pystaged.stats import GenerationStats


class _Ready(Decoder):
    """Its drafters read the prompt before decoding is timed: they draft whatever it gains."""

    def start(self, prompt: NDArray[np.int32], *, speculate: bool = True) -> int:
        reused = super().start(prompt, speculate=speculate)
        for drafter in self.drafters:
            drafter.catch_up()
        return reused


class Runner:
    """Decodes in the ways of Spector & Ré's Table 2, and some more.

    Args:
        setup: model, draft (path or None), threads, n_ctx; accept: acceptance at depth for the way "synthetic".
    """

    def __init__(self, setup: dict[str, Any]) -> None:
        self._pair = Pair(setup["model"], setup["draft"], setup["threads"], lambda _: None)
        self._n_ctx = setup["n_ctx"]
        self._accept = setup["accept"]
        self._decoders: dict[str, Decoder] = {}
        self._sampling: SamplingConfig | None = None
        # Now, not while another way is being timed.
        self._pair.target_cost()
        self._pair.draft_cost()

    def run(self, job: dict[str, Any]) -> Measurement:
        if job["sampling"] != self._sampling:
            # Nothing learnt under one sampling helps the next.
            self.close()
            self._sampling = job["sampling"]
        way = job["way"]
        if way not in self._decoders:
            self._decoders[way] = self._decoder(way)
        return self._generate(self._decoders[way], job)

    def close(self) -> None:
        for decoder in self._decoders.values():
            decoder.close()
        self._decoders.clear()

    def _decoder(self, way: str) -> Decoder:
        pair = self._pair
        if way == "staged":
            return pair.decoder(self._n_ctx, None)
        target, vocab_size = Session(pair.target, self._n_ctx), pair.target.vocab_size
        if way == "plain":
            return Decoder(target)
        if way == "n-grams":
            policy = GainPolicy(pair.target_cost(), pair.ngram_cost.lookup)
            return _Ready(target, NgramDrafter(pair.table, policy, vocab_size))
        draft = Session(pair.draft, self._n_ctx) if pair.draft else None
        draft_cost = pair.draft_cost() or (lambda _: 0.0)
        if way == "synthetic":
            costs = pair.target_cost(), draft_cost
            return _Ready(target, ScriptedDrafter(self._accept, draft, *costs, vocab_size=vocab_size))
        if draft is None:
            raise ValueError(f"{way} needs a draft")
        policy = GainPolicy(pair.target_cost(), draft_cost, children={"tree": 4, "chain": 1}[way])
        return _Ready(target, ModelDrafter(draft, policy, cost=pair.draft_cost(), vocab_size=vocab_size))

    def _generate(self, decoder: Decoder, job: dict[str, Any]) -> Measurement:
        prompt, stats = np.array(job["prompt"], np.int32), GenerationStats()
        # Forget the last text, so that no way finds a part of this prompt in its context.
        decoder.start(prompt[:1])
        for drafter in decoder.drafters:
            if isinstance(drafter, ScriptedDrafter):
                drafter.script = job["script"]
        tokens, first = list[int](), 0.0
        begin = time.perf_counter()
        # Past the end of text too, so that all ways write as many tokens.
        for step in decoder.generate(prompt, job["sampling"], job["max_tokens"], stats=stats):
            first = first or time.perf_counter() - begin
            tokens += step.tokens
        return Measurement(
            len(tokens),
            stats.decode_seconds,
            first,
            tokens,
            stats.steps,
            stats.relative_weight_bytes,
            parts={
                "target passes": stats.target_seconds,
                "draft passes": stats.native_seconds - stats.target_seconds,
                "n-grams, policy, Python": stats.decode_seconds - stats.native_seconds,
            },
            emitted={name: stage.emitted for name, stage in stats.stages.items()},
            offered=dict(stats.offered),
            taken=dict(stats.taken),
        )
