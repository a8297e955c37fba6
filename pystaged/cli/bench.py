"""`pystaged bench`: speed on this machine compared with other engines, and measurements of its parts."""

from __future__ import annotations

import json
import math
import os
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer
from numpy.typing import NDArray
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from typer.core import TyperGroup

from pystaged._core import Session
from pystaged.bench import edits as edits_bench
from pystaged.bench import methods, models, pairs
from pystaged.bench import passes as curve
from pystaged.bench import texts as texts_bench
from pystaged.bench.benchmark import Benchmark
from pystaged.bench.prompts import choose
from pystaged.cli.command import Command, UsageError
from pystaged.cli.console import draft_name, errors, report
from pystaged.cli.options import DEFAULT_MODEL, Json, Threads, check, usage
from pystaged.config import SamplingConfig
from pystaged.decoding.cost import PassCost
from pystaged.decoding.decoder import Decoder
from pystaged.decoding.policy import FixedPolicy
from pystaged.loading import names
from pystaged.loading.bundle import Bundle
from pystaged.loading.factory import DecoderFactory


class _Parts(TyperGroup):
    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """As click's."""
        try:
            return super().resolve_command(ctx, args)
        except UsageError as error:
            if error.message == f"No such command {args[0]!r}.":
                error.message += " Name a model with --model"
            raise


app = typer.Typer(cls=_Parts)

_WIDE = 160  # characters, if the output is not a terminal
_MOST_TEXTS = 1024  # sequences at once

ModelName = Annotated[
    str,
    typer.Option(
        "--model",
        "-m",
        help="GGUF file, 'bundled', 'smollm2', or made once: 'grown', 'grown-smollm2' and the mixture 'mixed-smollm2' "
        "have a small model's output at a large one's cost; 'random' (GPT-2 Large), 'llama1b' and 'llama8b' have "
        "random weights.",
        callback=lambda name: name or names.default_model(report),
        show_default=DEFAULT_MODEL,
    ),
]
DraftName = Annotated[
    str, typer.Option("--draft", help="Path of a draft or draft head, 'bundled', 'auto', or 'none' for n-grams alone.")
]
Quantization = Annotated[str, typer.Option("--type", help="Type of a model to make.")]
Prompts = Annotated[
    Path | None,
    typer.Option(help="HumanEval's file, Spec-Bench's question.jsonl, or a file like them; else the packaged ones."),
]
Limit = Annotated[
    int | None, typer.Option(min=1, help="Maximum number of prompts, taken evenly from all categories.", callback=check)
]
Warm = Annotated[
    int,
    typer.Option(
        min=0,
        help="Draft with recycled candidates from this many other prompts of the file; 0 for none.",
        callback=check,
    ),
]
MaxTokens = Annotated[int, typer.Option(min=1, help="New tokens per prompt.", callback=check)]


@app.callback(invoke_without_command=True)
def bench(
    context: typer.Context,
    model: ModelName = "",
    draft: DraftName = "auto",
    quantization: Quantization = "Q8_0",
    prompts: Prompts = None,
    limit: Limit = None,
    max_tokens: Annotated[
        int, typer.Option(min=2, help="New tokens per prompt, unless its text ends.", callback=check)
    ] = 128,
    minutes: Annotated[
        float, typer.Option(min=0, help="Minutes for all prompts; no prompt begins later.", callback=check)
    ] = 20,
    threads: Threads = 0,
    baselines: Annotated[
        str,
        typer.Option(help="Other engines to compare with: 'all', 'none', or beginnings of names, like ik,llama.cpp."),
    ] = "all",
    llama_cpp: Annotated[
        list[Path] | None,
        typer.Option(help="Folder of a llama.cpp or ik_llama.cpp build to measure, too; may be repeated."),
    ] = None,
    accept: Annotated[
        str | None,
        typer.Option(
            help="Estimate instead the speedup of a draft with these acceptance rates by depth, as 0.8,0.6,0.5."
        ),
    ] = None,
    warm: Warm = 0,
    out: Annotated[Path | None, typer.Option(help="Folder for report.md, report.json and pictures.")] = None,
    as_json: Json = False,
) -> None:
    """Measure speed on this machine: our decoding methods beside other engines (baselines), by category of prompts.

    All run in turn with the same files and prompts, greedily and at T = 1, top-k 50. Ctrl-C ends the measurement early
    and reports the results so far.

    Example: pystaged bench --model smollm2 --minutes 10

    Example: pystaged bench --model grown --llama-cpp ~/llama.cpp/build/bin --out report

    Example: pystaged bench --model big.gguf --draft small.gguf --accept 0.8,0.7,0.6
    """
    if context.invoked_subcommand:
        given = [context.get_parameter_source(name) for name in context.params]
        if any(source and source.name == "COMMANDLINE" for source in given):
            raise typer.BadParameter(f"write the options of {context.invoked_subcommand} after its name")
        return
    rates = _rates(accept) if accept is not None else []
    if rates and warm:
        raise typer.BadParameter("--accept simulates a draft, which does not use --warm; leave one of them out")
    _check_type(model, quantization)
    found_draft = draft_name(draft)
    setup = {"draft": models.find_draft(model, found_draft, report)}
    with usage():
        methods.baselines(setup, llama_cpp or [], baselines)
    benchmark = Benchmark(
        model=model,
        draft=found_draft,
        quantization=quantization.upper(),
        prompts=prompts,
        limit=limit,
        max_tokens=max_tokens,
        minutes=minutes,
        threads=threads,
        baselines=baselines,
        llama_cpp=llama_cpp or [],
        accept=rates,
        warm=warm,
    )
    if out:
        # Fails now, not after the measurements.
        out.mkdir(parents=True, exist_ok=True)
        if not find_spec("matplotlib"):
            report("there will be no pictures: matplotlib is not installed; run: pip install 'pystaged[bench]'")
    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn(), TextColumn("{task.fields[left]}"))
    with Progress(*columns, console=errors, transient=True) as bar:
        task = bar.add_task("", total=None, left="")

        def progress(doing: str, done: float, left: float) -> None:
            words = f"about {left / 60:.0f} min left" if left >= 90 else f"about {left:.0f} s left" if left else ""
            bar.update(task, description=doing, completed=done, total=done + left if left else None, left=words)

        found = benchmark.run(progress)
    if out:
        report(f"{', '.join(found.write(out))} are in {out}")
    if as_json:
        typer.echo(json.dumps(found.to_dict()))
    else:
        console = _console()
        for part in found.terminal(console.width):
            console.print(part, soft_wrap=not console.is_terminal)
    if not found.outcome.complete:
        report("stopped early: these are the results until then")
        raise typer.Exit(130)


@app.command(cls=Command)
def passes(
    model: ModelName = "random",
    quantization: Quantization = "Q8_0",
    context: Annotated[
        str | None, typer.Option(help="Tokens before the rows, one length or several; as 256,4096,16384.")
    ] = None,
    repeats: Annotated[int, typer.Option(min=1, help="Timed passes per row count and context.", callback=check)] = 11,
    threads: Threads = 0,
    baseline: Annotated[bool, typer.Option(help="Measure llama.cpp too.")] = True,
    as_json: Json = False,
) -> None:
    """Time one pass over n = 1 to 32 rows after a context of 256 tokens (--context sets others): what verifying n - 1
    guesses costs.

    Example: pystaged bench passes --model random --type Q4_0

    Example: pystaged bench passes --model llama1b --type Q4_K_M --context 256,4096,16384
    """
    contexts = _numbers("--context", context, 0) if context is not None else []
    path = _model_file(model, quantization)
    kernel = os.environ.get("PYSTAGED_KERNEL", "")
    found = curve.measure(
        path,
        contexts=contexts,
        repeats=repeats,
        kernel=kernel,
        num_threads=threads,
        baseline=baseline,
    )
    if as_json:
        typer.echo(json.dumps(found.to_dict()))
    else:
        _console().print(found.table())


@app.command(cls=Command)
def texts(
    model: ModelName = "",
    draft: DraftName = "auto",
    quantization: Quantization = "Q8_0",
    prompts: Prompts = None,
    counts: Annotated[str, typer.Option("--texts", help="Sequences at once: one number or several.")] = "1,2,4,8,16",
    max_tokens: Annotated[int, typer.Option(min=2, help="New tokens per sequence.", callback=check)] = 96,
    temperature: Annotated[float, typer.Option(help="Sampling temperature; 0 always takes the likeliest token.")] = 0.0,
    threads: Threads = 0,
    llama_cpp: Annotated[
        Path | None, typer.Option(help="Folder of a llama.cpp build, to measure its llama-server.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Decode many sequences at once: tokens per second of all and of each and time to the first token, with and without
    drafting, compared with llama-server's parallel slots.

    Example: pystaged bench texts --model llama1b --texts 1,8 --llama-cpp ~/llama.cpp/build/bin
    """
    numbers = _numbers("--texts", counts, 1, _MOST_TEXTS)
    with usage():
        SamplingConfig(temperature=temperature)
    server = methods.find_server(llama_cpp) if llama_cpp else None
    path = _model_file(model, quantization)
    _, chosen = choose(path, prompts, max(numbers))
    found = texts_bench.measure(
        path,
        models.find_draft(model, draft_name(draft), report),
        [prompt.tokens for prompt in chosen],
        numbers,
        max_tokens=max_tokens,
        temperature=temperature,
        threads=threads,
        llama_server=server,
        progress=report,
    )
    if as_json:
        typer.echo(json.dumps(found.to_dict()))
        return
    _console().print(found.table())


@app.command(cls=Command)
def edits(
    model: ModelName = "",
    draft: DraftName = "none",
    quantization: Quantization = "Q8_0",
    form: Annotated[str, typer.Option(help="Form of the prompts: 'sweep' or 'zeta'.")] = "sweep",
    repo: Annotated[
        Path | None,
        typer.Option(
            help="Git clone whose latest small edits of Python files are the cases; by default 200 packaged edits."
        ),
    ] = None,
    limit: Annotated[int, typer.Option(min=1, help="Maximum number of edits.", callback=check)] = 200,
    pass_ms: Annotated[
        str | None,
        typer.Option(
            help="Milliseconds of a pass by rows, as 1:65,2:67,4:78,8:129,16:260; else measured on the model."
        ),
    ] = None,
    as_json: Json = False,
) -> None:
    """Rewrite windows of 21 lines as next-edit models do: tokens per step and seconds, with and without drafting.

    The target is scripted: it writes the true answer, and its passes take the time of the real model's.

    Example: pystaged bench edits --form zeta

    Example: pystaged bench edits --model smollm2 --pass-ms 1:65,2:67,4:78,8:129,16:260
    """
    prices = _prices(pass_ms) if pass_ms is not None else None
    if form not in edits_bench.FORMS:
        raise typer.BadParameter(f"--form is one of {', '.join(edits_bench.FORMS)}, not '{form}'")
    with usage():
        cases = edits_bench.from_repository(repo, limit) if repo else edits_bench.read_cases()[:limit]
    path = _model_file(model, quantization)
    bundle = Bundle(path, models.find_draft(model, draft_name(draft), report), 0, report)
    cost = PassCost(prices) if prices else PassCost(DecoderFactory(bundle).target_cost().seconds)
    written = edits_bench.encode(map(edits_bench.FORMS[form], cases), bundle.tokenizer)
    told = {"cases": len(cases), "form": form, "model": path.name, "pass_seconds": cost.seconds}
    told["prices"] = "the given prices" if prices else f"{path.name}, measured here"
    found = edits_bench.EditsReport(told, edits_bench.measure(written, cost, bundle.target.vocab_size, bundle.table))
    if as_json:
        typer.echo(json.dumps(found.to_dict()))
        return
    _console().print(found.table())


@app.command(cls=Command)
def lossless(
    model: ModelName = "",
    draft: DraftName = "auto",
    quantization: Quantization = "Q8_0",
    prompts: Prompts = None,
    limit: Limit = None,
    max_tokens: MaxTokens = 96,
    seeds: Annotated[int, typer.Option(min=1, max=1000, help="Seeds for each sampling.")] = 2,
) -> None:
    """Check that each way of drafting gives plain decoding's output. Exits with status 1 if one does not.

    Example: pystaged bench lossless --limit 10

    Example: pystaged bench lossless --model smollm2 --draft smollm2 --limit 3
    """
    bundle, texts = _open(model, draft, quantization, prompts, limit)
    session = Session(bundle.target)
    ways = pairs.drafters(bundle.target, bundle.draft, bundle.table, bundle.substitutes)
    decoders = {way: Decoder(session, drafter) for way, drafter in ways.items()}
    factory = DecoderFactory(bundle)
    decoders["as measured costs decide"] = factory.decoder(0, None)
    decoders["as loaded, in trees of 12 nodes"] = factory.decoder(0, FixedPolicy(width=4, depth=6, budget=12))
    plain = Decoder(session)
    runs = {
        f"{mode}, seed {seed}": replace(sampling, seed=seed)
        for mode, sampling in pairs.MODES.items()
        for seed in range(1 if sampling.is_greedy else seeds)
    }
    different: dict[str, list[int]] = {way: [] for way in decoders}
    with Progress(console=Console(stderr=True)) as progress:
        task = progress.add_task("checking", total=len(runs) * len(decoders))
        for sampling in runs.values():
            expected = [pairs.continuation(plain, text, sampling, max_tokens) for text in texts]
            for way, decoder in decoders.items():
                found = [pairs.continuation(decoder, text, sampling, max_tokens) for text in texts]
                different[way].append(sum(mine != theirs for mine, theirs in zip(found, expected, strict=True)))
                progress.advance(task)
    title = f"{len(texts)} prompts, {max_tokens} tokens each: sequences that differ from plain decoding"
    table = Table("drafted by", *runs, title=title, box=None)
    for way, counts in different.items():
        table.add_row(way, *map(str, counts))
    _console().print(table)
    if any(map(any, different.values())):
        raise typer.Exit(1)


@app.command(cls=Command)
def parts(
    model: ModelName = "",
    draft: DraftName = "auto",
    quantization: Quantization = "Q8_0",
    prompts: Prompts = None,
    limit: Limit = None,
    max_tokens: MaxTokens = 96,
    nodes: Annotated[int, typer.Option(min=1, help="Nodes of a draft tree.", callback=check)] = 12,
    warm: Warm = 0,
) -> None:
    """Measure what each part of drafting adds: tokens per step, passes of the draft, acceptance.

    With a draft model the parts are n-grams that guide it, and shared noise. Without one they are n-grams, their table,
    recycled candidates and the draft head.

    Example: pystaged bench parts --limit 20

    Example: pystaged bench parts --model smollm2 --prompts question.jsonl --limit 36 --warm 50
    """
    bundle, texts = _open(model, draft, quantization, prompts, limit and limit + warm)
    earlier, texts = texts[:warm], texts[warm:]
    if not texts:
        raise typer.BadParameter(f"--warm {warm} leaves no prompts to measure; choose fewer")
    session = Session(bundle.target)
    title = f"{len(texts)} prompts, {max_tokens} tokens each, trees of {nodes} nodes"
    passes = ["draft passes per token"] if bundle.draft else []
    table = Table("", "tokens per step", *passes, "acceptance at depth 1, 2, ...", title=title, box=None)
    for mode, sampling in pairs.MODES.items():
        for way, drafter in pairs.parts(bundle, session, nodes).items():
            decoder, options = Decoder(session, drafter), (sampling, max_tokens, bundle.tokenizer.is_end)
            if drafter.recycled:
                pairs.run_texts(decoder, earlier, *options)
            stats = pairs.run_texts(decoder, texts, *options)
            passes = [f"{stats.drafters['draft'].passes / stats.new_tokens:.3f}"] if bundle.draft else []
            depths = " ".join(f"{rate:.2f}" for rate in stats.acceptance_at_depth[:8])
            table.add_row(f"{mode}: {way}", f"{stats.tokens_per_step:.3f}", *passes, depths)
    _console().print(table)


def _open(
    model: str, draft: str, quantization: str, prompts: Path | None, limit: int | None
) -> tuple[Bundle, list[NDArray[np.int32]]]:
    """A target with its draft, and the prompts' tokens."""
    path = _model_file(model, quantization)
    bundle = Bundle(path, models.find_draft(model, draft_name(draft), report), 0, report)
    return bundle, [prompt.tokens for prompt in choose(path, prompts, limit)[1]]


def _model_file(model: str, quantization: str) -> Path:
    """The file of a model, made first if necessary."""
    _check_type(model, quantization)
    return models.find(model, quantization.upper(), report)


def _check_type(model: str, quantization: str) -> None:
    with usage():
        models.check_type(model, quantization.upper())


def _console() -> Console:
    """A console for standard output, wide enough for the tables if that is not a terminal."""
    console = Console(highlight=False)
    return console if console.is_terminal else Console(highlight=False, width=_WIDE)


def _numbers(option: str, given: str, least: int, most: int = 2**31 - 1) -> list[int]:
    """Parse an option's numbers."""
    try:
        numbers = [int(word) for word in given.split(",")]
    except ValueError:
        raise typer.BadParameter(f"{option} takes numbers, as 1,16,256; not '{given}'") from None
    for number in numbers:
        if not least <= number <= most:
            raise typer.BadParameter(f"{option} takes numbers from {least} to {most}, not {number}")
    return numbers


def _rates(accept: str) -> list[float]:
    """Parse the numbers of --accept."""
    try:
        rates = [float(word) for word in accept.split(",")]
    except ValueError:
        rates = []
    if not rates or not all(0 <= rate <= 1 for rate in rates):
        raise typer.BadParameter(f"--accept takes probabilities between 0 and 1, as 0.8,0.6,0.5; not '{accept}'")
    return rates


def _prices(given: str) -> dict[int, float]:
    """Parse --pass-ms; returns seconds by rows."""
    try:
        prices = {int(n): float(ms) / 1e3 for n, ms in (word.split(":") for word in given.split(","))}
    except ValueError:
        prices = {}
    seconds = [prices[n] for n in sorted(prices)]
    if not prices or min(prices) != 1 or not all(0 < each < math.inf for each in seconds) or seconds != sorted(seconds):
        raise typer.BadParameter(
            f"--pass-ms takes rows from 1 and milliseconds that do not fall, as 1:65,2:67,8:129; not '{given}'"
        )
    return prices
