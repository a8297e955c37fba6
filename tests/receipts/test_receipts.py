"""Receipts: the same for the same text however it was made, repeated anywhere, and never trusted."""

from __future__ import annotations

import asyncio
import hashlib
import json
import math
import os
import shutil
import subprocess
import tracemalloc
from collections.abc import Callable, Iterator
from dataclasses import fields, replace
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
from support import paths
from support.commands import assert_refused, here
from support.families import CASES
from support.kernels import EVERY_KERNEL
from support.random_models import split, write
from support.sampling import samplings

import pystaged
from pystaged import Difference, Engine, Receipt
from pystaged.decoding.origin import ARITHMETIC
from pystaged.decoding.policy import FixedPolicy
from pystaged.loading import hub, names
from pystaged.options.config import GenerationConfig, SamplingConfig
from pystaged.platform import seen
from pystaged.receipts import receipt, repeating
from pystaged.receipts.receipt import text_hash, token_hash

PROMPT = "the tree then "
OPTIONS: dict[str, dict[str, Any]] = samplings("receipts")
# What no text depends on.
WITHOUT_EFFECT: dict[str, dict[str, Any]] = {
    "plain": {"speculate": False},
    "anew": {"reuse": False},
    "told": {"logprobs": 2, "progress": lambda *_: None},
    "prompt told": {"prompt_logprobs": 1},
    "expected": {"prediction": "the tree then the tree"},
}


@pytest.fixture(scope="module")
def path(random_gguf: Callable[..., Path]) -> Path:
    return random_gguf(vocab_size=300, context=96)


@pytest.fixture(scope="module")
def engine(path: Path) -> Iterator[Engine]:
    with pystaged.load(path, num_threads=1, recycle=False) as engine:
        yield engine


@pytest.fixture(scope="module")
def sampled(engine: Engine) -> Receipt:
    return engine.generate(PROMPT, max_tokens=40, **OPTIONS["sampled"]).receipt


# ---- The same wherever and however ----


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_it_is_read_as_it_was_written_and_repeats(engine: Engine, path: Path, tmp_path: Path, options: Any) -> None:
    result = engine.generate(PROMPT, max_tokens=40, **options)
    made = result.receipt
    made.save(tmp_path / "it")
    read = Receipt.load(tmp_path / "it")
    assert read == made
    assert read.to_json() == (tmp_path / "it").read_text()
    assert (list(read.tokens), read.text_sha256) == (result.tokens, text_hash(result.text))
    with pystaged.load(path, num_threads=2, n_ctx=made.n_ctx) as other:
        assert pystaged.repeat(other, read) is None
        assert pystaged.repeat(other, read) is None  # with a context that holds all of it
        assert pystaged.repeat(other, read, speculate=False) is None


@pytest.mark.parametrize("options", WITHOUT_EFFECT.values(), ids=WITHOUT_EFFECT)
def test_how_a_text_was_made_leaves_no_trace(engine: Engine, sampled: Receipt, options: Any) -> None:
    made = engine.generate(PROMPT, max_tokens=40, **OPTIONS["sampled"], **options).receipt
    assert made.to_json() == sampled.to_json()


def test_streams_and_event_loops(engine: Engine, sampled: Receipt) -> None:
    async def read() -> Receipt:
        async with engine.astream(PROMPT, max_tokens=40, **OPTIONS["sampled"]) as stream:
            async for _ in stream:
                pass
        return stream.result.receipt

    with engine.stream(PROMPT, max_tokens=40, **OPTIONS["sampled"]) as stream:
        for _ in stream:
            pass
    assert stream.result.receipt == asyncio.run(read()) == sampled


@pytest.mark.parametrize(
    "load", [{"weight_cache": True}, {"recycle": True}, {"draft": "self"}, {"kv_memory": 1}], ids=str
)
def test_what_is_kept_and_what_drafts(path: Path, sampled: Receipt, load: dict[str, Any]) -> None:
    load = load | {"draft": path} if "draft" in load else load
    for _ in range(2):  # the second time with what the first one left
        with pystaged.load(path, num_threads=2, **load) as engine:
            assert pystaged.repeat(engine, sampled) is None
            made = engine.generate(PROMPT, max_tokens=40, **OPTIONS["sampled"]).receipt
            assert made.to_json() == sampled.to_json()


def test_quantized_keys_and_values_are_part_of_it(path: Path, engine: Engine) -> None:
    with pystaged.load(path, num_threads=1, kv="q8_0") as other:
        made = other.generate(PROMPT, max_tokens=40).receipt
        assert made.kv == "q8_0"
        assert pystaged.repeat(other, made) is None
        with pytest.raises(ValueError, match="kv is q8_0, and here it is f16; load the model with kv='q8_0'"):
            pystaged.repeat(engine, made)


def test_a_context_that_is_full_ends_it_alike(path: Path, engine: Engine) -> None:
    with pystaged.load(path, num_threads=1, n_ctx=40) as short:
        made = short.generate(PROMPT, max_tokens=200, ignore_eos=True).receipt
        assert made.finish_reason == "length"
        assert len(made.prompt) + len(made.tokens) == 41
        assert pystaged.repeat(short, made) is None
    with pytest.raises(ValueError, match="n_ctx is 40, and here it is 96; load the model with n_ctx=40"):
        pystaged.repeat(engine, made)


# Made once, by the versions they name; whoever changes a bit of what the bundled model writes fails here.
@pytest.mark.slow
@pytest.mark.parametrize("name", ["greedy", "sampled"])
@pytest.mark.parametrize("kernel", EVERY_KERNEL)
def test_what_was_promised(monkeypatch: pytest.MonkeyPatch, name: str, kernel: str) -> None:
    monkeypatch.setenv("PYSTAGED_KERNEL", kernel)
    kept = Receipt.load(paths.DATA / f"{name}.receipt")
    with pystaged.load("bundled", n_ctx=kept.n_ctx, policy=FixedPolicy(2, 3, 6)) as engine:  # which measures nothing
        assert (kept.arithmetic, pystaged.repeat(engine, kept)) == (ARITHMETIC, None), (
            "what the model writes has changed: raise ARITHMETIC in pystaged/decoding/origin.py, and make "
            "tests/data/*.receipt anew with their prompts and options"
        )


# ---- What is in it ----


def test_every_option_is_in_it_or_without_effect(sampled: Receipt) -> None:
    options = json.loads(sampled.to_json())["options"]
    assert {*options, *receipt._WITHOUT_EFFECT, *receipt._UNLESS} == {each.name for each in fields(GenerationConfig)}
    assert {*options["sampling"], "_native"} == {each.name for each in fields(SamplingConfig)}


def test_what_it_says(engine: Engine, path: Path, sampled: Receipt) -> None:
    assert sampled.versions == {
        "pystaged": pystaged.__version__,
        "llama-cpp-python": metadata.version("llama-cpp-python"),
    }
    assert (sampled.model.file, sampled.model.size) == (path.name, path.stat().st_size)
    assert sampled.vocabulary == engine.tokenizer.fingerprint
    assert (sampled.device, sampled.kv, sampled.n_ctx) == ("cpu", "f16", 96)
    assert list(sampled.prompt) == engine.tokenizer.encode(PROMPT).tolist()
    assert sampled.config.sampling.seed == 2**64 - 1
    with_grammar = engine.generate(PROMPT, max_tokens=4, regex="[a-z]+").receipt
    assert with_grammar.versions.keys() == {"pystaged", "llama-cpp-python", "llguidance"}


def test_addresses_of_servers_are_not_in_it(engine: Engine) -> None:
    result = engine.generate(PROMPT, max_tokens=4)
    assert result.origin
    away = replace(result, origin=replace(result.origin, device="rpc:192.168.0.5:50052,[fe80::1]:50052"))
    assert away.receipt.device == "rpc"


def test_what_has_none(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pystaged.decoding.scheduler, "MOST_UNREAD", 1)  # so that the text does not end meanwhile
    with engine.stream(PROMPT, max_tokens=40) as stream:
        next(stream)
    with pytest.raises(ValueError, match="a cancelled text has no receipt"):
        _ = stream.result.receipt
    with pytest.raises(ValueError, match="only texts generated by an Engine have receipts"):
        _ = replace(stream.result, origin=None).receipt


def test_a_file_that_was_replaced_is_not_vouched_for(path: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy.gguf"
    shutil.copy(path, copy)
    with pystaged.load(copy, recycle=False) as engine:
        result = engine.generate(PROMPT, max_tokens=4)
        data = bytearray(copy.read_bytes())
        data[-1] ^= 1
        (tmp_path / "other").write_bytes(data)
        (tmp_path / "other").replace(copy)
        with pytest.raises(OSError, match=r"copy\.gguf was replaced or changed after it was loaded"):
            _ = result.receipt
        copy.unlink()
        with pytest.raises(FileNotFoundError):
            _ = result.receipt


def test_all_parts_of_a_model_are_vouched_for(tmp_path: Path) -> None:
    parts = split(write(tmp_path / "whole.gguf", CASES["llama"]), tmp_path, 3)
    with pystaged.load(parts[0], draft=None, recycle=False) as engine:
        result = engine.generate([5, 6, 7], max_tokens=4)
        contents = [part.read_bytes() for part in parts]
        assert result.receipt.model.sha256 == hashlib.sha256(b"".join(contents)).hexdigest()
        assert result.receipt.model.size == sum(map(len, contents))
        assert pystaged.repeat(engine, result.receipt) is None
    with pystaged.load(parts[0], draft=None, recycle=False) as engine:
        result = engine.generate([5, 6, 7], max_tokens=4)
        os.utime(parts[2], ns=(1, 1))
        seen._sha256.cache_clear()
        with pytest.raises(OSError, match=r"00003-of-00003\.gguf was replaced or changed"):
            _ = result.receipt


# ---- Differences ----


def test_where_and_how_far_it_differs(engine: Engine, sampled: Receipt) -> None:
    tokens = list(sampled.tokens)
    other = (tokens[7] + 1) % 300
    found = pystaged.repeat(engine, replace(sampled, tokens=(*tokens[:7], other, *tokens[8:])))
    assert found is not None
    before = [*sampled.prompt, *tokens[:7]]
    gap = engine.score([*before, tokens[7]]).total - engine.score([*before, other]).total
    assert (found.index, found.receipt, found.here, found.what) == (7, other, tokens[7], "tokens")
    assert found.gap == pytest.approx(gap, abs=1e-9)
    for speculate in (True, False):
        shorter = pystaged.repeat(engine, replace(sampled, tokens=sampled.tokens[:-1]), speculate=speculate)
        assert shorter == Difference(len(tokens) - 1, None, tokens[-1], pytest.approx(math.nan, nan_ok=True))
        longer = pystaged.repeat(engine, replace(sampled, tokens=(*tokens, 5)), speculate=speculate)
        assert longer == Difference(len(tokens), 5, None, pytest.approx(math.nan, nan_ok=True))
        end = pystaged.repeat(engine, replace(sampled, finish_reason="stop"), speculate=speculate)
        assert end is not None
        assert (end.index, end.what) == (len(tokens), "end")
        text = pystaged.repeat(engine, replace(sampled, text_sha256=text_hash("another")), speculate=speculate)
        assert text is not None
        assert (text.index, text.what) == (len(tokens), "text")
        said = repeating.described(text, replace(sampled, text_sha256="abc"), engine.tokenizer)
        assert said.endswith("tokens are the same, but the receipt has another text, SHA-256 abc")


def test_a_difference_ends_the_work(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    made = engine.generate(PROMPT, max_tokens=80, ignore_eos=True).receipt
    sequences: list[Any] = []
    honest = Engine.start
    monkeypatch.setattr(Engine, "start", lambda *args: sequences.append(honest(*args)) or sequences[-1])
    monkeypatch.setattr(pystaged.decoding.scheduler, "MOST_UNREAD", 8)
    found = pystaged.repeat(engine, replace(made, tokens=((made.tokens[0] + 1) % 300, *made.tokens[1:])))
    assert found is not None
    assert found.index == 0
    assert sequences[0].result().finish_reason == "cancelled"
    assert len(sequences[0].result().tokens) < 60


def test_tokens_that_are_none(engine: Engine, sampled: Receipt) -> None:
    found = pystaged.repeat(engine, replace(sampled, tokens=(300, *sampled.tokens[1:])))
    assert found is not None
    assert (found.index, found.receipt) == (0, 300)
    assert math.isnan(found.gap)
    with pytest.raises(ValueError, match="token 300 is outside of the vocabulary of 300"):
        pystaged.repeat(engine, replace(sampled, prompt=(300,)))
    with pytest.raises(ValueError, match="the prompt is empty"):
        pystaged.repeat(engine, replace(sampled, prompt=()))
    with pytest.raises(
        ValueError, match=f"vocabulary is v, and the model's is {engine.tokenizer.fingerprint}: the rec"
    ):
        pystaged.repeat(engine, replace(sampled, vocabulary="v"))


def test_another_model_is_named(random_gguf: Callable[..., Path], path: Path, sampled: Receipt) -> None:
    other = random_gguf(vocab_size=300, context=96, seed=1)
    with (
        pystaged.load(other, recycle=False) as engine,
        pytest.raises(ValueError, match=r"the receipt is of .*SHA-256 [0-9a-f]{64}; .* is another: .*") as caught,
    ):
        pystaged.repeat(engine, sampled)
    for word in (path.name, sampled.model.sha256, str(other)):
        assert word in str(caught.value)


def test_models_are_found_by_their_hashes_alone(
    monkeypatch: pytest.MonkeyPatch, path: Path, tmp_path: Path, sampled: Receipt
) -> None:
    def no_download(*_: object, **__: object) -> None:
        raise AssertionError

    monkeypatch.setattr(hub, "pull", no_download)
    monkeypatch.setattr(names, "pull", no_download)
    same_size = tmp_path / "same-size.gguf"
    same_size.write_bytes(bytes(sampled.model.size))
    monkeypatch.setattr(names, "here", lambda: {"a": tmp_path / "gone", "b": same_size, "c": path})
    assert repeating.find_model(sampled) == path
    for lie in ("../../etc/passwd", str(path), "owner/name:q8_0", "bundled"):
        lying = replace(sampled, model=replace(sampled.model, file=lie, name=lie))
        assert repeating.find_model(lying) == path
        lying = replace(lying, model=replace(lying.model, sha256="0" * 64))
        with pytest.raises(FileNotFoundError, match="no model here has the receipt's SHA-256"):
            repeating.find_model(lying)


def test_which_versions_promise_it(sampled: Receipt) -> None:
    assert repeating.promise(sampled, "cpu") == ""
    later = replace(sampled, versions=sampled.versions | {"pystaged": "9.0"})
    here = pystaged.__version__
    assert repeating.promise(later, "cpu") == (
        f"The receipt has pystaged 9.0, here {here}. Both versions of pystaged have arithmetic {ARITHMETIC} "
        "and promise the same text."
    )
    assert "only for the same arithmetic" in repeating.promise(replace(later, arithmetic=ARITHMETIC + 1), "cpu")
    assert "on device 'metal'; the same text is promised for the CPU only" in repeating.promise(
        replace(sampled, device="metal"), "cpu"
    )
    assert "repeated on device 'auto'; the same text is promised for the CPU only" in repeating.promise(sampled, "auto")
    config = GenerationConfig(regex="a")
    other = sampled.versions | {"llguidance": "0.1"}
    assert "depends on llguidance" in repeating.promise(replace(sampled, versions=other, config=config), "cpu")


# ---- Never trusted ----


def changed(text: str, where: str, value: Any) -> str:
    """A receipt with another value at a dotted place; ... removes it."""
    whole = json.loads(text)
    *parents, name = where.split(".")
    part = whole
    for parent in parents:
        part = part[parent]
    if value is ...:
        del part[name]
    else:
        part[name] = value
    return json.dumps(whole)


@pytest.mark.parametrize("row", paths.table("no_receipts"), ids=str)
def test_what_is_no_receipt_is_refused_by_field(sampled: Receipt, tmp_path: Path, row: list[Any]) -> None:
    where, value, words = row if len(row) == 3 else (row[0], ..., row[1])
    (tmp_path / "it").write_text(changed(sampled.to_json(), where, value))
    with pytest.raises(ValueError, match=f"it is no receipt: {words}") as caught:
        Receipt.load(tmp_path / "it")
    assert str(caught.value).isprintable()


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"", "is no receipt: it is empty"),
        (b'{"format":\n "pysta', "is no receipt: line 2, column 2 is no JSON"),
        (b"\x1f\x8b\x08", "is no receipt: it is no text in UTF-8"),
        (b"[]", "a receipt must be an object"),
        (b"[" * 100_000, "it is nested too deeply"),
        (b'{"a": ' * 100_000, "it is nested too deeply"),
        (b'{"format": 1, "format": 2}', "an object has a field twice"),
        (b'{"format": NaN}', "NaN is no number"),
        (b'{"format": 1e999}', "a number is out of range"),
        (b'{"format": %s}' % (b"9" * 10**6), "a number has too many digits"),
        (rb'{"format": "\ud800"}', "is no receipt: it is no text in UTF-8"),
        (b"\xff\xfe{}", "is no receipt"),
    ],
)
def test_what_is_no_json_is_refused(tmp_path: Path, data: bytes, words: str) -> None:
    (tmp_path / "it").write_bytes(data)
    with pytest.raises(ValueError, match=words):
        Receipt.load(tmp_path / "it")


def test_files_that_are_none(tmp_path: Path) -> None:
    large = tmp_path / "large"
    with large.open("wb") as file:
        file.truncate(receipt.MOST_BYTES + 1)
    with pytest.raises(ValueError, match="is larger than 16 MB, so it is no receipt"):
        Receipt.load(large)
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(ValueError, match="is no regular file, so it is no receipt"):
        Receipt.load(tmp_path / "pipe")
    with pytest.raises(FileNotFoundError):
        Receipt.load(tmp_path / "gone")


@pytest.mark.parametrize(
    ("where", "value"),
    [
        ("options.sampling.ignore_eos", "x" * 10**5),
        ("options.sampling.temperature_last", [0] * 10**5),
        ("options.sampling.logit_bias", [["\u202e" * 10**5, 1e300]]),
    ],
)
def test_what_is_refused_is_not_repeated_at_length(sampled: Receipt, where: str, value: Any) -> None:
    with pytest.raises(ValueError, match="options: ") as caught:
        Receipt.from_json(changed(sampled.to_json(), where, value))
    assert len(str(caught.value)) < 300
    assert str(caught.value).isprintable()


def test_a_hash_of_many_tokens_takes_little_memory() -> None:
    tokens = [*range(1000)] * 100
    tracemalloc.start()
    found = token_hash(tokens)
    most = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert found == hashlib.sha256(" ".join(map(str, tokens)).encode()).hexdigest()
    assert token_hash([]) == hashlib.sha256(b"").hexdigest()
    assert token_hash([5, 17]) == hashlib.sha256(b"5 17").hexdigest()
    assert text_hash("ü") == hashlib.sha256("ü".encode()).hexdigest()
    assert most < 8 * len(tokens)


@pytest.mark.parametrize("option", ["stop", "dry_sequence_breakers"])
def test_half_a_character_is_no_option(engine: Engine, option: str) -> None:
    """A receipt of it could not be read."""
    with pytest.raises(ValueError, match=f"^{option} is not valid Unicode text"):
        engine.generate(PROMPT, max_tokens=4, **{option: ["a", "\ud800"]})


def test_one_too_large_to_be_read_is_not_written(
    sampled: Receipt, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(receipt, "MOST_BYTES", 100)
    with pytest.raises(ValueError, match="the receipt would be larger than"):
        sampled.save(tmp_path / "it")
    assert not [*tmp_path.iterdir()]


# ---- Commands ----


@pytest.mark.slow
def test_commands(path: Path, tmp_path: Path) -> None:
    file = tmp_path / "it.receipt"
    options = ("--max-tokens", "20", "--temperature", "1", "--seed", "4", "--logit-bias", "5-inf")
    done = here("generate", PROMPT, "--model", path, *options, "--receipt", file)
    assert done.returncode == 0, done.stderr
    expected = pystaged.generate(PROMPT, model=path, max_tokens=20, temperature=1, seed=4, logit_bias={5: -math.inf})
    assert file.read_text() == expected.receipt.to_json()
    for more in ((), ("--plain",), ("--threads", "2", "--draft", path)):
        done = here("verify", file, "--model", path, *more)
        assert done.returncode == 0, done.stderr
        assert done.stdout.decode() == (
            f"same: 20 tokens, ended by length, text with SHA-256 {text_hash(expected.text)}\n"
        )
    other = (expected.tokens[3] + 1) % 300
    tokens = [*expected.tokens[:3], other, *expected.tokens[4:]]
    file.write_text(changed(file.read_text(), "text.tokens", tokens))
    done = here("verify", file, "--model", path)
    assert done.returncode == 1
    said = done.stdout.decode()
    assert said.startswith("differs: 3 of 20 tokens are the same, then comes ")
    assert f"(token {other}) in the receipt and " in said
    assert f"(token {expected.tokens[3]}) here; the model's log-probabilities of the two are " in said


@pytest.mark.slow
def test_commands_that_are_refused(path: Path, bundled_draft: Path, tmp_path: Path) -> None:
    file = tmp_path / "it.receipt"
    done = here("generate", PROMPT, "--model", path, "--max-tokens", "4", "--json", "--receipt", file)
    assert json.loads(done.stdout)["tokens"] == list(Receipt.load(file).tokens)
    record = Receipt.load(file).model
    assert_refused(here("verify", file), f"no model here has the receipt's SHA-256 {record.sha256}", "--model")
    assert_refused(here("verify", file, "--model", bundled_draft), record.file, record.sha256, str(bundled_draft))
    assert_refused(here("verify", bundled_draft), "is no receipt")
    done = here("generate", PROMPT, "--model", path, "--n", "2", "--receipt", file)
    assert done.returncode == 2
    assert b"--receipt saves one text" in done.stderr
    done = here("generate", PROMPT, "--model", path, "--receipt", "-")
    assert done.returncode == 2
    assert b"--receipt names a file" in done.stderr
    assert_refused(here("generate", PROMPT, "--model", path, "--receipt", tmp_path), "is a folder")
    assert_refused(here("generate", PROMPT, "--model", path, "--receipt", tmp_path / "no" / "it"), "there is no folder")


@pytest.mark.slow
def test_the_bundled_model_is_found() -> None:
    done = here("verify", paths.DATA / "greedy.receipt")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(b"same: ")


def test_a_file_is_read_once(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    seen._sha256.cache_clear()
    reads: list[object] = []
    honest = seen.update
    monkeypatch.setattr(seen, "update", lambda *args: reads.append(args) or honest(*args))
    results = engine.generate(["a", "b"], n=2, max_tokens=2)
    assert len({each.receipt.model.sha256 for each in results}) == 1
    assert len(reads) == 1


def test_several_files(sampled: Receipt, path: Path, tmp_path: Path) -> None:
    """What cannot be verified does not hide the rest; a chain, which held several receipts, names the way out."""
    single, false, bare, chain = (tmp_path / name for name in ("single", "false", "bare.json", "chain"))
    sampled.save(single)
    replace(sampled, tokens=((sampled.tokens[0] + 1) % 300, *sampled.tokens[1:])).save(false)
    bare.write_text(json.dumps({"format": "pystaged text 1", "text": "a", "logprobs": [], "receipt": None}))
    line = json.dumps(json.loads(sampled.to_json()), separators=(",", ":")) + "\n"
    chain.write_text('{"format": "pystaged chain 1"}\n' + 2 * line)
    done = here("verify", tmp_path / "gone", false, single, bare, chain, "--model", path)
    assert done.returncode == 1
    said, told = done.stdout.decode().splitlines(), done.stderr.decode()
    assert said[0].startswith(f"{false}: differs: 0 of 40 tokens")
    assert said[1].startswith(f"{single}: same: 40 tokens")
    assert f"error: {tmp_path / 'gone'}" in told
    assert f"not checked: {bare} has no receipt" in told
    way_out = f"tail -n +2 {chain} | split -l 1 - {chain}."
    assert f"error: {chain} is a chain of receipts, one in each line after the first" in told
    assert way_out in told
    subprocess.run(["sh", "-c", way_out], check=True)
    assert [Receipt.load(file) for file in tmp_path.glob("chain.*")] == [sampled] * 2
    assert here("verify", bare, bare).returncode == 1


def test_a_model_of_several_files_is_loaded_once(
    sampled: Receipt, path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loads: list[object] = []
    load = pystaged.load
    monkeypatch.setattr(
        pystaged, "load", lambda *args, **options: loads.append(options["n_ctx"]) or load(*args, **options)
    )
    first, other, again = (tmp_path / name for name in ("first", "other", "again"))
    for file, n_ctx in ((first, 96), (other, 90), (again, 96)):
        replace(sampled, n_ctx=n_ctx).save(file)
    done = here("verify", first, other, again, "--model", path)
    assert [line.split(": ")[:2] for line in done.stdout.decode().splitlines()] == [
        [str(file), "same"] for file in (first, again, other)
    ]
    assert loads == [96, 90]


def test_a_text_that_a_test_keeps_has_its_receipt(sampled: Receipt) -> None:
    kept = {"format": "pystaged text 1", "text": "", "logprobs": [], "receipt": json.loads(sampled.to_json())}
    assert Receipt.from_json(json.dumps(kept)) == sampled
    with pytest.raises(ValueError, match="the kept text has none, because no text of the model is that string"):
        Receipt.from_json(json.dumps(kept | {"receipt": None}))
