"""The engine: a loaded model that generates text, as a stream or as a whole."""

from __future__ import annotations

import sys
import threading
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeGuard, cast, overload

import numpy as np
from numpy.typing import NDArray

from pystaged._core import ContextFullError, Model, Tokenizer
from pystaged.backends.devices import failure
from pystaged.chat.messages import Message
from pystaged.decoding.origin import Origin
from pystaged.decoding.policy import TreePolicy
from pystaged.decoding.readers import Stream, results
from pystaged.decoding.scheduler import Scheduler
from pystaged.decoding.stepper import Stepper
from pystaged.decoding.text import USUAL, Text, TokenRoles
from pystaged.loading import names
from pystaged.loading.bundle import Bundle
from pystaged.loading.factory import ContextFactory
from pystaged.options.config import GenerationConfig, Grammar, TextOptions, check_options, convert
from pystaged.options.recommended import ANSWER_TOKENS, SamplingFields, recommended_sampling
from pystaged.options.table import LOADING, LoadFields, described
from pystaged.platform.seen import SeenModel
from pystaged.pool import context_pool
from pystaged.result import GenerationResult, Results, Score
from pystaged.sampling.text import Prompt, encode_continuation
from pystaged.stats import PassStats

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from pystaged.chat.format import ChatFormat
    from pystaged.decoding.async_stream import AsyncStream
    from pystaged.decoding.embedding import Pooling
    from pystaged.sampling.grammars import GrammarConstraint, Grammars

# Not Sequence[str], because a string is one.
Prompts = list[str] | tuple[str, ...] | list[Prompt] | Sequence[Sequence[int]] | Sequence[NDArray[np.integer[Any]]]


class LoadOptions(LoadFields, total=False):
    """Options of `load`; see Engine."""

    policy: TreePolicy | None


class ChatOptions(TextOptions, total=False):
    """Options of `chat`: those of a generation, and of the chat template.

    tools: schemas of functions that the model may call; a system message describes them if the template does not.
    template: one of chat_format.names, if the model has several.
    template_options: further variables of the template, such as {"enable_thinking": False}. If the template ignores
        these, there is a warning, or a line for `report`.
    """

    tools: Sequence[Mapping[str, Any]] | None
    template: str | None
    template_options: Mapping[str, Any] | None


class Options(LoadOptions, TextOptions, total=False):
    """Options of `generate` and `stream`."""


class Engine:
    """A loaded model with its drafters. Thread-safe: texts that are generated at once, from one thread or several, are
    decoded as a batch, and each is the same as alone.

    Args:
        model: path of a GGUF file, a name in the cache, a hub id such as "openai-community/gpt2" (see hub.pull),
            "smollm2" (the extra of that name) or "bundled". None for SmolLM2 if it is installed, else for
            the bundled pair, with a warning.
        policy: decides how trees grow, in all contexts and threads; by default GainPolicy with measured costs.
        **options: those below.

    Raises:
        FileNotFoundError: no such file or repository; for hub ids also the errors of hub.pull.
        ModelError: a file is damaged or of an unsupported kind.
        DeviceError: no such device, too little memory on it, or an RPC server that cannot be used.
        ValueError: the draft's or table's vocabulary differs from the model's, or an option is out of range.
    """

    def __init__(
        self, model: str | Path | None = None, *, policy: TreePolicy | None = None, **options: Unpack[LoadFields]
    ) -> None:
        check_options(options, LoadOptions)
        if policy is not None and not all(hasattr(policy, name) for name in ("children", "expand", "keep")):
            raise TypeError(f"policy must have children, expand and keep (docs/policies.md), not be {policy!r}")
        self._warn = options.get("report") or _warn
        if model is None:
            model = names.default_model(self._warn)
        self._bundle = bundle = Bundle(convert("model", Path, model), **options)
        if bundle.inexact and not options.get("report"):  # which was told
            _warn(f"{bundle.inexact}: its texts are not exact")
        self._factory = ContextFactory(bundle)
        self._contexts = context_pool(self._factory, bundle, policy, self._warn)
        self._stepper = Stepper(None if policy else self._factory.target_cost(), bundle.options["prefill_budget"])
        self._scheduler = Scheduler(self._stepper, self._contexts, bundle.text_over)
        self._chat_format: ChatFormat | None = None
        self._grammars: Grammars | None = None
        self._format_lock, self._grammar_lock = threading.Lock(), threading.Lock()

    @property
    def n_ctx(self) -> int:
        """Context length in tokens."""
        return self._contexts.n_ctx

    @property
    def model(self) -> Model:
        """The target."""
        return self._bundle.target

    @property
    def file(self) -> SeenModel:
        """The model's files, as they were when it was loaded."""
        return self._bundle.file

    @property
    def device(self) -> str:
        """The device of the target, as in `load`."""
        return self._bundle.device

    @property
    def failure(self) -> str:
        """Why no text can be written any more, as an RPC server is lost; "" where it can."""
        return next(filter(None, map(failure, self._bundle.models)), "")

    def check_exact(self) -> None:
        """Raise ValueError if texts are not exact, because pystaged's kernels do not compute the model."""
        self._bundle.check_exact()

    @property
    def vocabulary(self) -> str:
        """A hash of the vocabulary and the chat template."""
        return self._bundle.vocabulary

    @property
    def draft(self) -> Model | None:
        """The draft model; None with n-grams alone or a draft that reads the target's hidden states."""
        return self._bundle.draft

    @property
    def draft_name(self) -> str | None:
        """Name of the draft, of whichever kind; None with n-grams alone."""
        bundle = self._bundle
        if bundle.features and bundle.draft_path == bundle.path:
            return "its own MTP layer"
        drafting = bundle.draft or bundle.features
        return (drafting.name or "a model") if drafting else None

    @property
    def recommended_sampling(self) -> SamplingFields:
        """Options of `chat` with the sampling that the model's makers recommend, and llama.cpp's defaults for the rest.
        The command line and the server use them by default, `chat` does not."""
        return recommended_sampling(self.tokenizer.metadata)

    @property
    def kv_memory(self) -> int:
        """Most bytes of the KV caches of all texts."""
        return self._contexts.memory

    @property
    def context_bytes(self) -> int:
        """Bytes of kv_memory for a text of n_ctx tokens, in target and draft."""
        return self._contexts.full_bytes

    @property
    def tokenizer(self) -> Tokenizer:
        """The target's vocabulary."""
        return self._bundle.tokenizer

    @property
    def chat_format(self) -> ChatFormat:
        """The model's chat format, from its chat template."""
        self._scheduler.check_caller()
        with self._format_lock:
            if self._chat_format is None:
                from pystaged.chat.format import ChatFormat  # noqa: PLC0415  imports jinja2

                self._chat_format = ChatFormat(self.tokenizer.metadata, self.tokenizer, self._warn)
            return self._chat_format

    @overload
    def chat(self, messages: Sequence[Message] | str, **options: Unpack[ChatOptions]) -> GenerationResult: ...
    @overload
    def chat(
        self, messages: Sequence[Message] | str, *, n: int, **options: Unpack[ChatOptions]
    ) -> list[GenerationResult]: ...
    def chat(
        self, messages: Sequence[Message] | str, *, n: int | None = None, **options: Unpack[ChatOptions]
    ) -> GenerationResult | list[GenerationResult]:
        """Answer the last message of a conversation; arguments and errors as in `stream_chat`.

        Args:
            n: number of answers, with the seeds seed, seed + 1, ...; if given, a list is returned. Prefill runs once.
        """
        return _write(self, [self._answer(messages, options)], n)

    def stream_chat(self, messages: Sequence[Message] | str, **options: Unpack[ChatOptions]) -> Stream:
        """Stream an answer to the last message of a conversation, until the model ends its turn; if that is an answer
        without calls, its continuation.

        Earlier answers are not prefilled again if they are in `messages` as GenerationResult.message.

        Args:
            messages: dictionaries with "role" and "content", as in chat templates, or a question. Control tokens in a
                content are read as plain text.
            **options: see ChatOptions. By default max_tokens is 2048, or the context length if that is less, stop_loops
                is True, and decoding is greedy; `**engine.recommended_sampling` samples as the command line does.

        Raises:
            ChatTemplateError: the model's template cannot be used, or refuses the messages.
            ValueError, TypeError: messages, tools or options are invalid.
            ContextFullError, DeviceLostError: as in `stream`.
        """
        return Stream(self._answer(messages, options))

    def astream_chat(self, messages: Sequence[Message] | str, **options: Unpack[ChatOptions]) -> AsyncStream:
        """`stream_chat` for an event loop, with the same arguments and errors; returns as `astream`."""
        from pystaged.decoding.async_stream import AsyncStream  # noqa: PLC0415

        return AsyncStream(self._answer(messages, options))

    @property
    def passes(self) -> PassStats:
        """Statistics of the target's passes so far, of all texts."""
        return self._stepper.passes

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
        """Continue a prompt, or several as a batch; each text is the same as alone.

        Args:
            prompt: text or token ids; or a list of such.
            n: number of texts per prompt, with the seeds seed, seed + 1, ...; each prompt is prefilled once.
            **options: see TextOptions.

        Returns:
            The result; with several prompts or n a list of them, those of the first prompt first.

        Raises:
            As `stream`. An error in one text cancels the others.
        """
        return _generate(self, prompt, n, GenerationConfig(**options))

    def stream(self, prompt: Prompt, **options: Unpack[TextOptions]) -> Stream:
        """Stream the continuation of a prompt.

        Args:
            prompt: text, or token ids; not empty.
            **options: see TextOptions.

        Returns:
            An iterator of Piece, which has a `result` once it is exhausted or closed.

        Raises:
            ValueError: an empty prompt, or an option out of range.
            GrammarError: a ValueError: a schema, expression or grammar is invalid, or becomes too complex in the text.
            ModuleNotFoundError: a grammar without the extra that it needs.
            ContextFullError: the prompt is longer than the context.
            DeviceLostError: a device failed; the error holds the text so far.
        """
        return Stream(self.start(prompt, GenerationConfig(**options)))

    def astream(self, prompt: Prompt, **options: Unpack[TextOptions]) -> AsyncStream:
        """Stream the continuation of a prompt in an event loop; arguments and errors as in `stream`.

        Returns:
            An asynchronous iterator of Piece, with `result`, `aclose` and `finish`.
        """
        # Imported here because asyncio takes a while to import; callers have imported it already.
        from pystaged.decoding.async_stream import AsyncStream  # noqa: PLC0415

        return AsyncStream(self.start(prompt, GenerationConfig(**options)))

    def _answer(self, messages: Sequence[Message] | str, options: ChatOptions) -> Text:
        """The next answer in a conversation."""
        given: dict[str, Any] = {"max_tokens": min(ANSWER_TOKENS, self.n_ctx), "stop_loops": True, **options}
        of_template = {name: given.pop(name) for name in ("tools", "template", "template_options") if name in given}
        config, chat_format = GenerationConfig(**given), self.chat_format
        messages = [{"role": "user", "content": messages}] if isinstance(messages, str) else messages
        prompt = chat_format.encode(messages, **of_template, continues=True)
        return self.start(prompt, replace(config, stop=(*config.stop, *chat_format.stop)))

    def start(self, prompt: Prompt, config: GenerationConfig, roles: TokenRoles = USUAL) -> Text:
        """Prepare a text that continues a prompt, for a reader; it begins when that is read. With other roles it has no
        receipt.

        Raises:
            ValueError, TypeError, ContextFullError: as in `stream`; ValueError: the engine is closed.
            RuntimeError: the caller cannot wait for a text: a policy of this engine, or a forked process.
        """
        self._scheduler.check_caller()
        self._contexts.check_open()
        tokens = self.encode(prompt)
        continuation = partial(encode_continuation, self.tokenizer, parse_special=False)
        constraint = self._constraint(config.grammar)
        prediction = self._tokens(config.prediction, "prediction", continuation)[: self.n_ctx].tolist()
        origin = self._origin(tokens, config) if roles == USUAL else None
        return Text(prompt, tokens, config, self.tokenizer, constraint, prediction, origin, roles, self._scheduler)

    def _origin(self, prompt: NDArray[np.int32], config: GenerationConfig) -> Origin:
        """The inputs of a text, for its receipt."""
        bundle, model = self._bundle, self._bundle.target
        if config.progress:  # a result must not keep the user's function alive
            config = replace(config, progress=None)
        device, inexact = bundle.device, bundle.inexact
        return Origin(bundle.file, model.name, bundle.vocabulary, device, model.kv, self.n_ctx, prompt, config, inexact)

    def _constraint(self, grammar: Grammar | None) -> GrammarConstraint | None:
        """The constraint for a grammar; None for none. Raises as Grammars does."""
        if grammar is None:
            return None
        with self._grammar_lock:
            if self._grammars is None:
                from pystaged.sampling.grammars import Grammars  # noqa: PLC0415  imports llguidance

                self._grammars = Grammars(self.tokenizer)
        return self._grammars.constraint(grammar)

    def repeated(self, texts: Iterable[Text], n: int) -> Iterator[Text]:
        """Yield each text n times, with the seeds seed, seed + 1, ... modulo 2**64; copies are made lazily.

        Raises:
            ValueError, TypeError: at once: n is no integer above 0.
        """
        if convert("n", int, n) < 1:
            raise ValueError(f"n must be at least 1, not {n}")

        def all_of(text: Text) -> Iterator[Text]:
            yield text
            config, seed = replace(text.config, prediction=tuple(text.prediction)), text.config.sampling.seed
            for i in range(1, n):
                sampling = replace(config.sampling, seed=(seed + i) % 2**64)
                yield self.start(text.prompt, replace(config, sampling=sampling), text.roles)

        return (each for text in texts for each in all_of(text))

    def forget(self) -> None:
        """Free the contexts of ended texts, so that later prompts are read anew."""
        self._contexts.forget()

    def encode(self, prompt: Prompt, *, add_special: bool = True) -> NDArray[np.int32]:
        """The tokens of a prompt, int32[n]; errors as in `stream`.

        Args:
            add_special: add the vocabulary's initial tokens, such as BOS; False for the continuation of another text.
        """
        encode = self.tokenizer.encode if add_special else partial(encode_continuation, self.tokenizer)
        tokens = self._tokens(prompt, "prompt", encode)
        if len(tokens) == 0:
            what = "one character" if isinstance(prompt, str) else "one token, or one prompt of several,"
            raise ValueError(f"the prompt is empty; give at least {what} to continue from")
        if len(tokens) > self.n_ctx:
            more = self.model.max_context
            raise ContextFullError(
                f"the prompt has {len(tokens)} tokens, but the context holds {self.n_ctx}; shorten the prompt"
                + (f", or ask for a longer context with n_ctx (--n-ctx), up to {more}" if more > self.n_ctx else "")
            )
        return tokens

    def _tokens(self, text: Prompt, what: str, encode: Callable[[str], NDArray[np.int32]]) -> NDArray[np.int32]:
        """The tokens of an option, int32[n]. Raises ValueError for invalid Unicode or tokens, TypeError as
        _token_ids."""
        if not isinstance(text, str):
            return _token_ids(text, self.tokenizer.num_tokens)
        try:
            return encode(text)
        except UnicodeError as error:
            raise ValueError(f"the {what} is not valid Unicode text: it cannot be written as UTF-8") from error

    def infill(
        self, prefix: str, suffix: str, *, files: Sequence[tuple[str, str]] = (), **options: Unpack[TextOptions]
    ) -> GenerationResult:
        """Write the text between a prefix and a suffix, with a model that was trained for it.

        Args:
            files: names and texts of related files, the most important one last.
            **options: see TextOptions.

        Raises:
            ValueError: the model's vocabulary has no tokens for this; and as `stream`.
        """
        config = GenerationConfig(**options)
        prompt = self.infill_prompt(prefix, suffix, files=files, max_tokens=config.max_tokens)
        return Stream(self.start(prompt, config)).finish()

    def infill_prompt(
        self, prefix: str, suffix: str, *, begun: str = "", files: Sequence[tuple[str, str]] = (), max_tokens: int = 128
    ) -> list[int]:
        """The tokens of the prompt of `infill`, which leaves room for max_tokens. Of long texts it has what is nearest
        to the gap, at most 1536 tokens before and 512 after it.

        Args:
            begun: beginning of the new text.
            files, errors: as in `infill`.
        """
        from pystaged.chat.infill import infill_prompt  # noqa: PLC0415

        return infill_prompt(
            self.tokenizer, prefix, suffix, begun=begun, files=files, n_ctx=self.n_ctx, max_tokens=max_tokens
        )

    def score(self, text: Prompt) -> Score:
        """The model's log-probability of each token of a text.

        Args:
            text: text, or token ids; not empty.

        Raises:
            ValueError, ContextFullError: as in `stream`.
            DeviceError: a device failed.
        """
        scoring = self.start(text, GenerationConfig(max_tokens=1, speculate=False, prompt_logprobs=0))
        scored = Stream(scoring).finish().prompt_logprobs or []
        tokens = scoring.prompt_tokens.tolist()
        logprobs = np.array([np.nan, *(each.logprob for each in scored)])
        return Score(tokens, [self.tokenizer.token_bytes(token, True) for token in tokens], logprobs)

    def embed(self, texts: Prompts, *, pooling: Pooling | None = None, normalize: bool = True) -> NDArray[np.float32]:
        """Embeddings of texts: their hidden states after the last norm, float32[n, width].

        Args:
            texts: a list of texts or of token ids; none of them empty.
            pooling: "mean" of all tokens, "last" or "cls", the first; None for what the model's file says, else "mean".
            normalize: to length 1.

        Raises:
            ValueError, TypeError, ContextFullError: as in `stream`; ValueError for a model on another device.
        """
        from pystaged.decoding.embedding import embed, pooling_of  # noqa: PLC0415

        if isinstance(texts, (list, tuple)) and not texts:
            raise ValueError("there are no texts; give at least one")
        if not _are_several(texts):
            raise TypeError("texts must be a list of texts or of token ids")
        self._scheduler.check_caller()
        self._contexts.check_open()
        tokens = [self.encode(text) for text in texts]
        return embed(self.model, tokens, pooling or pooling_of(self.tokenizer.metadata), normalize)

    def close(self) -> None:
        """Free all contexts that no text uses; generating again raises ValueError. Texts in progress go on, but on RPC
        servers they end with DeviceLostError."""
        if not self._contexts.closed and not self._scheduler.is_forked:
            self._contexts.close()
            self._bundle.close()
            if self._grammars is not None:
                self._grammars.close()

    def __repr__(self) -> str:
        return f"Engine(model={self.model.name!r}, draft={self.draft_name!r})"

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


Engine.__doc__ = f"{Engine.__doc__}\n    Options:\n{described(LOADING)}\n"


def load(model: str | Path | None = None, **options: Unpack[LoadOptions]) -> Engine:
    """Load a model; arguments and errors as in Engine."""
    return Engine(model, **options)


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
    """Load a model, continue a prompt or several, and close the model; to generate more often, use `load`. Options and
    errors as in Engine and Engine.generate."""
    loading, config = _split(options)
    with load(model, **loading) as engine:
        return _generate(engine, prompt, n, config)


def stream(prompt: Prompt, *, model: str | Path | None = None, **options: Unpack[Options]) -> Stream:
    """Load a model, stream the continuation of a prompt, and close the model at its end. Options and errors as in
    Engine and Engine.stream."""
    loading, config = _split(options)
    engine = load(model, **loading)
    try:
        return Stream(engine.start(prompt, config), engine.close)
    except BaseException:
        engine.close()
        raise


def _generate(
    engine: Engine, prompt: Prompt | Prompts, n: int | None, config: GenerationConfig
) -> GenerationResult | list[GenerationResult]:
    """Generate from one prompt or several."""
    several = _are_several(prompt)
    texts = [engine.start(each, config) for each in cast(Sequence[Prompt], prompt if several else [prompt])]
    return _write(engine, texts, 1 if several and n is None else n)


def _write(engine: Engine, texts: Sequence[Text], n: int | None) -> GenerationResult | list[GenerationResult]:
    """Write n results of each text; with None, the result of the first."""
    return Stream(texts[0]).finish() if n is None else Results(results(engine.repeated(texts, n)))


def _split(options: Options) -> tuple[LoadOptions, GenerationConfig]:
    """Split options into those of `load` and checked ones of a generation."""
    check_options(options, Options)
    given: dict[str, Any] = {**options}
    loading = {key: given.pop(key) for key in LoadOptions.__annotations__ if key in given}
    return cast(LoadOptions, loading), GenerationConfig(**given)


def _warn(line: str) -> None:
    """Warn at the line that called the package."""
    level = 1
    while sys._getframe(level).f_globals.get("__name__", "").startswith("pystaged."):
        level += 1
    warnings.warn(line, stacklevel=level + 1)


def _are_several(prompt: Prompt | Prompts) -> TypeGuard[Sequence[Prompt]]:
    """Whether this is a list of prompts, as opposed to a list of token ids."""
    if isinstance(prompt, (str, bytes, bytearray, memoryview)) or not isinstance(prompt, Sequence):
        return False
    return len(prompt) > 0 and isinstance(prompt[0], (str, Sequence, np.ndarray))


def _token_ids(prompt: object, num_tokens: int) -> NDArray[np.int32]:
    """Convert token ids to int32[n].

    Raises:
        TypeError: not a sequence of integers.
        ValueError: an id outside of the vocabulary.
    """
    # Bytes are sequences of integers, too, but no token ids.
    if isinstance(prompt, (bytes, bytearray, memoryview)) or not isinstance(prompt, (Sequence, np.ndarray)):
        raise TypeError(f"the prompt must be a string or token ids, not {type(prompt).__name__}")
    if len(prompt) == 0:
        return np.empty(0, np.int32)
    if isinstance(prompt[0], Mapping):
        raise TypeError("the prompt must be a string or token ids; messages are answered by chat and stream_chat")
    try:
        ids = np.asarray(prompt)
    except ValueError:  # lists of several lengths
        ids = np.empty((0, 0))
    if ids.ndim != 1 or ids.dtype.kind not in "iu":
        raise TypeError("the prompt must be a string or token ids: integers, one after the other")
    outside = ids[(ids < 0) | (ids >= num_tokens)]
    if len(outside):
        raise ValueError(f"token {outside[0]} is outside of the vocabulary of {num_tokens}")
    return ids.astype(np.int32)
