"""The texts that share passes with one text, as it sees them."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class BatchLoad:
    """The batch that a text is in. A text alone is a batch of one.

    sequences: how many are stepped together, this one included. rows: of the others' trees, roots included, in the next
    pass of the target. tokens: that the others are expected to gain by that pass.
    """

    sequences: int = 1
    rows: int = 0
    tokens: float = 0.0
