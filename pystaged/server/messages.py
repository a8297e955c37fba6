"""/v1/messages: Anthropic's interface, for models that read text."""

from __future__ import annotations

import json
import re
from functools import partial
from typing import Annotated, Any, Literal

from pydantic import Field, ValidationError

from pystaged.chat import turn
from pystaged.result import GenerationResult
from pystaged.server import chats
from pystaged.server.answer import Answer, is_begun, read_arguments
from pystaged.server.errors import ApiError, unsupported
from pystaged.server.models import State
from pystaged.server.options import chat_request, refuse, text_of
from pystaged.server.request_types import ChatRequest, Many, Open, Part, ToolName, Tools, TurnRequest, only

# The type of a block's new text, and the member that holds it.
_DELTAS = {
    "text": ("text_delta", "text"),
    "reasoning": ("thinking_delta", "thinking"),
    "call": ("input_json_delta", "partial_json"),
}
# Unsupported members that would change the answer, with the values that have no effect.
_UNSUPPORTED: dict[str, tuple[Any, ...]] = {"n": (1,), "mcp_servers": ([],), "container": ()}
# Claude Code's first line, which changes with every turn, so that no prompt would begin like the one before.
_BILLING = re.compile(r"^x-anthropic-billing-header:.*\n?", re.MULTILINE)
_text = partial(text_of, param="messages", types=("text",))


class Block(Part):
    """A part of a message: text, thinking, tool_use or tool_result; others that the model need not see are skipped."""

    text: str = ""
    thinking: str = ""
    id: str = ""
    name: str = ""
    input: dict[str, Any] = {}  # noqa: RUF012  pydantic copies it
    tool_use_id: str = ""
    content: Any = None


Content = str | Many[Block]


class MessageParam(Open):
    """A message."""

    role: Literal["user", "assistant", "system"]
    content: Content


class MessageTool(Open):
    """A tool."""

    name: ToolName
    type: Literal["custom"] | None = None
    description: str | None = None
    input_schema: dict[str, Any] | None = None


class MessageToolChoice(Open):
    """Which tools may or must be called."""

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class ThinkingConfig(Open):
    """Whether the model is to reason, and for how many tokens at most."""

    type: str
    budget_tokens: Annotated[int, Field(ge=0, lt=2**31)] | None = None


class OutputFormat(Open):
    """The format of the answer."""

    type: Literal["json_schema"]
    schema_: dict[str, Any] = Field(alias="schema")


class OutputConfig(Open):
    """The member `output_config` of a request."""

    format: OutputFormat | None = None


class MessageRequest(TurnRequest):
    """A request to /v1/messages, or to /v1/messages/count_tokens."""

    messages: Annotated[list[MessageParam], Field(min_length=1, max_length=4096, fail_fast=True)]
    system: Content | None = None
    stop_sequences: Annotated[list[str], Field(max_length=64, fail_fast=True)] | None = None
    tools: Annotated[Tools[MessageTool], only("custom", None)] | None = None
    tool_choice: MessageToolChoice | None = None
    thinking: ThinkingConfig | None = None
    output_config: OutputConfig | None = None


def begin(state: State, request: MessageRequest) -> MessageAnswer:
    """Check a request and prepare its sequence; may take seconds. Raises ApiError and ChatTemplateError."""
    try:
        return MessageAnswer(state, request, chats.turns(state, _chat(state, request)))
    except ApiError as error:
        body = error.body["error"]
        if "n_prompt_tokens" not in body:
            raise
        # In the words that Anthropic's clients search for.
        words = f"prompt is too long: {body['n_prompt_tokens']} tokens > {body['n_ctx']} maximum"
        more = "; the server's --n-ctx allows more" if state.engine.model.max_context > body["n_ctx"] else ""
        raise ApiError(400, words + more, param="messages", code=body["code"]) from None


def count(state: State, request: MessageRequest) -> dict[str, int]:
    """Count the tokens of a prompt. Errors as in begin."""
    return {"input_tokens": chats.count(state, _chat(state, request))}


def _chat(state: State, request: MessageRequest) -> ChatRequest:
    refuse((request.model_extra or {}) | {"n": request.n}, _UNSUPPORTED)
    if all(message.role == "system" for message in request.messages):
        raise unsupported("messages", "there must be a message of the user")
    messages = _system(state, request.system or "")
    for message in request.messages:
        if message.role == "system":
            messages += _system(state, message.content)
        else:
            messages += _answered(message) if message.role == "assistant" else _asked(message)
    if "tool_calls" in messages[-1]:
        raise unsupported("messages", "the last message must be the user's, or text that the answer goes on with")
    choice, thinking, output = request.tool_choice, request.thinking, request.output_config
    tools = request.tools or []
    told = [{"name": tool.name, "description": tool.description, "parameters": tool.input_schema} for tool in tools]
    more: dict[str, Any] = {
        "stop": request.stop_sequences or None,
        "tools": [{"type": "function", "function": function} for function in told],
        "tool_choice": _choice(choice) if choice and tools else None,
    }
    if choice and choice.disable_parallel_tool_use:
        more["parallel_tool_calls"] = False
    if thinking:
        more["reasoning_effort"] = "none" if thinking.type == "disabled" else "high"
        more["reasoning_budget_tokens"] = thinking.budget_tokens
    if output and output.format:
        schema = {"schema": output.format.schema_}
        more["response_format"] = {"type": "json_schema", "json_schema": schema}
    return chat_request(request, messages, **more)


def _system(state: State, content: Content) -> list[dict[str, Any]]:
    """A system message, if there is text for one; without Claude Code's billing header, which may be a block of its
    own."""
    blocks = [Block(type="text", text=content)] if isinstance(content, str) else content
    if not state.settings.billing_header:
        blocks = [block.model_copy(update={"text": _BILLING.sub("", block.text)}) for block in blocks]
    text = _text(blocks)
    return [{"role": "system", "content": text}] if text else []


def _choice(choice: MessageToolChoice) -> str | dict[str, Any]:
    if choice.type == "tool":
        return {"type": "function", "function": {"name": choice.name or ""}}
    return {"any": "required"}.get(choice.type, choice.type)


def _asked(message: MessageParam) -> list[dict[str, Any]]:
    """A user's message, and the results of tools, in the order given."""
    if isinstance(message.content, str):
        return [{"role": "user", "content": message.content}]
    found: list[dict[str, Any]] = []
    for block in message.content:
        if block.type == "tool_result":
            found.append({"role": "tool", "tool_call_id": block.tool_use_id, "content": _result(block.content)})
        elif not found or found[-1]["role"] == "tool":
            found.append({"role": "user", "content": _text([block])})
        else:
            found[-1]["content"] += _text([block])
    return found or [{"role": "user", "content": ""}]


def _answered(message: MessageParam) -> list[dict[str, Any]]:
    """An assistant's message."""
    if isinstance(message.content, str):
        return [{"role": "assistant", "content": message.content}]
    blocks = [block for block in message.content if block.type in ("text", "thinking", "tool_use")]
    found: dict[str, Any] = {"role": "assistant", "content": _text([each for each in blocks if each.type == "text"])}
    if thinking := "".join(block.thinking for block in blocks):
        found["reasoning_content"] = thinking
    calls = [
        {"id": block.id, "type": "function", "function": {"name": block.name, "arguments": json.dumps(block.input)}}
        for block in blocks
        if block.type == "tool_use"
    ]
    return [found | {"content": found["content"] or None, "tool_calls": calls}] if calls else [found]


def _result(content: Any) -> str:
    """The text of a tool's result."""
    try:
        return _text(content if isinstance(content, str) else [Block.model_validate(part) for part in content or []])
    except (ValidationError, TypeError):
        raise ApiError(400, "messages: the content of a tool_result must be text", param="messages") from None


class MessageAnswer(Answer):
    """An answer of /v1/messages."""

    names_events = True
    request: MessageRequest

    def choice(self, i: int, result: GenerationResult) -> dict[str, Any]:
        return self._message(result, [self._block(block) for block in self.blocks(i)]) | self._reason(i, result)

    def first_parts(self, i: int) -> list[dict[str, Any]]:
        return [{"type": "message_start", "message": self._message(self.sequences[i].result(), [])}]

    def opened(self, _i: int, block: turn.Block) -> list[dict[str, Any]]:
        begun = self._block(turn.Block(block.kind, block.index, name=block.name))
        return [{"type": "content_block_start", "index": block.index, "content_block": begun}]

    def more(self, _i: int, block: turn.Block, text: str) -> list[dict[str, Any]]:
        if block.kind == "call" and not is_begun(block.text):
            return []  # clients fail at what is no JSON
        kind, member = _DELTAS[block.kind]
        return [{"type": "content_block_delta", "index": block.index, "delta": {"type": kind, member: text}}]

    def closed(self, _i: int, block: turn.Block, _result: GenerationResult | None) -> list[dict[str, Any]]:
        return [{"type": "content_block_stop", "index": block.index}]

    def ending(self, i: int, result: GenerationResult) -> list[dict[str, Any]]:
        return [
            {"type": "message_delta", "delta": self._reason(i, result), "usage": self._tokens(result)},
            {"type": "message_stop"},
        ]

    def _block(self, block: turn.Block) -> dict[str, Any]:
        if block.kind == "text":
            return {"type": "text", "text": block.text, "citations": None}
        if block.kind == "reasoning":
            return {"type": "thinking", "thinking": block.text, "signature": ""}
        name = {"id": self.call_id("toolu", 0, block), "name": block.name}
        return {"type": "tool_use", **name, "input": read_arguments(block.text), "caller": {"type": "direct"}}

    def _message(self, result: GenerationResult, content: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            "id": f"msg_{self.key}",
            "type": "message",
            "role": "assistant",
            "model": self.state.name,
            "content": content,
            "stop_reason": None,
            "stop_sequence": None,
            "stop_details": None,
            "container": None,
            "usage": self._tokens(result),
        }

    def _reason(self, i: int, result: GenerationResult) -> dict[str, Any]:
        """The stop_reason; a stop string of the chat template ends the turn."""
        met = self.sequences[i].buffer.met
        own = met if met in (self.request.stop_sequences or ()) else None
        reason = "tool_use" if self.has_called(i) else "end_turn"
        if result.finish_reason != "stop" or own:
            reason = "stop_sequence" if own else "max_tokens"
        return {"stop_reason": reason, "stop_sequence": own}

    def _tokens(self, result: GenerationResult) -> dict[str, Any]:
        stats = result.stats
        return {
            "input_tokens": stats.prompt_tokens - stats.reused_tokens,
            "cache_creation": None,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": stats.reused_tokens,
            "inference_geo": None,
            "output_tokens": stats.new_tokens,
            "output_tokens_details": {"thinking_tokens": self.reasoning_tokens()},
            "server_tool_use": None,
            "service_tier": None,
        }
