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
from pystaged.options.table import declared, declared_in

_TREE_ROOM = 64  # positions for the last draft tree


@dataclass(frozen=True, slots=True)
class Benchmark:
    """What to measure, the options of `pystaged bench`."""

    # fmt: off
    model: str = declared("bundled", flags=("--model", "-m"), help=
        "GGUF file, 'bundled', 'smollm2', or made once: 'grown-smollm2' has SmolLM2's output at the cost of a billion "
        "weights; 'pair' is the same, drafted by SmolLM2 with noise of 0.08 ('pair:0.15': of 0.15); 'random' (GPT-2 "
        "Large) and 'llama1b' have random weights.")
    draft: str | Path | None = declared("auto", "Path of a draft, 'bundled', 'auto', or 'none' for n-grams alone.")
    quantization: str = declared("Q8_0", "Type of a model to make.", flags=("--type",))
    prompts: Path | None = declared(None, help=
        "HumanEval's file, Spec-Bench's question.jsonl, or a file like them; else the packaged ones.")
    limit: int | None = declared(None, "Maximum number of prompts, taken evenly from all categories.", ge=1)
    max_tokens: int = declared(128, "New tokens per prompt, unless its text ends.", ge=2)
    minutes: float = declared(20.0, "Minutes for all prompts; no prompt begins later.", ge=0)
    num_threads: int = 0
    baselines: str = declared("all", help=
        "Other engines to compare with: 'all', 'none', or beginnings of names, like ik,llama.cpp.")
    llama_cpp: Sequence[Path] = declared((), help=
        "Folder of a llama.cpp or ik_llama.cpp build to measure, too; may be repeated.")
    warm: int = declared(0, ge=0, help=
        "Draft with recycled candidates from this many other prompts of the file; 0 for none.")
    # fmt: on

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
        chosen_methods = methods.ours(setup | remembered | {"threads": self.num_threads})
        chosen_methods += methods.baselines(setup, self.llama_cpp, self.baselines)
        progress("passes of the target", 0.0, 0.0)
        times = passes.measure(path, repeats=5, num_threads=self.num_threads, baseline=False)
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
            "load": conditions.load([run.others for run in outcome.runs], setup["threads"]),
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
        model = Model(str(draft), os.environ.get("PYSTAGED_KERNEL", ""), self.num_threads)
        share = pairs.agreement(model, texts, substitutes)
        return f"its first choice is the target's for {share:.0%} of plain greedy tokens" if share is not None else ""

    def _setup(self, path: Path, draft: Path | None, longest: int) -> tuple[Setup, str]:
        """The setup for all methods, and the kernel's name."""
        kernel = os.environ.get("PYSTAGED_KERNEL", "")
        target = Model(str(path), kernel, self.num_threads)
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


BENCH = declared_in(Benchmark)
