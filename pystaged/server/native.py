"""/completion and /infill: llama-server's own interface."""

from __future__ import annotations

from typing import Any

from pystaged.options.recommended import ANSWER_TOKENS
from pystaged.result import GenerationResult, Piece, TokenLogprob
from pystaged.server.answer import Answer
from pystaged.server.completions import texts
from pystaged.server.figures import timings
from pystaged.server.logprobs import number
from pystaged.server.options import text_options
from pystaged.server.request_types import InfillRequest, NativeRequest
from pystaged.server.state import State

IGNORED = ("n_indent", "t_max_predict_ms")  # in requests to /infill; editors send them


def begin(state: State, request: NativeRequest) -> NativeAnswer:
    """Check a request and prepare its sequences; may take seconds. Raises ApiError."""
    return NativeAnswer(state, request, texts(state, request, ANSWER_TOKENS, request.n_probs or None))


def infill(state: State, request: InfillRequest) -> NativeAnswer:
    """As begin, for text between two others."""
    options = text_options(request, state.settings.defaults, state.engine)
    prompt = state.engine.infill_prompt(
        request.input_prefix,
        request.input_suffix,
        begun=request.prompt or "",
        files=[(each.filename, each.text) for each in request.input_extra or []],
        max_tokens=options["max_tokens"],
    )
    return begin(state, NativeRequest.model_validate(request.model_dump(exclude_none=True) | {"prompt": prompt}))


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
        return {
            "index": i,
            "stop": True,
            "stop_type": self._stop_kind(i, result),
            "model": self.state.name,
            "has_new_line": "\n" in result.text,
            "truncated": False,
            "tokens_predicted": stats.new_tokens,
            "tokens_evaluated": stats.prompt_tokens,
            "tokens_cached": stats.reused_tokens,
            "generation_settings": settings,
            "timings": timings([stats]),
        }

    def _stop_kind(self, i: int, result: GenerationResult) -> str:
        if result.finish_reason == "stop":
            return "word" if self.sequences[i].met_stop_string else "eos"
        return "none" if result.finish_reason == "cancelled" else "limit"

    def _probabilities(self, logprobs: list[TokenLogprob] | tuple[TokenLogprob, ...] | None) -> dict[str, Any]:
        if logprobs is None:
            return {}

        def told(each: TokenLogprob) -> dict[str, Any]:
            data = self.tokenizer.token_bytes(each.token, special=True)
            return {"id": each.token, "token": each.text, "bytes": list(data), "logprob": number(each.logprob)}

        found = [told(each) | {"top_logprobs": [told(other) for other in each.top]} for each in logprobs]
        return {"completion_probabilities": found}
