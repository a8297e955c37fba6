"""Generation through the public API: what comes out, in which pieces, when it stops, and what it leaves behind."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from itertools import zip_longest
from pathlib import Path
from typing import Any

import pytest

import pystaged
from pystaged import ContextFullError, Engine, GenerationResult, ModelError, _core
from pystaged.engine import Stream

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


def plain_tokens(path: Path, prompt: str, count: int, **options: Any) -> list[int]:
    """Token by token on a bare session, to the end of text at most."""
    tokenizer, sampling = _core.Tokenizer(str(path)), _core.Sampling(**options)
    session = _core.Session(_core.Model(str(path)))
    tokens = tokenizer.encode(prompt).tolist()
    session.prefill(tokens[:-1])
    found = list[int]()
    while len(found) < count:
        session.evaluate([tokens[-1]], [-1])
        (token,) = session.follow(sampling)[1].tolist()
        session.commit([0])
        if tokenizer.is_end(token):
            break
        found.append(token)
        tokens.append(token)
    return found


def text_of(engine: Engine, tokens: list[int]) -> str:
    return b"".join(map(engine.tokenizer.token_bytes, tokens)).decode("utf-8", errors="replace")


# ---- Results ----


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_result(engine: Engine, path: Path, options: dict[str, Any]) -> None:
    result = engine.generate(PROMPT, max_tokens=60, **options)
    assert isinstance(result, GenerationResult)
    assert result.tokens == plain_tokens(path, PROMPT, 60, **options)
    assert all(type(token) is int for token in result.tokens)
    assert type(result.text) is str
    assert result.text == text_of(engine, result.tokens)
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


def test_house_model(house_target: Path) -> None:
    options: dict[str, Any] = {"max_tokens": 24, "temperature": 0.5, "seed": 2}
    prompt = "def fibonacci(n):\n"
    result = pystaged.generate(prompt, **options)
    assert result.tokens == plain_tokens(house_target, prompt, 24, temperature=0.5, seed=2)
    assert pystaged.generate(prompt, model=str(house_target), **options).text == result.text
    assert pystaged.generate(prompt, model="house", **options).text == result.text
    with pystaged.stream(prompt, **options) as stream:
        assert "".join(stream) == result.text


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_the_three_ways_agree(engine: Engine, path: Path, options: dict[str, Any]) -> None:
    result = engine.generate(PROMPT, max_tokens=30, **options)
    assert pystaged.generate(PROMPT, model=path, max_tokens=30, **options).text == result.text
    with pystaged.stream(PROMPT, model=str(path), max_tokens=30, **options) as stream:
        assert "".join(stream) == result.text
        assert stream.result.tokens == result.tokens


# ---- Pieces ----


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_pieces_join_to_the_text(engine: Engine, options: dict[str, Any]) -> None:
    stream = engine.stream(PROMPT, max_tokens=80, **options)
    pieces = list(stream)
    result = stream.result
    assert "".join(pieces) == "".join(piece.text for piece in pieces) == result.text == text_of(engine, result.tokens)
    assert [token for piece in pieces for token in piece.tokens] == result.tokens
    # No piece holds the beginning of a character whose rest comes later: decoding up to there gives no more than shown.
    shown, bytes_so_far = "", b""
    for piece in pieces:
        shown += piece
        bytes_so_far += b"".join(map(engine.tokenizer.token_bytes, piece.tokens))
        assert bytes_so_far.decode("utf-8", errors="replace").startswith(shown)
        assert (bytes_so_far + b"\x80").decode("utf-8", errors="replace").startswith(shown) or piece is pieces[-1]


def test_the_texts_above_are_torn(engine: Engine) -> None:
    streams = [engine.stream(PROMPT, max_tokens=80, temperature=1.0, seed=seed) for seed in range(8)]
    pieces = [piece for stream in streams for piece in stream]
    text = "".join(pieces)
    assert "\ufffd" in text
    assert any(ord(character) > 127 and character != "\ufffd" for character in text)
    assert any(piece.tokens and not piece for piece in pieces)


def test_result_only_at_the_end(engine: Engine) -> None:
    with engine.stream(PROMPT, max_tokens=8) as stream:
        next(stream)
        with pytest.raises(RuntimeError, match="has not been read to its end"):
            _ = stream.result
        list(stream)
        assert len(stream.result.tokens) == 8
        with pytest.raises(StopIteration):
            next(stream)


# ---- Ends ----


@pytest.mark.parametrize("count", [1, 2, 3, 7, 40])
@pytest.mark.parametrize("options", OPTIONS[:2], ids=str)
def test_max_tokens(engine: Engine, count: int, options: dict[str, Any]) -> None:
    whole = engine.generate(PROMPT, max_tokens=60, **options)
    result = engine.generate(PROMPT, max_tokens=count, **options)
    assert result.tokens == whole.tokens[:count]
    assert len(result.tokens) == count
    assert result.finish_reason == "length"
    assert result.text == text_of(engine, result.tokens)


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_stop_strings_anywhere(engine: Engine, options: dict[str, Any]) -> None:
    whole = engine.generate(PROMPT, max_tokens=60, **options)
    for start in range(0, len(whole.text) - 6, 5):
        for length in (1, 2, 5):
            stop = whole.text[start : start + length]
            result = engine.generate(PROMPT, max_tokens=60, stop=stop, **options)
            assert result.text == whole.text[: whole.text.index(stop)]
            assert result.tokens == whole.tokens[: len(result.tokens)]
            assert result.finish_reason == "stop"
            stream = engine.stream(PROMPT, max_tokens=60, stop=(stop,), **options)
            assert "".join(stream) == result.text
            assert stream.result.tokens == result.tokens


def test_a_stop_string_across_tokens(engine: Engine) -> None:
    whole = engine.generate(PROMPT, max_tokens=40, **WARM)
    words = [engine.tokenizer.token_bytes(token).decode("utf-8", errors="replace") for token in whole.tokens]
    at = next(i for i in range(5, 40) if words[i].isascii() and words[i + 1].isascii())
    stop = words[at] + words[at + 1]
    result = engine.generate(PROMPT, max_tokens=40, stop=stop, **WARM)
    assert result.text == whole.text[: whole.text.index(stop)]
    assert len(result.tokens) <= at + 2
    assert result.finish_reason == "stop"


def test_the_first_of_several_stop_strings(engine: Engine) -> None:
    text = engine.generate(PROMPT, max_tokens=40, **WARM).text
    late, early = text[-4:-1], text[10:13]
    for stop in ((late, early), [early, late, "nowhere in the text"]):
        result = engine.generate(PROMPT, max_tokens=40, stop=stop, **WARM)
        assert result.text == text[: min(text.index(late), text.index(early))]
    result = engine.generate(PROMPT, max_tokens=40, stop="nowhere in the text", **WARM)
    assert (result.text, result.finish_reason) == (text, "length")


def test_a_stop_string_that_only_the_end_completes(engine: Engine) -> None:
    """A torn character becomes a replacement character when no more bytes come; that can be a stop string too."""
    whole = engine.generate(PROMPT, max_tokens=80, **WARM)
    ends = (n for n in range(1, 80) if text_of(engine, whole.tokens[:n]).count("\ufffd") == 1)
    count = next(n for n in ends if text_of(engine, whole.tokens[:n])[-1] == "\ufffd")
    result = engine.generate(PROMPT, max_tokens=count, stop="\ufffd", **WARM)
    assert result.text == text_of(engine, whole.tokens[:count])[:-1]
    assert result.finish_reason == "stop"


def test_end_of_text(engine: Engine) -> None:
    end = engine.tokenizer.num_tokens - 1
    assert engine.tokenizer.is_end(end)
    results = [engine.generate(PROMPT, max_tokens=70, temperature=1.0, seed=seed) for seed in range(30)]
    ended = [result for result in results if result.finish_reason == "stop"]
    assert 0 < len(ended) < len(results)
    for result in ended:
        assert len(result.tokens) < 70
        assert end not in result.tokens
        assert result.text == text_of(engine, result.tokens)
    assert all(len(result.tokens) == 70 for result in results if result.finish_reason == "length")


@pytest.mark.parametrize("options", OPTIONS[:2], ids=str)
def test_full_context(engine: Engine, path: Path, options: dict[str, Any]) -> None:
    result = engine.generate(PROMPT, max_tokens=10_000, **options)
    assert result.finish_reason == "length"
    # The last position's token needs no position of its own.
    assert result.stats.prompt_tokens + len(result.tokens) == CONTEXT + 1
    with pystaged.load(path, n_ctx=20) as short:
        assert (
            short.generate(PROMPT, max_tokens=10_000, **options).tokens
            == result.tokens[: 21 - result.stats.prompt_tokens]
        )


def test_long_prompts(engine: Engine) -> None:
    fits, long = "." * CONTEXT, "." * (CONTEXT + 5)
    assert len(engine.tokenizer.encode(fits)) == CONTEXT
    result = engine.generate(fits)
    assert (len(result.tokens), result.finish_reason) == (1, "length")
    with pytest.raises(ContextFullError, match=rf"\b{CONTEXT + 5} tokens.*\b{CONTEXT}\b"):
        engine.generate(long)
    assert issubclass(ContextFullError, ValueError)
    assert engine.generate(fits).text == result.text


# ---- Refusals ----


def test_prompts_that_are_none(engine: Engine) -> None:
    with pytest.raises(ValueError, match="the prompt is empty"):
        engine.generate("")
    for prompt in (None, 5, b"bytes", ["list"]):
        with pytest.raises(TypeError, match="the prompt must be a string, not"):
            engine.generate(prompt)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"surrogate|(?i:utf-8)"):
        engine.generate("a lone surrogate \ud800")


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"max_tokens": 0}, ValueError, "max_tokens must be at least 1, not 0"),
        ({"max_tokens": -3}, ValueError, "max_tokens must be at least 1"),
        ({"max_tokens": 1.5}, TypeError, "max_tokens must be an integer"),
        ({"max_tokens": True}, TypeError, "max_tokens must be an integer"),
        ({"max_tokens": None}, TypeError, "max_tokens must be an integer"),
        ({"temperature": -1.0}, ValueError, "temperature"),
        ({"top_k": -1}, ValueError, "top_k"),
        ({"top_p": 0.0}, ValueError, "top_p"),
        ({"min_p": 1.0}, ValueError, "min_p"),
        ({"seed": -1}, ValueError, "seed"),
        ({"seed": "1"}, TypeError, "seed"),
        ({"stop": ""}, ValueError, "a stop string must not be empty"),
        ({"stop": ("a", "")}, ValueError, "a stop string must not be empty"),
        ({"stop": b"a"}, TypeError, "stop must be"),
        ({"stop": (1,)}, TypeError, "stop must be"),
        ({"stop": 5}, TypeError, "stop must be"),
        ({"stop": None}, TypeError, "stop must be"),
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


def test_models(tmp_path: Path, path: Path) -> None:
    for model in (tmp_path / "none.gguf", str(tmp_path / "none.gguf"), ""):
        with pytest.raises(FileNotFoundError, match="there is no model file"):
            pystaged.load(model)
    with pytest.raises(IsADirectoryError, match=r"is a folder; .* pystaged quantize"):
        pystaged.load(tmp_path)
    (tmp_path / "bad.gguf").write_text("no model")
    with pytest.raises(ModelError, match=r"bad\.gguf"):
        pystaged.load(tmp_path / "bad.gguf")
    for n_ctx in (-1, CONTEXT + 1):
        with pytest.raises(ValueError, match=f"n_ctx must be between 1 and the model's {CONTEXT}, not {n_ctx}"):
            pystaged.load(path, n_ctx=n_ctx)
    for num_threads in (-1, 257):
        with pytest.raises(ValueError, match=f"number of threads must be between .* not {num_threads}"):
            pystaged.load(path, num_threads=num_threads)


def test_closed_engine(path: Path) -> None:
    engine = pystaged.load(path)
    engine.close()
    engine.close()
    with pytest.raises(ValueError, match="the engine is closed"):
        engine.generate(PROMPT)
    with engine, pytest.raises(ValueError, match="the engine is closed"):
        list(engine.stream(PROMPT))


def test_closing_under_a_stream(path: Path) -> None:
    expected = alone(path, PROMPT, max_tokens=20)
    engine = pystaged.load(path)
    stream = engine.stream(PROMPT, max_tokens=20)
    first = next(stream)
    engine.close()
    assert first + "".join(stream) == expected.text
    with pytest.raises(ValueError, match="the engine is closed"):
        engine.generate(PROMPT)


# ---- Seeds ----


def test_seeds(engine: Engine) -> None:
    texts = [engine.generate(PROMPT, max_tokens=20, temperature=1.0, seed=seed).text for seed in (1, 1, 2, 2**64 - 1)]
    assert texts[0] == texts[1]
    assert len(set(texts)) == 3
    greedy = {engine.generate(PROMPT, max_tokens=20, seed=seed).text for seed in (1, 2)}
    assert len(greedy) == 1


@pytest.mark.parametrize("num_threads", [1, 2, 3])
def test_threads_do_not_matter(path: Path, num_threads: int) -> None:
    with pystaged.load(path, num_threads=num_threads) as engine:
        assert engine.generate(PROMPT, max_tokens=40, **WARM).text == alone(path, PROMPT, max_tokens=40, **WARM).text


# ---- What one generation leaves for the next ----


@pytest.mark.parametrize("options", OPTIONS[:2], ids=str)
@pytest.mark.parametrize("pieces", [0, 1, 5])
def test_a_closed_stream(engine: Engine, path: Path, pieces: int, options: dict[str, Any]) -> None:
    with engine.stream(PROMPT, max_tokens=40, **options) as stream:
        for _ in range(pieces):
            next(stream)
    with pytest.raises(StopIteration):
        next(stream)
    for prompt in (PROMPT, "her hat ", PROMPT + "the"):
        assert (
            engine.generate(prompt, max_tokens=40, **options).text == alone(path, prompt, max_tokens=40, **options).text
        )


def test_a_stream_left_behind(engine: Engine, path: Path) -> None:
    stream = engine.stream(PROMPT, max_tokens=40)
    first = next(stream)
    assert engine.generate(PROMPT, max_tokens=40, **WARM).text == alone(path, PROMPT, max_tokens=40, **WARM).text
    assert first + "".join(stream) == alone(path, PROMPT, max_tokens=40).text


class Interrupting:
    """A tokenizer at whose `when`-th token the user presses Ctrl-C."""

    def __init__(self, tokenizer: _core.Tokenizer, when: int) -> None:
        self._tokenizer, self._left = tokenizer, when

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tokenizer, name)

    def token_bytes(self, token: int) -> bytes:
        self._left -= 1
        if self._left == 0:
            raise KeyboardInterrupt
        return self._tokenizer.token_bytes(token)


def interrupt(stream: Stream, when: int) -> None:
    """Press Ctrl-C while the `when`-th piece is being shown."""
    with stream:
        for count, _ in enumerate(stream, 1):
            if count == when:
                raise KeyboardInterrupt


@pytest.mark.parametrize("when", [1, 2, 9])
def test_an_interrupted_generation(engine: Engine, path: Path, monkeypatch: pytest.MonkeyPatch, when: int) -> None:
    tokenizer = Interrupting(engine.tokenizer, when)
    with monkeypatch.context() as patch:
        patch.setattr(Engine, "tokenizer", tokenizer)
        with pytest.raises(KeyboardInterrupt):
            engine.generate(PROMPT, max_tokens=40, **WARM)
    with pytest.raises(KeyboardInterrupt):
        interrupt(engine.stream(PROMPT, max_tokens=40, **WARM), when)
    result = engine.generate(PROMPT, max_tokens=40, **WARM)
    assert result.text == alone(path, PROMPT, max_tokens=40, **WARM).text
    assert result.stats.reused_tokens > 0


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_reuse_changes_nothing(engine: Engine, path: Path, options: dict[str, Any]) -> None:
    prompts = [PROMPT, PROMPT, PROMPT + "and there", PROMPT[:8], "other words", PROMPT + "and there"]
    for prompt in prompts:
        result = engine.generate(prompt, max_tokens=30, **options)
        expected = alone(path, prompt, max_tokens=30, **options)
        assert (result.text, result.tokens) == (expected.text, expected.tokens)
    again = engine.generate(prompts[-1], max_tokens=30, **options)
    assert again.stats.reused_tokens == again.stats.prompt_tokens - 1 > 0
    continued = engine.generate(prompts[-1] + " once", max_tokens=30, **options)
    assert 0 < continued.stats.reused_tokens < continued.stats.prompt_tokens


def test_two_threads(engine: Engine, path: Path) -> None:
    prompts = [PROMPT, "her hat "]
    expected = [[alone(path, p, max_tokens=50, temperature=0.8, seed=s).text for s in range(5)] for p in prompts]
    found: list[list[str]] = [[], []]

    def work(i: int) -> None:
        for seed in range(5):
            found[i].append(engine.generate(prompts[i], max_tokens=50, temperature=0.8, seed=seed).text)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == expected


def test_streams_take_turns(engine: Engine, path: Path) -> None:
    streams = [engine.stream(PROMPT, max_tokens=25, temperature=1.0, seed=seed) for seed in range(4)]
    rounds = zip_longest(*streams, fillvalue="")
    texts = ["".join(pieces) for pieces in zip(*rounds, strict=True)]
    assert texts == [alone(path, PROMPT, max_tokens=25, temperature=1.0, seed=seed).text for seed in range(4)]
