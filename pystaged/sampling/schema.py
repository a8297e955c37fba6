"""What a JSON schema allows, with references, unions, lists of types, const and enum resolved.

What cannot be decided counts as allowed: patterns, references to other files, keywords that are not known.
"""

from __future__ import annotations

import json
import math
import operator
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any
from urllib.parse import unquote

_NAMES = ("object", "array", "string", "boolean", "integer", "number", "null")
_TYPES = dict(zip((dict, list, str, bool, int, float, type(None)), _NAMES, strict=True))
TYPES = frozenset(_NAMES)
_NUMBERS = {"minimum": operator.ge, "exclusiveMinimum": operator.gt, "exclusiveMaximum": operator.lt}
# The limits of numbers, and those of the lengths of others.
_BOUNDS: dict[type, dict[str, Any]] = {
    **dict.fromkeys((int, float), _NUMBERS | {"maximum": operator.le}),
    **{
        kind: {f"min{what}": operator.ge, f"max{what}": operator.le}
        for kind, what in ((str, "Length"), (list, "Items"), (dict, "Properties"))
    },
}
# Keywords that limit an object in ways that Members cannot tell.
_BEYOND = ["not", "if", "patternProperties", "propertyNames", "dependentRequired", "dependentSchemas", "dependencies"]
_BEYOND += ["minProperties", "maxProperties", "$dynamicRef"]
_ELSEWHERE = re.compile(r'"\$ref": "#(?!/(\$defs|definitions)/)')  # a reference to other than a definition
_MOST_VISITS = 20_000  # parts that one object looks at, because unions of references can have any number of them
_MOST_FORMS = 64
_DEEPEST = 16  # unions within each other


class UndecidedError(ValueError):
    """A schema that is too large to be resolved, or has a keyword that cannot be."""


@dataclass(frozen=True)
class Members:
    """The members of an object, in one of the forms that a schema allows.

    named: for each name, the schemas that hold for it. required: names. others: the schemas that hold for further
    members, None if there may be none.
    """

    named: dict[str, list[Any]] = field(default_factory=dict)
    required: frozenset[str] = frozenset()
    others: list[Any] | None = None

    def of(self, name: str) -> Any:
        """The schema of a member; that of further ones for an unknown name."""
        parts = self.named.get(name, self.others)
        return False if parts is None else {"allOf": parts} if len(parts) > 1 else parts[0] if parts else {}


class Schema:
    """A JSON schema.

    Args:
        root: the whole of it, which references refer to.
        strict: whether all that it demands must be known.

    Raises:
        UndecidedError: from all methods, after 20,000 parts of the schema; where strict, for what cannot be told.
    """

    def __init__(self, root: Mapping[str, Any], *, strict: bool = False) -> None:
        self.root, self._strict = root, strict
        self._visits = 0
        self._known: dict[int, tuple[Any, frozenset[str]]] = {}  # types of parts, by their id while they are kept here
        self._forms: list[Members] | None = None

    def whole(self, part: Any) -> dict[str, Any]:
        """A part of the schema as a schema of its own, with what it may refer to if it refers to anything."""
        own = dict(part) if isinstance(part, Mapping) else {}
        if '"$ref"' not in json.dumps(own):
            return own
        shared = {key: self.root[key] for key in ("$defs", "definitions") if key in self.root}
        if not _ELSEWHERE.search(json.dumps(own | shared)):
            return own | shared
        root = {key: value for key, value in self.root.items() if key not in ("$id", "$schema")}
        text = json.dumps(own | {"$defs": {"root": root}})  # in whose strings this spelling of $ref cannot be
        found: dict[str, Any] = json.loads(text.replace('"$ref": "#', '"$ref": "#/$defs/root'))
        return found

    def types(self, part: Any) -> frozenset[str]:
        """The types of values that a part of the schema allows."""
        if id(part) not in self._known:
            self._known[id(part)] = part, frozenset()  # a union of itself and others allows what the others allow
            found = TYPES
            for each in self._plain(part):
                found &= _own_types(each)
                for branches in _unions(each):
                    found &= frozenset().union(*map(self.types, branches))
            self._known[id(part)] = part, found
        return self._known[id(part)][1]

    def texts(self, part: Any, depth: int = 0) -> list[str] | None:
        """The strings that a part allows, None if it does not list them."""
        if "string" not in self.types(part):
            return []
        for each in self._plain(part):
            found = [value for value in listed(each) if isinstance(value, str)] or None
            for branches in _unions(each) if depth < _DEEPEST else ():
                of_each = [self.texts(branch, depth + 1) for branch in branches]
                if None not in of_each:
                    found = [text for texts in of_each for text in texts or []]
            if found is not None:
                return [text for text in dict.fromkeys(found) if self.allows(part, text)]
        return None

    def allows(self, part: Any, value: Any) -> bool:
        """Whether a part allows a value."""
        return all(self._fits(each, value) for each in self._plain(part))

    def is_text(self, part: Any, words: str, value: Any) -> bool:
        """Whether words that stand for a value in JSON are meant as a string instead.

        They are if a part allows strings, but not the value. Words in quotes are a string with quotes if that is
        allowed. Where anything is allowed, they are the value.
        """
        types = self.types(part)
        if "string" not in types:
            return False
        if isinstance(value, str) and types != TYPES and self.allows(part, words):
            return True
        return _type(value) not in types or not self.allows(part, value)

    def member(self, name: str) -> Any:
        """The schema of a member of the object that the schema describes."""
        if self._forms is None:
            self._forms = self.objects()
        found = [form.of(name) for form in self._forms]
        return {"anyOf": found} if len(found) > 1 else found[0] if found else {}

    def objects(self) -> list[Members]:
        """The forms of the object that the schema describes. Raises UndecidedError for more than 64."""
        found = (self._members(parts) for parts in self._alternatives(self.root, 0))
        return [form for form in found if form is not None]

    def _plain(self, part: Any) -> list[Mapping[str, Any]]:
        """A part, what it refers to, and those of its allOf: all of them hold."""
        found: list[Mapping[str, Any]] = []
        waiting, seen = [part], set()
        while waiting:
            each = waiting.pop()
            each = {"type": []} if each is False else each
            if isinstance(each, Mapping) and id(each) not in seen:
                seen.add(id(each))
                found.append(each)
                both = each.get("allOf")
                waiting += reversed(both if isinstance(both, list) else [])
                if isinstance(reference := each.get("$ref"), str):
                    waiting.append(target(self.root, reference))
                    if self._strict and waiting[-1] is None:
                        raise UndecidedError(f"its reference {reference!r} cannot be resolved")
        self._visits += len(found)
        if self._visits > _MOST_VISITS:
            raise UndecidedError("it has too many parts")
        return found

    def _fits(self, each: Mapping[str, Any], value: Any) -> bool:
        """Whether a part allows a value, apart from what it refers to."""
        values = listed(each)
        if _type(value) not in _own_types(each) or (values and value not in values):
            return False
        if not all(any(self.allows(branch, value) for branch in branches) for branches in _unions(each)):
            return False
        if "not" in each and self.allows(each["not"], value):
            return False
        branch = "then" if "if" in each and self.allows(each["if"], value) else "else"
        if "if" in each and not self.allows(each.get(branch, True), value):
            return False
        is_number, multiple = type(value) in (int, float), each.get("multipleOf")
        size = value if is_number else len(value) if isinstance(value, (str, list, dict)) else 0
        limits = ((holds, each.get(word)) for word, holds in _BOUNDS.get(type(value), {}).items())
        if not all(holds(size, limit) for holds, limit in limits if isinstance(limit, (int, float))):
            return False
        if is_number and isinstance(multiple, (int, float)) and 0 < multiple < math.inf and math.isfinite(value):
            return not Fraction(str(value)) % Fraction(str(multiple))
        if isinstance(value, list):
            return self._fits_list(each, value)
        if not isinstance(value, dict):
            return True
        if not all(self.allows(each.get("propertyNames", True), name) for name in value):
            return False
        members = self._members([each])
        if members is None or members.required - value.keys():
            return False
        is_closed = members.others is None and value.keys() - members.named.keys()
        return not is_closed and all(self.allows(members.of(name), item) for name, item in value.items())

    def _fits_list(self, each: Mapping[str, Any], value: list[Any]) -> bool:
        """The same for a list."""
        first = each["prefixItems"] if isinstance(each.get("prefixItems"), list) else []
        if each.get("uniqueItems") and len({json.dumps(item, sort_keys=True) for item in value}) < len(value):
            return False
        if "contains" in each and not any(self.allows(each["contains"], item) for item in value):
            return False
        of_items = [*first, *[each.get("items", True)] * max(len(value) - len(first), 0)]
        return all(map(self.allows, of_items, value))

    def _members(self, parts: list[Mapping[str, Any]]) -> Members | None:
        """The members of an object for which all parts hold; None if there is no such object."""
        named: dict[str, list[Any]] = {}
        others: list[Any] | None = []
        known = [each["properties"] if isinstance(each.get("properties"), Mapping) else {} for each in parts]
        needed = [each["required"] for each in parts if isinstance(each.get("required"), list)]
        required = {name for names in needed for name in names if isinstance(name, str)}
        for name in [*dict.fromkeys(name for own in known for name in own), *sorted(required)]:
            both = zip(known, parts, strict=True)
            holding = [own.get(name, each.get("additionalProperties", True)) for own, each in both]
            named[name] = [each for each in holding if each is not True]
            if name in required and not TYPES.intersection(*map(self.types, named[name])):
                return None
        for each in parts:
            more = each.get("additionalProperties", each.get("unevaluatedProperties", True))
            others = None if more is False or others is None else [*others, more] if more is not True else others
        return Members(named, frozenset(required), others)

    def _alternatives(self, part: Any, depth: int) -> list[list[Mapping[str, Any]]]:
        """The alternatives of an object: for each, all parts that hold, apart from unions."""
        if depth > _DEEPEST:
            raise UndecidedError("its unions are nested too deeply")
        found: list[list[Mapping[str, Any]]] = [[]]
        for each in self._plain(part):
            if "object" not in _own_types(each):
                return []
            if self._strict and (word := next((word for word in _BEYOND if word in each), None)):
                raise UndecidedError(f"{word} cannot be held in this model's calls")
            exactly = [_exactly(value) for value in listed(each) if isinstance(value, Mapping)] or [{}]
            found = [[*form, each, more] for form in found for more in exactly]
            for branches in _unions(each):
                ways = [form for branch in branches for form in self._alternatives(branch, depth + 1)]
                if self._strict and branches is each.get("oneOf") and len(ways) > 1:
                    raise UndecidedError("oneOf cannot be held in this model's calls; use anyOf")
                found = [[*form, *more] for form in found for more in ways]
                if len(found) > _MOST_FORMS:
                    raise UndecidedError(f"it has more than {_MOST_FORMS} alternatives")
        return found


def target(schema: Any, reference: str) -> Any:
    """The part of a schema that a pointer names, None if it does not exist."""
    for step in reference[1:].strip("/").split("/") if reference[1:] else []:
        name = unquote(step).replace("~1", "/").replace("~0", "~")
        if isinstance(schema, list):
            schema = schema[int(name)] if name.isdecimal() and int(name) < len(schema) else None
        else:
            schema = schema.get(name) if isinstance(schema, Mapping) else None
    return schema


def listed(schema: Mapping[str, Any]) -> list[Any]:
    """The values that a schema lists, none if any are allowed."""
    values = schema.get("enum", [schema["const"]] if "const" in schema else None)
    return values if isinstance(values, list) else []


def _own_types(each: Mapping[str, Any]) -> frozenset[str]:
    given, values = each.get("type"), listed(each)
    named = given if isinstance(given, list) else [given] if isinstance(given, str) else _NAMES
    found = frozenset(name for name in _NAMES if name in named or (name == "integer" and "number" in named))
    return found & frozenset(map(_type, values)) if values else found


def _type(value: Any) -> str:
    return _TYPES.get(type(value), "")


def _unions(each: Mapping[str, Any]) -> list[list[Any]]:
    return [each[word] for word in ("anyOf", "oneOf") if isinstance(each.get(word), list) and each[word]]


def _exactly(value: Mapping[str, Any]) -> dict[str, Any]:
    """The schema of one object."""
    named = {name: {"const": each} for name, each in value.items()}
    return {"properties": named, "required": list(named), "additionalProperties": False}
