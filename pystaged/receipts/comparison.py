"""Compares two models, quantizations or types of KV cache of one vocabulary on the same texts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pystaged._core import ContextFullError, Sampling, Tokenizer
from pystaged.backends.devices import open_session
from pystaged.decoding.requests import perform
from pystaged.engine import Engine

Row = tuple[str, ...]
WORDED = ("then A has", "and B")  # headings of columns of words in `text_rows`

_ROWS = 32  # evaluated at once: the logits of so many tokens are in memory
_END = -1  # in place of A's end token, which results of generate do not have
_RESAMPLES, _ENOUGH = 2000, 10  # of texts; fewest of them


@dataclass(frozen=True, slots=True, eq=False)
class TextComparison:
    """Two models, A and B, after each of the same tokens.

    number: of the prompt, from 0. tokens: int32[n], the compared ones; where A wrote them, its greedy choices, with the
    end token if it ended the text. divergence: float64[n], the Kullback-Leibler divergence of B's distribution from A's
    before each token, in nats. logprobs_a, logprobs_b: float64[n], natural log-probability of each token. choices_b:
    int32[n], B's likeliest tokens. best_b: float64[n], their log-probabilities in B. agrees: bool[n], whether both find
    the same token likeliest; all end tokens count as one.
    """

    number: int
    tokens: NDArray[np.int32]
    divergence: NDArray[np.float64]
    logprobs_a: NDArray[np.float64]
    logprobs_b: NDArray[np.float64]
    choices_b: NDArray[np.int32]
    best_b: NDArray[np.float64]
    agrees: NDArray[np.bool_]

    @property
    def first(self) -> int | None:
        """Index of the first token at which they disagree, None for nowhere. Where A wrote the tokens, B's greedy text
        is the same until there; with None it also ends there."""
        found = np.flatnonzero(~self.agrees)
        return int(found[0]) if len(found) else None

    def to_dict(self) -> dict[str, Any]:
        """All of it for JSON, with the number from 1."""
        arrays = {name: value.tolist() for name, value in asdict(self).items() if name != "number"}
        return {"number": self.number + 1, "first": self.first, **arrays}


@dataclass(frozen=True, slots=True)
class Figure:
    """A figure over all texts. interval: 95 %, by the bootstrap over texts; None for fewer than ten texts."""

    name: str
    value: float
    interval: tuple[float, float] | None = None


def compare(
    a: Engine,
    b: Engine,
    prompts: Sequence[NDArray[np.int32]],
    max_tokens: int,
    progress: Callable[[int, int], None] = lambda *_: None,
) -> list[TextComparison]:
    """Compare two models on the greedy continuations that A writes to prompts.

    Args:
        prompts: token ids, int32[n] each, not empty.
        max_tokens: most tokens that A writes to each; an end token is compared, too. With 0 the prompts' own tokens are
            compared, from the second on.
        progress: called with the number of texts done, and of all.

    Returns:
        A comparison of each text that has tokens to compare.

    Raises:
        ValueError: their vocabularies differ, or no text has tokens to compare.
        ContextFullError: a text is longer than a context.
        DeviceError: a device failed.
    """
    if a.vocabulary != b.vocabulary:
        raise ValueError("the models have different vocabularies, so their probabilities cannot be compared")
    texts, starts = [np.asarray(prompt, np.int32) for prompt in prompts], [1] * len(prompts)
    if max_tokens:
        starts = [len(text) for text in texts]
        written = a.generate([text.tolist() for text in texts], max_tokens=max_tokens, temperature=0.0)
        texts = [
            np.array([*text, *each.tokens, *[_END] * (each.finish_reason == "stop")], np.int32)
            for text, each in zip(texts, written, strict=True)
        ]
    found = []
    for i, (text, start) in enumerate(zip(texts, starts, strict=True)):
        if len(text) > start:
            found.append(_compared(i, a, b, text, start))
        progress(i + 1, len(texts))
    if not found:
        raise ValueError("no text has tokens to compare; a prompt that is compared itself needs at least two")
    return found


def _compared(number: int, a: Engine, b: Engine, text: NDArray[np.int32], start: int) -> TextComparison:
    for engine in (a, b):
        if len(text) - 1 > engine.n_ctx:
            raise ContextFullError(f"a text has {len(text)} tokens, and a context {engine.n_ctx}; pass a larger n_ctx")
    ends = a.tokenizer.end_tokens
    blocks = []
    with closing(open_session(a.model, a.n_ctx)) as first, closing(open_session(b.model, b.n_ctx)) as second:
        for session in (first, second):
            if start > 1:
                perform(session, "read", text[: start - 1])
        for begin in range(start, len(text), _ROWS):
            end = min(begin + _ROWS, len(text))
            rows = np.arange(end - begin)
            p, q = (_logprobs(session, text[begin - 1 : end - 1]) for session in (first, second))
            best_a, choices = p.argmax(1), q.argmax(1)
            tokens = np.where(text[begin:end] == _END, best_a, text[begin:end]).astype(np.int32)
            with np.errstate(invalid="ignore"):  # a token that A excludes adds nothing
                divergence = np.where(np.isneginf(p), 0, np.exp(p) * (p - q)).sum(1)
            agrees = (best_a == choices) | (np.isin(best_a, ends) & np.isin(choices, ends))
            best = (choices.astype(np.int32), q[rows, choices], agrees)
            blocks.append((tokens, divergence, p[rows, tokens], q[rows, tokens], *best))
    return TextComparison(number, *map(np.concatenate, zip(*blocks, strict=True)))


def _logprobs(session: Any, tokens: NDArray[np.int32]) -> NDArray[np.float64]:
    """Log-probabilities after each of the next tokens, float64[n, vocabulary]; the tokens are committed."""
    rows = np.arange(len(tokens))
    perform(session, "propose", tokens, rows - 1, len(rows), 0, Sampling())
    logits = np.stack([session.logits(int(row)) for row in rows]).astype(np.float64)
    session.commit(rows)
    logits -= logits.max(1, keepdims=True)
    logits -= np.log(np.exp(logits).sum(1, keepdims=True))
    return logits


def figures(texts: Sequence[TextComparison]) -> list[Figure]:
    """What the comparisons say together; figures over tokens count each token alike."""
    divergence = np.concatenate([text.divergence for text in texts])
    counts = np.array([len(text.tokens) for text in texts])
    picks = np.random.default_rng(0).integers(0, len(texts), (_RESAMPLES, len(texts)))

    def mean(name: str, values: Sequence[NDArray[Any]], form: Callable[[Any], Any] = lambda value: value) -> Figure:
        sums = np.array([each.sum(dtype=np.float64) for each in values])
        interval = None
        if len(texts) >= _ENOUGH:
            means = form(sums[picks].sum(1) / counts[picks].sum(1))
            interval = (float(np.quantile(means, 0.025)), float(np.quantile(means, 0.975)))
        return Figure(name, float(form(sums.sum() / counts.sum())), interval)

    return [
        mean("same likeliest token", [text.agrees for text in texts]),
        Figure("same greedy text", float(np.mean([text.first is None for text in texts]))),
        mean("KL(A || B), mean", [text.divergence for text in texts]),
        Figure("KL(A || B), median", float(np.median(divergence))),
        Figure("KL(A || B), 99 %", float(np.quantile(divergence, 0.99))),
        Figure("KL(A || B), most", float(divergence.max())),
        mean("perplexity of A", [-text.logprobs_a for text in texts], np.exp),
        mean("perplexity of B", [-text.logprobs_b for text in texts], np.exp),
        mean("perplexity of B / of A", [text.logprobs_a - text.logprobs_b for text in texts], np.exp),
    ]


def figure_rows(found: Sequence[Figure]) -> list[Row]:
    """A table of all texts' figures, its headings first."""
    rows: list[Row] = [("", "value", "95 % interval")]
    for each in found:
        is_share = each.name.startswith("same")
        numbers = [f"{100 * x:.2f} %" if is_share else f"{x:.5g}" for x in (each.value, *(each.interval or ()))]
        rows.append((each.name, numbers[0], " to ".join(numbers[1:])))
    return rows


def text_rows(texts: Sequence[TextComparison], tokenizer: Tokenizer) -> list[Row]:
    """A table of single texts, its headings first."""

    def spelled(token: int) -> str:
        text = repr(tokenizer.token_bytes(token, True).decode("utf-8", "replace"))
        return f"{text} (end)" if tokenizer.is_end(token) else text

    first, then = WORDED
    rows: list[Row] = [("text", "tokens", "same for", first, "p in A", "p in B", then, "p in B", "KL")]
    for each in texts:
        at, divergence = each.first, f"{each.divergence.mean():.5g}"
        differs: Row = ("all", *[""] * 5)
        if at is not None:
            p, q, best = (f"{np.exp(x[at]):.3f}" for x in (each.logprobs_a, each.logprobs_b, each.best_b))
            differs = (str(at), spelled(int(each.tokens[at])), p, q, spelled(int(each.choices_b[at])), best)
        rows.append((str(each.number + 1), str(len(each.tokens)), *differs, divergence))
    return rows
