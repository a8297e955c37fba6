"""What the loop yields."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from pystaged.decoding.tree import Stage, TokenTree

FinishReason = Literal["stop", "length"]


@dataclass(frozen=True, slots=True)
class Step:
    """What one step adds to a text.

    tokens; stages: who proposed each. tree: what was verified; path: its accepted nodes, root first. verify_seconds: of
    the verify pass; plain_seconds: of plain decoding of the same tokens in the same crowd by the measured costs, 0
    where none are. pass_rows: of the pass, others' too; pass_texts: texts that took a step in it.
    finish_reason: in the last step "stop" for the end of text, "length" for max_tokens or a full context, else None.
    """

    tokens: list[int]
    stages: list[Stage]
    tree: TokenTree
    path: list[int]
    verify_seconds: float
    plain_seconds: float
    pass_rows: int
    pass_texts: int
    finish_reason: FinishReason | None = None
