"""`pystaged bench`: speed on this machine compared with other engines, and measurements of its parts."""

from __future__ import annotations

import json
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from shutil import get_terminal_size
from typing import Any

import numpy as np
import typer
from numpy.typing import NDArray

from pystaged.bench import methods, models, pairs
from pystaged.bench import passes as curve
from pystaged.bench import texts as texts_bench
from pystaged.bench.benchmark import BENCH, Benchmark
from pystaged.bench.prompts import choose, load_questions
from pystaged.cli.command import Command, Group
from pystaged.cli.console import draft_name, late_bar, print_table, progress_bars, report
from pystaged.cli.options import DEFAULT_MODEL, Adapts, Given, Json, check, option, takes, usage
from pystaged.loading import names
from pystaged.loading.bundle import Bundle
from pystaged.loading.costs import Costs
from pystaged.options.table import LOADING


class _Parts(Group):
    hint = " Name a model with --model"


app = typer.Typer(cls=_Parts)

_WIDE = 160  # characters, if the output is not a terminal
_MOST_TEXTS = 1024  # sequences at once


def _takes(*options: str, tokens: str = "New tokens per prompt.", least: int = 1, default: int = 96) -> Adapts:
    """Replace a command's parameter `given` by options of Benchmark, and the number of threads; tokens, least and
    default are the help, bound and default of max_tokens."""
    model = {"default": "", "callback": lambda name: name or names.default_model(report), "show_default": DEFAULT_MODEL}
    model["metavar"] = "MODEL"
    limit = {"help": tokens, "min": least, "default": default, "callback": check}
    folder = {"metavar": "FOLDER"}
    return takes({name: (LOADING | BENCH)[name] for name in options}, model=model, max_tokens=limit, llama_cpp=folder)


@app.callback(invoke_without_command=True)
@_takes(*BENCH, "num_threads", tokens=BENCH["max_tokens"].help, least=2, default=128)
def bench(
    context: typer.Context,
    given: Given,
    out: Path | None = option(None, "Folder for report.md and report.json."),
    as_json: Json = False,
) -> None:
    """Measure speed on this machine: our decoding methods beside other engines (baselines), by category of prompts.

    All run in turn with the same files and prompts, greedily and at T = 1, top-k 50. Ctrl-C ends the measurement early
    and reports the results so far.

    Example: pystaged bench --model smollm2 --minutes 10

    Example: pystaged bench --model pair --llama-cpp ~/llama.cpp/build/bin --out report
    """
    if context.invoked_subcommand:
        sources = [context.get_parameter_source(name) for name in context.params]
        if any(source and source.name == "COMMANDLINE" for source in sources):
            raise typer.BadParameter(f"write the options of {context.invoked_subcommand} after its name")
        return
    given["llama_cpp"] = [*map(Path, given.get("llama_cpp", []))]
    _check(given)
    with usage():
        methods.baselines({"draft": None if given["draft"] == "none" else ""}, given["llama_cpp"], given["baselines"])
    if out:
        out.mkdir(parents=True, exist_ok=True)  # fails now, not after the measurements
    given |= {"draft": draft_name(given["draft"]), "quantization": given["quantization"].upper()}
    benchmark = Benchmark(**given)
    models.find(benchmark.model, benchmark.quantization, report)
    models.find_draft(benchmark.model, benchmark.draft, report)
    with late_bar("{task.fields[doing]}", "{task.elapsed:.0f} s{task.fields[about]}", doing="", about="") as (show, _):

        def progress(doing: str, done: float, left: float) -> None:
            words = f", about {left / 60:.0f} min left" if left >= 90 else f", about {left:.0f} s left" if left else ""
            show(done, done + left if left else None, doing=doing, about=words)

        found = benchmark.run(progress)
    if out:
        report(f"{', '.join(found.write(out))} are in {out}")
    _show(found, found.terminal(get_terminal_size((_WIDE, 0)).columns), as_json)
    if not found.outcome.complete:
        report("stopped early: these are the results until then")
        raise typer.Exit(130)


@app.command(cls=Command)
@_takes("model", "quantization", "num_threads")
def passes(
    given: Given,
    context: str | None = option(None, "Tokens before the rows, one length or several; as 256,4096,16384."),
    repeats: int = option(11, "Timed passes per row count and context.", min=1),
    baseline: bool = option(True, "Measure llama.cpp too."),
    again: bool = option(False, "Measure the costs anew with which drafting reckons, and keep them.", "--again"),
    as_json: Json = False,
) -> None:
    """Time one pass over n = 1 to 32 rows after a context of 256 tokens (--context sets others): what verifying n - 1
    guesses costs; and a prompt as long as the context.

    Example: pystaged bench passes --model random --type Q4_0

    Example: pystaged bench passes --model llama1b --type Q4_K_M --context 256,4096,16384
    """
    contexts = _numbers("--context", context, 0) if context is not None else []
    path = _model_file(given)
    theirs = ", then llama.cpp's with repacked and with plain weights" if baseline else ""
    report(f"timing passes of {path.name} over 1 to {curve.ROWS[-1]} rows, {repeats} times{theirs}")
    with progress_bars() as progress:
        found = curve.measure(
            path,
            contexts=contexts,
            repeats=repeats,
            num_threads=given["num_threads"],
            baseline=baseline,
            cost=lambda loaded: Costs(report).of(path, "cpu", loaded, again=again),
            progress=progress,
        )
    _show(found, [found.table()], as_json)


@app.command(cls=Command)
@_takes(
    "model", "draft", "quantization", "prompts", "max_tokens", "num_threads", tokens="New tokens per text.", least=2
)
def texts(
    given: Given,
    counts: str = option("1,2,4,8,16", "Sequences at once: one number or several.", "--texts"),
    llama_cpp: Path | None = option(None, "Folder of a llama.cpp build, to measure its llama-server."),
    as_json: Json = False,
) -> None:
    """Decode many sequences at once: tokens per second of all and of each and time to the first token, with and without
    drafting, compared with llama-server's parallel slots.

    Example: pystaged bench texts --model llama1b --texts 1,8 --llama-cpp ~/llama.cpp/build/bin
    """
    numbers = _numbers("--texts", counts, 1, _MOST_TEXTS)
    server = methods.find_server(llama_cpp) if llama_cpp else None
    path = _model_file(given)
    _, chosen = choose(path, given.get("prompts"), max(numbers))
    found = texts_bench.measure(
        path,
        models.find_draft(given["model"], draft_name(given["draft"]), report),
        [prompt.tokens for prompt in chosen],
        numbers,
        max_tokens=given["max_tokens"],
        threads=given["num_threads"],
        llama_server=server,
        progress=report,
    )
    _show(found, [found.table()], as_json)


@app.command(cls=Command)
@_takes("model", "draft", "quantization", "prompts", "limit", "max_tokens")
def lossless(given: Given) -> None:
    """Check that each way of drafting gives plain decoding's output. Exits with status 1 if one does not.

    Example: pystaged bench lossless --limit 10

    Example: pystaged bench lossless --model smollm2 --draft smollm2 --limit 3
    """
    bundle, texts = _open(given, given.get("limit"))
    with progress_bars() as progress:
        table, is_same = pairs.lossless(bundle, texts, given["max_tokens"], partial(progress, "checking"))
    print_table(table)
    raise typer.Exit(0 if is_same else 1)


@app.command(cls=Command)
@_takes("model", "draft", "quantization", "prompts", "limit", "max_tokens", "warm")
def parts(
    given: Given,
    costs: float = option(10, "How many times cheaper a pass of the draft is than the target's.", min=1),
) -> None:
    """Count what each part of drafting adds: tokens per step, passes of the draft, acceptance, and the speed over plain
    decoding that follows if passes have the costs T(n) = 1 + 0.012 (n - 1) of the target and (1 + 0.02 (n - 1)) / COSTS
    of the draft.

    With a draft model the parts are n-grams, the draft, and one tree of both. Without one they are n-grams, their
    table, recycled candidates and a draft that reads hidden states.

    Example: pystaged bench parts --limit 20 --costs 13

    Example: pystaged bench parts --model smollm2 --prompts question.jsonl --limit 36 --warm 50
    """
    warm, limit = given["warm"], given.get("limit")
    bundle, texts = _open(given, limit and limit + warm)
    if len(texts) <= warm:
        raise typer.BadParameter(f"--warm {warm} leaves no prompts to measure; choose fewer")
    print_table(pairs.gains(bundle, texts[:warm], texts[warm:], given["max_tokens"], costs))


def _open(given: Given, limit: int | None) -> tuple[Bundle, list[NDArray[np.int32]]]:
    """A target with its draft, and the tokens of at most so many prompts."""
    path = _model_file(given)
    draft = models.find_draft(given["model"], draft_name(given["draft"]), report)
    bundle = Bundle(path, draft=draft, report=report, recycle=False)
    return bundle, [prompt.tokens for prompt in choose(path, given.get("prompts"), limit)[1]]


def _check(given: Given) -> None:
    """Refuse a type or a file of prompts that cannot be used, before a model is made."""
    with usage():
        models.check_type(given["model"], given["quantization"].upper())
    if "prompts" in given:
        load_questions(given["prompts"])


def _model_file(given: Given) -> Path:
    """The file of a model, made first if necessary."""
    _check(given)
    return models.find(given["model"], given["quantization"].upper(), report)


def _show(found: Any, parts: Iterable[Any], as_json: bool) -> None:
    """Print results: `parts` of them for people, or all as JSON."""
    if as_json:
        typer.echo(json.dumps(found.to_dict()))
        return
    for part in parts:
        print_table(part)


def _numbers(option: str, given: str, least: int, most: int = 2**31 - 1) -> list[int]:
    """Parse an option's numbers."""
    try:
        numbers = [int(word) for word in given.split(",")]
    except ValueError:
        numbers = [least - 1]
    if not all(least <= number <= most for number in numbers):
        raise typer.BadParameter(f"{option} takes numbers from {least} to {most}, as 1,16,256; not {given!r}")
    return numbers
