"""Results in a notebook: the text exactly, whatever it is, and nothing of it taken for markup."""

from __future__ import annotations

import copy
import pickle
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from html.parser import HTMLParser
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import pystaged
from pystaged import Score, Stage
from pystaged.result import GenerationResult, Results
from pystaged.stats import STAGE_NAMES, GenerationStats, shown_stages

HOSTILE = [
    "<script>alert(1)</script>",
    "</div></span><img src=x onerror=alert(1)>",
    '" onmouseover="alert(1)',
    "&lt;&amp;&#65;&notit;",
    "  two  spaces\n\n\tand a tab \r\n",
    "\n first of all",
    "<!-- \x00\x1b[31m -->",
    "\u202e\N{GRINNING FACE}\u0301 \ud7ff\ufffd",
    "",
]


class Page(HTMLParser):
    """What a page holds: the text in each of its boxes, and elements with their attributes."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.boxes: list[str] = []
        self.spans: list[tuple[str, dict[str, str | None]]] = []
        self._open: list[str] = []
        self.feed(html)
        self.close()
        assert self._open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        if tag == "hr":
            return
        self._open.append(tag)
        if tag == "div":
            self.boxes.append("")
        if tag == "span":
            self.spans.append(("", dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.boxes[-1] += data
        if self._open[-1] == "span":
            text, attributes = self.spans[-1]
            self.spans[-1] = (text + data, attributes)


def result_of(text: str, cuts: list[int], end: bytes = b"") -> GenerationResult:
    """A result whose tokens are a text's bytes, cut anywhere; `end` is the beginning of a character that was cut."""
    data = text.encode() + end
    at = sorted({0, len(data), *(cut % (len(data) + 1) for cut in cuts)})
    pieces = [data[first:last] for first, last in pairwise(at)]
    stages = [Stage(i % 3) for i in range(len(pieces))]
    return GenerationResult(text, list(range(len(pieces))), "length", 7, GenerationStats(), stages, pieces)


def shown(html: str) -> str:
    """The text of one result, which a line follows."""
    _, text, _ = Page(html).boxes
    return text


@given(
    st.sampled_from(HOSTILE) | st.text(),
    st.lists(st.integers(0, 200)),
    st.sampled_from([b"", "\N{GRINNING FACE}".encode()[:3]]),
)
def test_any_text_is_shown_exactly_and_is_no_markup(text: str, cuts: list[int], end: bytes) -> None:
    html = result_of(text, cuts, end)._repr_html_()
    assert shown(html) == text
    assert {tag for tag, _ in Page(html).elements} <= {"div", "span"}
    assert {name for _, attributes in Page(html).elements for name in attributes} <= {"class", "dir", "style", "title"}
    assert "\r" not in html  # a page reads it as a line's end, and takes none from &#13;


def test_no_formula_is_typeset() -> None:
    html = result_of("$x$ costs \\(2\\)", [])._repr_html_()
    assert Page(html).elements[0] == ("div", {"class": "tex2jax_ignore mathjax_ignore"})


def test_text_before_a_stop_string() -> None:
    result = replace(result_of("red, green and blue", [3, 6, 9]), text="red, gr")
    assert shown(result._repr_html_()) == "red, gr"


def test_a_character_belongs_to_the_token_that_completes_it() -> None:
    smiley = "\N{GRINNING FACE}"
    stages = [Stage.TARGET, Stage.DRAFT, Stage.NGRAM, Stage.TARGET]
    pieces = [b"a", smiley.encode()[:2], smiley.encode()[2:] + b"b", b"c"]
    result = GenerationResult(f"a{smiley}bc", [1, 2, 3, 4], "stop", 0, GenerationStats(), stages, pieces)
    spans = [(text, attributes["title"]) for text, attributes in Page(result._repr_html_()).spans[:3]]
    assert spans == [("a", "target"), (f"{smiley}b", "n-gram"), ("c", "target")]


@pytest.fixture(scope="module")
def engine() -> Iterator[pystaged.Engine]:
    policy = pystaged.FixedPolicy(2, 3, 6)  # drafts however busy the machine is
    with pystaged.load("bundled", policy=policy, report=lambda _: None) as engine:
        yield engine


def test_colours_and_figures_are_those_of_the_text(engine: pystaged.Engine) -> None:
    result = engine.generate("def fibonacci(n):", max_tokens=60)
    assert b"".join(result.pieces).decode() == result.text
    assert result.pieces == [engine.tokenizer.token_bytes(token) for token in result.tokens]
    page = Page(result._repr_html_())
    text, line = page.boxes[1:]
    assert text == result.text
    by_title = Counter[str]()
    for words, attributes in page.spans:
        if "title" in attributes:
            by_title[str(attributes["title"])] += len(words.encode())
    expected = Counter[str]()
    for stage, piece in zip(result.stages, result.pieces, strict=True):
        expected[STAGE_NAMES[stage]] += len(piece)
    assert by_title == expected
    assert len(by_title) > 1
    # The grammar is in the legend of what it took part in only.
    there = shown_stages(result.stats)
    assert Stage.GRAMMAR not in there
    counts = {STAGE_NAMES[stage]: result.stats.stages[stage.name.lower()].emitted for stage in there}
    assert sum(counts.values()) == 60
    assert line.startswith(", ".join(f"{name} {count}" for name, count in counts.items()))
    assert str(result.stats) in line
    assert re.search(r"; 60 tokens, [\d.]+ per second.* per step; finish_reason 'length', seed 0$", line)
    # A stage has one colour, in text and legend, and the target has none.
    legend = {words.split()[0]: attributes.get("style") for words, attributes in page.spans[-len(there) :]}
    for words, attributes in page.spans[: -len(there)]:
        assert attributes.get("style") == legend[str(attributes["title"])], words
    assert legend["target"] is None
    assert len(set(legend.values())) == len(there)
    formed = engine.generate("Yes or no? ", regex="yes, of course")
    assert ", grammar " in Page(formed._repr_html_()).boxes[2]


def test_the_colours_go_with_any_page(engine: pystaged.Engine) -> None:
    html = engine.generate("def f(", max_tokens=20)._repr_html_()
    assert not re.search(r"(?<![-\w])color:|url\(|src=|href=|http|<style|<link|<script", html)
    backgrounds = re.findall(r"background:([^\"]*)", html)
    assert backgrounds
    assert all(re.fullmatch(r"rgba\(\d+,\d+,\d+,0?\.[1-4]\d*\)", each) for each in backgrounds)


def test_several_results_show_themselves(engine: pystaged.Engine) -> None:
    results = engine.generate("def f(", n=3, temperature=1.0, max_tokens=8)
    assert isinstance(results, list)
    page = Page(results._repr_html_())
    assert [page.boxes[i] for i in (1, 4, 7)] == [each.text for each in results]
    assert engine.generate(["a", "b"], max_tokens=1)._repr_html_().count("<hr>") == 1
    assert pickle.loads(pickle.dumps(results)) == results == list(results)
    assert type(copy.copy(results)) is Results


def test_a_score_shows_itself(engine: pystaged.Engine) -> None:
    text = "def f(x):\n  return <b>&amp;</b> \N{GRINNING FACE} x"
    score = engine.score(text)
    page = Page(score._repr_html_())
    assert page.boxes[1] == b"".join(score.pieces).decode() == text
    titles = [attributes["title"] for _, attributes in page.spans]
    assert titles[0] == "the first token"
    told = [float(str(title).removeprefix("log-probability ")) for title in titles[1:]]
    assert set(told) <= set(np.round(score.logprobs[1:], 3).tolist())
    alphas = [float(re.findall(r"[\d.]+", str(attributes["style"]))[-1]) for _, attributes in page.spans[1:]]
    assert sorted(alphas) == [alpha for _, alpha in sorted(zip(told, alphas, strict=True), key=lambda each: -each[0])]
    assert len(set(alphas)) > 1
    perplexity = np.exp(-score.total / (len(score.tokens) - 1))
    line = f"{len(score.tokens)} tokens, log-probability {score.total:.2f}, perplexity {perplexity:.2f}"
    assert page.boxes[2] == line


def test_scores_of_little(engine: pystaged.Engine) -> None:
    assert Page(engine.score("a")._repr_html_()).boxes[1:] == ["a", "1 tokens, log-probability 0.00"]
    impossible = Score([1, 2], [b"a", b"\xf0"], np.array([np.nan, -np.inf]))
    assert Page(impossible._repr_html_()).boxes[1] == "a\ufffd"
