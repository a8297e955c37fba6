"""A target and what drafts for it, put together: models, vocabularies, n-gram table, measured costs."""

from __future__ import annotations

import math
import os
import platform
from collections.abc import Callable
from pathlib import Path

import numpy as np

from pystaged import hub
from pystaged._core import Model, Session, Tokenizer
from pystaged.config import SamplingConfig
from pystaged.cost import MEASURED_ROWS, CostStore, PassCost, measure
from pystaged.decode import Decoder
from pystaged.drafter import LOOKUP_SECONDS, Drafter, ModelDrafter, NgramDrafter
from pystaged.ngram import NgramTable
from pystaged.policy import FixedPolicy, GainPolicy, TreePolicy

_PYTHON_SECONDS = 120e-6  # around one pass of a draft, until measured
_DRAFT_RATE, _NGRAM_RATE = 0.75, 0.5  # acceptance by which drafters are judged before they have run


class Pair:
    """Everything about a target and its drafters that contexts share.

    Args and errors as in Engine.
    """

    def __init__(
        self, model: str | Path, draft: str | Path | None, num_threads: int, report: Callable[[str], None]
    ) -> None:
        self._num_threads = num_threads
        self._report = report
        self._store = CostStore()
        progress = hub.announced(report)
        self._path = hub.resolve(model, progress)
        self._draft_path = hub.resolve_draft(model, draft, progress)
        self.target, self.tokenizer = self._load(self._path)
        self.draft: Model | None = None
        if self._draft_path:
            self.draft, draft_tokenizer = self._load(self._draft_path)
            check_vocabularies(self.tokenizer, draft_tokenizer)
        self.table = house_table(self.tokenizer)
        self._costs: dict[Path, PassCost] = {}

    def decoder(self, n_ctx: int, policy: TreePolicy | None) -> Decoder:
        """A new context with its drafters."""
        target = Session(self.target, n_ctx)
        if policy is not None:
            return Decoder(target, self._model_drafter(policy) or self._ngram_drafter(policy))
        target_cost, draft_cost = self.target_cost(), self.draft_cost()
        # N-grams also draft for the target directly: where it is small, no draft model is cheap enough.
        drafters: list[Drafter] = [self._ngram_drafter(GainPolicy(target_cost, lambda width: width * LOOKUP_SECONDS))]
        gains = [expected_gain(target_cost, LOOKUP_SECONDS, _NGRAM_RATE)]
        if draft_cost:
            model = self._model_drafter(GainPolicy(target_cost, draft_cost), draft_cost)
            drafters = [model, *drafters] if model else drafters
            gains = [expected_gain(target_cost, draft_cost(1) + _PYTHON_SECONDS, _DRAFT_RATE), *gains]
        return Decoder(target, *drafters, cost=target_cost, gains=gains)

    def target_cost(self, *, again: bool = False) -> PassCost:
        """Seconds of a pass of the target, measured now or before."""
        return self._cost(self._path, self.target, again)

    def draft_cost(self, *, again: bool = False) -> PassCost | None:
        """The same for the draft, None where there is none."""
        return self._cost(self._draft_path, self.draft, again) if self.draft and self._draft_path else None

    def _load(self, path: Path) -> tuple[Model, Tokenizer]:
        # As bytes, because the name of a file need not be valid Unicode.
        tokenizer = Tokenizer(os.fsencode(path))
        model = Model(os.fsencode(path), os.environ.get("PYSTAGED_KERNEL", ""), self._num_threads)
        if tokenizer.num_tokens != model.vocab_size:
            raise ValueError(
                f"{path} has weights for {model.vocab_size} tokens, but a vocabulary of {tokenizer.num_tokens}"
            )
        return model, tokenizer

    def _ngram_drafter(self, policy: TreePolicy) -> NgramDrafter:
        return NgramDrafter(self.table, policy, self.target.vocab_size)

    def _model_drafter(self, policy: TreePolicy, cost: PassCost | None = None) -> ModelDrafter | None:
        if self.draft is None:
            return None
        # As the stage below it only extends paths, so no policy of its own matters.
        below = self._ngram_drafter(FixedPolicy(width=1, depth=1, budget=1))
        return ModelDrafter(Session(self.draft), policy, below=below, cost=cost, vocab_size=self.target.vocab_size)

    def _cost(self, path: Path, model: Model, again: bool) -> PassCost:
        if path in self._costs and not again:
            return self._costs[path]
        info = path.stat()
        machine = (platform.node(), platform.machine(), os.cpu_count(), model.kernel, model.num_threads)
        key = "|".join(map(str, (*machine, path, info.st_size, info.st_mtime_ns)))
        cost = None if again else self._store.load(key)
        if cost is None:
            self._report(f"measuring passes of {path.name} on this machine, once")
            cost = measure_passes(model)
            self._store.save(key, cost)
        self._costs[path] = cost
        return cost


def measure_passes(model: Model) -> PassCost:
    """Time a model's passes, candidates included."""
    session = Session(model)
    greedy = SamplingConfig().native

    def run(num_rows: int) -> None:
        session.evaluate(np.zeros(num_rows, np.int32), np.arange(-1, num_rows - 1, dtype=np.int32))
        session.candidates([num_rows - 1], 1, greedy)
        session.discard()

    try:
        return measure(run, most_rows=min(MEASURED_ROWS[-1], session.n_ctx))
    finally:
        session.close()


def check_vocabularies(target: Tokenizer, draft: Tokenizer) -> None:
    """Refuse a draft whose tokens mean something else; a padded vocabulary is no difference.

    Raises:
        ValueError: naming the first token that differs.
    """
    token = target.first_difference(draft)
    if token >= 0:
        meanings = [
            "the end of text" if tokenizer.is_end(token) else repr(tokenizer.token_bytes(token))
            for tokenizer in (target, draft)
        ]
        raise ValueError(
            f"the draft's vocabulary is not the target's: token {token} is {meanings[0]} in the target and "
            f"{meanings[1]} in the draft; choose a draft trained with the target's tokenizer"
        )


def house_table(tokenizer: Tokenizer) -> NgramTable | None:
    """The n-gram table in the package, None where it is for another vocabulary."""
    path = hub.house(hub.HOUSE_TABLE)
    if not path.exists():
        return None
    table = NgramTable.load(path)
    return table if table.vocab_hash == tokenizer.fingerprint else None


def expected_gain(target_cost: PassCost, pass_seconds: float, rate: float) -> float:
    """Seconds that a step with a chain of the best length gains over plain decoding; negative where none does.

    Args:
        pass_seconds: of drafting one more node.
        rate: acceptance of each.
    """
    tokens, chance, best = 1.0, 1.0, -math.inf
    for depth in range(1, 9):
        chance *= rate
        tokens += chance
        best = max(best, tokens * target_cost(1) - target_cost(depth + 1) - depth * pass_seconds)
    return best
