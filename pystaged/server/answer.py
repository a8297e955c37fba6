"""The answer to a generation request, whole or as a stream of events; base of all interfaces' answers."""

from __future__ import annotations

import math
import secrets
import time
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import anyio
from anyio.to_thread import run_sync
from pydantic_core import from_json

from pystaged.chat.history import begun_json
from pystaged.chat.turn import Block, TurnReader
from pystaged.decoding.async_stream import AsyncStream
from pystaged.decoding.text import Text
from pystaged.decoding.tree import Stage
from pystaged.result import GenerationResult, Piece
from pystaged.sampling.text import Prompt
from pystaged.server.errors import ApiError
from pystaged.server.figures import predicted, timings, usage
from pystaged.server.models import State
from pystaged.server.reply import Reply, as_json, encoded
from pystaged.server.request_types import StreamOptions, TextRequest
from pystaged.stats import STAGE_NAMES, GenerationStats, StageSpans


@dataclass(frozen=True)
class Texts:
    """The sequences of a request, the same number for each prompt, prompt by prompt.

    seed: the first sequence's. readers: split the sequences into blocks of reasoning, text and calls.
    """

    sequences: Sequence[Text]
    seed: int
    readers: Sequence[TurnReader] = ()
    prompts: Sequence[Prompt] = ("",)


class Answer(ABC):
    """The answer to one request. An interface says how it spells the beginning, the parts and the end of a sequence, or
    of a sequence's blocks."""

    mark = b""  # the end of a stream
    names_events = False
    prefix = ""  # of the answer's id
    kinds = ("", "")  # the object that is a whole answer, and a part; without them there is no envelope

    def __init__(self, state: State, request: TextRequest, texts: Texts) -> None:
        self.state, self.request, self.sequences = state, request, texts.sequences
        self.readers, self.prompts, self._seed = texts.readers, texts.prompts, texts.seed
        self.key = secrets.token_hex(12)
        self.tokenizer = state.engine.tokenizer
        self.created = int(time.time())
        self.begun = time.monotonic()  # until the server says when the request came
        self._options = (self.kinds[0] and request.stream_options) or StreamOptions()
        self._first: dict[int, float] = {}  # seconds until the first token, by sequence
        self._spans = [StageSpans() for _ in self.sequences]
        self._open: dict[int, Block] = {}  # the last block, by sequence
        self._counted: dict[int, tuple[int, int]] = {}  # characters and tokens of blocks of reasoning, by their id
        self._reply: Reply

    @abstractmethod
    def choice(self, i: int, result: GenerationResult) -> dict[str, Any]:
        """Sequence i as a whole."""

    def empty_part(self, _i: int) -> dict[str, Any] | None:
        """A part of a sequence without text, which carries prefill progress; None if the interface has no such part."""
        return None

    def first_parts(self, _i: int) -> list[dict[str, Any]]:
        """The parts before the first piece of a sequence."""
        return []

    def parts(self, i: int, piece: Piece) -> list[dict[str, Any]]:
        """The parts for a piece of sequence i."""
        return self._walked(i, self.readers[i].push(piece.text)) if piece.text else []

    def last_parts(self, i: int, result: GenerationResult) -> list[dict[str, Any]]:
        """The parts after the last piece of sequence i; the last one has the finish_reason."""
        parts = self._walked(i, self.readers[i].finish(is_cut=result.finish_reason != "stop"))
        if i not in self._open:
            parts += self._walked(i, [(block, "") for block in self.blocks(i)])
        return [*parts, *self.closed(i, self._open[i], result), *self.ending(i, result)]

    def blocks(self, i: int) -> list[Block]:
        """The blocks of sequence i; an empty answer is an empty text."""
        return self.readers[i].blocks or [Block("text", 0)]

    def opened(self, _i: int, _block: Block) -> list[dict[str, Any]]:
        """The parts for the beginning of a block of sequence i."""
        return []

    def more(self, _i: int, _block: Block, _text: str) -> list[dict[str, Any]]:
        """The parts for new text of a block."""
        return []

    def closed(self, _i: int, _block: Block, _result: GenerationResult | None) -> list[dict[str, Any]]:
        """The parts for the end of a block; result: of the answer, if it has ended."""
        return []

    def ending(self, _i: int, _result: GenerationResult) -> list[dict[str, Any]]:
        """The parts after the last block."""
        return []

    def _walked(self, i: int, found: Iterable[tuple[Block, str]]) -> list[dict[str, Any]]:
        """The parts for new text of blocks, of which each ends the one before."""
        parts: list[dict[str, Any]] = []
        for block, text in found:
            last = self._open.get(i)
            if block is not last:
                parts += self.closed(i, last, None) if last else []
                parts += self.opened(i, block)
                self._open[i] = block
            if text:
                parts += self.more(i, block, text)
        return parts

    def whole(self, choices: list[dict[str, Any]], figures: dict[str, Any]) -> Any:
        """The whole answer: choices, usage, timings and seed."""
        return self._envelope(self.kinds[0], choices) | figures if self.kinds[0] else choices[0]

    def framed(self, part: dict[str, Any], figures: dict[str, Any]) -> dict[str, Any]:
        """An event: a part of a sequence, with usage and timings so far if requested."""
        return self._envelope(self.kinds[1], [part]) | figures if self.kinds[1] else part

    def error_event(self, error: ApiError, path: str) -> bytes:
        """The event for an error in the middle of a stream that answers a request for a path."""
        return error.json(path)

    def stats(self) -> list[GenerationStats]:
        """Statistics of the sequences so far."""
        return [sequence.stats for sequence in self.sequences]

    async def send(self, reply: Reply) -> None:
        """Generate the sequences and send them."""
        self._reply = reply
        reply.names_events, reply.error_event = self.names_events, self.error_event
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
            await reply.whole(as_json(await run_sync(self._whole)))
            return
        if self._options.include_usage:
            await reply.event(self._envelope(self.kinds[1], []) | self._figures())
        await reply.part(self.mark, more=False)

    async def _generate(self) -> None:
        """Generate the sequences together, as far as the gate admits them; an error in one ends all.

        Raises:
            ApiError: the first waited too long for admission; the others wait without limit.
            Exception: the error that ended a sequence.
        """
        failed: list[Exception] = []
        gate = self.state.gate

        async def one(i: int) -> None:
            try:
                wait = math.inf if i else self.state.settings.queue_timeout
                async with gate.inside(wait), AsyncStream(self.sequences[i]) as pieces:
                    async for piece in pieces:
                        await self._piece(i, piece)
                await self._piece(i, None)
            except Exception as error:
                failed.append(error)
                group.cancel_scope.cancel()

        async with anyio.create_task_group() as group:
            for i in range(len(self.sequences)):
                group.start_soon(one, i)
        if failed:
            raise failed[0]

    def _whole(self) -> bytes:
        results = [sequence.result() for sequence in self.sequences]
        for reader, result in zip(self.readers, results, strict=False):
            reader.push(result.text)
            reader.finish(is_cut=result.finish_reason != "stop")
        choices = [self.choice(i, result) for i, result in enumerate(results)]
        return encoded(self.whole(choices, self._figures()))

    async def _reading(self, i: int, read: int, missing: int) -> None:
        """Send prefill progress; the prompt's last token is evaluated in the first decode step."""
        part, total = self.empty_part(i), len(self.sequences[i].prompt_tokens)
        if part is None:
            return
        progress = {
            "total": total,
            "cache": total - 1 - missing,
            "processed": total if read == missing else total - 1 - missing + read,
            "time_ms": round(1e3 * (time.monotonic() - self.begun)),
        }
        await self._send([part], self._nothing_yet() | {"prompt_progress": progress})

    async def _piece(self, i: int, piece: Piece | None) -> None:
        """Take a piece of a sequence, or None for its end; in a stream, send it."""
        is_first = i not in self._first
        if is_first and piece is not None:
            self._first[i] = time.monotonic() - self.begun
        if not self.request.stream:
            return
        if is_first:
            await self._send(self.first_parts(i), self._nothing_yet())
        if piece is not None:
            await self._send(self.parts(i, piece))
            return
        *parts, last = self.last_parts(i, self.sequences[i].result())
        await self._send(parts)
        more = {} if self._options.include_usage else {"timings": timings(self.stats())}
        await self._send([last], self._so_far() | more)

    async def _send(self, parts: list[dict[str, Any]], figures: dict[str, Any] | None = None) -> None:
        """Send parts, with the counts so far unless other figures are given."""
        for part in parts:
            await self._reply.event(self.framed(part, self._so_far() if figures is None else figures))

    def ours(self, i: int, found: GenerationResult | Piece) -> dict[str, Any]:
        """Members of a choice for a request with "pystaged": true: its text in parts, each with the stage that proposed
        it, and figures; of a piece also the last tree that was verified, root first."""
        if not self.request.pystaged:
            return {}
        text, stats = self.sequences[i], self.sequences[i].stats
        spans = self._spans[i].split(found.text, map(text.token_bytes, found.tokens), found.stages)
        told: dict[str, Any] = {"pieces": [(part, STAGE_NAMES[stage]) for part, stage in spans]}
        if isinstance(found, Piece):
            told |= {"tree": self._tree(found), "texts": float(self.state.gate.num_inside)}
        else:
            told |= {"texts": stats.texts_per_pass, "rows": stats.rows_per_pass}
        return {"token_ids": list(found.tokens), "pystaged": told | {"speedup": stats.speedup_estimate}}

    def _tree(self, piece: Piece) -> list[dict[str, Any]]:
        tree, path = piece.tree, set(piece.path)
        texts = [self.tokenizer.token_bytes(token, special=True) for token in tree.tokens.tolist()]
        words = [text.decode("utf-8", "replace") for text in texts]
        stages = [STAGE_NAMES[Stage(stage)] for stage in tree.stages.tolist()]
        nodes = enumerate(zip(words, tree.parents.tolist(), stages, strict=True))
        return [{"text": text, "parent": parent, "stage": of, "accepted": i in path} for i, (text, parent, of) in nodes]

    def _envelope(self, kind: str, choices: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        return {
            "id": f"{self.prefix}-{self.key}",
            "object": kind,
            "created": self.created,
            "model": self.state.name,
            "system_fingerprint": self.state.fingerprint,
            "choices": choices,
        }

    def _figures(self) -> dict[str, Any]:
        """Members that the end of an answer has."""
        return {"usage": self.usage(), "timings": timings(self.stats()), "seed": self._seed}

    def usage(self) -> dict[str, Any]:
        """Token counts of the sequences so far."""
        found, prediction = usage(self.stats(), len(self.prompts)), self.sequences[0].prediction
        details = predicted(prediction, [sequence.tokens for sequence in self.sequences]) if prediction else {}
        if tokens := self.reasoning_tokens():
            details["reasoning_tokens"] = tokens
        return found | {"completion_tokens_details": details} if details else found

    def reasoning_tokens(self) -> int:
        """Number of reasoning tokens so far, by encoding the text, but at most those written. While the reasoning
        grows, up to a ninth of its text is not counted yet, so that it is not tokenized again for each token."""
        total = 0
        for reader in self.readers:
            for block in reader.of_kind("reasoning"):
                length, tokens = self._counted.get(id(block), (0, 0))
                if len(block.text) > (length * 9 // 8 if reader.may_grow(block) else length):
                    tokens = len(self.tokenizer.encode(block.text, add_special=False, parse_special=False))
                    self._counted[id(block)] = len(block.text), tokens
                total += tokens
        return min(total, sum(each.new_tokens for each in self.stats()))

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

    def call_id(self, prefix: str, i: int, block: Block) -> str:
        """The id of a call."""
        return f"{prefix}_{self.key[:8]}{i}_{block.index}"

    def has_called(self, i: int) -> bool:
        """Whether an answer has calls, and all of them are whole."""
        calls = self.readers[i].of_kind("call")
        return bool(calls) and all(block.is_whole for block in calls)

    def summary(self) -> str:
        """Counts for the server's log."""
        stats = self.stats()
        prompt, new = sum(each.prompt_tokens for each in stats), sum(each.new_tokens for each in stats)
        cached = sum(each.reused_tokens for each in stats)
        return f", {len(stats)} sequences, {prompt} prompt tokens ({cached} cached), {new} generated"


def ended(result: GenerationResult) -> dict[str, str]:
    """OpenAI's finish_reason of a sequence; for a loop also vLLM's stop_reason."""
    if result.finish_reason == "loop":
        return {"finish_reason": "length", "stop_reason": "repetition_detected"}
    return {"finish_reason": result.finish_reason}


def is_begun(words: str) -> bool:
    """Whether a text is JSON, or the beginning of it."""
    try:
        from_json(words, allow_partial=True)
    except ValueError:
        return False
    return True


def read_arguments(words: str) -> dict[str, Any]:
    """The arguments of a call, as far as they were written."""
    try:
        found = begun_json(words or "{}")
    except (ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}
