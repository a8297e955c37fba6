"""The batch that shares target passes with a sequence."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class BatchLoad:
    """Size of the batch that a sequence is decoded in. A sequence alone is a batch of one.

    sequences: number of sequences that step together, this one included. rows: rows of the other sequences' trees in
    the next target pass, roots included. tokens: number that the others are expected to gain from that pass.
    """

    sequences: int = 1
    rows: int = 0
    tokens: float = 0.0
