"""The texts that share passes with one text, as it sees them."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class Crowd:
    """Who else is in a text's passes. A text by itself is a crowd of one.

    texts: that are stepped together, this one included. rows: of the others' trees, roots included, in the next pass of
    the target. tokens: that the others are expected to gain by it.
    """

    texts: int = 1
    rows: int = 0
    tokens: float = 0.0
