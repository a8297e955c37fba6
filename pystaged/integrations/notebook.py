"""HTML of results for notebooks, without external resources, in the page's own text colour."""

from __future__ import annotations

import codecs
import math
from collections.abc import Iterable, Sequence
from html import escape
from itertools import groupby

import numpy as np
from numpy.typing import NDArray

from pystaged.decoding.tree import Stage
from pystaged.stats import STAGE_COLORS, STAGE_NAMES, GenerationStats, StageSpans, shown_stages

# Translucent backgrounds, readable on light and dark pages.
_BACKGROUNDS = {
    None: "",
    "green": "rgba(46,160,67,.35)",
    "yellow": "rgba(234,179,8,.35)",
    "magenta": "rgba(192,38,211,.35)",
    "cyan": "rgba(6,182,212,.35)",
}
_SURPRISING = "rgba(220,60,60,{:.2f})"
_MOST_SURPRISING = 10.0  # nats of the strongest colour
_MOST_PERPLEXITY = 1e99  # larger values are shown as "above 1e+99"
_TEXT_STYLE = "white-space:pre-wrap;overflow-wrap:anywhere;font-family:monospace"
_LINE_STYLE = "font-size:smaller;margin-top:.3em"
_NO_MATH = "tex2jax_ignore mathjax_ignore"  # keeps notebooks from typesetting text between dollar signs


def result_html(
    text: str, pieces: Iterable[bytes], stages: Iterable[Stage], stats: GenerationStats, figures: str
) -> str:
    """HTML of a text in the colours of the stages, with a legend and a line of figures."""
    spans = StageSpans().split(text, pieces, stages)
    parts = []
    for stage, run in groupby(spans, key=lambda span: span[1]):
        parts.append(_span("".join(part for part, _ in run), STAGE_NAMES[stage], _BACKGROUNDS[STAGE_COLORS[stage]]))
    counts = stats.stages
    legend = [
        _span(f"{STAGE_NAMES[stage]} {counts[stage.name.lower()].emitted}", "", _BACKGROUNDS[STAGE_COLORS[stage]])
        for stage in shown_stages(stats)
    ]
    return _shown(parts, f"{', '.join(legend)}; {escape(figures)}")


def score_html(pieces: Sequence[bytes], logprobs: NDArray[np.float64], total: float) -> str:
    """HTML of a text whose less likely tokens are redder, with its log-probability and perplexity."""
    decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
    parts = []
    for i, (piece, logprob) in enumerate(zip(pieces, logprobs.tolist(), strict=True)):
        text = decoder.decode(piece, final=i + 1 == len(pieces))
        known = not math.isnan(logprob)
        share = min(1.0, max(0.0, -logprob / _MOST_SURPRISING)) if known else 0.0
        title = f"log-probability {logprob:.3f}" if known else "the first token"
        parts.append(_span(text, title, _SURPRISING.format(0.6 * share) if share else ""))
    figures = f"{len(pieces)} tokens, log-probability {total:.2f}"
    if len(pieces) > 1:
        figures += f", perplexity {_perplexity(-total / (len(pieces) - 1))}"
    return _shown(parts, escape(figures))


def _perplexity(surprise: float) -> str:
    """The perplexity as text, given its natural logarithm."""
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
    shown = escape(text).replace("\r", "&#13;")  # HTML reads a plain one as a newline
    attributes = f' title="{escape(title)}"' if title else ""
    attributes += f' style="background:{background}"' if background else ""
    return f"<span{attributes}>{shown}</span>"
