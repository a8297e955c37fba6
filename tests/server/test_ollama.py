"""Ollama's interface; its own client is tried in test_suites.py."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from gguf import GGUFWriter
from support.random_models import RandomModel, add_vocabulary, write
from support.server import NAME, Server, live

import pystaged
from pystaged.engine import Engine
from pystaged.server import tokens

QWEN3 = (Path(__file__).parents[1] / "chat" / "templates" / "qwen3.jinja").read_text("utf-8")
MARKS = ["<|im_start|>", "<|im_end|>", "<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"]
ASKED: Any = [{"role": "user", "content": "Hello"}]
WEATHER = {"name": "weather", "parameters": {"type": "object", "properties": {"place": {"type": "string"}}}}
CALLING = (
    "<think>\nHm.\n</think>\n\nI look.\n"
    '<tool_call>\n{"name": "weather", "arguments": {"place": "Rome"}}\n</tool_call>\n'
    '<tool_call>\n{"name": "weather", "arguments": {"place": "Oslo"}}\n</tool_call>'
)


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    def vocabulary(writer: GGUFWriter, size: int) -> None:
        add_vocabulary(writer, size, dict(enumerate(MARKS, 300)))
        writer.add_chat_template(QWEN3)
        writer.add_file_type(15)

    model = RandomModel("llama", vocab_size=320, context=2048, vocabulary=vocabulary)
    path = write(tmp_path_factory.mktemp("model") / "model.gguf", model)
    with pystaged.load(path, recycle=False, report=print) as engine:
        yield engine


def ask(server: Server, path: str, **body: Any) -> Any:
    status, found = server.ask(path, {"model": NAME, "stream": False, **body})
    assert status == 200, found
    return found


def lines(server: Server, path: str, **body: Any) -> list[Any]:
    """The parts of a stream, which is the default."""
    response = server.send("POST", path, {"model": NAME, **body})
    assert response.getheader("content-type") == "application/x-ndjson"
    found = [json.loads(line) for line in response.read().decode().splitlines()]
    assert [part["done"] for part in found] == [False] * (len(found) - 1) + [True]
    return found


def greedy(**more: Any) -> Any:
    return {"temperature": 0, "num_predict": 12, **more}


def test_a_chat(server: Server, engine: Engine) -> None:
    expected = engine.chat(ASKED, max_tokens=12)
    found = ask(server, "/api/chat", messages=ASKED, options=greedy(num_ctx=4096), logprobs=True, keep_alive="5m")
    assert found["message"] == {"role": "assistant", "content": expected.text}
    assert (found["model"], found["done"], found["done_reason"]) == (NAME, True, "length")
    assert (found["prompt_eval_count"], found["eval_count"]) == (expected.stats.prompt_tokens, 12)
    assert found["total_duration"] >= found["eval_duration"] > 0
    assert len(found["logprobs"]) == 12
    parts = lines(server, "/api/chat", messages=ASKED, options=greedy(), logprobs=True)
    assert "".join(part["message"]["content"] for part in parts) == expected.text
    assert [each for part in parts for each in part.get("logprobs", [])] == found["logprobs"]
    assert parts[-1]["eval_count"] == 12


def test_a_prompt(server: Server, engine: Engine) -> None:
    asked: Any = {"prompt": "Hello", "options": greedy()}
    expected = engine.chat(ASKED, max_tokens=12).text
    assert ask(server, "/api/generate", **asked)["response"] == expected
    assert "".join(part["response"] for part in lines(server, "/api/generate", **asked)) == expected
    told = engine.chat([{"role": "system", "content": "Be brief."}, *ASKED], max_tokens=12).text
    assert ask(server, "/api/generate", system="Be brief.", **asked)["response"] == told


def test_a_text_that_is_continued_or_filled_in(server: Server, engine: Engine) -> None:
    asked: Any = {"prompt": "the tree", "options": greedy()}
    expected = engine.generate("the tree", max_tokens=12).text
    assert ask(server, "/api/generate", raw=True, **asked)["response"] == expected
    filled = engine.infill("the tree", "the end", max_tokens=12).text
    assert ask(server, "/api/generate", suffix="the end", **asked)["response"] == filled


def test_a_prompt_for_a_model_without_template_is_passed_through(random_gguf: Callable[..., Path]) -> None:
    asked: Any = {"prompt": "the tree", "options": greedy()}
    with pystaged.load(random_gguf("F32", context=512), report=lambda _: None) as engine, live(engine) as plain:
        assert ask(plain, "/api/generate", **asked)["response"] == engine.generate("the tree", max_tokens=12).text
        status, error = plain.ask("/api/chat", {"messages": ASKED, "think": True})
        assert (status, error["error"]) == (400, f'"{NAME}" does not support thinking')
        found = ask(plain, "/api/generate", system="Be brief.", **asked)
        told = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "the tree"}]
        assert found["prompt_eval_count"] == len(engine.chat_format.encode(told))


def test_tools_and_thinking(server: Server) -> None:
    written: Any = {"temperature": 0, "num_predict": -1, "grammar": f"root ::= {json.dumps(CALLING)}"}
    asked: Any = {"tools": [{"type": "function", "function": WEATHER}], "options": written, "think": True}
    message = ask(server, "/api/chat", messages=ASKED, **asked)["message"]
    calls = [{"name": "weather", "arguments": {"place": place}} for place in ("Rome", "Oslo")]
    assert [call["function"] for call in message["tool_calls"]] == calls
    assert len({call["id"] for call in message["tool_calls"]}) == 2
    assert message["thinking"].strip() == "Hm."
    assert message["content"].strip() == "I look."
    parts = [part["message"] for part in lines(server, "/api/chat", messages=ASKED, **asked)]
    assert [call["function"] for part in parts for call in part.get("tool_calls", [])] == calls
    for name in ("thinking", "content"):
        assert "".join(part.get(name, "") for part in parts) == message[name]


def test_a_call_that_is_cut_is_not_called(server: Server, engine: Engine) -> None:
    until = len(engine.encode(CALLING[: CALLING.index("Oslo")]))
    written: Any = {"temperature": 0, "num_predict": until, "grammar": f"root ::= {json.dumps(CALLING)}"}
    asked: Any = {"tools": [{"type": "function", "function": WEATHER}], "options": written, "think": True}
    rome = {"name": "weather", "arguments": {"place": "Rome"}}
    answer = ask(server, "/api/chat", messages=ASKED, **asked)
    assert ([call["function"] for call in answer["message"]["tool_calls"]], answer["done_reason"]) == ([rome], "length")
    parts = [part["message"] for part in lines(server, "/api/chat", messages=ASKED, **asked)]
    assert [call["function"] for part in parts for call in part.get("tool_calls", [])] == [rome]


def test_results_go_back_to_their_calls(server: Server) -> None:
    calls = [{"function": {"name": name, "arguments": {"a": 1}}} for name in ("one", "two")]
    messages = [
        *ASKED,
        {"role": "assistant", "content": "", "thinking": "Hm.", "tool_calls": calls},
        {"role": "tool", "content": "2", "tool_name": "two"},
        {"role": "tool", "content": "1"},
    ]
    found = ask(server, "/api/chat", messages=messages, options=greedy())
    told = [
        {"id": f"call_1_{i}", "type": "function", "function": {"name": name, "arguments": '{"a": 1}'}}
        for i, name in enumerate(("one", "two"))
    ]
    ours = [
        *ASKED,
        {"role": "assistant", "content": "", "reasoning_content": "Hm.", "tool_calls": told},
        {"role": "tool", "content": "2", "tool_call_id": "call_1_1", "name": "two"},
        {"role": "tool", "content": "1", "tool_call_id": "call_1_0", "name": "one"},
    ]
    asked = {"messages": ours, "temperature": 0, "max_tokens": 12}
    status, body = server.ask("/v1/chat/completions", asked)
    assert status == 200, body
    assert found["message"]["content"] == body["choices"][0]["message"]["content"]
    assert found["prompt_eval_count"] == body["usage"]["prompt_tokens"]


@pytest.mark.parametrize("form", ["json", {"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"]}])
def test_formats(server: Server, form: Any) -> None:
    asked = {"format": form, "options": {"num_predict": 100, "seed": 1}}
    text = ask(server, "/api/chat", messages=ASKED, think=False, **asked)["message"]["content"]
    assert text.lstrip().startswith("{")


def test_the_model(server: Server, engine: Engine) -> None:
    (model,) = server.ask("/api/tags")[1]["models"]
    assert (model["name"], model["size"]) == (NAME, engine.model.file_bytes)
    assert model["details"]["quantization_level"] == "Q4_K_M"
    (running,) = server.ask("/api/ps")[1]["models"]
    assert running["digest"] == model["digest"]
    assert (running["context_length"], running["size_vram"]) == (engine.n_ctx, 0)
    shown = ask(server, "/api/show")
    assert shown["template"] == QWEN3
    assert shown["model_info"]["llama.context_length"] == engine.n_ctx
    assert shown["capabilities"] == ["completion", "tools", "thinking", "insert"]
    assert server.ask("/api/version")[1]["version"] >= "0.12"


@pytest.mark.parametrize(
    ("path", "body", "words"),
    [
        ("/api/chat", {"messages": "a"}, "messages"),
        ("/api/chat", {"messages": [{"role": "user", "content": "a", "images": ["aGk="]}]}, "images is not supported"),
        ("/api/chat", {"messages": ASKED, "options": {"temperature": -1}}, "temperature"),
        ("/api/chat", {"messages": ASKED, "options": {"mirostat": 2}}, "mirostat is not supported"),
        ("/api/chat", {"messages": ASKED, "options": {"stop": ["a"] * 65}}, "options.stop: must have at most 64 items"),
        ("/api/generate", {"prompt": "a" * 9000}, "maximum context length is 2048"),
        ("/api/embed", {"input": ["a", ""]}, "text 1 of the input is empty"),
        ("/api/embed", {"input": []}, "input: the list is empty"),
        ("/api/embeddings", {"input": "a"}, "prompt: is missing"),
        ("/api/embeddings", {"prompt": ["a"]}, "prompt: must be a string"),
        ("/api/pull", {"model": "a"}, "there is no POST /api/pull; models are managed by `pystaged pull`"),
    ],
)
def test_errors_are_in_its_shape(server: Server, path: str, body: Any, words: str) -> None:
    status, found = server.ask(path, body)
    assert status in (400, 404)
    assert list(found) == ["error"]
    assert words in found["error"]


def test_embeddings_of_older_clients(server: Server) -> None:
    (expected,) = ask(server, "/api/embed", input="the tree")["embeddings"]
    assert ask(server, "/api/embeddings", prompt="the tree") == {"embedding": expected}


def test_many_tokens_are_not_embedded_at_once(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tokens, "_MOST_TOKENS", 20)
    assert "send at most 20 at once" in server.ask("/api/embed", {"input": ["a" * 20] * 2})[1]["error"]


def test_an_answer_that_is_begun_goes_on_on_all_interfaces(server: Server, engine: Engine) -> None:
    begun: Any = [*ASKED, {"role": "assistant", "content": "It is "}]
    prompt = engine.chat_format.encode(begun, continues=True)
    assert engine.tokenizer.decode(prompt.tolist(), special=True).endswith("</think>\n\nIt is ")
    expected = engine.generate(prompt.tolist(), max_tokens=12).text
    assert engine.chat(begun, max_tokens=12).text == expected
    assert ask(server, "/api/chat", messages=begun, options=greedy())["message"]["content"] == expected
    parts = lines(server, "/api/chat", messages=begun, options=greedy())
    assert "".join(part["message"]["content"] for part in parts) == expected
    whole = {"messages": begun, "temperature": 0, "max_tokens": 12}
    assert server.ask("/v1/messages", whole)[1]["content"][0]["text"] == expected
    for asked in ({}, {"continue_final_message": True, "add_generation_prompt": False}):
        found = server.ask("/v1/chat/completions", whole | asked)[1]
        assert found["choices"][0]["message"]["content"] == expected
        assert found["usage"]["prompt_tokens"] == len(prompt)
        assert server.ask("/apply-template", {"messages": begun} | asked)[1]["prompt"].endswith("\n\nIt is ")
    closed = engine.chat_format.encode(begun)
    for honoured in ({"continue_final_message": False}, {"add_generation_prompt": True}):
        assert server.ask("/v1/chat/completions", whole | honoured)[1]["usage"]["prompt_tokens"] == len(closed)
    answer = server.ask("/v1/responses", {"input": begun, "max_output_tokens": 1})[1]
    assert answer["usage"]["input_tokens"] == len(closed)


def test_reasoning_that_is_begun_goes_on(server: Server, engine: Engine) -> None:
    begun: Any = [*ASKED, {"role": "assistant", "content": "", "thinking": "I should"}]
    prompt = engine.chat_format.encode(begun, continues=True)
    expected = engine.generate(prompt.tolist(), max_tokens=12).text
    found = ask(server, "/api/chat", messages=begun, options=greedy())["message"]
    assert (found["thinking"], found["content"]) == (expected, "")


def test_an_error_in_a_stream_is_a_line(server: Server) -> None:
    written = {"grammar": 'root ::= "a" "\ud800"'}
    response = server.send("POST", "/api/chat", {"messages": ASKED, "options": written})
    assert "error" in json.loads(response.read().decode().splitlines()[-1])


@pytest.mark.parametrize("stream", [False, True])
def test_requests_that_only_load_the_model(server: Server, stream: bool) -> None:
    for path, said in (("generate", {"response": ""}), ("chat", {"message": {"role": "assistant", "content": ""}})):
        for kept in (-1, 0):  # the only model of a server stays
            found = ask(server, f"/api/{path}", stream=stream, keep_alive=kept)
            assert said.items() <= found.items()
            assert (found["done"], found["done_reason"]) == (True, "load")
            assert len(server.ask("/api/ps")[1]["models"]) == 1
