"""Make a bundle's contexts, each with a drafter of all proposers that the bundle has and their costs."""

from __future__ import annotations

from pystaged._core import Model, Session
from pystaged.backends.devices import open_session
from pystaged.decoding.account import Meter
from pystaged.decoding.context import Context
from pystaged.decoding.cost import PassCost
from pystaged.decoding.policy import BatchLoad, GainPolicy, TreePolicy
from pystaged.drafting.drafter import TreeDrafter
from pystaged.drafting.features import feature_proposer
from pystaged.drafting.lookups import LOOKUP_SECONDS, lookups
from pystaged.drafting.model import draft_proposer
from pystaged.drafting.proposer import Proposer
from pystaged.loading.bundle import Bundle


class ContextFactory:
    """Makes a bundle's contexts, and knows the costs of its models' passes and of its lookups."""

    def __init__(self, bundle: Bundle) -> None:
        self._bundle = bundle
        self._lookup_cost = PassCost({1: LOOKUP_SECONDS})
        self._chains = any(model.is_chained for model in (bundle.target, bundle.draft) if model)

    def target_cost(self) -> PassCost:
        """Seconds of a pass of the target, measured or loaded."""
        bundle = self._bundle
        return bundle.costs.of(bundle.path, bundle.device, bundle.target)

    def draft_cost(self) -> PassCost | None:
        """Seconds of a pass of the draft model, or of the draft that reads hidden states; None without one."""
        bundle = self._bundle
        if bundle.draft_path is None:
            return None
        if bundle.features:
            share = bundle.features.weight_bytes / bundle.target.weight_bytes
            return bundle.costs.of(bundle.draft_path, "cpu", bundle.features, like=self.target_cost().share(share))
        return bundle.costs.of(bundle.draft_path, bundle.draft_device, bundle.draft) if bundle.draft else None

    def context(self, n_ctx: int, policy: TreePolicy | None, source: Context | None = None, length: int = 0) -> Context:
        """A new context with its drafters.

        Args:
            n_ctx: positions, 0 for the default.
            policy: how draft trees grow, in every step; None to decide by measured costs.
            source: another context with the same options, whose account is copied.
            length: number of the source's tokens to begin with, limited to what its sessions hold.
        """
        bundle = self._bundle
        begun = iter(source.sessions if source and length else [])
        target = _begin(bundle.target, n_ctx, next(begun, None), length)
        draft = None
        if drafting := bundle.draft or bundle.features:
            lender = target if bundle.features else None
            n_ctx = min(target.n_ctx, drafting.max_context)
            try:
                draft = _begin(drafting, n_ctx, next(begun, None), length, lender)
            except BaseException:
                target.close()
                raise
        context = self._context(target, draft, policy)
        if source:
            context.account.left = source.account.left
        return context

    def _context(self, target: Session, draft: Session | None, policy: TreePolicy | None) -> Context:
        bundle, batch, meter, size = self._bundle, BatchLoad(), Meter(), self._bundle.target.vocab_size
        cost = draft_cost = lookup_cost = None
        if isinstance(policy, GainPolicy):  # a user's, which needs the prices of passes
            draft_cost, lookup_cost = self.draft_cost(), self._lookup_cost
        elif policy is None:
            cost, draft_cost, lookup_cost = self.target_cost(), self.draft_cost(), self._lookup_cost
            policy = GainPolicy(cost, batch=batch)
        proposers: list[Proposer] = [*lookups(bundle.table, bundle.recycled)]
        if draft and bundle.features:
            proposers.append(feature_proposer(draft, bundle.features, target, draft_cost))
        elif draft:
            proposers.append(draft_proposer(draft, bundle.draft_mask, draft_cost, bundle.substitutes))
        known = bundle.calibrations
        drafter = TreeDrafter(proposers, policy, size, known, cost=lookup_cost, meter=meter, chains=self._chains)
        return Context(target, drafter, cost=cost, batch=batch, meter=meter)


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
