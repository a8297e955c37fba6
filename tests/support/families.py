"""Random models of every family, with each of its options: data/families.jsonl has a model a line.

llama.cpp takes queries that are made of the input from models of so many layers alone as deepseek2-lite has.
"""

from __future__ import annotations

import numpy as np

from support.paths import table
from support.random_models import RandomModel, recorded

# What rotary frequencies are divided by.
FACTORS = {
    "llama": {"rope_freqs.weight": np.linspace(1, 8, 16, dtype=np.float32)},
    "long": {
        "rope_factors_long.weight": np.linspace(1, 30, 8, dtype=np.float32),
        "rope_factors_short.weight": np.linspace(1, 2, 8, dtype=np.float32),
    },
    "a quarter": {"rope_freqs.weight": np.array([1, 1, 1, 1, *[1e30] * 12], dtype=np.float32)},  # is turned
    "one to four": {"rope_freqs.weight": np.linspace(1, 4, 8, dtype=np.float32)},
    "none": {"rope_freqs.weight": np.ones(32, dtype=np.float32)},
}


def models(name: str) -> dict[str, RandomModel]:
    """Those of a table, by name."""
    return {record.pop("name"): recorded(record, FACTORS) for record in table(name)}


CASES = models("families")
