"""Damage that knows nothing of a format, and damage of JSON."""

from __future__ import annotations

import copy
import json
import random
from typing import Any

NUMBERS = [0, 1, 2, 3, 255, 1 << 15, 1 << 24, 2**31 - 1, 2**31, 2**32 - 1, 1 << 40, 2**62, 2**63 - 1, 2**63, 2**64 - 1]
TEXTS = ["", " ", "\0", "\ud800", "\ufeff", "\u202e", "x" * 5000, "\U0001f600" * 300, "../../etc/passwd", "NaN", "<s>"]
_ODD_BYTES = [b"\0", b"\xff", b"\n", b"\x80", b"\xc3", b"\xf0\x9f", b'"', b"{", b"]", b"\\", b"\\ud800", b"1e999"]
_DEEP = "a deep value stands here"


def damage(r: random.Random, data: bytes, other: bytes = b"") -> bytes:
    """Bits turned, ends cut off, parts moved, doubled, taken from elsewhere; 1 to 8 times."""
    for _ in range(r.choice([1, 1, 1, 2, 3, 8])):
        size = len(data)
        at = r.randrange(size + 1)
        length = min(size - at, r.choice([1, 2, 4, 8, 64, r.randrange(size + 1)]))
        what = r.randrange(8)
        if what == 0 and at < size:
            data = data[:at] + bytes([data[at] ^ 1 << r.randrange(8)]) + data[at + 1 :]
        elif what == 1:
            data = data[:at]
        elif what == 2:
            data = data[:at] + data[at + length :]
        elif what == 3:
            times = r.choice([2, 3, 50]) if length <= 4096 else 2
            data = data[:at] + data[at : at + length] * times + data[at + length :]
        elif what == 4:
            data = data[:at] + r.choice(_ODD_BYTES) + data[at:]
        elif what == 5:
            width = r.choice([1, 2, 4, 8])
            number = r.choice([*NUMBERS, size, size - 1, size + 1]) % 256**width
            data = data[:at] + number.to_bytes(width, r.choice(["little", "big"])) + data[at + width :]
        elif what == 6:
            data = data[:at] + r.randbytes(length) + data[at + length :]
        else:
            source = other or data
            begin = r.randrange(len(source) + 1)
            data = data[:at] + source[begin : begin + length] + data[at + r.choice([0, length]) :]
    return data


def odd_value(r: random.Random) -> Any:
    """A JSON value that nobody expects."""
    numbers = [*NUMBERS, -1, -(2**63), 10**400, -0.0, 0.5, 1e308, -1e-308, float("nan"), float("inf"), float("-inf")]
    others = [None, True, False, [], {}, [[]], [None], {"": None}, _DEEP]
    return r.choice([r.choice(numbers), r.choice(TEXTS), r.choice(others)])


def damage_value(r: random.Random, value: Any) -> Any:
    """A JSON value with members missing, doubled, renamed, exchanged or of other types."""
    value = copy.deepcopy(value)
    for _ in range(r.choice([1, 1, 1, 2, 3])):
        places = list(_places(value))
        if not places:
            return odd_value(r)
        holder, key = r.choice(places)
        what = r.randrange(7)
        if what == 0:
            del holder[key]
        elif what == 1:
            other, name = r.choice(places)
            holder[key] = copy.deepcopy(other[name])
        elif what == 2 and isinstance(holder, dict):
            holder[r.choice([*TEXTS, str(key).upper(), f"{key}s"])] = holder.pop(key)
        elif what == 2:
            holder.extend([copy.deepcopy(holder[key])] * r.choice([1, 2, 40, 3000]))
        elif what == 3 and isinstance(holder[key], (int, float)):
            holder[key] = r.choice(
                [-holder[key], holder[key] + 1, holder[key] - 1, 2 * holder[key], 10**9 * holder[key]]
            )
        elif what == 4 and isinstance(holder[key], str):
            holder[key] = damage(r, holder[key].encode("utf-8", "surrogatepass")).decode("utf-8", "replace")
        elif what == 5:
            holder[key] = r.choice([[holder[key]], {"a": holder[key]}, str(holder[key]), [holder[key]] * 3])
        else:
            holder[key] = odd_value(r)
    return value


def _places(value: Any) -> Any:
    """Each member of a JSON value: what holds it, and under which key."""
    waiting = [value]
    while waiting:
        each = waiting.pop()
        keys = list(each) if isinstance(each, dict) else range(len(each)) if isinstance(each, list) else ()
        for key in keys:
            yield each, key
            waiting.append(each[key])


def spelled(r: random.Random, value: Any) -> bytes:
    """A JSON value as bytes that need not be JSON."""
    text = json.dumps(value, ensure_ascii=r.random() < 0.5)
    if _DEEP in text:
        depth = r.choice([30, 300, 100_000])
        deep = r.choice(["[" * depth + "]" * depth, '{"a":' * depth + "1" + "}" * depth, "[" * depth])
        text = text.replace(json.dumps(_DEEP), deep)
    data = text.encode("utf-8", r.choice(["replace", "surrogatepass"]))
    return damage(r, data) if r.random() < 0.1 else data


def damage_json(r: random.Random, data: bytes) -> bytes:
    """A JSON file damaged, with its structure or without."""
    if r.random() < 0.25:
        return damage(r, data)
    return spelled(r, damage_value(r, json.loads(data)))
