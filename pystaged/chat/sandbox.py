"""Chat templates, run without trusting them: they come with models, from anybody.

As in transformers and llama-cpp-python, templates run in jinja2's immutable sandbox. Here besides, each character of
what they write is marked with where it comes from, and their work is counted and bounded.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Callable, Collection, Iterable, Mapping
from datetime import datetime
from typing import Any

from jinja2 import Undefined, nodes
from jinja2.compiler import CodeGenerator, Frame, operators
from jinja2.exceptions import SecurityError, TemplateRuntimeError
from jinja2.ext import Extension, loopcontrols
from jinja2.filters import make_attrgetter
from jinja2.parser import Parser
from jinja2.runtime import Context, Macro
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace, pass_environment

from pystaged.chat.marked import MESSAGE, Marked, join
from pystaged.chat.meter import Meter, TooMuchError

_LARGEST = 100_000  # number that a call may be given, as for ranges
_MOST_BITS = 4096  # of a whole number
_WIDTH = re.compile(r"\d{6}|\*")  # in a format: of how many characters a field is
# They make HTML, choose at random, or write more than they are given.
_MISSING_FILTERS = {"filesizeformat", "pprint", "random", "slice", "urlize", "wordwrap", "xmlattr"}
_SHALLOW_FILTERS = {"attr", "count", "d", "default", "first", "items", "last", "length", "list", "map"}
_UNSAFE_METHODS = {"encode", "expandtabs", "translate"}


class _Code(CodeGenerator):
    """Compiled templates that count their blocks and join strings with their marks."""

    def blockvisit(self, nodes: Iterable[nodes.Node], frame: Frame) -> None:
        self.writeline("environment.meter.charge()")
        super().blockvisit(nodes, frame)

    def visit_Concat(self, node: nodes.Concat, frame: Frame) -> None:
        self.write("environment.concat(environment.text(each) for each in (")
        for each in node.nodes:
            self.visit(each, frame)
            self.write(", ")
        self.write("))")

    def visit_Compare(self, node: nodes.Compare, frame: Frame) -> None:
        self.write("(")
        self._visit_measured(node.expr, frame)
        for operand in node.ops:
            self.visit(operand, frame)
        self.write(")")

    def visit_Operand(self, node: nodes.Operand, frame: Frame) -> None:
        self.write(f" {operators[node.op]} ")
        self._visit_measured(node.expr, frame)

    def visit_Dict(self, node: nodes.Dict, frame: Frame) -> None:
        self.write("{")
        for item in node.items:
            self._visit_measured(item.key, frame)
            self.write(": ")
            self.visit(item.value, frame)
            self.write(", ")
        self.write("}")

    def _visit_measured(self, node: nodes.Expr, frame: Frame) -> None:
        self.write("environment.measured(")
        self.visit(node, frame)
        self.write(")")


class _GenerationTags(Extension):
    """{% generation %} marks answers for training and writes nothing."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _Namespace(Namespace):
    """As transformers': without names that begin with an underscore."""

    def __init__(*args: Any, **names: Any) -> None:
        for name in (*dict(*args[1:]), *names):
            _Namespace._check(name)
        Namespace.__init__(*args, **names)

    def __setitem__(self, name: str, value: Any) -> None:
        _Namespace._check(name)
        super().__setitem__(name, value)

    @staticmethod
    def _check(name: object) -> None:
        if isinstance(name, str) and name.startswith("_"):
            raise SecurityError(f"a namespace cannot have a name such as {name}")


class Sandbox(ImmutableSandboxedEnvironment):
    """What templates are compiled and run in, one rendering at a time.

    meter: of the rendering in hand.
    """

    code_generator_class = _Code
    intercepted_binops = frozenset({"+", "*", "**", "%"})

    def __init__(self) -> None:
        self.meter = Meter(1 << 20)
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=[_GenerationTags, loopcontrols],
            finalize=self.text,
            cache_size=0,
            optimized=False,
        )
        kept = self.filters.keys() - _MISSING_FILTERS
        self.filters = {name: self._bounded(name, self.filters[name]) for name in kept}
        self.filters |= {"join": self._join, "tojson": self._to_json, "string": self.text}
        for name in ("lipsum", "cycler", "joiner"):
            self.globals.pop(name, None)
        self.globals |= {
            "raise_exception": _raise,
            "strftime_now": _strftime_now,
            "dict": _dict,
            "namespace": _Namespace,
        }

    def concat(self, parts: Iterable[str]) -> str:
        """The text of parts, with their marks."""
        return join("", self.meter.gather(parts))

    def text(self, value: object) -> str:
        """What a value is written as."""
        if isinstance(value, str):
            return value
        if value is None or isinstance(value, (bool, int, float, range, Undefined)):
            return str(value)
        if isinstance(value, Collection):
            self.meter.measure(value)
            return _all_marked(str(value))
        return f"<{type(value).__name__}>"

    def measured(self, value: Any) -> Any:
        """The value, if it is of a size that may be compared."""
        if isinstance(value, (list, tuple, Mapping)):
            self.meter.measure(value)
        return value

    def getitem(self, obj: Any, argument: Any) -> Any:
        return super().getitem(obj, self.measured(argument))

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        unsafe = isinstance(obj, (str, bytes)) and attr in _UNSAFE_METHODS
        return not unsafe and super().is_safe_attribute(obj, attr, value)

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        numbers = isinstance(left, int) and isinstance(right, int)
        if operator == "+" and isinstance(left, str) and isinstance(right, str):
            return self.concat((left, right))
        if operator == "*":
            self._check_product(left, right)
            for text, times in ((left, right), (right, left)):
                if isinstance(text, Marked):
                    return Marked(str.__mul__(text, times), text.marks * times)
        elif operator == "**" and numbers and left.bit_length() * max(0, right) > _MOST_BITS:
            raise TooMuchError
        elif operator == "%" and isinstance(left, str):
            self._check_format(left)
            return _all_marked(left % self.measured(right))
        made = super().call_binop(context, operator, left, right)
        self.meter.charge(len(made) if isinstance(made, (list, tuple)) else 0)
        return made

    def _check_product(self, left: Any, right: Any) -> None:
        if isinstance(left, int) and isinstance(right, int):
            if left.bit_length() + right.bit_length() > _MOST_BITS:
                raise TooMuchError
            return
        sizes = [len(each) if isinstance(each, (str, list, tuple)) else each for each in (left, right)]
        if all(isinstance(size, int) for size in sizes):
            self.meter.charge(max(0, sizes[0]) * max(0, sizes[1]))

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        wrapped = super().wrap_str_format(value)
        if wrapped is None:
            return None

        @functools.wraps(wrapped)
        def checked(*args: Any, **names: Any) -> str:
            self._check_format(value.__self__)
            self._check_arguments((*args, *names.values()))
            self.meter.measure([*args, *names.values()])
            return _all_marked(wrapped(*args, **names))

        return checked

    def call(__self, __context: Context, __obj: Any, *args: Any, **names: Any) -> Any:
        self, called = __self, __obj
        self.meter.charge()
        if isinstance(called, Macro):
            return super().call(__context, called, *args, **names)
        self._check_arguments((*args, *names.values()))
        owner = getattr(called, "__self__", None)
        if isinstance(owner, str):
            name = called.__name__
            if name == "join" and len(args) == 1:
                return self._join(self, args[0], owner)
            if name == "replace":
                self._check_replacement(owner, *args)
        made = super().call(__context, called, *args, **names)
        if isinstance(owner, str) or called is _strftime_now:
            made = self._marked(made, (owner, *args, *names.values()))
        return made

    def _bounded(self, name: str, honest: Callable[..., Any]) -> Callable[..., Any]:
        """A filter that is counted, and that marks what it writes."""
        skip = 1 if hasattr(honest, "jinja_pass_arg") else 0

        @functools.wraps(honest)
        def bounded(*args: Any, **names: Any) -> Any:
            self.meter.charge()
            given = [*args[skip:], *names.values()]
            self._check_arguments(given[1:])
            if given and name not in _SHALLOW_FILTERS:
                self.measured(given[0])
            if name == "replace":
                self._check_replacement(self.text(given[0]), *given[1:])
            elif name == "indent":
                text = self.text(given[0])
                widths = [each if isinstance(each, int) else len(each) for each in given[1:2] if each is not None]
                self.meter.charge((text.count("\n") + 1) * max([4, *widths]) + len(text))
            elif name == "format":
                self._check_format(self.text(given[0]))
                self.meter.measure(given[1:])
            elif name == "sum" and any(isinstance(each, (list, tuple)) for each in given[1:]):
                raise TooMuchError
            made = honest(*args, **names)
            if isinstance(made, (str, list)):
                self.meter.charge(len(made))
            return self._marked(made, given)

        return bounded

    @pass_environment
    def _join(self, _: Any, value: Any = (), d: str = "", attribute: str | int | None = None) -> str:
        items = map(make_attrgetter(self, attribute), value) if attribute is not None else value
        return join(self.text(d), self.meter.gather(map(self.text, items), len(self.text(d))))

    def _to_json(
        self,
        value: Any,
        ensure_ascii: bool = False,
        indent: int | str | None = None,
        separators: tuple[str, str] | None = None,
        sort_keys: bool = False,
    ) -> str:
        """JSON, without jinja's escapes for HTML."""
        self._check_arguments([indent])
        encoder = json.JSONEncoder(ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
        return _all_marked(self.concat(encoder.iterencode(value)))

    def _marked(self, made: Any, given: Iterable[Any]) -> Any:
        """What was made of strings and other things: all marked if any of those is."""
        if not isinstance(made, (str, list)) or isinstance(made, Marked):
            return made
        if all(type(each) in (str, int, float, bool, type(None)) for each in given):
            return made
        if isinstance(made, str):
            return _all_marked(made)
        return [self._marked(each, given) if isinstance(each, str) else each for each in made]

    def _check_arguments(self, given: Iterable[Any]) -> None:
        for each in given:
            if isinstance(each, int) and abs(each) > _LARGEST:
                raise TooMuchError
            if isinstance(each, tuple):  # the key of a dictionary, perhaps
                self.meter.measure(each)

    def _check_format(self, pattern: str) -> None:
        if _WIDTH.search(pattern):
            raise TooMuchError

    def _check_replacement(self, text: str, old: Any = "", new: Any = "", *_: Any) -> None:
        old, new = self.text(old), self.text(new)
        times = text.count(old) if old else len(text) + 1
        self.meter.charge(len(text) + times * len(new))


def _dict(*args: Any, **names: Any) -> dict[Any, Any]:
    """Not the class itself, which has more to it."""
    return dict(*args, **names)


def _all_marked(text: str) -> Marked:
    return Marked(text, MESSAGE * len(text))


def _raise(message: object = "") -> None:
    raise TemplateRefusal(str(message))


class TemplateRefusal(TemplateRuntimeError):
    """What a template says is wrong with the messages."""


def _strftime_now(pattern: str) -> str:
    if _WIDTH.search(pattern):
        raise TooMuchError
    return datetime.now().strftime(pattern)
