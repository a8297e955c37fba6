"""What a text was made from: all that it depends on."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from pystaged.options.config import GenerationConfig
from pystaged.platform.seen import SeenModel

# Versions of pystaged with the same number generate the same bytes. Raise it with any change of logits, of sampled
# tokens, of the end of a text, or of the decoding of its bytes; tests/receipts/test_receipts.py checks it.
ARITHMETIC = 1


@dataclass(frozen=True, slots=True)
class Origin:
    """The inputs of a text: the fields of its Receipt that are known before it is generated.

    file: the model's file as it was when it was loaded; it is hashed when a receipt needs the hash. prompt: int32[n].
    inexact: why no receipt is made of it; "" for none.
    """

    file: SeenModel
    name: str
    vocabulary: str
    device: str
    kv: str
    n_ctx: int
    prompt: NDArray[np.int32]
    config: GenerationConfig
    inexact: str = ""
