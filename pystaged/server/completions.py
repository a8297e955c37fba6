"""/v1/completions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pystaged.decoding.tree import Stage
from pystaged.result import GenerationResult, Piece
from pystaged.sampling.text import Prompt
from pystaged.server.answer import Answer, Texts, ended
from pystaged.server.errors import ApiError, too_long, unsupported
from pystaged.server.logprobs import CompletionLogprobs, joined
from pystaged.server.options import begun, checked, text_options
from pystaged.server.request_types import MOST_TEXTS, CompletionRequest
from pystaged.server.state import State
from pystaged.stats import GenerationStats

_USUAL = 16  # default of max_tokens, as OpenAI's


def begin(state: State, request: CompletionRequest) -> CompletionAnswer:
    """Check a request and prepare its sequences; may take seconds. Raises ApiError."""
    if request.max_tokens == 0 and not request.echo:
        raise ApiError(400, "max_tokens must be at least 1, or 0 with echo", param="max_tokens")
    return CompletionAnswer(state, request, texts(state, request, _USUAL, request.logprobs))


def texts(state: State, request: CompletionRequest, usual: int, logprobs: int | None) -> Texts:
    """A request's sequences. Raises ApiError.

    Args:
        usual: the default of max_tokens.
        logprobs: number of likeliest tokens to report; None for no log-probabilities.
    """
    n, engine = request.n or 1, state.engine
    if request.best_of is not None and request.best_of > n:
        raise unsupported("best_of", "best_of above n is not supported; set n instead")
    prompts = listed(request.prompt)
    if len(prompts) * n > MOST_TEXTS:
        raise ApiError(400, f"{len(prompts) * n} sequences are too many; at most {MOST_TEXTS} are allowed", param="n")
    options = text_options(request, state.settings.defaults, engine, usual)
    options["max_tokens"] = max(1, options["max_tokens"])  # for a prompt alone, one token is generated and dropped
    if logprobs is not None:
        options["logprobs"] = logprobs
        options["prompt_logprobs"] = logprobs if request.echo else None
    config = checked(options)
    tokens = []
    for prompt in prompts:
        try:
            ids: Any = engine.tokenizer.encode(prompt) if isinstance(prompt, str) else prompt
            if request.suffix:
                ids = engine.infill_prompt(_text(prompt), request.suffix, max_tokens=config.max_tokens)
            if len(ids) > engine.n_ctx:
                raise too_long(len(ids), engine.n_ctx, engine.model.max_context, "prompt")
            tokens.append(engine.encode(ids))
        except UnicodeError:
            raise ApiError(400, "the prompt is not valid Unicode text", param="prompt") from None
        except (ValueError, TypeError) as error:
            raise ApiError(400, str(error), param="prompt") from None
    form = "grammar" if request.grammar is not None else "json_schema"
    return Texts(begun(engine, tokens, config, n, form), config.sampling.seed, prompts=prompts)


def _text(prompt: Prompt) -> str:
    if not isinstance(prompt, str):
        raise ApiError(400, "a prompt with a suffix must be a string", param="prompt")
    return prompt


def listed(prompt: Any) -> list[Prompt]:
    """A request's prompts as a list."""
    return list(prompt) if isinstance(prompt, list) and not isinstance(prompt[0], int) else [prompt]


class CompletionAnswer(Answer):
    """An answer of /v1/completions."""

    mark = b"data: [DONE]\n\n"
    prefix, kinds = "cmpl", ("text_completion", "text_completion")
    request: CompletionRequest

    def __init__(self, state: State, request: CompletionRequest, texts: Texts) -> None:
        super().__init__(state, request, texts)
        self._is_silent = request.max_tokens == 0
        self._logprobs = [CompletionLogprobs(self.tokenizer) for _ in self.sequences]

    def stats(self) -> list[GenerationStats]:
        found = super().stats()
        for stats in found if self._is_silent else []:
            stats.cut([Stage.TARGET] * stats.new_tokens)
        return found

    def choice(self, i: int, result: GenerationResult) -> dict[str, Any]:
        text, parts = self._echoed(i, result)
        if not self._is_silent:
            text, parts = text + result.text, parts + self._more(i, result)
        return self._choice(i, text, parts) | self._end(result) | self.ours(result)

    def empty_part(self, i: int) -> dict[str, Any]:
        return self._choice(i)

    def first_parts(self, i: int) -> list[dict[str, Any]]:
        text, parts = self._echoed(i, self.sequences[i].result())
        return [self._choice(i, text, parts)] if text or parts else []

    def parts(self, i: int, piece: Piece) -> list[dict[str, Any]]:
        ours = self.ours_of(i, piece)
        if self._is_silent or not (piece or piece.logprobs or ours):
            return []
        return [self._choice(i, piece.text, self._more(i, piece)) | ours]

    def last_parts(self, i: int, result: GenerationResult) -> list[dict[str, Any]]:
        return [self._choice(i) | self._end(result)]

    def _end(self, result: GenerationResult) -> dict[str, str]:
        return {"finish_reason": "length"} if self._is_silent else ended(result)

    def _more(self, i: int, found: GenerationResult | Piece) -> list[dict[str, Any]]:
        return [] if self.request.logprobs is None else [self._logprobs[i].more(found.logprobs or [])]

    def _echoed(self, i: int, result: GenerationResult) -> tuple[str, list[dict[str, Any]]]:
        """The prompt's text and log-probabilities, if the request has echo."""
        if not self.request.echo:
            return "", []
        prompt = self.prompts[i * len(self.prompts) // len(self.sequences)]
        tokens = self.sequences[i].prompt_tokens.tolist()
        text = prompt if isinstance(prompt, str) else self.tokenizer.decode(tokens)
        if self.request.logprobs is None:
            return text, []
        return text, [self._logprobs[i].prompt(tokens, text, result.prompt_logprobs)]

    def _choice(self, i: int, text: str = "", parts: Sequence[dict[str, Any]] = ()) -> dict[str, Any]:
        return {"index": i, "text": text, "logprobs": joined(parts) if parts else None, "finish_reason": None}
