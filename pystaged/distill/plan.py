"""How many tokens of answers to write and how many epochs to train in the given time. The plan is saved in a
distillation's folder, so that it can resume."""

from __future__ import annotations

import json
import time
from dataclasses import asdict, dataclass, fields
from pathlib import Path

import torch
from torch import nn

from pystaged.distill.answers import LIKELIEST
from pystaged.distill.draft import Shape
from pystaged.platform.files import whole_file

EPOCHS, MOST_EPOCHS = 4, 16
KINDS = ("float32", "bfloat16")  # of matrix products
LEAST_TOKENS = 20_000
MOST_BYTES = 20 << 30  # of answers
_ROWS = 2  # tokens of prompt and answer for each token of the answer, about
_READING = 1.6  # time of making and reading prompts and writing answers, relative to writing alone
# Share of the matrix products' measured speed that training reaches on a GPU and on a CPU, where the optimizer and
# operations that are no products take most of the time.
_USE, _USE_OF_CPU = 0.4, 0.25


@dataclass(frozen=True)
class Plan:
    """What a distillation does.

    Attributes:
        target, prompts: identity() of the target's file and of the file of prompts, "" for none.
        kind: type of matrix products, "float32" or "bfloat16".
        tokens: of answers, in all. epochs: passes over them. 0 if not determined yet.
        rows, block: see Shape.
    """

    target: str
    prompts: str
    kind: str
    tokens: int = 0
    epochs: int = 0
    rows: int = 16384
    block: int = 8
    seed: int = 0

    def save(self, folder: Path) -> None:
        """Write it into a folder."""
        with whole_file(_file(folder)) as part:
            part.write_text(json.dumps(asdict(self), indent=1) + "\n", "utf-8")

    @classmethod
    def load(cls, folder: Path) -> Plan | None:
        """The plan of a folder, None where there is none.

        Raises:
            ValueError: it is damaged, or of another version.
        """
        try:
            found = cls(**json.loads(_file(folder).read_text("utf-8")))
            for each in fields(cls):
                value = getattr(found, each.name)
                if each.type != type(value).__name__ or (isinstance(value, int) and not 0 <= value < 1 << 40):
                    raise ValueError(each.name)
            if found.kind not in KINDS or not min(found.tokens, found.epochs, found.rows):
                raise ValueError("no plan")
            return found
        except FileNotFoundError:
            return None
        except (ValueError, TypeError, RecursionError):
            raise ValueError(f"{_file(folder)} is no plan of this version; remove {folder} to begin anew") from None


@dataclass(frozen=True)
class Speed:
    """Measured speeds.

    tokens: that the target writes per second. operations: floating-point operations of matrix products per second of
    training, whose type is `kind`.
    """

    tokens: float
    operations: float
    kind: str

    def seconds(self, tokens: int, epochs: int, shape: Shape) -> tuple[float, float]:
        """Estimated seconds to write so many tokens of answers, and to train on them."""
        weights = shape.num_weights - shape.vocab_size * shape.rank
        learning = 6 * weights / self.operations  # one row of a block for each token of an answer
        return _READING * tokens / self.tokens, epochs * tokens * learning


def amounts(speed: Speed, shape: Shape, seconds: float, free_bytes: int) -> tuple[int, int]:
    """Tokens and epochs that fill the time: EPOCHS, or more if the disk has no space for more tokens."""
    writing, learning = speed.seconds(1, 1, shape)
    most = int(min(MOST_BYTES, free_bytes // 2) / answer_bytes(1, shape))
    tokens = max(LEAST_TOKENS, min(most, int(seconds / (writing + EPOCHS * learning))))
    epochs = int((seconds / tokens - writing) / learning)
    return tokens, max(EPOCHS, min(MOST_EPOCHS, epochs))


def answer_bytes(tokens: int, shape: Shape) -> int:
    """Approximate bytes on disk of so many tokens of answers."""
    return tokens * (_ROWS * (len(shape.taps) * shape.width + 8) + 6 * LIKELIEST)


def checkpoint_bytes(shape: Shape) -> int:
    """Bytes of a checkpoint: weights and two moving averages of each."""
    return 12 * shape.num_weights


def training_speed(device: str) -> tuple[float, str]:
    """Estimated operations of matrix products per second of training, and their type: "bfloat16" if products are
    clearly faster than with "float32"."""
    x, weight = torch.randn(512, 512, device=device), torch.randn(2048, 512, device=device)

    def rate(kind: object) -> float:
        a, b = x.to(kind), weight.to(kind)
        times = []
        for _ in range(5):
            begin = time.perf_counter()
            float(nn.functional.linear(a, b).sum())
            times.append(time.perf_counter() - begin)
        return float(2 * 512 * 512 * 2048 / min(times))

    single, half = rate(torch.float32), rate(torch.bfloat16)
    use = _USE_OF_CPU if device == "cpu" else _USE
    return (use * half, "bfloat16") if half > 1.25 * single else (use * single, "float32")


def _file(folder: Path) -> Path:
    return folder / "plan.json"
