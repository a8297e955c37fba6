"""The grammar of an answer that must be tool calls, in llguidance's variant of Lark."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from pystaged.chat.calls import BARE_KEY, KEYWORD, Schemas, is_text, listed
from pystaged.chat.turn import Dialect
from pystaged.definitions import GrammarError

_STYLE = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}  # as json.dumps writes it
_NO_ARGUMENTS: dict[str, Any] = {"type": "object", "properties": {}, "additionalProperties": False}
_LONGEST = 8_000_000  # characters of all rules; a request has fewer, but each member repeats the definitions it needs
_FREE = "/(?s:.*)/"
# Values in Gemma's form for which there is no schema of a simple type.
_GEMMA = """value: object | array | text | NUMBER | "true" | "false" | "null"
object: "{{" (KEY ":" value ("," KEY ":" value)*)? "}}"
array: "[" (value ("," value)*)? "]"
text: {text}
KEY: /[A-Za-z_][A-Za-z0-9_-]{{0,63}}/
NUMBER: /-?(0|[1-9][0-9]{{0,18}})(\\.[0-9]{{1,18}})?/
"""


def call_grammar(dialect: Dialect, schemas: Schemas, *, several: bool) -> str:
    """The grammar of one call, or more, of given tools.

    Args:
        schemas: of the tools' arguments, by name; None for a tool without arguments.
        several: whether more than one call is allowed, if the format has more.

    Raises:
        GrammarError: it is too long.
    """
    form, grammar = dialect.form, _Grammar(dialect)
    more = f" ({grammar.words(form.between)} call)*" if several and form.between is not None else ""
    calls = []
    for i, (name, schema) in enumerate(schemas.items()):
        head = form.head.format(name=name, quoted=json.dumps(name))
        arguments = _STYLES[form.style](grammar, f"a{i}", schema or _NO_ARGUMENTS)
        calls.append(f"{grammar.words(head)} {arguments} {grammar.words(form.tail.format())}")
    start = f"start: {grammar.words(form.opening)} call{more} {grammar.words(form.closing)}\n"
    return start + f"call: {' | '.join(calls)}\n" + "".join(grammar.rules)


class _Grammar:
    """Rules, and how texts are spelled: marks that are control tokens by their ids."""

    def __init__(self, dialect: Dialect) -> None:
        self.rules: list[str] = []
        self._length = 0
        self.dialect = dialect
        self._marks = re.compile("|".join(map(re.escape, dialect.controls)) or "(?!)")

    def words(self, text: str) -> str:
        """The spelling of a fixed text."""
        parts, at = [], 0
        for found in self._marks.finditer(text):
            parts += [_quoted(text[at : found.start()]), f"<[{self.dialect.controls[found[0]]}]>"]
            at = found.end()
        return " ".join([*parts, _quoted(text[at:])]).strip() or '""'

    def rule(self, name: str, body: str, attribute: str = "") -> str:
        self.rules.append(f"{name}{attribute}: {body}\n")
        self._length += len(self.rules[-1])
        if self._length > _LONGEST:
            raise GrammarError(
                f"the tools' schemas make a grammar of more than {_LONGEST // 10**6} MB; send fewer or smaller tools"
            )
        return name

    def json(self, name: str, schema: Any) -> str:
        return self.rule(name, f"%json {json.dumps(schema | {'x-guidance': _STYLE})}")

    def free(self, name: str, end: str) -> str:
        """Any text up to an end, and that."""
        if end in self.dialect.controls:
            return self.rule(name, f"{_FREE} {self.words(end)}")
        return self.rule(name, _FREE, f"[suffix={json.dumps(end)}]")

    def texts(self, schema: Any, end: str) -> str:
        """The strings that a schema lists, each with an end; "" if it lists none."""
        return " | ".join(self.words(value + end) for value in listed(schema))


def _json(grammar: _Grammar, name: str, schema: Any) -> str:
    return grammar.json(name, schema)


def _xml(grammar: _Grammar, name: str, schema: Any) -> str:
    """Arguments between tags, in the order of the schema."""
    form = grammar.dialect.form
    parts = []
    for i, (key, each, required) in enumerate(_members(schema, r"[^<>\n]+")):
        own = f"{name}_{i}"
        if is_text(each):
            value = grammar.texts(each, form.member_end)
            value = f"({value})" if value else grammar.free(own, form.member_end)
        else:
            value = f"{grammar.json(own, each)} {_quoted(form.member_end)}"
        parts.append(f"({_quoted(form.member.format(key=key))} {value}){'' if required else '?'}")
    if not parts and _is_open(schema):
        begin, tags = map(_quoted, form.member.split("{key}"))
        value = grammar.free(f"{name}_any", form.member_end)
        parts.append(f"({begin} /[A-Za-z_][A-Za-z0-9_.-]{{0,63}}/ {tags} {value})*")
    return " ".join(parts)


def _gemma(grammar: _Grammar, name: str, schema: Any) -> str:
    """Arguments by bare keys in alphabetical order, as the templates write them."""
    quote = grammar.dialect.form.quote
    if not any(rule.startswith("value:") for rule in grammar.rules):
        text = f"{grammar.words(quote)} {grammar.free('text_end', quote)}"
        grammar.rules.append(_GEMMA.format(text=text))

    def value(own: str, each: Mapping[str, Any]) -> str:
        if is_text(each):
            listed = grammar.texts(each, quote)
            return f"{grammar.words(quote)} ({listed})" if listed else "text"
        if each.get("type") in ("integer", "number", "boolean", "null"):
            return grammar.json(f"{own}_value", each)
        return "value"

    members = sorted(_members(schema, BARE_KEY))
    if not members and _is_open(schema):
        return "object"
    return f'"{{" {_separated(grammar, name, members, ":", ",", value)} "}}"'


def _python(grammar: _Grammar, name: str, schema: Any) -> str:
    """Keyword arguments in the order of the schema; strings, lists and objects as in JSON, which Python reads."""

    def value(own: str, each: Mapping[str, Any]) -> str:
        if each.get("type") in ("boolean", "null") and not listed(each):
            return '("True" | "False")' if each["type"] == "boolean" else '"None"'
        return grammar.json(f"{own}_value", each)

    members = _members(schema, KEYWORD)
    if not members and _is_open(schema):
        pair = grammar.rule(f"{name}_any", f'/[A-Za-z_][A-Za-z0-9_]{{0,63}}/ "=" {grammar.json(f"{name}_value", {})}')
        return f'({pair} (", " {pair})*)?'
    return _separated(grammar, name, members, "=", ", ", value)


def _separated(
    grammar: _Grammar,
    name: str,
    members: Sequence[tuple[str, Any, bool]],
    equals: str,
    between: str,
    value: Callable[[str, Mapping[str, Any]], str],
) -> str:
    """Members in order, each a key, `equals` and a value; two of them are separated by `between`."""
    # tail_i writes the members from i on after another one, head_i as the first ones.
    heads, tails = grammar.rule(f"{name}_h{len(members)}", '""'), grammar.rule(f"{name}_t{len(members)}", '""')
    for i, (key, each, required) in reversed(list(enumerate(members))):
        own = f"{name}_{i}"
        pair = grammar.rule(own, f"{_quoted(key + equals)} {value(own, each)}")
        optional = "" if required else "?"
        heads = grammar.rule(f"{name}_h{i}", f"{pair} {tails}" + ("" if required else f" | {heads}"))
        tails = grammar.rule(f"{name}_t{i}", f"({_quoted(between)} {pair}){optional} {tails}")
    return heads


def _is_open(schema: Mapping[str, Any]) -> bool:
    """Whether an object may have any members, because its schema names none."""
    return not schema.get("properties") and schema.get("additionalProperties") is not False


def _members(schema: Mapping[str, Any], readable: str) -> Sequence[tuple[str, Any, bool]]:
    """Name, schema and necessity of an object's members; the schemas with the definitions that they may refer to.
    Members whose names do not match a pattern could not be read back, and are left out.

    Raises:
        GrammarError: such a member is required.
    """
    properties, required = schema.get("properties"), schema.get("required")
    shared = {key: schema[key] for key in ("$defs", "definitions") if key in schema}
    needed = {key for key in required if isinstance(key, str)} if isinstance(required, list) else set()
    found = properties if isinstance(properties, Mapping) else {}
    members = []
    for key, each in found.items():
        if not re.fullmatch(readable, key):
            if key in needed:
                raise GrammarError(f"this model's calls cannot name the argument {key!r}; rename it")
            continue
        own = dict(each) if isinstance(each, Mapping) else {}
        refers = bool(shared) and '"$ref"' in json.dumps(own)  # else many members would repeat long definitions
        members.append((key, own | shared if refers else own, key in needed))
    return members


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False) if text else ""


_STYLES: dict[str, Callable[[_Grammar, str, Any], str]] = {
    "json": _json,
    "xml": _xml,
    "gemma": _gemma,
    "python": _python,
}
