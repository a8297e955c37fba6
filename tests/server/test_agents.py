"""Sessions as Codex, Claude Code and opencode send them, by their public formats: every request gets an answer, and the
prompt has each message, call and result once, in its place."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from itertools import product
from typing import Any, NamedTuple

import pytest
from support.chat import write_chat
from support.conversations import TEMPLATES
from support.server import live

import pystaged
from pystaged.chat.format import ChatFormat
from pystaged.engine import Engine

MARKS = ["<|im_start|>", "<|im_end|>", "<tool_call>", "</tool_call>", "[TOOL_CALLS]", "<|end|>", "<|call|>", '<|"|>']
NAMES = ("qwen3", "qwen3.5", "llama3", "gpt-oss", "gemma4", "mistral", "granite4", "lfm2.5", "gemma3", "phi3")
LIMIT = {"anyOf": [{"type": "integer", "minimum": 0, "maximum": 2**53 - 1}, {"type": "null"}]}
SCHEMA: dict[str, Any] = {"$schema": "https://json-schema.org/draft/2020-12/schema", "type": "object"}
SCHEMA |= {"properties": {"path": {"type": "string", "description": "The file"}, "limit": LIMIT}}
SCHEMA |= {"required": ["path"], "additionalProperties": False}


class Called(NamedTuple):
    """A call: its id, the path that it reads, and its result; arguments that were cut, or None for whole ones."""

    key: str
    path: str
    result: str | None
    cut: str | None = None

    @property
    def arguments(self) -> str:
        return json.dumps({"path": self.path, "limit": None}) if self.cut is None else self.cut


class Turn(NamedTuple):
    """What the user says, what the model answers, and the order of its results."""

    asked: str
    said: str = ""
    thought: str = ""
    calls: tuple[Called, ...] = ()
    order: tuple[int, ...] = ()
    reminder: str = ""  # of the client, behind the results
    then: str = ""  # the answer after the results


def reads(number: int, *keys: str) -> tuple[Called, ...]:
    """Calls of a turn, with these ids, each of a path of its own."""
    return tuple(Called(key, f"path{number}{i}", f"result{number}{i}") for i, key in enumerate(keys))


SESSION = [
    Turn("ask0", "say0", calls=reads(0, "call_1"), then="then0"),
    Turn("ask1", calls=reads(1, "call_2", "call_3"), order=(1, 0), then="then1"),
    Turn("ask2", calls=(Called("call_4", "path2", "result2", '{"path": "path2'),)),  # cut at the limit
    Turn("ask3", thought="think3", calls=reads(3, "call_1"), then="then3"),  # an id again
    Turn("ask4", "say4"),
    Turn("ask5", "say5", calls=reads(5, "call_5", "call_5"), then="then5"),
    Turn("ask6", calls=(*reads(6, "call_6"), Called("call_7", "path61", None)), reminder="remind6"),
    Turn("ask7", calls=reads(7, "call_8", "call_9", "call_10"), order=(2, 0, 1)),
    Turn("ask8", calls=reads(8, "", ""), reminder="remind8"),
    Turn("ask9"),
]
Client = Callable[[list[Turn]], tuple[str, dict[str, Any]]]


def words(turns: list[Turn], name: str) -> list[str]:
    """What the prompt must have, in this order."""
    found: list[str] = []
    for turn in turns:
        paths, given = [call.path for call in turn.calls], [call.result or "" for call in turn.calls]
        said = [] if turn.calls and name in ("llama3", "mistral") else [turn.said]  # whose templates leave it out
        if name in ("llama3", "gpt-oss"):  # one call at a time
            paths, given = [], [word for both in zip(paths, given, strict=True) for word in both]
        beside = paths + said if name == "gemma4" else said + paths
        found += [turn.asked, *beside, *given, turn.reminder, turn.then]
    return [word for word in found if word]


def results(turn: Turn) -> list[Called]:
    told = [turn.calls[i] for i in turn.order] or list(turn.calls)
    return [call for call in told if call.result is not None]


def codex(turns: list[Turn]) -> tuple[str, dict[str, Any]]:
    def message(role: str, text: str, kind: str = "input_text") -> dict[str, Any]:
        return {"type": "message", "role": role, "content": [{"type": kind, "text": text}]}

    items = [message("developer", "<permissions> sandboxed"), message("user", "<environment_context> cwd")]
    for number, turn in enumerate(turns):
        items.append(message("user", turn.asked))
        if turn.thought:
            thought = {"type": "reasoning", "id": f"rs_{number}", "content": None, "encrypted_content": "x"}
            items.append(thought | {"summary": [{"type": "summary_text", "text": turn.thought}]})
        if turn.said:
            items.append(message("assistant", turn.said, "output_text"))
        for call in turn.calls:
            function = {"type": "function_call", "name": "shell", "arguments": call.arguments}
            items.append(function | {"call_id": call.key, "id": "fc_1"})
        items += [{"type": "web_search_call", "id": "ws_1", "status": "completed"}] if turn.calls else []
        for call in results(turn):
            items.append({"type": "function_call_output", "call_id": call.key, "output": call.result})
        items += [message("user", turn.reminder)] if turn.reminder else []
        items += [message("assistant", turn.then, "output_text")] if turn.then else []
    shell = {"type": "function", "name": "shell", "description": "Runs.", "strict": False, "parameters": SCHEMA}
    syntax = {"type": "grammar", "syntax": "lark", "definition": 'start: "x"'}
    patch = {"type": "custom", "name": "apply_patch", "description": "Edits.", "format": syntax}
    plan = {"type": "function", "name": "update_plan", "parameters": {}}
    body: dict[str, Any] = {"model": "gpt-5-codex", "instructions": "You are Codex.", "input": items}
    body |= {"tools": [shell, patch, plan, {"type": "web_search"}], "tool_choice": "auto", "parallel_tool_calls": True}
    body |= {"reasoning": {"effort": "medium", "summary": "auto"}, "include": ["reasoning.encrypted_content"]}
    body |= {"store": False, "prompt_cache_key": "session", "text": {"verbosity": "medium"}, "max_output_tokens": 1}
    return "/v1/responses", body


def claude_code(turns: list[Turn]) -> tuple[str, dict[str, Any]]:
    messages: list[dict[str, Any]] = []
    behind: list[dict[str, Any]] = []  # results, which the next message of the user begins with

    def user(text: str) -> None:
        nonlocal behind
        blocks = [*behind, {"type": "text", "text": text, "cache_control": {"type": "ephemeral"}}]
        messages.append({"role": "user", "content": blocks if behind or len(messages) % 2 else text})
        behind = []

    for turn in turns:
        user(turn.asked)
        if not messages[1:]:
            messages.append({"role": "system", "content": "reminders of the system"})
        blocks = [{"type": "thinking", "thinking": turn.thought, "signature": "x"}] if turn.thought else []
        blocks += [{"type": "redacted_thinking", "data": "x"}] if turn.thought else []
        blocks += [{"type": "text", "text": turn.said}] if turn.said else []
        for call in turn.calls:
            given = {"path": call.path} if call.cut else json.loads(call.arguments)  # as far as it could be read
            blocks.append({"type": "tool_use", "id": call.key, "name": "Read", "input": given})
        messages += [{"role": "assistant", "content": blocks}] if blocks else []
        for call in results(turn):
            told = [{"type": "text", "text": call.result}]
            result = {"type": "tool_result", "tool_use_id": call.key, "content": told}
            behind.append(result | {"is_error": bool(call.cut)})
        if turn.reminder:
            user(turn.reminder)
        elif behind and (turn.then or turn is turns[-1]):
            messages.append({"role": "user", "content": behind})
            behind = []
        messages += [{"role": "assistant", "content": turn.then}] if turn.then else []
    header = "x-anthropic-billing-header: cc_version=2.1; cch=1a2b3;"
    system = {"type": "text", "text": "You are Claude Code.", "cache_control": {"type": "ephemeral"}}
    body: dict[str, Any] = {"model": "claude-opus-4-5", "max_tokens": 1, "messages": messages}
    body |= {"system": [{"type": "text", "text": header}, system], "thinking": {"type": "adaptive"}}
    body["tools"] = [{"name": "Read", "input_schema": SCHEMA}, {"type": "web_search_20250305", "name": "web_search"}]
    body["context_management"] = {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]}
    return "/v1/messages?beta=true", body | {"metadata": {"user_id": "user_1"}, "output_config": {"effort": "medium"}}


def opencode(turns: list[Turn]) -> tuple[str, dict[str, Any]]:
    messages: list[dict[str, Any]] = [{"role": "system", "content": text} for text in ("You are opencode.", "More.")]
    for turn in turns:
        messages.append({"role": "user", "content": [{"type": "text", "text": turn.asked}]})
        answer: dict[str, Any] = {"role": "assistant", "content": turn.said, "tool_calls": []}
        for call in turn.calls:
            function = {"name": "read", "arguments": call.arguments}
            answer["tool_calls"].append({"id": call.key, "type": "function", "function": function})
        answer |= {"reasoning_content": turn.thought} if turn.thought else {}
        messages += [answer] if turn.said or turn.calls else []
        messages += [{"role": "tool", "tool_call_id": call.key, "content": call.result} for call in results(turn)]
        messages += [{"role": "user", "content": turn.reminder}] if turn.reminder else []
        messages += [{"role": "assistant", "content": turn.then}] if turn.then else []
    read = {"type": "function", "function": {"name": "read", "parameters": SCHEMA}}
    body = {"model": "local", "max_tokens": 1, "temperature": 0, "messages": messages, "reasoning_effort": "medium"}
    body |= {"tools": [read, {"type": "unknown"}], "tool_choice": "auto", "stream_options": {"include_usage": True}}
    return "/v1/chat/completions", body


def requests() -> Iterator[list[Turn]]:
    """The turns that each request of a session has: up to a question, or up to results."""
    for number, turn in enumerate(SESSION):
        yield [*SESSION[:number], Turn(turn.asked)]
        if turn.calls:
            yield [*SESSION[:number], turn._replace(then="", reminder="")]


@pytest.fixture(scope="module")
def engines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], Engine]]:
    """A function that loads a model with a template."""
    opened: dict[str, Engine] = {}

    def engine(name: str) -> Engine:
        if name not in opened:
            path = tmp_path_factory.mktemp("model") / "model.gguf"
            write_chat(path, TEMPLATES[name], MARKS, width=32, heads=2, layers=1, context=16384)
            opened[name] = pystaged.load(path, recycle=False, n_ctx=16384, report=lambda _: None)
        return opened[name]

    yield engine
    for each in opened.values():
        each.close()


@pytest.mark.parametrize("client", [codex, claude_code, opencode])
@pytest.mark.parametrize("name", NAMES)
def test_ten_turns(
    client: Client, name: str, engines: Callable[[str], Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts: list[str] = []
    encode = ChatFormat.encode

    def recorded(self: ChatFormat, messages: Any, **options: Any) -> Any:
        prompts.append(self.render(messages, **options))
        return encode(self, messages, **options)

    monkeypatch.setattr(ChatFormat, "encode", recorded)
    with live(engines(name)) as server:
        for number, (turns, streams) in enumerate(product(requests(), (False, True))):
            path, body = client(turns)
            response = server.send("POST", path, body | {"stream": streams})
            text = response.read().decode()
            assert response.status == 200, text
            assert '"error":{' not in text.replace(" ", "")
            assert (len(prompts), prompts[-1]) == (number + 1, prompts[number - number % 2])
            told = words(turns, name)
            assert [word for word in told if prompts[-1].count(word) != 1] == [], prompts[-1]
            assert sorted(told, key=prompts[-1].index) == told, prompts[-1]
            if not (name == "mistral" and turns[-1].calls):  # which has its system message in a last question only
                assert prompts[-1].count("reminders of the system") == (client is claude_code)


def test_the_prompt_of_a_request(engines: Callable[[str], Engine]) -> None:
    engine = engines("qwen3")
    _, body = opencode(SESSION)
    with live(engine) as server:
        status, answer = server.ask("/apply-template", body | {"chat_template_kwargs": {"enable_thinking": False}})
        assert status == 200, answer
        options = {"tools": body["tools"][:1], "template_options": {"enable_thinking": False}}
        assert answer == {"prompt": engine.chat_format.render(body["messages"], **options)}
        tokens = server.ask("/tokenize", {"content": answer["prompt"]})[1]["tokens"]
        assert tokens == engine.chat_format.encode(body["messages"], **options).tolist()
        assert server.ask("/apply-template", {"messages": []})[0] == 400


def test_all_reasoning_of_gpt_oss_is_told(engines: Callable[[str], Engine]) -> None:
    parts = [("analysis", "One. "), ("commentary", "I look. "), ("analysis", "Two."), ("final", "Four")]
    answer = "<|end|><|start|>assistant".join(f"<|channel|>{channel}<|message|>{said}" for channel, said in parts)
    with live(engines("gpt-oss")) as server:
        body = {"messages": [{"role": "user", "content": "Hello"}], "grammar": f"root ::= {json.dumps(answer)}"}
        message = server.ask("/v1/chat/completions", body)[1]["choices"][0]["message"]
    assert (message["reasoning_content"], message["content"]) == ("One. Two.", "I look. Four")
