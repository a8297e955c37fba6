"""/v1/responses: OpenAI's newer interface, for models that read text; nothing is stored."""

from __future__ import annotations

import json
import time
from functools import partial
from typing import Annotated, Any, Literal

from pydantic import Field

from pystaged.chat.turn import Block
from pystaged.result import GenerationResult
from pystaged.server import chats
from pystaged.server.answer import Answer, ended, read_arguments
from pystaged.server.errors import ApiError, unsupported
from pystaged.server.figures import usage
from pystaged.server.models import State
from pystaged.server.options import chat_request, refuse, text_of
from pystaged.server.request_types import (
    ChatRequest,
    FunctionCall,
    Open,
    Parts,
    ResponseFormat,
    ToolName,
    Tools,
    TurnRequest,
    only,
)

# Unsupported members that would change the answer, with the values that have no effect.
_UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    "n": (1,),
    "previous_response_id": (),
    "conversation": (),
    "background": (False,),
    "prompt": (),
}
# Of each kind of block: the name of its events, the member with the whole text, further members, the prefix of ids.
_EVENTS: dict[str, tuple[str, str, dict[str, Any], str]] = {
    "text": ("output_text", "text", {"logprobs": []}, "msg"),
    "reasoning": ("reasoning_text", "text", {}, "rs"),
    "call": ("function_call_arguments", "arguments", {}, "fc"),
    "custom": ("custom_tool_call_input", "input", {}, "ctc"),
}
_TEXTS = ("input_text", "output_text", "text", "summary_text", "reasoning_text", "refusal")
_text = partial(text_of, param="input", types=_TEXTS)
_ITEMS = (
    *(None, "message", "reasoning", "item_reference", "function_call", "function_call_output"),
    *("custom_tool_call", "custom_tool_call_output"),
)
# The arguments of a tool that takes text in place of JSON.
_INPUT = {
    "type": "object",
    "properties": {"input": {"type": "string", "description": "The whole input, as it is."}},
    "required": ["input"],
    "additionalProperties": False,
}


class InputItem(Open):
    """A message, reasoning, a call or its result."""

    type: str | None = None
    role: Literal["user", "assistant", "system", "developer"] | None = None
    content: str | Parts | None = None
    summary: Parts | None = None
    call_id: str = ""
    name: str = ""
    arguments: str = ""
    input: str = ""
    output: str | Parts = ""


class TextConfig(Open):
    """The member `text` of a request."""

    format: ResponseFormat | None = None


class ResponseTool(Open):
    """A tool: a function, or a custom tool, which takes text."""

    type: Literal["function", "custom"]
    name: ToolName
    description: str | None = None
    parameters: dict[str, Any] | None = None
    format: dict[str, Any] | None = None


class ResponseToolChoice(Open):
    """The tool that must be called, or the tools that may be."""

    type: str
    name: str | None = None
    mode: Literal["auto", "required"] = "auto"
    tools: list[FunctionCall] = []  # noqa: RUF012  pydantic copies it


class ReasoningConfig(Open):
    """Whether the model is to reason."""

    effort: str | None = None


class ResponseRequest(TurnRequest):
    """A request to /v1/responses."""

    input: str | Annotated[list[InputItem], Field(min_length=1, max_length=4096, fail_fast=True), only(*_ITEMS)]
    instructions: str | None = None
    max_output_tokens: Annotated[int, Field(ge=1, lt=2**31)] | None = None
    text: TextConfig | None = None
    tools: Annotated[Tools[ResponseTool], only("function", "custom")] | None = None
    tool_choice: Literal["none", "auto", "required"] | ResponseToolChoice | None = None
    reasoning: ReasoningConfig | None = None


def begin(state: State, request: ResponseRequest) -> ResponseAnswer:
    """Check a request and prepare its sequence; may take seconds. Raises ApiError and ChatTemplateError."""
    return ResponseAnswer(state, request, chats.turns(state, _chat(request), "input"))


def _chat(request: ResponseRequest) -> ChatRequest:
    refuse((request.model_extra or {}) | {"n": request.n}, _UNSUPPORTED)
    messages: list[dict[str, Any]] = []
    if request.instructions:
        messages.append({"role": "system", "content": request.instructions})
    if isinstance(request.input, str):
        messages.append({"role": "user", "content": request.input})
    else:
        for item in request.input:
            _add(messages, item)
    for message in messages:
        if message["content"] is None and not message.get("tool_calls"):
            message["content"] = ""
    if not messages:
        raise ApiError(400, "input has no message", param="input")
    form = request.text.format if request.text else None
    tools, choice = _tools(request)
    return chat_request(
        request,
        messages,
        max_completion_tokens=request.max_output_tokens,
        response_format={"type": form.type, "json_schema": {"schema": form.schema_}} if form else None,
        tools=tools,
        tool_choice=choice,
        reasoning_effort=request.reasoning.effort if request.reasoning else None,
        continue_final_message=False,  # items are whole
    )


def _add(messages: list[dict[str, Any]], item: InputItem) -> None:
    """Add an item; those of one answer become one message."""
    if item.type in ("function_call_output", "custom_tool_call_output"):
        messages.append({"role": "tool", "tool_call_id": item.call_id, "content": _text(item.output)})
    elif item.type in ("function_call", "custom_tool_call"):
        arguments = item.arguments if item.type == "function_call" else json.dumps({"input": item.input})
        function = {"name": item.name, "arguments": arguments}
        call = {"id": item.call_id, "type": "function", "function": function}
        _assistant(messages, "content", "reasoning_content", "tool_calls").setdefault("tool_calls", []).append(call)
    elif item.type == "reasoning":
        _assistant(messages)["reasoning_content"] = _text(item.content or item.summary or "")
    elif item.type == "item_reference":
        raise unsupported("input", "nothing is stored here: send the item that item_reference stands for")
    else:
        if item.role is None or item.content is None:
            raise ApiError(400, "input: a message needs role and content", param="input")
        if item.role == "assistant":
            _assistant(messages, "reasoning_content")["content"] = _text(item.content)
        else:
            messages.append({"role": item.role, "content": _text(item.content)})


def _assistant(messages: list[dict[str, Any]], *may_have: str) -> dict[str, Any]:
    """The assistant's message that goes on, a new one if it has what must come after a new part."""
    last = messages[-1] if messages else {}
    had = {name for name in ("content", "reasoning_content", "tool_calls") if last.get(name)}
    if last.get("role") != "assistant" or not had <= set(may_have):
        messages.append({"role": "assistant", "content": None})
    return messages[-1]


def _tools(request: ResponseRequest) -> tuple[list[dict[str, Any]] | None, Any]:
    """The tools and the choice as in /v1/chat/completions."""
    tools, choice = request.tools or [], request.tool_choice
    if isinstance(choice, ResponseToolChoice):
        if choice.type == "allowed_tools":
            names = {tool.name for tool in choice.tools}
            if unknown := names - {tool.name for tool in tools}:
                message = f"tool_choice allows {min(unknown)!r}, which is not one of the tools"
                raise ApiError(400, message, param="tool_choice")
            tools, choice = [tool for tool in tools if tool.name in names], choice.mode
        elif choice.type in ("function", "custom"):
            return list(map(_function, tools)), {"type": "function", "function": {"name": choice.name or ""}}
        else:
            raise unsupported("tool_choice", f"tool_choice of type {choice.type} is not supported")
    return list(map(_function, tools)), choice if tools else None


def _function(tool: ResponseTool) -> dict[str, Any]:
    function: dict[str, Any] = {"name": tool.name, "description": tool.description, "parameters": tool.parameters}
    if tool.type == "custom":
        definition = (tool.format or {}).get("definition")
        of_input = f"\n\nThe input follows this grammar:\n{definition}" if definition else ""
        function |= {"description": f"{tool.description or ''}{of_input}", "parameters": _INPUT}
    return {"type": "function", "function": function}


class ResponseAnswer(Answer):
    """An answer of /v1/responses."""

    names_events = True
    request: ResponseRequest
    _num_sent = 0
    _input = ""  # what has been sent of a custom tool's input

    def whole(self, choices: list[dict[str, Any]], figures: dict[str, Any]) -> Any:
        return choices[0] | {"timings": figures["timings"], "seed": figures["seed"]}

    def framed(self, part: dict[str, Any], figures: dict[str, Any]) -> dict[str, Any]:
        self._num_sent += 1
        return part | {"sequence_number": self._num_sent - 1} | figures

    def choice(self, _i: int, result: GenerationResult) -> dict[str, Any]:
        return self._response(result)

    def first_parts(self, _i: int) -> list[dict[str, Any]]:
        response = self._response(None)
        return [{"type": f"response.{name}", "response": response} for name in ("created", "in_progress")]

    def opened(self, _i: int, block: Block) -> list[dict[str, Any]]:
        self._input = ""
        item = self._item(Block(block.kind, block.index, name=block.name), "in_progress")
        if block.kind != "call":
            item["content"] = []
        added = {"type": "response.output_item.added", "output_index": block.index, "item": item}
        if block.kind == "call":
            return [added]
        return [added, self._of(block, "content_part.added", part=_part(Block(block.kind, block.index)))]

    def more(self, _i: int, block: Block, text: str) -> list[dict[str, Any]]:
        kind = self._kind(block)
        if kind == "custom":
            written = _input_of(block)
            text, self._input = written[len(self._input) :], written
        return [self._of(block, f"{_EVENTS[kind][0]}.delta", delta=text, **_EVENTS[kind][2])] if text else []

    def closed(self, _i: int, block: Block, result: GenerationResult | None) -> list[dict[str, Any]]:
        item = self._item(block, "incomplete" if result and result.finish_reason != "stop" else "completed")
        name, member, more, _ = _EVENTS[self._kind(block)]
        done = [self._of(block, f"{name}.done", **{member: item.get(member, block.text)}, **more)]
        if block.kind != "call":
            done.append(self._of(block, "content_part.done", part=_part(block)))
        return [*done, {"type": "response.output_item.done", "output_index": block.index, "item": item}]

    def ending(self, _i: int, result: GenerationResult) -> list[dict[str, Any]]:
        response = self._response(result)
        return [{"type": f"response.{response['status']}", "response": response}]

    def error_event(self, error: ApiError, _path: str) -> bytes:
        members = {name: error.body["error"][name] for name in ("code", "message", "param")}
        return json.dumps(error.body | self.framed(members, {})).encode()

    def _of(self, block: Block, name: str, **more: Any) -> dict[str, Any]:
        """An event of a block."""
        place = {"item_id": self._id(block), "output_index": block.index}
        return {"type": f"response.{name}", **place, **({} if block.kind == "call" else {"content_index": 0}), **more}

    def _kind(self, block: Block) -> str:
        """The kind of a block; a call of a tool that takes text is one of its own."""
        is_custom = block.kind == "call" and any(
            tool.type == "custom" and tool.name == block.name for tool in self.request.tools or []
        )
        return "custom" if is_custom else block.kind

    def _id(self, block: Block) -> str:
        return f"{_EVENTS[self._kind(block)][3]}_{self.key}{block.index}"

    def _item(self, block: Block, status: str) -> dict[str, Any]:
        """A block as an item of the output."""
        is_left = block.kind == "call" and not block.is_whole and status == "completed"
        status = "incomplete" if is_left else status
        shared = {"id": self._id(block), "status": status}
        if block.kind == "text":
            return {"type": "message", **shared, "role": "assistant", "content": [_part(block)]}
        if block.kind == "reasoning":
            return {"type": "reasoning", **shared, "summary": [], "content": [_part(block)]}
        called = shared | {"call_id": self.call_id("call", 0, block), "name": block.name}
        if self._kind(block) == "custom":
            return {"type": "custom_tool_call", **called, "input": _input_of(block)}
        return {"type": "function_call", **called, "arguments": block.text}

    def _response(self, result: GenerationResult | None) -> dict[str, Any]:
        """The response object; None before anything has been generated."""
        is_cut = result is not None and result.finish_reason != "stop"
        status = "in_progress" if result is None else "incomplete" if is_cut else "completed"
        request, sampling = self.request, self.sequences[0].config.sampling
        form = request.text.format if request.text else None
        blocks = [] if result is None else self.blocks(0)
        output = [self._item(block, status if block is blocks[-1] else "completed") for block in blocks]
        choice, given = request.tool_choice or "auto", request.model_extra or {}
        return {
            "id": f"resp_{self.key}",
            "object": "response",
            "created_at": self.created,
            "completed_at": int(time.time()) if status == "completed" else None,
            "background": False,
            "status": status,
            "error": None,
            "incomplete_details": _incomplete(result) if result is not None and is_cut else None,
            "instructions": request.instructions,
            "max_output_tokens": request.max_output_tokens,
            "metadata": given.get("metadata") or {},
            "model": self.state.name,
            "output": output,
            "parallel_tool_calls": request.parallel_tool_calls is not False,
            "previous_response_id": None,
            "reasoning": {"effort": request.reasoning.effort if request.reasoning else None, "summary": None},
            "store": False,
            "temperature": sampling.temperature,
            "text": {"format": form.model_dump(exclude_none=True, by_alias=True) if form else {"type": "text"}},
            "tool_choice": choice if isinstance(choice, str) else choice.model_dump(exclude_unset=True),
            "tools": [_told(tool) for tool in request.tools or []],
            "top_p": sampling.top_p,
            "presence_penalty": sampling.presence_penalty,
            "frequency_penalty": sampling.frequency_penalty,
            "top_logprobs": 0,
            "max_tool_calls": None,
            "service_tier": "default",
            "safety_identifier": given.get("safety_identifier"),
            "prompt_cache_key": given.get("prompt_cache_key"),
            "truncation": "disabled",
            "usage": self._tokens(result) if result is not None else None,
        }

    def _tokens(self, result: GenerationResult) -> dict[str, Any]:
        found = usage([result.stats], 1)
        return {
            "input_tokens": found["prompt_tokens"],
            "input_tokens_details": found["prompt_tokens_details"],
            "output_tokens": found["completion_tokens"],
            "output_tokens_details": {"reasoning_tokens": self.reasoning_tokens()},
            "total_tokens": found["total_tokens"],
        }


def _incomplete(result: GenerationResult) -> dict[str, str]:
    """OpenAI's reason for an incomplete answer, and whether a loop was the cause."""
    found = {"reason": "max_output_tokens"}
    return found | {"stop_reason": ended(result)["stop_reason"]} if result.finish_reason == "loop" else found


def _told(tool: ResponseTool) -> dict[str, Any]:
    """A tool of the request; a function has all its members."""
    members: dict[str, Any] = dict.fromkeys(("description", "parameters", "strict") if tool.type == "function" else ())
    return members | tool.model_dump(exclude_unset=True)


def _part(block: Block) -> dict[str, Any]:
    """The content of a block of text or reasoning."""
    if block.kind == "reasoning":
        return {"type": "reasoning_text", "text": block.text}
    return {"type": "output_text", "text": block.text, "annotations": [], "logprobs": []}


def _input_of(block: Block) -> str:
    """The input of a custom tool, as far as it was written."""
    return str(read_arguments(block.text).get("input", ""))
