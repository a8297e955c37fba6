"""The formats in which models write tool calls, each with a parser that reads a call while it is written."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, NoReturn

from pystaged.chat.source import Parser, Source
from pystaged.sampling.schema import Schema, UndecidedError

Schemas = Mapping[str, Mapping[str, Any]]
"""The JSON schema of the arguments of each tool, by name."""

_ESCAPES = '"\\/bfnrtu'
_LONGEST_HEAD = 256  # characters before the arguments of a call; a longer text is no call


def _pattern(words: str) -> re.Pattern[str]:
    """A pattern in which each space stands for white space, which has a limit, so that none takes long to fail."""
    return re.compile(words.replace(" ", r"\s{0,32}"))


_JSON_HEAD = _pattern(
    r' \[? \{ (?:"(?:type|id)" : "[^"\\]*" , )*"name" : "([^"\\]{1,128})" '
    r'(?:, "(?:arguments|parameters)" : (?=\{)|(?P<no_arguments>\}))'
)
_REVERSED = _pattern(r' \{ "(?:arguments|parameters)"')


@dataclass(frozen=True)
class CallForm:
    """A format of tool calls.

    template: texts that identify a chat template of this format; it contains all of them.
    begins: marks, one of which begins a call. end: the mark that ends it, "" for none.
    at_start: whether an answer that begins with a call in JSON needs no mark.
    parse: reads a call after its mark; returns False, having read nothing, if there is none.
    opening, head, tail, between, closing: how a grammar spells calls: the text before and after all, before and after
    a call's arguments, with {name} and {quoted} for the tool's name, and between two calls; None for one call only.
    style: how the grammar spells arguments. quote: the mark around strings in the "gemma" style. member, member_end:
    the text before and after an argument's value in the "xml" style, with {key} for its name.
    """

    template: tuple[str, ...]
    begins: tuple[str, ...]
    parse: Callable[[Source, CallForm, Schemas], Parser[bool]]
    head: str
    tail: str
    end: str = ""
    at_start: bool = False
    opening: str = ""
    between: str | None = ""
    closing: str = ""
    style: str = "json"
    quote: str = ""
    member: str = "<parameter={key}>\n"
    member_end: str = "\n</parameter>\n"

    @property
    def marks(self) -> tuple[str, ...]:
        """All marks, which may be control tokens."""
        more = ("[ARGS]", "[CALL_ID]") if "[ARGS]" in self.head else ()
        if self is HARMONY:
            return HARMONY_MARKS
        return tuple(mark for mark in (*self.begins, self.end, self.quote, *more) if mark)


def _json_call(source: Source, form: CallForm, schemas: Schemas) -> Parser[bool]:
    """Calls as JSON objects, alone or in a list."""
    is_call = False
    while True:
        head = yield from _head(source, _JSON_HEAD, form, schemas)
        if head is None:
            if not (form.end and (yield from _reversed_call(source))):
                break
        elif form.at_start and not is_call and head[1] not in schemas:
            return False  # JSON that is no call
        else:
            source.take(head.end())
            yield "call", head[1]
            if head["no_arguments"]:
                yield "arguments", "{}"
            elif not (yield from _json_value(source)):
                return True
            yield "end", ""
            if not head["no_arguments"] and (yield from _skip(source, form, "}"))[1] != "}":
                return True
        is_call = True
        if not (yield from _another(source)):
            break
    if is_call and form.end:
        yield from _ended(source, form)
    return is_call


def _ended(source: Source, form: CallForm) -> Parser[None]:
    """Read the mark that ends calls, and what is before it."""
    words, mark = yield from _skip(source, form)
    if mark != form.end and (words := words.strip(" \n}]")):  # the end was forgotten
        yield "text", words


def _another(source: Source) -> Parser[bool]:
    """Whether another JSON object follows in a list."""
    while True:
        yield from source.space()
        if source.text[:1] not in (",", ";", "]") or not source.text:
            return source.text[:1] == "{"
        source.take(1)


def _reversed_call(source: Source) -> Parser[bool]:
    """A call that names its tool after the arguments, which is read when it is whole."""
    yield from ()
    if not _REVERSED.match(source.text):
        return False
    with suppress(ValueError, RecursionError):
        skipped = len(source.text) - len(source.text.lstrip())
        call, end = json.JSONDecoder().raw_decode(source.text, skipped)
        arguments = call.get("arguments", call.get("parameters"))
        if isinstance(call.get("name"), str) and isinstance(arguments, dict):
            source.take(end)
            yield "call", call["name"]
            yield "arguments", json.dumps(arguments, ensure_ascii=False)
            yield "end", ""
            return True
    return False


def _head(source: Source, pattern: re.Pattern[str], form: CallForm, schemas: Schemas) -> Parser[re.Match[str] | None]:
    """Wait until a pattern matches what comes next; None once it cannot. A head that is cut is read, as a call if its
    name is whole."""
    searched, end = 0, form.end  # characters, among which no end begins
    while True:
        found = pattern.match(source.text)
        if found or (end and source.text.find(end, searched) >= 0):
            return found
        searched = max(0, len(source.text) - len(end))
        if len(source.text) > _LONGEST_HEAD and not (end and _REVERSED.match(source.text)):
            return None
        if not (yield from source.more()):
            name = _cut_name(source.text, pattern, form) if source.is_cut else ""
            if name and (name in schemas or not form.at_start):
                source.text, source.has_cut = "", True
                yield "call", name
            return None


def _cut_name(text: str, pattern: re.Pattern[str], form: CallForm) -> str:
    """The tool's name, if it is whole, in a text that more would make a head; "" for another text."""
    for head in (form.head, form.head.replace("[ARGS]", "[CALL_ID][ARGS]"), _JSON.replace("{{", '{{"type": "x", ')):
        for rest in ("{", ")", "=", form.end, form.member.partition("{key}")[0]):
            whole = head.format(name="x", quoted='"x"') + rest
            for at in range(len(whole)):
                made = pattern.match(text + whole[at:])
                if made and made[1] and made.end(1) < len(text):
                    return text[made.start(1) : made.end(1)]
    return ""


def _json_value(source: Source) -> Parser[bool]:
    """Pass on a JSON object or string; returns whether it is complete. Control characters and stray backslashes in
    strings, which models forget to escape, are escaped."""
    depth, in_string, escaped = 0, False, False
    while True:
        found: list[str] = []
        for at, character in enumerate(source.text, 1):
            lost = escaped and character not in _ESCAPES
            found.append("\\" * lost + (_dumped(character)[1:-1] if in_string and character < " " else character))
            if in_string:
                in_string = escaped or character != '"'
                escaped = character == "\\" and not escaped
            elif character == '"':
                in_string = True
            elif character in "{[":
                depth += 1
            elif character in "}]":
                depth -= 1
            if depth == 0 and not in_string:
                source.take(at)
                yield "arguments", "".join(found)
                return True
        source.text = ""
        if found:
            yield "arguments", "".join(found)
        if not (yield from source.more()):
            return False


def _skip(source: Source, form: CallForm, *marks: str) -> Parser[tuple[str, str]]:
    """Read up to a mark or the end of a call, or up to the next call; returns what was before it, and the mark."""
    words, mark = yield from source.collected((*marks, form.end, *form.begins) if form.end else marks)
    if mark in form.begins:
        source.text = mark + source.text
    return words, mark


_MISTRAL_HEAD = _pattern(r" ([^\[{\s]{1,128}) (?:\[CALL_ID\][^\[]*)?\[ARGS\] (?=\{)")
_FUNCTION_HEAD = _pattern(r" <function=([^>\s]{1,128})> (?=\{)")


def _named_call(source: Source, form: CallForm, schemas: Schemas) -> Parser[bool]:
    """Forms with the name before the JSON of the arguments: Mistral's newer one, name[ARGS]{...}, and Functionary's,
    <function=name>{...}</function>."""
    head = yield from _head(source, _FUNCTION_HEAD if "<function=" in form.begins else _MISTRAL_HEAD, form, schemas)
    return (yield from _with_json(source, form, head) if head else _json_call(source, form, schemas))


_HARMONY_HEAD = _pattern(r"([\w.-]{1,128})(?: <\|channel\|>\w+)?(?: <\|constrain\|>| )\w* <\|message\|> (?=\{)")


def _harmony_call(source: Source, form: CallForm, schemas: Schemas) -> Parser[bool]:
    """gpt-oss's form: a message to a function, whose text is JSON."""
    head = yield from _head(source, _HARMONY_HEAD, form, schemas)
    return bool(head and (yield from _with_json(source, form, head)))


def _with_json(source: Source, form: CallForm, head: re.Match[str]) -> Parser[bool]:
    """A head, the JSON of the arguments, and the mark that ends the call."""
    source.take(head.end())
    yield "call", head[1]
    if (yield from _json_value(source)):
        yield "end", ""
        yield from source.space()
        yield from source.takes(form.end)
    return True


_XML_HEAD = _pattern(r" <function=([^>\s]{1,128})>")
_CDATA = "<![CDATA["
_QUOTED_HEAD = _pattern(r'([^"\s]{1,128}) " >')
_GLM_HEAD = _pattern(r' ([^\s<>{}"]{1,128}) (?=<arg_key>|</tool_call>)')


def _xml_call(source: Source, form: CallForm, schemas: Schemas) -> Parser[bool]:
    """Forms that write the text of each argument between tags.

    Qwen3-Coder's: <function=name>, then <parameter=key>, value and </parameter>. GLM's: name, then
    <arg_key>key</arg_key> and <arg_value>value</arg_value>. MiniCPM5's: <function name="name">, then
    <param name="key">, value, which may be in a CDATA section, and </param>.
    """
    is_quoted = form.begins[0].endswith('"')
    pattern = _XML_HEAD if "<function=" in form.begins else _QUOTED_HEAD if is_quoted else _GLM_HEAD
    head = yield from _head(source, pattern, form, schemas)
    if head is None:
        return False
    source.take(head.end())
    yield "call", head[1]
    begins, tags = form.member.split("{key}")
    key_end, _, value_begins = tags.partition("\n")
    value_ends, closes = (form.member_end.rstrip(), form.member_end.strip()), form.tail.partition("\n")[0]
    goes_on = (begins, closes, form.end, *form.begins)  # follow the end of a value, or that is text of the value
    schema = Schema(schemas.get(head[1]) or {})
    separator = "{"
    while (mark := (yield from _skip(source, form, begins, closes))[1]) == begins:
        key, mark = yield from source.collected((key_end,))
        if not mark or (value_begins and (yield from _skip(source, form, value_begins))[1] != value_begins):
            return True
        while not source.text and (yield from source.more()):
            pass
        source.text = source.text if value_begins else source.text.removeprefix("\n")
        ends = value_ends
        if is_quoted and (yield from source.takes(_CDATA)):
            ends = (f"]]>{form.member_end}", form.member_end)
        yield "arguments", f"{separator}{_dumped(key)}: "
        separator = ", "
        if _is_text(schema, key):
            yield "arguments", '"'
            if not (yield from source.until(ends, "arguments", lambda part: _dumped(part)[1:-1], then=goes_on)):
                return True
            yield "arguments", '"'
        else:
            words, mark = yield from source.collected(ends, then=goes_on)
            if not mark:
                return True
            yield "arguments", _value(words, schema, key)
    if not mark:
        return True
    yield "arguments", "{}" if separator == "{" else "}"
    yield "end", ""
    if mark == closes != form.end:
        yield from source.space()
        yield from source.takes(form.end)
    return True


def _is_text(schema: Schema, key: str, words: str | None = None, value: Any = None) -> bool:
    """Whether an argument is a string in any case; or whether words are meant as one, not as the JSON value that they
    spell."""
    with suppress(UndecidedError, RecursionError):
        part = schema.member(key)
        return schema.types(part) == {"string"} if words is None else schema.is_text(part, words, value)
    return False


def _value(words: str, schema: Schema | None = None, key: str = "") -> str:
    """JSON of an argument that was written as text; True, False and None are Python's, which templates write."""
    literal = {"True": "true", "False": "false", "None": "null"}.get(words.strip(), words)
    with suppress(ValueError, RecursionError):
        value = json.loads(literal, parse_constant=no_json)
        if schema is None or not _is_text(schema, key, words, value):
            return json.dumps(value, ensure_ascii=False, allow_nan=False)
    return _dumped(words)


def is_json(words: str) -> bool:
    """Whether a text is valid JSON that can be written as UTF-8."""
    try:
        json.dumps(json.loads(words, parse_constant=no_json), ensure_ascii=False, allow_nan=False).encode()
    except (ValueError, RecursionError):
        return False
    return True


def no_json(name: str) -> NoReturn:
    """Refuse what Python reads as a number, and JSON has not. Raises ValueError."""
    raise ValueError(f"{name} is no JSON")


def _dumped(words: str) -> str:
    return json.dumps(words, ensure_ascii=False)


_GEMMA_HEAD = _pattern(r" call: ([\w.-]{1,128}) (?=\{)")
BARE_KEY = r'[^\s{}\[\],:"<]+'
_GEMMA_TOKEN = re.compile(rf'\s+|[{{}}\[\],:]|(?P<word>{BARE_KEY})(?=(?P<is_key>:)|[\s{{}}\[\],"<])')
_GEMMA_ENDS = re.compile(r'[\s{}\[\],:"<]')


def _waits(source: Source, pattern: re.Pattern[str]) -> Parser[bool]:
    """Wait for text that a pattern is found in; returns whether it came. So a long word is read only once."""
    before = len(source.text)
    while (yield from source.more(drops=True)):
        if pattern.search(source.text, before):
            return True
        before = len(source.text)
    return False


def _gemma_call(source: Source, form: CallForm, schemas: Schemas) -> Parser[bool]:
    """Gemma's form: call:name{key:value,...}, with marks around strings and bare keys."""
    head = yield from _head(source, _GEMMA_HEAD, form, schemas)
    if head is None:
        return False
    source.take(head.end())
    yield "call", head[1]
    depth, word, key, schema = 0, "", "", Schema(schemas.get(head[1]) or {})
    while depth or not word:
        if (yield from source.takes(form.quote)):
            yield "arguments", '"'
            if not (yield from source.until((form.quote,), "arguments", lambda part: _dumped(part)[1:-1], then=",}]:")):
                return True
            yield "arguments", '"'
            continue
        if source.text.startswith('"'):
            if not (yield from _json_value(source)):
                return True
            continue
        found = _GEMMA_TOKEN.match(source.text)
        if found is None:
            if not (yield from _waits(source, _GEMMA_ENDS)):
                return True
            continue
        word = source.take(found.end())
        depth += (word in ("{", "[")) - (word in ("}", "]"))
        key = word if found["is_key"] and depth == 1 else key
        if found["word"]:
            word = _dumped(word) if found["is_key"] else _value(word, schema if depth == 1 else None, key)
        yield "arguments", word
    yield "end", ""
    yield from source.takes(form.end)
    return True


_FIRST = r"""[^\s()\[\]{}<>'"=,:]"""
KEYWORD = rf"{_FIRST}(?:[^\n()\[\]{{}}<>'\"=,:]{{0,126}}{_FIRST})?"  # may have spaces within, though not in Python
_KEY, _KEY_BEGUN = re.compile(rf"({KEYWORD})\s{{0,32}}="), re.compile(rf"{_FIRST}[^()\[\]{{}}<>'\"=,:]{{0,160}}")
_PYTHON_HEAD = _pattern(rf" \[? (?:(?=\{{)|({_FIRST}{{1,128}}) \( (?=\)|{KEYWORD} =))")
_WORD = re.compile(r"""[^\s()\[\]{}'"=,:]+(?=[\s()\[\]{}'"=,:])""")
_WORD_ENDS = re.compile(r"""[\s()\[\]{}'"=,:]""")
_CLOSING = {"[": "]", "(": ")", "{": "}"}
_PYTHON_ESCAPES = {"n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f", "\n": ""} | {each: each for each in "\\'\"/"}
_HEXADECIMAL = re.compile(r"\\(?:u([0-9a-fA-F]{4})|x([0-9a-fA-F]{2}))")
_DEEPEST = 64  # lists and objects in each other


def _python_call(source: Source, form: CallForm, schemas: Schemas) -> Parser[bool]:
    """LFM2's form: a list of calls with keywords as in Python, or in JSON, if the system message asks for that."""
    is_call = False
    while (head := (yield from _head(source, _PYTHON_HEAD, form, schemas))) is not None:
        if head[1] is None:
            return (yield from _json_call(source, form, schemas)) or is_call
        source.take(head.end())
        is_call = True
        yield "call", head[1]
        if not (yield from _keywords(source, Schema(schemas.get(head[1]) or {}))):
            return True
        yield "end", ""
        if (yield from _next(source)) != ",":
            break
        source.take(1)
    if is_call:
        yield from _ended(source, form)
    return is_call


def _next(source: Source) -> Parser[str]:
    """The next character after white space, which is skipped; "" at the end."""
    yield from source.space()
    return source.text[:1]


def _keywords(source: Source, schema: Schema) -> Parser[bool]:
    """Pass on the arguments of a call in Python as a JSON object; returns whether they are complete."""
    separator = "{"
    while (mark := (yield from _next(source))) != ")":
        if mark == ",":
            source.take(1)
            continue
        while not (key := _KEY.match(source.text)):
            if not _KEY_BEGUN.fullmatch(source.text) or not (yield from source.more(drops=True)):
                return False
        source.take(key.end())
        yield "arguments", f"{separator}{_dumped(key[1])}: "
        separator = ", "
        if not (yield from _python_value(source, schema, key[1])):
            return False
    source.take(1)
    yield "arguments", "{}" if separator == "{" else "}"
    return True


def _python_value(source: Source, schema: Schema | None, key: str = "", depth: int = 0) -> Parser[bool]:
    """Pass on a value in Python as JSON; returns whether it is complete."""
    mark = yield from _next(source)
    if mark in _CLOSING and depth < _DEEPEST:
        source.take(1)
        yield "arguments", "{" if mark == "{" else "["
        separator = ""
        while (inner := (yield from _next(source))) != _CLOSING[mark]:
            if inner == ",":
                source.take(1)
                continue
            if separator:
                yield "arguments", separator
            separator = ", "
            if mark == "{" and not (yield from _python_key(source)):
                return False
            if not (yield from _python_value(source, None, depth=depth + 1)):
                return False
        source.take(1)
        yield "arguments", "}" if mark == "{" else "]"
        return True
    if mark in ("'", '"'):
        return (yield from _python_text(source))
    if word := (yield from _word(source)):
        yield "arguments", _value(word, schema, key)
    return bool(word)


def _python_key(source: Source) -> Parser[bool]:
    """Pass on a key of an object and the colon after it."""
    if (yield from _next(source)) in ("'", '"'):
        if not (yield from _python_text(source)):
            return False
    elif word := (yield from _word(source)):
        yield "arguments", _dumped(word)
    else:
        return False
    if (yield from _next(source)) != ":":
        return False
    source.take(1)
    yield "arguments", ": "
    return True


def _word(source: Source) -> Parser[str]:
    """Read a complete number or name; "" if there is none."""
    while not (found := _WORD.match(source.text)):
        if _WORD_ENDS.match(source.text) or not (yield from _waits(source, _WORD_ENDS)):
            return ""
    return source.take(found.end())


def _python_text(source: Source) -> Parser[bool]:
    """Pass on a string in Python as JSON; returns whether it is complete.

    Models forget to escape quotes within a string, so a quote ends it only before punctuation or the end of the text.
    """
    while len(source.text) < 3 and (yield from source.more()):
        pass
    quote = next(each for each in ('"""', "'''", '"', "'") if source.text.startswith(each))
    source.take(len(quote))
    yield "arguments", '"'
    while mark := (yield from source.until(("\\", quote), "arguments", lambda part: _dumped(part)[1:-1])):
        if mark == quote:
            space = yield from source.space()
            if source.text[:1] in ("", *",)]}:"):
                yield "arguments", '"'
                return True
            yield "arguments", _dumped(mark + space)[1:-1]
            continue
        while len(source.text) < (5 if source.text[:1] == "u" else 3) and (yield from source.more()):
            pass
        source.text = mark + source.text
        if found := _HEXADECIMAL.match(source.text):
            source.take(found.end())
            yield "arguments", f"\\u{(found[1] or found[2]).rjust(4, '0')}"
        else:
            source.take(1)
            escaped = source.take(1)
            yield "arguments", _dumped(_PYTHON_ESCAPES.get(escaped, mark + escaped))[1:-1]
    return False


HERMES = CallForm(
    ("<tool_call>",),
    ("<tool_call>",),
    _json_call,
    '<tool_call>\n{{"name": {quoted}, "arguments": ',
    "}}\n</tool_call>",
    end="</tool_call>",
    between="\n",
)
HARMONY = CallForm(
    ("<|channel|>", "<|call|>"),
    ("<|channel|>commentary to=functions.", "to=functions."),
    _harmony_call,
    "<|channel|>commentary to=functions.{name} <|constrain|>json<|message|>",
    "<|call|>",
    end="<|call|>",
    between=None,
)
HARMONY_MARKS = ("<|end|>", "<|call|>")  # the others are in the text even if nobody asks for them
_JSON = '{{"name": {quoted}, "arguments": '
FORMS = (
    CallForm(
        ("<seed:tool_call>", "<function="),
        ("<seed:tool_call>", "<function="),
        _xml_call,
        "<seed:tool_call>\n<function={name}>\n",
        "</function>\n</seed:tool_call>",
        end="</seed:tool_call>",
        between="\n",
        style="xml",
        member="<parameter={key}>",
        member_end="</parameter>\n",
    ),
    CallForm(
        ("<function=", "<parameter="),
        ("<tool_call>", "<function="),
        _xml_call,
        "<tool_call>\n<function={name}>\n",
        "</function>\n</tool_call>",
        end="</tool_call>",
        between="\n",
        style="xml",
    ),
    CallForm(
        ('<function name="', '<param name="'),
        ('<function name="',),
        _xml_call,
        '<function name="{name}">',
        "</function>",
        end="</function>",
        between="\n",
        style="xml",
        member='<param name="{key}">',
        member_end="</param>",
    ),
    CallForm(
        ("<function=", "</function>"), ("<function=",), _named_call, "<function={name}>", "</function>", "</function>"
    ),
    *(
        CallForm((begin,), (begin,), _gemma_call, f"{begin}call:{{name}}", end, end=end, style="gemma", quote=quote)
        for begin, end, quote in (
            ("<|tool_call>", "<tool_call|>", '<|"|>'),
            ("<start_function_call>", "<end_function_call>", "<escape>"),
        )
    ),
    CallForm(("[TOOL_CALLS]", "[ARGS]"), ("[TOOL_CALLS]",), _named_call, "[TOOL_CALLS]{name}[ARGS]", ""),
    *(
        CallForm((begin,), (begin,), _json_call, _JSON, "}}", opening=f"{begin}[", between=", ", closing="]")
        for begin in ("[TOOL_CALLS]", "<|tool_call|>")  # Mistral's older form, and that of Granite and Phi
    ),
    *(
        CallForm((begin,), (begin,), _json_call, _JSON, "}}", end, opening=f"{begin}[", between=", ", closing=f"]{end}")
        for begin, end in (("<TOOLCALL>", "</TOOLCALL>"), ("<tool_calls>", "</tool_calls>"))  # Nemotron's, Apriel's
    ),
    CallForm(
        ("<|function_call|>",), ("<|function_call|>",), _json_call, f"<|function_call|>{_JSON}", "}}", between=None
    ),
    CallForm(
        ("<arg_key>", "<arg_value>"),
        ("<tool_call>",),
        _xml_call,
        "<tool_call>{name}\n",
        "</tool_call>",
        end="</tool_call>",
        between="\n",
        style="xml",
        member="<arg_key>{key}</arg_key>\n<arg_value>",
        member_end="</arg_value>\n",
    ),
    HERMES,
    HARMONY,
    CallForm(
        ("List of tools: ",),
        ("<|tool_call_start|>",),
        _python_call,
        "{name}(",
        ")",
        end="<|tool_call_end|>",
        opening="<|tool_call_start|>[",
        between=", ",
        closing="]<|tool_call_end|>",
        style="python",
    ),
    CallForm(
        ('{"name": ', '"parameters": '),
        ("<|python_tag|>",),
        _json_call,
        _JSON.replace("arguments", "parameters"),
        "}}",
        at_start=True,
        between=None,
    ),
)
"""The formats, the most specific first."""


def form_of(template: str) -> CallForm:
    """The format that a chat template writes; Hermes' if it has no tools."""
    return next((form for form in FORMS if all(words in template for words in form.template)), HERMES)
