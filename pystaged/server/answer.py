"""The answer to a generation request, whole or as a stream of events; base of all interfaces' answers."""

from __future__ import annotations

import math
import secrets
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, ClassVar

import anyio
from anyio.to_thread import run_sync

from pystaged.async_stream import AsyncStream
from pystaged.decoding.tree import Stage
from pystaged.result import GenerationResult, Piece
from pystaged.sequence import Sequence as Text
from pystaged.server import answer_types
from pystaged.server.errors import ApiError
from pystaged.server.figures import predicted, timings, usage
from pystaged.server.reply import Sender, encoded
from pystaged.server.request_types import StreamOptions, TextRequest
from pystaged.server.state import State
from pystaged.stages import STAGE_NAMES, StageSpans
from pystaged.stats import GenerationStats


def ended(result: GenerationResult) -> dict[str, str]:
    """OpenAI's finish_reason of a sequence; for a loop also vLLM's stop_reason."""
    if result.finish_reason == "loop":
        return {"finish_reason": "length", "stop_reason": "repetition_detected"}
    return {"finish_reason": result.finish_reason}


class Answer(ABC):
    """The answer to one request.

    Args:
        sequences: the same number for each prompt, prompt by prompt.
        seed: the first sequence's.
        num_prompts: number of prompts.
    """

    described: ClassVar[Any]  # type of the whole answer
    mark = b"data: [DONE]\n\n"  # the end of a stream
    names_events = False
    prefix: str  # of the answer's id
    whole_kind: str
    part_kind: str

    def __init__(
        self, state: State, request: TextRequest, sequences: Sequence[Text], seed: int, num_prompts: int = 1
    ) -> None:
        self.state, self.request, self.sequences = state, request, sequences
        self.key = secrets.token_hex(12)
        self.tokenizer = state.engine.tokenizer
        self._seed, self._num_prompts = seed, num_prompts
        self.created = int(time.time())
        self._begun = time.monotonic()
        self._first: dict[int, float] = {}  # seconds until the first token, by sequence
        self._spans = [StageSpans() for _ in sequences]
        self._sender: Sender

    @abstractmethod
    def choice(self, i: int, result: GenerationResult) -> dict[str, Any]:
        """Sequence i as a whole."""

    def empty_part(self, i: int) -> dict[str, Any] | None:
        """A part of sequence i without text, which carries prefill progress; None if the interface has no such part."""
        del i
        return None

    def first_parts(self, i: int) -> list[dict[str, Any]]:
        """The parts before the first piece of sequence i."""
        del i
        return []

    @abstractmethod
    def parts(self, i: int, piece: Piece) -> list[dict[str, Any]]:
        """The parts for a piece of sequence i."""

    @abstractmethod
    def last_parts(self, i: int, result: GenerationResult) -> list[dict[str, Any]]:
        """The parts after the last piece of sequence i; the last one has the finish_reason."""

    def whole(self, choices: list[dict[str, Any]], figures: dict[str, Any]) -> Any:
        """The whole answer: choices, usage, timings and seed."""
        return self._envelope(self.whole_kind, choices) | figures

    def framed(self, part: dict[str, Any], figures: dict[str, Any]) -> dict[str, Any]:
        """An event: a part of a sequence, with usage and timings so far if requested."""
        return self._envelope(self.part_kind, [part]) | figures

    def error_event(self, error: ApiError) -> bytes:
        """The event for an error in the middle of a stream."""
        return error.json()

    def stats(self) -> list[GenerationStats]:
        """Statistics of the sequences so far."""
        return [sequence.stats for sequence in self.sequences]

    async def send(self, sender: Sender) -> None:
        """Generate the sequences and send them."""
        self._sender = sender
        sender.names_events, sender.error_event = self.names_events, self.error_event
        settings = self.state.settings
        if self.request.stream and self.request.return_progress:
            for i, sequence in enumerate(self.sequences):
                sequence.config = replace(sequence.config, progress=partial(self._reading, i))
        try:
            await self._generate()
        finally:
            for i, stats in enumerate(self.stats()):
                self.state.metrics.text_over(stats, self._first.get(i))
        if settings.written:
            settings.written([sequence.result() for sequence in self.sequences])
        if not self.request.stream:
            # Log-probabilities can make it large, and this thread serves all requests.
            await sender.whole(await run_sync(self._whole))
            return
        if self._options.include_usage:
            await sender.event(self._envelope(self.part_kind, []) | self._figures())
        await sender.end(self.mark)

    async def _generate(self) -> None:
        """Generate the sequences together, as far as the gate admits them; an error in one ends all.

        Raises:
            ApiError: the first waited too long for admission; the others wait without limit.
            Exception: the error that ended a sequence.
        """
        failed: list[Exception] = []
        scheduler, gate = self.state.engine.runtime.scheduler, self.state.gate

        async def one(i: int) -> None:
            try:
                wait = math.inf if i else self.state.settings.queue_timeout
                async with gate.inside(wait), AsyncStream(scheduler, self.sequences[i]) as pieces:
                    async for piece in pieces:
                        await self._piece(i, piece)
                await self._ended(i)
            except Exception as error:
                failed.append(error)
                group.cancel_scope.cancel()

        async with anyio.create_task_group() as group:
            for i in range(len(self.sequences)):
                group.start_soon(one, i)
        if failed:
            raise failed[0]

    def _whole(self) -> bytes:
        choices = [self.choice(i, sequence.result()) for i, sequence in enumerate(self.sequences)]
        return encoded(self.whole(choices, self._figures()))

    async def _reading(self, i: int, read: int, missing: int) -> None:
        """Send prefill progress; the prompt's last token is evaluated in the first decode step."""
        part, total = self.empty_part(i), len(self.sequences[i].prompt_tokens)
        if part is None:
            return
        progress: answer_types.PromptProgress = {
            "total": total,
            "cache": total - 1 - missing,
            "processed": total if read == missing else total - 1 - missing + read,
            "time_ms": round(1e3 * (time.monotonic() - self._begun)),
        }
        await self._sender.event(self.framed(part, self._nothing_yet() | {"prompt_progress": progress}))

    async def _piece(self, i: int, piece: Piece) -> None:
        if i not in self._first:
            self._first[i] = time.monotonic() - self._begun
            await self._begin(i)
        if not self.request.stream:
            return
        for part in self.parts(i, piece):
            await self._sender.event(self.framed(part, self._so_far()))

    async def _ended(self, i: int) -> None:
        if i not in self._first:
            await self._begin(i)
        if not self.request.stream:
            return
        *parts, last = self.last_parts(i, self.sequences[i].result())
        for each in parts:
            await self._sender.event(self.framed(each, self._so_far()))
        figures = self._so_far()
        if not self._options.include_usage:
            figures = figures | {"timings": timings(self.stats())}
        await self._sender.event(self.framed(last, figures))

    async def _begin(self, i: int) -> None:
        for each in self.first_parts(i) if self.request.stream else []:
            await self._sender.event(self.framed(each, self._nothing_yet()))

    def ours(self, result: GenerationResult) -> dict[str, Any]:
        """Members of a choice for a request with "pystaged": true."""
        if not self.request.pystaged:
            return {}
        spans = StageSpans().split(result.text, result.pieces, result.stages)
        stats = result.stats
        found: answer_types.Ours = {
            "pieces": [(text, STAGE_NAMES[stage]) for text, stage in spans],
            "texts": stats.texts_per_pass,
            "rows": stats.rows_per_pass,
            "speedup": stats.speedup_estimate,
        }
        return {"token_ids": list(result.tokens), "pystaged": found}

    def ours_of(self, i: int, piece: Piece) -> dict[str, Any]:
        """The members of `ours` for a piece."""
        if not self.request.pystaged:
            return {}
        words = [self.sequences[i].token_bytes(token) for token in piece.tokens]
        found: answer_types.Ours = {
            "pieces": [(text, STAGE_NAMES[stage]) for text, stage in self._spans[i].split(piece, words, piece.stages)],
            "tree": self._tree(piece),
            "texts": float(self.state.gate.num_inside),
            "speedup": self.sequences[i].stats.speedup_estimate,
        }
        return {"token_ids": list(piece.tokens), "pystaged": found}

    def _tree(self, piece: Piece) -> list[answer_types.Node]:
        tree, path = piece.tree, set(piece.path)
        return [
            {
                "text": self.tokenizer.token_bytes(token, special=True).decode("utf-8", "replace"),
                "parent": parent,
                "stage": STAGE_NAMES[Stage(stage)],
                "accepted": node in path,
            }
            for node, (token, parent, stage) in enumerate(
                zip(tree.tokens.tolist(), tree.parents.tolist(), tree.stages.tolist(), strict=True)
            )
        ]

    @property
    def _options(self) -> StreamOptions:
        return self.request.stream_options or StreamOptions()

    def _envelope(self, kind: str, choices: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        return {
            "id": f"{self.prefix}-{self.key}",
            "object": kind,
            "created": self.created,
            "model": self.state.settings.name,
            "system_fingerprint": self.state.fingerprint,
            "choices": choices,
        }

    def _figures(self) -> dict[str, Any]:
        """Members that the end of an answer has."""
        return {"usage": self.usage(), "timings": timings(self.stats()), "seed": self._seed}

    def usage(self) -> answer_types.Usage:
        """Token counts of the sequences so far."""
        found, prediction = usage(self.stats(), self._num_prompts), self.sequences[0].prediction
        if prediction:
            found["completion_tokens_details"] = predicted(prediction, [sequence.tokens for sequence in self.sequences])
        return found

    def _nothing_yet(self) -> dict[str, Any]:
        return {"usage": None} if self._options.include_usage else {}

    def _so_far(self) -> dict[str, Any]:
        """The requested members of a part, with the counts so far."""
        found = self._nothing_yet()
        if self._options.continuous_usage_stats:
            found["usage"] = self.usage()
        if self.request.timings_per_token:
            found["timings"] = timings(self.stats())
        return found

    def summary(self) -> str:
        """Counts for the server's log."""
        stats = self.stats()
        prompt, new = sum(each.prompt_tokens for each in stats), sum(each.new_tokens for each in stats)
        cached = sum(each.reused_tokens for each in stats)
        return f", {len(stats)} sequences, {prompt} prompt tokens ({cached} cached), {new} generated"
