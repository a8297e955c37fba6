"""Make a bundle's contexts, each with the drafters that the bundle has and their measured costs."""

from __future__ import annotations

from collections.abc import Sequence

from pystaged._core import Model, Session
from pystaged.backends.devices import open_session
from pystaged.decoding.batch_load import BatchLoad
from pystaged.decoding.cost import PassCost
from pystaged.decoding.decoder import Decoder
from pystaged.decoding.drafter import Drafter
from pystaged.decoding.experts import ExpertCost
from pystaged.decoding.meter import Meter
from pystaged.decoding.policy import GainPolicy, TreePolicy
from pystaged.drafting.drafter import TreeDrafter
from pystaged.drafting.features import feature_proposer
from pystaged.drafting.head import HeadProposer, measure_head
from pystaged.drafting.lookups import NgramCost, lookups
from pystaged.drafting.pard import draft_proposer
from pystaged.drafting.proposer import Proposer
from pystaged.loading.bundle import Bundle
from pystaged.loading.costs import DRAFT_RATE, HEAD_RATE, NGRAM_RATE


class DecoderFactory:
    """Makes a bundle's decoders, and knows the costs of its models' passes and of its lookups.

    Attributes:
        ngram_cost, head_cost: of lookups, without and with the draft head's steps; None without a head.
        features_cost: of lookups with passes of a draft that reads hidden states; None without one.
    """

    def __init__(self, bundle: Bundle) -> None:
        self._bundle = bundle
        self.ngram_cost = NgramCost()
        self.head_cost = measure_head(bundle.head, bundle.target, self.ngram_cost) if bundle.head else None
        self.features_cost: NgramCost | None = None
        self._chains = any(model.is_chained for model in (bundle.target, bundle.draft) if model)

    def target_cost(self, *, again: bool = False) -> PassCost:
        """Seconds of a pass of the target, measured or loaded."""
        bundle = self._bundle
        return bundle.costs.of(bundle.path, bundle.device, bundle.target, again=again)

    def draft_cost(self, *, again: bool = False) -> PassCost | None:
        """Seconds of a pass of the draft model, or of the draft that reads hidden states; None without one."""
        bundle = self._bundle
        if bundle.draft_path is None:
            return None
        if bundle.features:
            return bundle.costs.of(bundle.draft_path, "cpu", bundle.features, bundle.target, again=again)
        return (
            bundle.costs.of(bundle.draft_path, bundle.draft_device, bundle.draft, again=again) if bundle.draft else None
        )

    def level_cost(self, draft_cost: PassCost) -> PassCost:
        """Seconds that another level of the draft's tree takes: a pass, or for a parallel draft a lookup."""
        return draft_cost if self._bundle.draft_mask < 0 else self.ngram_cost.lookup

    def decoder(self, n_ctx: int, policy: TreePolicy | None, source: Decoder | None = None, length: int = 0) -> Decoder:
        """A new context with its drafters.

        Args:
            n_ctx: positions, 0 for the default.
            policy: how draft trees grow, with one drafter that always drafts; None to decide by measured costs.
            source: another decoder with the same options, whose drafters' statistics are copied.
            length: number of the source's tokens to begin with, limited to what its sessions hold.
        """
        bundle = self._bundle
        begun = iter(source.sessions if source and length else [])
        target = _begin(bundle.target, n_ctx, next(begun, None), length)
        draft = None
        if drafting := bundle.draft or bundle.features:
            lender = target if bundle.features else None
            draft = _begin(drafting, min(target.n_ctx, drafting.max_context), next(begun, None), length, lender)
        decoder = self._priced(target, draft) if policy is None else self._free(target, draft, policy)
        if source:
            decoder.inherit(source)
        return decoder

    def _level(self, features: Model, draft_cost: PassCost) -> NgramCost:
        """Cost of lookups with the pass that each level of a tree takes; a draft that proposes for all levels at once
        takes none."""
        if self.features_cost is None:
            lookup = self.ngram_cost.lookup
            passes = {n: 0.0 if features.block_size else seconds for n, seconds in draft_cost.seconds.items()}
            level = PassCost({n: seconds + lookup(n) for n, seconds in passes.items()})
            self.features_cost = NgramCost(level, self.ngram_cost.read)
        return self.features_cost

    def _free(self, target: Session, draft: Session | None, policy: TreePolicy) -> Decoder:
        """A decoder with one drafter, which always drafts."""
        bundle = self._bundle
        proposers: list[Proposer] = [*lookups(bundle.table, bundle.recycled)]
        if draft and bundle.features:
            proposers.append(feature_proposer(draft, bundle.features, target))
        elif draft:
            proposers = [draft_proposer(draft, bundle.draft_mask, substitutes=bundle.substitutes)]
        elif bundle.head:
            proposers.append(HeadProposer(bundle.head, bundle.target, target))
        return Decoder(target, TreeDrafter(proposers, policy, bundle.target.vocab_size, chains=self._chains))

    def _priced(self, target: Session, draft: Session | None) -> Decoder:
        """A decoder that asks the drafter with the highest expected gain, if any gains."""
        bundle, target_cost, draft_cost = self._bundle, self.target_cost(), self.draft_cost()
        batch, meter = BatchLoad(), Meter()
        experts = target_cost if isinstance(target_cost, ExpertCost) else None

        def drafter(proposers: Sequence[Proposer], expanding: PassCost, own: PassCost | None) -> TreeDrafter:
            policy = GainPolicy(target_cost, expanding, batch=batch)
            size, chains = bundle.target.vocab_size, self._chains
            return TreeDrafter(proposers, policy, size, cost=own, meter=meter, experts=experts, chains=chains)

        def by_lookups(cost: NgramCost, *more: Proposer) -> TreeDrafter:
            found = lookups(bundle.table, bundle.recycled, cost)
            return drafter([*found, *more], cost.lookup, cost.lookup)

        drafters: dict[Drafter, float] = {}
        if draft and draft_cost and bundle.features:
            proposer = feature_proposer(draft, bundle.features, target, draft_cost)
            drafters[by_lookups(self._level(bundle.features, draft_cost), proposer)] = HEAD_RATE
        elif draft and draft_cost:
            # A draft model drafts alone: lookups hardly ever help it.
            by_draft = draft_proposer(draft, bundle.draft_mask, draft_cost, bundle.substitutes)
            drafters[drafter([by_draft], self.level_cost(draft_cost), None)] = DRAFT_RATE
        elif bundle.head and self.head_cost:
            drafters[by_lookups(self.head_cost, HeadProposer(bundle.head, bundle.target, target))] = HEAD_RATE
        # N-grams also draft for the target directly: where it is small, no draft model is cheap enough.
        drafters[by_lookups(self.ngram_cost)] = NGRAM_RATE
        return Decoder(target, *drafters, cost=target_cost, rates=list(drafters.values()), batch=batch, meter=meter)


def _begin(model: Model, n_ctx: int, source: Session | None, length: int, target: Session | None = None) -> Session:
    """A session that begins with up to `length` tokens of `source`, or an empty one; `target` of a draft that reads its
    hidden states."""
    if target and model.borrows_cells:
        return Session(model, n_ctx, target)
    if source:
        try:
            return source.fork(min(length, len(source.tokens)))
        except ValueError:  # it was reset or closed
            pass
    return open_session(model, n_ctx)
