"""The runner of our own ways to decode, which share a pair's weights; each has contexts of its own."""

from __future__ import annotations

import time
from typing import Any

import numpy as np

from pystaged._core import Session
from pystaged.bench.synthetic import ScriptedDrafter
from pystaged.config import SamplingConfig
from pystaged.decoding.loop import Decoder
from pystaged.decoding.policy import GainPolicy
from pystaged.drafting.model import ModelDrafter
from pystaged.drafting.ngrams import NgramDrafter
from pystaged.loading.pair import Pair
from pystaged.stats import GenerationStats


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
        self._sampling: dict[str, Any] = {}
        # Now, not while another way is being timed.
        self._pair.target_cost()
        self._pair.draft_cost()

    def run(self, job: dict[str, Any]) -> dict[str, Any]:
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
        target = Session(pair.target, self._n_ctx)
        if way == "plain":
            return Decoder(target)
        if way == "n-grams":
            policy = GainPolicy(pair.target_cost(), pair.ngram_cost.lookup)
            return Decoder(target, NgramDrafter(pair.table, policy, pair.target.vocab_size))
        draft_cost = pair.draft_cost()
        if way == "synthetic":
            session = Session(pair.draft, self._n_ctx) if pair.draft else None
            return Decoder(
                target,
                ScriptedDrafter(
                    self._accept,
                    session,
                    pair.target_cost(),
                    draft_cost or (lambda _: 0.0),
                    vocab_size=pair.target.vocab_size,
                ),
            )
        if pair.draft is None or draft_cost is None:
            raise ValueError(f"{way} needs a draft")
        policy = GainPolicy(pair.target_cost(), draft_cost, children={"tree": 4, "chain": 1}[way])
        session = Session(pair.draft, self._n_ctx)
        return Decoder(target, ModelDrafter(session, policy, cost=draft_cost, vocab_size=pair.target.vocab_size))

    def _generate(self, decoder: Decoder, job: dict[str, Any]) -> dict[str, Any]:
        prompt = np.array(job["prompt"], np.int32)
        # Forget the last text, so that no way finds a part of this prompt in its context.
        decoder.start(prompt[:1])
        for drafter in decoder.drafters:
            if isinstance(drafter, ScriptedDrafter):
                drafter.script = job["script"]
        sampling, stats = SamplingConfig(**job["sampling"]), GenerationStats()
        if job["way"] != "staged":
            # The others draft whatever it gains, so each reads the prompt before it is timed.
            decoder.start(prompt)
            for drafter in decoder.drafters:
                drafter.catch_up()
            decoder.target.truncate(0)
        tokens, first = list[int](), 0.0
        begin = time.perf_counter()
        # Past the end of text too, so that all ways write as many tokens.
        for step in decoder.generate(prompt, sampling, job["max_tokens"], stats=stats):
            tokens += step.tokens
            first = first or time.perf_counter() - begin
        drafting = stats.native_seconds - stats.target_seconds
        return {
            "counted": len(tokens),
            "seconds": stats.decode_seconds,
            "first_token_seconds": first,
            "tokens": tokens,
            "steps": stats.steps,
            "relative_weight_bytes": stats.relative_weight_bytes,
            "parts": {
                "target passes": stats.target_seconds,
                "draft passes": drafting,
                "n-grams, policy, Python": stats.decode_seconds - stats.native_seconds,
            },
            "emitted": {name: stage.emitted for name, stage in stats.stages.items()},
            "offered": dict(stats.offered),
            "taken": dict(stats.taken),
        }
