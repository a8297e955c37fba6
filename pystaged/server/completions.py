"""/v1/completions, and llama-server's own interface: /completion and /infill."""

from __future__ import annotations

from typing import Any

from pystaged.decoding.tree import Stage
from pystaged.options.recommended import ANSWER_TOKENS
from pystaged.result import GenerationResult, Piece, TokenLogprob
from pystaged.sampling.text import Prompt
from pystaged.server.answer import Answer, Texts, ended
from pystaged.server.errors import ApiError, too_long, unsupported
from pystaged.server.figures import CompletionLogprobs, LogprobRow, number, of_completion, timings
from pystaged.server.models import State
from pystaged.server.options import begun, checked, text_options
from pystaged.server.request_types import MOST_TEXTS, CompletionRequest, InfillRequest, NativeRequest
from pystaged.stats import GenerationStats

IGNORED = ("n_indent", "t_max_predict_ms")  # in requests to /infill; editors send them
_USUAL = 16  # default of max_tokens, as OpenAI's


def begin(state: State, request: CompletionRequest) -> CompletionAnswer:
    """Check a request and prepare its sequences; may take seconds. Raises ApiError."""
    if request.max_tokens == 0 and not request.echo:
        raise ApiError(400, "max_tokens must be at least 1, or 0 with echo", param="max_tokens")
    return CompletionAnswer(state, request, texts(state, request, _USUAL, request.logprobs))


def texts(state: State, request: CompletionRequest, usual: int, logprobs: int | None) -> Texts:
    """A request's sequences. Raises ApiError. usual: the default of max_tokens. logprobs: number of likeliest tokens to
    report; None for no log-probabilities."""
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
                if not isinstance(prompt, str):
                    raise ApiError(400, "a prompt with a suffix must be a string", param="prompt")
                ids = engine.infill_prompt(prompt, request.suffix, max_tokens=config.max_tokens)
            if len(ids) > engine.n_ctx:
                raise too_long(len(ids), engine.n_ctx, engine.model.max_context, "prompt")
            tokens.append(engine.encode(ids))
        except UnicodeError:
            raise ApiError(400, "the prompt is not valid Unicode text", param="prompt") from None
        except (ValueError, TypeError) as error:
            raise ApiError(400, str(error), param="prompt") from None
    form = "grammar" if request.grammar is not None else "json_schema"
    return Texts(begun(engine, tokens, config, n, form), config.sampling.seed, prompts=prompts)


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
        text, rows = self._echoed(i, result)
        if not self._is_silent:
            text, rows = text + result.text, rows + self._logprobs[i].more(result.logprobs or [])
        return self._choice(i, text, rows) | self._end(result) | self.ours(i, result)

    def empty_part(self, i: int) -> dict[str, Any]:
        return self._choice(i)

    def first_parts(self, i: int) -> list[dict[str, Any]]:
        text, rows = self._echoed(i, self.sequences[i].result())
        return [self._choice(i, text, rows)] if text or rows else []

    def parts(self, i: int, piece: Piece) -> list[dict[str, Any]]:
        ours = self.ours(i, piece)
        if self._is_silent or not (piece or piece.logprobs or ours):
            return []
        return [self._choice(i, piece.text, self._logprobs[i].more(piece.logprobs or [])) | ours]

    def last_parts(self, i: int, result: GenerationResult) -> list[dict[str, Any]]:
        return [self._choice(i) | self._end(result)]

    def _end(self, result: GenerationResult) -> dict[str, str]:
        return {"finish_reason": "length"} if self._is_silent else ended(result)

    def _echoed(self, i: int, result: GenerationResult) -> tuple[str, list[LogprobRow]]:
        """The prompt's text and log-probabilities, if the request has echo."""
        if not self.request.echo:
            return "", []
        prompt = self.prompts[i * len(self.prompts) // len(self.sequences)]
        tokens = self.sequences[i].prompt_tokens.tolist()
        text = prompt if isinstance(prompt, str) else self.tokenizer.decode(tokens)
        if self.request.logprobs is None:
            return text, []
        return text, self._logprobs[i].prompt(tokens, text, result.prompt_logprobs)

    def _choice(self, i: int, text: str = "", rows: list[LogprobRow] | None = None) -> dict[str, Any]:
        logprobs = None if rows is None or self.request.logprobs is None else of_completion(rows)
        return {"index": i, "text": text, "logprobs": logprobs, "finish_reason": None}


def begin_native(state: State, request: NativeRequest) -> NativeAnswer:
    """Check a request and prepare its sequences; may take seconds. Raises ApiError."""
    return NativeAnswer(state, request, texts(state, request, ANSWER_TOKENS, request.n_probs or None))


def infill(state: State, request: InfillRequest) -> NativeAnswer:
    """As begin_native, for text between two others."""
    options = text_options(request, state.settings.defaults, state.engine)
    prompt = state.engine.infill_prompt(
        request.input_prefix,
        request.input_suffix,
        begun=request.prompt or "",
        files=[(each.filename, each.text) for each in request.input_extra or []],
        max_tokens=options["max_tokens"],
    )
    return begin_native(state, NativeRequest.model_validate(request.model_dump(exclude_none=True) | {"prompt": prompt}))


class NativeAnswer(Answer):
    """An answer of /completion."""

    prefix, kinds = "completion", ("completion", "completion")
    request: NativeRequest

    def whole(self, choices: list[dict[str, Any]], _figures: dict[str, Any]) -> Any:
        return choices[0] if len(choices) == 1 else choices

    def framed(self, part: dict[str, Any], figures: dict[str, Any]) -> dict[str, Any]:
        return figures | part

    def choice(self, i: int, result: GenerationResult) -> dict[str, Any]:
        if self.request.max_tokens == 0:
            return self._chosen(self._end(i, result) | {"content": "", "tokens": []})
        found = {"content": result.text, "tokens": result.tokens if self.request.return_tokens else []}
        return self._chosen(self._end(i, result) | found | self._probabilities(result.logprobs))

    def empty_part(self, i: int) -> dict[str, Any]:
        return {"index": i, "content": "", "tokens": [], "stop": False}

    def parts(self, i: int, piece: Piece) -> list[dict[str, Any]]:
        found = {"index": i, "content": piece.text, "tokens": list(piece.tokens), "stop": False}
        return [found | self._probabilities(piece.logprobs)] if piece.tokens and self.request.max_tokens != 0 else []

    def last_parts(self, i: int, result: GenerationResult) -> list[dict[str, Any]]:
        # Text held back as the possible start of a stop string has no tokens of its own.
        return [self._chosen(self._end(i, result) | {"content": "", "tokens": []})]

    def _chosen(self, found: dict[str, Any]) -> dict[str, Any]:
        """The members that response_fields names, by paths such as "timings/prompt_n"; all without it."""
        if not self.request.response_fields:
            return found
        paths: dict[str, Any] = {}
        for path in self.request.response_fields:
            value: Any = found
            for name in path.split("/"):
                value = value.get(name, ...) if isinstance(value, dict) else ...
            if value is not ...:
                paths[path] = value
        return paths

    def _end(self, i: int, result: GenerationResult) -> dict[str, Any]:
        """Members of a finished sequence."""
        config, stats = self.sequences[i].config, result.stats
        sampling = config.sampling
        names = ("temperature", "top_k", "top_p", "min_p", "seed", "repeat_penalty", "repeat_last_n", "min_tokens")
        settings = {name: getattr(sampling, name) for name in names} | {
            "n_predict": config.max_tokens,
            "stop": list(config.stop),
            "n_probs": config.logprobs or 0,
        }
        kinds = {"stop": "word" if self.sequences[i].buffer.met else "eos", "cancelled": "none"}
        return {
            "index": i,
            "stop": True,
            "stop_type": kinds.get(result.finish_reason, "limit"),
            "model": self.state.name,
            "has_new_line": "\n" in result.text,
            "truncated": False,
            "tokens_predicted": stats.new_tokens,
            "tokens_evaluated": stats.prompt_tokens,
            "tokens_cached": stats.reused_tokens,
            "generation_settings": settings,
            "timings": timings([stats]),
        }

    def _probabilities(self, logprobs: list[TokenLogprob] | tuple[TokenLogprob, ...] | None) -> dict[str, Any]:
        if logprobs is None:
            return {}

        def told(each: TokenLogprob) -> dict[str, Any]:
            data = self.tokenizer.token_bytes(each.token, special=True)
            return {"id": each.token, "token": each.text, "bytes": list(data), "logprob": number(each.logprob)}

        found = [told(each) | {"top_logprobs": [told(other) for other in each.top]} for each in logprobs]
        return {"completion_probabilities": found}
