"""Damaged files load or are refused with a message; they never crash, hang, or take all memory.

As a program, `test_gguf.py BASES FIRST LAST FOLDER`, it tries some mutants; the fuzz test runs that in a child process.
"""

from __future__ import annotations

import os
import pickle
import queue
import random
import re
import resource
import signal
import struct
import subprocess
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

import pystaged
from pystaged import ModelError, _core

NUM_MUTANTS = 2000
SECONDS_PER_MUTANT = 30
MEMORY_LIMIT = 8 << 30
MOST_FAILURES = 10

U8, U32, I32, F32, BOOL, STRING, ARRAY, U64 = 0, 4, 5, 6, 7, 8, 9, 10
SIZES = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}
INTERESTING = [
    0,
    1,
    2,
    3,
    255,
    1 << 15,
    1 << 24,
    2**31 - 1,
    2**31,
    2**32 - 1,
    1 << 40,
    2**62,
    2**63 - 1,
    2**63,
    2**64 - 1,
]
ALIGNMENT = 32
# ggml's number of each tensor type, with bytes per block and weights per block.
TENSOR_TYPES = {
    0: (4, 1),
    1: (2, 1),
    2: (18, 32),
    3: (20, 32),
    6: (22, 32),
    8: (34, 32),
    9: (36, 32),
    14: (210, 256),
    20: (18, 32),
}
TENSOR_TYPES |= {26: (4, 1), 30: (2, 1)}
# Keys that libllama reads and a random model does not have.
OTHER_KEYS = [
    "general.alignment",
    "general.quantization_version",
    "split.count",
    "gpt2.vocab_size",
    "tokenizer.chat_template",
    "tokenizer.ggml.add_bos_token",
    "tokenizer.ggml.add_space_prefix",
    "tokenizer.ggml.eot_token_id",
    "tokenizer.ggml.eog_token_ids",
    "tokenizer.ggml.precompiled_charsmap",
    "tokenizer.ggml.scores",
    "tokenizer.ggml.suppress_tokens",
    "tokenizer.ggml.token_type_count",
    "tokenizer.ggml.unknown_token_id",
]
ODD_TEXTS: list[str | bytes] = ["", "gpt2", "llama", "gpt-2", "default", "\u0120", b"\xff\xfe", "x" * 5000]
ODD_TOKENS: list[str | bytes] = [
    "",
    " ",
    "ab",
    "a b c",
    "\u0120",
    "\u4e2d",
    "\0",
    b"\xff",
    b"\xc3",
    "x" * 300,
    "[EMPTY_5]",
]


@dataclass(frozen=True)
class Entry:
    key: bytes
    kind: int
    value: bytes  # as in the file


@dataclass(frozen=True)
class Tensor:
    name: bytes
    shape: tuple[int, ...]
    kind: int
    data: bytes


@dataclass(frozen=True)
class Field:
    """A place in the file: an integer, or the bytes of a text."""

    group: str
    name: str
    at: int
    size: int


def text(value: str | bytes) -> bytes:
    value = value.encode() if isinstance(value, str) else value
    return struct.pack("<Q", len(value)) + value


def array(kind: int, items: list[bytes]) -> bytes:
    return struct.pack("<IQ", kind, len(items)) + b"".join(items)


class Gguf:
    """A GGUF file taken apart."""

    def __init__(self, data: bytes) -> None:
        self.data, self.at, self.fields = data, 0, list[Field]()
        self._take("header", "magic", 4)
        self._integer("header", "version", 4)
        num_tensors, num_entries = self._integer("header", "tensors", 8), self._integer("header", "entries", 8)
        self.entries = [self._entry() for _ in range(num_entries)]
        infos = [self._info() for _ in range(num_tensors)]
        self.start = -(-self.at // ALIGNMENT) * ALIGNMENT
        self.tensors = [
            Tensor(name, shape, kind, data[self.start + at :][: num_bytes(shape, kind)])
            for name, shape, kind, at in infos
        ]

    def _take(self, group: str, name: str, size: int) -> bytes:
        if self.at + size > len(self.data):
            raise ValueError("the file ends early")
        self.fields.append(Field(group, name, self.at, size))
        self.at += size
        return self.data[self.at - size : self.at]

    def _integer(self, group: str, name: str, size: int) -> int:
        return int.from_bytes(self._take(group, name, size), "little")

    def _text(self, group: str, name: str) -> bytes:
        return self._take(group, name, self._integer(f"{group} length", f"length of {name}", 8))

    def _entry(self) -> Entry:
        key = self._text("key", "a key")
        name = key.decode()
        kind = self._integer("kind", f"kind of {name}", 4)
        at = self.at
        self._value(name, kind)
        return Entry(key, kind, self.data[at : self.at])

    def _value(self, name: str, kind: int) -> None:
        if kind == STRING:
            self._text("text", name)
        elif kind == ARRAY:
            item, length = self._integer("array kind", name, 4), self._integer("array length", name, 8)
            for i in range(length):
                if item == STRING:
                    self._text(name, f"{name}[{i}]")
                else:
                    self._take(name, f"{name}[{i}]", SIZES[item])
        else:
            self._take("number", name, SIZES[kind])

    def _info(self) -> tuple[bytes, tuple[int, ...], int, int]:
        name = self._text("tensor name", "a tensor's name")
        rank = self._integer("tensor rank", f"rank of {name!r}", 4)
        shape = tuple(self._integer("tensor shape", f"shape of {name!r}", 8) for _ in range(rank))
        kind = self._integer("tensor kind", f"kind of {name!r}", 4)
        return name, shape, kind, self._integer("tensor offset", f"offset of {name!r}", 8)


def num_bytes(shape: tuple[int, ...], kind: int) -> int:
    size, block = TENSOR_TYPES[kind]
    count = 1
    for n in shape:
        count *= n
    if count > 1 << 20:
        raise ValueError("an absurd tensor")
    return count // block * size


def assemble(entries: list[Entry], tensors: list[Tensor], alignment: int = ALIGNMENT) -> bytes:
    """A file of these parts, offsets reckoned anew."""
    head = [struct.pack("<4sIQQ", b"GGUF", 3, len(tensors), len(entries))]
    head += [text(entry.key) + struct.pack("<I", entry.kind) + entry.value for entry in entries]
    weights = b""
    for tensor in tensors:
        place = struct.pack(f"<I{len(tensor.shape)}QIQ", len(tensor.shape), *tensor.shape, tensor.kind, len(weights))
        head.append(text(tensor.name) + place)
        weights += tensor.data + bytes(-len(tensor.data) % alignment)
    start = b"".join(head)
    return start + bytes(-len(start) % alignment) + weights


# ---- Mutants: each takes a file and gives a damaged one, saying what it did. ----


def change_field(r: random.Random, file: Gguf) -> tuple[bytes, str]:
    group = r.choice(sorted({field.group for field in file.fields}))
    field = r.choice([f for f in file.fields if f.group == group and f.size > 0])
    old = file.data[field.at : field.at + field.size]
    if r.random() < 0.3:
        new = bytearray(old)
        bit = r.randrange(8 * field.size)
        new[bit // 8] ^= 1 << bit % 8
    elif field.size in (1, 2, 4, 8):
        value = int.from_bytes(old, "little")
        value = r.choice([*INTERESTING, *range(14), value - 1, value + 1, 2 * value, value ^ 0x8080])
        new = bytearray((value % 256**field.size).to_bytes(field.size, "little"))
    else:
        new = bytearray(old)
        new[r.randrange(field.size)] = r.choice(b"\0\n .\x7f\x80\xc3\xe2\xf0\xff")
    described = f"{field.group}: {field.name} at {field.at}: {old[:16].hex()} -> {new[:16].hex()}"
    return file.data[: field.at] + bytes(new) + file.data[field.at + field.size :], described


def truncate(r: random.Random, file: Gguf) -> tuple[bytes, str]:
    field = r.choice(file.fields)
    end = r.choice([field.at, field.at + field.size // 2, file.start - 1, file.start, r.randrange(len(file.data))])
    return file.data[:end], f"truncated to {end} of {len(file.data)}"


def change_weights(r: random.Random, file: Gguf) -> tuple[bytes, str]:
    data = bytearray(file.data)
    pattern = r.choice(
        [b"\0\x7e", b"\0\x7c", b"\0\xfc", b"\xff\x7b", b"\xff\xff\x7f\x7f", b"\0\0\xc0\x7f", b"\0\0\x80\xff"]
    )
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
    return kind, (r.choice(INTERESTING) % 256 ** SIZES[kind]).to_bytes(SIZES[kind], "little")


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


def change_entry(r: random.Random, file: Gguf) -> tuple[bytes, str]:
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
    return assemble(
        entries, file.tensors
    ), f"{what} {old.key!r} -> {entries[i if i < len(entries) else -1].value[:40]!r}"


def change_tensor(r: random.Random, file: Gguf) -> tuple[bytes, str]:
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
    return assemble(
        file.entries, tensors
    ), f"{what} {old.name!r} {old.shape} -> {tensors[i if i < len(tensors) else -1].shape}"


CHANGES = [change_field, change_field, truncate, change_weights, change_entry, change_entry, change_tensor]


def mutant(bases: list[bytes], index: int) -> tuple[bytes, str]:
    """Mutant number `index`, always the same, and what is wrong with it."""
    r = random.Random(index)
    data, steps = r.choice(bases), list[str]()
    for change in r.choices(CHANGES, k=r.choice([1, 1, 1, 2])):
        try:
            data, step = change(r, Gguf(data))
        except (ValueError, KeyError, IndexError):
            break  # too damaged already to be taken apart again
        steps.append(step)
    return data, f"mutant {index}: " + "; then ".join(steps)


# ---- The child process ----


def attempt(action: Callable[[str], None], path: str) -> str:
    try:
        action(path)
    except UnicodeDecodeError as error:  # of a message, which is then lost
        return f"UnicodeDecodeError: {error}"
    except (ValueError, OSError, MemoryError) as error:
        return "refused" if str(error) else f"{type(error).__name__} without a message"
    except Exception as error:  # whatever else it is, the test fails with it
        return f"{type(error).__name__}: {error}"
    return "loaded"


def use_tokenizer(path: str) -> None:
    tokenizer = _core.Tokenizer(path)
    for token in (*range(0, tokenizer.num_tokens, 7), tokenizer.num_tokens - 1):
        tokenizer.token_bytes(token)
        tokenizer.is_end(token)
    tokens = tokenizer.encode("Hello the world\n\t  h\u00e9 \u4e2d \U0001f999 \0<|endoftext|>")
    if any(not 0 <= token < tokenizer.num_tokens for token in tokens):
        raise AssertionError(f"encode gave {tokens} for {tokenizer.num_tokens} tokens")


def use_model(path: str) -> None:
    model = _core.Model(path, "", 2)
    session = _core.Session(model)
    last = model.vocab_size - 1
    session.prefill([0, last])
    session.evaluate([last, 0, min(1, last), last], [-1, 0, 0, 1])
    for sampling in (
        _core.Sampling(),
        _core.Sampling(1.0),
        _core.Sampling(0.5, 5, 0.9, 0.1, 7),
        _core.Sampling(2, min_p=0.1),
    ):
        tokens, _ = session.candidates([0, 3], min(8, model.vocab_size), sampling)
        path_, chosen = session.follow(sampling)
        if not (tokens.min() >= -1 and max(tokens.max(), chosen.max()) <= last and chosen.min() >= 0):
            raise AssertionError(f"tokens {tokens}, {chosen} with a vocabulary of {last + 1}")
    session.commit(path_)
    session.prefill([0] * (session.n_ctx - len(session.tokens)))


def try_mutants(bases: list[bytes], first: int, last: int, folder: Path) -> None:
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_LIMIT, MEMORY_LIMIT))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    path = folder / "mutant.gguf"
    for index in range(first, last):
        sys.stdout.write(f"{index} begins\n")
        sys.stdout.flush()
        path.write_bytes(mutant(bases, index)[0])
        outcomes = [attempt(use, str(path)) for use in (use_tokenizer, use_model)]
        sys.stdout.write(f"{index} {' / '.join(outcomes)}\n")
    sys.stdout.write("done\n")


# ---- The fuzz test ----


def copy_lines(child: subprocess.Popen[str], lines: queue.Queue[str]) -> None:
    for line in child.stdout or ():
        lines.put(line.strip())
    lines.put("")


def run_child(bases: Path, first: int, folder: Path) -> tuple[list[str], str]:
    """Lines of a child that tries mutants from `first` on, and how it ended: "done", or how it died."""
    command = [sys.executable, __file__, str(bases), str(first), str(NUM_MUTANTS), str(folder)]
    environment = os.environ | {"GGML_NO_BACKTRACE": "1"}
    with (folder / "stderr").open("w+b") as stderr:
        child = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=stderr, text=True, env=environment)
        lines: queue.Queue[str] = queue.Queue()
        reader = threading.Thread(target=copy_lines, args=(child, lines), daemon=True)
        reader.start()
        found = list[str]()
        try:
            while line := lines.get(timeout=SECONDS_PER_MUTANT):
                found.append(line)
            code = child.wait()
        except queue.Empty:
            return found, f"hung for {SECONDS_PER_MUTANT} s"
        finally:
            child.kill()
            child.wait()
            reader.join()
            if child.stdout:
                child.stdout.close()
        stderr.seek(0)
        said = stderr.read().decode(errors="replace")[-500:]
    if found and found[-1] == "done" and code == 0:
        return found, "done"
    return found, f"died of {signal.Signals(-code).name if code < 0 else code}: {said}"


@pytest.mark.slow
def test_mutants(tmp_path: Path, random_gguf: Callable[..., Path]) -> None:
    bases = [
        random_gguf(kind, width=32, layers=1, vocab_size=257, context=16, tie=kind != "Q8_0").read_bytes()
        for kind in ("F32", "F16", "Q8_0", "Q4_0")
    ]
    saved = tmp_path / "bases"
    saved.write_bytes(pickle.dumps(bases))
    first, outcomes, failures = 0, list[str](), list[str]()
    while first < NUM_MUTANTS and len(failures) < MOST_FAILURES:
        lines, end = run_child(saved, first, tmp_path)
        for line in lines:
            index, _, outcome = line.partition(" ")
            if outcome not in ("", "begins"):
                outcomes.append(outcome)
                if not set(outcome.split(" / ")) <= {"loaded", "refused"}:
                    failures.append(f"{mutant(bases, int(index))[1]}: {outcome}")
        if end == "done":
            break
        last = int(lines[-1].split()[0]) if lines else first
        failures.append(f"{mutant(bases, last)[1]}: {end}")
        first = last + 1
    assert not failures, f"{len(failures)} mutants failed:\n" + "\n".join(failures)
    assert len(outcomes) == NUM_MUTANTS
    # The mutants reach both sides of the checks.
    assert min(outcomes.count("loaded / loaded"), outcomes.count("refused / refused")) > NUM_MUTANTS // 20


# ---- Single cases ----

Change = Callable[[list[Entry], list[Tensor]], None]


@pytest.fixture
def small(random_gguf: Callable[..., Path]) -> Gguf:
    return Gguf(random_gguf(width=32, layers=1, vocab_size=257, context=16).read_bytes())


def put(key: str, kind: int, value: bytes) -> Change:
    """Set a key, in its place if it is there."""

    def change(entries: list[Entry], _: list[Tensor]) -> None:
        new = Entry(key.encode(), kind, value)
        at = [i for i, entry in enumerate(entries) if entry.key == new.key]
        if at:
            entries[at[0]] = new
        else:
            entries.append(new)

    return change


def put_integer(key: str, value: int) -> Change:
    return put(key, U32, struct.pack("<I", value))


def drop(name: str) -> Change:
    """Leave out a key or a tensor."""

    def change(entries: list[Entry], tensors: list[Tensor]) -> None:
        entries[:] = [entry for entry in entries if entry.key != name.encode()]
        tensors[:] = [tensor for tensor in tensors if tensor.name != name.encode()]

    return change


def set_weights(name: str, at: int, value: bytes) -> Change:
    """Put bytes into a tensor."""

    def change(_: list[Entry], tensors: list[Tensor]) -> None:
        i = [tensor.name for tensor in tensors].index(name.encode())
        data = tensors[i].data
        tensors[i] = replace(tensors[i], data=data[:at] + value + data[at + len(value) :])

    return change


def reshape(name: str, shape: tuple[int, ...], kind: int = 0) -> Change:
    """Make a tensor of zeros in another shape or type."""

    def change(_: list[Entry], tensors: list[Tensor]) -> None:
        at = [tensor.name for tensor in tensors].index(name.encode())
        tensors[at] = Tensor(name.encode(), shape, kind, bytes(num_bytes(shape, kind)))

    return change


def tokens_of(items: list[str]) -> Change:
    return put("tokenizer.ggml.tokens", ARRAY, array(STRING, [text(item) for item in items]))


EPSILON = "gpt2.attention.layer_norm_epsilon"
MODEL_CASES: dict[str, tuple[Change, str]] = {
    "architecture": (
        put("general.architecture", STRING, text("llama")),
        "metadata 'llama.embedding_length' is missing",
    ),
    "no-architecture": (drop("general.architecture"), "metadata 'general.architecture' is missing"),
    "not-utf8": (
        put("general.architecture", STRING, text(b"gp\xff2")),
        "architecture 'gp",
    ),
    "no-width": (drop("gpt2.embedding_length"), "metadata 'gpt2.embedding_length' is missing"),
    "width-kind": (put("gpt2.embedding_length", STRING, text("32")), "'gpt2.embedding_length' is not an integer"),
    "missing": (drop("blk.0.ffn_up.weight"), "tensor 'blk.0.ffn_up.weight' is missing"),
    "no-bias": (drop("output_norm.bias"), "tensor 'output_norm.bias' is missing"),
    "shape": (
        reshape("blk.0.ffn_up.weight", (128, 32)),
        "tensor 'blk.0.ffn_up.weight' has shape 128 x 32 x 1 x 1 where 32 x 128 x 1 x 1 is needed",
    ),
    "type": (
        reshape("blk.0.ffn_up.weight", (32, 128), 9),
        "tensor 'blk.0.ffn_up.weight': weights of type q8_1 are not supported; use f32, f16, bf16, q8_0, q4_0, q4_1,",
    ),
    "norm-type": (
        reshape("output_norm.weight", (32,), 8),
        "tensor 'output_norm.weight' is of type q8_0 where F32, F16 or BF16 is needed",
    ),
    "heads": (put_integer("gpt2.attention.head_count", 3), "a width of 32 does not split into 3 heads"),
    "no-heads": (put_integer("gpt2.attention.head_count", 0), "'gpt2.attention.head_count' is 0, outside 1 to 32"),
    "layers": (put_integer("gpt2.block_count", 512), "tensor 'blk.1.attn_qkv.weight' is missing"),
    "many-layers": (put_integer("gpt2.block_count", 513), "'gpt2.block_count' is 513, outside 1 to 512"),
    "absurd-layers": (put_integer("gpt2.block_count", 2**32 - 1), "'gpt2.block_count' is 4294967295, outside 1 to"),
    "huge-layers": (
        put("gpt2.block_count", U64, b"\xff" * 8),
        "'gpt2.block_count' is 9223372036854775807, outside 1 to",
    ),
    "context": (put_integer("gpt2.context_length", 1 << 24), "'position_embd.weight' has shape 32 x 16 x 1 x 1 where"),
    "absurd-context": (put_integer("gpt2.context_length", 1 << 31), "'gpt2.context_length' is 2147483648, outside"),
    "vocabulary": (reshape("token_embd.weight", (32, 0)), "tensor"),
    "epsilon": (put(EPSILON, F32, struct.pack("<f", 1)), f"'{EPSILON}' is not between 0 and 1"),
    "no-number-epsilon": (put(EPSILON, F32, struct.pack("<f", float("nan"))), f"'{EPSILON}' is not between 0 and 1"),
    "negative-epsilon": (put(EPSILON, F32, struct.pack("<f", -1e-5)), f"'{EPSILON}' is not between 0 and 1"),
    "epsilon-kind": (put_integer(EPSILON, 1), f"'{EPSILON}' is not a 32-bit float"),
    "double-tensor": (lambda _, tensors: tensors.append(tensors[-1]), "tensor"),
    "double-key": (lambda entries, _: entries.append(entries[-1]), "duplicate key 'tokenizer.ggml.eos_token_id'"),
}
TOKENIZER_CASES: dict[str, tuple[Change, str]] = {
    "bert": (put("tokenizer.ggml.model", STRING, text("bert")), "tokenizer model 'bert' is not supported, only"),
    "no-model": (drop("tokenizer.ggml.model"), "metadata 'tokenizer.ggml.model' is missing"),
    "no-tokens": (drop("tokenizer.ggml.tokens"), "vocabulary 'tokenizer.ggml.tokens' is missing"),
    "empty": (tokens_of([]), "vocabulary 'tokenizer.ggml.tokens' is missing, empty"),
    "twice": (tokens_of(["a", "b", "a"]), "token 2 of the vocabulary stands there twice"),
    "token-kind": (
        put("tokenizer.ggml.tokens", ARRAY, array(U32, [bytes(4)] * 257)),
        "'tokenizer.ggml.tokens' is not an array of str",
    ),
    "bos": (put_integer("tokenizer.ggml.bos_token_id", 257), "'tokenizer.ggml.bos_token_id' is 257, outside 0 to 256"),
    "eos": (put_integer("tokenizer.ggml.eos_token_id", 2**32 - 1), "'tokenizer.ggml.eos_token_id' is 4294967295, out"),
    "no-merges": (drop("tokenizer.ggml.merges"), "cannot find tokenizer merges"),
    "few-types": (
        put("tokenizer.ggml.token_type", ARRAY, array(I32, [b"\1\0\0\0"])),
        "out of array bounds for toktypes",
    ),
    "pre": (put("tokenizer.ggml.pre", STRING, text("nope")), "unknown pre-tokenizer type: 'nope'"),
}


def write(path: Path, small: Gguf, change: Change) -> str:
    entries, tensors = list(small.entries), list(small.tensors)
    change(entries, tensors)
    path.write_bytes(assemble(entries, tensors))
    return str(path)


def test_an_unchanged_file_loads(small: Gguf, tmp_path: Path) -> None:
    path = write(tmp_path / "same.gguf", small, lambda *_: None)
    assert Path(path).read_bytes() == small.data
    assert attempt(use_tokenizer, path) == attempt(use_model, path) == "loaded"


@pytest.mark.parametrize(("change", "message"), MODEL_CASES.values(), ids=MODEL_CASES)
def test_refused_models(small: Gguf, tmp_path: Path, change: Change, message: str) -> None:
    path = write(tmp_path / "bad.gguf", small, change)
    with pytest.raises(ModelError, match=re.escape(message)) as caught:
        _core.Model(path, "", 1)
    assert path in str(caught.value)


@pytest.mark.parametrize(("change", "message"), TOKENIZER_CASES.values(), ids=TOKENIZER_CASES)
def test_refused_tokenizers(small: Gguf, tmp_path: Path, change: Change, message: str) -> None:
    path = write(tmp_path / "bad.gguf", small, change)
    with pytest.raises(ModelError, match=re.escape(message)) as caught:
        _core.Tokenizer(path)
    assert path in str(caught.value)


@pytest.mark.parametrize(
    ("data", "message"),
    [(b"", "failed to read magic"), (b"not a model at all", "invalid magic characters: 'not ', expected 'GGUF'")],
    ids=["empty", "text"],
)
@pytest.mark.parametrize("load", [_core.Model, _core.Tokenizer, pystaged.load])
def test_not_gguf(tmp_path: Path, load: Callable[[str], object], data: bytes, message: str) -> None:
    path = tmp_path / "bad.gguf"
    path.write_bytes(data)
    with pytest.raises(ModelError, match=re.escape(f"{path}: ") + ".*" + message):
        load(str(path))


@pytest.mark.parametrize("end", [3, 20, 600, 5000, -20000, -1])
@pytest.mark.parametrize("load", [_core.Model, _core.Tokenizer])
def test_truncated(small: Gguf, tmp_path: Path, load: Callable[[str], object], end: int) -> None:
    path = tmp_path / "short.gguf"
    path.write_bytes(small.data[:end])
    message = "truncated or damaged" if end < 0 else "failed to read"
    with pytest.raises(ModelError, match=message):
        load(str(path))


@pytest.mark.parametrize("load", [_core.Model, _core.Tokenizer])
def test_no_file(tmp_path: Path, load: Callable[[str], object]) -> None:
    with pytest.raises(ModelError, match=f"{tmp_path}/none.gguf: .*No such file"):
        load(f"{tmp_path}/none.gguf")
    with pytest.raises(ModelError, match=re.escape(str(tmp_path))):
        load(str(tmp_path))


def test_a_name_that_is_not_utf8(small: Gguf, tmp_path: Path) -> None:
    path = Path(os.fsdecode(os.fsencode(tmp_path) + b"/m\xff.gguf"))
    try:
        path.write_bytes(small.data)
    except OSError:
        return  # a file system without such names
    pystaged.load(path).close()


INFINITE = {
    "F32": (0, "<f"),
    "F16": (0, "<e"),
    "Q8_0": (34, "<e"),
    "Q4_1": (2, "<e"),
    "Q5_0": (22, "<e"),
    "Q6_K": (208, "<e"),
}


@pytest.mark.parametrize("device", ["cpu", "ggml-cpu"])
@pytest.mark.parametrize("value", [float("inf"), float("nan")])
@pytest.mark.parametrize("kind", INFINITE)
def test_scales_that_are_not_finite(
    random_gguf: Callable[..., Path], tmp_path: Path, kind: str, value: float, device: str
) -> None:
    at, code = INFINITE[kind]
    whole = Gguf(random_gguf(kind, width=256, heads=4, layers=1, vocab_size=257, context=16).read_bytes())
    path = write(tmp_path / "bad.gguf", whole, set_weights("blk.0.ffn_down.weight", at, struct.pack(code, value)))
    with pytest.raises(ModelError, match=r"bad.gguf: tensor 'blk.0.ffn_down.weight' holds .* not finite.* damaged"):
        _core.Model(path, device=device)


@pytest.mark.parametrize("device", ["cpu", "ggml-cpu"])
@pytest.mark.parametrize("name", ["output_norm.weight", "blk.0.attn_norm.bias", "position_embd.weight"])
def test_floats_that_are_not_finite(small: Gguf, tmp_path: Path, name: str, device: str) -> None:
    path = write(tmp_path / "bad.gguf", small, set_weights(name, 4, struct.pack("<f", float("-inf"))))
    with pytest.raises(ModelError, match=f"tensor '{name}' holds .* not finite"):
        _core.Model(path, device=device)


# Of a device come only the largest logits, as long as they are enough.
@pytest.mark.parametrize(("number", "device"), [(3e38, "cpu"), (-3e38, "cpu"), (3e38, "ggml-cpu")])
def test_logits_that_are_not_finite(small: Gguf, tmp_path: Path, number: float, device: str) -> None:
    """Finite weights, infinite sums: one column of the embedding times a huge normed value."""
    entries, tensors = list(small.entries), list(small.tensors)
    set_weights("output_norm.bias", 0, struct.pack("<f", number))(entries, tensors)
    set_weights("token_embd.weight", 0, struct.pack("<f", 1e6))(entries, tensors)
    path = str(tmp_path / "bad.gguf")
    Path(path).write_bytes(assemble(entries, tensors))
    session = _core.Session(_core.Model(path, device=device))
    session.prefill([1, 2, 3])
    with pytest.raises(ModelError, match="logits of a pass are not finite"):
        session.verify([5, 6], [-1, 0], _core.Sampling())
    with pytest.raises(ModelError, match="logits of a pass are not finite"):
        session.evaluate([5], [-1])
    assert (session.tokens.tolist(), session.num_pending) == ([1, 2, 3], 0)


def test_logits_that_are_not_finite_and_stay_on_the_device(small: Gguf, tmp_path: Path) -> None:
    """They are refused whenever they are needed, until their rows are gone."""
    entries, tensors = list(small.entries), list(small.tensors)
    set_weights("output_norm.bias", 0, struct.pack("<f", -3e38))(entries, tensors)
    # Of one token; the largest logits are finite.
    for token in range(257):
        set_weights("token_embd.weight", 4 * 32 * token, struct.pack("<f", 1e6 if token == 7 else 0))(entries, tensors)
    path = tmp_path / "bad.gguf"
    path.write_bytes(assemble(entries, tensors))
    session = _core.Session(_core.Model(path, device="ggml-cpu"))
    greedy = _core.Sampling()
    session.evaluate([5], [-1])
    first = session.follow(greedy)[1].tolist()
    for call in (
        lambda: session.logits(0),
        lambda: session.candidates([0], 2, _core.Sampling(1.0)),
        lambda: session.evaluate([6], [0]),
        lambda: session.logits(0),
    ):
        with pytest.raises(ModelError, match="logits of a pass are not finite"):
            call()
        assert (session.tokens.tolist(), session.num_pending) == ([], 1)
    assert session.follow(greedy)[1].tolist() == first
    session.discard()
    assert session.verify([5], [-1], greedy)[1].tolist() == first


TRUNCATED_WHILE_READ = """
import os, sys
from pystaged import _core

try:
    _core.Model(sys.argv[1], device="ggml-cpu", progress=lambda: os.truncate(sys.argv[1], 4096))
except _core.ModelError as error:
    print(error)
"""


def test_truncated_while_it_is_read(random_gguf: Callable[..., Path], tmp_path: Path) -> None:
    path = tmp_path / "short.gguf"
    path.write_bytes(random_gguf("F16", width=256, layers=2, vocab_size=300).read_bytes())
    done = subprocess.run(
        [sys.executable, "-c", TRUNCATED_WHILE_READ, path], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert re.search(r"short.gguf: tensor '.*' cannot be read: the file became shorter", done.stdout)


@pytest.mark.skipif(sys.platform != "linux", reason="/proc is Linux's")
def test_a_refused_file_stays_neither_open_nor_mapped(small: Gguf, tmp_path: Path) -> None:
    path = tmp_path / "refused.gguf"
    path.write_bytes(small.data[:-1])
    for load in (_core.Model, _core.Tokenizer):
        with pytest.raises(ModelError, match="beyond the end"):
            load(str(path))
    assert "refused.gguf" not in Path("/proc/self/maps").read_text()
    assert not [file for file in Path("/proc/self/fd").iterdir() if file.exists() and file.resolve() == path]


def test_a_pipe_is_refused_at_once(tmp_path: Path) -> None:
    path = tmp_path / "pipe.gguf"
    os.mkfifo(path)
    for load in (_core.Model, _core.Tokenizer):
        with pytest.raises(ModelError, match=r"pipe\.gguf: cannot open: it is no regular file"):
            load(str(path))


def test_the_most_layers_run(random_gguf: Callable[..., Path]) -> None:
    path = random_gguf(width=8, heads=1, layers=512, vocab_size=257, context=8)
    session = _core.Session(_core.Model(str(path)))
    with ThreadPoolExecutor(1) as pool:  # on a thread's smaller stack
        pool.submit(session.verify, [1, 2], [-1, 0], _core.Sampling()).result()


def test_tensors_at_any_address(small: Gguf, tmp_path: Path) -> None:
    """With general.alignment 1 tensors begin where the one before ends."""
    entries = [*small.entries, Entry(b"general.alignment", U32, struct.pack("<I", 1)), Entry(b"general.odd", U8, b"0")]
    path = tmp_path / "odd.gguf"
    path.write_bytes(assemble(entries, small.tensors, 1))
    same = tmp_path / "even.gguf"
    same.write_bytes(small.data)
    logits = []
    for file in (path, same):
        session = _core.Session(_core.Model(str(file), num_threads=1))
        session.evaluate([1, 2, 3], [-1, 0, 1])
        logits.append(session.logits(2).tobytes())
    assert logits[0] == logits[1]


@pytest.mark.parametrize("load", [_core.Model, _core.Tokenizer])
def test_any_form_of_path(small: Gguf, tmp_path: Path, load: Callable[[object], object]) -> None:
    path = Path(os.fsdecode(os.fsencode(tmp_path) + b"/m\xff.gguf"))
    try:
        path.write_bytes(small.data)
    except OSError:
        path = tmp_path / "m.gguf"
        path.write_bytes(small.data)
    for form in (path, str(path), os.fsencode(path)):
        load(form)
    with pytest.raises(ModelError, match=r"none\.gguf"):
        load(os.fsencode(path) + b"none.gguf")
    with pytest.raises(TypeError):
        load(5)
    with pytest.raises(ValueError, match="null"):
        load(f"{path}\0")


def test_weights_for_another_vocabulary(small: Gguf, tmp_path: Path) -> None:
    path = write(tmp_path / "bad.gguf", small, reshape("token_embd.weight", (32, 256)))
    with pytest.raises(ModelError, match="has weights for 256 tokens, but a vocabulary of 257"):
        pystaged.load(path)


if __name__ == "__main__":
    try_mutants(pickle.loads(Path(sys.argv[1]).read_bytes()), int(sys.argv[2]), int(sys.argv[3]), Path(sys.argv[4]))
