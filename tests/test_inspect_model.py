"""The provider for inspect_ai, without inspect_ai; with it in server/test_suites.py."""

from __future__ import annotations

import asyncio
import hashlib
import json
import sys
from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

import pystaged
from pystaged.chain import Chain
from pystaged.server.errors import ApiError

PROMPTS = [f"What is {i} times {i}?" for i in range(16)]


class Given(SimpleNamespace):
    """An object of inspect_ai, whose members that are not given are None."""

    def __getattr__(self, name: str) -> None:
        return None

    def model_dump(self, include: set[str] | None = None, exclude_none: bool = True) -> dict[str, Any]:
        assert exclude_none
        return {name: value for name, value in vars(self).items() if include is None or name in include}


class Output(Given):
    @classmethod
    def from_content(cls, model: str, content: str, stop_reason: str, error: str) -> Output:
        return cls(model=model, completion=content, stop_reason=stop_reason, error=error)

    @property
    def text(self) -> str:
        return self.choices[0].message.content


class ModelAPI:
    def __init__(self, model_name: str, *_: object) -> None:
        self.model_name = model_name


def said(role: str, text: str = "", *parts: Given, **more: Any) -> Given:
    return Given(role=role, text=text, content_list=[Given(type="text", text=text), *parts], **more)


class Inspect:
    """What the provider needs of inspect_ai: hooks that were registered, and the sample's state."""

    def __init__(self, path: Path) -> None:
        self.hooks: list[Any] = []
        self.state: Given | None = None
        self.made: list[Any] = []
        self.path = path

    def register(self, name: str, description: str) -> Callable[[type[Any]], type[Any]]:
        assert name
        assert description

        def add(kind: type[Any]) -> type[Any]:
            self.hooks.append(kind())
            return kind

        return add

    def model(self, **options: Any) -> Any:
        kind = sys.modules["pystaged.inspect_model"].InspectModel
        self.made.append(kind(str(self.path), None, None, Given(), draft="none", recycle=False, **options))
        return self.made[-1]

    @staticmethod
    def ask(model: Any, *messages: Given, tools: Any = (), choice: Any = "auto", **config: Any) -> Any:
        return asyncio.run(model.generate(messages, tools, choice, Given(**{"max_tokens": 12, **config})))


@pytest.fixture
def inspect(random_gguf: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> Iterator[Inspect]:
    found = Inspect(random_gguf("F32", context=2048))
    names = "ChatCompletionChoice ChatMessageAssistant ContentReasoning ContentText Logprobs ModelUsage StopDetails"
    parts: dict[str, dict[str, Any]] = {
        "inspect_ai.hooks": {"Hooks": object, "hooks": found.register},
        "inspect_ai.model": {
            "ModelAPI": ModelAPI,
            "ModelOutput": Output,
            "modelapi": lambda name: lambda kind: kind if name == "pystaged" else None,
            **dict.fromkeys(names.split(), Given),
        },
        "inspect_ai.solver": {},
        "inspect_ai.solver._task_state": {"sample_state": lambda: found.state},
        "inspect_ai.tool": {"ToolCall": Given, "ToolFunction": type("ToolFunction", (Given,), {})},
    }
    modules = {name: ModuleType(name) for name in ("inspect_ai", *parts)}
    for name, members in parts.items():
        vars(modules[name]).update(members)
        setattr(modules["inspect_ai"], name.split(".")[1], modules[".".join(name.split(".")[:2])])
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.delitem(sys.modules, "pystaged.inspect_model", raising=False)
    import_module("pystaged.inspect_model")
    yield found
    for model in found.made:
        model.close()
    sys.modules.pop("pystaged.inspect_model")


@pytest.fixture
def engine(random_gguf: Callable[..., Path]) -> Iterator[pystaged.Engine]:
    path = random_gguf("F32", context=2048)
    with pystaged.load(path, draft=None, recycle=False, report=lambda _: None) as engine:
        yield engine


def chat(engine: pystaged.Engine, prompt: str, **options: Any) -> Any:
    return engine.chat([{"role": "user", "content": prompt}], max_tokens=12, **options)


def test_texts_and_receipts_are_the_engines_one_by_one_and_all_at_once(
    inspect: Inspect, engine: pystaged.Engine, tmp_path: Path
) -> None:
    assert not inspect.hooks
    alone, together = (inspect.model(receipts=str(tmp_path / name)) for name in ("alone", "together"))
    options = {"temperature": 0.8, "seed": 3, "top_k": 20}
    expected = [chat(engine, prompt, **options) for prompt in PROMPTS]

    async def at_once() -> list[Any]:
        config = Given(max_tokens=12, **options)
        return await asyncio.gather(*(together.generate([said("user", each)], [], "none", config) for each in PROMPTS))

    for found in ([inspect.ask(alone, said("user", each), **options) for each in PROMPTS], asyncio.run(at_once())):
        assert [each.text for each in found] == [each.text for each in expected]
        hashes = [hashlib.sha256(each.receipt.to_json().encode()).hexdigest() for each in expected]
        assert [each.metadata for each in found] == [{"receipts": [each], "seed": 3} for each in hashes]
        usage = found[0].usage
        assert usage.input_tokens + usage.input_tokens_cache_read == expected[0].stats.prompt_tokens
        assert usage.output_tokens == expected[0].stats.new_tokens
    (hook,) = inspect.hooks
    asyncio.run(hook.on_run_end(None))
    chains = [Chain.load(tmp_path / name) for name in ("alone", "together")]
    assert chains[0]
    assert chains[1]
    assert chains[0].sha256 == chains[1].sha256
    assert chains[0].count == len({each.receipt.to_json() for each in expected})


def test_options(inspect: Inspect, engine: pystaged.Engine) -> None:
    model, user = inspect.model(), said("user", PROMPTS[1])
    assert inspect.ask(model, user, seed=None).text == chat(engine, PROMPTS[1]).text
    stop = chat(engine, PROMPTS[1]).text[4:6]
    found = inspect.ask(model, user, stop_seqs=[stop], logprobs=True, top_logprobs=2)
    expected = chat(engine, PROMPTS[1], stop=[stop], logprobs=2)
    assert found.text == expected.text
    assert found.choices[0].stop_reason == "stop"
    logprobs = found.choices[0].logprobs.content
    assert [each["logprob"] for each in logprobs] == [each.logprob for each in expected.logprobs]
    assert [len(each["top_logprobs"]) for each in logprobs] == [2] * len(logprobs)
    biased = inspect.ask(model, user, logit_bias={40: 100.0}, extra_body={"repeat_penalty": 1.5, "ignore_eos": True})
    assert biased.text == chat(engine, PROMPTS[1], logit_bias={40: 100.0}, repeat_penalty=1.5, ignore_eos=True).text
    inspect.state = Given(epoch=3)
    several = inspect.ask(model, user, temperature=1.0, num_choices=2, seed=5)
    texts = [chat(engine, PROMPTS[1], temperature=1.0, seed=seed).text for seed in (9, 10)]
    assert [each.message.content for each in several.choices] == texts
    schema = Given(type="object", properties={"a": {"enum": [1]}}, required=["a"], additionalProperties=False)
    found = inspect.ask(model, user, response_schema=Given(name="A", json_schema=schema), max_tokens=60)
    assert json.loads(found.text) == {"a": 1}


def test_texts_without_receipts_and_their_file(
    inspect: Inspect, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "old").write_text("")
    with pytest.raises(FileExistsError, match="name a new file"):
        inspect.model(receipts=str(tmp_path / "old"))
    with pytest.raises(FileNotFoundError, match="there is no folder"):
        inspect.model(receipts=str(tmp_path / "none" / "chain"))
    model = inspect.model(receipts=str(tmp_path / "chain"))
    monkeypatch.setattr(model._engine.runtime, "_origin", lambda *_: None)  # as with limits of reasoning
    found = inspect.ask(model, said("user", PROMPTS[0]), seed=-1)
    assert found.metadata["receipts"] == [None]
    assert found.text
    assert model._receipts == set()
    inspect.state = Given(epoch=2)
    assert inspect.ask(model, said("user", PROMPTS[0]), seed=-1).metadata["seed"] not in (0, found.metadata["seed"])


def test_tools(inspect: Inspect, engine: pystaged.Engine, tmp_path: Path) -> None:
    model, user = inspect.model(receipts=str(tmp_path / "chain")), said("user", "How is Rome?")
    city = {"type": "object", "properties": {"city": {"enum": ["Rome"]}}, "required": ["city"]}
    city["additionalProperties"] = False
    tools = [
        Given(name=name, description=f"Tells the {name}", parameters=city, options={}) for name in ("news", "time")
    ]
    chosen = sys.modules["inspect_ai.tool"].ToolFunction(name="time")
    first = inspect.ask(model, user, tools=tools, choice=chosen, max_tokens=80)
    (call,) = first.choices[0].message.tool_calls
    assert (call.function, call.arguments, call.parse_error) == ("time", {"city": "Rome"}, None)
    assert first.choices[0].stop_reason == "tool_calls"
    assert inspect.ask(model, user, tools=tools, choice=chosen, max_tokens=80).choices == first.choices
    answer = said("assistant", "Well.", Given(type="reasoning", reasoning="Hm."), tool_calls=[call])
    results = [
        said("tool", "noon", tool_call_id=call.id),
        said("tool", tool_call_id=call.id, error=Given(message="no clock")),
    ]
    last = inspect.ask(model, user, answer, *results, tools=tools)
    receipts = {hashlib.sha256(each.encode()).hexdigest(): json.loads(each) for each in model._receipts}
    prompt = engine.tokenizer.decode(receipts[last.metadata["receipts"][0]]["prompt"]["tokens"], special=True)
    for words in ("Tells the news", "Well.\n<tool_call>\n{", '"city": "Rome"', "\nnoon\n<", "\nError: no clock\n<"):
        assert words in prompt
    read = import_module("pystaged.inspect_model")._call
    for wrong in ("[1]", '{"a'):
        call = read("k", "f", wrong)
        assert call.arguments == {}
        assert call.parse_error.endswith(wrong)


def test_what_cannot_be_answered(inspect: Inspect) -> None:
    model = inspect.model()
    found = inspect.ask(model, said("user", "long " * 3000))
    assert found.stop_reason == "model_length"
    assert found.error.endswith("tokens do not fit into -M n_ctx=2048")
    with pytest.raises(ValueError, match="read text alone, but a message has content of type image"):
        inspect.ask(model, said("user", "What is this?", Given(type="image")))
    with pytest.raises(ApiError, match="top_logprobs needs logprobs"):
        inspect.ask(model, said("user", "Hello"), top_logprobs=3)
    assert asyncio.run(model.count_text_tokens("Hello")) == len(asyncio.run(model.tokenize("Hello"))) > 0
    model.close()
    with pytest.raises(ApiError, match="closed"):
        inspect.ask(model, said("user", "Hello"))
