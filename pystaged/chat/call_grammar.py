"""The grammar of an answer that must be tool calls, in llguidance's variant of Lark."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from typing import Any

from pystaged.chat.calls import BARE_KEY, KEYWORD, Schemas
from pystaged.chat.turn import Dialect
from pystaged.sampling.definitions import GrammarError, check_schema
from pystaged.sampling.schema import TYPES, Members, Schema, listed

_STYLE = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}  # as json.dumps writes it
_NO_ARGUMENTS: dict[str, Any] = {"type": "object", "properties": {}, "additionalProperties": False}
_LONGEST = 8_000_000  # characters of all rules; a request has fewer, but each member repeats the definitions it needs
_FREE, _EMPTY = "/(?s:.*)/", '""'
_Named = list[tuple[str, Any, bool]]  # members by name: their schemas, and whether they are required
# Values in Gemma's form for which there is no schema of a simple type.
_GEMMA = """value: object | array | text | NUMBER | "true" | "false" | "null"
object: "{{" (KEY ":" value ("," KEY ":" value)*)? "}}"
array: "[" (value ("," value)*)? "]"
text: {text}
KEY: /[A-Za-z_][A-Za-z0-9_-]{{0,63}}/
NUMBER: /-?(0|[1-9][0-9]{{0,18}})(\\.[0-9]{{1,18}})?/
"""


def call_grammar(dialect: Dialect, schemas: Schemas, *, several: bool, answer: Mapping[str, Any] | None = None) -> str:
    """The grammar of one call, or more, of given tools.

    Args:
        schemas: of the tools' arguments, by name; None for a tool without arguments.
        several: whether more than one call is allowed, if the format has more.
        answer: schema of an answer that may take the place of calls; None for no such answer.

    Raises:
        GrammarError: it is too long, or cannot hold a schema.
    """
    form, grammar = dialect.form, _Grammar(dialect)
    more = f" ({grammar.words(form.between)} call)*" if several and form.between is not None else ""
    calls = []
    for i, (name, schema) in enumerate(schemas.items()):
        head = form.head.format(name=name, quoted=json.dumps(name))
        try:
            check_schema(schema or _NO_ARGUMENTS)
            arguments = _arguments(grammar, f"a{i}", schema or _NO_ARGUMENTS)
        except (ValueError, RecursionError) as error:
            raise GrammarError(f"the parameters of {name}: {error}") from None
        calls.append(f"{grammar.words(head)} {arguments} {grammar.words(form.tail.format())}")
    start = f"{grammar.words(form.opening)} call{more} {grammar.words(form.closing)}"
    if answer is not None:
        check_schema(answer)
        start += f" | {grammar.json('answer', answer)}"
    return f"start: {start}\ncall: {' | '.join(calls)}\n" + "".join(grammar.rules)


def _arguments(grammar: _Grammar, name: str, given: Mapping[str, Any]) -> str:
    """The arguments of a tool, which are an object even if their schema does not say so."""
    style = grammar.dialect.form.style
    schema = Schema(given, strict=style != "json")
    found = schema.objects() if style != "json" else "object" in schema.types(given)
    if not found:
        raise GrammarError("no object matches them")
    if isinstance(found, bool):
        return grammar.json(name, {**given, "type": "object"})
    spelled = [_STYLES[style](grammar, f"{name}v{i}" if i else name, schema, form) for i, form in enumerate(found)]
    return spelled[0] if len(spelled) == 1 else f"({' | '.join(each or _EMPTY for each in spelled)})"


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
        return " ".join([*parts, _quoted(text[at:])]).strip() or _EMPTY

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

    def of_types(self, name: str, schema: Schema, part: Any, types: frozenset[str]) -> str:
        """The values of some types that a part of a schema allows, as JSON."""
        kinds = types - ({"integer"} if "number" in types else frozenset())
        limited = part if types == schema.types(part) else {"allOf": [part, {"type": sorted(kinds)}]}
        return self.json(name, schema.whole(limited))


def _xml(grammar: _Grammar, name: str, schema: Schema, members: Members) -> str:
    """Arguments between tags, in the order of the schema."""
    form = grammar.dialect.form

    def value(own: str, part: Any) -> str:
        types, texts = schema.types(part), schema.texts(part)
        if types == TYPES or texts == []:
            return f"{grammar.json(own, schema.whole(part))} {_quoted(form.member_end)}"
        if texts is None:
            return grammar.free(own, form.member_end)
        found = [grammar.words(text + form.member_end) for text in texts]
        if rest := types - {"string"}:
            found.append(f"{grammar.of_types(own, schema, part, rest)} {_quoted(form.member_end)}")
        return f"({' | '.join(found)})"

    parts = []
    for i, (key, part, required) in enumerate(_named(schema, members, r"[^<>\n]+")):
        tag = _quoted(form.member.format(key=key))
        parts.append(f"({tag} {value(f'{name}_{i}', part)}){'' if required else '?'}")
    if _is_open(members):
        begin, tags = map(_quoted, form.member.split("{key}"))
        own = f"{name}_any"
        spelled = value(own, members.of("")) if members.others else grammar.free(own, form.member_end)
        parts.append(f"({begin} /[A-Za-z_][A-Za-z0-9_.-]{{0,63}}/ {tags} {spelled})*")
    return " ".join(parts)


def _gemma(grammar: _Grammar, name: str, schema: Schema, members: Members) -> str:
    """Arguments by bare keys in alphabetical order, as the templates write them."""
    quote = grammar.dialect.form.quote
    if not any(rule.startswith("value:") for rule in grammar.rules):
        text = f"{grammar.words(quote)} {grammar.free('text_end', quote)}"
        grammar.rules.append(_GEMMA.format(text=text))

    def value(own: str, part: Any) -> str:
        types, texts = schema.types(part), schema.texts(part)
        if types == TYPES:
            return "value"
        found: list[str] = [kind for kind in ("object", "array") if kind in types]
        if texts is None:
            found.append("text")
        elif texts:
            found.append(f"{grammar.words(quote)} ({' | '.join(grammar.words(text + quote) for text in texts)})")
        if plain := types & {"integer", "number", "boolean", "null"}:
            found.append(grammar.of_types(f"{own}_value", schema, part, plain))
        return f"({' | '.join(found)})"

    if _is_open(members):
        if not members.others:
            return "object"
        pair = grammar.rule(f"{name}_any", f'KEY ":" {value(name, members.of(""))}')
        return f'"{{" ({pair} ("," {pair})*)? "}}"'
    named = sorted(_named(schema, members, BARE_KEY), key=lambda each: each[0])
    return f'"{{" {_separated(grammar, name, named, ":", ",", value)} "}}"'


def _python(grammar: _Grammar, name: str, schema: Schema, members: Members) -> str:
    """Keyword arguments in the order of the schema; strings, lists and objects as in JSON, which Python reads."""

    def value(own: str, part: Any) -> str:
        whole = schema.whole(part)
        if whole.get("type") in ("boolean", "null") and not listed(whole):
            return '("True" | "False")' if whole["type"] == "boolean" else '"None"'
        return grammar.json(f"{own}_value", whole)

    if _is_open(members):
        pair = grammar.rule(f"{name}_any", f'/[A-Za-z_][A-Za-z0-9_]{{0,63}}/ "=" {value(name, members.of(""))}')
        return f'({pair} (", " {pair})*)?'
    return _separated(grammar, name, _named(schema, members, KEYWORD), "=", ", ", value)


def _separated(
    grammar: _Grammar, name: str, members: _Named, equals: str, between: str, value: Callable[[str, Any], str]
) -> str:
    """Members in order, each a key, `equals` and a value; two of them are separated by `between`."""
    # tail_i writes the members from i on after another one, head_i as the first ones.
    heads, tails = grammar.rule(f"{name}_h{len(members)}", _EMPTY), grammar.rule(f"{name}_t{len(members)}", _EMPTY)
    for i, (key, each, required) in reversed(list(enumerate(members))):
        own = f"{name}_{i}"
        pair = grammar.rule(own, f"{_quoted(key + equals)} {value(own, each)}")
        optional = "" if required else "?"
        heads = grammar.rule(f"{name}_h{i}", f"{pair} {tails}" + ("" if required else f" | {heads}"))
        tails = grammar.rule(f"{name}_t{i}", f"({_quoted(between)} {pair}){optional} {tails}")
    return heads


def _is_open(members: Members) -> bool:
    """Whether an object may have any members, because its schema names none."""
    return not members.named and members.others is not None


def _named(schema: Schema, members: Members, readable: str) -> _Named:
    """Name, schema and necessity of an object's members. Those whose names do not match a pattern could not be read
    back, and are left out; GrammarError where such a member is required."""
    found = []
    for key in members.named:
        if not re.fullmatch(readable, key):
            if key in members.required:
                raise GrammarError(f"this model's calls cannot name the argument {key!r}; rename it")
        elif schema.types(members.of(key)):
            found.append((key, members.of(key), key in members.required))
    return found


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False) if text else ""


_STYLES: dict[str, Callable[[_Grammar, str, Schema, Members], str]] = {"xml": _xml, "gemma": _gemma, "python": _python}
