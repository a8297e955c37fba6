"""A context: where texts are decoded, one at a time, and what is learnt from them."""

from __future__ import annotations

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
        self.anchor: int | None = None  # where the last user turn began; recurrent layers keep a state there

    @property
    def sessions(self) -> list[Session]:
        """The target's session, then those of the drafter."""
        return [self.target, *(self.drafter.sessions() if self.drafter else [])]

    def inherit(self, other: Context) -> None:
        """Copy the learnt state of another context with the same proposers."""
        self.account.inherit(other.account)
        if self.drafter and other.drafter:
            self.drafter.inherit(other.drafter)

    def cut(self, length: int) -> None:
        """Keep the first tokens of each session; a draft's may hold fewer."""
        for session in self.sessions:
            session.rewind(min(len(session.tokens), length))

    def reaches(self, held: NDArray[np.int32], beginning: NDArray[np.int32]) -> bool:
        """Whether it can rewind to exactly `beginning`. held: the tokens that it holds."""
        length = len(beginning)
        return np.array_equal(beginning, held[:length]) and self.target.reachable(length) == length

    def close(self) -> None:
        """Close the sessions of target and drafter."""
        for session in self.sessions:
            session.close()


class Cells:
    """Memory of sessions like this one.

    Args:
        whole: whether all positions are allocated at once, as on devices.
        num_kept: states of recurrent layers that are kept of a text.
    """

    def __init__(self, session: Session, whole: bool, num_kept: int) -> None:
        self.cell_bytes, self.whole, self._n_ctx = session.cell_bytes, whole, session.n_ctx
        self._windowed_bytes, self._most_windowed = session.windowed_cell_bytes, session.most_windowed
        self._state_bytes = session.state_bytes + num_kept * session.kept_state_bytes
        self._spare = SPARE_CELLS * session.cell_bytes

    def needed(self, tokens: int) -> int:
        """Bytes for a text of this many tokens."""
        tokens = self._n_ctx if self.whole else min(tokens, self._n_ctx)
        behind = max(0, tokens - self._most_windowed) * self._windowed_bytes
        return self._spare + self._state_bytes + self.cell_bytes * tokens - behind

    def held(self, session: Session) -> int:
        """Bytes that a session holds."""
        return self.needed(0) if self.whole else self._spare + session.num_bytes
