"""/v1/completions."""

from __future__ import annotations

from typing import Any

from pystaged.decoding.tree import Stage
from pystaged.result import GenerationResult, Piece
from pystaged.sequence import Sequence as Text
from pystaged.server.answer import Answer, ended
from pystaged.server.answer_types import Completion
from pystaged.server.answer_types import CompletionLogprobs as Found
from pystaged.server.errors import ApiError, too_long, unsupported
from pystaged.server.logprobs import CompletionLogprobs, joined
from pystaged.server.options import begun, checked, text_options
from pystaged.server.request_types import MOST_TEXTS, CompletionRequest
from pystaged.server.state import State
from pystaged.stats import GenerationStats
from pystaged.text import Prompt

_USUAL = 16  # default of max_tokens, as OpenAI's


def begin(state: State, request: CompletionRequest) -> CompletionAnswer:
    """Check a request and prepare its sequences; may take seconds. Raises ApiError."""
    if request.max_tokens == 0 and not request.echo:
        raise ApiError(400, "max_tokens must be at least 1, or 0 with echo", param="max_tokens")
    sequences, prompts, seed = texts(state, request, _USUAL, request.logprobs)
    return CompletionAnswer(state, request, sequences, prompts, seed)


def texts(
    state: State, request: CompletionRequest, usual: int, logprobs: int | None
) -> tuple[list[Text], list[Prompt], int]:
    """A request's sequences, its prompts, and the first seed. Raises ApiError.

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
    sequences = begun(engine, tokens, config, n, form)
    return sequences, prompts, config.sampling.seed


def _text(prompt: Prompt) -> str:
    if not isinstance(prompt, str):
        raise ApiError(400, "a prompt with a suffix must be a string", param="prompt")
    return prompt


def listed(prompt: Any) -> list[Prompt]:
    """A request's prompts as a list."""
    return list(prompt) if isinstance(prompt, list) and not isinstance(prompt[0], int) else [prompt]


class CompletionAnswer(Answer):
    """An answer of /v1/completions."""

    described = Completion
    prefix, whole_kind, part_kind = "cmpl", "text_completion", "text_completion"

    def __init__(
        self, state: State, request: CompletionRequest, sequences: list[Text], prompts: list[Prompt], seed: int
    ) -> None:
        super().__init__(state, request, sequences, seed, len(prompts))
        self._echo, self._is_silent = bool(request.echo), request.max_tokens == 0
        self._with_logprobs = request.logprobs is not None
        self._prompts = prompts
        self._logprobs = [CompletionLogprobs(self.tokenizer) for _ in sequences]

    def stats(self) -> list[GenerationStats]:
        found = super().stats()
        for stats in found if self._is_silent else []:
            stats.cut([Stage.TARGET] * stats.new_tokens)
        return found

    def choice(self, i: int, result: GenerationResult) -> dict[str, Any]:
        text, parts = self._echoed(i, result)
        if not self._is_silent:
            text += result.text
            parts += [self._logprobs[i].more(result.logprobs or [])] if self._with_logprobs else []
        return self._choice(i, text, parts) | self._end(result) | self.ours(result)

    def empty_part(self, i: int) -> dict[str, Any]:
        return self._choice(i, "", [])

    def first_parts(self, i: int) -> list[dict[str, Any]]:
        text, parts = self._echoed(i, self.sequences[i].result())
        return [self._choice(i, text, parts)] if text or parts else []

    def parts(self, i: int, piece: Piece) -> list[dict[str, Any]]:
        ours = self.ours_of(i, piece)
        if self._is_silent or not (piece or piece.logprobs or ours):
            return []
        parts = [self._logprobs[i].more(piece.logprobs or [])] if self._with_logprobs else []
        return [self._choice(i, piece.text, parts) | ours]

    def last_parts(self, i: int, result: GenerationResult) -> list[dict[str, Any]]:
        return [self._choice(i, "", []) | self._end(result)]

    def _end(self, result: GenerationResult) -> dict[str, str]:
        return {"finish_reason": "length"} if self._is_silent else ended(result)

    def _echoed(self, i: int, result: GenerationResult) -> tuple[str, list[Found]]:
        """The prompt's text and log-probabilities, if the request has echo."""
        if not self._echo:
            return "", []
        prompt = self._prompts[i * self._num_prompts // len(self.sequences)]
        tokens = self.sequences[i].prompt_tokens.tolist()
        text = prompt if isinstance(prompt, str) else self.tokenizer.decode(tokens)
        return text, [self._logprobs[i].prompt(tokens, text, result.prompt_logprobs)] if self._with_logprobs else []

    def _choice(self, i: int, text: str, parts: list[Found]) -> dict[str, Any]:
        logprobs = joined(parts) if parts else None
        return {"index": i, "text": text, "logprobs": logprobs, "finish_reason": None}
