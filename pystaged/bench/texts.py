"""Many sequences at once: tokens per second of all and of each, with and without drafting, and with llama-server's
slots."""

from __future__ import annotations

import statistics
import subprocess
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, nullcontext
from dataclasses import asdict, dataclass, field, replace
from itertools import pairwise, takewhile
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from rich.table import Table

from pystaged.bench import conditions
from pystaged.bench.baseline_llama_cpp import Server, command
from pystaged.decoding.readers import pieces
from pystaged.decoding.text import TokenRoles
from pystaged.engine import Engine
from pystaged.options.config import GenerationConfig
from pystaged.stats import PassStats

_BASELINE = "llama-server, plain"
_UNKNOWN = -1  # stands for a token that a baseline does not report
_ROOM = 64  # positions for the last draft tree
_LONGEST = 8  # most tokens of a sequence that waits for the others, in multiples of max_tokens

Tokens = Sequence[int] | NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class Written:
    """One sequence: its tokens, and the seconds at which tokens came, with their numbers."""

    tokens: list[int]
    times: list[tuple[float, int]]


@dataclass(frozen=True, slots=True)
class Figures:
    """Figures of sequences that were decoded together.

    texts: number of sequences. way: "plain", "drafted" or a baseline. tokens_per_second: of all together, while
    all decode; of_each: mean of a sequence from its first token to its last.
    first_token_seconds: median time from the prompt to the first token; longest_gap_seconds: between tokens of a
    sequence. different: sequences that differ, up to their ends, from the first way's for the same prompt. passes:
    statistics of pystaged's passes.
    """

    texts: int
    way: str
    tokens_per_second: float
    of_each: float
    first_token_seconds: float
    longest_gap_seconds: float
    different: int
    passes: dict[str, float] | None = None


@dataclass(frozen=True, slots=True)
class LeftOut:
    """A way that could not decode so many sequences at once, and why."""

    texts: int
    way: str
    reason: str


@dataclass(frozen=True, slots=True)
class TextsReport:
    """One run: the figures and their conditions."""

    conditions: dict[str, Any]
    figures: list[Figures]
    left_out: list[LeftOut] = field(default_factory=list)

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)

    def table(self) -> Table:
        """A table for terminals."""
        model = self.conditions["model"]["name"]
        title = f"{model}: {self.conditions['max_tokens']} tokens each, greedy"
        headings = ("texts", "", "tokens/s", "x one plain", "of each", "first ms", "longest gap ms")
        table = Table(*headings, "texts, rows per pass", "guesses", title=title, box=None)
        one = next((each.tokens_per_second for each in self.figures if each.texts == 1 and each.way == "plain"), None)
        for each in self.figures:
            times = (f"{1e3 * seconds:.0f}" for seconds in (each.first_token_seconds, each.longest_gap_seconds))
            speed = f"{each.tokens_per_second / one:.2f}" if one else "-"
            figures = (f"{each.tokens_per_second:.1f}", speed, f"{each.of_each:.1f}")
            table.add_row(str(each.texts), each.way, *figures, *times, *_shared(each.passes))
        for missing in self.left_out:
            table.add_row(str(missing.texts), missing.way, missing.reason)
        different = sum(each.different for each in self.figures if each.passes)
        table.caption = "tokens/s: of all together, while all decode; " + (
            f"{different} of our texts differ from plain ones" if different else "our texts are the plain ones"
        )
        return table


def _shared(passes: dict[str, float] | None) -> tuple[str, str]:
    if passes is None:
        return "-", "-"
    return f"{passes['texts_per_pass']:.1f}, {passes['rows_per_pass']:.1f}", f"{passes['guess_share']:.0%}"


def measure(
    model: Path,
    draft: Path | None,
    prompts: Sequence[Tokens],
    counts: Sequence[int],
    *,
    max_tokens: int,
    threads: int = 0,
    llama_server: Path | None = None,
    progress: Callable[[str], None] = lambda _: None,
) -> TextsReport:
    """Decode sequences together, with each way in turn.

    Args:
        prompts: assigned to the sequences in order, beginning again at the end.
        counts: numbers of sequences at once.
        llama_server: the program to compare with, without and with the draft.
        progress: called with a line about what is being done.

    Raises:
        ValueError: prompts are too long for the model.
    """
    with Engine(model, draft=draft, num_threads=threads, recycle=False, report=progress) as engine:
        longest = max(map(len, prompts)) + max_tokens
        if longest > engine.n_ctx:
            raise ValueError(
                f"the longest prompt and {max_tokens} tokens more are {longest} tokens, but the model's context holds "
                f"{engine.n_ctx}"
            )
        # Sequences continue past their ends, and all prompts need a full prefill.
        most = min(_LONGEST * max_tokens, engine.n_ctx - longest + max_tokens)
        config = GenerationConfig(max_tokens=most, reuse=False)
        setup: dict[str, Any] = {"model": str(model), "draft": str(draft) if draft else None, "program": llama_server}
        setup |= {"threads": engine.model.num_few_threads, "max_tokens": max_tokens}
        setup["n_ctx"] = min(longest - max_tokens + most + _ROOM, engine.n_ctx)
        servers = [_BASELINE, "llama-server, draft-simple"][: (1 + bool(draft)) if llama_server else 0]
        ends = frozenset(engine.tokenizer.end_tokens.tolist())
        found: list[Figures] = []
        left_out: list[LeftOut] = []
        for count in counts:
            batch = [prompts[i % len(prompts)] for i in range(count)]
            expected: list[list[int]] = []
            for name in ("plain", "drafted", *servers):
                try:
                    with closing(Slots(name, setup, config, count)) if name in servers else nullcontext() as server:
                        progress(f"{count} texts, {name}")
                        if server:
                            written, passes = server.write(batch), None
                        else:
                            drafting = replace(config, speculate=name == "drafted")
                            written, passes = write(engine, drafting, max_tokens, batch)
                except RuntimeError as error:
                    if name not in servers:
                        raise
                    progress(f"{count} texts, {name} takes no part: {error}")
                    left_out.append(LeftOut(count, name, str(error)))
                    continue
                expected = expected or [[*takewhile(lambda token: token not in ends, each.tokens)] for each in written]
                different = sum(
                    any(ours not in (plain, _UNKNOWN) for ours, plain in zip(each.tokens, tokens, strict=False))
                    for each, tokens in zip(written, expected, strict=True)
                )
                found.append(_summary(name, written, different, passes))
        about: dict[str, Any] = {
            "machine": conditions.machine(),
            "versions": conditions.versions(),
            "kernel": engine.model.kernel,
            "threads": engine.model.num_threads,
            "model": conditions.model_file(model),
            "draft": conditions.model_file(draft) if draft else None,
            "prompts": len(prompts),
            "max_tokens": max_tokens,
        }
    return TextsReport(about, found, left_out)


def _summary(way: str, texts: Sequence[Written], different: int, passes: PassStats | None) -> Figures:
    begin, end = max(each.times[0][0] for each in texts), min(each.times[-1][0] for each in texts)
    last = max(each.times[-1][0] for each in texts)
    num_tokens = sum(count for each in texts for _, count in each.times)
    together = sum(count for each in texts for at, count in each.times if begin < at <= end)
    spans = [(each.times[-1][0] - each.times[0][0], len(each.tokens) - each.times[0][1]) for each in texts]
    return Figures(
        texts=len(texts),
        way=way,
        # They did not overlap if one ended before another began.
        tokens_per_second=together / (end - begin) if end > begin else num_tokens / last,
        of_each=statistics.fmean(tokens / seconds if seconds else 0.0 for seconds, tokens in spans),
        first_token_seconds=statistics.median(each.times[0][0] for each in texts),
        longest_gap_seconds=max(
            (after - before for each in texts for (before, _), (after, _) in pairwise(each.times)), default=0.0
        ),
        different=different,
        passes=passes.to_dict() if passes else None,
    )


def write(
    engine: Engine, config: GenerationConfig, least: int, prompts: Sequence[Tokens]
) -> tuple[list[Written], PassStats]:
    """Continue prompts from the same moment, time 0, until each sequence has `least` tokens; early ones continue
    meanwhile.

    Args:
        config: of all sequences, which continue past the end of text; its max_tokens is the most a sequence may have.
    """
    # No prompt may be reused from an earlier run.
    engine.forget()
    before = engine.passes
    roles = TokenRoles(is_end=lambda _: False)
    texts = {engine.start(prompt, config, roles): Written([], []) for prompt in prompts}
    begin = time.perf_counter()
    with closing(pieces(texts, len(texts))) as batch:
        for sequence, piece in batch:
            if piece is not None and piece.tokens:
                texts[sequence].tokens.extend(piece.tokens)
                texts[sequence].times.append((time.perf_counter() - begin, len(piece.tokens)))
            if all(len(text.tokens) >= least for text in texts.values()):
                break
    return list(texts.values()), engine.passes.since(before)


class Slots:
    """Requests to a server that decodes `slots` sequences at once.

    Args:
        name: llama-server's, with the kind of speculation.
        setup: program, model, draft (path or None), threads, n_ctx of each slot, and max_tokens that each must reach.
        slots: their number.

    Raises:
        RuntimeError: it does not become ready.
    """

    def __init__(self, name: str, setup: dict[str, Any], config: GenerationConfig, slots: int) -> None:
        self.name, self._config, self._least = name, config, setup["max_tokens"]
        way = name.rpartition(" ")[2]
        mine = setup | {"n_ctx": setup["n_ctx"] * slots}
        speculation = ["--spec-type", way] if way != "plain" else []
        mine |= {} if speculation else {"draft": None}
        told = [*command(mine), "-np", str(slots), *speculation]
        self._server = Server(told, subprocess.DEVNULL)

    def write(self, prompts: Sequence[Tokens]) -> list[Written]:
        """As the function of that name."""
        texts = [Written([], []) for _ in prompts]
        is_done = threading.Event()
        begin = time.perf_counter()
        with ThreadPoolExecutor(len(prompts)) as threads:
            asked = [
                threads.submit(self._ask, prompt, text, begin, is_done)
                for prompt, text in zip(prompts, texts, strict=True)
            ]
            try:
                while any(len(text.tokens) < self._least for text in texts) and not all(each.done() for each in asked):
                    time.sleep(0.001)
            finally:
                is_done.set()  # otherwise Ctrl-C would wait for whole sequences
            for each in asked:
                each.result()
        if silent := sum(not text.tokens for text in texts):
            raise RuntimeError(f"{self.name} answered {silent} of {len(texts)} requests without a token")
        return texts

    def _ask(self, prompt: Tokens, text: Written, begin: float, is_done: threading.Event) -> None:
        request = {
            "prompt": list(map(int, prompt)),
            "n_predict": self._config.max_tokens,
            "temperature": 0.0,
            "ignore_eos": True,
            "cache_prompt": False,
            "return_tokens": True,
            "stream": True,
            "samplers": ["temperature"],
        }
        for part in self._server.stream(request):
            # ik_llama.cpp does not report tokens, but sends each in a part of its own.
            tokens = part.get("tokens", [_UNKNOWN] if part.get("content") else [])
            if not isinstance(tokens, list):
                raise RuntimeError(f"{self.name} answers oddly: its tokens are {tokens!r:.80}")
            if tokens:
                text.tokens.extend(tokens)
                text.times.append((time.perf_counter() - begin, len(tokens)))
            if is_done.is_set():
                return

    def close(self) -> None:
        """Stop the server."""
        self._server.close()
