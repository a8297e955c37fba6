"""llama.cpp's notation of grammars (GBNF) as llguidance's variant of Lark."""

from __future__ import annotations

import json
import re

_TOKEN = re.compile(
    r"""(?P<space>(?:[ \t]|\#[^\r\n]*)+) | (?P<line>[\r\n])
    | (?P<rule>[\w-]+)(?:[ \t]|\#[^\r\n]*)*::= | (?P<name>[\w-]+)
    | (?P<text>"(?:[^"\\]|\\.)*") | (?P<set>\[(?:[^\]\\]|\\.)*\]) | (?P<token>!?<\[\d+\]>) | (?P<mark>[()|.])
    | (?P<repeat>[*+?] | \{\s*(?P<least>\d+)\s*(?P<comma>,\s*(?P<most>\d+)?\s*)?\})""",
    re.VERBOSE | re.DOTALL,
)
_CHARACTER = re.compile(r"\\(?:x(..)|u(.{4})|U(.{8})|([nrt\\\"\[\]-]))|([^\\])", re.DOTALL)
_DEEPEST = 500
_SURROGATES = range(0xD800, 0xE000)  # no text has them


def lark_of(grammar: str) -> str:
    """Convert a grammar. Rules that do not refer to themselves become terminals, which are matched as a whole.

    Raises:
        ValueError: it is not valid.
    """
    bodies: dict[str, str] = {}  # names within them are between zeros
    name, before, at = "", "", 0
    groups: list[list[list[str]]] = []  # open ones: their alternatives, which are lists of items
    text = f"{grammar}\n"
    while at < len(grammar) or name:
        found = _TOKEN.match(text, at)
        kind, words = (found.lastgroup or "", found[0]) if found else ("", "")
        if not found or (not name and kind not in ("space", "line", "rule")) or (name and kind == "rule"):
            expected, line = "an item" if name else "::= after a name", grammar.count("\n", 0, at) + 1
            raise ValueError(f"Expected {expected} at line {line}, where it has {grammar[at : at + 20]!r}")
        is_last, at = at == len(grammar), found.end()
        if kind == "space" or (kind == "line" and not is_last and (len(groups) != 1 or before in ("rule", "|"))):
            continue
        if kind == "line" and len(groups) > 1:
            raise ValueError(f"Expected ')' at line {len(grammar.splitlines())}")
        if kind == "rule":
            name, groups = found["rule"], [[[]]]
        elif kind == "line":
            bodies[name], name, groups = _alternatives(groups.pop()), "", []
        elif words == "(" and len(groups) < _DEEPEST:
            groups.append([[]])
        elif words == ")" and len(groups) > 1:
            body = _alternatives(groups.pop())
            groups[-1][-1].append(f"({body})")
        elif words == "|":
            groups[-1].append([])
        elif words in ("(", ")"):
            raise ValueError("it is nested too deeply" if words == "(" else "it closes a group that is not open")
        elif kind == "repeat" or found["repeat"]:
            kind, items = "repeat", groups[-1][-1]
            if not items:
                raise ValueError("it repeats nothing")
            items[-1] = _repeated(f"({items[-1]})" if before == "repeat" else items[-1], found)
        else:
            groups[-1][-1].append(_item(kind, words))
        before = words if kind == "mark" else kind
    return _lark(bodies)


def _lark(bodies: dict[str, str]) -> str:
    refers = {name: set(re.findall("\0(.*?)\0", body)) for name, body in bodies.items()}
    for missing in sorted({"root"}.union(*refers.values()) - bodies.keys()):
        raise ValueError(f"No {missing!r} rule found")
    terminals: set[str] = set()
    while more := {
        name for name in bodies.keys() - terminals if refers[name] <= terminals and "<[" not in bodies[name]
    }:
        terminals |= more
    spelled = {name: f"{'R' if name in terminals else 'r'}{i}" for i, name in enumerate(bodies)}
    rules = (f"\0{name}\0: {body}" for name, body in bodies.items())
    return re.sub("\0(.*?)\0", lambda found: spelled[found[1]], "\n".join(["start: \0root\0", *rules]))


def _alternatives(group: list[list[str]]) -> str:
    return " | ".join(" ".join(items) or '""' for items in group)


def _repeated(item: str, found: re.Match[str]) -> str:
    if found["least"] is None:
        return item + found[0]
    least, most = found["least"], found["most"] or ("" if found["comma"] else found["least"])
    if most and int(most) < int(least):
        raise ValueError(f"it repeats {found[0]} times")
    return '""' if most and not int(most) else f"{item}{{{least},{most}}}"


def _item(kind: str, words: str) -> str:
    if kind == "name":
        return f"\0{words}\0"
    if kind == "token":
        return words.replace("!<[", "<[^")
    if kind == "text":
        text = "".join(character for character, _ in _characters(words[1:-1]))
        if any(ord(character) in _SURROGATES for character in text):
            raise ValueError("it has half of a surrogate pair")
        return json.dumps(text, ensure_ascii=False)
    return "/(?s:.)/" if words == "." else _set(words[1:-1])


def _set(words: str) -> str:
    """A set of characters as a regular expression."""
    negated = words[:1] == "^"
    given, ranges = _characters(words[negated:]), ""
    while given:
        first = last = ord(given.pop(0)[0])
        if len(given) > 1 and given[0] == ("-", False):
            last = ord(given[1][0])
            del given[:2]
        first = _SURROGATES.stop if first in _SURROGATES else first
        last = _SURROGATES.start - 1 if last in _SURROGATES else last
        ranges += rf"\x{{{first:x}}}-\x{{{last:x}}}" if first <= last else ""
    if not ranges and words and (not negated or words == "^"):
        raise ValueError(f"[{words}] matches nothing")
    return f"/[{'^' * negated}{ranges}]/" if ranges else "/(?s:.)/" if negated else '""'


def _characters(words: str) -> list[tuple[str, bool]]:
    """The characters of a text or set, and whether each was escaped."""
    found = list(_CHARACTER.finditer(words))
    if sum(len(each[0]) for each in found) < len(words):
        raise ValueError(f"it has an unknown escape in {words[:40]}")
    escapes = {"n": "\n", "r": "\r", "t": "\t"}
    digits = [each[1] or each[2] or each[3] for each in found]
    return [
        (chr(int(code, 16)) if code else each[5] or escapes.get(each[4], each[4]), each[5] is None)
        for each, code in zip(found, digits, strict=True)
    ]
