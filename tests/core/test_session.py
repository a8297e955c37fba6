"""A session's logits are the same bits however they are computed, and no failed call leaves a trace."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache, partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from gguf import GGUFReader
from hypothesis import given, settings
from hypothesis import strategies as st
from support.commands import run_python
from support.kernels import EVERY_KERNEL, KERNELS
from support.libraries import of_llama_cpp
from support.paths import table
from support.plain import Plain
from support.remote import Wire, over
from support.steps import evaluate, path_to, prefill, rank, verify

from pystaged import ContextFullError, _core, _llama

# Heads of 8, 11, 20, 36, 32, 24, 12 and 64 dimensions: below, at, above and between the sizes the kernels work in.
SHAPES: dict[str, dict[str, Any]] = dict(table("session_shapes"))
FEW = ("F32-11", "Q8_0-24", "Q4_K-64")  # where the shape of heads matters least
PREFIX = tuple(np.random.default_rng(0).integers(0, 257, 1024).tolist())
examples = settings(max_examples=20)

load = cache(_core.Model)


@dataclass(frozen=True)
class Tree:
    """Tokens in rows, each with the row before it or -1 for the committed end."""

    tokens: list[int]
    parents: list[int]

    def rows_to(self, row: int) -> list[int]:
        return path_to(row, self.parents)

    def path(self, row: int) -> tuple[int, ...]:
        """The tokens of those rows."""
        return tuple(self.tokens[i] for i in self.rows_to(row))

    def levels(self) -> Tree:
        """The same tree with its rows ordered by depth."""
        order = sorted(range(len(self.tokens)), key=lambda row: len(self.rows_to(row)))
        place = {-1: -1} | {row: i for i, row in enumerate(order)}
        return Tree([self.tokens[row] for row in order], [place[self.parents[row]] for row in order])


sequential = cache(Plain)


@st.composite
def trees(draw: st.DrawFn, most: int = 24) -> Tree:
    parents = [draw(st.just(i - 1) | st.integers(-1, i - 1)) for i in range(draw(st.integers(1, most)))]
    tokens = st.lists(st.sampled_from([0, 7, 42, 256]), min_size=len(parents), max_size=len(parents))
    return Tree(draw(tokens), parents)


def sessions(path: Path, n_ctx: int = 0) -> Iterator[_core.Session]:
    """A session by every kernel, each with another number of threads."""
    for i, kernel in enumerate(KERNELS):
        yield _core.Session(load(str(path), kernel, 1 + i), n_ctx)


def evaluate_in_parts(session: _core.Session, tree: Tree, cuts: list[int]) -> None:
    """Evaluates a tree in parts that end at these rows."""
    ends = [0, *sorted({cut for cut in cuts if 0 < cut < len(tree.tokens)}), len(tree.tokens)]
    for first, last in pairwise(ends):
        evaluate(session, tree.tokens[first:last], tree.parents[first:last])


def assert_logits(session: _core.Session, path: Path, prefix: tuple[int, ...], tree: Tree, first: int = 0) -> None:
    """The rows from `first` on have the bits of decoding their paths token by token."""
    # The deepest first: decoding its path gives those above it.
    for row in reversed(range(first, len(tree.tokens))):
        np.testing.assert_array_equal(session.logits(row), sequential(path)([*prefix, *tree.path(row)]))


@pytest.mark.slow
@pytest.mark.parametrize("shape", SHAPES)
@given(tree=trees(), num_committed=st.integers(0, 20), cuts=st.lists(st.integers(1, 23), max_size=6), data=st.data())
@examples
def test_tree_is_decoding_every_path(
    random_gguf: Callable[..., Path], shape: str, tree: Tree, num_committed: int, cuts: list[int], data: st.DataObject
) -> None:
    path, prefix = random_gguf(**SHAPES[shape]), PREFIX[:num_committed]
    num_logits = data.draw(st.integers(0, len(tree.tokens)), label="num_logits")
    for session in sessions(path):
        prefill(session, prefix)
        evaluate(session, tree.tokens, tree.parents)
        assert_logits(session, path, prefix, tree)
        session.discard()
        evaluate_in_parts(session, tree.levels(), cuts)
        assert_logits(session, path, prefix, tree.levels())
        session.discard()
        evaluate(session, tree.tokens, tree.parents, num_logits)
        assert_logits(session, path, prefix, tree, len(tree.tokens) - num_logits)


@pytest.mark.slow
@pytest.mark.parametrize("shape", FEW)
@given(steps=st.lists(st.tuples(trees(12), st.integers(-1, 11), st.integers(0, 8)), min_size=1, max_size=5))
@examples
def test_commit_and_rewind(random_gguf: Callable[..., Path], shape: str, steps: list[tuple[Tree, int, int]]) -> None:
    path = random_gguf(**SHAPES[shape])
    for session in sessions(path):
        committed = PREFIX[:9]
        prefill(session, committed)
        for tree, row, num_dropped in steps:
            evaluate(session, tree.tokens, tree.parents)
            assert_logits(session, path, committed, tree)
            kept = min(row, len(tree.tokens) - 1)
            session.commit(tree.rows_to(kept))
            committed += tree.path(kept)
            assert (tuple(session.tokens), session.num_pending) == (committed, 0)
            if num_dropped:
                evaluate(session, tree.tokens, tree.parents, 0)
                committed = committed[:-num_dropped]
                session.rewind(len(committed))
                assert (tuple(session.tokens), session.num_pending) == (committed, 0)


@pytest.mark.slow
@pytest.mark.parametrize("kernel", EVERY_KERNEL)
def test_bundled_draft_up_to_the_end_of_its_context(bundled_draft: Path, kernel: str) -> None:
    session = _core.Session(load(str(bundled_draft), kernel))
    prefill(session, PREFIX[:1016])
    tree = Tree([*PREFIX[1016:1024], 3, 3, 4], [-1, 0, 1, 2, 3, 4, 5, 6, 2, 8, 6])
    evaluate(session, tree.tokens, tree.parents)
    assert_logits(session, bundled_draft, PREFIX[:1016], tree)
    with pytest.raises(ContextFullError):
        evaluate(session, [5], [7])
    session.commit(tree.rows_to(7))
    assert tuple(session.tokens) == PREFIX
    for full in (lambda: evaluate(session, [5], [-1]), lambda: prefill(session, [5])):
        with pytest.raises(ContextFullError, match="1024"):
            full()
    session.rewind(1023)
    evaluate(session, PREFIX[1023:], [-1])
    np.testing.assert_array_equal(session.logits(0), sequential(bundled_draft)(list(PREFIX)))


@pytest.mark.slow
@pytest.mark.parametrize("shape", FEW)
def test_large_tree_in_a_small_context(random_gguf: Callable[..., Path], shape: str) -> None:
    path = random_gguf(**SHAPES[shape])
    generator = np.random.default_rng(0)
    # 20 first tokens, 20 children of each one, then 100 grandchildren.
    parents = [-1] * 20 + [i // 20 for i in range(400)] + generator.integers(20, 420, 100).tolist()
    tree = Tree(generator.integers(0, 257, 520).tolist(), parents)
    for session in sessions(path, n_ctx=8):
        prefill(session, PREFIX[:5])
        evaluate(session, tree.tokens[:500], tree.parents[:500])
        assert_logits(session, path, PREFIX[:5], Tree(tree.tokens[:500], tree.parents[:500]))
        with pytest.raises(ContextFullError):
            evaluate(session, [1] * 30, [-1] * 30)
        session.commit(tree.rows_to(499))
        assert tuple(session.tokens) == PREFIX[:5] + tree.path(499)


def naive_walk(session: _core.Session, tree: Tree, row: int) -> tuple[list[int], list[int]]:
    """Follow by its definition."""
    token = int(session.logits(row).argmax())
    children = [i for i, parent in enumerate(tree.parents) if parent == row and tree.tokens[i] == token]
    path, tokens = naive_walk(session, tree, children[0]) if children else ([], [])
    return [row, *path], [token, *tokens]


@pytest.mark.slow
@pytest.mark.parametrize("shape", FEW)
@given(guesses=st.lists(st.tuples(st.integers(-1, 22), st.booleans()), min_size=1, max_size=23))
@examples
def test_follow(random_gguf: Callable[..., Path], shape: str, guesses: list[tuple[int, bool]]) -> None:
    path = random_gguf(**SHAPES[shape])
    tree = Tree([42], [-1])
    for back, right in guesses:
        # A child of the newest row, or of an earlier one; right guesses under one parent are duplicates.
        parent = max(-1, len(tree.tokens) - 2 - back)
        token = int(sequential(path)([*PREFIX[:6], *tree.path(parent)]).argmax())
        tree.tokens.append(token if right else (token + 1) % 257)
        tree.parents.append(parent)
    for session in sessions(path):
        prefill(session, PREFIX[:6])
        evaluate(session, tree.tokens, tree.parents)
        for row in range(len(tree.tokens)):
            followed, tokens = session.follow(_core.Sampling(), row)
            assert (followed.tolist(), tokens.tolist()) == naive_walk(session, tree, row)
        followed, tokens = session.follow(_core.Sampling())
        session.commit(followed)
        evaluate(session, tokens[-1:], [-1])
        expected = sequential(path)([*PREFIX[:6], *tree.path(followed[-1]), tokens[-1]])
        np.testing.assert_array_equal(session.logits(0), expected)


def largest(logits: npt.NDArray[np.float32], k: int) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.float32]]:
    """The k largest of each row, best first, ties by the lower id."""
    order = np.argsort(-logits, axis=1, kind="stable")[:, :k].astype(np.int32)
    return order, np.take_along_axis(logits, order, axis=1)


@given(steps=st.lists(st.tuples(trees(12), st.sampled_from([0.0, 1.0]), st.sampled_from([0, 1, 8, 300])), max_size=5))
@examples
def test_verify_is_evaluate_follow_commit(
    random_gguf: Callable[..., Path], steps: list[tuple[Tree, float, int]]
) -> None:
    model = load(str(random_gguf("Q8_0")))
    wire = Wire(model)
    apart, together, afar = _core.Session(model), _core.Session(model), over(wire)
    for session in (apart, together, afar):
        prefill(session, PREFIX[:5])
    for tree, temperature, k in steps:
        sampling = _core.Sampling(temperature, seed=3)
        evaluate(apart, tree.tokens, tree.parents)
        logits = np.stack([apart.logits(row) for row in range(len(tree.tokens))])
        expected = apart.follow(sampling)
        apart.commit(expected[0])
        before = len(wire.sizes)
        for verified in (verify(session, tree.tokens, tree.parents, sampling, k) for session in (together, afar)):
            assert len(verified) == (4 if k else 2)
            for found, wanted in zip(verified, [*expected, *largest(logits, k)], strict=False):
                assert found.dtype == wanted.dtype
                np.testing.assert_array_equal(found, wanted)
        assert len(wire.sizes) == before + 2  # the sampling, which is new, and the pass
        np.testing.assert_array_equal(together.tokens, apart.tokens)
        assert together.num_pending == 0
    for session in (apart, together):
        evaluate(session, [42], [-1])
    np.testing.assert_array_equal(together.logits(0), apart.logits(0))


GREEDY = _core.Sampling()
BAD_CALLS: dict[str, tuple[Callable[[_core.Session], object], type[Exception], str]] = {
    "negative-token": (lambda s: evaluate(s, [1, -1], [1, 1]), ValueError, "token -1"),
    "token-too-large": (lambda s: evaluate(s, [1, 300], [1, 1]), ValueError, "token 300 .* 300"),
    "token-beyond-int32": (lambda s: evaluate(s, [1 << 32], [1]), ValueError, "tokens holds 4294967296"),
    "parent-too-small": (lambda s: evaluate(s, [1, 1], [1, -2]), ValueError, "row 3 has parent -2"),
    "parent-itself": (lambda s: evaluate(s, [1], [2]), ValueError, "row 2 has parent 2"),
    "parent-later": (lambda s: evaluate(s, [1, 1], [3, 1]), ValueError, "row 2 has parent 3"),
    "parent-beyond-int64": (lambda s: evaluate(s, [1], np.array([2**64 - 1], np.uint64)), ValueError, "parents"),
    "float-tokens": (lambda s: evaluate(s, np.ones(1), [1]), TypeError, "tokens"),
    "2-d-tokens": (lambda s: evaluate(s, [[1]], [1]), TypeError, "tokens"),
    "no-tokens": (lambda s: evaluate(s, [], []), ValueError, "at least one token"),
    "too-many-logits": (lambda s: evaluate(s, [1], [1], 2), ValueError, "num_judged"),
    "chain-past-the-context": (lambda s: evaluate(s, [1] * 20, range(1, 21)), ContextFullError, "16 tokens"),
    "more-rows-than-cells": (lambda s: evaluate(s, [1] * 600, [-1] * 600), ContextFullError, "more rows than"),
    "prefill-with-pending-rows": (lambda s: prefill(s, [1]), ValueError, "pending rows"),
    "verify-k": (lambda s: verify(s, [1], [-1], GREEDY, 301), ValueError, "num_candidates"),
    "verify-with-pending-rows": (lambda s: verify(s, [1], [-1], GREEDY), ValueError, "pending rows"),
    "logits-without": (lambda s: s.logits(0), ValueError, "row 0 .*without logits"),
    "logits-row": (lambda s: s.logits(2), ValueError, "row 2"),
    "logits-negative-row": (lambda s: s.logits(-1), ValueError, "row -1"),
    "candidates-without": (lambda s: rank(s, [1, 0], 3, GREEDY), ValueError, "row 0 .*without logits"),
    "candidates-row": (lambda s: rank(s, [1, 2], 3, GREEDY), ValueError, "row 2"),
    "candidates-negative-row": (lambda s: rank(s, [-1], 3, GREEDY), ValueError, "row -1"),
    "candidates-float-rows": (lambda s: rank(s, [1.0], 3, GREEDY), TypeError, "rows"),
    "candidates-2-d-rows": (lambda s: rank(s, [[1]], 3, GREEDY), TypeError, "rows"),
    "candidates-no-k": (lambda s: rank(s, [1], 0, GREEDY), ValueError, "k must be"),
    "candidates-k-too-large": (lambda s: rank(s, [1], 301, GREEDY), ValueError, "k must be"),
    "follow-without": (lambda s: s.follow(GREEDY), ValueError, "row 0 .*without logits"),
    "follow-row": (lambda s: s.follow(GREEDY, 2), ValueError, "row 2"),
    "follow-negative-row": (lambda s: s.follow(GREEDY, -1), ValueError, "row -1"),
    "commit-from-the-middle": (lambda s: s.commit([1]), ValueError, "row 1 does not continue"),
    "commit-twice": (lambda s: s.commit([0, 1, 1]), ValueError, "row 1 does not continue"),
    "commit-row": (lambda s: s.commit([0, 1, 2]), ValueError, "row 2"),
    "commit-negative-row": (lambda s: s.commit([-1]), ValueError, "row -1"),
    "rewind-longer": (lambda s: s.rewind(6), ValueError, "5 tokens to 6"),
    "stretch-with-rows": (lambda s: s.stretch(9), ValueError, "stretch needs a session without pending rows"),
}


@pytest.mark.parametrize("name", BAD_CALLS)
def test_failed_call_changes_nothing(random_gguf: Callable[..., Path], name: str) -> None:
    call, kind, message = BAD_CALLS[name]
    path = random_gguf("Q8_0")
    session = _core.Session(load(str(path)), 16)
    prefill(session, PREFIX[:5])
    evaluate(session, [7, 8], [-1, 0], 1)
    with pytest.raises(kind, match=message):
        call(session)
    assert (tuple(session.tokens), session.num_pending) == (PREFIX[:5], 2)
    evaluate(session, [9, 9], [1, -1])
    assert_logits(session, path, PREFIX[:5], Tree([7, 8, 9, 9], [-1, 0, 1, -1]), 1)
    session.commit([0, 1, 2])
    evaluate(session, [10], [-1])
    np.testing.assert_array_equal(session.logits(0), sequential(path)([*PREFIX[:5], 7, 8, 9, 10]))


@pytest.mark.parametrize("device", ["cpu", "ggml-cpu"])
def test_a_context_stretched_to_time_passes(random_gguf: Callable[..., Path], device: str) -> None:
    model = _core.Model(str(random_gguf("Q8_0")), device=device)
    session, fresh = _core.Session(model, 80), _core.Session(model, 80)
    for length in (9, 0, 81, -1):
        with pytest.raises(ValueError, match=f"cannot stretch 0 tokens to {length} of 80"):
            session.stretch(length)
    prefill(session, PREFIX[:2])
    with pytest.raises(ValueError, match="cannot stretch 2 tokens to 1 of 80"):
        session.stretch(1)
    session.stretch(2)
    session.stretch(70)
    assert tuple(session.tokens) == (*PREFIX[:2], *[PREFIX[1]] * 68)
    evaluate(session, [5, 6, 7], [-1, 0, 0])
    assert all(np.isfinite(session.logits(row)).all() for row in range(3))
    session.discard()
    with pytest.raises(ContextFullError):
        prefill(session, [1] * 11)
    # Nothing of it is left in the context that comes after.
    session.rewind(0)
    for each in (session, fresh):
        prefill(each, PREFIX[:30])
        evaluate(each, [5], [-1])
    # A device's rounding depends on where cells lie.
    np.testing.assert_allclose(session.logits(0), fresh.logits(0), rtol=0, atol=0 if device == "cpu" else 0.02)


def test_context_of_the_model(random_gguf: Callable[..., Path]) -> None:
    model = load(str(random_gguf("Q8_0")))
    assert [_core.Session(model, n_ctx).n_ctx for n_ctx in (0, 1, 96)] == [96, 1, 96]


def test_closed_session(random_gguf: Callable[..., Path]) -> None:
    session = _core.Session(load(str(random_gguf("Q8_0"))))
    prefill(session, PREFIX[:5])
    evaluate(session, [7], [-1])
    assert not session.closed
    for _ in range(2):
        session.close()
    assert session.closed
    steps = [partial(prefill, session, [1]), partial(prefill, session, []), partial(evaluate, session, [1], [-1])]
    steps += [partial(rank, session, [0], 1, GREEDY), partial(verify, session, [1], [-1], GREEDY)]
    calls: dict[str, tuple[Any, ...]] = {"follow": (GREEDY,), "commit": ([],), "discard": (), "rewind": (0,)}
    calls |= {"stretch": (9,), "logits": (0,)}
    for call in (*steps, *(partial(getattr(session, name), *arguments) for name, arguments in calls.items())):
        with pytest.raises(ValueError, match="closed"):
            call()


INTERRUPTED = """
import os, signal, sys, threading, time
import numpy as np
from pystaged import _core
from pystaged._core import Work, run

model = _core.Model(sys.argv[1])
session, fresh = _core.Session(model), _core.Session(model)
start = time.perf_counter()
run([Work.read(fresh, [5] * 1000)])
seconds = time.perf_counter() - start
run([Work.read(session, [1, 2, 3])])
for i in range(40):  # sooner and sooner, for when the machine was busy it took longer
    timer = threading.Timer(0.4 * 0.8**i * seconds, os.kill, [os.getpid(), signal.SIGINT])
    try:
        timer.start()
        run([Work.read(session, [5] * 1000)])
        time.sleep(600)
    except KeyboardInterrupt:
        pass
    if len(session.tokens) == 3:
        break
    session.rewind(3)  # too late: it came after the last pass
else:
    sys.exit("it never came in the middle")
assert session.tokens.tolist() == [1, 2, 3]
assert session.num_pending == 0
fresh.rewind(0)
run([Work.read(fresh, [1, 2, 3])])
for s in (session, fresh):
    run([Work.propose(s, [4], [-1], 1, 0, _core.Sampling())])
assert np.array_equal(session.logits(0), fresh.logits(0))
print("interrupted")
"""


@pytest.mark.skipif(sys.platform == "win32", reason="no SIGINT to send")
def test_ctrl_c_during_a_prefill(bundled_target: Path) -> None:
    """It comes from another thread, which runs meanwhile."""
    done = run_python(INTERRUPTED, bundled_target)
    assert (done.stdout, done.stderr) == ("interrupted\n", "")


HANDLED = """
import signal, sys
from pystaged import _core

session, refused = _core.Session(_core.Model(sys.argv[1])), []

def handle(*_):
    for touch in (lambda: session.tokens, lambda: session.closed):
        try:
            touch()
        except RuntimeError as error:
            refused.append(str(error))

signal.signal(signal.SIGALRM, handle)
signal.setitimer(signal.ITIMER_REAL, 1e-3, 1e-3)
while len(refused) < 4:
    session.rewind(0)
    _core.run([_core.Work.read(session, [5] * 1000)])
signal.setitimer(signal.ITIMER_REAL, 0)
assert all("signal handler" in message for message in refused)
assert session.tokens.tolist() == [5] * 1000
print("handled")
"""


def test_signal_handler_that_touches_the_session(bundled_draft: Path) -> None:
    done = run_python(HANDLED, bundled_draft)
    assert (done.stdout, done.stderr) == ("handled\n", "")


@pytest.mark.parametrize(("name", "files", "cpus"), table("quotas"))
def test_cpu_quota(tmp_path: Path, name: str, files: dict[str, str], cpus: int) -> None:
    del name
    for file, content in files.items():
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / file).write_text(content)
    assert _core.choose_cores(tmp_path, [0]).quota == cpus


def test_only_what_is_automatic_is_capped(random_gguf: Callable[..., Path]) -> None:
    cores = _core.choose_cores()
    assert 1 <= cores.few <= cores.many <= (cores.quota or os.cpu_count() or 1)
    path = str(random_gguf("Q8_0"))
    automatic, asked = load(path), load(path, num_threads=5)
    assert (automatic.num_few_threads, automatic.num_threads) == (cores.few, cores.many)
    assert (asked.num_few_threads, asked.num_threads) == (5, 5)


FLOATS = """
import ctypes, mmap, platform, sys
import numpy as np
from pystaged import _core

libm = ctypes.CDLL(None)
ODD = {"x86_64": 0x400, "aarch64": 0x800000, "arm64": 0x800000}[platform.machine()]  # FE_DOWNWARD

def flush_to_zero():
    if platform.machine() != "x86_64":
        return
    code = mmap.mmap(-1, 4096, prot=mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC)
    code.write(b"\\x0f\\xae\\x17\\xc3")  # ldmxcsr (%rdi); ret
    address = ctypes.addressof(ctypes.c_char.from_buffer(code))
    ctypes.CFUNCTYPE(None, ctypes.c_void_p)(address)(ctypes.addressof(ctypes.c_uint32(0x1F80 | 0x8040)))

def bits():
    model = _core.Model(sys.argv[1], num_threads=2)
    session = _core.Session(model)
    _core.run([_core.Work.read(session, [1, 2, 3, 4])])
    [found] = _core.run([_core.Work.propose(session, [5, 6, 7], [-1, 0, 0], 3, 20, _core.Sampling(1.0, seed=5))])
    assert 0 < abs(session.logits(0)).max() < 1e-37
    return session.logits(0).tobytes() + b"".join(array.tobytes() for array in found)

expected = bits()
libm.fesetround(ODD)
downward = bits()
assert libm.fegetround() == ODD, "the caller's rounding is not restored"
libm.fesetround(0)
flush_to_zero()
assert np.float32(1e-40) * np.float32(1) == 0 or platform.machine() != "x86_64"
flushed = bits()
assert np.float32(1e-40) * np.float32(1) == 0 or platform.machine() != "x86_64", "not restored"
print(downward == expected, flushed == expected)
"""


def test_floats_of_the_calling_thread_do_not_matter(random_gguf: Callable[..., Path], tmp_path: Path) -> None:
    path = tmp_path / "tiny.gguf"
    path.write_bytes(random_gguf("F16", width=256, heads=4).read_bytes())
    for tensor in GGUFReader(path, "r+").tensors:
        if tensor.name.startswith("output_norm"):
            tensor.data[:] = 1e-38  # so that logits are subnormal
    done = run_python(FLOATS, path)
    assert (done.stdout, done.stderr) == ("True True\n", "")


@of_llama_cpp
@pytest.mark.skipif(sys.platform != "linux", reason="/proc is Linux's")
@pytest.mark.parametrize("order", ["pystaged, llama_cpp, pystaged._core", "pystaged._core, llama_cpp"])
def test_one_copy_of_each_library(order: str) -> None:
    script = f"import {order}; print(llama_cpp.__file__); print(open('/proc/self/maps').read())"
    package, *maps = run_python(script).stdout.splitlines()
    files = {Path(line.split(maxsplit=5)[5]) for line in maps if "/" in line}
    libraries = sorted(file for file in files if file.name.startswith(("libllama", "libggml")))
    names = [file.name.split(".")[0] for file in libraries]
    assert {file.parent for file in libraries} == {Path(package).parent / "lib"}
    assert len(names) == len(set(names))
    assert set(names) >= {"libllama", "libggml", "libggml-base", "libggml-cpu"}


def test_pythons_without_a_lock() -> None:
    with pytest.raises(ImportError, match="pystaged needs Python's global interpreter lock, which PYTHON_GIL=0"):
        _llama.check_lock(enabled=False, wanted_off=True)
    _llama.check_lock(enabled=False, wanted_off=False)  # which loading the extension turns on
    _llama.check_lock(enabled=True, wanted_off=True)


def test_one_version_of_llama_cpp() -> None:
    project = Path(__file__).parents[2] / "pyproject.toml"
    named = re.findall(r"llama-cpp-python==([0-9.]+)", project.read_text("utf-8"))
    assert named == [_llama.VERSION] * 2  # to build with and to run with


@of_llama_cpp
def test_llama_cpp_that_does_not_fit() -> None:
    """One that is not installed: tests/test_wheels.py."""
    _llama.check(_llama.VERSION, None)  # which fits
    with pytest.raises(ImportError, match=r"but 0\.3\.35 is installed; run: pip install llama-cpp-python=="):
        _llama.check("0.3.35", None)
    with pytest.raises(ImportError, match=r"no libllama in .*; run: pip install"):
        _llama._load("/nowhere")
    done = run_python("import pystaged; pystaged.load", LLAMA_CPP_LIB_PATH="/opt/llama")
    assert done.returncode == 1
    assert re.search("ImportError: LLAMA_CPP_LIB_PATH is set to /opt/llama.* unset it", done.stderr)


def test_ctrl_c_while_tokens_are_converted_is_not_a_wrong_argument(random_gguf: Callable[..., Path]) -> None:
    class Interrupted:
        def __array__(self, *_: object, **__: object) -> np.ndarray:
            raise KeyboardInterrupt

    session = _core.Session(_core.Model(str(random_gguf("F32"))))
    with pytest.raises(KeyboardInterrupt):
        prefill(session, Interrupted())
    prefill(session, [1, 2])
