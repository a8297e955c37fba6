"""/v1/chat/completions."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pystaged.chat import ChatTemplateError
from pystaged.config import GenerationConfig
from pystaged.result import GenerationResult, Piece
from pystaged.sequence import Sequence as Text
from pystaged.server.answer import Answer, ended
from pystaged.server.answer_types import Call, ChatCompletion, Delta
from pystaged.server.errors import ApiError, too_long, unsupported
from pystaged.server.logprobs import of_chat
from pystaged.server.options import begun, checked, text_options
from pystaged.server.request_types import ChatRequest, joined
from pystaged.server.state import State
from pystaged.server.tools import CallReader, grammar, has_calls, knows_tools, messages_with, offered, told


def begin(state: State, request: ChatRequest) -> ChatAnswer:
    """Check a request and prepare its sequences; may take seconds. Raises ApiError and ChatTemplateError."""
    sequences, seed = texts(state, request)
    return ChatAnswer(state, request, sequences, seed, bool(offered(request)))


def texts(state: State, request: ChatRequest, param: str = "messages") -> tuple[list[Text], int]:
    """A request's sequences, and the first seed. Errors as in begin.

    Args:
        param: the member that errors about the messages name.
    """
    engine, tools = state.engine, offered(request)
    n = request.n or 1
    prompt = prompt_of(state, request, param)
    if len(prompt) > engine.n_ctx:
        raise too_long(len(prompt), engine.n_ctx, param)
    of_calls = grammar(request, tools)
    config = _config(state, request, of_calls)
    config = replace(config, stop=(*config.stop, *engine.chat_format.stop))
    sequences = begun(engine, [prompt], config, n, "tools" if of_calls else _form(request))
    return sequences, config.sampling.seed


def prompt_of(state: State, request: ChatRequest, param: str = "messages") -> NDArray[np.int32]:
    """The tokens of a conversation. Errors as in begin."""
    tools, messages = offered(request), told(request)
    given = [tool.model_dump(exclude_none=True) for tool in tools]
    chat_format = state.engine.chat_format
    if (given or has_calls(messages)) and not knows_tools(chat_format):
        messages, given = messages_with(messages, given), []
    try:
        return chat_format.encode(messages, tools=given or None, template_options=request.chat_template_kwargs)
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


class ChatAnswer(Answer):
    """An answer of /v1/chat/completions."""

    described = ChatCompletion
    prefix, whole_kind, part_kind = "chatcmpl", "chat.completion", "chat.completion.chunk"

    def __init__(self, state: State, request: ChatRequest, sequences: list[Text], seed: int, has_tools: bool) -> None:
        super().__init__(state, request, sequences, seed)
        self._with_logprobs = bool(request.logprobs)
        self._has_tools = has_tools
        self._readers = [CallReader(f"{self.key[:8]}{i}", has_tools) for i in range(len(sequences))]

    def choice(self, i: int, result: GenerationResult) -> dict[str, Any]:
        reader = self._readers[i]
        words = reader.push(result.text)
        rest, calls = reader.finish()
        message: dict[str, Any] = {"role": "assistant", "content": words + rest, "refusal": None, "annotations": []}
        if calls:
            message |= {"content": message["content"] or None, "tool_calls": calls}
        logprobs = of_chat(self.tokenizer, result.logprobs or []) if self._with_logprobs else None
        return {
            "index": i,
            "message": message,
            "logprobs": logprobs,
            **_end(result, calls),
        } | self.ours(result)

    def empty_part(self, i: int) -> dict[str, Any]:
        return _part(i, {})

    def first_parts(self, i: int) -> list[dict[str, Any]]:
        return [_part(i, {"role": "assistant", "content": None})]

    def part(self, i: int, piece: Piece) -> dict[str, Any] | None:
        words = self._readers[i].push(piece.text)
        logprobs = of_chat(self.tokenizer, piece.logprobs or []) if self._with_logprobs else None
        ours = self.ours_of(i, piece)
        if not (words or logprobs or ours):
            return None
        return _part(i, {"content": words} if words else {}) | {"logprobs": logprobs} | ours

    def last_parts(self, i: int, result: GenerationResult) -> list[dict[str, Any]]:
        words, calls = self._readers[i].finish()
        parts = [_part(i, {"content": words})] if words else []
        if calls:
            parts.append(_part(i, {"tool_calls": [{"index": j, **call} for j, call in enumerate(calls)]}))
        return [*parts, _part(i, {}) | _end(result, calls)]


def _part(i: int, delta: Delta) -> dict[str, Any]:
    return {"index": i, "delta": delta, "logprobs": None, "finish_reason": None}


def _end(result: GenerationResult, calls: list[Call]) -> dict[str, str]:
    """The finish_reason."""
    return {"finish_reason": "tool_calls"} if calls and result.finish_reason == "stop" else ended(result)
