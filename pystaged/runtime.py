"""The shared state of an engine's texts: models, contexts, scheduler; and the making of texts."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from pystaged._core import ContextFullError, Tokenizer, file_identity
from pystaged.backends.devices import devices, open_session, reserve
from pystaged.decoding.context import SPARE_CELLS
from pystaged.decoding.contexts import FREE_SHARE, ContextPool
from pystaged.decoding.origin import ARITHMETIC, Origin
from pystaged.decoding.policy import TreePolicy
from pystaged.decoding.scheduler import Scheduler
from pystaged.decoding.stepper import Stepper
from pystaged.decoding.text import USUAL, Text, TokenRoles
from pystaged.loading.bundle import Bundle
from pystaged.loading.factory import ContextFactory
from pystaged.loading.prompt_cache import KeptPrompts
from pystaged.options.config import GenerationConfig, Grammar, convert
from pystaged.sampling.text import Prompt, encode_continuation

if TYPE_CHECKING:
    from pystaged.sampling.grammars import GrammarConstraint, Grammars


_USUAL_CONTEXT = 8192  # positions of a context, by default
_TEXTS = 4  # full ones that llama.cpp has room for, by default
_MOST_CELLS = 2**31 - 512  # of llama.cpp, which rounds them up
_LONG_CONTEXTS = (32_768, 16_384)  # few, because what a text depends on is told by the length, too


class Runtime:
    """The models of an engine, its contexts and its scheduler.

    bundle: target, drafters, tokenizer. factory: makes contexts. n_ctx: context length in tokens.
    report: called with a line about a context that the memory cannot hold, or a prompt on disk that cannot be used or
    written.

    policy, and errors: as in Engine; the other options are the bundle's.
    """

    def __init__(self, bundle: Bundle, policy: TreePolicy | None, report: Callable[[str], None]) -> None:
        self.bundle, options = bundle, bundle.options
        self.factory = factory = ContextFactory(bundle)
        n_ctx = options["n_ctx"]
        if options["long_context"] and n_ctx == 0:
            n_ctx = _long_context(bundle)
        free = bundle.free_memory()
        self.contexts = ContextPool(
            lambda source, length: factory.context(n_ctx, policy, source, length),
            _reserve(bundle, n_ctx, report) or options["kv_memory"],
            free=free,
        )
        self.n_ctx = self.contexts.n_ctx
        if self.contexts.full_bytes > free and not any(model.devices for model in bundle.models):
            report(
                f"a full context of {self.n_ctx:,} tokens takes {self.contexts.full_bytes / 1e9:.1f} GB, and "
                f"{free / 1e9:.1f} GB are free; a smaller n_ctx (--n-ctx) keeps a long text from filling the memory"
            )
        self._prompts: KeptPrompts | None = None
        if options["prompt_cache"] is not None:
            self._prompts = _kept_prompts(bundle, options["prompt_cache"], self.n_ctx, report)
            self.contexts.prompts = self._prompts
        self.stepper = Stepper(None if policy else factory.target_cost(), options["prefill_budget"])
        self.scheduler = Scheduler(self.stepper, self.contexts, bundle.text_over)
        self._grammars: Grammars | None = None
        self._lock = threading.Lock()

    @property
    def tokenizer(self) -> Tokenizer:
        """The target's vocabulary."""
        return self.bundle.tokenizer

    def start(self, prompt: Prompt, config: GenerationConfig, roles: TokenRoles = USUAL) -> Text:
        """See Engine.start."""
        self.scheduler.check_caller()
        self.contexts.check_open()
        tokens = self.encode(prompt)
        return Text(
            prompt,
            tokens,
            config,
            self.tokenizer,
            self._constraint(config.grammar),
            self.prediction(config.prediction),
            self._origin(tokens, config) if roles == USUAL else None,
            roles,
            self.scheduler,
        )

    def repeated(self, texts: Iterable[Text], n: int) -> Iterator[Text]:
        """See Engine.repeated."""
        if convert("n", int, n) < 1:
            raise ValueError(f"n must be at least 1, not {n}")

        def all_of(text: Text) -> Iterator[Text]:
            yield text
            config, seed = replace(text.config, prediction=tuple(text.prediction)), text.config.sampling.seed
            for i in range(1, n):
                sampling = replace(config.sampling, seed=(seed + i) % 2**64)
                yield self.start(text.prompt, replace(config, sampling=sampling), text.roles)

        return (each for text in texts for each in all_of(text))

    def encode(self, prompt: Prompt, *, add_special: bool = True) -> NDArray[np.int32]:
        """The tokens of a prompt, int32[n]; see Engine.encode."""
        if isinstance(prompt, str):
            try:
                tokens = self.tokenizer.encode(prompt) if add_special else encode_continuation(self.tokenizer, prompt)
            except UnicodeError as error:
                raise ValueError("the prompt is not valid Unicode text: it cannot be written as UTF-8") from error
        else:
            tokens = _token_ids(prompt, self.tokenizer.num_tokens)
        if len(tokens) == 0:
            what = "one character" if isinstance(prompt, str) else "one token, or one prompt of several,"
            raise ValueError(f"the prompt is empty; give at least {what} to continue from")
        if len(tokens) > self.n_ctx:
            more = self.bundle.target.max_context
            raise ContextFullError(
                f"the prompt has {len(tokens)} tokens, but the context holds {self.n_ctx}; shorten the prompt"
                + (f", or ask for a longer context with n_ctx (--n-ctx), up to {more}" if more > self.n_ctx else "")
            )
        return tokens

    def prediction(self, expected: Prompt) -> list[int]:
        """The tokens of the option `prediction`, cut to the context length. Raises ValueError for invalid Unicode or
        tokens, TypeError as _token_ids."""
        if not isinstance(expected, str):
            tokens: list[int] = _token_ids(expected, self.tokenizer.num_tokens).tolist()
            return tokens[: self.n_ctx]
        try:
            tokens = encode_continuation(self.tokenizer, expected, parse_special=False).tolist()
        except UnicodeError as error:
            raise ValueError("the prediction is not valid Unicode text: it cannot be written as UTF-8") from error
        return tokens[: self.n_ctx]

    def close(self) -> None:
        """See Engine.close."""
        if not self.contexts.closed and not self.scheduler.is_forked:
            self.contexts.close()
            if self._prompts:
                self._prompts.close()
            self.bundle.close()
            if self._grammars is not None:
                self._grammars.close()

    def _origin(self, prompt: NDArray[np.int32], config: GenerationConfig) -> Origin:
        """The inputs of a text, for its receipt."""
        bundle, model = self.bundle, self.bundle.target
        if config.progress:  # a result must not keep the user's function alive
            config = replace(config, progress=None)
        device, inexact = bundle.device, bundle.inexact
        return Origin(bundle.file, model.name, bundle.vocabulary, device, model.kv, self.n_ctx, prompt, config, inexact)

    def _constraint(self, grammar: Grammar | None) -> GrammarConstraint | None:
        """The constraint for a grammar; None for none. Raises as Grammars does."""
        if grammar is None:
            return None
        with self._lock:
            if self._grammars is None:
                from pystaged.sampling.grammars import Grammars  # noqa: PLC0415  imports llguidance

                self._grammars = Grammars(self.tokenizer)
        return self._grammars.constraint(grammar)


def _reserve(bundle: Bundle, n_ctx: int, report: Callable[[str], None]) -> int:
    """Let llama.cpp have room for the texts of an engine; returns the bytes that they may take, 0 without llama.cpp."""
    on_devices = [model for model in bundle.models if model.devices]
    if not on_devices:
        return 0
    token_bytes = sum(model.cell_bytes for model in bundle.models)
    context_bytes = (SPARE_CELLS + (n_ctx or min(bundle.target.max_context, _USUAL_CONTEXT))) * token_bytes
    gpus = {device.name: device.free_bytes for device in devices() if device.is_gpu}
    free = sum(gpus.get(name, 0) for name in on_devices[0].devices) or bundle.free_memory()
    memory = bundle.options["kv_memory"] or min(_TEXTS * context_bytes, free // FREE_SHARE)
    memory = max(memory, context_bytes)
    if memory > free and on_devices[0].devices == ["CPU"]:
        report(
            f"llama.cpp takes {memory / 1e9:.1f} GB at once for keys and values, and {free / 1e9:.1f} GB are free; "
            "a smaller n_ctx (--n-ctx) or kv_memory (--kv-memory) takes less"
        )
    for model in on_devices:
        reserve(model, min(memory // token_bytes, _MOST_CELLS) if token_bytes else 0)
    return memory + sum(model.state_bytes for model in bundle.models) * _TEXTS


def _long_context(bundle: Bundle) -> int:
    """Positions of the contexts of a bundle with the option long_context; 0 for the usual ones."""
    if any(model.devices for model in bundle.models):
        return 0
    sessions = [open_session(model, 1) for model in bundle.models]
    token_bytes = sum(session.cell_bytes - session.windowed_cell_bytes for session in sessions)
    memory = bundle.options["kv_memory"] or bundle.free_memory() // FREE_SHARE
    fitting = (length for length in _LONG_CONTEXTS if length * token_bytes <= memory)
    return min(next(fitting, 0), bundle.target.max_context)


def _kept_prompts(bundle: Bundle, folder: str | Path, n_ctx: int, report: Callable[[str], None]) -> KeptPrompts:
    """The texts of a bundle's models that are kept in a folder; arguments as in KeptPrompts.

    Raises:
        OSError, ValueError: as KeptPrompts; ValueError: a model is not on the CPU.
    """
    if any(model.devices for model in bundle.models):
        raise ValueError("prompts are kept on the cpu only; leave out prompt_cache (--prompt-cache) or the device")
    files = [bundle.path, *([bundle.draft_path] if bundle.draft_path else [])]
    metadata = bundle.tokenizer.metadata
    # Files with two sets of rotary factors use one of them up to this length.
    original = metadata.get(f"{metadata.get('general.architecture')}.rope.scaling.original_context_length", n_ctx)
    parts = [*(file_identity(os.fsencode(path)) for path in files), len(bundle.models), bundle.target.kv]
    parts += [ARITHMETIC, n_ctx > int(original), sys.byteorder]
    return KeptPrompts(folder, repr(parts), bundle.options["prompt_cache_size"], report)


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
