"""`pystaged distill`: train a draft on its target's answers."""

from __future__ import annotations

from contextlib import closing
from importlib.util import find_spec
from pathlib import Path

import typer

from pystaged.cli.console import model_name, progress_bars, report
from pystaged.cli.options import MODEL_ARGUMENT, MODEL_TOO, Threads, either, one_of, option
from pystaged.loading import names
from pystaged.loading.distilled import DISTILLED, work_folder
from pystaged.platform.files import alone, destination, writable
from pystaged.platform.process import orderly_end

_TYPES = ("q8_0", "q4_0", "f16", "f32")


def distill(
    model: str | None = MODEL_ARGUMENT,
    *,
    named: str | None = MODEL_TOO,
    prompts: Path | None = option(
        None,
        "Your own prompts, at least 20: a text on each line, or a .jsonl file with texts or messages. By default "
        "questions that the model generates, and questions about texts on this machine.",
    ),
    hours: float = option(8.0, "Total time in hours; sets the defaults of --tokens and --epochs.", min=0.01),
    tokens: int | None = option(None, "Tokens of answers to write.", min=1000),
    epochs: int | None = option(None, "Passes over the answers in training.", min=1),
    out: Path | None = option(None, "GGUF file to write; by default in the cache, where --draft auto finds it."),
    folder: Path | None = option(None, "Folder of answers and checkpoint; by default in the cache."),
    quantization: str = option("q8_0", f"Quantization of the draft: {', '.join(_TYPES)}.", "--type", **one_of(*_TYPES)),
    block: int | None = option(None, "Tokens that the draft guesses in one pass.", min=2, max=16, show_default="8"),
    rows: int | None = option(None, "The draft's vocabulary: so many common tokens.", min=256, show_default="16384"),
    device: str = option("auto", "Where torch trains: auto (a GPU if it has one), cpu, cuda or mps."),
    threads: Threads = 0,
) -> None:
    """Train a draft for a model: the model answers prompts, and a small network learns to guess several tokens of the
    answers at once. Needs the extra `train`.

    It takes eight hours by default. Ctrl-C stops it, and the same command resumes. A draft guesses best on prompts like
    those that it was trained on.

    Example: pystaged distill qwen3-1.7b.gguf --prompts prompts.jsonl
    """
    name = either(model, named, "to train a draft for")
    if not find_spec("torch"):
        raise ModuleNotFoundError("distilling needs PyTorch; run: pip install torch")
    from pystaged.distill.job import Job  # noqa: PLC0415  needs torch

    path = names.resolve(model_name(name))
    target = writable(out, DISTILLED.path(path))
    for read in filter(None, (path, prompts)):
        if target == read.resolve():
            raise typer.BadParameter(f"--out {out} would replace {read}, which is read; name another file")
    work = folder or work_folder(path)
    work.mkdir(parents=True, exist_ok=True)
    with alone(work), orderly_end(), progress_bars() as progress:
        try:
            given = {"tokens": tokens, "epochs": epochs, "rows": rows, "block": block}
            with closing(Job(path, work, prompts, device, threads, report)) as job:
                job.plan(hours, given)
                job.write(progress)
            job.learn(progress)
        except KeyboardInterrupt:
            report(f"stopped; the same command resumes from {work}")
            raise typer.Exit(130) from None
        job.export(target, quantization.upper())
    if target == destination(DISTILLED.path(path)):
        report(f"--draft auto uses it for {path.name} from now on")
    report(f"answers and checkpoint are no longer needed; to free their space, remove {work}")
