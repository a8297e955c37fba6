"""One benchmark: the files and prompts, who takes part, what is reported."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from datetime import date
from pathlib import Path
from typing import TypeVar

from pystaged._core import Model, Tokenizer
from pystaged.bench import conditions, contenders, models, passes, summary
from pystaged.bench.contenders import Setup
from pystaged.bench.pairs import load_prompts
from pystaged.bench.report import Report
from pystaged.bench.suite import Prompt, Suite
from pystaged.config import SamplingConfig
from pystaged.loading import names

SAMPLINGS = {"greedy": SamplingConfig(), "T=1 top-k 50": SamplingConfig(temperature=1.0, top_k=50)}
_TREE_ROOM = 64  # positions left for the last tree
_Item = TypeVar("_Item")


@dataclass(frozen=True, slots=True)
class Contest:
    """What to measure; each field as the option of `pystaged bench`.

    accept: acceptance at depth 1, 2, ... of the synthetic mode; empty for the usual benchmark.
    warm: so many other prompts of the file have been continued before, and are remembered by what drafts; else nothing
    is.
    """

    model: str = "house"
    draft: str | Path | None = "auto"
    quantization: str = "Q8_0"
    prompts: Path | None = None
    limit: int = 82
    max_tokens: int = 128
    repeats: int = 1
    threads: int = 0
    peers: bool = True
    peer_limit: int = 10
    llama_cpp: Path | None = None
    accept: list[float] = field(default_factory=list)
    warm: int = 0

    def run(self, progress: Callable[[str, float, float], None]) -> Report:
        """Measure everything, or until Ctrl-C.

        Args:
            progress: as in Suite.

        Raises:
            FileNotFoundError: no such model, draft, prompts or folder.
            ValueError: prompts too long for the model, or none.
        """
        file = self.prompts or names.house(names.HOUSE_PROMPTS)
        path = models.find(self.model, self.quantization, lambda what: progress(what, 0.0, 0.0))
        draft = models.find_draft(self.model, self.draft)
        tokenizer = Tokenizer(str(path))
        texts = load_prompts(file)
        prompts = [Prompt(text, tokenizer.encode(text)) for text in spread(texts, self.limit)]
        if not prompts:
            raise ValueError(f"{file} has no prompts")
        measured = {prompt.text for prompt in prompts}
        others = [text for text in texts if text not in measured]
        if len(others) < self.warm:
            raise ValueError(f"{file} has {len(others)} more prompts; choose a smaller --warm or --limit")
        warm = [tokenizer.encode(text).tolist() for text in spread(others, self.warm)]
        longest = max(len(tokens) for tokens in [*(prompt.tokens for prompt in prompts), *warm])
        setup, kernel = self._setup(path, draft, longest)
        taking_part = contenders.ours(setup | {"warm": warm}, self.accept)
        if self.peers and not self.accept:
            taking_part += contenders.peers(setup, self.llama_cpp)
        has_peers = any(each.is_peer for each in taking_part)
        peer_prompts = spread(range(len(prompts)), self.peer_limit) if has_peers else []
        used = {"used": len(prompts), "peers": len(peer_prompts)}
        found = {
            "machine": conditions.machine(),
            "versions": conditions.versions(),
            "kernel": kernel,
            "threads": setup["threads"],
            "model": conditions.model_file(path, self.model),
            "draft": conditions.model_file(draft) if draft else None,
            "prompts": {"file": file.name, "sha256": conditions.sha256(file), **used},
            "max_tokens": self.max_tokens,
            "repeats": self.repeats,
            "accept": self.accept,
            "warm": self.warm,
            "date": date.today().isoformat(),
            "command": shlex.join(["pystaged", *sys.argv[1:]]),
        }
        progress("passes of the target", 0.0, 0.0)
        times = passes.measure(path, repeats=5, num_threads=setup["threads"], peer=False)
        suite = Suite(taking_part, prompts, peer_prompts, SAMPLINGS, self.max_tokens, self.repeats, progress)
        outcome = suite.run()
        tables = {sampling: summary.rows(taking_part, outcome, sampling) for sampling in SAMPLINGS}
        return Report(found, tables, times.to_dict(), outcome)

    def _setup(self, path: Path, draft: Path | None, longest: int) -> tuple[Setup, str]:
        """What all contenders get, and the kernel's name."""
        target = Model(str(path), "", self.threads)
        if longest + self.max_tokens > target.max_context:
            raise ValueError(
                f"the longest prompt has {longest} tokens; with {self.max_tokens} more that is beyond the model's "
                f"context of {target.max_context}; choose a smaller --max-tokens"
            )
        setup = {
            "model": str(path),
            "draft": str(draft) if draft else None,
            "draft_share": Model(str(draft)).weight_bytes / target.weight_bytes if draft else 0.0,
            "threads": target.num_threads,
            "n_ctx": min(target.max_context, longest + self.max_tokens + _TREE_ROOM),
        }
        return setup, target.kernel


def spread(items: Iterable[_Item], most: int) -> list[_Item]:
    """At most so many of them, evenly spread."""
    found = list(items)
    number = min(most, len(found))
    return [found[at * len(found) // number] for at in range(number)]
