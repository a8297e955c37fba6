"""The plugin for `llm`: llm -m pystaged/smollm2 "..."

To start fast, it imports the compiled module only when a model is used.
"""

from __future__ import annotations

import json
import re
import sys
import threading
from collections.abc import AsyncGenerator, Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import llm
from pydantic import Field, ValidationError, create_model, field_validator, model_validator
from pydantic_core import PydanticCustomError

from pystaged.options.aliases import KEYWORDS, meant, plainly
from pystaged.options.table import ALL, SAMPLING

if TYPE_CHECKING:
    from collections.abc import Callable

    from llm.parts import Message, StreamEvent

    from pystaged._core import Tokenizer
    from pystaged.engine import Engine
    from pystaged.result import GenerationResult

_KEY = "pystaged"
_LOADING = ("draft", "device", "n_ctx")

_engines: dict[str, tuple[dict[str, Any], Engine]] = {}  # with their loading options
_loading = threading.Lock()  # one model at a time


@llm.hookimpl
def register_models(register: Callable[..., None]) -> None:
    """Register the bundled model, SmolLM2 if it is installed, and the models that `pystaged models` lists."""
    from pystaged.loading import cache, names  # noqa: PLC0415

    for name in [*(each for each in names.packaged() if each != "bundled-draft"), *cache.files()]:
        register(Pystaged(name), AsyncPystaged(name))


_HERE = [*SAMPLING, "max_tokens", "stop_loops", "stop", "regex", "grammar", "speculate", *_LOADING]
_KINDS: dict[str, Any] = {
    "dry_sequence_breakers": str | list[str],
    "logit_bias": dict[int | str, float],
    "stop": str | list[str],
}
_MORE = {
    "max_tokens": " 2048 unless given.",
    "temperature": " Unless given, this and the filters are as the model's makers recommend.",
    "seed": " Drawn unless given.",
    "logit_bias": ' As JSON: {" the": -2, "5": 1}.',
}


def _offered(name: str) -> Any:
    """An option of pystaged.options.table as a field of llm.Options."""
    kind = _KINDS.get(name, ALL[name].plain)
    return kind | None, Field(None, description=ALL[name].help + _MORE.get(name, ""))


if TYPE_CHECKING:
    _Offered = llm.Options
else:
    _Offered = create_model("_Offered", __base__=llm.Options, **{name: _offered(name) for name in _HERE})


class ModelOptions(_Offered):
    """Options of pystaged.Engine.chat, checked as there, and some of pystaged.load."""

    think: bool | None = Field(None, description="Whether a reasoning model thinks before it answers.")

    @field_validator("logit_bias", mode="before")
    @classmethod
    def parse(cls, value: Any) -> Any:
        """Parse JSON; keys of digits alone are token ids, because JSON keys are always strings."""
        if isinstance(value, str):
            try:
                value = json.loads(value)
            except ValueError:
                raise ValueError(f'must be JSON such as {{" the": -2}}, not {value}') from None
        if not isinstance(value, dict):
            return value
        return {int(key) if re.fullmatch("[0-9]+", str(key)) else key: bias for key, bias in value.items()}

    @model_validator(mode="after")
    def check(self) -> ModelOptions:
        """Check the options as a generation does."""
        options = self.of_text()
        if options:
            try:
                from pystaged.options.config import NO_LIMIT, GenerationConfig  # noqa: PLC0415

                GenerationConfig(**{"max_tokens": NO_LIMIT} | options)
            except (TypeError, ImportError) as error:
                raise ValueError(str(error)) from None
        return self

    @model_validator(mode="wrap")
    @classmethod
    def explain(cls, given: Any, check: Callable[[Any], ModelOptions]) -> ModelOptions:
        """Check the options; `llm` prints the message of the first invalid one."""
        try:
            return check(given)
        except ValidationError as error:
            first = error.errors(include_url=False, include_context=False, include_input=False)[0]
            name = str(first["loc"][0]) if first["loc"] else ""
            words = f"{name} {plainly(first['msg'])}".strip()
            if first["type"] == "extra_forbidden":
                likely = meant(KEYWORDS.get(name, name), cls.model_fields)
                words = f"there is no option {name!r}" + (f"; did you mean {likely}?" if likely else "")
            raise PydanticCustomError("option", "{words}", {"words": words}) from None

    def of_text(self) -> dict[str, Any]:
        """Options of Engine.chat."""
        given = self.model_dump(exclude_none=True, exclude={*_LOADING, "think"})
        return given | ({"seed": None} if given.get("seed") == -1 else {})

    def of_template(self) -> dict[str, Any]:
        """Options of the chat template."""
        return {} if self.think is None else {"enable_thinking": self.think}


class _Common:
    """Base of both kinds of model.

    Args:
        name: the model's name for pystaged.load.
    """

    can_stream = supports_schema = True
    Options = ModelOptions

    def __init__(self, name: str) -> None:
        self.model_id, self._name = f"{_KEY}/{name}", name


class Pystaged(_Common, llm.Model):  # type: ignore[misc]  # Options is a variable, thinks mypy
    """A model of pystaged."""

    def execute(
        self, prompt: llm.Prompt, stream: bool, response: llm.Response, conversation: llm.Conversation | None
    ) -> Iterator[str | StreamEvent]:
        """Stream the answer."""
        del stream, conversation
        with _errors():
            engine = _engine(self._name, prompt.options)
            with engine.stream_chat(**_arguments(engine, prompt)) as pieces:
                for piece in pieces:
                    yield piece.text
            yield _end(engine, pieces.result, response)


class AsyncPystaged(_Common, llm.AsyncModel):  # type: ignore[misc]  # as above
    """A model of pystaged for event loops."""

    async def execute(
        self, prompt: llm.Prompt, stream: bool, response: llm.AsyncResponse, conversation: llm.AsyncConversation | None
    ) -> AsyncGenerator[str | StreamEvent, None]:
        """Stream the answer."""
        import asyncio  # noqa: PLC0415

        del stream, conversation
        with _errors():
            engine = await asyncio.to_thread(_engine, self._name, prompt.options)
            async with engine.astream_chat(**_arguments(engine, prompt)) as pieces:
                async for piece in pieces:
                    yield piece.text
            yield _end(engine, pieces.result, response)


def _engine(name: str, options: Any) -> Engine:
    """The engine of a model; for other loading options, a new one. The old one is freed after its last text."""
    import pystaged  # noqa: PLC0415

    wanted = options.model_dump(exclude_none=True, include=set(_LOADING))
    with _loading:
        if name not in _engines or _engines[name][0] != wanted:
            _engines.pop(name, None)  # before the new one is loaded
            _engines[name] = wanted, pystaged.load(name, report=_report, **wanted)
        return _engines[name][1]


def _report(line: str) -> None:
    sys.stderr.write(f"{line}\n")


def _arguments(engine: Engine, prompt: llm.Prompt) -> dict[str, Any]:
    """Arguments of Engine.stream_chat."""
    options: Any = prompt.options
    messages = [_message(message, engine.tokenizer) for message in prompt.messages]
    schema = {"json_schema": prompt.schema} if prompt.schema else {}
    sampling = {**engine.recommended_sampling, "seed": None, **options.of_text()}
    return {"messages": messages, "template_options": options.of_template(), **schema, **sampling}


def _message(message: Message, tokenizer: Tokenizer) -> dict[str, Any]:
    """Convert a message for pystaged; its own answers get their tokens, so that they are not prefilled again.

    Raises:
        ValueError: the message has a part that is neither text nor reasoning.
    """
    from llm.parts import ReasoningPart, TextPart  # noqa: PLC0415

    texts = [part for part in message.parts if isinstance(part, TextPart)]
    for part in message.parts:
        if not isinstance(part, (TextPart, ReasoningPart)):
            raise ValueError(f"a message of the role {message.role!r} holds a {type(part).__name__}, which is no text")
    made: dict[str, Any] = {"role": message.role, "content": "".join(part.text for part in texts)}
    if message.role == "assistant" and len(texts) == 1:
        tokens = _tokens((texts[0].provider_metadata or {}).get(_KEY), tokenizer)
        if tokens is not None:
            made["tokens"] = tokens
    return made


def _tokens(ours: Any, tokenizer: Tokenizer) -> list[int] | None:
    """The tokens stored with an answer; None if they are invalid or of another vocabulary."""
    if not isinstance(ours, dict) or ours.get("vocabulary") != tokenizer.fingerprint:
        return None
    tokens = ours.get("tokens")
    is_sound = isinstance(tokens, list) and all(
        type(each) is int and 0 <= each < tokenizer.num_tokens for each in tokens
    )
    return tokens if is_sound else None


def _end(engine: Engine, result: GenerationResult, response: Any) -> StreamEvent:
    """Set a response's usage; returns a last event, with which `llm` stores the answer's tokens in its database."""
    from llm.parts import StreamEvent  # noqa: PLC0415

    stats = result.stats
    reused = {"reused_tokens": stats.reused_tokens} if stats.reused_tokens else None
    response.set_usage(input=stats.prompt_tokens, output=len(result.tokens), details=reused)
    response.response_json = {"finish_reason": result.finish_reason, "seed": result.seed, "stats": stats.to_dict()}
    ours = {"vocabulary": engine.tokenizer.fingerprint, "tokens": result.tokens}
    return StreamEvent(type="text", chunk="", provider_metadata={_KEY: ours})


@contextmanager
def _errors() -> Iterator[None]:
    """Convert errors to llm.ModelError."""
    try:
        if not find_spec("llm.parts"):
            raise ImportError("pystaged needs llm 0.32 or later; run: pip install -U llm")
        yield
    except (OSError, ValueError, TypeError, ImportError) as error:
        raise llm.ModelError(str(error)) from error
