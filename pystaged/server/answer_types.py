"""Types of answers, checked by mypy and described by /openapi.json."""

from __future__ import annotations

from typing import Any, Literal

from typing_extensions import NotRequired, TypedDict


class PromptDetails(TypedDict):
    """Prompt tokens reused from other texts."""

    cached_tokens: int


class CompletionDetails(TypedDict):
    """Tokens of a prediction that the text has, and that it does not have."""

    accepted_prediction_tokens: int
    rejected_prediction_tokens: int


class Usage(TypedDict):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptDetails
    completion_tokens_details: NotRequired[CompletionDetails]


class Timings(TypedDict):
    """llama-server's figures, of all texts of a request: tokens, and milliseconds of the longest."""

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
    """Progress of prefill as in llama-server: tokens; `processed` includes reused ones (`cache`); milliseconds since
    the request."""

    total: int
    cache: int
    processed: int
    time_ms: int


class Node(TypedDict):
    """A node of a tree: its token as text, the number of the node above, who proposed it, whether it was accepted."""

    text: str
    parent: int
    stage: str
    accepted: bool


class Ours(TypedDict):
    """Members of a choice where the request has "pystaged": true.

    pieces: the text, and who proposed each part. tree: the last that was verified, the root first. texts: that shared
    the last pass. speedup: over plain decoding, by measured costs.
    """

    pieces: list[tuple[str, str]]
    tree: NotRequired[list[Node]]
    texts: NotRequired[float]
    rows: NotRequired[float]
    speedup: NotRequired[float | None]


class CompletionLogprobs(TypedDict):
    """Of each token; offsets are in characters of the choice's text. A first token has none."""

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
    """An answer of /v1/completions, or a part of one."""

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
    """A text of /completion, or a part of one."""

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
    """The same with the likeliest tokens at its place."""

    top_logprobs: list[TopLogprob]


class ChatLogprobs(TypedDict):
    content: list[TokenLogprob]
    refusal: None


class CalledFunction(TypedDict):
    """A function, and JSON as text."""

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
    tool_calls: NotRequired[list[Call]]


class Delta(TypedDict, total=False):
    """What a part adds to an answer."""

    role: Literal["assistant"]
    content: str | None
    tool_calls: list[Call]


class ChatChoice(TypedDict):
    """An answer; in streams `delta` stands for `message`."""

    index: int
    message: NotRequired[AnswerMessage]
    delta: NotRequired[Delta]
    logprobs: ChatLogprobs | None
    finish_reason: Literal["stop", "length", "tool_calls"] | None
    token_ids: NotRequired[list[int]]
    pystaged: NotRequired[Ours]


class ChatCompletion(TypedDict):
    """An answer of /v1/chat/completions, or a part of one."""

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


class ErrorBody(TypedDict):
    message: str
    type: str
    param: str | None
    code: str | int
    n_prompt_tokens: NotRequired[int]
    n_ctx: NotRequired[int]


class Error(TypedDict):
    """The answer to a request that failed."""

    type: Literal["error"]
    error: ErrorBody


class ModelCard(TypedDict):
    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    meta: dict[str, Any]


class Models(TypedDict):
    """The models there are: one."""

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
    """A token, and its text, or its bytes where they are none."""

    id: int
    piece: str | list[int]


class Tokens(TypedDict):
    """A text's tokens."""

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
