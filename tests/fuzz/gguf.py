"""GGUF files of every family."""

from __future__ import annotations

import random
import struct
from collections.abc import Iterator
from dataclasses import replace
from functools import partial, reduce
from operator import or_
from pathlib import Path

from support.families import CASES
from support.gguf_parts import (
    ARRAY,
    BOOL,
    F32,
    I32,
    SIZES,
    STRING,
    TENSOR_TYPES,
    U8,
    U64,
    Entry,
    Tensor,
    array,
    assemble,
    num_bytes,
    text,
)
from support.gguf_parts import Gguf as Parts
from support.paths import table
from support.random_models import RandomModel, add_sentencepiece, write
from support.steps import evaluate, prefill, rank

from fuzz.mutate import NUMBERS, damage
from fuzz.target import Case, Target
from pystaged import _core
from pystaged.loading.metadata import read_metadata

TYPES = ("F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1")
ODD_NUMBERS = [b"\0\x7e", b"\0\x7c", b"\0\xfc", b"\xff\x7b", b"\xff\xff\x7f\x7f", b"\0\0\xc0\x7f", b"\0\0\x80\xff"]
# Keys that libllama reads and a random model does not have.
OTHER_KEYS: list[str] = table("other_keys")
ODD_TEXTS: list[str | bytes] = ["", "gpt2", "llama", "gpt-2", "default", "\u0120", b"\xff\xfe", "x" * 5000]
ODD_TOKENS = ["", " ", "ab", "a b c", "\u0120", "\u4e2d", "\0", b"\xff", b"\xc3", "x" * 300, "[EMPTY_5]"]


# ---- Each takes a file and gives a damaged one, saying what it did. ----


def change_field(r: random.Random, file: Parts) -> tuple[bytes, str]:
    group = r.choice(sorted({field.group for field in file.fields}))
    field = r.choice([f for f in file.fields if f.group == group and f.size > 0])
    old = file.data[field.at : field.at + field.size]
    if r.random() < 0.3:
        new = bytearray(old)
        bit = r.randrange(8 * field.size)
        new[bit // 8] ^= 1 << bit % 8
    elif field.size in (1, 2, 4, 8):
        value = int.from_bytes(old, "little")
        value = r.choice([*NUMBERS, *range(14), value - 1, value + 1, 2 * value, value ^ 0x8080])
        new = bytearray((value % 256**field.size).to_bytes(field.size, "little"))
    else:
        new = bytearray(old)
        new[r.randrange(field.size)] = r.choice(b"\0\n .\x7f\x80\xc3\xe2\xf0\xff")
    described = f"{field.group}: {field.name} at {field.at}: {old[:16].hex()} -> {new[:16].hex()}"
    return file.data[: field.at] + bytes(new) + file.data[field.at + field.size :], described


def truncate(r: random.Random, file: Parts) -> tuple[bytes, str]:
    field = r.choice(file.fields)
    end = r.choice([field.at, field.at + field.size // 2, file.start - 1, file.start, r.randrange(len(file.data))])
    return file.data[:end], f"truncated to {end} of {len(file.data)}"


def change_weights(r: random.Random, file: Parts) -> tuple[bytes, str]:
    data = bytearray(file.data)
    pattern = r.choice(ODD_NUMBERS)
    places = [r.randrange(file.start, len(data) - 4) & ~1 for _ in range(r.choice([1, 10, 1000]))]
    for at in places:
        data[at : at + len(pattern)] = pattern
    return bytes(data), f"{len(places)} weights are {pattern.hex()}"


def any_value(r: random.Random) -> tuple[int, bytes]:
    """A value of any kind, well-formed."""
    kind = r.choice([*SIZES, STRING, ARRAY])
    if kind == STRING:
        return kind, text(r.choice(ODD_TEXTS))
    if kind == ARRAY:
        item = r.choice([U8, I32, F32, BOOL, U64, STRING])
        one = text("a b") if item == STRING else bytes([1] * SIZES[item])
        return kind, array(item, [one] * r.choice([0, 1, 5, 256, 257, 300]))
    return kind, (r.choice(NUMBERS) % 256 ** SIZES[kind]).to_bytes(SIZES[kind], "little")


def change_array(r: random.Random, value: bytes) -> bytes:
    """An array with items missing, doubled, or of another text."""
    kind, length = struct.unpack_from("<IQ", value)
    items, at = list[bytes](), 12
    for _ in range(length):
        size = 8 + struct.unpack_from("<Q", value, at)[0] if kind == STRING else SIZES[kind]
        items.append(value[at : at + size])
        at += size
    change = r.randrange(4)
    if change == 0:
        items = items[: r.choice([0, 1, length // 2, length - 1])]
    elif change == 1:
        items += r.choices(items, k=r.choice([1, 40]))
    elif change == 2 or kind != STRING:
        items[r.randrange(length)] = r.choice(items)
    else:
        items[r.randrange(length)] = text(r.choice(ODD_TOKENS))
    return array(kind, items)


def change_entry(r: random.Random, file: Parts) -> tuple[bytes, str]:
    entries = list(file.entries)
    i = r.randrange(len(entries))
    old = entries[i]
    what = r.choice(["value", "array", "array", "drop", "double", "new", "new", "key"])
    if what == "array":
        i = r.choice([j for j, entry in enumerate(entries) if entry.kind == ARRAY])
        old = entries[i]
        entries[i] = replace(old, value=change_array(r, old.value))
    elif what == "value":
        kind, value = any_value(r)
        entries[i] = Entry(old.key, kind, value)
    elif what == "drop":
        del entries[i]
    elif what == "double":
        entries.insert(r.randrange(len(entries)), old)
    elif what == "new":
        old = Entry(r.choice(OTHER_KEYS).encode(), *any_value(r))
        entries.append(old)
    else:
        entries[i] = replace(old, key=r.choice([b"", old.key + b"x", old.key.upper(), r.choice(entries).key]))
    new = entries[min(i, len(entries) - 1)].value[:40]
    return assemble(entries, file.tensors), f"{what} {old.key!r} -> {new!r}"


def change_tensor(r: random.Random, file: Parts) -> tuple[bytes, str]:
    tensors = list(file.tensors)
    i = r.randrange(len(tensors))
    old = tensors[i]
    what = r.choice(["drop", "double", "name", "shape", "kind"])
    if what == "drop":
        del tensors[i]
    elif what == "double":
        tensors.append(old)
    elif what == "name":
        tensors[i] = replace(old, name=r.choice([b"", b"x" * 63, b"x" * 64, b"output.weight", b"rope_freqs.weight"]))
    else:
        shape, kind = old.shape, old.kind
        if what == "kind":
            kind = r.choice(list(TENSOR_TYPES))
        else:
            axis = r.randrange(len(shape))
            longer = (*shape[:axis], r.choice([0, 1, 32, 33, 64, 96, 256]), *shape[axis + 1 :])
            shape = r.choice([shape[::-1], (*shape, 1), (*shape, 2), longer, longer, ()])
        tensors[i] = Tensor(old.name, shape, kind, r.randbytes(num_bytes(shape, kind)))
    new = tensors[min(i, len(tensors) - 1)].shape
    return assemble(file.entries, tensors), f"{what} {old.name!r} {old.shape} -> {new}"


def change_bytes(r: random.Random, file: Parts) -> tuple[bytes, str]:
    return damage(r, file.data), "damaged blindly"


CHANGES = [change_field, change_field, truncate, change_weights]
CHANGES += [change_entry, change_entry, change_tensor, change_bytes]


class Gguf(Target):
    """What libllama, the vocabulary and the loaders make of a file, and passes of what is loaded."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self._bases = {name: self._write(name, TYPES[i % len(TYPES)]) for i, name in enumerate(CASES)}
        pieces = RandomModel("llama", layers=1, vocabulary=add_sentencepiece, vocab_size=320)
        self._bases["sentencepiece"] = write(self.path, pieces).read_bytes()
        self._parts = {name: Parts(data) for name, data in self._bases.items()}

    def _write(self, name: str, quantization: str) -> bytes:
        model = CASES[name]
        wide = model.width | model.ffn_width | model.experts[2] | model.experts[3] | reduce(or_, model.latent)
        is_odd = (wide | model.delta_heads[1] * model.delta_heads[2]) % 32
        if not any(isinstance(value, list) for value in model.metadata.values()):  # of each layer
            # One at least must attend, for llama.cpp: of delta nets every fourth does.
            model = replace(model, layers=min(model.layers, 4 if any(model.delta_heads) else 2))
        is_odd |= model.metadata.get("embedding_length_per_layer_input", 0) % 32
        model = replace(model, quantization="F32" if is_odd else quantization)
        return write(self.path, model).read_bytes()

    def sound(self) -> Iterator[Case]:
        for name, data in self._bases.items():
            # llama.cpp knows this one by its number of layers, of which there are fewer here.
            yield self.of(name, data, name != "deepseek2-lite")

    def case(self, r: random.Random) -> Case:
        name = r.choice(list(self._bases))
        data, steps = self._bases[name], [name]
        for change in r.choices(CHANGES, k=r.choice([1, 1, 1, 2])):
            try:
                parts = self._parts[name] if len(steps) == 1 else Parts(data)
                data, step = change(r, parts)
            except (ValueError, KeyError, IndexError):
                break  # too damaged already to be taken apart again
            steps.append(step)
        return self.of("; ".join(steps), data, r.random() < 0.2)

    def use(self, data: bytes, is_device: bool) -> None:
        self.path.write_bytes(data)
        read_metadata(self.path)
        errors = []
        for use in (use_tokenizer, partial(use_model, device="ggml-cpu" if is_device else "cpu")):
            try:
                use(str(self.path))
            except (ValueError, OSError) as error:
                errors.append(error)
        if errors:
            raise errors[0]


def use_tokenizer(path: str) -> None:
    tokenizer = _core.Tokenizer(path)
    for token in (*range(0, tokenizer.num_tokens, 7), tokenizer.num_tokens - 1):
        tokenizer.token_bytes(token)
        tokenizer.is_end(token)
    tokens = tokenizer.encode("Hello the world\n\t  h\u00e9 \u4e2d \U0001f999 \0<|endoftext|>")
    if any(not 0 <= token < tokenizer.num_tokens for token in tokens):
        raise AssertionError(f"encode gave {tokens} for {tokenizer.num_tokens} tokens")


def use_model(path: str, device: str) -> None:
    model = _core.Model(path, "", 1, device=device)
    session = _core.Session(model)
    last = model.vocab_size - 1
    if session.n_ctx < 6:
        return
    prefill(session, [0, last])
    rows, parents = min(4, model.most_pending), [-1, 0, 1, 2] if model.is_chained else [-1, 0, 0, 1]
    evaluate(session, [last, 0, min(1, last), last][:rows], parents[:rows])
    for sampling in (_core.Sampling(), _core.Sampling(0.5, 5, 0.9, 0.1, 7), _core.Sampling(2, min_p=0.1)):
        tokens, _ = rank(session, [0, rows - 1], min(8, model.vocab_size), sampling)
        path_, chosen = session.follow(sampling)
        if not (tokens.min() >= -1 and max(tokens.max(), chosen.max()) <= last and chosen.min() >= 0):
            raise AssertionError(f"tokens {tokens}, {chosen} with a vocabulary of {last + 1}")
    session.commit(path_)
    prefill(session, [0] * min(session.n_ctx - len(session.tokens), 40))
