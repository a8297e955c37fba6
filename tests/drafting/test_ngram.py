"""The n-gram drafters against slow, obviously correct twins."""

from __future__ import annotations

import io
import os
import resource
import subprocess
import sys
import zipfile
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from itertools import chain, islice, product
from pathlib import Path

import numpy as np
import pytest
from fuzz.tables import zipped
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from support.chat import CHATML, write_chat
from support.commands import assert_refused, environment, here, run
from support.decoding import drafted
from support.paths import smollm2

import pystaged
from pystaged._core import Tokenizer
from pystaged.decoding.cost import PassCost
from pystaged.decoding.policy import GainPolicy
from pystaged.distill.samples import sampled_texts
from pystaged.drafting.calibration import CONTEXT
from pystaged.drafting.drafter import TreeDrafter
from pystaged.drafting.katz import estimate
from pystaged.drafting.lookups import ContextProposer, lookups
from pystaged.drafting.table import NgramTable
from pystaged.loading import names
from pystaged.loading.tables import find_table, table_path
from pystaged.options.config import SamplingConfig

VOCAB_SIZE = 6
SIX, SEVEN = "6-0123456789abcdef", "7-0123456789abcdef"  # as vocabularies are named
ROUNDING = 3 / 32 + 1e-6  # one log-probability and two backoffs, each rounded to 1/16


class SlowKatz:
    """A Katz trigram from dictionaries, one context at a time."""

    def __init__(self, documents: list[list[int]], min_count: int) -> None:
        self.min_count = min_count
        self.counts = {
            order: Counter(
                tuple(document[i : i + order]) for document in documents for i in range(len(document) - order + 1)
            )
            for order in (1, 2, 3)
        }

    def distribution(self, context: tuple[int, ...]) -> list[float]:
        """P(. | context) over the whole vocabulary."""
        lower = self.distribution(context[1:]) if context else [1 / VOCAB_SIZE] * VOCAB_SIZE
        counts = self.counts[len(context) + 1]
        followers = {gram[-1]: count for gram, count in counts.items() if gram[:-1] == context}
        total = sum(followers.values())
        least = self.min_count if len(context) == 2 else 1
        kept = {word: count - 0.5 for word, count in followers.items() if count >= least}
        if not kept:
            return lower
        if len(kept) == VOCAB_SIZE:
            return [kept[word] / sum(kept.values()) for word in range(VOCAB_SIZE)]
        freed = 1 - sum(kept.values()) / total
        unseen = sum(p for word, p in enumerate(lower) if word not in kept)
        return [kept[word] / total if word in kept else freed * p / unseen for word, p in enumerate(lower)]


def every_context() -> Iterator[tuple[int, ...]]:
    for length in range(3):
        yield from product(range(VOCAB_SIZE), repeat=length)


def as_arrays(documents: list[list[int]]) -> list[NDArray[np.integer]]:
    return [np.array(document, np.uint16) for document in documents]


def build(documents: list[list[int]], max_successors: int = 16, min_count: int = 2) -> NgramTable:
    return NgramTable.build(
        as_arrays(documents), vocab_size=VOCAB_SIZE, vocab_hash=SIX, max_successors=max_successors, min_count=min_count
    )


# Skewed, so that some pairs are frequent and some tokens never occur.
token_ids = st.sampled_from([0, 0, 0, 0, 1, 1, 2, 3, 4, 5])
texts = st.lists(st.lists(token_ids, max_size=60), min_size=1, max_size=4).filter(any)


@settings(max_examples=100)
@given(texts, st.integers(1, 3), st.integers(1, 8))
def test_heads_and_backoffs_are_exact(documents: list[list[int]], min_count: int, max_successors: int) -> None:
    slow = SlowKatz(documents, min_count)
    katz = estimate(as_arrays(documents), vocab_size=VOCAB_SIZE, max_successors=max_successors, min_count=min_count)
    ends = np.cumsum(katz.lengths)
    for row, end in enumerate(ends):
        codes = divmod(katz.contexts[row], VOCAB_SIZE + 1)
        context = tuple(int(code) - 1 for code in codes if code)
        expected = slow.distribution(context)
        assert sum(expected) == pytest.approx(1, abs=1e-12)
        head = katz.tokens[end - katz.lengths[row] : end].tolist()
        assert katz.probabilities[end - katz.lengths[row] : end] == pytest.approx([expected[word] for word in head])
        if context and len(head) < min(max_successors, VOCAB_SIZE):
            shorter = slow.distribution(context[1:])
            rest = [word for word in range(VOCAB_SIZE) if word not in head]
            backed = [katz.backoffs[row] * shorter[word] for word in rest]
            assert backed == pytest.approx([expected[word] for word in rest])


@pytest.mark.slow
@settings(max_examples=100)
@given(texts, st.integers(1, 3), st.integers(1, 8), st.data())
def test_lookups_find_the_likeliest_that_are_kept(
    documents: list[list[int]], min_count: int, max_successors: int, data: st.DataObject
) -> None:
    table = build(documents, max_successors, min_count)
    k = data.draw(st.integers(1, max_successors))
    katz = estimate(as_arrays(documents), vocab_size=VOCAB_SIZE, max_successors=max_successors, min_count=min_count)
    words = np.split(np.arange(len(katz.tokens)), np.cumsum(katz.lengths)[:-1])
    rows = {
        tuple(int(code) - 1 for code in divmod(context, VOCAB_SIZE + 1) if code): row
        for row, context in enumerate(katz.contexts)
    }
    for context in every_context():
        kept, share = dict[int, float](), 1.0
        for shorter in (context, context[1:], ())[: 1 + len(context)]:
            if (row := rows.get(shorter)) is not None:
                kept = {int(katz.tokens[i]): min(1.0, share * float(katz.probabilities[i])) for i in words[row]} | kept
                share *= float(katz.backoffs[row])
        found = table.after(context, k)
        assert len(found) == min(k, len(kept))
        assert [*found.values()] == sorted(found.values(), reverse=True)
        chosen = np.log([kept[token] for token in found])
        assert np.log([*found.values()]) == pytest.approx(chosen, abs=ROUNDING)
        assert chosen == pytest.approx(np.log(sorted(kept.values(), reverse=True)[:k]), abs=ROUNDING)


def test_ties_go_to_the_lowest_id() -> None:
    table = build([[0, 4], [0, 2], [0, 1], [0, 5], [0, 3], [0, 3]])
    assert [*table.after([0], 6)] == [0, 3, 1, 2, 4, 5]


def test_nobody_can_write_into_a_table() -> None:
    with pytest.raises(ValueError, match="read-only"):
        build([[0, 1, 2] * 5]).tokens[0] = 3


@pytest.mark.parametrize("context", [[VOCAB_SIZE], [-1], [0, VOCAB_SIZE], [-1, 0]])
def test_nothing_is_known_after_foreign_tokens(context: list[int]) -> None:
    assert build([[0, 1]]).after(context, 1) == {}


@pytest.mark.parametrize(
    ("documents", "options", "problem"),
    [
        ([], {}, "no text"),
        ([np.zeros(0, np.int32)], {}, "no text"),
        ([np.array([0, 6])], {}, "outside the vocabulary of 6"),
        ([np.array([-1, 0])], {}, "outside the vocabulary of 6"),
        ([np.array([0])], {"vocab_size": 0}, "vocab_size"),
        ([np.array([0])], {"vocab_size": 2**21}, "vocab_size"),
    ],
)
def test_build_refuses(documents: list[NDArray[np.integer]], options: dict[str, int], problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        NgramTable.build(documents, vocab_hash=SIX, **({"vocab_size": VOCAB_SIZE} | options))


def assert_same(first: NgramTable, second: NgramTable) -> None:
    for name in NgramTable.__slots__:
        one, other = getattr(first, name), getattr(second, name)
        assert np.array_equal(one, other)
        assert np.asarray(one).dtype == np.asarray(other).dtype


@pytest.mark.parametrize(("vocab_size", "length"), [(1, 1), (1, 400), (3, 2), (300, 400), (2**21 - 1, 2)])
def test_saved_tables_load_as_they_were(tmp_path: Path, vocab_size: int, length: int) -> None:
    text = (np.random.default_rng(7).random(length) ** 4 * vocab_size).astype(np.int64)
    table = NgramTable.build([text], vocab_size=vocab_size, vocab_hash=SIX, max_successors=5)
    table.save(tmp_path / "table")
    loaded = NgramTable.load(tmp_path / "table", vocab_hash=SIX)
    assert_same(table, loaded)
    assert [path.name for path in tmp_path.iterdir()] == ["table"]
    assert loaded.after(text[-2:].tolist(), 5) == table.after(text[-2:].tolist(), 5)


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    build([[0, 1, 2, 0, 1, 3, 5] * 4, [4, 1, 0]]).save(tmp_path / "table.ngram")
    return tmp_path / "table.ngram"


def test_truncated_files_are_refused(saved: Path) -> None:
    content = saved.read_bytes()
    for length in range(0, len(content), 41):
        saved.write_bytes(content[:length])
        with pytest.raises(ValueError, match=r"table\.ngram: not an n-gram table, or a damaged one; build"):
            NgramTable.load(saved)


def npy(array: NDArray[np.generic]) -> bytes:
    buffer = io.BytesIO()
    np.save(buffer, array, allow_pickle=True)
    return buffer.getvalue()


Arrays = dict[str, NDArray[np.generic]]
FOREIGN = [b"", b"GGUF", b"\x80\x04N.", npy(np.arange(3)), npy(np.array([None])), zipped({"sizes": b"1234"})]


@pytest.mark.parametrize("content", FOREIGN, ids=range(6))
def test_foreign_files_are_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "foreign").write_bytes(content)
    with pytest.raises(ValueError, match="foreign: not an n-gram table, or a damaged one; build"):
        NgramTable.load(tmp_path / "foreign")


def changed(name: str, index: int, value: int) -> Callable[[Arrays], object]:
    return lambda arrays: arrays[name].__setitem__(index, value)


@pytest.mark.parametrize(
    ("spoil", "problem"),
    [
        (changed("sizes", 0, 2), "format version 2, but this pystaged reads 1"),
        *((changed("sizes", 1, size), "out of range") for size in (0, 5, 1 << 40)),
        (changed("sizes", 3, 256), "out of range"),
        (changed("tokens", 3, 6), "out of range"),
        (changed("lengths", 0, 1), "out of range"),
        (changed("newer", -1, 7), "out of range"),
        (changed("newer", 2, 1), "not in order"),
        *((lambda arrays, name=name: arrays.pop(name), "or a damaged one") for name in ("sizes", "tokens")),
        *(
            (lambda arrays, name=name: arrays.update({name: arrays[name][:-1]}), "out of range")
            for name in ("older", "log_backoffs", "tokens", "logprobs")
        ),
        (lambda arrays: arrays.update(lengths=arrays["lengths"][None]), "out of range"),
        (lambda arrays: arrays.update(tokens=arrays["tokens"].astype(float)), "or a damaged one"),
    ],
)
def test_spoilt_arrays_are_refused(saved: Path, spoil: Callable[[Arrays], object], problem: str) -> None:
    with np.load(saved) as file:
        arrays = dict(file)
    spoil(arrays)
    with saved.open("wb") as file:
        np.savez_compressed(file, **arrays)
    with pytest.raises(ValueError, match=rf"table\.ngram: .*{problem}.*; build"):
        NgramTable.load(saved)


@pytest.mark.parametrize(
    ("items", "zeros", "packing"),
    [
        (2**31, 1 << 10, zipfile.ZIP_DEFLATED),
        (2**62, 1 << 10, zipfile.ZIP_DEFLATED),
        (2**26, 1 << 26, zipfile.ZIP_DEFLATED),
        (2**10, 1 << 26, zipfile.ZIP_BZIP2),
        (2**10, 1 << 26, zipfile.ZIP_LZMA),
    ],
)
def test_a_small_file_that_would_unpack_to_a_large_one_is_not_unpacked(
    tmp_path: Path, items: int, zeros: int, packing: int
) -> None:
    path, header = tmp_path / "bomb", io.BytesIO()
    np.lib.format.write_array_header_1_0(header, {"descr": "|u1", "fortran_order": False, "shape": (items,)})
    sizes = npy(np.array([1, 300, 10, 16]))
    path.write_bytes(zipped({"sizes.npy": sizes, "older.npy": header.getvalue() + bytes(zeros)}, packing))
    used = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(ValueError, match="bomb: not an n-gram table, or a damaged one; build"):
        NgramTable.load(path)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss < used + 20_000


@pytest.mark.parametrize("target", ["pipe", "/dev/zero"])
def test_what_is_no_file_is_not_read(tmp_path: Path, target: str) -> None:
    path = tmp_path / "table"
    os.mkfifo(tmp_path / "pipe")
    path.symlink_to(target)
    with pytest.raises(ValueError, match="table is no regular file; build"):
        NgramTable.load(path)


# ---- Which table belongs to a draft ----


@pytest.fixture
def draft(tmp_path: Path, random_gguf: Callable[..., Path]) -> Path:
    """A draft in a folder of its own."""
    path = tmp_path / "small.Q8_0.gguf"
    path.symlink_to(random_gguf("F32"))
    return path


def found_for(draft: Path, named: Path | str | None = None) -> NgramTable:
    """The table that is found for a draft."""
    found = find_table(draft, named, Tokenizer(os.fsencode(draft)), pytest.fail)
    assert found is not None
    return found


def table_for(vocab_hash: str, path: Path, num_tokens: int) -> None:
    """A table that is known by the size of its text."""
    text = np.zeros(num_tokens, np.int32)
    NgramTable.build([text], vocab_size=300, vocab_hash=vocab_hash).save(path)


def test_tables_are_looked_for_beside_the_draft(draft: Path) -> None:
    tokenizer = Tokenizer(os.fsencode(draft))
    report: list[str] = []
    assert find_table(draft, None, tokenizer, report.append) is None
    assert find_table(None, None, tokenizer) is None
    for name, size in (("draft.ngram.npz", 30), ("small.Q8_0.ngram.npz", 40)):
        table_for(tokenizer.fingerprint, draft.with_name(name), size)
        assert found_for(draft).num_tokens == size
    assert report == []
    assert find_table(None, None, tokenizer) is None


def test_tables_beside_the_draft_that_are_of_no_use(draft: Path) -> None:
    tokenizer = Tokenizer(os.fsencode(draft))
    table_for(SEVEN, draft.with_name("small.Q8_0.ngram.npz"), 30)
    draft.with_name("draft.ngram.npz").write_bytes(b"no table")
    report: list[str] = []
    assert find_table(draft, None, tokenizer, report.append) is None
    other, damaged = report
    assert other.startswith(f"passed over: {draft.with_name('small.Q8_0.ngram.npz')}: this n-gram table is for")
    assert f"vocabulary {SEVEN!r}" in other
    assert damaged.startswith(f"passed over: {draft.with_name('draft.ngram.npz')}: not an n-gram table")


def test_a_table_that_is_named(draft: Path, tmp_path: Path) -> None:
    tokenizer = Tokenizer(os.fsencode(draft))
    table_for(tokenizer.fingerprint, draft.with_name("draft.ngram.npz"), 30)
    table_for(tokenizer.fingerprint, tmp_path / "named", 40)
    for named in (tmp_path / "named", str(tmp_path / "named")):
        assert found_for(draft, named).num_tokens == 40
    table_for(SEVEN, tmp_path / "other", 40)
    words = f"other: .*for vocabulary {SEVEN!r}, the model has {tokenizer.fingerprint!r}; use"
    with pytest.raises(ValueError, match=words):
        find_table(draft, tmp_path / "other", tokenizer)
    with pytest.raises(FileNotFoundError):
        find_table(draft, tmp_path / "nothing", tokenizer)


def test_a_damaged_table_of_the_package_is_told_and_a_foreign_one_is_not(
    draft: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ours = [tmp_path / name for name in ("foreign", "damaged", "absent")]
    table_for(SEVEN, ours[0], 30)
    ours[1].write_bytes(b"no table")
    monkeypatch.setattr(names, "tables", lambda: ours)
    report: list[str] = []
    assert find_table(draft, None, Tokenizer(os.fsencode(draft)), report.append) is None
    assert [line.partition("; ")[0] for line in report] == [
        f"passed over: {tmp_path / 'damaged'}: not an n-gram table, or a damaged one"
    ]


def test_a_model_whose_name_leaves_no_room_for_that_of_a_table_loads(draft: Path) -> None:
    longest = draft.rename(draft.with_name(f"{'x' * 250}.gguf"))
    report: list[str] = []
    with pystaged.load(longest, draft=None, recycle=False, report=report.append) as engine:
        assert engine.generate("a", max_tokens=2).tokens
    assert not any("passed over" in line for line in report)


def test_the_tables_in_the_package_load() -> None:
    for path in names.tables():
        assert NgramTable.load(path).num_tokens > 100_000


def test_smollm2_finds_its_table() -> None:
    assert_same(found_for(smollm2()), NgramTable.load(names.bundled_file("smollm2.ngram.npz")))


def test_the_bundled_table_is_for_its_vocabulary(bundled_draft: Path, draft: Path) -> None:
    tokenizer, found = Tokenizer(os.fsencode(bundled_draft)), found_for(bundled_draft)
    assert found.vocab_hash == tokenizer.fingerprint
    again = find_table(draft, None, tokenizer)
    assert again is not None
    assert_same(found, again)


@pytest.mark.slow
def test_build_writes_where_it_is_found(draft: Path, tmp_path: Path) -> None:
    done = here("ngram", "build", draft, "--tokens", "500")
    assert (done.returncode, done.stdout) == (0, b""), done.stderr
    said = done.stderr.replace(b"\n", b" ")
    assert b"for targets with exactly this vocabulary: when small.Q8_0.gguf drafts, or n-grams" in said
    assert found_for(draft).num_tokens == 500
    assert b"500 of 500 tokens" in done.stderr
    elsewhere = tmp_path / os.fsdecode(b"els\xffwhere.npz")
    done = here("ngram", "build", "--model", draft, "--tokens", "500", "--out", elsewhere)
    assert done.returncode == 0, done.stderr
    assert b"to be found without being named it must lie at" in done.stderr
    assert elsewhere.read_bytes() == table_path(draft).read_bytes()


@pytest.mark.slow
def test_build_replaces_no_better_table(draft: Path, tmp_path: Path) -> None:
    table = table_path(draft)
    for _ in range(2):
        assert here("ngram", "build", "--model", draft, "--tokens", "500").returncode == 0
    counted = table.read_bytes()
    assert_refused(
        here("ngram", "build", "--model", draft, "--tokens", "100"), "name another file with --out, or remove"
    )
    other = tmp_path / "other.npz"
    table_for(SEVEN, other, 50)
    assert_refused(here("ngram", "build", "--model", draft, "--tokens", "100", "--out", other), "is for vocabulary")
    other.write_text("mine")
    assert_refused(here("ngram", "build", "--model", draft, "--tokens", "100", "--out", other), "is no n-gram table")
    assert other.read_text() == "mine"
    done = interrupted(draft, is_early=False, tokens=300)
    assert done.returncode == 130
    assert (table.read_bytes() == counted) == (b"is kept" in done.stderr)
    for name in ("smollm2", "bundled-draft"):
        done = run("ngram", "build", "--model", name, COLUMNS="200")
        assert done.returncode == 2
        assert b"name a file of your own with --out" in done.stderr


@pytest.fixture
def chatting(tmp_path: Path) -> Path:
    marks = ["<|im_start|>", "<|im_end|>"]
    return write_chat(tmp_path / "chats.gguf", CHATML, marks, vocab_size=400, context=512)


def loaded(model: Path) -> pystaged.Engine:
    return pystaged.load(model, draft=None, recycle=False, report=lambda _: None)


@pytest.mark.slow
def test_a_model_that_chats_is_counted_by_its_answers(chatting: Path) -> None:
    """To those of its questions that are new, by sampling and greedily in turn."""
    with loaded(chatting) as engine:
        found, known = sampled_texts(engine, 0.9, 2), {""}
        for seed in range(2 << 32, (2 << 32) + 80, 2):
            options = {"stop_loops": False, "temperature": 0.9}
            asked = engine.generate("<|im_start|>user\n", max_tokens=128, seed=seed, **options).text.strip()
            if asked not in known:
                known.add(asked)
                options["temperature"] *= len(known) % 2
                answer = engine.chat([{"role": "user", "content": asked}], max_tokens=256, seed=seed + 1, **options)
                assert next(found).tolist() == answer.tokens
        assert len(known) > 10


@pytest.mark.slow
def test_a_model_that_repeats_its_questions_is_refused(chatting: Path) -> None:
    with loaded(chatting) as engine, pytest.raises(ValueError, match="repeats its questions; try"):
        assert len(list(sampled_texts(engine, 1e-6))) > 0


@pytest.mark.slow
def test_build_of_a_model_that_chats(chatting: Path) -> None:
    done = here("ngram", "build", "--model", chatting, "--tokens", "500")
    assert done.returncode == 0, done.stderr
    found = found_for(chatting)
    with loaded(chatting) as engine:
        tokens = list(islice(chain.from_iterable(sampled_texts(engine)), 500))
    assert found.num_tokens == 500
    assert {*found.tokens.tolist()} <= {*tokens}


@pytest.mark.parametrize(
    ("option", "value", "status", "message"),
    [
        ("--temperature", "0", 2, "--temperature"),
        ("--seed", "-1", 2, "--seed"),
        ("--out", "/dev/null", 1, "/dev/null is a device or a pipe and is not replaced"),
        ("--out", f"/tmp/{'x' * 240}.npz", 1, "File name too long"),
    ],
)
def test_build_refuses_options_before_it_samples(
    draft: Path, option: str, value: str, status: int, message: str
) -> None:
    done = here("ngram", "build", "--model", draft, "--tokens", "100", option, value)
    assert done.returncode == status
    assert message in done.stderr.decode()
    assert b"sampling" not in done.stderr
    assert not table_path(draft).exists()


def test_a_template_that_writes_nothing_is_no_wrong_usage(tmp_path: Path) -> None:
    path = write_chat(tmp_path / "chats.gguf", "{{ messages[0].content }}")
    assert_refused(here("ngram", "build", "--model", path), "chat template writes nothing before a message")


def interrupted(model: Path, *, is_early: bool, tokens: int = 1_000_000) -> subprocess.CompletedProcess[bytes]:
    """A build that Ctrl-C ends, before its first text or after some."""
    code = f"""
import signal
from itertools import islice
from pystaged.cli import main, ngram
def interrupting(*given):
    yield from islice(sampled_texts(*given), {0 if is_early else 20})
    signal.raise_signal(signal.SIGINT)
    raise AssertionError
sampled_texts, ngram.sampled_texts = ngram.sampled_texts, interrupting
main()
"""
    command = [sys.executable, "-c", code, "ngram", "build", "--model", model, "--tokens", str(tokens)]
    return subprocess.run(command, capture_output=True, check=False, env=environment(), timeout=600)


def test_ctrl_c_counts_what_was_sampled(draft: Path) -> None:
    done = interrupted(draft, is_early=False)
    assert done.returncode == 130, done.stderr
    assert b"stopped early: the table counts the texts until then" in done.stderr
    with loaded(draft) as engine:
        assert found_for(draft).num_tokens == sum(map(len, islice(sampled_texts(engine), 20)))


def test_ctrl_c_before_the_first_text_writes_nothing(draft: Path) -> None:
    done = interrupted(draft, is_early=True)
    assert done.returncode == 130, done.stderr
    assert b"counted" not in done.stderr
    assert list(draft.parent.iterdir()) == [draft]


def test_a_name_that_is_not_utf_8(draft: Path) -> None:
    odd = draft.rename(draft.with_name(os.fsdecode(b"\xff.gguf")))
    assert here("ngram", "build", "--model", odd, "--tokens", "100").returncode == 0
    assert table_path(odd).exists()


def scan(tokens: list[int], tail: list[int]) -> tuple[list[int], int]:
    """Positions that followed the longest suffix of `tail` that was followed by anything: the last 32 of up to four
    tokens, and among those the ones of eight or sixteen."""
    for order in range(min(4, len(tail)), 0, -1):
        found = [i for i in range(order, len(tokens)) if tokens[i - order : i] == tail[-order:]]
        if found:
            found = found[-32:]
            for length in (16, 8) if order == 4 and len(tail) >= 8 else ():
                longer = [i for i in found if length <= min(i, len(tail)) and tokens[i - length : i] == tail[-length:]]
                if longer:
                    return longer, length
            return found, order
    return [], 0


def slow_candidates(tokens: list[int], tail: list[int], k: int) -> tuple[list[int], list[float], int]:
    positions, order = scan(tokens, tail)
    counts = Counter(tokens[i] for i in positions)
    newest = {tokens[i]: i for i in positions}
    best = sorted(counts, key=lambda token: (-counts[token], -newest[token]))[:k]
    return best, [counts[token] / (len(positions) + 1) for token in best], order


few_tokens = st.lists(st.integers(0, 2), max_size=50)


def said(context: ContextProposer, tail: Sequence[int]) -> tuple[dict[int, float], int]:
    """What was found after a tail, and the length of its suffix."""
    found = context.after(list(tail))
    return found.chances, next(order for order, source in CONTEXT.items() if source == found.source)


@settings(max_examples=150)
@given(st.lists(few_tokens, max_size=4), st.lists(st.integers(0, 3), max_size=6))
def test_context_agrees_with_a_scan(parts: list[list[int]], path: list[int]) -> None:
    context = ContextProposer()
    tokens: list[int] = []
    for added in parts:
        context.advance(added)
        context.catch_up()
        tokens = tokens + added
        for tail in (tokens, tokens + path, (tokens + path)[-16:], path):
            for k in (1, 3):
                with pytest.MonkeyPatch.context() as patch:
                    patch.setattr(pystaged.drafting.lookups, "_CANDIDATES", k)
                    found, order = said(context, tail)
                expected, expected_chances, expected_order = slow_candidates(tokens, tail, k)
                assert (list(found), order) == (expected, expected_order)
                assert list(found.values()) == expected_chances


def test_only_recent_occurrences_count() -> None:
    context = ContextProposer()
    context.advance([1, 2] * 5 + [1, 3] * 33)
    context.catch_up()
    assert said(context, [9, 1]) == ({3: 32 / 33}, 1)


def test_a_long_match_goes_on_where_it_was() -> None:
    context = ContextProposer()
    context.advance([*range(20), 50, 1, *range(16, 20), 60, 2, *range(12, 20), 70])
    context.catch_up()
    assert said(context, range(16, 20)) == ({70: 1 / 4, 60: 1 / 4, 50: 1 / 4}, 4)
    assert said(context, [3, *range(12, 20)]) == ({70: 1 / 3, 50: 1 / 3}, 8)
    assert said(context, range(20)) == ({50: 1 / 2}, 16)


def test_an_edit_takes_few_steps() -> None:
    """A text of few different tokens is written again with three changes, as if a target did it."""
    drafter = TreeDrafter(lookups(), GainPolicy(PassCost({1: 1.0, 16: 1.2, 32: 2.4})), VOCAB_SIZE + 1)
    text = np.random.default_rng(0).integers(0, VOCAB_SIZE, 480, dtype=np.int32)
    answer = [*text[:100], 6, *text[100:240], *text[250:380], *[6] * 9, *text[390:]]
    drafter.start(np.array([*text, 6, *answer[:20]], np.int32))
    rest, steps = answer[20:], 0
    while rest:
        tree = drafted(drafter, SamplingConfig(), 64)
        node, accepted = 0, []
        for token in rest:
            accepted.append(int(token))
            found = (tree.parents == node) & (tree.tokens == token)
            if not found.any():
                break
            node = int(found.argmax())
        drafter.advance(accepted)
        rest, steps = rest[len(accepted) :], steps + 1
    assert steps <= 42  # 64 by matches of at most four tokens


def test_documents_are_sampled_side_by_side(draft: Path) -> None:
    with loaded(draft) as engine:
        found = list(islice(sampled_texts(engine, seed=3), 70))
        for i in (0, 17, 69):
            alone = engine.generate(
                engine.tokenizer.end_tokens.tolist(), max_tokens=256, temperature=1.5, seed=(3 << 32) + 2 * i
            )
            assert found[i].tolist() == alone.tokens
