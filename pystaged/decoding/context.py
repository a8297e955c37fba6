"""A context: where texts are decoded, one at a time, and what is learnt from them."""

from __future__ import annotations

from heapq import nlargest

import numpy as np
from numpy.typing import NDArray

from pystaged._core import Session
from pystaged.decoding.account import Account, Meter
from pystaged.decoding.cost import PassCost
from pystaged.decoding.drafter import Drafter
from pystaged.decoding.experts import ExpertCost
from pystaged.decoding.policy import BatchLoad
from pystaged.decoding.requests import Clocks

SPARE_CELLS = 64  # positions counted per session besides its tokens, for the current tree and partly filled pages
BEFORE_END = (16, 256)  # states are kept so long before a prompt's end; the next often differs only after those points


class Context:
    """The target's session, the drafter with its sessions, and the account. It is lent to one text at a time.

    Between steps the target's session holds all tokens of the text but the last, the root of the next tree.

    Args:
        target: the session to decode in; nobody else may use it meanwhile.
        drafter: proposes the trees; None for plain decoding.
        cost: processor seconds of a target pass, refined here, to decide whether drafting pays. With None every step
            drafts.
        batch: the batch that shares the passes; by default one text alone.
        meter: measures the time of drafting; shared with the drafter.
        clocks: wall time and processor time.

    Attributes:
        tokens: int32[n], the prompt of the text that has it; of an idle one, what its target holds.
        num_bytes: that this text can fill, or that an idle one holds.
        partings: after how many tokens other texts are known to differ from the prompt.
        anchor: where the last user turn began, -1 for unknown; recurrent layers keep a state there.
    """

    def __init__(
        self,
        target: Session,
        drafter: Drafter | None = None,
        *,
        cost: PassCost | None = None,
        batch: BatchLoad | None = None,
        meter: Meter | None = None,
        clocks: Clocks | None = None,
    ) -> None:
        self.target = target
        self.drafter = drafter
        self.batch = batch or BatchLoad()
        self.clocks = clocks or Clocks()
        self.meter = meter or Meter(self.clocks.processor)
        self.account = Account(cost, self.batch, self.meter)
        self.experts = cost if isinstance(cost, ExpertCost) else None  # of a mixture
        self.tokens, self.num_bytes = np.zeros(0, np.int32), 0
        self.partings = set[int]()
        self.anchor = -1

    @property
    def sessions(self) -> list[Session]:
        """The target's session, then those of the drafter."""
        return [self.target, *(self.drafter.sessions() if self.drafter else [])]

    def inherit(self, other: Context) -> None:
        """Copy the learnt state of another context with the same proposers."""
        self.account.inherit(other.account)
        if self.drafter and other.drafter:
            self.drafter.inherit(other.drafter)

    def rest(self) -> None:
        """Note what it holds. Raises DeviceError or ValueError if it is lost, closed or in a call."""
        tokens = [session.tokens for session in self.sessions]  # of all, to raise if any is in a call
        self.tokens = tokens[0]
        self.num_bytes = sum(SPARE_CELLS * session.cell_bytes + session.num_bytes for session in self.sessions)

    def cut(self, length: int) -> None:
        """Keep the first tokens of each session; a draft's may hold fewer."""
        for session in self.sessions:
            session.rewind(min(len(session.tokens), length))

    def reaches(self, tokens: NDArray[np.int32]) -> bool:
        """Whether an idle one can rewind to exactly these tokens."""
        length = len(tokens)
        return np.array_equal(tokens, self.tokens[:length]) and self.target.reachable(length) == length

    def keep_states(self, most: int) -> None:
        """Let the recurrent layers keep so many states that later prompts may go on from."""
        # A prefill keeps all of them until it ends, so their number is limited here, too.
        wanted = [*nlargest(most, self.partings), *(len(self.tokens) - 1 - before for before in BEFORE_END)]
        for session in self.sessions:
            if session.kept_state_bytes:
                session.keep_states(wanted, most, self.anchor)

    def close(self) -> None:
        """Close the sessions of target and drafter."""
        for session in self.sessions:
            session.close()
