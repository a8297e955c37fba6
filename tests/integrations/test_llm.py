"""Models for the program and library `llm`: the same texts as the engine's, and nothing loaded before it is used."""

from __future__ import annotations

import asyncio
import gc
import json
import shutil
import subprocess
import sys
import weakref
from collections.abc import Callable, Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

import llm
import pytest
from llm.parts import AttachmentPart, Message, ReasoningPart, TextPart
from pydantic import ValidationError
from support.commands import run_python
from support.libraries import of_llama_cpp
from support.paths import table
from support.scheduling import wait_until

import pystaged
from pystaged import Engine
from pystaged.integrations import llm as llm_plugin
from pystaged.integrations.llm import Pystaged
from pystaged.loading import cache
from pystaged.options.config import TextOptions

NAME = "test/tiny:q8_0"
QUESTIONS = ["Name three colours.", "Which of them is warm?"]
# As the program does, but with this plugin alone, whether or not it is installed.
PROGRAM = """
import sys
from llm.plugins import pm
import pystaged.integrations.llm
pm.register(pystaged.integrations.llm, "pystaged")
from llm.cli import cli
try:
    cli(sys.argv[1:], standalone_mode={standalone})
finally:
    {after}
"""
LOADED = """
maps = open("/proc/self/maps").read() if sys.platform == "linux" else ""
names = ("llama_cpp", "pystaged._core", "pystaged._llama", "pystaged.engine")
print([name for name in names if name in sys.modules], "libllama" in maps, file=sys.stderr)
"""


@pytest.fixture(scope="module", autouse=True)
def model_file(random_gguf: Callable[..., Path]) -> Iterator[Path]:
    """A model in the cache, and no engine left open."""
    path = cache.folder() / "test" / "tiny" / "tiny-q8_0.gguf"
    path.parent.mkdir(parents=True)
    shutil.copy(random_gguf("Q8_0", context=512), path)
    yield path
    for _, loaded in llm_plugin._engines.values():
        loaded.close()
    llm_plugin._engines.clear()
    shutil.rmtree(path.parent.parent)


@pytest.fixture(autouse=True)
def _greedy(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is recommended is what Engine.chat does by itself."""
    monkeypatch.setattr(Engine, "recommended_sampling", {"temperature": 0.0})


@pytest.fixture(scope="module")
def engine(model_file: Path) -> Iterator[Engine]:
    with pystaged.load(model_file, report=lambda _: None) as engine:
        yield engine


@pytest.fixture(scope="module")
def model() -> Pystaged:
    return Pystaged(NAME)


def run(folder: Path, *arguments: str, after: str = "pass", **environment: str) -> subprocess.CompletedProcess[str]:
    """The program, its settings and logs in a folder."""
    code = PROGRAM.format(standalone=after == "pass", after=after.strip().replace("\n", "\n    "))
    return run_python(code, *arguments, **{"LLM_USER_PATH": str(folder), "LLM_LOAD_PLUGINS": ""} | environment)


def asked(*contents: str, system: str = "") -> list[dict[str, Any]]:
    first = [{"role": "system", "content": system}] if system else []
    return [*first, *({"role": "user", "content": content} for content in contents)]


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize(
    "options", [{}, {"temperature": 0.8, "top_k": 50, "seed": 3}, {"speculate": False}], ids=["greedy", "T", "plain"]
)
def test_the_text_is_the_engines(engine: Engine, model: Pystaged, stream: bool, options: dict[str, Any]) -> None:
    response = model.prompt(QUESTIONS[0], stream=stream, max_tokens=24, **options)
    pieces = list(response)
    result = engine.chat(asked(QUESTIONS[0]), max_tokens=24, **options)
    assert "".join(pieces) == response.text() == result.text
    assert len(pieces) > 2
    assert response.usage() == llm.Usage(result.stats.prompt_tokens, 24, response.usage().details)
    told = response.json()
    assert told is not None
    assert told["finish_reason"] == "length"
    assert told["seed"] == options.get("seed", told["seed"])
    json.dumps(told)


def test_system_stop_and_thinking_reach_the_engine(engine: Engine, model: Pystaged) -> None:
    whole = engine.chat(asked("Hello", system="Be brief."), max_tokens=24).text
    stop = whole[5:7]
    response = model.prompt("Hello", system="Be brief.", max_tokens=24, stop=stop, think=False)
    assert response.text() == whole[: whole.index(stop)]
    assert model.prompt("Hello", system="Be brief.", max_tokens=24, stop=["nowhere", stop]).text() == response.text()
    prompt = llm.Prompt("Hello", model, options=llm_plugin.ModelOptions(think=False))
    assert llm_plugin._arguments(engine, prompt)["template_options"] == {"enable_thinking": False}


def test_a_conversation_goes_on_as_the_engines(engine: Engine, model: Pystaged) -> None:
    first = engine.chat(asked(QUESTIONS[0], system="S"), max_tokens=24)
    second = engine.chat([*asked(QUESTIONS[0], system="S"), first.message, *asked(QUESTIONS[1])], max_tokens=24)
    conversation = model.conversation()
    assert conversation.prompt(QUESTIONS[0], system="S", max_tokens=24).text() == first.text
    response = conversation.prompt(QUESTIONS[1], max_tokens=24)
    assert response.text() == second.text
    # The very tokens of the first answer were in the second prompt, and none of them was read again.
    usage = response.usage()
    assert usage.input == second.stats.prompt_tokens
    assert usage.details is not None
    assert usage.details["reused_tokens"] >= first.stats.prompt_tokens + len(first.tokens) - 1


def test_a_response_that_was_kept_goes_on(model: Pystaged) -> None:
    response = model.prompt(QUESTIONS[0], max_tokens=24)
    response.text()
    kept = json.loads(json.dumps(response.to_dict()))
    again = llm.Response.from_dict(kept, model=model)
    following = [each.reply(QUESTIONS[1], max_tokens=16) for each in (response, again)]
    assert following[0].text() == following[1].text()
    assert following[0].usage().input == following[1].usage().input


def test_tokens_of_another_vocabulary_are_not_taken(engine: Engine, model: Pystaged) -> None:
    def spelled(text: str, vocabulary: str) -> TextPart:
        return TextPart(text, provider_metadata={"pystaged": {"vocabulary": vocabulary, "tokens": [10**6]}})

    # Nor is a question taken for an answer.
    question = Message("user", [spelled("Hello", engine.tokenizer.fingerprint)])
    messages = [question, Message("assistant", [ReasoningPart("Hm."), spelled("Red", "another")])]
    plain = engine.chat([*asked("Hello"), {"role": "assistant", "content": "Red"}, *asked("Go on")], max_tokens=16)
    assert model.prompt("Go on", messages=messages, max_tokens=16).text() == plain.text


@pytest.mark.parametrize(
    "ours",
    [None, [], {}, *({"vocabulary": "", "tokens": tokens} for tokens in (None, [10**6], [-1], ["a"], [True], 5))],
    ids=str,
)
def test_what_was_kept_with_an_answer_may_be_anything(engine: Engine, model: Pystaged, ours: Any) -> None:
    if ours:
        ours["vocabulary"] = engine.tokenizer.fingerprint
    answer = Message("assistant", [TextPart("Red", provider_metadata={"pystaged": ours})])
    plain = engine.chat([*asked("Hello"), {"role": "assistant", "content": "Red"}, *asked("Go on")], max_tokens=4)
    messages = [Message("user", [TextPart("Hello")]), answer]
    assert model.prompt("Go on", messages=messages, max_tokens=4).text() == plain.text


def test_an_engine_is_freed_after_its_last_text(engine: Engine, model: Pystaged) -> None:
    expected = engine.chat(asked("Hello"), max_tokens=24).text
    first = iter(model.prompt("Hello", max_tokens=24))
    text = next(first)
    old = weakref.ref(llm_plugin._engines[NAME][1])
    model.prompt("Hello", max_tokens=1, temperature=1).text()
    assert llm_plugin._engines[NAME][1] is old()
    assert model.prompt("Hello", max_tokens=24, n_ctx=128).text() == expected
    assert llm_plugin._engines[NAME][1].n_ctx == 128
    assert old() is not None
    assert text + "".join(first) == expected
    del first
    wait_until(lambda: gc.collect() >= 0 and old() is None)
    # So is one of a response that nobody reads on.
    first = iter(model.prompt("Hello", max_tokens=24, n_ctx=128))
    next(first)
    old = weakref.ref(llm_plugin._engines[NAME][1])
    model.prompt("Hello", max_tokens=1).text()
    assert old() is not None
    first.close()  # type: ignore[attr-defined]
    del first
    wait_until(lambda: gc.collect() >= 0 and old() is None)


def test_two_ways_to_load_at_once(engine: Engine) -> None:
    async def both() -> list[str]:
        model = llm_plugin.AsyncPystaged(NAME)
        responses = [model.prompt("Hello", max_tokens=24, n_ctx=n_ctx) for n_ctx in (128, 200)]
        return await asyncio.gather(*(response.text() for response in responses))

    assert asyncio.run(both()) == [engine.chat(asked("Hello"), max_tokens=24).text] * 2
    assert len(llm_plugin._engines) == 1


def test_asynchronously(model: Pystaged) -> None:
    async def converse() -> list[str]:
        conversation = llm_plugin.AsyncPystaged(NAME).conversation()
        return [await conversation.prompt(question, max_tokens=16, seed=1).text() for question in QUESTIONS]

    async def both() -> list[list[str]]:
        return await asyncio.gather(converse(), converse())

    conversation = model.conversation()
    alone = [conversation.prompt(question, max_tokens=16, seed=1).text() for question in QUESTIONS]
    assert asyncio.run(both()) == [alone, alone]


def test_every_option_of_a_text_is_offered() -> None:
    # llm has schemas of its own; the others are no values, or have no place.
    left_out = {"json_schema", "logprobs", "prediction", "progress", "reuse", "sampling"}
    left_out |= {"prompt_logprobs", "prompt_logprobs_start"}
    assert TextOptions.__annotations__.keys() - left_out <= llm_plugin.ModelOptions.model_fields.keys()


@pytest.mark.parametrize(("options", "message"), table("llm_refused"), ids=str)
def test_options_that_are_none(model: Pystaged, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message) as refused:
        model.prompt("Hello", **options)
    assert "Value error" not in str(refused.value)


def test_a_bias_comes_as_json(engine: Engine, model: Pystaged) -> None:
    first = engine.chat(asked("Hello"), max_tokens=1).tokens[0]
    texts = [model.prompt("Hello", max_tokens=8, logit_bias=bias).text() for bias in ({first: -100}, None)]
    assert texts[0] == engine.chat(asked("Hello"), max_tokens=8, logit_bias={first: -100}).text != texts[1]
    options = llm_plugin.ModelOptions(logit_bias='{"e": -100}')
    assert options.of_text() == {"logit_bias": {"e": -100.0}}
    # Keys of JSON are texts.
    options = llm_plugin.ModelOptions(logit_bias=f'{{"{first}": -100, "e": 1}}')
    assert options.of_text() == {"logit_bias": {first: -100.0, "e": 1.0}}


def test_schemas_and_expressions(engine: Engine, model: Pystaged) -> None:
    schema = {"type": "object", "properties": {"age": {"enum": [7, 8]}}, "required": ["age"]}
    response = model.prompt("How old?", schema=schema, max_tokens=64)
    assert response.text() == engine.chat(asked("How old?"), json_schema=schema, max_tokens=64).text
    assert json.loads(response.text())["age"] in (7, 8)
    assert model.prompt("How old?", regex="[78] years", max_tokens=64).text() in ("7 years", "8 years")
    with pytest.raises(llm.ModelError, match="regex"):
        model.prompt("How old?", schema=schema, regex="[78]").text()


def test_answers_are_sampled_as_recommended(engine: Engine, model: Pystaged, monkeypatch: pytest.MonkeyPatch) -> None:
    usual: Any = {"temperature": 0.7, "top_k": 5, "top_p": 0.9}
    monkeypatch.setattr(Engine, "recommended_sampling", usual)
    response = model.prompt("Hello", max_tokens=24, top_k=9)
    seed = response.json()["seed"]  # type: ignore[index]
    assert response.text() == engine.chat(asked("Hello"), max_tokens=24, seed=seed, **usual | {"top_k": 9}).text
    assert model.prompt("Hello", max_tokens=1).json()["seed"] != seed  # type: ignore[index]


def test_what_is_wrong_is_an_error_of_llms(model: Pystaged, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(llm.ModelError, match="there is no model file nonsense"):
        Pystaged("nonsense").prompt("Hello").text()
    with pytest.raises(llm.ModelError, match="context"):
        model.prompt("Hello" * 1000).text()
    with pytest.raises(llm.ModelError, match="there are no messages"):
        model.prompt("").text()
    with pytest.raises(llm.ModelError, match="role 'user' holds a AttachmentPart, which is no text"):
        model.prompt(messages=[Message("user", [AttachmentPart(llm.Attachment(content=b"GIF89a"))])]).text()
    monkeypatch.setitem(sys.modules, "llm.parts", None)
    with pytest.raises(llm.ModelError, match=r"needs llm 0\.32 or later"):
        model.prompt("Hello").text()


@pytest.mark.slow
def test_listing_loads_nothing_that_computes(tmp_path: Path) -> None:
    for arguments in (["--help"], ["models", "list", "--options"]):
        done = run(tmp_path, *arguments, after=LOADED, LLAMA_CPP_LIB_PATH="/opt/llama")
        assert done.returncode == 0, done.stderr
        assert done.stderr.splitlines()[-1] == "[] False"
    assert "Pystaged: pystaged/bundled\n" in done.stdout
    assert f"Pystaged: pystaged/{NAME}\n" in done.stdout
    assert "min_p: float" in done.stdout
    assert "AsyncPystaged (async): pystaged/bundled\n" in run(tmp_path, "models", "list", "--async").stdout


def test_listing_imports_no_numpy_of_ours() -> None:
    """sqlite-utils, which `llm` is built on, imports it where it is installed; we do not."""
    code = """
import sys
from pystaged.loading import cache, names
cache.files()
print([name for name in ("numpy", "gguf", "jinja2", "pystaged._core") if name in sys.modules])
"""
    assert run_python(code).stdout == "[]\n"


@pytest.mark.slow
def test_the_program(tmp_path: Path, engine: Engine) -> None:
    first = engine.chat(asked(QUESTIONS[0], system="S"), max_tokens=24)
    second = engine.chat([*asked(QUESTIONS[0], system="S"), first.message, *asked(QUESTIONS[1])], max_tokens=8)
    greedy = ("-o", "temperature", "0")
    done = run(tmp_path, "-m", f"pystaged/{NAME}", "-o", "max_tokens", "24", *greedy, "--system", "S", QUESTIONS[0])
    assert (done.returncode, done.stdout) == (0, f"{first.text}\n"), done.stderr
    done = run(tmp_path, "-c", "-o", "max_tokens", "8", *greedy, "-u", QUESTIONS[1])
    assert (done.returncode, done.stdout) == (0, f"{second.text}\n"), done.stderr
    # Nor has a process that ended forgotten the tokens.
    assert f"{second.stats.prompt_tokens} input, 8 output" in done.stderr


@of_llama_cpp
@pytest.mark.slow
def test_where_ours_cannot_run_llm_can(tmp_path: Path) -> None:
    done = run(tmp_path, "-m", "pystaged/bundled", "Hello", LLAMA_CPP_LIB_PATH="/opt/llama")
    assert done.returncode == 1
    assert done.stderr.startswith("Error: LLAMA_CPP_LIB_PATH is set to /opt/llama")


@pytest.mark.slow
def test_llm_finds_the_plugin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    try:
        metadata.distribution("pystaged")
    except metadata.PackageNotFoundError:
        pytest.skip("pystaged is not installed")
    monkeypatch.chdir(tmp_path)
    code = "from llm.cli import cli; cli(['models', 'list'])"
    done = run_python(code, LLM_USER_PATH=str(tmp_path), LLM_LOAD_PLUGINS="pystaged")
    assert "Pystaged: pystaged/bundled\n" in done.stdout
