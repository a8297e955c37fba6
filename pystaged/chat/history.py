"""Conversations in OpenAI's form as a model's chat template can write them: results with their calls, system messages
where the template takes them, calls and tools as text if it knows none."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from itertools import islice
from typing import Any, NamedTuple

from pystaged.chat.calls import HERMES, CallForm, form_of
from pystaged.chat.marked import join, mark

# The words of Qwen's templates, for templates that do not support tools.
_SYSTEM = """# Tools

You may call one or more functions to assist with the user query.

You are provided with function signatures within <tools></tools> XML tags:
<tools>
{tools}
</tools>

For each function call, return a json object with function name and arguments within <tool_call></tool_call> XML tags:
<tool_call>
{{"name": <function-name>, "arguments": <args-json-object>}}
</tool_call>"""
_SYSTEMS = ("system", "developer")
_JSON_PART = re.compile(r'"(?:[^"\\]|\\(?:u[0-9a-fA-F]{4}|[^u]))*("?)|[{}\[\],]')
_MOST_CUTS = 8  # places at which text is tried as JSON

_Messages = list[dict[str, Any]]


class Probe(NamedTuple):
    """A conversation that shows what a template can do: its prompt contains some texts, and others not."""

    messages: Sequence[Mapping[str, Any]]
    shows: tuple[str, ...]
    hides: tuple[str, ...] = ()


def _says(role: str, content: Any, **more: Any) -> dict[str, Any]:
    return {"role": role, "content": content, **more}


def _calls(count: int, as_text: bool) -> Probe:
    """A message with calls."""
    names = ("one part", "two part")[:count]
    functions = [{"name": "f", "arguments": {"part": name}} for name in names]
    if as_text:
        functions = [function | {"arguments": json.dumps(function["arguments"])} for function in functions]
    calls = [{"id": f"abcdefgh{i}", "type": "function", "function": each} for i, each in enumerate(functions)]
    results = [_says("tool", "y", tool_call_id=call["id"], name="f") for call in calls]
    shows = tuple(f'"part": "{name}"' if as_text else name for name in names)
    return Probe([_says("user", "x"), _says("assistant", "", tool_calls=calls), *results], shows, ("'part': '",))


_ONE, _TWO = _says("system", "one part"), _says("user", "two part")
_BOTH = ("one part", "two part")
PROBES = {
    "text": Probe([_says("user", "one part")], _BOTH[:1]),
    "a part": Probe([_says("user", [{"type": "text", "text": "one part"}])], _BOTH[:1], ("'type'", '"type"')),
    "parts": Probe([_says("user", [{"type": "text", "text": text} for text in _BOTH])], _BOTH, ("'type'", '"type"')),
    "system parts": Probe(
        [_says("system", [{"type": "text", "text": text} for text in _BOTH]), _TWO | {"content": "x"}], _BOTH
    ),
    "system": Probe([_ONE, _TWO], _BOTH[:1]),
    "system alone": Probe([_ONE], _BOTH[:1]),
    "developer": Probe([_ONE | {"role": "developer"}, _TWO], _BOTH),
    "later systems": Probe([_TWO, _says("assistant", "y"), _ONE, _says("user", "z")], _BOTH),
    "users in a row": Probe([_ONE | {"role": "user"}, _TWO], _BOTH[1:]),
    "users after results": Probe([*_calls(1, False).messages, _TWO], _BOTH[1:]),
    **{f"{n} calls{' as text' * text}": _calls(n, bool(text)) for n in (1, 2) for text in (0, 1)},
}


def arranged(
    messages: _Messages, tools: list[Any] | None, source: str, knows_tools: bool, can: Callable[[str], bool]
) -> tuple[_Messages, list[Any] | None]:
    """Arrange a conversation, which has marks, for the template `source`; returns its messages and tools. can: whether
    the template can do what one of PROBES shows."""
    form = form_of(source) if knows_tools else HERMES
    found = _with_systems(messages, "developer" in source and can("developer"), can)
    calls = [message["tool_calls"] for message in found if "tool_calls" in message]
    if calls and knows_tools and "tool_calls" in source:
        as_text = not can("1 calls") and can("1 calls as text")
        found = _with_results(found, form, max(map(len, calls)) > 1 and not can(f"2 calls{' as text' * as_text}"))
        found = list(map(_with_text_arguments, found)) if as_text else found
    elif calls:
        found = [_with_text(message, form) for message in _with_results(found, form, False)]
    if not knows_tools:
        found, tools = _with_tools([_as_user(message) for message in found], tools), None
    if found[0]["role"] == "system" and not can("system" if found[1:] else "system alone"):
        found[0] = found[0] | {"role": "user"}
    return _in_turns(found, can), tools


def filled(tools: list[Any]) -> list[Any]:
    """Tools with empty descriptions and parameters where they have none, for templates that need them."""
    empty = {"description": "", "parameters": {"type": "object", "properties": {}}}
    found = []
    for tool in tools:
        function = tool.get("function", tool) if isinstance(tool, dict) else None
        if isinstance(function, dict):
            function = empty | {name: each for name, each in function.items() if each}
            properties = function["parameters"].get("properties")
            if isinstance(properties, dict):
                named = {key: {"description": ""} | each for key, each in properties.items() if isinstance(each, dict)}
                function["parameters"] = function["parameters"] | {"properties": properties | named}
            found.append(tool | {"function": function} if "function" in tool else function)
        else:
            found.append(tool)
    return found


def begun_json(text: str) -> Any:
    """The value of JSON that may have been cut, as far as it was written. Raises ValueError where that is nothing."""
    with suppress(ValueError):
        return json.loads(text, strict=False)
    closing, ends = "", [(0, "")]  # places where it may have ended, and what is then missing
    for found in _JSON_PART.finditer(text):
        mark = found[0]
        closing = {"{": "}", "[": "]"}.get(mark, "") + closing[mark in ("}", "]") :]
        is_open = mark[0] == '"' and not found[1]
        ends.append((found.end() - (mark == ","), '"' * is_open + closing))
    for at, missing in ((len(text), closing), *reversed(ends[-_MOST_CUTS:])):
        with suppress(ValueError):
            return json.loads(text[:at] + missing, strict=False)
    raise ValueError("it is no JSON")


def _with_systems(messages: _Messages, knows_developer: bool, can: Callable[[str], bool]) -> _Messages:
    """One system message at the beginning, and others where the template takes them."""
    found = [
        message | {"role": "system"} if message["role"] == "developer" and (i or not knows_developer) else message
        for i, message in enumerate(messages)
    ]
    leading = next((i for i, message in enumerate(found) if message["role"] not in _SYSTEMS), len(found))
    first, rest = found[:leading], found[leading:]
    if any(message["role"] == "system" for message in rest) and not can("later systems"):
        first += [message for message in rest if message["role"] == "system"]
        rest = [message for message in rest if message["role"] != "system"]
    if len(first) > 1:
        words = [text for message in first if (text := _text(message))]
        first = [first[0] | {"content": join(mark("\n\n"), words)}]
    return [*first, *rest]


def _with_results(messages: _Messages, form: CallForm, singly: bool) -> _Messages:
    """The results of calls directly behind them, in their order; each call in a message of its own, if wanted.

    A result belongs to the latest call with its id that has none yet; else, among those of the last message with calls,
    to one of its name, or to the first.
    """
    groups: list[tuple[_Messages, list[Any], _Messages]] = [([], [], [])]  # calls, their results, the messages after
    for message in messages:
        if message.get("tool_calls"):
            groups.append((message["tool_calls"], [None] * len(message["tool_calls"]), [message]))
        else:
            groups[-1][2].append(message)
    for i, (_, _, after) in enumerate(groups):
        for fits, among in (
            (lambda call, key, _: key and call.get("id") == key, groups[i::-1]),
            (lambda call, _, name: name and call["function"].get("name") == name, groups[i : i + 1]),
            (lambda *_: True, groups[i : i + 1]),
        ):
            for result in [message for message in after if message["role"] == "tool"]:
                named = result.get("tool_call_id"), result.get("name")
                places = ((told, k, call) for calls, told, _ in among for k, call in enumerate(calls))
                waiting = ((told, k) for told, k, call in places if told[k] is None and fits(call, *named))
                for told, k in islice(waiting, 1):
                    told[k] = result
                    after[:] = [message for message in after if message is not result]
    arranged: _Messages = []
    for calls, results, after in groups:
        for k in range(len(calls) if singly else min(len(calls), 1)):
            part = slice(k, k + 1) if singly else slice(None)
            told = [_with_id(call, f"{len(arranged)} {j}", form) for j, call in enumerate(calls[part])]
            arranged.append((after[0] if k == 0 else {"role": after[0]["role"]}) | {"tool_calls": told})
            arranged += [
                {
                    "name": call["function"].get("name", ""),
                    **result,
                    **({"tool_call_id": call["id"]} if "id" in call else {}),
                }
                for call, result in zip(told, results[part], strict=True)
                if result is not None
            ]
        arranged += after[bool(calls) :]
    return arranged


def _with_id(call: dict[str, Any], number: str, form: CallForm) -> dict[str, Any]:
    """A call with an id of nine letters and digits if the form is Mistral's, whose templates want that."""
    key = str.__str__(call.get("id") or number)
    if form.begins != ("[TOOL_CALLS]",) or re.fullmatch("[a-zA-Z0-9]{9}", key):
        return call
    return call | {"id": mark(hashlib.sha256(key.encode()).hexdigest()[:9])}


def _with_text_arguments(message: dict[str, Any]) -> dict[str, Any]:
    """A message whose calls have their arguments as JSON text."""

    def of(call: dict[str, Any]) -> dict[str, Any]:
        text = mark(json.dumps(call["function"]["arguments"], ensure_ascii=False))
        return call | {"function": call["function"] | {"arguments": text}}

    return message | {"tool_calls": list(map(of, message["tool_calls"]))} if "tool_calls" in message else message


def _with_text(message: dict[str, Any], form: CallForm) -> dict[str, Any]:
    """A message whose content contains its calls; the marks around them become control tokens, as if the template had
    written them."""
    if "tool_calls" not in message:
        return message
    content = join("\n", filter(None, (_text(message), _spelled(message["tool_calls"], form))))
    return {key: value for key, value in message.items() if key != "tool_calls"} | {"content": content}


def _spelled(calls: Sequence[Mapping[str, Any]], form: CallForm) -> str:
    """Calls in a form that writes JSON, or keywords as in Python; in the Hermes form for others."""
    form = form if form.style in ("json", "python") else HERMES
    words = []
    for function in (call["function"] for call in calls):
        name, arguments = function.get("name", ""), function["arguments"]
        head = form.head.format(name=name, quoted=json.dumps(name, ensure_ascii=False))
        if form.style == "python":
            written = ", ".join(f"{key}={value!r}" for key, value in arguments.items())
        else:
            written = json.dumps(arguments, ensure_ascii=False)
        words.append(f"{head}{written}{form.tail.format()}")
    return join("", [form.opening, mark((form.between or "").join(words)), form.closing])


def _as_user(message: dict[str, Any]) -> dict[str, Any]:
    """A result of a tool as the user's message."""
    if message["role"] != "tool":
        return message
    content = join("", [mark("<tool_response>\n"), _text(message), mark("\n</tool_response>")])
    return {"role": "user", "content": content}


def _with_tools(messages: _Messages, tools: list[Any] | None) -> _Messages:
    """Messages whose system message describes tools."""
    if not tools:
        return messages
    described = mark(_SYSTEM.format(tools="\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools)))
    if messages[0]["role"] not in _SYSTEMS:
        return [{"role": "system", "content": described}, *messages]
    return [messages[0] | {"content": join("", [_text(messages[0]), mark("\n\n"), described])}, *messages[1:]]


def _in_turns(messages: _Messages, can: Callable[[str], bool]) -> _Messages:
    """Messages with those of the user in a row joined, and answers in a row, and an empty answer between a result and
    the user, where the template wants that."""
    found: _Messages = []
    for message in messages:
        before, is_user = found[-1] if found else {"role": ""}, message["role"] == "user"
        is_more = before["role"] == message["role"] in ("user", "assistant") and "tool_calls" not in before | message
        if is_more and not can("users in a row"):
            found[-1] = before | {"content": join(mark("\n\n"), [_text(before), _text(message)])}
            continue
        if is_user and (before["role"] == "tool" or "tool_calls" in before) and not can("users after results"):
            found.append({"role": "assistant", "content": mark(" ")})
        found.append(message)
    return found


def _text(message: Mapping[str, Any]) -> str:
    """The text of a message's content."""
    content = message.get("content")
    if isinstance(content, list):
        return join(mark("\n"), [part["text"] for part in content])
    return mark("") if content is None else str(content)
