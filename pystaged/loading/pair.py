"""A target and what drafts for it, put together: draft or draft head, n-gram table, memory, measured costs."""

from __future__ import annotations

import itertools
import os
import weakref
from collections.abc import Callable
from pathlib import Path

import numpy as np

from pystaged._core import DraftHead, Model, ModelError, RecycledCandidates, Session, Tokenizer
from pystaged.backends.devices import candidates, check, close_model, load_model, open_session
from pystaged.decoding.budget import chain_speedup
from pystaged.decoding.cost import PassCost
from pystaged.decoding.crowd import Crowd
from pystaged.decoding.drafter import Drafter
from pystaged.decoding.loop import Decoder
from pystaged.decoding.meter import Meter
from pystaged.decoding.policy import FixedPolicy, GainPolicy, TreePolicy
from pystaged.drafting.head import HeadDrafter, measure_head
from pystaged.drafting.model import ModelDrafter
from pystaged.drafting.ngrams import NgramCost, NgramDrafter, measure_ngrams
from pystaged.loading import names
from pystaged.loading.costs import Costs
from pystaged.loading.heads import find_head, is_head, load_head
from pystaged.loading.memories import KeptMemory
from pystaged.loading.packed import load_packed
from pystaged.loading.progress import announced
from pystaged.loading.seen import SeenModel
from pystaged.loading.tables import find_table
from pystaged.memory import available_memory

_LEAST_SHARED = 0.9  # of the tokens of a target that a draft must have under the same number
_USUAL_CELLS = 1000  # of the texts for which devices are chosen
# How often first guesses are believed to be right before a drafter has been scored.
_DRAFT_RATE, _HEAD_RATE, _NGRAM_RATE = 0.75, 0.6, 0.53


class Pair:
    """Everything about a target and its drafters that contexts share.

    Args and errors as in Engine.
    """

    def __init__(
        self,
        model: str | Path,
        draft: str | Path | None,
        num_threads: int,
        report: Callable[[str], None],
        *,
        ngrams: str | Path | None = None,
        device: str = "cpu",
        draft_device: str = "cpu",
        kv: str = "f16",
        keep_packed: bool = False,
        memory: bool = False,
    ) -> None:
        check(device, kv)
        check(draft_device)
        self._report, self._keep_packed = report, keep_packed
        self._num_threads = num_threads
        self._kv = kv
        self._costs = Costs(report)
        progress = announced(report)
        self._path = names.resolve(model, progress)
        self.file = SeenModel.now(self._path)
        self._draft_path = names.resolve_draft(model, draft, progress)
        head_path = None
        if self._draft_path and is_head(self._draft_path):
            head_path, self._draft_path = self._draft_path, None
        # As bytes, because the name of a file need not be valid Unicode.
        try:
            self.tokenizer = Tokenizer(os.fsencode(self._path))
        except ModelError:
            if is_head(self._path):
                raise ValueError(
                    f"{self._path} is a draft head, not a model; name the model it was made for, and it as draft"
                ) from None
            raise
        self.vocabulary = self.tokenizer.fingerprint
        if head_path and device == "auto":
            report(f"on the cpu, where {head_path.name} can draft")
            device = "cpu"
        targets = {name: self._load(self._path, self.tokenizer, name) for name in candidates(device, kv)}
        drafts: dict[str, Model] = {}
        self.substitutes: dict[int, int] = {}
        if self._draft_path:
            draft_tokenizer = Tokenizer(os.fsencode(self._draft_path))
            self.substitutes = substitutes(self.tokenizer, draft_tokenizer)
            drafts = {
                name: self._load(self._draft_path, draft_tokenizer, name) for name in candidates(draft_device, kv)
            }
        self.table = find_table(self._draft_path or self._path, ngrams, self.tokenizer, report)
        self.ngram_cost = measure_ngrams(self.table, self.tokenizer.num_tokens, recycled=memory)
        self.head: DraftHead | None = None
        self.head_cost: NgramCost | None = None
        self.device, self.draft_device = self._fastest(targets, drafts)
        self.target = targets[self.device]
        if draft == "auto" and self.device == "cpu" and not self._draft_path:
            head_path = find_head(self.tokenizer, report)
        if head_path:
            if draft_device not in ("cpu", "auto"):
                raise ValueError(f"{head_path} is a draft head, which drafts on the cpu; leave out the draft's device")
            self.head = load_head(head_path, self.target, self.tokenizer)
            self.head_cost = measure_head(self.head, self.target, self.ngram_cost)
        self.recycled: RecycledCandidates | None = None
        self._memory: KeptMemory | None = None
        if memory:
            self._memory = KeptMemory(self._path, self.vocabulary, self.target.vocab_size)
            self.recycled = self._memory.candidates
            weakref.finalize(self, self._memory.save)  # programs end without closing what they loaded
        self.draft = drafts[self.draft_device] if drafts else None

    @property
    def path(self) -> Path:
        """The target's file."""
        return self._path

    def decoder(self, n_ctx: int, policy: TreePolicy | None, source: Decoder | None = None, length: int = 0) -> Decoder:
        """A new context with its drafters.

        Args:
            source: another one of the same options; what its drafters have learnt is believed from the beginning.
            length: begin with so many of its tokens, as far as its sessions hold them.
        """
        begun = iter(source.sessions if source and length else [])
        target = _begin(self.target, n_ctx, next(begun, None), length)
        draft = _begin(self.draft, 0, next(begun, None), length) if self.draft else None
        decoder = self._decoder(target, draft, policy)
        if source:
            decoder.inherit(source)
        return decoder

    @property
    def on_device(self) -> list[bool]:
        """Whether the target's contexts are on a device, and the draft's if there is one."""
        return [bool(model.devices) for model in (self.target, self.draft) if model is not None]

    def free_memory(self) -> int:
        """Bytes that are free on this machine beside the weights, about."""
        # What is mapped from a file counts as free.
        mapped = sum(model.matrix_bytes for model in (self.target, self.draft) if model and model.is_mapped)
        return max(available_memory() - mapped, 0)

    def _decoder(self, target: Session, draft: Session | None, policy: TreePolicy | None) -> Decoder:
        if policy is not None:
            if draft:
                return Decoder(target, self._model_drafter(draft, policy))
            if self.head:
                return Decoder(target, self._head_drafter(self.head, target, policy))
            return Decoder(target, self._ngram_drafter(policy, self.recycled))
        target_cost, draft_cost = self.target_cost(), self.draft_cost()
        # N-grams also draft for the target directly: where it is small, no draft model is cheap enough.
        lookup = self.ngram_cost.lookup
        crowd, meter = Crowd(), Meter()
        by_ngrams = GainPolicy(target_cost, lookup, crowd=crowd)
        drafters: list[Drafter] = [self._ngram_drafter(by_ngrams, self.recycled, self.ngram_cost, meter)]
        rates = [_NGRAM_RATE]
        if draft and draft_cost:
            by_draft = GainPolicy(target_cost, draft_cost, crowd=crowd)
            drafters.insert(0, self._model_drafter(draft, by_draft, draft_cost, meter))
            rates.insert(0, _DRAFT_RATE)
        elif self.head and self.head_cost:
            by_head = GainPolicy(target_cost, self.head_cost.lookup, crowd=crowd)
            drafters.insert(0, self._head_drafter(self.head, target, by_head, self.head_cost, meter))
            rates.insert(0, _HEAD_RATE)
        return Decoder(target, *drafters, cost=target_cost, rates=rates, crowd=crowd, meter=meter)

    def text_over(self) -> None:
        """Keep what the target said of its tokens, now and then."""
        if self._memory:
            self._memory.save_now_and_then()

    def close(self) -> None:
        """Keep what was learnt of costs and tokens, and hang up on RPC servers."""
        self._costs.save()
        if self._memory:
            self._memory.save()
        for model in (self.target, self.draft):
            if model is not None:
                close_model(model)

    def target_cost(self, *, again: bool = False) -> PassCost:
        """Seconds of a pass of the target, measured now or before."""
        return self._costs.of(self._path, self.device, self.target, again=again)

    def draft_cost(self, *, again: bool = False) -> PassCost | None:
        """The same for the draft, None where there is none."""
        if self.draft is None or self._draft_path is None:
            return None
        return self._costs.of(self._draft_path, self.draft_device, self.draft, again=again)

    def _fastest(self, targets: dict[str, Model], drafts: dict[str, Model]) -> tuple[str, str]:
        """The devices of target and draft that promise the most tokens per second by what passes cost on them."""
        pairs = list(itertools.product(targets, drafts or ["cpu"]))
        if len(pairs) == 1:
            return pairs[0]

        def rate(pair: tuple[str, str]) -> float:
            target_cost = self._costs.of(self._path, pair[0], targets[pair[0]])
            draft_cost = self._costs.of(self._draft_path, pair[1], drafts[pair[1]]) if self._draft_path else None
            plain = target_cost(1, _USUAL_CELLS)
            guesses = [(_NGRAM_RATE, self.ngram_cost.lookup(1))]
            if draft_cost:
                guesses.append((_DRAFT_RATE, draft_cost(1, _USUAL_CELLS)))

            def extra(num_rows: int) -> float:
                return target_cost(num_rows, _USUAL_CELLS) / plain - 1

            return max(1.0, *(chain_speedup(right, seconds / plain, extra) for right, seconds in guesses)) / plain

        return max(pairs, key=rate)

    def _load(self, path: Path, tokenizer: Tokenizer, device: str) -> Model:
        kernel = os.environ.get("PYSTAGED_KERNEL", "")
        if self._keep_packed and device == "cpu":
            model = load_packed(path, kernel, self._num_threads, self._report, self._kv)
        else:
            model = load_model(os.fsencode(path), kernel, self._num_threads, device, self._kv)
        if tokenizer.num_tokens != model.vocab_size:
            raise ValueError(
                f"{path} has weights for {model.vocab_size} tokens, but a vocabulary of {tokenizer.num_tokens}"
            )
        return model

    def _ngram_drafter(
        self,
        policy: TreePolicy,
        recycled: RecycledCandidates | None = None,
        cost: NgramCost | None = None,
        meter: Meter | None = None,
    ) -> NgramDrafter:
        return NgramDrafter(self.table, policy, self.target.vocab_size, recycled=recycled, cost=cost, meter=meter)

    def _head_drafter(
        self,
        head: DraftHead,
        target: Session,
        policy: TreePolicy,
        cost: NgramCost | None = None,
        meter: Meter | None = None,
    ) -> HeadDrafter:
        return HeadDrafter(
            head,
            self.target,
            target,
            self.table,
            policy,
            self.target.vocab_size,
            recycled=self.recycled,
            cost=cost,
            meter=meter,
        )

    def _model_drafter(
        self, draft: Session, policy: TreePolicy, cost: PassCost | None = None, meter: Meter | None = None
    ) -> ModelDrafter:
        # As the stage below it only extends paths, so no policy of its own matters. It knows nothing recycled: a draft
        # that knows the text is hardly ever helped by it, and rows of its passes are dear.
        one = FixedPolicy(width=1, depth=1, budget=1)
        below = self._ngram_drafter(one, None, self.ngram_cost if cost else None, meter)
        return ModelDrafter(
            draft,
            policy,
            below=below,
            cost=cost,
            vocab_size=self.target.vocab_size,
            substitutes=self.substitutes,
            meter=meter,
        )


def _begin(model: Model, n_ctx: int, source: Session | None, length: int) -> Session:
    """A session that begins with as many tokens of another one, or as it has."""
    if source:
        try:
            return source.fork(min(length, len(source.tokens)))
        except ValueError:  # its text has begun anew, or it is closed
            pass
    return open_session(model, n_ctx)


def substitutes(target: Tokenizer, draft: Tokenizer) -> dict[int, int]:
    """What a draft reads in place of the target's tokens that it lacks or that mean something else to it: a line's end.

    Pairs of a family differ in a few tokens, such as the marks of a chat, and in padding.

    Raises:
        ValueError: they differ in more than a tenth of the tokens that both number; names the first.
    """
    shared = target.shared_with(draft)
    both = min(target.num_tokens, draft.num_tokens)
    if shared[:both].mean() < _LEAST_SHARED:
        token = int(np.argmin(shared[:both]))
        meanings = [
            "the end of text" if tokenizer.is_end(token) else repr(tokenizer.token_bytes(token, True))
            for tokenizer in (target, draft)
        ]
        raise ValueError(
            f"the draft's vocabulary is not the target's: token {token} is {meanings[0]} in the target and "
            f"{meanings[1]} in the draft; choose a draft trained with the target's tokenizer"
        )
    try:
        neutral = int(draft.encode("\n", add_special=False)[-1])
    except (ValueError, IndexError):  # a vocabulary that cannot spell it
        neutral = int(np.argmax(shared))
    return dict.fromkeys(np.nonzero(~shared)[0].tolist(), neutral)
