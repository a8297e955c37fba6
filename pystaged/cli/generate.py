"""`pystaged generate`: continue a prompt."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Group
from rich.table import Table
from rich.text import Text as Styled

import pystaged
from pystaged.chat.format import begin
from pystaged.cli.console import errors, open_engine, reading_bar, report
from pystaged.cli.options import (
    LIMIT_HELP,
    Color,
    Colors,
    GrammarOptions,
    Json,
    LoadOptions,
    ModelName,
    SamplingOptions,
    ShowTree,
    Stop,
    StopLoops,
    System,
    Think,
    grouped,
    spelled,
    token_limit,
    usage,
)
from pystaged.cli.painting import show, summary
from pystaged.cli.prompts import Asked, argument, read_prompts
from pystaged.cli.several import write_in_order
from pystaged.config import GenerationConfig
from pystaged.files import destination
from pystaged.loading.names import default_model
from pystaged.options import TEXT
from pystaged.recommended import ANSWER_TOKENS, LOOP_WORDS, described
from pystaged.result import GenerationResult, TokenLogprob
from pystaged.sequence import Sequence as Text
from pystaged.stages import shown_stages
from pystaged.streams import Stream
from pystaged.text import Prompt


@grouped
def generate(
    prompt: Annotated[
        str | None, typer.Argument(help="Text to continue; - reads it from standard input.", show_default=False)
    ] = None,
    *,
    prompts: Annotated[
        Path | None,
        typer.Option(
            help="Continue the prompts of a file or - for standard input: one per line, in a .jsonl file an object "
            "with a 'prompt' or, for --chat, 'messages'."
        ),
    ] = None,
    n: Annotated[
        int | None,
        typer.Option("--n", min=1, help="Number of texts per prompt, with consecutive seeds (-n is --max-tokens)."),
    ] = None,
    model: ModelName = None,
    max_tokens: Annotated[
        int | None,
        spelled("max_tokens", min=-1, callback=token_limit, help=f"{LIMIT_HELP}; 128 unless given, 2048 with --chat."),
    ] = None,
    chat: Annotated[
        bool, typer.Option("--chat", help="Answer the prompt as a question, with the model's chat template.")
    ] = False,
    system: System = "",
    think: Think = None,
    suffix: Annotated[
        str,
        typer.Option(
            help="Write the text between the prompt and this, with a model trained for it, such as Qwen2.5-Coder."
        ),
    ] = "",
    stop: Stop = None,
    stop_loops: StopLoops = None,
    grammars: GrammarOptions,
    sampling: SamplingOptions,
    loading: LoadOptions,
    speculate: Annotated[bool, spelled("speculate")] = True,
    color: Colors = Color.NONE,
    show_tree: ShowTree = False,
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="Show statistics of each stage.")] = False,
    as_json: Json = False,
    receipt: Annotated[
        Path | None,
        typer.Option(
            help="Write a receipt, with which `pystaged verify FILE` generates the text again and compares.",
            show_default=False,
            metavar="FILE",
        ),
    ] = None,
    logprobs: Annotated[int | None, spelled("logprobs", help=f"With --json. {TEXT['logprobs'].help}")] = None,
) -> None:
    """Continue a prompt, or several at once.

    The text goes to standard output, everything else to standard error. Several texts come in order, each under a line
    that names it; with --json each is an object on a line of its own.

    Example: pystaged generate "def fibonacci(n):" --max-tokens 64

    Example: pystaged generate "def fibonacci(n):" --color stages --show-tree

    Example: pystaged generate --chat "Why is the sky blue?" --model smollm2

    Example: pystaged generate --chat "Invent a person." --json-schema person.json --model smollm2

    Example: pystaged generate --prompts prompts.txt --n 4 --temperature 1 --json > texts.jsonl

    Example: pystaged generate "def fibonacci(n):" --receipt fibonacci.receipt

    Example: pystaged generate - --temperature 0.8 --top-p 0.95 --seed 7 < prompt.txt > text.txt
    """
    # Before a model is loaded, which may take a while.
    constraint = grammars.options()
    with usage():
        config = GenerationConfig(
            max_tokens=(ANSWER_TOKENS if chat else 128) if max_tokens is None else max_tokens,
            stop=stop or (),
            stop_loops=chat if stop_loops is None else stop_loops,
            speculate=speculate,
            sampling=sampling.config(),
            logprobs=logprobs,
            **constraint,
        )
    if (prompt is None) == (prompts is None):
        raise typer.BadParameter("give either a prompt or --prompts with a file of them")
    several = prompts is not None or n is not None
    if several and (color is not Color.NONE or show_tree):
        raise typer.BadParameter("--color and --show-tree show one text, not several")
    if several and receipt:
        raise typer.BadParameter(
            "--receipt saves one text, not several; in Python each result has a receipt: result.receipt"
        )
    if not chat and (system or think is not None):
        raise typer.BadParameter("--system and --think are for --chat")
    if chat and suffix:
        raise typer.BadParameter("--suffix is for prompts that are continued, not for --chat")
    if logprobs is not None and not as_json:
        raise typer.BadParameter("--logprobs needs --json")
    if receipt == Path("-"):
        raise typer.BadParameter("--receipt names a file; standard output has the text")
    if receipt:
        destination(receipt)
    asked = [argument(prompt or "")] if prompts is None else read_prompts(prompts)
    for each in asked:
        if each.messages and not chat:
            raise each.about(ValueError("messages are answered with --chat"))
    if chat:
        begin()
    name = default_model(report) if model is None else model
    with open_engine(name, loading) as engine:
        if chat:
            answered = sampling.config(engine.recommended_sampling)
            config = replace(config, sampling=answered, stop=(*config.stop, *engine.chat_format.stop))
            seed = "" if answered.is_greedy else f", seed {answered.seed}"
            report(f"{name}: {described(answered)}{seed}")
        if n and n > 1 and config.sampling.is_greedy:
            report("at temperature 0 all texts of a prompt are the same; --temperature 0.8 makes others possible")

        def text_of(each: Asked) -> Prompt:
            if suffix:
                return engine.infill_prompt(each.prompt, suffix, max_tokens=config.max_tokens)
            return _question(engine, each, system, think) if chat else each.prompt

        if several:
            sequences = _sequences(engine, asked, text_of, config)
            _write_several(engine, asked, sequences, n or 1, chat=chat, as_json=as_json, verbose=verbose)
            return
        with reading_bar() as progress:
            (sequence,) = _sequences(engine, asked, text_of, replace(config, progress=progress))
            stream = Stream(engine.runtime.scheduler, sequence)
            if as_json:
                _write_json(stream, asked[0], chat=chat)
            else:
                show(stream, engine.tokenizer, color, show_tree=show_tree, wrap=chat)
        result = stream.result
        if receipt:
            result.receipt.save(receipt)
        if _fills_context(engine, result):
            _tell_full(engine)
    if as_json:
        return
    errors.print(summary(result.stats, color))
    if result.finish_reason == "loop":
        report(LOOP_WORDS.format("--no-stop-loops"))
    elif chat and max_tokens is None and result.finish_reason == "length":
        report(f"cut at {len(result.tokens)} tokens; --max-tokens allows more")
    if verbose:
        errors.print(stats_table(result.stats))
        read = result.stats.prompt_tokens - result.stats.reused_tokens
        report(f"read {read} tokens of the prompt in {result.stats.prefill_seconds:.2f} seconds; seed {result.seed}")


def _question(engine: pystaged.Engine, asked: Asked, system: str, think: bool | None) -> Prompt:
    """A question as a prompt, by the model's chat template."""
    messages = asked.messages or [{"role": "user", "content": asked.prompt}]
    if system:
        if messages[0].get("role") == "system":
            raise ValueError("the messages have a system message, too; leave --system out")
        messages = [{"role": "system", "content": system}, *messages]
    options = {} if think is None else {"enable_thinking": think}
    return engine.chat_format.encode(messages, template_options=options)


def _sequences(
    engine: pystaged.Engine,
    asked: Sequence[Asked],
    text_of: Callable[[Asked], Prompt],
    config: GenerationConfig,
) -> list[Text]:
    """Prepare a sequence for each prompt. Raises ValueError that names an invalid prompt."""
    found: list[Text] = []
    for each in asked:
        try:
            found.append(engine.runtime.sequence(text_of(each), config))
        except (ValueError, TypeError) as error:
            raise each.about(error) from None
    return found


def _write_json(stream: Stream, asked: Asked, *, chat: bool) -> None:
    """Write the result as JSON; after Ctrl-C, the part that there is."""
    try:
        stream.finish()
    except KeyboardInterrupt:
        stream.close()
        if not stream.result.tokens:
            raise
        typer.echo(_as_json(asked, stream.result, chat=chat))
        raise
    typer.echo(_as_json(asked, stream.result, chat=chat))


def _write_several(
    engine: pystaged.Engine,
    asked: Sequence[Asked],
    sequences: Sequence[Text],
    n: int,
    *,
    chat: bool,
    as_json: bool,
    verbose: bool,
) -> None:
    """Write n texts for each prompt in order, each as soon as it is done."""

    num_cut = 0

    def shown(number: int, result: GenerationResult) -> str:
        nonlocal num_cut
        num_cut += _fills_context(engine, result)
        of = asked[number // n]
        if as_json:
            return _as_json(of, result, chat=chat)
        return f"==> {number + 1}: {of.named()}, seed {result.seed} <==\n{result.text}\n"

    begin = time.monotonic()
    total = n * len(sequences)
    tokens = write_in_order(engine.runtime.scheduler, engine.runtime.repeated(sequences, n), total, shown)
    if num_cut:
        _tell_full(engine, f" in {num_cut} of {total} texts")
    if as_json:
        return
    seconds = time.monotonic() - begin
    texts = f"{total} text{'s' if total > 1 else ''}"
    report(f"{texts}, {tokens} tokens in {seconds:.1f} seconds, {tokens / seconds:.1f} per second together")
    if verbose:
        passes = engine.passes
        report(
            f"{passes.passes} passes of the target in {passes.seconds:.2f} seconds; on average "
            f"{passes.texts_per_pass:.1f} texts and {passes.rows_per_pass:.1f} rows each; "
            f"{passes.guess_share:.0%} of the rows were guesses"
        )


def _fills_context(engine: pystaged.Engine, result: GenerationResult) -> bool:
    return result.finish_reason == "length" and result.stats.prompt_tokens + len(result.tokens) > engine.n_ctx


def _tell_full(engine: pystaged.Engine, where: str = "") -> None:
    """Report that the context is full, and how to get more."""
    most = engine.model.max_context
    more = f"; --n-ctx allows more, up to {most}" if most > engine.n_ctx else ""
    report(f"the context of {engine.n_ctx} tokens is full{where}{more}")


def _as_json(asked: Asked, result: GenerationResult, *, chat: bool) -> str:
    """A prompt and its result as a line of JSON."""
    fields = {
        **asked.fields(),
        "text": result.text,
        "tokens": result.tokens,
        "stages": [stage.name.lower() for stage in result.stages],
        "finish_reason": result.finish_reason,
        "seed": result.seed,
        "stats": result.stats.to_dict(),
    }
    if result.logprobs is not None:
        fields["logprobs"] = [_logprob(each) | {"top": [*map(_logprob, each.top)]} for each in result.logprobs]
    return json.dumps(fields | {"message": result.message} if chat else fields)


def _logprob(found: TokenLogprob) -> dict[str, Any]:
    return {"token": found.token, "text": found.text, "logprob": found.logprob}


def stats_table(stats: pystaged.GenerationStats) -> Group:
    """A table of what each stage did for a sequence, and further figures below it."""
    table = Table(box=None, pad_edge=False)
    for heading in ("stage", "drafted", "accepted", "emitted", "passes", "seconds"):
        table.add_column(heading, justify="left" if heading == "stage" else "right")
    for name in (stage.name.lower() for stage in shown_stages(stats)):
        stage, work = stats.stages[name], stats.drafters.get(name)
        passes = stats.steps if name == "target" else work.passes if work else 0
        seconds = stats.target_seconds if name == "target" else work.seconds if work else 0.0
        table.add_row(name, str(stage.drafted), str(stage.accepted), str(stage.emitted), str(passes), f"{seconds:.3f}")
    depths = " ".join(f"{rate:.2f}" for rate in stats.acceptance_at_depth)
    more = (
        f"acceptance at depth 1, 2, ...: {depths or '-'}; weight bytes per token relative to plain decoding: "
        f"{stats.relative_weight_bytes:.2f}; share of time in Python: {stats.python_share:.1%}; "
        f"rows per pass: {stats.rows_per_pass:.1f}; guesses among this text's rows: {stats.guess_share:.0%}"
    )
    return Group(table, Styled(more, "dim"))
