"""Types of answers, checked by mypy and described by /openapi.json."""

from __future__ import annotations

from typing import Any, Literal

from typing_extensions import NotRequired, TypedDict


class PromptDetails(TypedDict):
    """Prompt tokens reused from other sequences."""

    cached_tokens: int


class CompletionDetails(TypedDict, total=False):
    """Tokens of the prediction that are in the text, and that are not; tokens of reasoning."""

    accepted_prediction_tokens: int
    rejected_prediction_tokens: int
    reasoning_tokens: int


class Usage(TypedDict):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptDetails
    completion_tokens_details: NotRequired[CompletionDetails]


class Timings(TypedDict):
    """llama-server's figures: tokens of all sequences of a request, and milliseconds of the longest sequence."""

    cache_n: int
    prompt_n: int
    prompt_ms: float
    prompt_per_token_ms: float
    prompt_per_second: float
    predicted_n: int
    predicted_ms: float
    predicted_per_token_ms: float
    predicted_per_second: float
    draft_n: int
    draft_n_accepted: int


class PromptProgress(TypedDict):
    """Prefill progress as in llama-server, in tokens; `processed` includes reused tokens (`cache`); `time_ms` starts
    with the request."""

    total: int
    cache: int
    processed: int
    time_ms: int


class Node(TypedDict):
    """A node of a draft tree: token as text, parent's index, stage that proposed it, whether it was accepted."""

    text: str
    parent: int
    stage: str
    accepted: bool


class Ours(TypedDict):
    """Members of a choice if the request has "pystaged": true.

    pieces: the text in parts, each with the stage that proposed it. tree: the last one verified, root first. texts:
    sequences in the last pass. speedup: over decoding without drafts, by measured costs.
    """

    pieces: list[tuple[str, str]]
    tree: NotRequired[list[Node]]
    texts: NotRequired[float]
    rows: NotRequired[float]
    speedup: NotRequired[float | None]


class CompletionLogprobs(TypedDict):
    """Log-probabilities by token; offsets are in characters of the choice's text. The first prompt token has none."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class CompletionChoice(TypedDict):
    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: Literal["stop", "length"] | None
    token_ids: NotRequired[list[int]]
    pystaged: NotRequired[Ours]


class Completion(TypedDict):
    """An answer of /v1/completions, or a part of its stream."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    system_fingerprint: str
    choices: list[CompletionChoice]
    usage: NotRequired[Usage | None]
    timings: NotRequired[Timings]
    seed: NotRequired[int]
    prompt_progress: NotRequired[PromptProgress]


class Native(TypedDict):
    """A sequence of /completion, or a part of its stream."""

    index: int
    content: str
    tokens: list[int]
    stop: bool
    stop_type: NotRequired[Literal["none", "eos", "limit", "word"]]
    model: NotRequired[str]
    has_new_line: NotRequired[bool]
    truncated: NotRequired[bool]
    tokens_predicted: NotRequired[int]
    tokens_evaluated: NotRequired[int]
    tokens_cached: NotRequired[int]
    generation_settings: NotRequired[dict[str, Any]]
    completion_probabilities: NotRequired[list[dict[str, Any]]]
    timings: NotRequired[Timings]


class TopLogprob(TypedDict):
    """A token, as text and as bytes, and the natural logarithm of its probability."""

    token: str
    logprob: float
    bytes: list[int]


class TokenLogprob(TopLogprob):
    """A token with the likeliest tokens at its position."""

    top_logprobs: list[TopLogprob]


class ChatLogprobs(TypedDict):
    content: list[TokenLogprob]
    refusal: None


class CalledFunction(TypedDict):
    """A called function; its arguments are JSON text."""

    name: str
    arguments: str


class Call(TypedDict):
    index: NotRequired[int]
    id: str
    type: Literal["function"]
    function: CalledFunction


class AnswerMessage(TypedDict):
    role: Literal["assistant"]
    content: str | None
    refusal: None
    annotations: list[Any]
    reasoning_content: NotRequired[str]
    tool_calls: NotRequired[list[Call]]


class Delta(TypedDict, total=False):
    """What a part of a stream adds to the answer."""

    role: Literal["assistant"]
    content: str | None
    reasoning_content: str
    tool_calls: list[Any]


class ChatChoice(TypedDict):
    """An answer; a part of a stream has `delta` in place of `message`."""

    index: int
    message: NotRequired[AnswerMessage]
    delta: NotRequired[Delta]
    logprobs: ChatLogprobs | None
    finish_reason: Literal["stop", "length", "tool_calls"] | None
    token_ids: NotRequired[list[int]]
    pystaged: NotRequired[Ours]


class ChatCompletion(TypedDict):
    """An answer of /v1/chat/completions, or a part of its stream."""

    id: str
    object: Literal["chat.completion", "chat.completion.chunk"]
    created: int
    model: str
    system_fingerprint: str
    choices: list[ChatChoice]
    usage: NotRequired[Usage | None]
    timings: NotRequired[Timings]
    seed: NotRequired[int]
    prompt_progress: NotRequired[PromptProgress]


class Embedding(TypedDict):
    """The embedding of a text: numbers, or float32 in base64."""

    object: Literal["embedding"]
    index: int
    embedding: list[float] | str


class EmbeddingsUsage(TypedDict):
    prompt_tokens: int
    total_tokens: int


class Embeddings(TypedDict):
    """The answer of /v1/embeddings."""

    object: Literal["list"]
    data: list[Embedding]
    model: str
    usage: EmbeddingsUsage


class ErrorBody(TypedDict):
    message: str
    type: str
    param: str | None
    code: str | int
    n_prompt_tokens: NotRequired[int]
    n_ctx: NotRequired[int]


class Error(TypedDict):
    """The answer to a failed request."""

    type: Literal["error"]
    error: ErrorBody


class ModelCard(TypedDict):
    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    meta: dict[str, Any]


class Models(TypedDict):
    """The list of models, which has one."""

    object: Literal["list"]
    data: list[ModelCard]


class Health(TypedDict):
    """Whether the server is ready."""

    status: Literal["ok"]


class Properties(TypedDict):
    """The server's properties."""

    default_generation_settings: dict[str, Any]
    total_slots: int
    model_alias: str
    chat_template: str
    bos_token: str
    eos_token: str
    build_info: str
    system_fingerprint: str
    draft: str


class TokenPiece(TypedDict):
    """A token with its text, or with its bytes if they are not valid UTF-8."""

    id: int
    piece: str | list[int]


class Tokens(TypedDict):
    """The tokens of a text."""

    tokens: list[int] | list[TokenPiece]
    count: int
    max_model_len: int


class Detokenized(TypedDict):
    """The text of tokens, under llama-server's name and vLLM's."""

    content: str
    prompt: str


class TokenizerInfo(TypedDict):
    """Properties of the vocabulary."""

    bos_token: str | None
    eos_token: str | None
    pad_token: str | None
    chat_template: str | None
    vocab_size: int
    fingerprint: str
