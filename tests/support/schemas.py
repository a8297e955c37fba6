"""JSON schemas of growing size, and values' own checks that have nothing to do with llguidance."""

from __future__ import annotations

import random
from typing import Any

PATTERNS = ("^[a-z]{1,6}$", "^[A-Z][a-z]{2,5}$", "^[0-9]{4}-[0-9]{2}$", "^(red|green|blue)$", "^#[0-9a-f]{6}$")
WORDS = ("name", "age", "kind", "tags", "address", "first_name", "is_open", "price", "größe", 'a "b"')


def schema_of(size: int, seed: int) -> dict[str, Any]:
    """An object with about `size` properties in all, some of them nested."""
    return _object(random.Random(1000 * size + seed), size)


def _object(rng: random.Random, size: int) -> dict[str, Any]:
    names = rng.sample(WORDS, min(len(WORDS), max(1, size)))
    properties: dict[str, Any] = {}
    for left, name in zip(range(size, 0, -1), names, strict=False):
        if left > 3 and rng.random() < 0.4:
            properties[name] = _object(rng, left // 2)
        else:
            properties[name] = _value(rng)
    required = [name for name in properties if rng.random() < 0.8] or list(properties)[:1]
    return {"type": "object", "properties": properties, "required": required, "additionalProperties": False}


def _value(rng: random.Random) -> dict[str, Any]:
    least = rng.randrange(100)
    of: list[dict[str, Any]] = [
        {"type": "string", "maxLength": rng.randrange(1, 10)},
        {"type": "string", "pattern": rng.choice(PATTERNS)},
        {"type": "integer", "minimum": least, "maximum": least + rng.choice((0, 7, 5000))},
        {"type": "number", "enum": [0.5, 1e6, -3]},
        {"type": "boolean"},
        {"enum": rng.sample(("alpha", "beta", 1, 2.5, None, True, "delta gamma"), rng.randrange(1, 5))},
        {"const": rng.choice(("a long constant that is forced", 12345, None))},
        {"anyOf": [{"type": "null"}, {"type": "string", "pattern": rng.choice(PATTERNS)}]},
        {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": 99}, "minItems": 1, "maxItems": 3},
        {"type": "array", "items": {"enum": ["x", "y"]}, "maxItems": 2},
        {"type": "string", "format": "date"},
    ]
    return rng.choice(of)
