"""A model kept open, and generation with it."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Generator, Iterator, Sequence
from pathlib import Path
from types import TracebackType

import numpy as np
from numpy.typing import NDArray

from pystaged._core import DeviceError, Model, Tokenizer
from pystaged.config import GenerationConfig, SamplingConfig, stop_strings
from pystaged.decoding.drafter import common_prefix
from pystaged.decoding.loop import Decoder
from pystaged.decoding.policy import TreePolicy
from pystaged.decoding.tree import Stage
from pystaged.loading.pair import Pair
from pystaged.result import DeviceLostError, FinishReason, GenerationResult, Piece
from pystaged.stats import GenerationStats
from pystaged.text import TextBuffer


class Engine:
    """A model kept open, with what drafts for it. Generations may run in several threads; each has a context of its own
    and shares the weights.

    Args:
        model: path of a GGUF file, a name in the cache, a hub id such as "openai-community/gpt2" (see hub.pull), or
            "house".
        draft: a smaller model with the same vocabulary, named likewise, None for n-grams alone, or "auto": the house
            draft for the house model, else None.
        device: where the target runs: "cpu" by this package's kernels, byte for byte exact; "metal", "gpu", "ggml-cpu"
            or a name from devices() by ggml's operations; "rpc:HOST:PORT,HOST:PORT" with its layers split over RPC
            servers; "auto" for the fastest of this machine, measured.
        draft_device: the same for the draft.
        n_ctx: positions of a context, 0 for as many as the model was trained for.
        num_threads: 0 for one per physical core.
        policy: decides how trees grow; by default what measured costs make worth while.
        report: called with a line of text when something takes a while, such as measuring a model's costs.

    Raises:
        FileNotFoundError: no such file or repository; for hub ids also what hub.pull raises.
        ModelError: a file is damaged or of an unsupported kind.
        DeviceError: no such device, too little memory on it, or an RPC server that cannot be used.
        ValueError: two vocabularies that differ, or an option out of range.
    """

    def __init__(
        self,
        model: str | Path = "house",
        *,
        draft: str | Path | None = "auto",
        device: str = "cpu",
        draft_device: str = "cpu",
        n_ctx: int = 0,
        num_threads: int = 0,
        policy: TreePolicy | None = None,
        report: Callable[[str], None] | None = None,
    ) -> None:
        self._pair = Pair(
            model, draft, num_threads, report or (lambda _: None), device=device, draft_device=draft_device
        )
        self._n_ctx = n_ctx
        self._policy = policy
        self._closed = False
        self._lock = threading.Lock()
        # Contexts at rest, with what they last held: the next prompt may begin like it.
        self._idle = [self._pair.decoder(n_ctx, policy)]

    @property
    def model(self) -> Model:
        """The target."""
        return self._pair.target

    @property
    def draft(self) -> Model | None:
        """The draft, None where n-grams draft alone."""
        return self._pair.draft

    @property
    def tokenizer(self) -> Tokenizer:
        """The target's vocabulary."""
        return self._pair.tokenizer

    def generate(
        self,
        prompt: str,
        *,
        max_tokens: int = 128,
        temperature: float = 0.0,
        top_k: int = 0,
        top_p: float = 1.0,
        min_p: float = 0.0,
        seed: int = 0,
        stop: str | Sequence[str] = (),
        speculate: bool = True,
    ) -> GenerationResult:
        """Continue a prompt; arguments and errors as in `stream`."""
        return self.stream(
            prompt,
            max_tokens=max_tokens,
            temperature=temperature,
            top_k=top_k,
            top_p=top_p,
            min_p=min_p,
            seed=seed,
            stop=stop,
            speculate=speculate,
        ).finish()

    def stream(
        self,
        prompt: str,
        *,
        max_tokens: int = 128,
        temperature: float = 0.0,
        top_k: int = 0,
        top_p: float = 1.0,
        min_p: float = 0.0,
        seed: int = 0,
        stop: str | Sequence[str] = (),
        speculate: bool = True,
    ) -> Stream:
        """Continue a prompt piece by piece.

        Args:
            prompt: not empty.
            max_tokens: new tokens at most.
            temperature, top_k, top_p, min_p, seed: as in SamplingConfig.
            stop: strings that end the text before they appear in it.
            speculate: False decodes plainly; the text is the same.

        Returns:
            An iterator of Piece whose `result` is there once it is exhausted.

        Raises:
            ValueError: an empty prompt, or an option out of range.
            ContextFullError: the prompt is longer than the context.
            DeviceLostError: a device failed; it has the text so far.
        """
        sampling = SamplingConfig(temperature, top_k, top_p, min_p, seed)
        return Stream(self, prompt, sampling, GenerationConfig(max_tokens, stop_strings(stop), speculate))

    def close(self) -> None:
        """Free the contexts; generating again raises ValueError."""
        with self._lock:
            self._closed = True
            for decoder in self._idle:
                decoder.close()
            self._idle.clear()
            self._pair.close()

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _take(self, prompt: NDArray[np.int32]) -> Decoder:
        """A context at rest, the one most like the prompt; a new one when all are busy."""
        with self._lock:
            if self._closed:
                raise ValueError("the engine is closed")
            if not self._idle:
                return self._pair.decoder(self._n_ctx, self._policy)
            best = max(self._idle, key=lambda decoder: common_prefix(decoder.target.tokens, prompt))
            self._idle.remove(best)
            return best

    def _put_back(self, decoder: Decoder) -> None:
        with self._lock:
            if self._closed:
                decoder.close()
            else:
                self._idle.append(decoder)


class Stream(Iterator[Piece]):
    """The pieces of one generation as they come. Close it, or use it as a context manager, to stop early."""

    def __init__(self, engine: Engine, prompt: str, sampling: SamplingConfig, config: GenerationConfig) -> None:
        if not isinstance(prompt, str):
            raise TypeError(f"the prompt must be a string, not {type(prompt).__name__}")
        try:
            tokens = engine.tokenizer.encode(prompt)
        except UnicodeError as error:
            raise ValueError("the prompt is not valid Unicode text: it cannot be written as UTF-8") from error
        if len(tokens) == 0:
            raise ValueError("the prompt is empty; give at least one character to continue from")
        self._prompt = prompt
        self._result: GenerationResult | None = None
        self._pieces = self._run(engine, tokens, sampling, config)

    def __next__(self) -> Piece:
        return next(self._pieces)

    @property
    def result(self) -> GenerationResult:
        """The whole, once the stream is exhausted. Raises RuntimeError before."""
        if self._result is None:
            raise RuntimeError("the stream has not been read to its end")
        return self._result

    def finish(self) -> GenerationResult:
        """Read the rest and return the whole."""
        with self:
            for _ in self:
                pass
            return self.result

    def close(self) -> None:
        """Stop here."""
        self._pieces.close()

    def __enter__(self) -> Stream:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def _run(
        self, engine: Engine, prompt: NDArray[np.int32], sampling: SamplingConfig, config: GenerationConfig
    ) -> Generator[Piece, None, None]:
        stats = GenerationStats()
        buffer, text, tokens, stages = TextBuffer(config.stop), list[str](), list[int](), list[Stage]()
        finish: FinishReason | None = None
        decoder = engine._take(prompt)
        try:
            with contextlib.closing(
                decoder.generate(
                    prompt,
                    sampling,
                    config.max_tokens,
                    is_end=engine.tokenizer.is_end,
                    speculate=config.speculate,
                    stats=stats,
                )
            ) as steps:
                for step in steps:
                    piece, new = "", 0
                    for token in step.tokens:
                        piece += buffer.push(engine.tokenizer.token_bytes(token))
                        new += 1
                        if buffer.stopped:
                            break
                    finish = "stop" if buffer.stopped else step.finish_reason
                    if finish is not None:
                        piece += buffer.finish()
                        finish = "stop" if buffer.stopped else finish
                    tokens += step.tokens[:new]
                    stages += step.stages[:new]
                    text.append(piece)
                    if new or piece:
                        yield Piece(
                            piece, tuple(step.tokens[:new]), tuple(step.stages[:new]), step.tree, tuple(step.path)
                        )
                    if buffer.stopped:
                        stats.cut(step.stages[new:])
                        break
        except DeviceError as error:
            raise DeviceLostError(str(error), self._prompt, "".join(text), tokens) from error
        finally:
            engine._put_back(decoder)
        assert finish is not None
        self._result = GenerationResult("".join(text), tokens, finish, stats, stages)


def load(
    model: str | Path = "house",
    *,
    draft: str | Path | None = "auto",
    device: str = "cpu",
    draft_device: str = "cpu",
    n_ctx: int = 0,
    num_threads: int = 0,
    policy: TreePolicy | None = None,
    report: Callable[[str], None] | None = None,
) -> Engine:
    """Open a model and keep it open; arguments and errors as in Engine."""
    return Engine(
        model,
        draft=draft,
        device=device,
        draft_device=draft_device,
        n_ctx=n_ctx,
        num_threads=num_threads,
        policy=policy,
        report=report,
    )


def generate(
    prompt: str,
    *,
    model: str | Path = "house",
    draft: str | Path | None = "auto",
    device: str = "cpu",
    draft_device: str = "cpu",
    speculate: bool = True,
    max_tokens: int = 128,
    temperature: float = 0.0,
    top_k: int = 0,
    top_p: float = 1.0,
    min_p: float = 0.0,
    seed: int = 0,
    stop: str | Sequence[str] = (),
) -> GenerationResult:
    """Load a model, continue a prompt, close the model; `load` keeps it open for more. Errors as in Engine.stream."""
    sampling = SamplingConfig(temperature, top_k, top_p, min_p, seed)
    config = GenerationConfig(max_tokens, stop_strings(stop), speculate)
    with load(model, draft=draft, device=device, draft_device=draft_device) as engine:
        return Stream(engine, prompt, sampling, config).finish()


def stream(
    prompt: str,
    *,
    model: str | Path = "house",
    draft: str | Path | None = "auto",
    device: str = "cpu",
    draft_device: str = "cpu",
    speculate: bool = True,
    max_tokens: int = 128,
    temperature: float = 0.0,
    top_k: int = 0,
    top_p: float = 1.0,
    min_p: float = 0.0,
    seed: int = 0,
    stop: str | Sequence[str] = (),
) -> Stream:
    """Load a model and continue a prompt piece by piece. Errors as in Engine.stream."""
    sampling = SamplingConfig(temperature, top_k, top_p, min_p, seed)
    config = GenerationConfig(max_tokens, stop_strings(stop), speculate)
    return Stream(load(model, draft=draft, device=device, draft_device=draft_device), prompt, sampling, config)
