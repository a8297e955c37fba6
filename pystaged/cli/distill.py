"""`pystaged distill`: train a draft on what its target writes."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from typing import Annotated

import typer

from pystaged.cli.console import model_name, progress_bars, report
from pystaged.cli.options import ModelArgument, ModelToo, Threads, either
from pystaged.files import alone, destination, part_file
from pystaged.loading import names
from pystaged.loading.distilled import DISTILLED, work_folder
from pystaged.process import orderly_end

_TYPES = ("q8_0", "q4_0", "f16", "f32")


def distill(
    model: ModelArgument = None,
    *,
    named: ModelToo = None,
    prompts: Annotated[
        Path | None,
        typer.Option(
            help="Your own prompts: a text on each line, or JSON lines with texts or messages. Without it the model "
            "asks itself, and about texts on this machine.",
            show_default=False,
        ),
    ] = None,
    hours: Annotated[float, typer.Option(min=0.01, help="Time for all, from which the next two follow.")] = 8.0,
    tokens: Annotated[int | None, typer.Option(min=1000, help="Tokens of answers.", show_default=False)] = None,
    epochs: Annotated[
        int | None, typer.Option(min=1, help="How often each is learnt from.", show_default=False)
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(help="GGUF file to write; where --draft auto finds it if not given.", show_default=False),
    ] = None,
    folder: Annotated[
        Path | None,
        typer.Option(help="For answers and checkpoints; in the cache if not given.", show_default=False),
    ] = None,
    quantization: Annotated[str, typer.Option("--type", help=f"Of the draft: {', '.join(_TYPES)}.")] = "q8_0",
    block: Annotated[
        int | None, typer.Option(min=2, max=16, help="Tokens that it guesses in one pass.", show_default="8")
    ] = None,
    layers: Annotated[int | None, typer.Option(min=1, max=8, help="Of the draft.", show_default="2")] = None,
    rows: Annotated[
        int | None, typer.Option(min=256, help="Tokens that it can propose: the commonest.", show_default="16384")
    ] = None,
    rank: Annotated[
        int | None, typer.Option(min=32, max=512, help="Of its Markov head, a multiple of 32.", show_default="64")
    ] = None,
    device: Annotated[
        str, typer.Option(help="Where torch trains: auto (a GPU if it has one), cpu, cuda or mps.")
    ] = "auto",
    threads: Threads = 0,
) -> None:
    """Train a draft for a model: the model answers prompts, and a small network learns to guess what it says, several
    tokens at once. Needs the extra `train`.

    By default it takes a night, which is enough for models of up to two billion parameters. Ctrl-C stops it, and the
    same command goes on. Prompts like your own make it better for you.

    Example: pystaged distill qwen3-1.7b.gguf --prompts prompts.jsonl
    """
    if quantization.lower() not in _TYPES:
        raise typer.BadParameter(f"--type is one of {', '.join(_TYPES)}, not {quantization}")
    if rank is not None and rank % 32:
        raise typer.BadParameter(f"--rank is a multiple of 32, not {rank}")
    name = either(model, named)
    if not name:
        raise typer.BadParameter("name the model that the draft is for")
    _check_torch()
    from pystaged.distill.job import Job  # noqa: PLC0415  needs torch

    path = names.resolve(model_name(name))
    if out is None:
        DISTILLED.path(path).parent.mkdir(parents=True, exist_ok=True)
    target = destination(out or DISTILLED.path(path))
    for read in filter(None, (path, prompts)):
        if target == read.resolve():
            raise typer.BadParameter(f"--out {out} would replace {read}, which is read; name another file")
    with part_file(target):
        pass  # that a file can be made there is known before the work, not after it
    work = folder or work_folder(path)
    work.mkdir(parents=True, exist_ok=True)
    with alone(work), orderly_end(), progress_bars() as progress:
        try:
            given = {"tokens": tokens, "epochs": epochs, "rows": rows, "rank": rank, "block": block, "layers": layers}
            with closing(Job(path, work, prompts, device, threads, report)) as job:
                job.plan(hours, given)
                job.write(progress)
            job.learn(progress)
        except KeyboardInterrupt:
            report(f"stopped; the same command goes on from what is in {work}")
            raise typer.Exit(130) from None
        job.export(target, quantization.upper())
    if target == destination(DISTILLED.path(path)):
        report(f"--draft auto takes it for {path.name} from now on")
    report(f"answers and checkpoint may go: {work}")


def _check_torch() -> None:
    try:
        import torch  # noqa: F401, PLC0415
    except ModuleNotFoundError:
        raise ModuleNotFoundError("distilling needs PyTorch; run: pip install 'pystaged[train]'") from None
