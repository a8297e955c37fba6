"""/api: Ollama's interface, for programs that know no other."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Iterable, Mapping
from dataclasses import replace
from datetime import datetime, timezone
from typing import Annotated, Any, Literal

from pydantic import Field

from pystaged.chat.turn import Block, Dialect, TurnReader
from pystaged.loading.metadata import file_type_name
from pystaged.options.recommended import ANSWER_TOKENS
from pystaged.result import GenerationResult, Piece
from pystaged.server import chats, completions
from pystaged.server.answer import Answer, read_arguments
from pystaged.server.errors import ApiError
from pystaged.server.figures import of_chat, timings
from pystaged.server.models import Models, Served, State
from pystaged.server.options import refuse
from pystaged.server.request_types import (
    ChatMessage,
    ChatRequest,
    CompletionRequest,
    EmbeddingsRequest,
    Many,
    ModelRequest,
    TextRequest,
    Tool,
    Tools,
)
from pystaged.server.tokens import embedded

VERSION = "0.12.10"  # of Ollama, whose interface this is; clients refuse older ones
# Unsupported members that would change the answer, with the values that have no effect.
_UNSUPPORTED: dict[str, tuple[Any, ...]] = {"images": ([],), "template": ("",), "context": ([],)}
_UNSUPPORTED_OPTIONS: dict[str, tuple[Any, ...]] = {"mirostat": (0,), "tfs_z": (1,)}
_NEVER = "9999-12-31T23:59:59Z"
_FIRST, _LAST = {"done": False}, {"done": True}
_EFFORTS: dict[bool | str, str] = {True: "medium", False: "none"}


class OllamaOptions(TextRequest):
    """Options of a text; those of loading, such as num_ctx, are the server's."""

    num_predict: Annotated[int, Field(ge=-2, lt=2**31)] | None = None


class OllamaMessage(ChatMessage):
    """A message."""

    content: str | None = None
    thinking: str | None = None
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

    messages: Many[OllamaMessage] = []  # noqa: RUF012  pydantic copies it
    tools: Tools[Tool] | None = None


class GenerateRequest(_Request):
    """A request to /api/generate."""

    prompt: str = ""
    suffix: str | None = None
    system: str | None = None
    raw: bool | None = None


def version(_models: Models) -> dict[str, Any]:
    """The version of the interface."""
    return {"version": VERSION}


def tags(models: Models) -> dict[str, Any]:
    """List the models."""
    return {"models": [{**_named(served), "modified_at": _moment(models.created)} for served in models.all.values()]}


def running(models: Models) -> dict[str, Any]:
    """List the loaded models; the only one of a server stays loaded."""
    found = []
    for served in models.all.values():
        if state := served.state:
            named, engine = _named(served), state.engine
            video = 0 if set(engine.model.devices) <= {"CPU"} else named["size"]
            rest = served.rest + served.used - time.monotonic()
            lasts = models.is_one or rest > 1e9  # seconds; a moment's year has four digits
            expires = _NEVER if lasts else _moment(time.time() + rest)
            found.append({**named, "expires_at": expires, "size_vram": video, "context_length": engine.n_ctx})
    return {"models": found}


async def moved(models: Models, request: OllamaChatRequest | GenerateRequest) -> dict[str, Any]:
    """Load the model of a request without text, or unload it if the request says so. Raises ApiError."""
    kind = ChatAnswer if isinstance(request, OllamaChatRequest) else TextAnswer
    _shared(request)  # refuses what is not supported
    if request.keep_alive == 0 and not models.is_one:
        name, reason = models.leave(request.model), "unload"
    else:
        async with models.lent(request.model, request.keep_alive) as state:
            name, reason = state.name, "load"
    return {"model": name, "created_at": _moment(time.time()), **kind.said(""), **_LAST, "done_reason": reason}


def show(state: State, request: ModelRequest) -> dict[str, Any]:
    """Describe the server's model."""
    del request
    engine, details = state.engine, _details(state.engine.tokenizer.metadata)
    family = details["family"]
    can = {
        "completion": True,
        "tools": engine.chat_format.knows_tools,
        "thinking": _can_think(state),
        "insert": engine.tokenizer.infill_tokens.keys() >= {"prefix", "suffix", "middle"},
    }
    return {
        "modified_at": _moment(state.created),
        "template": engine.tokenizer.metadata.get("tokenizer.chat_template", ""),
        "details": details,
        "model_info": {
            "general.architecture": family,
            f"{family}.context_length": engine.n_ctx,
            f"{family}.embedding_length": engine.model.width,
        },
        "capabilities": [name for name, is_so in can.items() if is_so],
    }


def _can_think(state: State) -> bool:
    template = state.engine.tokenizer.metadata.get("tokenizer.chat_template", "")
    return Dialect.of(template, state.engine.tokenizer).thinking is not None


class PromptRequest(EmbeddingsRequest):
    """A request to /api/embeddings, which is older than /api/embed."""

    input: str = Field(alias="prompt")


async def embed(state: State, request: EmbeddingsRequest) -> dict[str, Any]:
    """Embed texts. Raises ApiError."""
    vectors, count = await embedded(state, request)
    return {
        "model": state.name,
        "embeddings": vectors.tolist(),
        **_durations(state, request.came),
        "prompt_eval_count": count,
    }


async def embed_one(state: State, request: PromptRequest) -> dict[str, Any]:
    """Embed a text. Raises ApiError."""
    vectors, _ = await embedded(state, request)
    return {"embedding": vectors[0].tolist()}


def chat(state: State, request: OllamaChatRequest) -> Answer:
    """Check a request and prepare its sequence; may take seconds. Raises ApiError and ChatTemplateError."""
    asked = _chat(state, request, [*map(_message, request.messages)], request.tools or ())
    return ChatAnswer(state, asked, chats.turns(state, asked))


def generate(state: State, request: GenerateRequest) -> Answer:
    """As chat, for one prompt, or for a text that the model continues."""
    is_chat = "tokenizer.chat_template" in state.engine.tokenizer.metadata or request.system or request.think
    if is_chat and not (request.raw or request.suffix):
        system = [{"role": "system", "content": request.system}] if request.system else []
        asked = _chat(state, request, [*system, {"role": "user", "content": request.prompt}])
        return TextAnswer(state, asked, chats.turns(state, asked))
    raw = CompletionRequest.model_validate({**_shared(request), "prompt": request.prompt, "suffix": request.suffix})
    texts = completions.texts(state, raw, ANSWER_TOKENS, (request.top_logprobs or 0) if request.logprobs else None)
    return TextAnswer(state, raw, replace(texts, readers=[TurnReader()]))


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
    return found | {"stream": bool(request.stream), "n": 1}


def _chat(state: State, request: _Request, messages: list[dict[str, Any]], tools: Iterable[Tool] = ()) -> ChatRequest:
    if request.think and not _can_think(state):
        raise ApiError(400, f'"{state.name}" does not support thinking')
    given = {**_shared(request), "messages": messages, "tools": [tool.model_dump() for tool in tools]}
    if request.think is not None:
        given["reasoning_effort"] = _EFFORTS.get(request.think, request.think)
    return ChatRequest.model_validate(given | {"logprobs": request.logprobs, "top_logprobs": request.top_logprobs})


def _message(given: OllamaMessage) -> dict[str, Any]:
    """A message of /v1/chat/completions."""
    refuse(given.model_extra or {}, _UNSUPPORTED)
    told = given.model_dump(include={"role", "content", "tool_calls", "tool_call_id"}, exclude_none=True)
    more = {"reasoning_content": given.thinking, "name": given.tool_name}
    return {"content": ""} | told | {name: value for name, value in more.items() if value}


class ChatAnswer(Answer):
    """An answer of /api/chat, whole or in lines of JSON."""

    @staticmethod
    def said(text: str, thinking: str = "", calls: list[dict[str, Any]] | None = None) -> dict[str, Any]:
        """The members for new text, reasoning or calls."""
        more = {"thinking": thinking, "tool_calls": calls}
        return {"message": {"role": "assistant", "content": text} | {name: each for name, each in more.items() if each}}

    def framed(self, part: dict[str, Any], _figures: dict[str, Any]) -> dict[str, Any]:
        return {"model": self.state.name, "created_at": _moment(time.time()), **part}

    def choice(self, i: int, result: GenerationResult) -> dict[str, Any]:
        reader = self.readers[i]
        text, thinking = ("".join(block.text for block in reader.of_kind(kind)) for kind in ("text", "reasoning"))
        said = self.said(text, thinking, [self._call(i, block) for block in reader.of_kind("call") if block.is_whole])
        return self.framed(said | self._end(result) | self._logprobs(result.logprobs), {})

    def parts(self, i: int, piece: Piece) -> list[dict[str, Any]]:
        found = super().parts(i, piece)
        if piece.logprobs:
            found = found or [self.said("") | _FIRST]
            found[0] |= self._logprobs(piece.logprobs)
        return found

    def more(self, _i: int, block: Block, text: str) -> list[dict[str, Any]]:
        if block.kind == "call":
            return []  # sent when it is whole
        return [(self.said(text) if block.kind == "text" else self.said("", text)) | _FIRST]

    def closed(self, i: int, block: Block, _result: GenerationResult | None) -> list[dict[str, Any]]:
        return [self.said("", "", [self._call(i, block)]) | _FIRST] if block.kind == "call" and block.is_whole else []

    def ending(self, _i: int, result: GenerationResult) -> list[dict[str, Any]]:
        return [self.said("") | self._end(result)]

    def _call(self, i: int, block: Block) -> dict[str, Any]:
        function = {"name": block.name, "arguments": read_arguments(block.text)}
        return {"id": self.call_id("call", i, block), "function": function}

    def _end(self, result: GenerationResult) -> dict[str, Any]:
        found = timings([result.stats])
        return {
            **_LAST,
            "done_reason": "stop" if result.finish_reason == "stop" else "length",
            **_durations(self.state, self.begun),
            "prompt_eval_count": result.stats.prompt_tokens,
            "prompt_eval_duration": round(1e6 * found["prompt_ms"]),
            "eval_count": result.stats.new_tokens,
            "eval_duration": round(1e6 * found["predicted_ms"]),
        }

    def _logprobs(self, logprobs: Any) -> dict[str, Any]:
        return {"logprobs": of_chat(self.tokenizer, logprobs)["content"]} if logprobs else {}


class TextAnswer(ChatAnswer):
    """An answer of /api/generate."""

    @staticmethod
    def said(text: str, thinking: str = "", _calls: list[dict[str, Any]] | None = None) -> dict[str, Any]:
        return {"response": text} | ({"thinking": thinking} if thinking else {})


def _durations(state: State, came: float) -> dict[str, Any]:
    """Nanoseconds since a request came, and those of them in which its model was loaded."""
    spent = {"total_duration": time.monotonic() - came, "load_duration": max(0.0, state.ready - came)}
    return {name: round(1e9 * seconds) for name, seconds in spent.items()}


def is_empty(asked: object) -> bool:
    """Whether a request asks for no text: its model is to be loaded, or unloaded."""
    texts = [getattr(asked, name, None) for name in ("messages", "prompt", "suffix")]
    return isinstance(asked, _Request) and not any(texts)


def _named(served: Served) -> dict[str, Any]:
    state = served.state
    return {
        "name": served.name,
        "model": served.name,
        "size": served.size,
        "digest": hashlib.sha256(f"{served.name} {served.size}".encode()).hexdigest(),  # Ollama's client cuts it
        "details": _details(state.engine.tokenizer.metadata if state else served.metadata),
    }


def _details(metadata: Mapping[str, str]) -> dict[str, Any]:
    family = metadata.get("general.architecture", "")
    return {
        "format": "gguf",
        "family": family,
        "families": [family],
        "parameter_size": metadata.get("general.size_label", ""),
        "parent_model": "",
        "quantization_level": file_type_name(metadata.get("general.file_type", "")),
    }


def _moment(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, timezone.utc).isoformat()
