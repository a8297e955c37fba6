"""Muon on the matrices of the blocks, AdamW on the rest, under one schedule."""

import math
from typing import Any

import torch
from model import GPT
from torch import Tensor, nn


def orthogonalize(update: Tensor) -> Tensor:
    """The nearest matrix with singular values around 1, by Newton-Schulz iteration in bfloat16."""
    tall = update.shape[0] > update.shape[1]
    x = update.bfloat16().t() if tall else update.bfloat16()
    x = x / (x.norm() + 1e-7)
    for _ in range(5):
        gram = x @ x.t()
        x = 3.4445 * x + (-4.7750 * gram + 2.0315 * (gram @ gram)) @ x
    orthogonal: Tensor = (x.t() if tall else x).float()
    return orthogonal * math.sqrt(max(1, update.shape[0] / update.shape[1]))


class Muon(torch.optim.Optimizer):
    """Momentum with orthogonalized updates (Jordan, 2024); query, key and value matrices are taken apart."""

    def __init__(self, parameters: list[nn.Parameter], lr: float, momentum: float = 0.95, decay: float = 0.01) -> None:
        super().__init__(parameters, {"lr": lr, "momentum": momentum, "decay": decay})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        if closure is not None:
            raise ValueError("Muon takes no closure")
        for group in self.param_groups:
            for p in group["params"]:
                average = self.state[p].setdefault("average", torch.zeros_like(p))
                average.lerp_(p.grad, 1 - group["momentum"])
                update = p.grad.lerp(average, group["momentum"])
                parts = update.split(p.shape[1]) if p.shape[0] == 3 * p.shape[1] else [update]
                p.mul_(1 - group["lr"] * group["decay"])
                p.add_(torch.cat([orthogonalize(part) for part in parts]), alpha=-group["lr"])


class Optimizers:
    """Muon and AdamW under one schedule: a short warm-up, a constant rate, a linear decay."""

    def __init__(self, model: GPT, lr: float, scale: float, decay_from: float) -> None:
        named = list(model.named_parameters())
        matrices = [p for name, p in named if p.dim() == 2 and name.startswith("blk")]
        self.rest = [p for name, p in named if not (p.dim() == 2 and name.startswith("blk"))]
        adamw = torch.optim.AdamW(self.rest, 3e-3 * scale, betas=(0.9, 0.95), weight_decay=0.0, fused=True)
        self.both: list[torch.optim.Optimizer] = [Muon(matrices, lr * scale), adamw]
        self.rates = [group["lr"] for optimizer in self.both for group in optimizer.param_groups]
        self.decay_from = decay_from

    def step(self, step: int, progress: float) -> None:
        """One update at that point (0 to 1) of the run."""
        factor = min(1.0, (step + 1) / 40, max(0.01, (1 - progress) / (1 - self.decay_from)))
        torch.nn.utils.clip_grad_norm_(self.rest, 1.0)
        groups = [group for optimizer in self.both for group in optimizer.param_groups]
        for group, rate in zip(groups, self.rates, strict=True):
            group["lr"] = rate * factor
        for optimizer in self.both:
            optimizer.step()
            optimizer.zero_grad()
