"""/v1/responses: OpenAI's newer interface, text only; nothing is stored."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field
from typing_extensions import NotRequired, TypedDict

from pystaged.result import GenerationResult, Piece
from pystaged.server import chats
from pystaged.server.answer import EventAnswer, ended
from pystaged.server.answer_types import PromptDetails, Timings
from pystaged.server.figures import usage
from pystaged.server.options import chat_request, refuse
from pystaged.server.request_types import Open, Part, TextRequest, joined
from pystaged.server.state import State

# Unsupported members that would change the answer, with the values that have no effect.
_UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    "n": (1,),
    "previous_response_id": (),
    "conversation": (),
    "background": (False,),
    "prompt": (),
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "reasoning": ({}, {"effort": None}, {"effort": "none"}),
    "include": ([],),
    "top_logprobs": (0,),
    "truncation": ("disabled",),
}


class InputPart(Part):
    """A part of a message."""

    type: Literal["input_text", "output_text", "text"]
    text: str


class InputItem(Open):
    """A message."""

    type: Literal["message"] | None = None
    role: Literal["user", "assistant", "system", "developer"]
    content: str | Annotated[list[InputPart], Field(max_length=4096, fail_fast=True)]


class TextFormat(Open):
    """The format of the answer."""

    type: Literal["text", "json_object", "json_schema"]
    schema_: dict[str, Any] | None = Field(None, alias="schema")


class TextConfig(Open):
    """The member `text` of a request."""

    format: TextFormat | None = None


class ResponseRequest(TextRequest):
    """A request to /v1/responses."""

    input: str | Annotated[list[InputItem], Field(min_length=1, max_length=4096, fail_fast=True)]
    instructions: str | None = None
    max_output_tokens: Annotated[int, Field(ge=1, lt=2**31)] | None = None
    text: TextConfig | None = None


class OutputDetails(TypedDict):
    """Reasoning tokens of an answer: always 0."""

    reasoning_tokens: int


class ResponseUsage(TypedDict):
    """Tokens."""

    input_tokens: int
    input_tokens_details: PromptDetails
    output_tokens: int
    output_tokens_details: OutputDetails
    total_tokens: int


class OutputText(TypedDict):
    """The text of an answer."""

    type: Literal["output_text"]
    text: str
    annotations: list[Any]
    logprobs: list[Any]


class OutputMessage(TypedDict):
    """An answer."""

    type: Literal["message"]
    id: str
    role: Literal["assistant"]
    status: Literal["in_progress", "completed", "incomplete"]
    content: list[OutputText]


class Response(TypedDict):
    """An answer of /v1/responses."""

    id: str
    object: Literal["response"]
    created_at: int
    status: Literal["in_progress", "completed", "incomplete"]
    error: None
    incomplete_details: dict[str, str] | None
    instructions: str | None
    max_output_tokens: int | None
    metadata: dict[str, Any]
    model: str
    output: list[OutputMessage]
    parallel_tool_calls: bool
    previous_response_id: None
    store: bool
    temperature: float
    text: dict[str, Any]
    tool_choice: Literal["none"]
    tools: list[Any]
    top_p: float
    truncation: Literal["disabled"]
    usage: ResponseUsage | None
    timings: NotRequired[Timings]
    seed: NotRequired[int]


def begin(state: State, request: ResponseRequest) -> ResponseAnswer:
    """Check a request and prepare its sequence; may take seconds. Raises ApiError and ChatTemplateError."""
    refuse((request.model_extra or {}) | {"n": request.n}, _UNSUPPORTED)
    messages = [{"role": "system", "content": request.instructions}] if request.instructions else []
    items = [InputItem(role="user", content=request.input)] if isinstance(request.input, str) else request.input
    for item in items:
        role = "system" if item.role == "developer" else item.role
        messages.append({"role": role, "content": joined(item.content)})
    more: dict[str, Any] = {"max_completion_tokens": request.max_output_tokens}
    form = request.text.format if request.text else None
    if form is not None:
        more["response_format"] = {"type": form.type, "json_schema": {"schema": form.schema_}}
    sequences, seed = chats.texts(state, chat_request(request, messages, **more), "input")
    return ResponseAnswer(state, request, sequences, seed)


class ResponseAnswer(EventAnswer):
    """An answer of /v1/responses."""

    described = Response
    request: ResponseRequest
    prefix = "resp"
    _sent = 0

    def whole(self, choices: list[dict[str, Any]], figures: dict[str, Any]) -> Any:
        return choices[0] | {"timings": figures["timings"], "seed": figures["seed"]}

    def framed(self, part: dict[str, Any], figures: dict[str, Any]) -> dict[str, Any]:
        self._sent += 1
        return part | {"sequence_number": self._sent - 1} | figures

    def choice(self, i: int, result: GenerationResult) -> dict[str, Any]:
        del i
        return {**self._response(result)}

    def first_parts(self, i: int) -> list[dict[str, Any]]:
        del i
        response, item = self._response(None), self._message("in_progress", None)
        return [
            {"type": "response.created", "response": response},
            {"type": "response.in_progress", "response": response},
            {"type": "response.output_item.added", "output_index": 0, "item": item},
            self._of_content("content_part.added", part=_text("")),
        ]

    def part(self, i: int, piece: Piece) -> dict[str, Any] | None:
        del i
        return self._of_content("output_text.delta", delta=piece.text, logprobs=[]) if piece.text else None

    def last_parts(self, i: int, result: GenerationResult) -> list[dict[str, Any]]:
        del i
        response = self._response(result)
        return [
            self._of_content("output_text.done", text=result.text, logprobs=[]),
            self._of_content("content_part.done", part=_text(result.text)),
            {"type": "response.output_item.done", "output_index": 0, "item": response["output"][0]},
            {"type": f"response.{response['status']}", "response": response},
        ]

    def _of_content(self, name: str, **more: Any) -> dict[str, Any]:
        place = {"item_id": f"msg_{self.key}", "output_index": 0, "content_index": 0}
        return {"type": f"response.{name}", **place, **more}

    def _message(self, status: Literal["in_progress", "completed", "incomplete"], text: str | None) -> OutputMessage:
        return {
            "type": "message",
            "id": f"msg_{self.key}",
            "role": "assistant",
            "status": status,
            "content": [] if text is None else [_text(text)],
        }

    def _response(self, result: GenerationResult | None) -> Response:
        """The response object; None before anything has been generated."""
        is_cut = result is not None and result.finish_reason != "stop"
        status: Any = "in_progress" if result is None else "incomplete" if is_cut else "completed"
        request, sampling = self.request, self.sequences[0].config.sampling
        form = request.text.format if request.text else None
        return {
            "id": f"resp_{self.key}",
            "object": "response",
            "created_at": self.created,
            "status": status,
            "error": None,
            "incomplete_details": _incomplete(result) if result is not None and is_cut else None,
            "instructions": request.instructions,
            "max_output_tokens": request.max_output_tokens,
            "metadata": (request.model_extra or {}).get("metadata") or {},
            "model": self.state.settings.name,
            "output": [] if result is None else [self._message(status, result.text)],
            "parallel_tool_calls": False,
            "previous_response_id": None,
            "store": False,
            "temperature": sampling.temperature,
            "text": {"format": form.model_dump(exclude_none=True, by_alias=True) if form else {"type": "text"}},
            "tool_choice": "none",
            "tools": [],
            "top_p": sampling.top_p,
            "truncation": "disabled",
            "usage": _usage(result) if result is not None else None,
        }


def _incomplete(result: GenerationResult) -> dict[str, str]:
    """OpenAI's reason for an incomplete answer, and whether a loop was the cause."""
    found = {"reason": "max_output_tokens"}
    return found | {"stop_reason": ended(result)["stop_reason"]} if result.finish_reason == "loop" else found


def _text(text: str) -> OutputText:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


def _usage(result: GenerationResult) -> ResponseUsage:
    found = usage([result.stats], 1)
    return {
        "input_tokens": found["prompt_tokens"],
        "input_tokens_details": found["prompt_tokens_details"],
        "output_tokens": found["completion_tokens"],
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": found["total_tokens"],
    }
