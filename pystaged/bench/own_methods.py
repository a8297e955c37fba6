"""Runner for pystaged's own methods, which share a bundle's weights and have separate contexts."""

from __future__ import annotations

import time
from itertools import cycle, product
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pystaged._core import RecycledCandidates, Session
from pystaged.bench.suite import SAMPLINGS
from pystaged.bench.worker import Measurement
from pystaged.decoding.context import Context
from pystaged.decoding.cost import PassCost
from pystaged.decoding.policy import GainPolicy
from pystaged.decoding.stepper import generate
from pystaged.decoding.text import Text, TokenRoles
from pystaged.drafting.drafter import TreeDrafter
from pystaged.drafting.lookups import LOOKUP_SECONDS, lookups
from pystaged.drafting.model import draft_proposer
from pystaged.loading.bundle import Bundle
from pystaged.loading.factory import ContextFactory
from pystaged.options.config import GenerationConfig, SamplingConfig

_DRAFTING = "staged", "n-grams"  # the methods that use recycled candidates


class _Ready(TreeDrafter):
    """Reads the prompt before decoding is timed; it drafts whether or not it gains."""

    def start(self, context: NDArray[np.int32], **options: Any) -> None:
        super().start(context, **options)
        self.catch_up()


class Runner:
    """Decodes with the methods of methods.OURS.

    Args:
        setup: model, draft (path or None), threads, n_ctx; warm: prompts (lists of tokens) that are continued first, by
            max_tokens each, to fill the recycled candidates. Without any there are no recycled candidates.
    """

    def __init__(self, setup: dict[str, Any]) -> None:
        self._bundle = Bundle(setup["model"], draft=setup["draft"], num_threads=setup["threads"], recycle=False)
        self._factory = ContextFactory(self._bundle)
        self._n_ctx = setup["n_ctx"]
        self._warm, self._warm_tokens = setup.get("warm", []), setup.get("max_tokens", 0)
        # One context for each sampling, because acceptance rates differ between samplings.
        self._contexts: dict[tuple[str, SamplingConfig], Context] = {}
        # Recycled candidates shared by all drafters, and a copy from before the first measured prompt.
        self._recycled: tuple[RecycledCandidates, RecycledCandidates] | None = None
        # Measured here, so that it does not happen while a method is timed.
        self._factory.target_cost()
        self._factory.draft_cost()

    def run(self, job: dict[str, Any]) -> Measurement:
        if self._warm and job["way"] in _DRAFTING:
            self._remember()
        key = job["way"], job["sampling"]
        if key not in self._contexts:
            self._contexts[key] = self._context(job["way"])
        return self._generate(self._contexts[key], job)

    def close(self) -> None:
        for context in self._contexts.values():
            context.close()
        self._contexts.clear()
        self._recycled = self._bundle.recycled = None

    def _remember(self) -> None:
        """Fill the recycled candidates with the prompts of `warm`, or restore them to that state."""
        if self._recycled is None:
            recycled = self._bundle.recycled = RecycledCandidates()
            keys = list(product(_DRAFTING, SAMPLINGS.values()))
            self._contexts |= {(way, sampling): self._context(way) for way, sampling in keys}
            for prompt, (way, sampling) in zip(self._warm, cycle(keys), strict=False):
                job = {"prompt": prompt, "sampling": sampling, "max_tokens": self._warm_tokens}
                self._generate(self._contexts[way, sampling], job)
            at_first = RecycledCandidates()
            at_first.copy_from(recycled)
            self._recycled = recycled, at_first
        recycled, at_first = self._recycled
        recycled.copy_from(at_first)

    def _context(self, way: str) -> Context:
        bundle = self._bundle
        if way == "staged":
            return self._factory.context(self._n_ctx, None)
        target, vocab_size = Session(bundle.target, self._n_ctx), bundle.target.vocab_size
        if way == "plain":
            return Context(target)
        policy = GainPolicy(self._factory.target_cost())
        if way == "n-grams":
            proposers = lookups(bundle.table, bundle.recycled)
            return Context(target, _Ready(proposers, policy, vocab_size, cost=PassCost({1: LOOKUP_SECONDS})))
        draft, draft_cost = bundle.draft, self._factory.draft_cost()
        if draft is None or draft_cost is None:
            raise ValueError(f"{way} needs a draft")
        proposer = draft_proposer(Session(draft, self._n_ctx), bundle.draft_mask, draft_cost, bundle.substitutes)
        return Context(target, _Ready([proposer], policy, vocab_size))

    def _generate(self, context: Context, job: dict[str, Any]) -> Measurement:
        config = GenerationConfig(sampling=job["sampling"], max_tokens=job["max_tokens"])
        roles = TokenRoles(is_end=self._bundle.tokenizer.is_end)
        text = Text(job["prompt"], np.array(job["prompt"], np.int32), config, roles=roles)
        # Forget the last sequence, so that no method can reuse part of this prompt.
        for session in context.sessions:
            session.rewind(0)
        begin, first = time.perf_counter(), 0.0
        for _ in generate(context, text):
            first = first or time.perf_counter() - begin
        stats = text.stats
        return Measurement(
            len(text.tokens) + (text.finish == "stop"),  # the end of text is a token, too
            stats.decode_seconds,
            first,
            text.tokens,
            stats.steps,
            parts={
                "target passes": stats.target_seconds,
                "draft passes": stats.native_seconds - stats.target_seconds,
                "n-grams, policy, Python": stats.decode_seconds - stats.native_seconds,
            },
            offered=dict(stats.offered),
            taken=dict(stats.taken),
        )
