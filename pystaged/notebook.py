"""Results as HTML for notebooks, without external resources, in the page's own text colour."""

from __future__ import annotations

import codecs
import math
from collections.abc import Iterable
from html import escape
from itertools import groupby
from typing import TYPE_CHECKING

from pystaged.stages import STAGE_COLORS, STAGE_NAMES, StageSpans, shown_stages

if TYPE_CHECKING:
    from pystaged.result import GenerationResult, Score

# Behind the text, and translucent: readable on light pages and on dark ones.
_BACKGROUNDS = {
    None: "",
    "green": "rgba(46,160,67,.35)",
    "yellow": "rgba(234,179,8,.35)",
    "cyan": "rgba(6,182,212,.35)",
}
_SURPRISING = "rgba(220,60,60,{:.2f})"
_MOST_SURPRISING = 10.0  # nats, from where on the colour stays the same
_MOST_PERPLEXITY = 1e99  # from where on it is enough to say so
_TEXT_STYLE = "white-space:pre-wrap;overflow-wrap:anywhere;font-family:monospace"
_LINE_STYLE = "font-size:smaller;margin-top:.3em"
_NO_MATH = "tex2jax_ignore mathjax_ignore"  # notebooks would typeset what is between dollars


def result_html(result: GenerationResult) -> str:
    """A text in the colours of the stages, a legend, and a line of figures."""
    spans = StageSpans().split(result.text, result.pieces, result.stages)
    parts = []
    for stage, run in groupby(spans, key=lambda span: span[1]):
        parts.append(_span("".join(text for text, _ in run), STAGE_NAMES[stage], _BACKGROUNDS[STAGE_COLORS[stage]]))
    counts = result.stats.stages
    legend = [
        _span(f"{STAGE_NAMES[stage]} {counts[stage.name.lower()].emitted}", "", _BACKGROUNDS[STAGE_COLORS[stage]])
        for stage in shown_stages(result.stats)
    ]
    figures = escape(f"{result.stats}; finish_reason {result.finish_reason!r}, seed {result.seed}")
    return _shown(parts, f"{', '.join(legend)}; {figures}")


def results_html(results: Iterable[GenerationResult]) -> str:
    """Several results, one below the other."""
    return "<hr>".join(map(result_html, results))


def score_html(score: Score) -> str:
    """A text whose tokens are the redder the less likely they are, and what that comes to."""
    decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
    parts = []
    for i, (piece, logprob) in enumerate(zip(score.pieces, score.logprobs.tolist(), strict=True)):
        text = decoder.decode(piece, final=i + 1 == len(score.pieces))
        known = not math.isnan(logprob)
        share = min(1.0, max(0.0, -logprob / _MOST_SURPRISING)) if known else 0.0
        title = f"log-probability {logprob:.3f}" if known else "the first token"
        parts.append(_span(text, title, _SURPRISING.format(0.6 * share) if share else ""))
    counted = len(score.tokens) - 1
    figures = f"{len(score.tokens)} tokens, log-probability {score.total:.2f}"
    if counted > 0:
        figures += f", perplexity {_perplexity(-score.total / counted)}"
    return _shown(parts, escape(figures))


def _perplexity(surprise: float) -> str:
    """In words, given its logarithm."""
    if surprise > math.log(_MOST_PERPLEXITY):
        return f"above {_MOST_PERPLEXITY:g}"
    perplexity = math.exp(surprise)
    return f"{perplexity:.2f}" if perplexity < 1e6 else f"{perplexity:.2e}"


def _shown(parts: Iterable[str], line: str) -> str:
    text = f'<div dir="auto" style="{_TEXT_STYLE}">{"".join(parts)}</div>'
    return f'<div class="{_NO_MATH}">{text}<div style="{_LINE_STYLE}">{line}</div></div>'


def _span(text: str, title: str, background: str) -> str:
    if not text:
        return ""
    shown = escape(text).replace("\r", "&#13;")  # which a page would else read as a line's end
    attributes = f' title="{escape(title)}"' if title else ""
    attributes += f' style="background:{background}"' if background else ""
    return f"<span{attributes}>{shown}</span>"
