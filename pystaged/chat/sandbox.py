"""Render chat templates without trusting them: they come with models, from anybody.

As in transformers and llama-cpp-python, templates run in jinja2's immutable sandbox. In addition, each character of
the output is marked with its origin, and templates run in a process of their own with limits of time and memory.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Collection, Iterable, Mapping
from datetime import datetime
from typing import Any

from jinja2 import Template, Undefined, nodes
from jinja2.compiler import CodeGenerator, Frame
from jinja2.exceptions import SecurityError, TemplateRuntimeError, TemplateSyntaxError
from jinja2.ext import Extension, loopcontrols
from jinja2.filters import make_attrgetter
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace, pass_environment

from pystaged.chat import ENDLESS, ChatTemplateError
from pystaged.chat.marked import MESSAGE, Marked, join
from pystaged.platform import process

_ROOM = 1 << 28  # bytes of address space for a rendering
_EACH = 64  # further bytes for each character that it may write
_MOST_WORDS = 10_000  # characters of an error message
# Filters that make HTML, choose at random, or write more than they are given.
_MISSING_FILTERS = {"filesizeformat", "pprint", "random", "slice", "urlize", "wordwrap", "xmlattr"}
_UNSAFE_METHODS = {"encode", "expandtabs", "translate"}


def main() -> int:
    """Entry point of the rendering process."""
    process.serve(process.parent(), _Host())
    return 0


class _Host:
    def __init__(self) -> None:
        self._sandbox = Sandbox()
        self._templates: dict[str, Template] = {}

    def variables(self, source: str, seconds: float) -> set[str]:
        """Names of the variables that a template uses."""
        with process.limits(seconds, _ROOM):
            return {each.name for each in self._sandbox.parse(source).find_all(nodes.Name)}

    def render(self, source: str, variables: Mapping[str, Any], most: int, seconds: float) -> str:
        """Render a template to at most `most` characters; every failure becomes a ChatTemplateError."""
        with process.limits(seconds, _ROOM + _EACH * most):
            try:
                if source not in self._templates:
                    self._templates[source] = self._sandbox.from_string(source)
                text = self._templates[source].render(variables)
                words = ENDLESS if len(text) > most else ""
            except _TemplateRefusal as error:
                words = f"refuses these messages{_line(error)}: {error}"
            except TemplateSyntaxError as error:
                words = f"is damaged, line {error.lineno}: {error}"
            except (RecursionError, MemoryError, OverflowError):
                words = ENDLESS
            except Exception as error:  # any other error is the template's
                words = f"fails for these messages{_line(error)}: {str(error) or type(error).__name__}"
        if words:
            raise ChatTemplateError(words[:_MOST_WORDS])
        return text


class _Code(CodeGenerator):
    """Compiles templates whose concatenations keep marks."""

    def visit_Concat(self, node: nodes.Concat, frame: Frame) -> None:
        self.write("environment.concat(environment.text(each) for each in (")
        for each in node.nodes:
            self.visit(each, frame)
            self.write(", ")
        self.write("))")


class _GenerationTags(Extension):
    """{% generation %} marks answers for training and writes nothing."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _Namespace(Namespace):
    """Like transformers': names must not begin with an underscore."""

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
    """The environment in which templates are compiled and run."""

    code_generator_class = _Code
    intercepted_binops = frozenset({"+", "*", "%"})

    def __init__(self) -> None:
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=[_GenerationTags, loopcontrols],
            finalize=self.text,
            cache_size=0,
            optimized=False,
        )
        kept = self.filters.keys() - _MISSING_FILTERS
        self.filters = {name: self._marking(self.filters[name]) for name in kept}
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
        """Join parts, keeping their marks."""
        return join("", parts)

    def text(self, value: object) -> str:
        """The text that is written for a value."""
        if isinstance(value, str):
            return value
        if value is None or isinstance(value, (bool, int, float, range, Undefined)):
            return str(value)
        if isinstance(value, Collection):
            return _all_marked(str(value))
        return f"<{type(value).__name__}>"

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        unsafe = isinstance(obj, (str, bytes)) and attr in _UNSAFE_METHODS
        return not unsafe and super().is_safe_attribute(obj, attr, value)

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        if operator == "+" and isinstance(left, str) and isinstance(right, str):
            return self.concat((left, right))
        if operator == "*":
            for text, times in ((left, right), (right, left)):
                if isinstance(text, Marked):
                    return Marked(str.__mul__(text, times), text.marks * times)
        if operator == "%" and isinstance(left, str):
            return _all_marked(left % right)
        return super().call_binop(context, operator, left, right)

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        wrapped = super().wrap_str_format(value)
        if wrapped is None:
            return None
        return functools.wraps(wrapped)(lambda *args, **names: _all_marked(wrapped(*args, **names)))

    def call(__self, __context: Context, __obj: Any, *args: Any, **names: Any) -> Any:
        self, called = __self, __obj
        owner = getattr(called, "__self__", None)
        if isinstance(owner, str) and called.__name__ == "join" and len(args) == 1:
            return self._join(self, args[0], owner)
        made = super().call(__context, called, *args, **names)
        if isinstance(owner, str) or called is _strftime_now:
            made = self._marked(made, (owner, *args, *names.values()))
        return made

    def _marking(self, honest: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap a filter so that it marks its output."""
        skip = 1 if hasattr(honest, "jinja_pass_arg") else 0

        @functools.wraps(honest)
        def marking(*args: Any, **names: Any) -> Any:
            return self._marked(honest(*args, **names), [*args[skip:], *names.values()])

        return marking

    @pass_environment
    def _join(self, _: Any, value: Any = (), d: str = "", attribute: str | int | None = None) -> str:
        items = map(make_attrgetter(self, attribute), value) if attribute is not None else value
        return join(self.text(d), map(self.text, items))

    def _to_json(
        self,
        value: Any,
        ensure_ascii: bool = False,
        indent: int | str | None = None,
        separators: tuple[str, str] | None = None,
        sort_keys: bool = False,
    ) -> str:
        """JSON without Jinja's escapes for HTML."""
        encoder = json.JSONEncoder(ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
        return _all_marked(self.concat(encoder.iterencode(value)))

    def _marked(self, made: Any, given: Iterable[Any]) -> Any:
        """Mark all strings of a result if any of its inputs is marked."""
        if not isinstance(made, (str, list)) or isinstance(made, Marked):
            return made
        if all(type(each) in (str, int, float, bool, type(None)) for each in given):
            return made
        if isinstance(made, str):
            return _all_marked(made)
        return [self._marked(each, given) if isinstance(each, str) else each for each in made]


def _dict(*args: Any, **names: Any) -> dict[Any, Any]:
    """Stands in for the class `dict`, whose attributes templates must not reach."""
    return dict(*args, **names)


def _all_marked(text: str) -> Marked:
    return Marked(text, MESSAGE * len(text))


def _raise(message: object = "") -> None:
    raise _TemplateRefusal(str(message))


class _TemplateRefusal(TemplateRuntimeError):
    """A template's own objection to the messages."""


def _line(error: BaseException) -> str:
    """Where in its template an error arose."""
    found, trace = "", error.__traceback__
    while trace:
        if trace.tb_frame.f_code.co_filename == "<template>":  # jinja2's name of those that come as text
            found = f", line {trace.tb_lineno}"
        trace = trace.tb_next
    return found


def _strftime_now(pattern: str) -> str:
    return datetime.now().strftime(pattern)
