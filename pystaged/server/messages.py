"""/v1/messages: Anthropic's interface, text only."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field
from typing_extensions import TypedDict

from pystaged.result import GenerationResult, Piece
from pystaged.server import chats
from pystaged.server.answer import EventAnswer
from pystaged.server.errors import unsupported
from pystaged.server.options import chat_request, refuse
from pystaged.server.request_types import ChatRequest, Open, Part, TextRequest, joined
from pystaged.server.state import State

# Unsupported members that would change the answer, with the values that have no effect.
_UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    "n": (1,),
    "tools": ([],),
    "tool_choice": ({"type": "none"}, {"type": "auto"}),
    "thinking": ({"type": "disabled"},),
    "mcp_servers": ([],),
    "container": (),
    "output_config": ({},),
}


class Block(Part):
    """A part of a message."""

    type: Literal["text"]
    text: str


Content = str | Annotated[list[Block], Field(max_length=4096, fail_fast=True)]


class MessageParam(Open):
    """A message."""

    role: Literal["user", "assistant"]
    content: Content


class MessageRequest(TextRequest):
    """A request to /v1/messages, or to /v1/messages/count_tokens."""

    messages: Annotated[list[MessageParam], Field(min_length=1, max_length=4096, fail_fast=True)]
    system: Content | None = None
    stop_sequences: Annotated[list[str], Field(max_length=64, fail_fast=True)] | None = None


class Text(TypedDict):
    """The text of an answer."""

    type: Literal["text"]
    text: str


class MessageUsage(TypedDict):
    """Token counts; reused prompt tokens are counted separately."""

    input_tokens: int
    cache_creation_input_tokens: int
    cache_read_input_tokens: int
    output_tokens: int


class Message(TypedDict):
    """An answer of /v1/messages."""

    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[Text]
    stop_reason: Literal["end_turn", "max_tokens", "stop_sequence"] | None
    stop_sequence: str | None
    usage: MessageUsage


class TokenCount(TypedDict):
    """The answer of /v1/messages/count_tokens."""

    input_tokens: int


def begin(state: State, request: MessageRequest) -> MessageAnswer:
    """Check a request and prepare its sequence; may take seconds. Raises ApiError and ChatTemplateError."""
    sequences, seed = chats.texts(state, _chat(request))
    return MessageAnswer(state, request, sequences, seed)


def count(state: State, request: MessageRequest) -> TokenCount:
    """Count the tokens of a prompt. Errors as in begin."""
    return {"input_tokens": len(chats.prompt_of(state, _chat(request)))}


def _chat(request: MessageRequest) -> ChatRequest:
    refuse((request.model_extra or {}) | {"n": request.n}, _UNSUPPORTED)
    if request.messages[-1].role == "assistant":
        raise unsupported("messages", "the last message must be the user's: prefilled answers are not supported")
    messages = [{"role": message.role, "content": joined(message.content)} for message in request.messages]
    if request.system:
        messages.insert(0, {"role": "system", "content": joined(request.system)})
    return chat_request(request, messages, **({"stop": request.stop_sequences} if request.stop_sequences else {}))


class MessageAnswer(EventAnswer):
    """An answer of /v1/messages."""

    described = Message
    request: MessageRequest
    prefix = "msg"

    def whole(self, choices: list[dict[str, Any]], figures: dict[str, Any]) -> Any:
        del figures
        return choices[0]

    def framed(self, part: dict[str, Any], figures: dict[str, Any]) -> dict[str, Any]:
        del figures
        return part

    def choice(self, i: int, result: GenerationResult) -> dict[str, Any]:
        return {**self._message(result, [{"type": "text", "text": result.text}]), **self._reason(i, result)}

    def first_parts(self, i: int) -> list[dict[str, Any]]:
        return [
            {"type": "message_start", "message": self._message(self.sequences[i].result(), [])},
            {"type": "content_block_start", "index": 0, "content_block": {"type": "text", "text": ""}},
        ]

    def part(self, i: int, piece: Piece) -> dict[str, Any] | None:
        del i
        delta = {"type": "text_delta", "text": piece.text}
        return {"type": "content_block_delta", "index": 0, "delta": delta} if piece.text else None

    def last_parts(self, i: int, result: GenerationResult) -> list[dict[str, Any]]:
        return [
            {"type": "content_block_stop", "index": 0},
            {"type": "message_delta", "delta": self._reason(i, result), "usage": _usage(result)},
            {"type": "message_stop"},
        ]

    def _message(self, result: GenerationResult, content: list[Text]) -> Message:
        return {
            "id": f"msg_{self.key}",
            "type": "message",
            "role": "assistant",
            "model": self.state.settings.name,
            "content": content,
            "stop_reason": None,
            "stop_sequence": None,
            "usage": _usage(result),
        }

    def _reason(self, i: int, result: GenerationResult) -> dict[str, Any]:
        """The stop_reason; a stop string of the chat template ends the turn."""
        met = self.sequences[i].met_stop_string
        own = met if met in (self.request.stop_sequences or ()) else None
        reason = "max_tokens" if result.finish_reason != "stop" else "stop_sequence" if own else "end_turn"
        return {"stop_reason": reason, "stop_sequence": own}


def _usage(result: GenerationResult) -> MessageUsage:
    stats = result.stats
    return {
        "input_tokens": stats.prompt_tokens - stats.reused_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": stats.reused_tokens,
        "output_tokens": stats.new_tokens,
    }
