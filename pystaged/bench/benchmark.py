"""One benchmark: its files and prompts, the methods that it compares, and its report."""

from __future__ import annotations

import hashlib
import os
import shlex
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import date
from pathlib import Path

from pystaged._core import Model, Tokenizer
from pystaged.bench import conditions, methods, models, pairs, passes, prompts, summary
from pystaged.bench.methods import Setup
from pystaged.bench.prompts import Prompt
from pystaged.bench.report import Report
from pystaged.bench.suite import Outcome, Suite
from pystaged.loading import drafts
from pystaged.loading.metadata import reads_target
from pystaged.loading.tables import find_table

_TREE_ROOM = 64  # positions for the last draft tree


@dataclass(frozen=True, slots=True)
class Benchmark:
    """What to measure; for each field see the option of `pystaged bench`.

    warm: number of the file's prompts that are continued first, unmeasured, to fill the recycled candidates.
    """

    model: str = "bundled"
    draft: str | Path | None = "auto"
    quantization: str = "Q8_0"
    prompts: Path | None = None
    limit: int | None = None
    max_tokens: int = 128
    minutes: float = 20.0
    threads: int = 0
    baselines: str = "all"
    llama_cpp: Sequence[Path] = ()
    warm: int = 0

    def run(self, progress: Callable[[str, float, float], None]) -> Report:
        """Measure until everything is done, the time is over, or Ctrl-C.

        Args:
            progress: see Suite.

        Raises:
            FileNotFoundError: no such model, draft, prompts or folder.
            ValueError: prompts too long for the model, or none; no such baseline.
        """
        path = models.find(self.model, self.quantization, lambda what: progress(what, 0.0, 0.0))
        draft = models.find_draft(self.model, self.draft, lambda what: progress(what, 0.0, 0.0))
        most = None if self.limit is None else self.warm + self.limit
        file, found_prompts = prompts.choose(path, self.prompts, most)
        warm, chosen = found_prompts[: self.warm], found_prompts[self.warm :]
        if not chosen:
            raise ValueError(f"{file} has {len(warm)} prompts; choose a smaller --warm")
        misleading = prompts.misleading(path)
        longest = max(len(prompt.tokens) for prompt in [*found_prompts, *misleading])
        setup, kernel = self._setup(path, draft, longest)
        remembered = {"warm": [prompt.tokens.tolist() for prompt in warm], "max_tokens": self.max_tokens}
        chosen_methods = methods.ours(setup | remembered | {"threads": self.threads})
        chosen_methods += methods.baselines(setup, self.llama_cpp, self.baselines)
        progress("passes of the target", 0.0, 0.0)
        times = passes.measure(path, repeats=5, num_threads=self.threads, baseline=False)
        outcome = Suite(chosen_methods, chosen, misleading, self.max_tokens, 60 * self.minutes, progress).run()
        progress("agreement of the draft", outcome.seconds, 0.0)
        agreement = self._agreement(path, draft, chosen, outcome)
        counted = Path(setup["draft"] or path)  # the model whose text the n-gram table counts
        table = find_table(counted, None, Tokenizer(os.fsencode(path)))
        used = {run.prompt for run in outcome.runs} & set(range(len(chosen)))
        found = {
            "machine": conditions.machine(),
            "versions": conditions.versions(),
            "kernel": kernel,
            "threads": setup["threads"],
            "model": conditions.model_file(path, models.about(self.model)),
            "draft": conditions.model_file(draft, agreement) if draft else None,
            "ngram_table": table.num_tokens if table else 0,  # tokens counted in the table
            "prompts": {
                "file": file.name,
                "sha256": hashlib.sha256(file.read_bytes()).hexdigest(),
                "chosen": len(chosen),
                "used": dict(Counter(chosen[prompt].category for prompt in sorted(used))),
            },
            "max_tokens": self.max_tokens,
            "minutes": self.minutes,
            "warm": self.warm,
            "load": conditions.load([each for run in outcome.runs for each in run.others], setup["threads"]),
            "date": date.today().isoformat(),
            "command": shlex.join(["pystaged", *sys.argv[1:]]),
        }
        return Report(found, summary.tables(chosen_methods, outcome), times.to_dict(), outcome)

    def _agreement(self, path: Path, draft: Path | None, chosen: Sequence[Prompt], outcome: Outcome) -> str:
        """How often the draft's first choice is the target's; "" if the benchmark was interrupted, or the draft reads
        hidden states."""
        runs = [run for run in outcome.runs if (run.method, run.sampling) == ("plain", "greedy") and not run.is_repeat]
        texts = [(chosen[run.prompt].tokens.tolist(), run.measurement.tokens) for run in runs if not run.is_misleading]
        if draft is None or reads_target(draft) or not outcome.complete:
            return ""
        substitutes = drafts.substitutes(*(Tokenizer(os.fsencode(each)) for each in (path, draft)))
        model = Model(str(draft), os.environ.get("PYSTAGED_KERNEL", ""), self.threads)
        share = pairs.agreement(model, texts, substitutes)
        return f"its first choice is the target's for {share:.0%} of plain greedy tokens" if share is not None else ""

    def _setup(self, path: Path, draft: Path | None, longest: int) -> tuple[Setup, str]:
        """The setup for all methods, and the kernel's name."""
        kernel = os.environ.get("PYSTAGED_KERNEL", "")
        target = Model(str(path), kernel, self.threads)
        if longest + self.max_tokens > target.max_context:
            raise ValueError(
                f"the longest prompt has {longest} tokens; with {self.max_tokens} more that is beyond the model's "
                f"context of {target.max_context}; choose a smaller --max-tokens"
            )
        setup = {
            "model": str(path),
            "draft": str(draft) if draft else None,
            "threads": target.num_few_threads,
            "n_ctx": min(target.max_context, longest + self.max_tokens + _TREE_ROOM),
        }
        return setup, target.kernel
