"""TextBuffer against a slow twin that looks at the whole text after every push."""

from __future__ import annotations

import codecs

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from pystaged.decoding.stop_strings import TextBuffer
from pystaged.options.config import GenerationConfig

# Few characters, so that stop strings are met; whole ones, torn ones, and bytes that no text has.
PARTS = [b"a", b"b", b"ab", b" ", "\u00e9".encode(), "\u4e2d".encode(), "\U0001f999".encode()]
BROKEN = [b"\xff", b"\x80", b"\xc3", b"\xe4\xb8", b"\xf0\x9f\xa6", b"\xed\xa0\x80", b"\xf4\x90\x80\x80", b"\xc0\xaf"]

stops = st.lists(st.text("ab \u00e9\u4e2d\U0001f999\ufffd", min_size=1, max_size=4), max_size=3).map(tuple)
contents = st.lists(st.sampled_from([*PARTS, *PARTS, *BROKEN]), max_size=12).map(b"".join) | st.binary(max_size=20)


@st.composite
def chunks(draw: st.DrawFn) -> list[bytes]:
    """Bytes cut anywhere, some chunks empty."""
    data = draw(contents)
    cuts = sorted(draw(st.lists(st.integers(0, len(data)), max_size=8)))
    return [data[a:b] for a, b in zip([0, *cuts], [*cuts, len(data)], strict=True)]


def pieces_of(chunks: list[bytes], stop: tuple[str, ...]) -> tuple[list[str], bool]:
    buffer = TextBuffer(stop)
    return [*map(buffer.push, chunks), buffer.finish()], buffer.met is not None


def twin(chunks: list[bytes], stop: tuple[str, ...]) -> tuple[list[str], bool]:
    """What each push and the end must give, and whether a stop string was met."""
    pieces, shown, stopped = list[str](), "", False
    for i in range(len(chunks) + 1):
        final = i == len(chunks)
        certain = shown
        if not stopped:
            decoder = codecs.getincrementaldecoder("utf-8")("replace")
            text = decoder.decode(b"".join(chunks[: i + 1]), final)
            found = [text.index(s) for s in stop if s in text]
            stopped = bool(found)
            beginnings = [n for s in stop for n in range(len(s)) if text.endswith(s[:n])]
            held = 0 if final else max(beginnings, default=0)
            certain = text[: min(found)] if found else text[: len(text) - held]
        pieces.append(certain[len(shown) :])
        shown = certain
    return pieces, stopped


@pytest.mark.slow
@settings(max_examples=1000)
@given(chunks=chunks(), stop=stops)
@example(chunks=[b"aa", b"ab"], stop=("aab",))
@example(chunks=[b"ab", b"ab", b"c"], stop=("ababd", "bc"))
@example(chunks=[b"\xf0\x9f", b"\xa6"], stop=("\ufffd",))
def test_pieces_are_the_twins(chunks: list[bytes], stop: tuple[str, ...]) -> None:
    assert pieces_of(chunks, stop) == twin(chunks, stop)


@settings(max_examples=300)
@given(text=st.text("ab", max_size=40), stop=st.lists(st.text("ab", min_size=1, max_size=12), max_size=6).map(tuple))
@example(text="aababx", stop=("aabababa", "abab", "b" * 9))
def test_stop_strings_within_one_another(text: str, stop: tuple[str, ...]) -> None:
    for chunks in ([text.encode()], [letter.encode() for letter in text]):
        assert pieces_of(chunks, stop) == twin(chunks, stop)


def test_the_stop_string_that_is_met_begins_first_and_is_the_shortest() -> None:
    buffer = TextBuffer(("bc", "abcd", "abc", "d"))
    assert (buffer.push(b"xabcdy"), buffer.met) == ("x", "abc")


@pytest.mark.parametrize("stop", ["x" * 65537, ["x" * 40_000, "y" * 30_000]])
def test_stop_strings_have_a_bound(stop: str | list[str]) -> None:
    with pytest.raises(ValueError, match=r"stop has .* at most 65536 are allowed"):
        GenerationConfig(stop=stop)
    assert GenerationConfig(stop="x" * 65536).stop
