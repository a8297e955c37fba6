"""Types of requests. Unknown members are ignored, as OpenAI's clients expect."""

from __future__ import annotations

import re
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar

from pydantic import AliasChoices, BaseModel, BeforeValidator, ConfigDict, Field, PrivateAttr, create_model

from pystaged.options.table import SAMPLING, Option

MOST_TEXTS = 128  # most sequences of a request
_MOST_BIASES = 1024
_LONGEST_GRAMMAR = 1 << 17  # characters
_UNITS = {"ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0}  # of Ollama's durations
_PART = re.compile(r"(\d+(?:\.\d+)?)(ms|s|m|h)", re.ASCII)

Number = Annotated[float, Field(allow_inf_nan=False)]
# Validation stops at a list's first error: an error for each of a million items would take a minute and gigabytes.
Token = Annotated[int, Field(strict=True, ge=0, lt=2**31)]
Tokens = Annotated[list[Token], Field(max_length=1 << 20, fail_fast=True)]
T = TypeVar("T")
Many = Annotated[list[T], Field(max_length=4096, fail_fast=True)]
Tools = Annotated[list[T], Field(max_length=512, fail_fast=True)]


def _pairs(value: Any) -> Any:
    """Convert llama.cpp's list of pairs to OpenAI's dictionary; false excludes a token."""
    if isinstance(value, (dict, list)) and len(value) > _MOST_BIASES:
        raise ValueError(f"may have at most {_MOST_BIASES} entries, not {len(value)}")
    if not isinstance(value, list):
        return value
    if not all(isinstance(each, list) and len(each) == 2 for each in value):
        raise ValueError("must be a dictionary, or a list of pairs of a token and a number")
    return {str(token): -1e30 if bias is False else bias for token, bias in value}


def _seconds(value: Any) -> Any:
    """Convert one of Ollama's durations, such as "1h30m", to seconds, unless it is a number already."""
    words = value.removeprefix("-") if isinstance(value, str) else ""
    if not 0 < len(words) < 64 or _PART.sub("", words):
        return value
    found = sum(float(number) * _UNITS[unit] for number, unit in _PART.findall(words))
    return -found if words != value else found


def only(*kinds: str | None) -> BeforeValidator:
    """Skips the items of a list that are of other types: clients send what only their own provider knows."""

    def known(value: Any) -> Any:
        if not isinstance(value, list):
            return value
        return [each for each in value if not isinstance(each, dict) or each.get("type") in kinds]

    return BeforeValidator(known)


class Open(BaseModel):
    """Keeps unknown members."""

    model_config = ConfigDict(extra="allow")


class StreamOptions(BaseModel):
    """Further members of a stream's events."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class ModelRequest(Open):
    """A request that may name the model."""

    model_config = ConfigDict(protected_namespaces=())

    # Ollama's older clients say `name`.
    model: Annotated[str | None, Field(validation_alias=AliasChoices("model", "name"))] = None
    keep_alive: Annotated[Number, BeforeValidator(_seconds)] | None = None
    _came: float = PrivateAttr(default_factory=time.monotonic)

    @property
    def came(self) -> float:
        """When it was read, by time.monotonic()."""
        return self._came


def _member(option: Option) -> Any:
    """Declare an option as a request member."""
    kind = option.plain
    bounds: dict[str, Any] = option.bounds | ({"allow_inf_nan": False} if kind is float else {})
    return Annotated[kind, Field(**bounds, description=option.help)] | None, None


if TYPE_CHECKING:
    _SamplingRequest = ModelRequest
else:
    _SamplingRequest = create_model(
        "_SamplingRequest", __base__=ModelRequest, **{name: _member(option) for name, option in SAMPLING.items()}
    )


class TextRequest(_SamplingRequest):
    """Members that all generation requests share: OpenAI's, llama.cpp's, and this server's. Options of pystaged.options
    that are not declared here are added from its tables."""

    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: Annotated[int, Field(ge=1, le=MOST_TEXTS)] | None = None
    max_tokens: Annotated[int, Field(ge=-1, lt=2**31)] | None = None
    logit_bias: Annotated[dict[str, Number], Field(max_length=_MOST_BIASES), BeforeValidator(_pairs)] | None = None
    seed: Annotated[int, Field(ge=-(2**63), lt=2**64)] | None = None
    stop: str | Annotated[list[str], Field(max_length=64, fail_fast=True)] | None = None
    top_k: Annotated[int, Field(ge=-1, lt=2**31)] | None = None  # -1 means 0, as in vLLM
    dry_sequence_breakers: Annotated[list[str], Field(max_length=16, fail_fast=True)] | None = None
    stop_loops: bool | None = None
    grammar: Annotated[str, Field(max_length=_LONGEST_GRAMMAR)] | None = None
    json_schema: dict[str, Any] | None = None
    cache_prompt: bool | None = None
    timings_per_token: bool | None = None
    return_progress: bool | None = None
    speculate: bool | None = None
    pystaged: bool | None = None


def _filled(value: Any) -> Any:
    if value == []:
        raise ValueError("the list is empty")
    return value


# A text as a string or as token ids, or a list of either.
Prompts = Annotated[
    Annotated[str, Field(min_length=1)]
    | Annotated[Tokens, Field(min_length=1)]
    | Annotated[
        list[Annotated[str | Annotated[Tokens, Field(min_length=1)], Field(union_mode="left_to_right")]],
        Field(min_length=1, max_length=MOST_TEXTS, fail_fast=True),
    ],
    Field(union_mode="left_to_right"),
    BeforeValidator(_filled),
]


class CompletionRequest(TextRequest):
    """A request to /v1/completions."""

    prompt: Prompts
    echo: bool | None = None
    logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    suffix: str | None = None
    best_of: Annotated[int, Field(ge=1)] | None = None


class _NativeRequest(TextRequest):
    """Members that llama-server's own requests share; n_predict is renamed to max_tokens."""

    n_probs: Annotated[int, Field(ge=0, le=100)] | None = None
    return_tokens: bool | None = None
    response_fields: Annotated[list[str], Field(max_length=256, fail_fast=True)] | None = None


class NativeRequest(CompletionRequest, _NativeRequest):
    """A request to /completion."""


class Snippet(BaseModel):
    """A text of another file."""

    text: str
    filename: str = "tmp"


class InfillRequest(_NativeRequest):
    """A request to /infill: text between input_prefix and input_suffix, which begins with the prompt."""

    input_prefix: str
    input_suffix: str
    input_extra: Many[Snippet] | None = None
    prompt: str | None = None


class Part(Open):
    """A part of a message."""

    type: str
    text: str | None = None


Parts = Many[Part]


def joined(content: str | Sequence[Part]) -> str:
    """The text of a message's content, given whole or in parts."""
    return content if isinstance(content, str) else "".join(part.text or "" for part in content)


class FunctionCall(BaseModel):
    """A called function; its arguments are JSON text, or an object."""

    name: str
    arguments: str | dict[str, Any] | None = None


class ToolCall(Open):
    """A tool call in an earlier answer."""

    id: str | None = None
    type: Literal["function"] = "function"
    function: FunctionCall


class ChatMessage(Open):
    """A message; further members are passed to the chat template."""

    role: str
    content: str | Parts | None = None
    tool_calls: Annotated[list[ToolCall], Field(fail_fast=True)] | None = None
    tool_call_id: str | None = None


ToolName = Annotated[str, Field(pattern=r"^[a-zA-Z0-9_.-]{1,128}$")]


class Function(Open):
    """A function that the model may call; its parameters are a JSON schema."""

    name: ToolName
    description: str | None = None
    parameters: dict[str, Any] | None = None


class Tool(BaseModel):
    """A tool."""

    type: Literal["function"]
    function: Function


class ToolChoice(BaseModel):
    """The one function that must be called."""

    type: Literal["function"] = "function"
    function: FunctionCall


class JsonSchema(Open):
    """A schema that the answer must match."""

    name: str | None = None
    schema_: dict[str, Any] | None = Field(None, alias="schema")


class ResponseFormat(Open):
    """The format of the answer."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None
    schema_: dict[str, Any] | None = Field(None, alias="schema")


class Prediction(BaseModel):
    """A text that the answer is expected to repeat mostly."""

    type: Literal["content"] = "content"
    content: str | Parts


class TurnRequest(TextRequest):
    """Members that requests for answers share in all interfaces."""

    chat_template_kwargs: dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    reasoning_budget_tokens: Annotated[int, Field(ge=-1, lt=2**31)] | None = None
    reasoning_format: str | None = None


class ChatRequest(TurnRequest):
    """A request to /v1/chat/completions."""

    messages: Annotated[list[ChatMessage], Field(min_length=1, max_length=4096, fail_fast=True)]
    max_completion_tokens: Annotated[int, Field(ge=-1, lt=2**31)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    response_format: ResponseFormat | None = None
    tools: Annotated[Tools[Tool], only("function")] | None = None
    tool_choice: Literal["none", "auto", "required"] | ToolChoice | None = None
    prediction: Prediction | None = None
    continue_final_message: bool | None = None
    add_generation_prompt: bool | None = None
    reasoning_effort: str | None = None


class EmbeddingsRequest(ModelRequest):
    """A request to /v1/embeddings or /api/embed."""

    input: Prompts
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: int | None = None


class TokenizeRequest(ModelRequest):
    """A request to /tokenize, with llama-server's `content` or vLLM's `prompt`."""

    content: str | None = None
    prompt: str | None = None
    add_special: bool | None = None
    add_special_tokens: bool | None = None
    parse_special: bool | None = None
    with_pieces: bool | None = None


class DetokenizeRequest(ModelRequest):
    """A request to /detokenize."""

    tokens: Tokens
