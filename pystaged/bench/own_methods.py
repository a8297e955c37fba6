"""Runner for pystaged's own methods, which share a bundle's weights and have separate contexts."""

from __future__ import annotations

import time
from itertools import cycle, product
from typing import Any

import numpy as np

from pystaged._core import RecycledCandidates, Session
from pystaged.bench.suite import SAMPLINGS
from pystaged.bench.worker import Measurement
from pystaged.decoding.decoder import Decoder
from pystaged.decoding.policy import GainPolicy
from pystaged.decoding.stepper import generate
from pystaged.drafting.drafter import TreeDrafter
from pystaged.drafting.lookups import NgramCost, lookups
from pystaged.drafting.pard import draft_proposer
from pystaged.loading.bundle import Bundle
from pystaged.loading.factory import DecoderFactory
from pystaged.options.config import SamplingConfig
from pystaged.stats import GenerationStats

_DRAFTING = "staged", "n-grams"  # the methods that use recycled candidates


class _Ready(Decoder):
    """Prefills its drafter before decoding is timed; it drafts whether or not it gains."""

    def _open(self) -> None:
        super()._open()
        if self.drafter:
            self.drafter.catch_up()


class Runner:
    """Decodes with the methods of methods.OURS.

    Args:
        setup: model, draft (path or None), threads, n_ctx; warm: prompts (lists of tokens) that are continued first, by
            max_tokens each, to fill the recycled candidates. Without any there are no recycled candidates.
    """

    def __init__(self, setup: dict[str, Any]) -> None:
        self._bundle = Bundle(setup["model"], draft=setup["draft"], num_threads=setup["threads"], recycle=False)
        self._factory = DecoderFactory(self._bundle)
        self._n_ctx = setup["n_ctx"]
        self._warm, self._warm_tokens = setup.get("warm", []), setup.get("max_tokens", 0)
        # One decoder for each sampling, because acceptance rates differ between samplings.
        self._decoders: dict[tuple[str, SamplingConfig], Decoder] = {}
        # Recycled candidates shared by all drafters, and a copy from before the first measured prompt.
        self._recycled: tuple[RecycledCandidates, RecycledCandidates] | None = None
        # Measured here, so that it does not happen while a method is timed.
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
        self._recycled = self._bundle.recycled = None

    def _remember(self) -> None:
        """Fill the recycled candidates with the prompts of `warm`, or restore them to that state."""
        if self._recycled is None:
            recycled = self._bundle.recycled = RecycledCandidates()
            keys = list(product(_DRAFTING, SAMPLINGS.values()))
            self._decoders |= {(way, sampling): self._decoder(way) for way, sampling in keys}
            for prompt, (way, sampling) in zip(self._warm, cycle(keys), strict=False):
                job = {"prompt": prompt, "sampling": sampling, "max_tokens": self._warm_tokens}
                self._generate(self._decoders[way, sampling], job)
            at_first = RecycledCandidates()
            at_first.copy_from(recycled)
            self._recycled = recycled, at_first
        recycled, at_first = self._recycled
        recycled.copy_from(at_first)

    def _decoder(self, way: str) -> Decoder:
        bundle = self._bundle
        if way == "staged":
            return self._factory.decoder(self._n_ctx, None)
        target, vocab_size = Session(bundle.target, self._n_ctx), bundle.target.vocab_size
        if way == "plain":
            return Decoder(target)
        policy = GainPolicy(self._factory.target_cost())
        if way == "n-grams":
            cost = NgramCost()
            proposers = lookups(bundle.table, bundle.recycled, cost)
            return _Ready(target, TreeDrafter(proposers, policy, vocab_size, cost=cost.lookup))
        draft, draft_cost = bundle.draft, self._factory.draft_cost()
        if draft is None or draft_cost is None:
            raise ValueError(f"{way} needs a draft")
        proposer = draft_proposer(Session(draft, self._n_ctx), bundle.draft_mask, draft_cost, bundle.substitutes)
        return _Ready(target, TreeDrafter([proposer], policy, vocab_size))

    def _generate(self, decoder: Decoder, job: dict[str, Any]) -> Measurement:
        prompt, stats = np.array(job["prompt"], np.int32), GenerationStats()
        # Forget the last sequence, so that no method can reuse part of this prompt.
        for session in decoder.sessions:
            session.rewind(0)
        tokens, first, ended = list[int](), 0.0, False
        begin, is_end = time.perf_counter(), self._bundle.tokenizer.is_end
        for step in generate(decoder, prompt, job["sampling"], job["max_tokens"], is_end=is_end, stats=stats):
            first = first or time.perf_counter() - begin
            tokens += step.tokens
            ended = step.finish_reason == "stop"
        return Measurement(
            len(tokens) + ended,  # the end of text is a token, too
            stats.decode_seconds,
            first,
            tokens,
            stats.steps,
            parts={
                "target passes": stats.target_seconds,
                "draft passes": stats.native_seconds - stats.target_seconds,
                "n-grams, policy, Python": stats.decode_seconds - stats.native_seconds,
            },
            offered=dict(stats.offered),
            taken=dict(stats.taken),
        )
