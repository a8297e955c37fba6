"""Render conversations as prompts by a model's own chat template."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pystaged._core import Tokenizer
from pystaged.chat import ENDLESS, ChatTemplateError, history
from pystaged.chat.calls import form_of
from pystaged.chat.encode import Encoder
from pystaged.chat.marked import ANSWERS, join, mark, marks_of
from pystaged.chat.messages import Message, completed, in_parts, is_answer, marked, marked_messages, with_joined_parts
from pystaged.chat.turn import CHANNELS, Dialect, TurnReader, prefill_of
from pystaged.platform.process import ChildKilledError, ChildSilentError, Workers

_KEY = "tokenizer.chat_template"
_AT_ONCE = 2  # templates rendered at the same time
_SECONDS = 5.0  # of processor time
_SILENT = 120.0  # seconds of wall time
_MOST_SOURCE = 1 << 20  # characters; the longest of known models have some 70,000
_ROOM = 1 << 20  # characters that a template may write in addition to its messages
_ESCAPED = 8  # most characters that one of a message becomes, for example in JSON
_MOST_REPORTED = 16  # names; a server's clients may send any number
_LONGEST_NAME = 64  # characters of a reported name
SWITCHES = ("enable_thinking", "thinking")  # names of the variable by which templates switch reasoning on or off
_RESERVED = ("messages", "tools", "add_generation_prompt", "bos_token", "eos_token")
_CHATML = """{%- for message in messages -%}
{{- '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\n' -}}{%- endif -%}"""
_workers = Workers("pystaged.chat.sandbox", _AT_ONCE)


def begin() -> None:
    """Start a rendering process if there is none; its tenth of a second may overlap with loading a model."""
    with _workers.turn():
        pass


class ChatFormat:
    """Writes conversations for a model by its file's chat template, or as ChatML if it has none.

    Args:
        metadata: scalar metadata of the model's file, as text.
        tokenizer: the model's.
        report: called with a line if there is no template, or calls that it writes cannot be read, and once for each
            option that the template ignores, 16 at most.
    """

    def __init__(self, metadata: Mapping[str, str], tokenizer: Tokenizer, report: Callable[[str], None]) -> None:
        self._tokenizer = tokenizer
        self._sources = {"default": metadata[_KEY]} if metadata.get(_KEY) else {}
        self._sources |= {key[len(_KEY) + 1 :]: metadata[key] for key in metadata if key.startswith(f"{_KEY}.")}
        self.stop: tuple[str, ...] = ()  # strings that end an answer besides the vocabulary's tokens
        if not self._sources:
            self._sources["default"] = _CHATML
            if len(tokenizer.encode("<|im_end|>", add_special=False)) != 1:
                self.stop = ("<|im_end|>",)
            report("the model has no chat template; conversations are written as ChatML, which it may not know")
        begin()
        self._variables: dict[str, set[str]] = {}  # by template
        self._can: dict[tuple[str, str], bool] = {}  # by template and probe; "read": its calls
        self._report = report
        self._reported: set[str] = set()
        self._encoder: Encoder | None = None
        self._of_model = {
            "documents": None,
            "tools": None,
            "add_generation_prompt": True,
            "bos_token": spelled(tokenizer, tokenizer.bos),
            "eos_token": spelled(tokenizer, tokenizer.eos),
        }
        self._telling = threading.Lock()

    @property
    def names(self) -> list[str]:
        """Names of the templates; "default" is the usual one, and "tool_use", if present, is for tools."""
        return list(self._sources)

    def source(self, tools: bool = False) -> str:
        """The template that is used with or without tools; raises ChatTemplateError if there is none."""
        return self._source(self._usual(tools))

    @property
    def knows_tools(self) -> bool:
        """Whether the templates support tools. If not, a system message describes them, and calls are text."""
        return "tool_use" in self._sources or "tools" in self.variables()

    def variables(self, tools: bool = False) -> set[str]:
        """Names of the variables that the template for conversations with or without tools uses; empty if it cannot be
        parsed, which rendering reports."""
        try:
            return self._variables_of(self._usual(tools))
        except Exception:
            return set()

    def render(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        template: str | None = None,
        template_options: Mapping[str, Any] | None = None,
        add_generation_prompt: bool = True,
        continues: bool = False,
    ) -> str:
        """Render messages as the text of a prompt.

        Args:
            messages: the conversation so far: dictionaries with "role" and "content", and calls of tools in OpenAI's
                form.
            tools: schemas of functions that the model may call.
            template: one of `names`; by default "tool_use" if there are tools and such a template.
            template_options: further variables for the template, such as {"enable_thinking": False}.
            add_generation_prompt: end with the header of an answer.
            continues: end with the text of the last message, if that is an answer without calls.

        Raises:
            ChatTemplateError: the template cannot be used, or refuses the messages.
            ValueError, TypeError: invalid messages, tools or options; see marked_messages.
        """
        return str.__str__(self._write(messages, tools, template, template_options, add_generation_prompt, continues))

    def encode(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        template: str | None = None,
        template_options: Mapping[str, Any] | None = None,
        continues: bool = False,
    ) -> NDArray[np.int32]:
        """The prompt for the next answer, int32[n]. Control tokens that messages, tools and options spell are plain
        text. Arguments and errors as in render."""
        text = self._write(messages, tools, template, template_options, True, continues)
        self._encoder = encoder = self._encoder or Encoder(self._tokenizer)
        answers = {
            chr(ANSWERS + i): message["tokens"]
            for i, message in enumerate(messages)
            if self._is_answer(message, i, continues and i == len(messages) - 1)
        }
        return np.array(encoder.encode(text, answers), np.int32)

    def _is_answer(self, message: Message, number: int, continues: bool) -> bool:
        """Whether a message has tokens that decode to exactly its content. One that is continued may have marks of
        reasoning and calls in addition, which are control tokens."""
        tokens, content = message.get("tokens"), message.get("content")
        if not tokens or not isinstance(content, str):
            return False
        try:
            hidden = {token for token in tokens if not self._tokenizer.token_bytes(token)}
            known = Dialect.of(self.source(), self._tokenizer).controls.values() if hidden and continues else ()
            spelled = self._tokenizer.decode(tokens) == content and hidden <= set(known)
        except (TypeError, ValueError, OverflowError) as error:
            raise ValueError(f"messages[{number}]: 'tokens' are not tokens of this model: {error}") from None
        return spelled

    def _write(
        self, messages: Sequence[Message], tools: Any, template: str | None, options: Any, adds: bool, continues: bool
    ) -> str:
        """The marked text of a prompt. options: of the template; adds: the header of an answer."""
        if options is not None and not isinstance(options, Mapping):
            raise TypeError(f"template_options must be a dictionary, not {type(options).__name__}")
        if continues and is_answer(messages):

            def write(told: Sequence[Message], adds: bool, **switches: bool) -> str:
                return self._write(told, tools, template, {**(options or {}), **switches}, adds, False)

            *before, last = marked_messages(messages)
            if before and self._is_answer(messages[-1], len(before), True):  # the model wrote it behind just the header
                return join("", [write(before, True), last["content"]])
            return self._continued([*before, last], write)
        for name in set(options or {}) & set(_RESERVED):
            raise ValueError(f"template_options cannot set {name!r}")
        if tools is not None and (isinstance(tools, (str, Mapping)) or not isinstance(tools, Sequence)):
            raise TypeError(f"tools must be a list of dictionaries, not {type(tools).__name__}")
        if str in map(type, tools or ()):
            raise TypeError("tools must be dictionaries, not strings")
        options = {str(key): marked(each, f"template_options[{key!r}]") for key, each in (options or {}).items()}
        given, described = marked_messages(messages), None if tools is None else marked(tools, "tools")
        name = template or self._usual(tools)

        def can(what: str) -> bool:
            return self._probed(name, what)

        given, described = history.arranged(given, described, self._source(name), self.knows_tools, can)
        given = [
            with_joined_parts(message)
            if isinstance(message.get("content"), list)
            and not (can("parts") and (message["role"] != "system" or can("system parts")))
            else in_parts(message)
            if self._takes_parts_alone(name)
            else message
            for message in given
        ]
        variables = self._of_model | options
        variables |= {"messages": given, "tools": described, "add_generation_prompt": adds}
        try:
            text = self._guarded(name, variables)
        except ChatTemplateError:
            # Calls without content and tools without description are allowed, but some templates need them.
            told = list(map(completed, given))
            full = variables | {"messages": told, "tools": described and history.filled(described)}
            if full == variables:
                raise
            text = self._guarded(name, full)
        ignored = {*options, *(["tools"] if described else [])} - self._variables_of(name)
        with self._telling:
            unsaid = {variable[:_LONGEST_NAME] for variable in ignored} - self._reported
            new = sorted(unsaid)[: _MOST_REPORTED - len(self._reported)]
            self._reported |= set(new)
        for variable in new:
            self._report(f"the model's chat template ignores {variable!r}, so it has no effect")
        if described is not None and (name, "read") not in self._can:
            self._can[name, "read"] = not self._probed(name, "1 calls") or self._reads_calls(name)
            if not self._can[name, "read"]:
                self._report("the model's chat template writes calls of tools in an unknown form; they stay text")
        return text

    def _continued(self, messages: Sequence[Message], write: Callable[..., str]) -> str:
        """A prompt that ends with the last message's text, where the template writes that. Text that begins with
        reasoning, or that the template does not write, stands behind an answer's header.

        Args:
            write: writes messages, with the header or without, and with further options.
        """
        *before, last = messages
        thinking = Dialect.of(self.source(), self._tokenizer).thinking
        text, own = prefill_of(last, thinking), chr(ANSWERS + len(before))
        thinks = thinking is not None and thinking.begins(text)
        if text.strip() and not thinks:
            said = mark(str.__str__(text), own)
            with suppress(ChatTemplateError):
                written = write([*before, {**last, "content": said}], False)
                begun = written[: marks_of(written).rfind(own) + 1]
                header = begun[: len(marks_of(begun).rstrip(own))]
                if begun[len(header) :].strip() == text.strip() and not (thinking and thinking.opens(header)):
                    return join("", [header, said])
            if thinking == CHANNELS:
                raise ValueError(f"messages[{len(before)}]: the model's template cannot begin an answer with this text")
        header = write(before, True, **{name: True for name in SWITCHES if thinks and name in self.variables()})
        if thinking and thinks:
            inside = text.lstrip()[len(thinking.begin) :]
            reasoning, end, rest = inside.partition(thinking.closing if thinking.closing in inside else thinking.end)
            header = header.rstrip() if thinking.opens(header) else join("", [header, thinking.begin])
            return join("", [header, reasoning, str.__str__(end), rest])
        is_inside = thinking and text.strip() and thinking.opens(header) and thinking.end not in text
        return join("", [header, thinking.closing if thinking and is_inside else "", text])

    def _reads_calls(self, name: str) -> bool:
        """Whether a call that a template writes is read back."""
        text = str.__str__(self._guarded(name, self._of_model | {"messages": mark(history.PROBES["1 calls"].messages)}))
        form = form_of(self._source(name))
        if form.at_start and form.head.format(name="f", quoted='"f"') in text:
            return True
        reader = TurnReader(form=form)
        reader.push(text)
        return any(block.name == "f" for block in reader.blocks)

    def _takes_parts_alone(self, name: str) -> bool:
        """Whether a template would leave out contents that are no lists of parts."""
        return not self._probed(name, "text") and self._probed(name, "a part")

    def _probed(self, name: str, what: str) -> bool:
        """Whether a template can do what one of history's probes shows."""
        if (name, what) not in self._can:
            probe = history.PROBES[what]
            messages = mark(probe.messages)
            if what not in ("text", "a part") and self._takes_parts_alone(name):
                messages = list(map(in_parts, messages))
            try:
                text = self._guarded(name, self._of_model | {"messages": messages})
            except ChatTemplateError:
                text = ""
            shows = all(words in text for words in probe.shows)
            self._can[name, what] = shows and not any(words in text for words in probe.hides)
        return self._can[name, what]

    def _variables_of(self, name: str) -> set[str]:
        if name not in self._variables:
            self._variables[name] = self._ask("variables", self._source(name))
        return self._variables[name]

    def _usual(self, tools: object) -> str:
        return "tool_use" if tools and "tool_use" in self._sources else "default"

    def _source(self, name: str) -> str:
        if name not in self._sources:
            raise ChatTemplateError(f"there is no chat template {name!r}; the model has {', '.join(self._sources)}")
        return self._sources[name]

    def _guarded(self, name: str, variables: Mapping[str, Any]) -> str:
        """Render a template; every failure becomes a ChatTemplateError."""
        source, most = self._source(name), _ROOM + _ESCAPED * _characters(variables)
        try:
            text: str = self._ask("render", source, variables, most)
        except ChatTemplateError as error:
            whose = "the model's chat template" + ("" if name == "default" else f" {name!r}")
            raise ChatTemplateError(f"{whose} {error}") from None
        return text

    def _ask(self, what: str, source: str, *given: Any) -> Any:
        """Call a rendering process, which has limits of time and memory. Raises ChatTemplateError."""
        if len(source) > _MOST_SOURCE:
            raise ChatTemplateError(ENDLESS)
        with _workers.turn() as worker:
            try:
                return worker.call(what, source, *given, _SECONDS, timeout=_SILENT)
            except (ChildKilledError, ChildSilentError):
                raise ChatTemplateError(ENDLESS) from None


def spelled(tokenizer: Tokenizer, token: int) -> str:
    """How the vocabulary spells a token, "" for -1."""
    return tokenizer.token_text(token) if token >= 0 else ""


def _characters(value: Any) -> int:
    if isinstance(value, dict):
        return sum(len(str(key)) + _characters(each) for key, each in value.items())
    if isinstance(value, list):
        return sum(map(_characters, value))
    return len(value) if isinstance(value, str) else 1
