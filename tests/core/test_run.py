"""Works of several texts share a pass: each has the bits that it has alone, and what fails leaves no trace."""

from __future__ import annotations

import gc
import sys
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.commands import run_python
from support.families import CASES, models
from support.kernels import KERNELS
from support.memory import resident, used
from support.random_models import RandomModel, write
from support.steps import evaluate, prefill, rank, verify

from pystaged import ContextFullError, _core
from pystaged._core import Work

CONTEXT = 1200  # more than two chunks of positions
FAMILIES = models("run")
PREFIX = np.random.default_rng(0).integers(0, 257, CONTEXT - 100, dtype=np.int32)
LENGTHS = [0, 1, 15, 16, 17, 100, 511, 512, 513, 700, 1025, 1100]
GREEDY = _core.Sampling()
SAMPLINGS = [GREEDY, _core.Sampling(0.8, seed=3), _core.Sampling(1.0, top_k=20, top_p=0.9, seed=5)]

Model = Callable[..., _core.Model]


@pytest.fixture(scope="module")
def model_of(tmp_path_factory: pytest.TempPathFactory) -> Model:
    """A function that loads a family's model, once for each way."""
    folder = tmp_path_factory.mktemp("run")

    @cache
    def make(family: str = "llama", kernel: str = "", threads: int = 2, **options: str) -> _core.Model:
        path = folder / f"{family}.gguf"
        return _core.Model(path if path.exists() else write(path, FAMILIES[family]), kernel, threads, **options)

    return make


@cache
def longest(model: _core.Model) -> _core.Session:
    """A session to fork texts from."""
    session = _core.Session(model)
    prefill(session, PREFIX)
    return session


def logits(session: _core.Session, rows: Sequence[int]) -> npt.NDArray[np.float32]:
    return np.stack([session.logits(row) for row in rows]) if rows else np.empty((0, 300), np.float32)


def assert_goes_on_as(session: _core.Session, tokens: Sequence[int]) -> None:
    """The session holds these tokens, and what comes after them has the bits that a fresh one gives."""
    assert session.tokens.tolist() == list(tokens)
    assert session.num_pending == 0
    other = _core.Session(_MODELS[session])
    prefill(other, tokens)
    for each in (session, other):
        evaluate(each, [42, 9], [-1, 0])
    np.testing.assert_array_equal(logits(session, [0, 1]), logits(other, [0, 1]))
    session.discard()


_MODELS: dict[_core.Session, _core.Model] = {}


def text(model: _core.Model, tokens: Sequence[int] | npt.NDArray[np.int32] = (), n_ctx: int = 0) -> _core.Session:
    session = _core.Session(model, n_ctx)
    prefill(session, tokens)
    _MODELS[session] = model
    return session


@dataclass
class Step:
    """What a text does in a run."""

    kind: str
    tokens: list[int]
    parents: list[int]
    judged: int
    sampling: _core.Sampling
    k: int
    kept: int  # of what was proposed: -1 leaves it pending, 0 discards it, else so many rows of its first path

    def work(self, session: _core.Session) -> Work:
        if self.kind == "read":
            return Work.read(session, self.tokens)
        if self.kind == "verify":
            return Work.verify(session, self.tokens, self.parents, self.sampling, self.k - 1)
        return Work.propose(session, self.tokens, self.parents, self.judged, self.k, self.sampling)

    def alone(self, session: _core.Session) -> tuple[Any, ...] | None:
        """The same in passes of its own."""
        if self.kind == "read":
            prefill(session, self.tokens)
            return None
        if self.kind == "verify":
            evaluate(session, self.tokens, self.parents)
            values = logits(session, range(len(self.tokens)))
            largest = np.argsort(-values, axis=1, kind="stable")[:, : self.k - 1].astype(np.int32)
            path, tokens = session.follow(self.sampling)
            session.commit(path)
            candidates = (largest, np.take_along_axis(values, largest, axis=1)) if self.k > 1 else ()
            return path, tokens, *candidates
        evaluate(session, self.tokens, self.parents, self.judged)
        end = session.num_pending
        return rank(session, range(end - self.judged, end), self.k, self.sampling)

    def tidy(self, session: _core.Session) -> None:
        if self.kind == "propose" and self.kept == 0:
            session.discard()
        elif self.kind == "propose" and self.kept > 0:
            session.commit([0])


@st.composite
def steps(draw: st.DrawFn, *, pending: bool) -> Step:
    kind = "propose" if pending else draw(st.sampled_from(["read", "verify", "propose"]))
    n = draw(st.integers(0 if kind == "read" else 1, 300 if kind == "read" else 20))
    parents = [-1] * min(n, 1)
    for i in range(1, n):
        parents.append(draw(st.just(i - 1) | st.integers(0, i - 1)) if kind != "read" else i - 1)
    tokens = np.random.default_rng(draw(st.integers(0, 9))).integers(0, 257, n).tolist()
    judged = draw(st.integers(0, n)) if kind == "propose" else n
    rest = draw(st.tuples(st.sampled_from(SAMPLINGS), st.integers(1, 5), st.integers(-1, 1)))
    return Step(kind, tokens, parents, judged, *rest)


@st.composite
def schedules(draw: st.DrawFn) -> list[tuple[int, list[Step]]]:
    """Of each text how long it is at first, and what it does in each run."""
    rounds = draw(st.integers(1, 3))
    texts = []
    for _ in range(draw(st.integers(1, 6))):
        own: list[Step] = []
        for _ in range(rounds):
            own.append(draw(steps(pending=bool(own) and own[-1].kind == "propose" and own[-1].kept == -1)))
        texts.append((draw(st.sampled_from(LENGTHS[:-2])), own))
    return texts


@pytest.mark.slow
@pytest.mark.parametrize("kv", ["f16", "q8_0"])
@pytest.mark.parametrize("family", FAMILIES)
@given(schedule=schedules())
@settings(max_examples=5)
def test_crowded_is_alone(model_of: Model, family: str, kv: str, schedule: list[tuple[int, list[Step]]]) -> None:
    plain = longest(model_of(family, "scalar", 1, kv=kv))
    alone = [plain.fork(length) for length, _ in schedule]
    expected = []
    for i in range(len(schedule[0][1])):
        both = [(session, own[i]) for session, (_, own) in zip(alone, schedule, strict=True)]
        expected.append([(step.alone(session), logits_judged(step, session)) for session, step in both])
        for session, step in both:
            step.tidy(session)
    for kernel, threads in [("scalar", 2), *((KERNELS[0], threads) for threads in (1, 2, 3))]:
        crowd = [longest(model_of(family, kernel, threads, kv=kv)).fork(length) for length, _ in schedule]
        for i, wanted in enumerate(expected):
            works = [own[i].work(session) for session, (_, own) in zip(crowd, schedule, strict=True)]
            assert [work.num_rows for work in works] == [len(own[i].tokens) for _, own in schedule]
            found = _core.run(works)
            for session, (_, own), result, (same, values) in zip(crowd, schedule, found, wanted, strict=True):
                assert (result is None) == (same is None)
                for a, b in zip(result or (), same or (), strict=True):
                    assert (a.dtype, a.shape) == (b.dtype, b.shape)
                    np.testing.assert_array_equal(a, b)
                np.testing.assert_array_equal(logits_judged(own[i], session), values)
                own[i].tidy(session)
        for session, other in zip(crowd, alone, strict=True):
            np.testing.assert_array_equal(session.tokens, other.tokens)
            assert session.num_pending == other.num_pending


def logits_judged(step: Step, session: _core.Session) -> npt.NDArray[np.float32]:
    """Of the rows that a step left pending with logits."""
    end = session.num_pending
    return logits(session, range(end - step.judged, end) if step.kind == "propose" else [])


@pytest.mark.parametrize("family", FAMILIES)
def test_more_rows_than_a_pass_takes(model_of: Model, family: str) -> None:
    model = model_of(family)
    generator = np.random.default_rng(2)
    trees = [
        (generator.integers(0, 257, n), [-1, *(int(generator.integers(0, i)) for i in range(1, n))])
        for n in (90, 120, 1)
    ]
    crowd, alone = ([text(model, PREFIX[:100]) for _ in range(5)] for _ in range(2))
    works = [Work.read(crowd[0], PREFIX[100:700]), Work.propose(crowd[1], *trees[0], 40, 3, SAMPLINGS[1])]
    works += [Work.verify(crowd[2], *trees[1], GREEDY), Work.read(crowd[3], PREFIX[100:102])]
    works += [Work.verify(crowd[4], *trees[2], SAMPLINGS[2])]
    found = _core.run(works)
    prefill(alone[0], PREFIX[100:700])
    prefill(alone[3], PREFIX[100:102])
    evaluate(alone[1], *trees[0], 40)
    expected = [
        None,
        rank(alone[1], range(50, 90), 3, SAMPLINGS[1]),
        verify(alone[2], *trees[1], GREEDY),
        None,
        verify(alone[4], *trees[2], SAMPLINGS[2]),
    ]
    for result, wanted in zip(found, expected, strict=True):
        for a, b in zip(result or (), wanted or (), strict=True):
            np.testing.assert_array_equal(a, b)
    crowd[1].discard()
    for session in crowd:
        assert_goes_on_as(session, session.tokens.tolist())


def test_a_work_keeps_its_session(model_of: Model) -> None:
    works = [Work.verify(text(model_of(), [1, 2]), [3], [-1], GREEDY) for _ in range(2)]
    _MODELS.clear()
    gc.collect()
    assert works[0].session.tokens.tolist() == [1, 2]
    assert len(_core.run(works)) == 2
    assert works[1].session.tokens.tolist() == [1, 2, 3]


@pytest.mark.parametrize("kind", ["read", "embed", "verify", "propose", "rank"])
def test_a_work_of_wrong_arguments_is_an_error(model_of: Model, kind: str) -> None:
    make, session = getattr(Work, kind), text(model_of())
    for arguments in [
        (),
        (session,),
        (session, [1], 5),
        (session, [1], [-1], "none"),
        (session,) * 3,
        (session, *"12345678"),
    ]:
        with pytest.raises(TypeError):
            make(*arguments)
    for none in (None, 1, "text", make):
        with pytest.raises(TypeError):
            make(none, [1])


FAILURES: dict[str, tuple[Callable[[_core.Session], Work], type[Exception], str]] = {
    "token": (lambda s: Work.read(s, [1, 300]), ValueError, "token 300"),
    "tokens-verified": (lambda s: Work.verify(s, [-1], [-1], GREEDY), ValueError, "token -1"),
    "parent": (lambda s: Work.verify(s, [1, 2], [-1, 1], GREEDY), ValueError, "row 1 has parent 1"),
    "no-rows": (lambda s: Work.propose(s, [], [], 0, 1, GREEDY), ValueError, "at least one token"),
    "full": (lambda s: Work.read(s, [1] * 20), ContextFullError, "16 tokens"),
    "full-tree": (lambda s: Work.verify(s, [1] * 600, [-1] * 600, GREEDY), ContextFullError, "more rows than"),
    "judged": (lambda s: Work.propose(s, [1], [-1], 2, 1, GREEDY), ValueError, "num_judged"),
    "samplings": (lambda s: Work.propose(s, [1], [-1], 1, 1, [GREEDY] * 2), ValueError, "one for each judged row"),
    "closed": (lambda s: (s.close(), Work.read(s, [1]))[1], ValueError, "closed"),
    "pending": (lambda s: (evaluate(s, [1], [-1]), Work.verify(s, [1], [-1], GREEDY))[1], ValueError, "pending rows"),
    "not-finite": (lambda s: Work.verify(s, [7], [-1], GREEDY), _core.ModelError, "not finite"),
}


@pytest.mark.parametrize("name", FAILURES)
def test_what_fails_leaves_every_text_as_it_was(tmp_path: Path, name: str) -> None:
    def spoil(tensors: dict[str, npt.NDArray[np.float32]]) -> None:
        tensors["token_embd.weight"][7] = 3e38  # whose mean is infinite

    path = write(tmp_path / "model.gguf", RandomModel("gpt2", kv_heads=4, tie=False), spoil)
    model = _core.Model(path, num_threads=2)
    proposed, read, verified, bad = (text(model, PREFIX[8 : 12 + i], 0 if i < 3 else 16) for i in range(4))
    evaluate(proposed, [5, 6], [-1, 0])
    before = logits(proposed, [0, 1])
    make, kind, message = FAILURES[name]
    works = [
        Work.propose(proposed, [8, 9], [1, 2], 1, 3, GREEDY),
        Work.read(read, np.tile(PREFIX[20:100], 5)),
        Work.verify(verified, [4, 5], [-1, 0], GREEDY),
        make(bad),
    ]
    rows = 0 if bad.closed else bad.num_pending
    for order in (works, works[::-1]):
        with pytest.raises(kind, match=message):
            _core.run(order)
        assert (proposed.num_pending, bad.num_pending) == (2, rows)
        np.testing.assert_array_equal(logits(proposed, [0, 1]), before)
    evaluate(proposed, [8], [1])
    proposed.commit([0, 1, 2])
    assert_goes_on_as(proposed, [*PREFIX[8:12].tolist(), 5, 6, 8])
    assert_goes_on_as(read, PREFIX[8:13].tolist())
    assert_goes_on_as(verified, PREFIX[8:14].tolist())
    if not bad.closed:
        bad.discard()
        assert bad.tokens.tolist() == PREFIX[8:15].tolist()


def overflow(what: str) -> Callable[[dict[str, npt.NDArray[np.float32]]], None]:
    """Makes keys or values of token 7 overflow in F16."""

    def spoil(tensors: dict[str, npt.NDArray[np.float32]]) -> None:
        embedding = tensors["token_embd.weight"]
        embedding[:, 0], embedding[7] = 0, np.eye(embedding.shape[1])[0]
        tensors[f"blk.0.{what}.weight"][:, 0] = 1e6

    return spoil


@pytest.mark.parametrize("what", ["attn_k", "attn_v"])
@pytest.mark.parametrize("kernel", KERNELS)
def test_a_rejected_guess_that_is_not_finite_ends_no_text(tmp_path: Path, what: str, kernel: str) -> None:
    model = _core.Model(write(tmp_path / "model.gguf", RandomModel("llama", tie=False), overflow(what)), kernel)
    plain, staged = text(model, [1, 2, 3]), text(model, [1, 2, 3])
    expected = [5]
    for _ in range(40):
        expected += verify(plain, expected[-1:], [-1], SAMPLINGS[1])[1].tolist()
    assert 7 not in expected
    for i in range(0, 40, 2):
        tree, parents = [expected[i], 7, expected[i + 1], 7], [-1, 0, 0, 2]
        path, tokens, largest, _ = verify(staged, tree, parents, SAMPLINGS[1], 3)
        assert (path.tolist(), tokens.tolist()) == ([0, 2], expected[i + 1 : i + 3])
        assert [(row >= 0).all() for row in largest] == [True, False, True, False]
    # What plain decoding cannot go on with ends the staged text, too, and no sooner.
    only_seven = np.array([[1 << 7], [0xFFFFFFFF]], np.uint32)
    path, tokens = verify(staged, [expected[-1], 7], [-1, 0], GREEDY, 0, only_seven)
    verify(plain, expected[-1:], [-1], GREEDY, 0, only_seven[:1])
    assert (path.tolist(), tokens.tolist()) == ([0], [7])
    for session in (plain, staged):
        with pytest.raises(_core.ModelError, match="not finite"):
            verify(session, [7], [-1], GREEDY)
    assert staged.tokens.tolist() == plain.tokens.tolist()


def test_works_that_do_not_go_together(model_of: Model) -> None:
    one, two = text(model_of(), [1]), text(model_of("gpt2"), [1])
    with pytest.raises(ValueError, match="works 0 and 2 are of one session"):
        _core.run([Work.read(one, [1]), Work.read(text(model_of(), [1]), [1]), Work.read(one, [1])])
    with pytest.raises(ValueError, match="works 0 and 1 are of different models"):
        _core.run([Work.read(one, [1]), Work.read(two, [1])])
    for wrong in ([None], [one], 3):
        with pytest.raises(TypeError):
            _core.run(wrong)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="k must be"):
        Work.propose(one, [1], [-1], 1, 301, GREEDY)
    with pytest.raises(TypeError, match="tokens"):
        Work.read(one, [1.0])  # type: ignore[list-item]
    assert one.tokens.tolist() == two.tokens.tolist() == [1]


@pytest.mark.parametrize("kv", ["f16", "q8_0"])
def test_forks(model_of: Model, kv: str) -> None:
    model = model_of(kv=kv)
    source = longest(model)
    evaluate(source, [1, 2, 3], [-1, 0, 0])
    lengths = [*range(35), *range(495, 530), *LENGTHS]
    forks = [source.fork(length) for length in lengths]
    assert source.num_pending == 3
    source.discard()
    # Neither the source nor other forks are touched by what a fork does.
    for fork, length in zip(forks, lengths, strict=True):
        assert (fork.n_ctx, fork.num_pending, len(fork.tokens)) == (source.n_ctx, 0, length)
        verify(fork, [length % 257, 9], [-1, 0], GREEDY)
    again = _core.Session(model)
    for fork, length in zip(forks, lengths, strict=True):
        again.rewind(0)
        prefill(again, PREFIX[:length])
        verify(again, [length % 257, 9], [-1, 0], GREEDY)
        grandchild = fork.fork(len(fork.tokens))
        fork.close()
        for each in (grandchild, again):
            evaluate(each, [42], [-1])
        np.testing.assert_array_equal(grandchild.tokens, again.tokens)
        np.testing.assert_array_equal(grandchild.logits(0), again.logits(0))
    np.testing.assert_array_equal(source.tokens, PREFIX)
    for length in (-1, len(PREFIX) + 1):
        with pytest.raises(ValueError, match=f"cannot fork after {length} tokens of {len(PREFIX)}"):
            source.fork(length)
    again.close()
    with pytest.raises(ValueError, match="closed"):
        again.fork(0)


def test_a_fork_keeps_the_rope_factors_of_its_context(tmp_path: Path) -> None:
    """Sessions of one model may have others: long and short contexts share a pass."""
    model = _core.Model(write(tmp_path / "model.gguf", CASES["phi3-long"]))
    crowd = [text(model, PREFIX[:30], n_ctx) for n_ctx in (64, 512)]
    crowd += [session.fork(20) for session in crowd]
    alone = [text(model, PREFIX[:30], n_ctx) for n_ctx in (64, 512)]
    alone += [text(model, PREFIX[:20], n_ctx) for n_ctx in (64, 512)]
    _core.run([Work.propose(session, [5, 6], [-1, 0], 2, 1, GREEDY) for session in crowd])
    for session, other in zip(crowd, alone, strict=True):
        evaluate(other, [5, 6], [-1, 0])
        np.testing.assert_array_equal(logits(session, [0, 1]), logits(other, [0, 1]))
    assert not np.array_equal(crowd[0].logits(1), crowd[1].logits(1))


def test_texts_of_llama_cpp_share_a_pass(model_of: Model) -> None:
    """Their logits are those of each alone, but for the rounding of ggml's attention."""
    model = model_of(threads=1, device="ggml-cpu")
    tree = ([5, 6, 7, 6], [-1, 0, 0, 1])
    source = text(model, PREFIX[:40])
    evaluate(source, [1, 2, 3, 4], [-1, 0, 0, 2])
    source.commit([0, 2, 3])
    crowd, alone = ([source.fork(length) for length in (43, 42, 10, 0)] for _ in range(2))
    works = [Work.propose(session, *tree, 3, 2, GREEDY) for session in crowd[:2]]
    _core.run([*works, Work.read(crowd[2], PREFIX[:100]), Work.propose(crowd[3], *tree, 4, 2, GREEDY)])
    for session in (*alone[:2], alone[3]):
        evaluate(session, *tree)
    prefill(alone[2], PREFIX[:100])
    for mine, other, rows in zip(crowd, alone, ([1, 2, 3], [1, 2, 3], [], [0, 1, 2, 3]), strict=True):
        for row in rows:
            np.testing.assert_allclose(mine.logits(row), other.logits(row), atol=0.1)
        mine.discard()
        other.discard()
        assert mine.tokens.tolist() == other.tokens.tolist()
        for session in (mine, other):
            evaluate(session, [9], [-1])
        np.testing.assert_allclose(mine.logits(0), other.logits(0), atol=0.1)
        mine.discard()
    with pytest.raises(ValueError, match="token 300"):
        _core.run([Work.read(crowd[2], [1]), Work.read(crowd[3], [300])])
    for mine, other in zip(crowd[2:], alone[2:], strict=True):
        assert mine.tokens.tolist() == other.tokens.tolist()
        evaluate(mine, [9], [-1])
        np.testing.assert_allclose(mine.logits(0), other.logits(0), atol=0.1)


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere only what is resident is known")
def test_a_large_pass_gives_its_memory_back_when_smaller_ones_follow(tmp_path: Path) -> None:
    shape = RandomModel("llama", vocab_size=60_000, vocabulary=lambda *_: None)
    model = _core.Model(write(tmp_path / "model.gguf", shape))
    session, kept = _core.Session(model), []
    for rows, passes in ((1, 1), (200, 1), (1, 1), (1, 199)):
        for _ in range(passes):
            session.rewind(0)
            verify(session, [5] * rows, list(range(-1, rows - 1)), _core.Sampling())
        kept.append(used())
    logits = 200 * 60_000 * 4
    assert kept[1] - kept[0] > 0.9 * logits
    assert kept[2] - kept[0] > 0.9 * logits  # the next large one may come soon
    assert kept[-1] - kept[0] < 0.3 * logits


@pytest.mark.skipif(sys.platform != "linux", reason="/proc is Linux's")
def test_a_text_that_is_cut_gives_its_memory_back(tmp_path: Path) -> None:
    path = write(tmp_path / "model.gguf", RandomModel("llama", width=256, heads=4, kv_heads=4, layers=8, context=8192))

    for kv in ("f16", "q8_0"):
        model = _core.Model(path, kv=kv)
        session = text(model, PREFIX[:50])
        assert session.cell_bytes == model.cell_bytes > 4000
        before = resident()
        session.stretch(8000)
        peak = resident()
        fork = session.fork(4000)
        grown = resident()
        fork.close()
        session.rewind(40)
        after = resident()
        assert peak - before > 0.9 * 7900 * session.cell_bytes
        assert grown - peak > 0.9 * 4000 * session.cell_bytes
        assert after - before < 0.1 * (peak - before)
        prefill(session, PREFIX[40:90])
        assert_goes_on_as(session, PREFIX[:90].tolist())


@pytest.mark.parametrize("threads", [1, 2])
def test_runs_and_calls_of_several_threads(model_of: Model, threads: int) -> None:
    model = model_of(threads=threads)
    shared = [text(model, PREFIX[:20]) for _ in range(5)]
    refused = set()

    def hammer(seed: int) -> None:
        generator = np.random.default_rng(seed)
        for step in range(60):
            chosen = [shared[i] for i in generator.permutation(5)[: generator.integers(1, 5)]]
            try:
                if step % 3 == 0:
                    verify(chosen[0], [seed, step], [-1, 0], GREEDY)
                elif step % 3 == 1:
                    evaluate(chosen[0], [1, 2], [-1, 0])
                    chosen[0].discard()
                else:
                    _core.run([Work.verify(s, [seed, step], [-1, 0], SAMPLINGS[1]) for s in chosen])
            except ValueError as error:
                refused.add(str(error).split(" needs ")[-1])
                shared[step % 5].discard()

    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(hammer, range(4))) == [None] * 4
    assert refused <= {"a session without pending rows; commit or discard them first"}
    for session in shared:
        session.discard()
        assert len(session.tokens) > 20
        assert_goes_on_as(session, session.tokens.tolist())


def test_closing_during_a_run(model_of: Model) -> None:
    model, started = model_of(), threading.Event()
    for _ in range(20):
        stays, goes = text(model, PREFIX[:20]), text(model, PREFIX[:20])

        def work(stays: _core.Session = stays, goes: _core.Session = goes) -> None:
            while True:
                started.set()
                _core.run([Work.read(stays, [5, 6]), Work.verify(goes, [5], [-1], GREEDY)])
                stays.rewind(20)
                goes.rewind(20)

        with ThreadPoolExecutor(1) as pool:
            started.clear()
            running = pool.submit(work)
            started.wait()
            goes.close()
            with pytest.raises(ValueError, match="closed"):
                running.result(600)
        assert_goes_on_as(stays, PREFIX[:20].tolist())


HANDLED = """
import signal, sys
from pystaged import _core

model = _core.Model(sys.argv[1])
# A pass looks for signals each 50 ms: the texts are many, so that a run takes longer on any machine.
texts, other, refused = [_core.Session(model) for _ in range(24)], _core.Session(model), []

def handle(*_):
    try:
        _core.run([_core.Work.propose(other, [1], [-1], 1, 0, _core.Sampling())])
        other.discard()
    except RuntimeError as error:
        refused.append(str(error))
    signal.setitimer(signal.ITIMER_REAL, 1e-3)

signal.signal(signal.SIGALRM, handle)
signal.setitimer(signal.ITIMER_REAL, 1e-3)
for _ in range(100):
    for text in texts:
        text.rewind(0)
    _core.run([_core.Work.read(text, [5] * 1000) for text in texts])
    if len(refused) > 3:
        break
signal.setitimer(signal.ITIMER_REAL, 0)
assert all("the model is in a pass" in message for message in refused)
assert all(text.tokens.tolist() == [5] * 1000 for text in texts)
print("handled", len(refused) > 3)
"""


@pytest.mark.slow
def test_signal_handler_that_uses_another_session_of_the_model(bundled_target: Path) -> None:
    done = run_python(HANDLED, bundled_target)
    assert (done.stdout, done.stderr) == ("handled True\n", "")
