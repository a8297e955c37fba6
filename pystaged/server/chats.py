"""/v1/chat/completions."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pystaged.chat import ChatTemplateError
from pystaged.chat.call_grammar import call_grammar
from pystaged.chat.turn import Block, Dialect
from pystaged.config import GenerationConfig
from pystaged.definitions import GrammarError
from pystaged.result import GenerationResult, Piece
from pystaged.server.answer import ended
from pystaged.server.answer_types import Call, CalledFunction, ChatCompletion
from pystaged.server.errors import ApiError, too_long, unsupported
from pystaged.server.logprobs import of_chat
from pystaged.server.options import begun, checked, text_options
from pystaged.server.request_types import ChatRequest, joined
from pystaged.server.state import State
from pystaged.server.tools import (
    Manner,
    has_calls,
    knows_tools,
    messages_with,
    offered,
    reasoning,
    schemas_of,
    template_options,
    thinks_by_template,
    told,
    with_calls,
)
from pystaged.server.turn_answer import TurnAnswer, Turns


def begin(state: State, request: ChatRequest) -> ChatAnswer:
    """Check a request and prepare its sequences; may take seconds. Raises ApiError and ChatTemplateError."""
    return ChatAnswer(state, request, turns(state, request))


def turns(state: State, request: ChatRequest, param: str = "messages") -> Turns:
    """Prepare the answers to a request. Errors as in begin.

    Args:
        param: the member that errors about the messages name.
    """
    engine, tools, settings = state.engine, offered(request), state.settings
    prompt, dialect = _prompt(state, request, param)
    if len(prompt) > engine.n_ctx:
        raise too_long(len(prompt), engine.n_ctx, engine.model.max_context, param)
    splits = request.reasoning_format != "none"
    manner = Manner(dialect, splits, dialect.is_thinking(prompt.tolist(), engine.tokenizer), schemas_of(tools))
    of_calls = None
    if request.tool_choice not in (None, "none", "auto"):
        several = request.tool_choice == "required" and request.parallel_tool_calls is not False
        try:
            of_calls = call_grammar(dialect, manner.schemas or {}, several=several)
        except GrammarError as error:
            raise ApiError(400, str(error), param="tools") from None
    config = _config(state, request, of_calls)
    config = replace(config, stop=(*config.stop, *engine.chat_format.stop))
    limit = settings.reasoning_budget
    if _thinks(state, request) is False and not thinks_by_template(engine.chat_format, bool(tools)):
        limit = 0
    sequences = begun(
        engine,
        [prompt],
        config,
        request.n or 1,
        "tools" if of_calls else _form(request),
        spelled=manner.spelled,
        reasoning=reasoning(request, manner, limit, engine.tokenizer, config.grammar is not None),
    )
    return Turns(sequences, config.sampling.seed, manner)


def count(state: State, request: ChatRequest) -> int:
    """The number of tokens of a conversation. Errors as in begin."""
    return len(_prompt(state, request, "messages")[0])


def _thinks(state: State, request: ChatRequest) -> bool | None:
    """Whether the answer is to be reasoned; None for what the template prefers."""
    effort = request.reasoning_effort
    return state.settings.think if effort is None else effort != "none"


def _prompt(state: State, request: ChatRequest, param: str) -> tuple[NDArray[np.int32], Dialect]:
    """The tokens of a conversation, and the dialect that it is written in."""
    chat_format, tools = state.engine.chat_format, offered(request)
    source, knows = chat_format.source(bool(tools)), knows_tools(chat_format)
    dialect = Dialect.of(source, state.engine.tokenizer, knows)
    messages = told(request, dialect)
    given = [tool.model_dump(exclude_none=True) for tool in tools]
    options = template_options(request, chat_format, _thinks(state, request), bool(tools))
    if has_calls(messages) and "tool_calls" not in source:
        messages = with_calls(messages, dialect.form)
    if not knows:
        messages, given = messages_with(messages, given), []
    try:
        return chat_format.encode(messages, tools=given or None, template_options=options or None), dialect
    except ChatTemplateError:
        raise
    except (ValueError, TypeError) as error:
        blamed = "chat_template_kwargs" if str(error).startswith("template_options") else param
        raise ApiError(400, str(error), param=blamed) from None


def _config(state: State, request: ChatRequest, of_calls: str | None) -> GenerationConfig:
    asked = request.max_completion_tokens if request.max_completion_tokens is not None else request.max_tokens
    if asked == 0:
        raise ApiError(400, "max_tokens must be at least 1", param="max_tokens")
    options = text_options(request.model_copy(update={"max_tokens": asked}), state.settings.defaults, state.engine)
    options.setdefault("stop_loops", True)
    if request.top_logprobs is not None and not request.logprobs:
        raise ApiError(400, "top_logprobs needs logprobs: true", param="top_logprobs")
    if request.logprobs:
        options["logprobs"] = request.top_logprobs or 0
    if request.prediction:
        options["prediction"] = joined(request.prediction.content)
    schema = _schema(request)
    if schema is not None:
        options["json_schema"] = schema
    if of_calls is not None:
        if any(options.get(name) is not None for name in ("json_schema", "grammar")):
            raise unsupported("tool_choice", "a required tool call cannot be combined with another output format")
        options["grammar"] = of_calls
    return checked(options)


def _form(request: ChatRequest) -> str:
    """The request member that constrains the answer."""
    if request.grammar is not None:
        return "grammar"
    return "json_schema" if request.json_schema is not None else "response_format"


def _schema(request: ChatRequest) -> dict[str, Any] | None:
    """The JSON schema that the answer must match, None if there is none."""
    given = request.response_format
    if given is None or given.type == "text":
        return None
    if given.type == "json_object":
        return given.schema_ if given.schema_ is not None else {"type": "object"}
    if given.json_schema is None or given.json_schema.schema_ is None:
        message = "response_format of type json_schema needs json_schema.schema"
        raise ApiError(400, message, param="response_format")
    return given.json_schema.schema_


class ChatAnswer(TurnAnswer):
    """An answer of /v1/chat/completions."""

    described = ChatCompletion
    prefix, whole_kind, part_kind = "chatcmpl", "chat.completion", "chat.completion.chunk"

    def __init__(self, state: State, request: ChatRequest, turns: Turns) -> None:
        super().__init__(state, request, turns)
        self._with_logprobs = bool(request.logprobs)

    def choice(self, i: int, result: GenerationResult) -> dict[str, Any]:
        reader = self.read(i, result)
        content = "".join(block.text for block in reader.of_kind("text"))
        calls = [self._call(i, block) for block in reader.of_kind("call")]
        message: dict[str, Any] = {"role": "assistant", "content": content, "refusal": None, "annotations": []}
        for block in reader.of_kind("reasoning"):
            message["reasoning_content"] = block.text
        if calls:
            message |= {"content": content or None, "tool_calls": calls}
        logprobs = of_chat(self.tokenizer, result.logprobs or []) if self._with_logprobs else None
        return {
            "index": i,
            "message": message,
            "logprobs": logprobs,
            **self._end(i, result),
        } | self.ours(result)

    def empty_part(self, i: int) -> dict[str, Any]:
        return _part(i, {})

    def first_parts(self, i: int) -> list[dict[str, Any]]:
        return [_part(i, {"role": "assistant", "content": None})]

    def parts(self, i: int, piece: Piece) -> list[dict[str, Any]]:
        found = super().parts(i, piece)
        logprobs = of_chat(self.tokenizer, piece.logprobs or []) if self._with_logprobs else None
        ours = self.ours_of(i, piece)
        if logprobs or ours:
            found = found or [_part(i, {})]
            found[0] |= {"logprobs": logprobs} | ours
        return found

    def opened(self, i: int, block: Block) -> list[dict[str, Any]]:
        if block.kind != "call":
            return []
        call: dict[str, Any] = {"index": self._number(i, block), **self._call(i, block)}
        call["function"]["arguments"] = ""
        return [_part(i, {"tool_calls": [call]})]

    def more(self, i: int, block: Block, text: str) -> list[dict[str, Any]]:
        if block.kind == "call":
            return [_part(i, {"tool_calls": [{"index": self._number(i, block), "function": {"arguments": text}}]})]
        return [_part(i, {"content" if block.kind == "text" else "reasoning_content": text})]

    def ending(self, i: int, result: GenerationResult) -> list[dict[str, Any]]:
        return [_part(i, {}) | self._end(i, result)]

    def _number(self, i: int, block: Block) -> int:
        """The number of a call among the answer's calls."""
        return self.readers[i].of_kind("call").index(block)

    def _call(self, i: int, block: Block) -> Call:
        function: CalledFunction = {"name": block.name, "arguments": block.text}
        return {"id": self.call_id("call", i, block), "type": "function", "function": function}

    def _end(self, i: int, result: GenerationResult) -> dict[str, str]:
        """The finish_reason."""
        called = self.readers[i].of_kind("call") and result.finish_reason == "stop"
        return {"finish_reason": "tool_calls"} if called else ended(result)


def _part(i: int, delta: Mapping[str, Any]) -> dict[str, Any]:
    return {"index": i, "delta": delta, "logprobs": None, "finish_reason": None}
