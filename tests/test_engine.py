"""Generation through the public API: what comes out, in which pieces, when it stops, and what it leaves behind."""

from __future__ import annotations

import builtins
import codecs
import copy
import gc
import itertools
import pickle
import threading
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from support.family_reference import FamilyReference, log_softmax
from support.paths import table
from support.plain import plain_tokens
from support.random_models import RandomModel, add_sentencepiece, write
from support.scheduling import HeldPolicy, wait_until

import pystaged
from pystaged import (
    ContextFullError,
    DeviceError,
    DeviceLostError,
    Engine,
    FixedPolicy,
    GenerationResult,
    Piece,
    SamplingConfig,
    _core,
)
from pystaged.decoding import requests
from pystaged.decoding.context import Context
from pystaged.decoding.readers import Stream
from pystaged.decoding.text import Text

PROMPT = "the tree then "
CONTEXT = 96
WARM: dict[str, Any] = {"temperature": 1.0, "seed": 1}
OPTIONS: list[dict[str, Any]] = [
    {},
    WARM,
    {"temperature": 0.3, "top_k": 20, "seed": 5},
    {"temperature": 1.5, "top_p": 0.9, "min_p": 0.01, "seed": 2**63},
]


@pytest.fixture(scope="module")
def path(random_gguf: Callable[..., Path]) -> Path:
    """A random model of single bytes and short words: most of what it writes is no valid UTF-8."""
    return random_gguf(vocab_size=300, context=CONTEXT)


@pytest.fixture
def engine(path: Path) -> Iterator[Engine]:
    with pystaged.load(path) as engine:
        yield engine


def alone(path: Path, prompt: str, **options: Any) -> GenerationResult:
    """By an engine of its own."""
    with pystaged.load(path) as engine:
        return engine.generate(prompt, **options)


def text_of(engine: Engine, tokens: list[int], finish: str = "length") -> str:
    """What tokens say; where the text was cut, without the beginning of a character."""
    decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
    return decoder.decode(b"".join(map(engine.tokenizer.token_bytes, tokens)), final=finish == "stop")


# ---- Results ----


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_result(engine: Engine, path: Path, options: dict[str, Any]) -> None:
    result = engine.generate(PROMPT, max_tokens=60, **options)
    assert isinstance(result, GenerationResult)
    sampling, tokenizer = _core.Sampling(**options), engine.tokenizer
    assert result.tokens == plain_tokens(_core.Model(path), engine.encode(PROMPT), 60, sampling, tokenizer.is_end)
    assert all(type(token) is int for token in result.tokens)
    assert type(result.text) is str
    assert result.text == str(result) == text_of(engine, result.tokens, result.finish_reason)
    assert result.finish_reason == ("length" if len(result.tokens) == 60 else "stop")
    stats = result.stats
    assert stats.prompt_tokens == len(engine.tokenizer.encode(PROMPT))
    assert stats.new_tokens == len(result.tokens)
    assert stats.reused_tokens == 0
    assert 0 < stats.steps <= stats.new_tokens + 1
    assert stats.prefill_seconds >= 0
    assert stats.decode_seconds > 0
    assert stats.tokens_per_second == pytest.approx(stats.new_tokens / stats.decode_seconds)
    assert stats.to_dict()["new_tokens"] == len(result.tokens)


# ---- Pieces ----


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_pieces_join_to_the_text(engine: Engine, options: dict[str, Any]) -> None:
    stream = engine.stream(PROMPT, max_tokens=80, **options)
    pieces = list(stream)
    result = stream.result
    assert "".join(pieces) == "".join(piece.text for piece in pieces) == result.text
    assert result.text == text_of(engine, result.tokens, result.finish_reason)
    assert [token for piece in pieces for token in piece.tokens] == result.tokens
    # No piece holds the beginning of a character whose rest comes later: decoding up to there gives no more than shown.
    shown, bytes_so_far = "", b""
    for piece in pieces:
        shown += piece
        bytes_so_far += b"".join(map(engine.tokenizer.token_bytes, piece.tokens))
        assert bytes_so_far.decode("utf-8", errors="replace").startswith(shown)
        assert (bytes_so_far + b"\x80").decode("utf-8", errors="replace").startswith(shown) or piece is pieces[-1]


# ---- Ends ----


@pytest.mark.slow
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_stop_strings_anywhere(path: Path, options: dict[str, Any]) -> None:
    """Also across steps of several tokens, of which there are some."""
    accepted = 0
    with pystaged.load(path, policy=FixedPolicy(4, 5, 12)) as engine:
        whole = engine.generate(PROMPT, max_tokens=60, **options)
        for start in range(0, len(whole.text) - 6, 5):
            for length in (1, 2, 5):
                stop = whole.text[start : start + length]
                result = engine.generate(PROMPT, max_tokens=60, stop=stop, **options)
                assert result.text == whole.text[: whole.text.index(stop)]
                assert result.tokens == whole.tokens[: len(result.tokens)]
                assert result.finish_reason == "stop"
                assert result.stats.new_tokens == len(result.tokens)
                assert sum(stage.emitted for stage in result.stats.stages.values()) == len(result.tokens)
                stream = engine.stream(PROMPT, max_tokens=60, stop=(stop,), **options)
                assert "".join(stream) == result.text
                assert stream.result.tokens == result.tokens
                accepted += result.stats.accepted
    assert accepted > 20


def test_result_at_the_end(engine: Engine) -> None:
    with engine.stream(PROMPT, max_tokens=8) as stream:
        next(stream)
        with pytest.raises(RuntimeError, match="has not been read to its end"):
            _ = stream.result
        list(stream)
        assert len(stream.result.tokens) == 8
        with pytest.raises(StopIteration):
            next(stream)


def test_a_cut_inside_a_character_leaves_it_out(engine: Engine) -> None:
    whole = engine.generate(PROMPT, max_tokens=80, **WARM)
    data = [b"".join(map(engine.tokenizer.token_bytes, whole.tokens[:n])) for n in range(81)]
    torn = [n for n in range(1, 81) if data[n].decode("utf-8", "replace") != text_of(engine, whole.tokens[:n])]
    assert torn
    for count in torn[:5]:
        stream = engine.stream(PROMPT, max_tokens=count, **WARM)
        assert "".join(stream) == stream.result.text == text_of(engine, whole.tokens[:count])
        # The tokens have the beginning of the character; going on from them completes it.
        assert stream.result.tokens == whole.tokens[:count]
        prompt = [*engine.tokenizer.encode(PROMPT).tolist(), *stream.result.tokens]
        rest = engine.generate(prompt, max_tokens=80 - count, **WARM)
        assert stream.result.tokens + rest.tokens == whole.tokens


class Changed:
    """A tokenizer of which some methods are others."""

    def __init__(self, tokenizer: _core.Tokenizer, **methods: Callable[..., object]) -> None:
        self._tokenizer = tokenizer
        vars(self).update(methods)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tokenizer, name)


def test_a_stop_string_that_only_the_end_completes(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """A torn character becomes a replacement character when the model ends there; that can end a stop string too."""
    tokens = engine.generate(PROMPT, max_tokens=80, **WARM).tokens
    at = next(
        n
        for n in range(3, 80)
        if tokens[n] not in tokens[:n] and text_of(engine, tokens[:n]) != text_of(engine, tokens[:n], "stop")
    )
    text = text_of(engine, tokens[:at], "stop")
    stop = next(text[-n:] for n in range(1, len(text)) if text.index(text[-n:]) == len(text) - n)
    monkeypatch.setattr(Engine, "tokenizer", Changed(engine.tokenizer, is_end=lambda token: token == tokens[at]))
    whole = engine.generate(PROMPT, max_tokens=80, **WARM)
    assert (whole.text, whole.tokens, whole.finish_reason) == (text, tokens[:at], "stop")
    assert text[-1] == "\ufffd"
    result = engine.generate(PROMPT, max_tokens=80, stop=stop, **WARM)
    assert (result.text, result.finish_reason) == (text[: -len(stop)], "stop")


def test_end_of_text(engine: Engine) -> None:
    end = engine.tokenizer.num_tokens - 1
    assert engine.tokenizer.is_end(end)
    results = [engine.generate(PROMPT, max_tokens=70, temperature=1.0, seed=seed) for seed in range(12)]
    ended = [result for result in results if result.finish_reason == "stop"]
    assert 0 < len(ended) < len(results)
    for result in ended:
        assert len(result.tokens) < 70
        assert end not in result.tokens
        assert result.text == text_of(engine, result.tokens, "stop")
    assert all(len(result.tokens) == 70 for result in results if result.finish_reason == "length")


@pytest.mark.parametrize("options", OPTIONS[:2], ids=str)
def test_full_context(engine: Engine, path: Path, options: dict[str, Any]) -> None:
    result = engine.generate(PROMPT, max_tokens=10_000, **options)
    assert result.finish_reason == "length"
    # The last position's token needs no position of its own.
    assert result.stats.prompt_tokens + len(result.tokens) == CONTEXT + 1
    with pystaged.load(path, n_ctx=20) as short:
        tokens = short.generate(PROMPT, max_tokens=10_000, **options).tokens
    assert tokens == result.tokens[: 21 - result.stats.prompt_tokens]


def test_long_prompts(engine: Engine) -> None:
    fits, long = "." * CONTEXT, "." * (CONTEXT + 5)
    assert len(engine.tokenizer.encode(fits)) == CONTEXT
    result = engine.generate(fits)
    assert (len(result.tokens), result.finish_reason) == (1, "length")
    for continued in (engine.generate, engine.stream):
        with pytest.raises(ContextFullError, match=rf"\b{CONTEXT + 5} tokens.*\b{CONTEXT}\b"):
            continued(long)
    assert issubclass(ContextFullError, ValueError)
    assert engine.generate(fits).text == result.text


def test_long_contexts_are_as_memory_allows(tmp_path: Path) -> None:
    path = write(tmp_path / "long.gguf", RandomModel("llama", context=40_000))
    options: dict[str, Any] = {"draft": None, "recycle": False, "policy": FixedPolicy(1, 0, 0), "long_context": True}
    token_bytes = _core.Session(_core.Model(path), 1).cell_bytes
    for kv_memory, expected in ((40_000, 32_768), (20_000, 16_384), (10_000, 8192)):
        with pystaged.load(path, kv_memory=kv_memory * token_bytes, **options) as engine:
            assert engine.n_ctx == expected
    with pystaged.load(path, n_ctx=100, **options) as engine:
        assert engine.n_ctx == 100


def test_a_context_shorter_than_the_models_says_how_to_have_more(path: Path) -> None:
    for n_ctx, more in (
        (16, rf"16; shorten .*n_ctx \(--n-ctx\), up to {CONTEXT}$"),
        (CONTEXT, rf"{CONTEXT}; shorten the prompt$"),
    ):
        with pystaged.load(path, n_ctx=n_ctx) as short, pytest.raises(ContextFullError, match=more):
            short.generate([1] * (CONTEXT + 1))


def test_a_cancelled_text_has_what_was_held_back_for_a_stop_string(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pystaged.decoding.scheduler, "MOST_UNREAD", 4)  # so that the text does not end meanwhile
    whole = engine.generate("e", max_tokens=40, **WARM)
    stop = whole.text[:10] + "\0"
    stream = engine.stream("e", max_tokens=40, stop=stop, **WARM)
    next(stream)
    stream.close()
    result = stream.result
    decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
    assert result.finish_reason == "cancelled"
    assert result.text == decoder.decode(b"".join(result.pieces)) != ""


# ---- Scores ----


def test_scores_are_the_models_log_probabilities(engine: Engine, path: Path) -> None:
    """In several passes, beside doubles."""
    tokens = np.random.default_rng(0).integers(0, 299, CONTEXT).tolist()
    scored = engine.score(tokens)
    exact = log_softmax(FamilyReference(path).logits(tokens))
    assert scored.tokens == tokens
    assert scored.logprobs.dtype == np.float64
    assert np.isnan(scored.logprobs[0])
    np.testing.assert_allclose(scored.logprobs[1:], exact[np.arange(CONTEXT - 1), tokens[1:]], rtol=0, atol=1e-3)
    assert scored.total == pytest.approx(scored.logprobs[1:].sum())
    assert scored.pieces == [engine.tokenizer.token_bytes(token, True) for token in tokens]


def test_scores_of_text(engine: Engine) -> None:
    scored = engine.score(PROMPT)
    assert scored.tokens == engine.tokenizer.encode(PROMPT).tolist()
    assert b"".join(scored.pieces) == PROMPT.encode()
    assert engine.score(np.array(scored.tokens)).logprobs[1:].tolist() == scored.logprobs[1:].tolist()
    assert engine.score("e").total == 0
    assert engine.score("e<|endoftext|>").pieces == [b"e", b"<|endoftext|>"]


def test_scoring_leaves_contexts_alone(engine: Engine) -> None:
    expected = engine.generate(PROMPT, max_tokens=20)
    with engine.stream(PROMPT, max_tokens=20) as stream:
        first = next(stream)
        engine.score("another text")
        assert str(first) + "".join(stream) == expected.text


def test_what_goes_on_with_another_text(tmp_path: Path) -> None:
    """SentencePiece puts a space before a text, but not before its parts."""
    model = RandomModel("llama", vocabulary=add_sentencepiece)
    with pystaged.load(write(tmp_path / "model.gguf", model)) as engine:
        for begun, more in (("hello", "\nthe other"), ("hello\n", "the other"), ("he", " the"), ("the ", "<|tool|>")):
            tokens = [*engine.encode(begun), *engine.encode(more, add_special=False)]
            assert engine.tokenizer.decode(tokens, special=True) == f"<s> {begun}{more}"
        assert engine.encode("\nthe", add_special=False).tolist() == engine.encode("\nthe").tolist()[2:]


def test_a_scored_text_counts_as_memory(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    used: list[int] = []
    with pystaged.load(path, kv_memory=1) as engine:

        def noted(works: Any) -> Any:
            used.append(engine._contexts.num_bytes)
            return _core.run(works)

        monkeypatch.setattr(requests, "run", noted)
        engine.score([1] * CONTEXT)
        assert used
        assert min(used) >= engine.context_bytes


def test_texts_that_have_no_score(engine: Engine) -> None:
    with pytest.raises(ValueError, match="the prompt is empty"):
        engine.score("")
    with pytest.raises(ContextFullError, match=f"{CONTEXT + 1} tokens"):
        engine.score([1] * (CONTEXT + 1))
    with pytest.raises(ValueError, match="outside of the vocabulary"):
        engine.score([1, 300])


# ---- Refusals ----


def test_prompts_that_are_none(engine: Engine) -> None:
    with pytest.raises(ValueError, match="the prompt is empty"):
        engine.generate("")
    for prompt in (
        *(None, 5, [1.5], [[1.5]], [[[1]]], {1: 2}, [True], [2**70], np.int32(5), np.ones((2, 2), np.int32)),
        *(b"bytes", bytearray(b"bytes"), memoryview(b"bytes"), [b"bytes"]),
    ):
        with pytest.raises(TypeError, match="the prompt must be a string or token ids"):
            engine.generate(prompt)  # type: ignore[arg-type]
    for several in (["list"], [[1]], [[1], [2, 3]]):
        with pytest.raises(TypeError, match="the prompt must be a string or token ids"):
            engine.stream(several)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="the prompt is empty; give at least one token, or one prompt of several"):
        engine.generate([])
    for token in (-1, 300, 2**31):
        with pytest.raises(ValueError, match=f"token {token} is outside of the vocabulary of 300"):
            engine.generate([1, token])
    with pytest.raises(ValueError, match=r"surrogate|(?i:utf-8)"):
        engine.generate("a lone surrogate \ud800")


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"max_tokens": None}, TypeError, "max_tokens must be an integer, not NoneType; engine.n_ctx has no limit but"),
        ({"max_tokens": -1}, ValueError, "max_tokens must be at least 1, not -1; engine.n_ctx has no limit but"),
        ({"seed": -1}, ValueError, r"seed must be .*, not -1; None draws a random seed"),
        ({"json_schema": SimpleNamespace(model_json_schema=dict)}, TypeError, "pydantic's are Model.model_json_schema"),
        ({"stop": ("a", "")}, ValueError, "a stop string must not be empty"),
        ({"stop": b"a"}, TypeError, "stop must be"),
        ({"temprature": 1.0}, TypeError, "there is no option 'temprature'; did you mean temperature\\?"),
        ({"sampling": SamplingConfig(), "top_k": 3}, TypeError, "give either sampling or top_k, not both"),
        ({"sampling": 1.0}, TypeError, "sampling must be a SamplingConfig"),
    ],
    ids=str,
)
def test_options(path: Path, engine: Engine, options: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        engine.generate(PROMPT, **options)
    with pytest.raises(error, match=message):
        engine.stream(PROMPT, **options)
    with pytest.raises(error, match=message):
        pystaged.generate(PROMPT, model=path, **options)


def test_no_draft_by_both_names() -> None:
    for draft in (None, "none"):
        with pystaged.load("bundled", draft=draft) as engine:
            assert engine.draft is None


def test_models(tmp_path: Path, path: Path) -> None:
    for model, words in (
        (tmp_path / "none.gguf", "no model file"),
        (f"{tmp_path}/none.gguf", "no model file"),
        ("", "empty"),
    ):
        with pytest.raises(FileNotFoundError, match=words):
            pystaged.load(model)
    with pytest.raises(IsADirectoryError, match=r"is a folder; .* pystaged quantize"):
        pystaged.load(tmp_path)
    with pytest.raises(ValueError, match=f"n_ctx must be between 1 and the model's {CONTEXT}, not {CONTEXT + 1}"):
        pystaged.load(path, n_ctx=CONTEXT + 1)
    with pytest.raises(ValueError, match=r"number of threads must be between .* not 257"):
        pystaged.load(path, num_threads=257)


def test_closed_engine(path: Path) -> None:
    engine = pystaged.load(path, report=lambda _: None)
    engine.close()
    engine.close()
    for use in (
        *(lambda: engine.generate(PROMPT), lambda: engine.generate([PROMPT, "a"]), lambda: engine.stream(PROMPT)),
        *(lambda: engine.score(PROMPT), lambda: engine.stream_chat([{"role": "user", "content": PROMPT}])),
    ):
        with engine, pytest.raises(ValueError, match="the engine is closed"):
            use()  # type: ignore[no-untyped-call]


# ---- What one generation leaves for the next ----


@pytest.mark.parametrize("options", OPTIONS[:2], ids=str)
@pytest.mark.parametrize("pieces", [0, 5])
def test_a_closed_stream(engine: Engine, path: Path, pieces: int, options: dict[str, Any]) -> None:
    with engine.stream(PROMPT, max_tokens=40, **options) as stream:
        for _ in range(pieces):
            next(stream)
    with pytest.raises(StopIteration):
        next(stream)
    for prompt in (PROMPT, "her hat ", PROMPT + "the"):
        expected = alone(path, prompt, max_tokens=40, **options).text
        assert engine.generate(prompt, max_tokens=40, **options).text == expected


def interrupt(stream: Stream, when: int) -> None:
    """Press Ctrl-C while the `when`-th piece is being shown."""
    with stream:
        for count, _ in enumerate(stream, 1):
            if count == when:
                raise KeyboardInterrupt


@pytest.mark.parametrize("when", [1, 2, 9])
def test_an_interrupted_generation(engine: Engine, path: Path, monkeypatch: pytest.MonkeyPatch, when: int) -> None:
    calls, tokenizer = itertools.count(1), engine.tokenizer

    def token_bytes(token: int, special: bool = False) -> bytes:
        if next(calls) == when:
            raise KeyboardInterrupt
        return tokenizer.token_bytes(token, special)

    with monkeypatch.context() as patch:
        patch.setattr(Engine, "tokenizer", Changed(tokenizer, token_bytes=token_bytes))
        with pytest.raises(KeyboardInterrupt):
            engine.generate(PROMPT, max_tokens=40, **WARM)
    with pytest.raises(KeyboardInterrupt):
        interrupt(engine.stream(PROMPT, max_tokens=40, **WARM), when)
    result = engine.generate(PROMPT, max_tokens=40, **WARM)
    assert result.text == alone(path, PROMPT, max_tokens=40, **WARM).text
    assert result.stats.reused_tokens > 0


# ---- Prompts and options in other forms ----


def test_options_in_other_forms(engine: Engine) -> None:
    expected = engine.generate(PROMPT, max_tokens=20, temperature=0.5, top_k=20, seed=5)
    sampling = SamplingConfig(temperature=0.5, top_k=20, seed=5)
    assert engine.generate(PROMPT, max_tokens=20, sampling=sampling).tokens == expected.tokens
    numbers: dict[str, Any] = {"temperature": np.float32(0.5), "top_k": np.int32(20), "seed": np.uint64(5)}
    assert engine.generate(PROMPT, max_tokens=np.int64(20), **numbers).tokens == expected.tokens  # type: ignore[arg-type]
    assert expected.seed == 5


def test_a_drawn_seed_is_told(engine: Engine) -> None:
    drawn = [engine.generate(PROMPT, max_tokens=20, temperature=1.0, seed=None) for _ in range(3)]
    assert len({result.seed for result in drawn}) == 3
    for result in drawn:
        again = engine.generate(PROMPT, max_tokens=20, temperature=1.0, seed=result.seed)
        assert again.tokens == result.tokens


def test_generate_takes_what_load_takes(path: Path) -> None:
    with pystaged.load(path, n_ctx=20, num_threads=1, policy=FixedPolicy(1, 1, 1)) as engine:
        expected = engine.generate(PROMPT, max_tokens=500)
    options: dict[str, Any] = {"n_ctx": 20, "num_threads": 1, "policy": FixedPolicy(1, 1, 1)}
    assert pystaged.generate(PROMPT, model=path, max_tokens=500, **options).tokens == expected.tokens
    words = r"there is no option 'n_cxt'; did you mean n_ctx\? The options are draft, .*n_ctx.*max_tokens"
    with pytest.raises(TypeError, match=words):
        pystaged.generate(PROMPT, model=path, n_cxt=20)  # type: ignore[call-arg]
    with pytest.raises(TypeError, match=r"there is no option 'temperature'; the options are draft, .*n_ctx"):
        pystaged.load(path, temperature=1.0)  # type: ignore[call-arg]


def test_results_can_be_pickled_and_copied(engine: Engine) -> None:
    stream = engine.stream(PROMPT, max_tokens=12, **WARM)
    (first, *_), error = stream, DeviceLostError("the device is gone", PROMPT, "text", [1, 2])
    for duplicate in (copy.copy, copy.deepcopy, lambda value: pickle.loads(pickle.dumps(value))):
        result = duplicate(stream.result)
        assert result == stream.result
        assert result.stats.to_dict() == stream.result.stats.to_dict()
        piece = duplicate(first)
        assert isinstance(piece, Piece)
        assert (piece, piece.tokens, piece.stages, piece.path) == (first, first.tokens, first.stages, first.path)
        assert piece.tree.tokens.tolist() == first.tree.tokens.tolist()
        lost = duplicate(error)
        assert (str(lost), lost.prompt, lost.text, lost.tokens) == ("the device is gone", PROMPT, "text", [1, 2])
        assert duplicate(SamplingConfig(0.5, 3, seed=7)) == SamplingConfig(0.5, 3, seed=7)


# ---- Streams that end early ----


def test_what_many_dropped_streams_leave_is_bounded(engine: Engine) -> None:
    streams = [engine.stream(PROMPT, max_tokens=8) for _ in range(12)]
    for stream in streams:
        next(stream)
    del streams, stream
    # Without a stream that is closed, or read to its end.
    next(engine.stream(PROMPT, max_tokens=8))
    assert len(engine._contexts._idle) <= 5


def test_a_stream_that_outlives_its_engine_leaves_nothing(path: Path) -> None:
    def live_decoders() -> list[Context]:
        # Not isinstance(), which asks some objects of other packages for more than their type.
        return [thing for thing in gc.get_objects() if type(thing) is Context]

    before = live_decoders()
    engine = pystaged.load(path)
    stream = engine.stream(PROMPT, max_tokens=8)
    next(stream)
    (context,) = [weakref.ref(decoder) for decoder in live_decoders() if decoder not in before]
    engine.close()
    del stream
    wait_until(lambda: context() is None)


def test_a_dropped_stream_ends_its_text_without_the_collector(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pystaged.decoding.scheduler, "MOST_UNREAD", 4)  # so that the text does not end by itself
    gc.disable()
    try:
        stream = engine.stream(PROMPT, max_tokens=64)
        next(stream)
        text = stream.text
        del stream
        assert text.is_cancelled
        wait_until(lambda: text.is_over)
    finally:
        gc.enable()


def test_a_stream_closed_early_tells_what_there_was(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pystaged.decoding.scheduler, "MOST_UNREAD", 4)  # so that the text does not end meanwhile
    whole = engine.generate(PROMPT, max_tokens=40, **WARM)
    stream = engine.stream(PROMPT, max_tokens=40, **WARM)
    pieces = [next(stream) for _ in range(3)]
    stream.close()
    result = stream.result
    assert result.finish_reason == "cancelled"
    assert result.text.startswith("".join(pieces))  # and what was not read any more
    read = [token for piece in pieces for token in piece.tokens]
    assert read == whole.tokens[: len(read)] == result.tokens[: len(read)]
    assert result.tokens == whole.tokens[: len(result.tokens)]
    assert result.stats.new_tokens == len(result.tokens) == len(result.stages)
    assert result.stats.steps >= 3
    untouched = engine.stream(PROMPT)
    untouched.close()
    assert (untouched.result.text, untouched.result.tokens) == ("", [])


def test_a_running_stream_is_cancelled_from_another_thread(path: Path) -> None:
    policy = HeldPolicy()
    with pystaged.load(path, policy=policy) as engine:
        stream = engine.stream(PROMPT, max_tokens=40)
        pieces: list[Piece] = []
        thread = threading.Thread(target=lambda: pieces.extend(stream))
        thread.start()
        assert policy.reached.wait(600)
        stream.close()
        policy.go_on.set()
        thread.join(600)
        assert not thread.is_alive()
        # The step in hand is the last one.
        assert stream.result.finish_reason == "cancelled"
        assert stream.result.tokens == [token for piece in pieces for token in piece.tokens]
        assert stream.result.stats.steps <= 1
        assert engine.generate(PROMPT, max_tokens=4).tokens == alone(path, PROMPT, max_tokens=4).tokens


def test_the_result_is_there_at_the_end_while_another_thread_closes_the_stream(engine: Engine) -> None:
    stream = engine.stream(PROMPT, max_tokens=1)
    next(stream)
    turn, closing, read = stream._turn, threading.Event(), threading.Event()

    class Turn:
        """After the reader's turn another thread has one, and keeps it until the reader has its result."""

        def __enter__(self) -> None:
            turn.acquire()

        def __exit__(self, *_: object) -> None:
            turn.release()
            thread.start()
            assert closing.wait(600)

        def acquire(self, *, blocking: bool) -> bool:
            return turn.acquire(blocking=blocking)

    def close() -> None:
        with turn:
            closing.set()
            assert read.wait(600)

    thread = threading.Thread(target=close)
    stream._turn = Turn()  # type: ignore[assignment]
    try:
        assert next(stream, None) is None
        assert stream.result.finish_reason == "length"
    finally:
        read.set()
        thread.join(600)


def test_a_stream_of_its_own_engine_closes_it(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    closed: list[Engine] = []
    close = Engine.close

    def count(engine: Engine) -> None:
        closed.append(engine)
        close(engine)

    monkeypatch.setattr(Engine, "close", count)
    list(pystaged.stream(PROMPT, model=path, max_tokens=4))
    assert len(closed) == 1
    with pystaged.stream(PROMPT, model=path, max_tokens=4) as stream:
        next(stream)
    assert len(closed) == 2
    stream = pystaged.stream(PROMPT, model=path, max_tokens=4)
    next(stream)
    del stream
    assert len(closed) == 3
    with pytest.raises(ContextFullError):
        pystaged.stream("." * (CONTEXT + 1), model=path)
    assert len(closed) == 4


def test_after_a_lost_device_nothing_of_it_is_left(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = engine.generate(PROMPT, max_tokens=20)
    lost, begin_tree = list[Any](), Text._begin_tree

    def fail(text: Text) -> None:
        lost.append(text.context)
        if len(lost) > 1:
            raise DeviceError("the device is gone")
        begin_tree(text)

    with monkeypatch.context() as patch:
        patch.setattr(Text, "_begin_tree", fail)
        stream = engine.stream(PROMPT, max_tokens=20)
        first = next(stream)
        with pytest.raises(DeviceLostError, match="the device is gone") as caught:
            list(stream)
    assert (caught.value.prompt, caught.value.text) == (PROMPT, first)
    assert caught.value.tokens == list(first.tokens)
    assert len(lost) == 2
    assert lost[0] not in engine._contexts._idle
    assert engine.generate(PROMPT, max_tokens=20).tokens == expected.tokens


@pytest.mark.parametrize(("options", "error", "words"), table("load_refused"))
def test_what_is_refused_before_loading(options: dict[str, Any], error: str, words: str) -> None:
    with pytest.raises(getattr(builtins, error), match=words):
        pystaged.load("bundled", **options)


def test_a_policy_without_its_members_is_refused_at_loading() -> None:
    with pytest.raises(TypeError, match="children, expand and keep"):
        pystaged.load("bundled", policy=3)  # type: ignore[arg-type]


def test_a_draft_as_large_as_its_target_is_told() -> None:
    told: list[str] = []
    with pystaged.load("bundled", report=told.append) as engine:
        path = engine.file.path
    with pystaged.load(path, draft=path, report=told.append):
        pass
    assert [line for line in told if "as large as the model" in line] == [told[-1]]
