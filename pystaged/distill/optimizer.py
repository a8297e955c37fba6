"""Muon for the matrices of a draft's layers, AdamW for the rest."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import nn

ADAM = {"lr": 1.5e-3, "betas": (0.9, 0.95), "weight_decay": 0.01}
MUON_RATE, _MOMENTUM, _DECAY = 0.01, 0.95, 0.01


class Muon(torch.optim.Optimizer):  # type: ignore[misc]
    """Momentum with orthogonalized updates (Jordan 2024).

    Args:
        kind: type of the matrix products.
    """

    def __init__(self, parameters: list[Any], lr: float, kind: Any) -> None:
        super().__init__(parameters, {"lr": lr})
        self._kind = kind

    def step(self, closure: Any = None) -> None:
        """One update."""
        del closure
        with torch.no_grad():
            for group in self.param_groups:
                for value in group["params"]:
                    average = self.state[value].setdefault("average", torch.zeros_like(value))
                    average.lerp_(value.grad, 1 - _MOMENTUM)
                    update = orthogonalized(value.grad.lerp(average, _MOMENTUM), self._kind)
                    value.mul_(1 - group["lr"] * _DECAY).add_(update, alpha=-group["lr"])


def orthogonalized(update: Any, kind: Any = torch.float32) -> Any:
    """The update with singular values near 1, by Newton-Schulz iteration in type `kind`, times
    sqrt(max(1, rows / columns))."""
    tall = update.shape[0] > update.shape[1]
    x = update.T if tall else update
    x = (x / (x.norm() + 1e-7)).to(kind)
    for _ in range(5):
        gram = x @ x.T
        x = 3.4445 * x + (-4.7750 * gram + 2.0315 * (gram @ gram)) @ x
    return (x.T if tall else x).float() * math.sqrt(max(1.0, update.shape[0] / update.shape[1]))


def optimizers(draft: nn.Module, kind: Any) -> list[Any]:
    """Optimizers of a draft's parameters. kind: type of matrix products."""
    named = list(draft.named_parameters())
    inner = [value for name, value in named if value.ndim == 2 and (name.startswith("blk.") or name == "fc")]
    chosen = {id(value) for value in inner}
    rest = [value for _, value in named if id(value) not in chosen]
    return [Muon(inner, MUON_RATE, kind), torch.optim.AdamW(rest, **ADAM)]
