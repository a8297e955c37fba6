"""How answers are written where nobody says otherwise."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.checkpoints import write_checkpoint
from support.commands import here
from support.convert import convert
from support.server import live

import pystaged
from pystaged import FixedPolicy, SamplingConfig
from pystaged._core import metadata
from pystaged.decoding.readers import Stream
from pystaged.decoding.text import TokenRoles
from pystaged.loading import names
from pystaged.options.aliases import MODELS
from pystaged.options.config import GenerationConfig
from pystaged.options.recommended import described, recommended_sampling, sampling_keys, toy_words
from pystaged.receipts.receipt import Receipt
from pystaged.sampling.repetition import LoopFinder
from pystaged.sampling.thinking import Reasoning

USUAL = {"temperature": 0.8, "top_k": 40, "top_p": 0.95, "min_p": 0.05}
ASKED: Any = [{"role": "user", "content": "a"}]
LOOPING: Any = {"logit_bias": {"65": 100}, "ignore_eos": True, "temperature": 0}


@pytest.fixture(scope="module")
def engine(random_gguf: Callable[..., Path]) -> Any:
    # It drafts whatever that costs.
    with pystaged.load(random_gguf(context=512), policy=FixedPolicy(1, 4, 4, 1), report=lambda _: None) as opened:
        yield opened


# ---- What to take next ----


def test_smollm2_is_said_to_be_a_toy() -> None:
    told = metadata(str(names.resolve("smollm2")))
    for gigabytes, name in ((4, "llama3.2:1b"), (8, "qwen3:4b"), (16, "qwen3 "), (64, "gpt-oss")):
        words = toy_words(told, gigabytes * 2**30)
        assert "a toy to try the speed with" in words
        assert f"pystaged chat {name}" in words
        assert name.strip() in MODELS
    assert toy_words(metadata(str(names.resolve("bundled"))), 2**34) == ""
    with pystaged.load("smollm2") as engine, live(engine) as server:
        assert "a toy" in server.ask("/props")[1]["note"]


# ---- Sampling ----


def test_what_the_makers_recommend() -> None:
    assert recommended_sampling({}) == USUAL
    keys = gguf.Keys.General
    given = {keys.SAMPLING_TEMP: "0.600000", keys.SAMPLING_TOP_K: "20", keys.SAMPLING_TOP_P: "0.90000004"}
    given |= {keys.SAMPLING_MIN_P: "0.000000", keys.SAMPLING_XTC_PROBABILITY: "0.5", keys.SAMPLING_XTC_THRESHOLD: "0.2"}
    given |= {keys.SAMPLING_PENALTY_REPEAT: "1.100000", keys.SAMPLING_PENALTY_LAST_N: "-1"}
    expected = {"temperature": 0.6, "top_k": 20, "top_p": 0.9, "min_p": 0.0, "repeat_penalty": 1.1}
    expected |= {"repeat_last_n": -1, "xtc_probability": 0.5, "xtc_threshold": 0.2}
    assert recommended_sampling(given) == expected
    smollm2 = {"general.basename": "smollm2"}
    assert recommended_sampling(smollm2) == USUAL | {"temperature": 0.2, "top_p": 0.9}
    assert recommended_sampling(smollm2 | {keys.SAMPLING_TEMP: "0.5"})["temperature"] == 0.5


@pytest.mark.parametrize("value", ["nan", "inf", "-1", "1e99", "", "hot", "0x1p3"])
def test_what_is_no_sampling_is_passed_over(value: str) -> None:
    assert recommended_sampling({f"general.sampling.{key}": value for key in ("temp", "top_p", "top_k")}) == USUAL


def test_a_checkpoint_brings_its_own(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "c")
    said = {"temperature": 0.6, "top_k": 20, "top_p": 0.95, "repetition_penalty": 1.05, "min_p": None}
    (folder / "generation_config.json").write_text(json.dumps(said | {"do_sample": True}))
    convert(folder, tmp_path / "m.gguf")
    found = recommended_sampling(metadata(tmp_path / "m.gguf"))
    assert found == {"temperature": 0.6, "top_k": 20, "top_p": 0.95, "min_p": 0.05, "repeat_penalty": 1.05}
    assert sampling_keys({"temperature": True, "top_k": -1, "top_p": "x", "min_p": [1], "top_h": 1}) == {}
    ours = {"xtc_probability": 0.5, "xtc_threshold": 0.1, "repeat_last_n": 64, "repeat_penalty": 2, "temp": 0.1}
    assert sampling_keys(ours) == {}  # no maker writes these names
    (folder / "generation_config.json").write_text("[")
    with pytest.raises(ValueError, match=r"generation_config\.json is damaged"):
        convert(folder, tmp_path / "m.gguf")


def test_a_sampling_in_words() -> None:
    assert described(SamplingConfig(0.2, 40, 0.9, seed=7)) == "temperature 0.2, top-k 40, top-p 0.9"
    assert described(SamplingConfig(1, repeat_penalty=1.5)) == "temperature 1, repeat-penalty 1.5"
    assert described(SamplingConfig(top_k=4)) == "temperature 0: always the likeliest token"


def test_a_request_sets_what_it_names(engine: pystaged.Engine) -> None:
    """The rest stays as recommended, or as the server was told."""
    with live(engine, defaults={"top_k": 7}) as server:
        params = server.ask("/props")[1]["default_generation_settings"]["params"]
        assert params == USUAL | {"top_k": 7, "stop_loops": True, "max_tokens": 512}
        for asked, expected in (
            ({}, USUAL | {"top_k": 7}),
            ({"temperature": 0.3}, USUAL | {"top_k": 7, "temperature": 0.3}),
            ({"temperature": 0}, {"temperature": 0}),
            ({"top_k": 0, "top_p": 1, "min_p": 0, "temperature": 1}, {"temperature": 1}),
        ):
            body = {"messages": ASKED, "max_tokens": 12, "seed": 3} | asked
            text = server.ask("/v1/chat/completions", body)[1]["choices"][0]["message"]["content"]
            assert text == engine.chat(ASKED, max_tokens=12, seed=3, **expected).text  # type: ignore[arg-type]


def test_commands_set_what_is_given(engine: pystaged.Engine, random_gguf: Callable[..., Path]) -> None:
    options = ("--model", random_gguf(context=512), "--max-tokens", "12", "--seed", "3")
    done = here("generate", "--chat", "a", *options, "--top-k", "5")
    expected = engine.chat(ASKED, max_tokens=12, seed=3, **USUAL | {"top_k": 5})  # type: ignore[arg-type]
    assert done.stdout.decode() == f"{expected.text}\n"
    assert "temperature 0.8, top-k 5, top-p 0.95, min-p 0.05, seed 3" in done.stderr.decode()
    done = here("generate", "a", *options)
    assert done.stdout.decode() == f"{engine.generate('a', max_tokens=12).text}\n"


# ---- Loops ----


def is_loop(tokens: list[int]) -> bool:
    """The definition, one token after the other."""
    for span in range(1, 513):
        equal = 0
        while equal + span < len(tokens) and tokens[-1 - equal] == tokens[-1 - equal - span]:
            equal += 1
        if equal and equal + span >= max(3 * span, 128):
            return True
    return False


@settings(max_examples=40)
@given(
    st.lists(st.integers(0, 3), max_size=8), st.lists(st.integers(0, 3), min_size=1, max_size=70), st.integers(0, 300)
)
def test_loops_are_found_where_they_begin(before: list[int], span: list[int], length: int) -> None:
    tokens = before + (span * (length // len(span) + 1))[:length]
    finder = LoopFinder()
    found = next((at for at, token in enumerate(tokens, 1) if finder.push(token)), None)
    assert found == next((at for at in range(1, len(tokens) + 1) if is_loop(tokens[:at])), None)


@pytest.mark.parametrize(("span", "ends"), [(1, 128), (42, 128), (43, 129), (512, 1536), (513, None)])
def test_how_long_a_loop_is(span: int, ends: int | None) -> None:
    finder = LoopFinder()
    assert next((at for at in range(1, 3 * 513 + 1) if finder.push(at % span)), None) == ends


@pytest.mark.parametrize("max_tokens", [400, 128])
def test_a_loop_ends_a_text_in_the_same_place_however_it_is_drafted(engine: pystaged.Engine, max_tokens: int) -> None:
    options: Any = {"logit_bias": {65: 100.0}, "ignore_eos": True, "max_tokens": max_tokens, "stop_loops": True}
    staged, plain = (engine.generate("ab", speculate=speculate, **options) for speculate in (True, False))
    assert (staged.tokens, staged.text, staged.finish_reason) == (plain.tokens, plain.text, "loop")
    assert staged.tokens == [65] * 128
    assert staged.stats.new_tokens == 128
    assert staged.stats.steps < 128
    receipt = Receipt.from_json(staged.receipt.to_json())
    assert receipt == staged.receipt
    assert pystaged.repeat(engine, receipt, speculate=False) is None
    on = engine.generate("ab", **options | {"stop_loops": False})
    assert (len(on.tokens), on.finish_reason) == (max_tokens, "length")
    assert engine.chat(ASKED, **options | {"max_tokens": 200}).finish_reason == "loop"


@pytest.mark.parametrize(
    "form",
    [
        {"json_schema": {"const": [[0] * 8] * 8}},
        {"json_schema": {"type": "array", "items": {"type": "integer"}, "minItems": 100, "maxItems": 100}},
        {"regex": "(ab){200}"},
        {"grammar": 'root ::= "0, "{150}'},
    ],
)
def test_what_a_grammar_demands_is_no_loop(engine: pystaged.Engine, form: dict[str, Any]) -> None:
    ids = engine.tokenizer.encode("0", add_special=False).tolist()
    options: Any = {"stop_loops": True, "logit_bias": {ids[0]: 50.0}, "max_tokens": 1000, **form}
    for result in (engine.generate("ab", **options), engine.chat(ASKED, **options)):
        assert result.finish_reason == "stop"
        if "json_schema" in form:
            assert len(result.json()) in (8, 100)


def test_a_loop_of_reasoning_ends_before_a_grammar_begins(engine: pystaged.Engine) -> None:
    tokenizer = engine.tokenizer
    word = tokenizer.token_bytes(65)
    options: Any = {"logit_bias": {65: 100.0}, "ignore_eos": True}
    for end, finish in ((b"</think>", "loop"), (word * 2, "stop")):
        reasoning = Reasoning(b"<think>", end, (), is_open=True, budget=None)
        config = GenerationConfig(grammar='root ::= "0, "{140}', stop_loops=True, max_tokens=1000, **options)
        sequence = engine.start("ab", config, TokenRoles(reasoning=reasoning))
        result = Stream(sequence).finish()
        assert result.finish_reason == finish
        assert len(result.tokens) == 128 if finish == "loop" else result.text.endswith("0, " * 140)


def test_a_stop_string_comes_before_a_loop(engine: pystaged.Engine) -> None:
    options: Any = {"logit_bias": {65: 100.0}, "ignore_eos": True, "max_tokens": 400, "stop_loops": True}
    word = engine.tokenizer.token_bytes(65).decode()
    result = engine.generate("ab", stop=word * 128, **options)
    assert (result.text, result.finish_reason) == ("", "stop")


def test_servers_say_what_a_loop_is(engine: pystaged.Engine) -> None:
    with live(engine) as server:
        chat = LOOPING | {"messages": ASKED, "max_tokens": 300}
        choice = server.ask("/v1/chat/completions", chat)[1]["choices"][0]
        assert (choice["finish_reason"], choice["stop_reason"]) == ("length", "repetition_detected")
        last = server.events("/v1/chat/completions", chat)[-1]["choices"][0]
        assert (last["finish_reason"], last["stop_reason"]) == ("length", "repetition_detected")
        body = server.ask("/v1/chat/completions", chat | {"stop_loops": False})[1]
        assert (body["usage"]["completion_tokens"], body["choices"][0]["finish_reason"]) == (300, "length")
        assert "stop_reason" not in body["choices"][0]
        body = server.ask("/v1/responses", LOOPING | {"input": "a", "max_output_tokens": 300})[1]
        assert (body["status"], body["usage"]["output_tokens"]) == ("incomplete", 128)
        assert body["incomplete_details"] == {"reason": "max_output_tokens", "stop_reason": "repetition_detected"}
        body = server.ask("/v1/messages", chat)[1]
        assert (body["stop_reason"], body["usage"]["output_tokens"]) == ("max_tokens", 128)
        # Completions go on, unless they are told not to.
        texts = LOOPING | {"prompt": "a", "max_tokens": 300}
        assert server.ask("/v1/completions", texts)[1]["usage"]["completion_tokens"] == 300
        body = server.ask("/completion", texts | {"stop_loops": True})[1]
        assert (body["stop_type"], body["tokens_predicted"]) == ("limit", 128)


@pytest.mark.slow
def test_commands_say_that_an_answer_is_a_loop(random_gguf: Callable[..., Path]) -> None:
    options = ("--model", random_gguf(context=512), "--logit-bias", "65+100", "--ignore-eos", "--max-tokens", "200")
    for command in (("generate", "--chat", "a"), ("chat",)):
        done = here(*command, *options, stdin=b"a")
        assert "ended where it repeats itself; --no-stop-loops lets it go on" in done.stderr.decode()
        assert b"repeats itself" not in here(*command, *options, "--no-stop-loops", stdin=b"a").stderr


# ---- The default model ----


def test_the_default_model(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    monkeypatch.setattr(names, "_smollm2", lambda: Path("smollm2.gguf"))
    assert (names.default_model(said.append), said) == ("smollm2", [])

    def missing() -> Path:
        raise FileNotFoundError

    monkeypatch.setattr(names, "_smollm2", missing)
    assert names.default_model(said.append) == "bundled"
    assert "this is the bundled pair" in said[0]
    with pytest.warns(UserWarning, match="bundled pair"), pystaged.load() as engine:
        assert repr(engine) == "Engine(model='pystaged house target', draft='pystaged house draft')"
