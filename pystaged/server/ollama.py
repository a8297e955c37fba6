"""/api: Ollama's interface, for programs that know no other."""

from __future__ import annotations

import json
import time
from abc import abstractmethod
from datetime import datetime, timezone
from typing import Annotated, Any, Literal

from pydantic import Field
from typing_extensions import NotRequired, TypedDict

from pystaged.chat.turn import Block, Dialect
from pystaged.loading.file_types import file_type_name
from pystaged.recommended import ANSWER_TOKENS
from pystaged.result import GenerationResult, Piece
from pystaged.sequence import Sequence as Text
from pystaged.server import chats, completions
from pystaged.server.answer_types import TokenLogprob
from pystaged.server.embeddings import embedded
from pystaged.server.errors import ApiError
from pystaged.server.figures import timings
from pystaged.server.logprobs import of_chat
from pystaged.server.options import refuse
from pystaged.server.reply import Sender, encoded
from pystaged.server.request_types import (
    MOST_TOOLS,
    ChatRequest,
    CompletionRequest,
    ModelRequest,
    Open,
    Prompts,
    TextRequest,
    Tool,
)
from pystaged.server.state import State
from pystaged.server.tools import Manner, knows_tools
from pystaged.server.turn_answer import EventAnswer, Turns, read_arguments

VERSION = "0.12.6"  # of Ollama, whose interface this is; clients refuse older ones
# Unsupported members that would change the answer, with the values that have no effect.
_UNSUPPORTED: dict[str, tuple[Any, ...]] = {"images": ([],), "template": ("",), "context": ([],)}
_UNSUPPORTED_OPTIONS: dict[str, tuple[Any, ...]] = {"mirostat": (0,), "tfs_z": (1,)}
_NEVER = "9999-12-31T23:59:59Z"
_FIRST, _LAST = {"done": False}, {"done": True}


class OllamaOptions(TextRequest):
    """Options of a text; those of loading, such as num_ctx, are the server's."""

    num_predict: Annotated[int, Field(ge=-2, lt=2**31)] | None = None


class CalledTool(Open):
    """A function that was called."""

    name: str
    arguments: dict[str, Any] = {}  # noqa: RUF012  pydantic copies it


class OllamaCall(Open):
    """A tool call in an earlier answer."""

    function: CalledTool


class OllamaMessage(Open):
    """A message."""

    role: str
    content: str | None = None
    thinking: str | None = None
    tool_calls: Annotated[list[OllamaCall], Field(max_length=MOST_TOOLS, fail_fast=True)] | None = None
    tool_name: str | None = None


class _Request(ModelRequest):
    """Members that requests for texts share."""

    stream: bool | None = True
    format: Literal["", "json"] | dict[str, Any] | None = None
    options: OllamaOptions | None = None
    think: bool | str | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None


class OllamaChatRequest(_Request):
    """A request to /api/chat."""

    messages: Annotated[list[OllamaMessage], Field(max_length=4096, fail_fast=True)] = []  # noqa: RUF012  pydantic copies it
    tools: Annotated[list[Tool], Field(max_length=MOST_TOOLS, fail_fast=True)] | None = None


class GenerateRequest(_Request):
    """A request to /api/generate."""

    prompt: str = ""
    suffix: str | None = None
    system: str | None = None
    raw: bool | None = None


class EmbedRequest(ModelRequest):
    """A request to /api/embed."""

    input: Prompts
    dimensions: int | None = None


class ShowRequest(ModelRequest):
    """A request to /api/show."""


class _Answered(TypedDict):
    """Members that all answers have; durations are in nanoseconds."""

    model: str
    created_at: str
    done: bool
    done_reason: NotRequired[Literal["stop", "length", "load"]]
    total_duration: NotRequired[int]
    load_duration: NotRequired[int]
    prompt_eval_count: NotRequired[int]
    prompt_eval_duration: NotRequired[int]
    eval_count: NotRequired[int]
    eval_duration: NotRequired[int]
    logprobs: NotRequired[list[TokenLogprob]]


class OllamaChat(_Answered):
    """An answer of /api/chat, or a part of its stream."""

    message: dict[str, Any]


class OllamaText(_Answered):
    """An answer of /api/generate, or a part of its stream."""

    response: str
    thinking: NotRequired[str]


class ModelDetails(TypedDict):
    format: Literal["gguf"]
    family: str
    families: list[str]
    parameter_size: str
    parent_model: str
    quantization_level: str


class _Named(TypedDict):
    name: str
    model: str
    size: int
    digest: str
    details: ModelDetails


class OllamaModel(_Named):
    modified_at: str


class RunningModel(_Named):
    expires_at: str
    size_vram: int
    context_length: int


class OllamaModels(TypedDict):
    """The list of models, which has one."""

    models: list[OllamaModel]


class RunningModels(TypedDict):
    """The list of loaded models, which has one."""

    models: list[RunningModel]


class Shown(TypedDict):
    """The model's properties; its context length is the server's."""

    modified_at: str
    template: str
    details: ModelDetails
    model_info: dict[str, Any]
    capabilities: list[str]


class Embedded(TypedDict):
    """The answer of /api/embed; durations are in nanoseconds."""

    model: str
    embeddings: list[list[float]]
    total_duration: int
    load_duration: int
    prompt_eval_count: int


class Version(TypedDict):
    """The version of Ollama whose interface this is."""

    version: str


def version(state: State) -> Version:
    """The version of the interface."""
    del state
    return {"version": VERSION}


def tags(state: State) -> OllamaModels:
    """List the server's model."""
    return {"models": [{**_named(state), "modified_at": _moment(state.created)}]}


def running(state: State) -> RunningModels:
    """List the server's model, which stays loaded."""
    named, engine = _named(state), state.engine
    video = 0 if set(engine.model.devices) <= {"CPU"} else named["size"]
    return {"models": [{**named, "expires_at": _NEVER, "size_vram": video, "context_length": engine.n_ctx}]}


def show(state: State, request: ShowRequest) -> Shown:
    """Describe the server's model."""
    del request
    engine, family = state.engine, _details(state)["family"]
    template = engine.tokenizer.metadata.get("tokenizer.chat_template", "")
    can = {
        "completion": True,
        "tools": knows_tools(engine.chat_format),
        "thinking": Dialect.of(template, engine.tokenizer).thinking is not None,
        "insert": engine.tokenizer.infill_tokens.keys() >= {"prefix", "suffix", "middle"},
    }
    return {
        "modified_at": _moment(state.created),
        "template": template,
        "details": _details(state),
        "model_info": {
            "general.architecture": family,
            f"{family}.context_length": engine.n_ctx,
            f"{family}.embedding_length": engine.model.width,
        },
        "capabilities": [name for name, is_so in can.items() if is_so],
    }


async def embed(state: State, request: EmbedRequest) -> Embedded:
    """Embed texts. Raises ApiError."""
    begun = time.monotonic()
    refuse({"dimensions": request.dimensions}, {"dimensions": ()})
    vectors, count = await embedded(state, completions.listed(request.input))
    return {
        "model": state.settings.name,
        "embeddings": vectors.tolist(),
        "total_duration": round(1e9 * (time.monotonic() - begun)),
        "load_duration": 0,
        "prompt_eval_count": count,
    }


def chat(state: State, request: OllamaChatRequest) -> ChatAnswer:
    """Check a request and prepare its sequence; may take seconds. Raises ApiError and ChatTemplateError."""
    if not request.messages:
        return ChatAnswer(state, TextRequest.model_validate(_shared(request)), _turns(state, [], 0))
    asked = _chat(request, _messages(request.messages), request.tools)
    return ChatAnswer(state, asked, chats.turns(state, asked))


def generate(state: State, request: GenerateRequest) -> TextAnswer:
    """As chat, for one prompt, or for a text that the model continues."""
    if not (request.prompt or request.suffix):
        return TextAnswer(state, TextRequest.model_validate(_shared(request)), _turns(state, [], 0))
    if not (request.raw or request.suffix):
        system = [{"role": "system", "content": request.system}] if request.system else []
        asked = _chat(request, [*system, {"role": "user", "content": request.prompt}])
        return TextAnswer(state, asked, chats.turns(state, asked))
    raw = CompletionRequest.model_validate({**_shared(request), "prompt": request.prompt, "suffix": request.suffix})
    logprobs = (request.top_logprobs or 0) if request.logprobs else None
    sequences, _, seed = completions.texts(state, raw, ANSWER_TOKENS, logprobs)
    return TextAnswer(state, raw, _turns(state, sequences, seed))


def _turns(state: State, sequences: list[Text], seed: int) -> Turns:
    """Answers that are read as they are; none where the request only loads the model."""
    manner = Manner(Dialect.of("", state.engine.tokenizer), splits=False, is_open=False, schemas=None)
    return Turns(sequences, seed, manner)


def _shared(request: _Request) -> dict[str, Any]:
    """The members of our own requests that a request gives."""
    options = request.options or OllamaOptions()
    refuse(request.model_extra or {}, _UNSUPPORTED)
    refuse(options.model_extra or {}, _UNSUPPORTED_OPTIONS)
    found = options.model_dump(include=set(TextRequest.model_fields), exclude_none=True)
    if options.num_predict is not None:
        found["max_tokens"] = options.num_predict if options.num_predict > 0 else -1
    if request.format:
        found["json_schema"] = {"type": "object"} if request.format == "json" else request.format
    return found | {"stream": bool(request.stream), "stream_options": None, "n": 1}


def _chat(request: _Request, messages: list[dict[str, Any]], tools: list[Tool] | None = None) -> ChatRequest:
    given = {**_shared(request), "messages": messages, "tools": [tool.model_dump() for tool in tools or []]}
    if request.think is not None:
        effort = request.think
        given["reasoning_effort"] = effort if isinstance(effort, str) else "medium" if effort else "none"
    return ChatRequest.model_validate(given | {"logprobs": request.logprobs, "top_logprobs": request.top_logprobs})


def _messages(given: list[OllamaMessage]) -> list[dict[str, Any]]:
    """Messages of /v1/chat/completions. Results belong to the calls before them in their order, or by name."""
    found: list[dict[str, Any]] = []
    waiting: list[tuple[str, str]] = []  # ids and names of calls without results
    for message in given:
        refuse(message.model_extra or {}, _UNSUPPORTED)
        told: dict[str, Any] = {"role": message.role, "content": message.content or ""}
        if message.thinking:
            told["reasoning_content"] = message.thinking
        if message.tool_calls:
            functions = [call.function for call in message.tool_calls]
            waiting = [(f"call_{len(found)}_{i}", function.name) for i, function in enumerate(functions)]
            told["tool_calls"] = [
                {"id": key, "function": {"name": function.name, "arguments": json.dumps(function.arguments)}}
                for (key, _), function in zip(waiting, functions, strict=True)
            ]
        elif message.role == "tool":
            call = next((each for each in waiting if each[1] == message.tool_name), waiting[0] if waiting else None)
            if call:
                waiting.remove(call)
                told |= {"tool_call_id": call[0], "name": call[1]}
        found.append(told)
    return found


class _Answer(EventAnswer):
    """An answer, whole or in lines of JSON."""

    names_events = False
    prefix = "ollama"

    @abstractmethod
    def said(self, text: str, thinking: str = "", calls: list[dict[str, Any]] | None = None) -> dict[str, Any]:
        """The members for new text, reasoning or calls."""

    def error_event(self, error: ApiError) -> bytes:
        return error.json("/api/")

    async def send(self, sender: Sender) -> None:
        if self.sequences:
            await super().send(sender)
        else:  # the model is loaded
            await sender.whole(encoded(self.framed(self.said("") | _LAST | {"done_reason": "load"}, {})))

    def framed(self, part: dict[str, Any], figures: dict[str, Any]) -> dict[str, Any]:
        del figures
        return {"model": self.state.settings.name, "created_at": _moment(time.time()), **part}

    def choice(self, i: int, result: GenerationResult) -> dict[str, Any]:
        reader = self.read(i, result)
        text, thinking = ("".join(block.text for block in reader.of_kind(kind)) for kind in ("text", "reasoning"))
        said = self.said(text, thinking, [_call(block) for block in reader.of_kind("call") if block.is_whole])
        return self.framed(said | self._end(result) | self._logprobs(result.logprobs), {})

    def parts(self, i: int, piece: Piece) -> list[dict[str, Any]]:
        found = super().parts(i, piece)
        if piece.logprobs:
            found = found or [self.said("") | _FIRST]
            found[0] |= self._logprobs(piece.logprobs)
        return found

    def more(self, i: int, block: Block, text: str) -> list[dict[str, Any]]:
        del i
        if block.kind == "call":
            return []  # sent when it is whole
        return [(self.said(text) if block.kind == "text" else self.said("", text)) | _FIRST]

    def closed(self, i: int, block: Block, result: GenerationResult | None) -> list[dict[str, Any]]:
        del i, result
        is_call = block.kind == "call" and block.is_whole
        return [self.said("", calls=[_call(block)]) | _FIRST] if is_call else []

    def ending(self, i: int, result: GenerationResult) -> list[dict[str, Any]]:
        del i
        return [self.said("") | self._end(result)]

    def _end(self, result: GenerationResult) -> dict[str, Any]:
        found = timings([result.stats])
        return {
            **_LAST,
            "done_reason": "stop" if result.finish_reason == "stop" else "length",
            "total_duration": round(1e9 * (time.monotonic() - self._begun)),
            "load_duration": 0,
            "prompt_eval_count": result.stats.prompt_tokens,
            "prompt_eval_duration": round(1e6 * found["prompt_ms"]),
            "eval_count": result.stats.new_tokens,
            "eval_duration": round(1e6 * found["predicted_ms"]),
        }

    def _logprobs(self, logprobs: Any) -> dict[str, Any]:
        return {"logprobs": of_chat(self.tokenizer, logprobs)["content"]} if logprobs else {}


class ChatAnswer(_Answer):
    """An answer of /api/chat."""

    described = OllamaChat

    def said(self, text: str, thinking: str = "", calls: list[dict[str, Any]] | None = None) -> dict[str, Any]:
        more = {"thinking": thinking, "tool_calls": calls}
        return {"message": {"role": "assistant", "content": text} | {name: each for name, each in more.items() if each}}


class TextAnswer(_Answer):
    """An answer of /api/generate."""

    described = OllamaText

    def said(self, text: str, thinking: str = "", calls: list[dict[str, Any]] | None = None) -> dict[str, Any]:
        del calls
        return {"response": text} | ({"thinking": thinking} if thinking else {})


def _call(block: Block) -> dict[str, Any]:
    return {"function": {"name": block.name, "arguments": read_arguments(block.text)}}


def _named(state: State) -> _Named:
    name = state.settings.name
    return {
        "name": name,
        "model": name,
        "size": state.engine.model.file_bytes,
        "digest": state.fingerprint,
        "details": _details(state),
    }


def _details(state: State) -> ModelDetails:
    metadata = state.engine.tokenizer.metadata
    family = metadata.get("general.architecture", "")
    size = metadata.get("general.size_label", "")
    return {
        "format": "gguf",
        "family": family,
        "families": [family],
        "parameter_size": size,
        "parent_model": "",
        "quantization_level": file_type_name(metadata.get("general.file_type", "")),
    }


def _moment(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, timezone.utc).isoformat()
