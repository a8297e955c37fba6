"""The texts of `pystaged generate`: one as it comes, several in order."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import typer

from pystaged.chat.format import begin
from pystaged.chat.prompts import Asked, read_prompts
from pystaged.cli.console import errors, late_bar, open_engine, read_prompt, read_question, reading_bar, report
from pystaged.cli.options import Given, usage
from pystaged.cli.painting import fills_context, of_context, show, stats_table, summary, tell_cut
from pystaged.decoding.readers import Stream, pieces
from pystaged.decoding.text import Text
from pystaged.engine import Engine
from pystaged.loading.names import default_model
from pystaged.options.config import GenerationConfig
from pystaged.options.recommended import ANSWER_TOKENS, described
from pystaged.options.table import SAMPLING, TEXT
from pystaged.platform.ctrl_c import Interrupts
from pystaged.platform.files import destination
from pystaged.result import GenerationResult
from pystaged.sampling.text import Prompt


def write(
    given: Given,
    model: str | None,
    prompt: str | None,
    prompts: Path | None,
    n: int | None,
    suffix: str,
    receipt: Path | None,
    verbose: bool,
    as_json: bool,
    chat: bool,
) -> None:
    """Run the command; see `generate`."""
    # Before a model is loaded, which may take a while.
    with usage():
        usual = {"max_tokens": ANSWER_TOKENS, "stop_loops": True} if chat else {}
        config = GenerationConfig(**usual | given.only([*TEXT, *SAMPLING]))
    if receipt:
        destination(receipt)
    read_one = read_question if chat else read_prompt
    asked = [Asked("", read_one(prompt or ""))] if prompts is None else read_prompts(prompts, report)
    for each in asked:
        if each.messages and not chat:
            raise each.about(ValueError("messages are answered with --chat"))
    if chat:
        begin()
    name, is_several = default_model(report) if model is None else model, prompts is not None or n is not None
    with open_engine(name, given) as engine:
        if receipt:
            engine.check_exact()
        if chat:
            answered = given.sampling(engine)
            config = replace(config, sampling=answered, stop=(*config.stop, *engine.chat_format.stop))
            seed = "" if answered.is_greedy else f", seed {answered.seed}"
            report(f"{name}: {described(answered)}{seed}")
        if n and n > 1 and config.sampling.is_greedy:
            report("at temperature 0 all texts of a prompt are the same; --temperature 0.8 makes others possible")

        def begun(each: Asked, config: GenerationConfig) -> Text:
            try:
                if suffix:
                    return engine.start(engine.infill_prompt(each.prompt, suffix, max_tokens=config.max_tokens), config)
                return engine.start(_question(engine, each, given) if chat else each.prompt, config)
            except (ValueError, TypeError) as error:
                raise each.about(error) from None

        if is_several:
            sequences = [begun(each, config) for each in asked]
            done = _write_several(engine, asked, sequences, n or 1, chat=chat, as_json=as_json, verbose=verbose)
        else:
            with reading_bar() as progress:
                stream = Stream(begun(asked[0], replace(config, progress=progress)))
                if as_json:
                    _write_json(stream, asked[0], chat=chat)
                else:
                    show(stream, given, wrap=chat)
            result = stream.result
            done = [result]
            if receipt:
                result.receipt.save(receipt)
            if not as_json:
                errors.print(summary(result.stats, paint=given.paints))
            is_usual = chat and "max_tokens" not in given
            tell_cut(engine, result, *([] if as_json else ["--no-stop-loops", "--max-tokens" if is_usual else ""]))
            if verbose and not as_json:
                stats = result.stats
                errors.print(stats_table(stats))
                read, seconds = stats.prompt_tokens - stats.reused_tokens, stats.prefill_seconds
                report(f"read {read} tokens of the prompt in {seconds:.2f} seconds; seed {result.seed}")
    if given.get("json_schema") is not None:
        for result in done:
            result.json()  # raises ValueError for one that is cut


def _question(engine: Engine, asked: Asked, given: Given) -> Prompt:
    """A question as a prompt, by the model's chat template."""
    messages = asked.conversation()
    if system := given["system"]:
        if messages[0].get("role") == "system":
            raise ValueError("the messages have a system message, too; leave --system out")
        messages = [{"role": "system", "content": system}, *messages]
    return engine.chat_format.encode(messages, template_options=given.of_template(), continues=True)


def _write_json(stream: Stream, asked: Asked, *, chat: bool) -> None:
    """Write the result as JSON; after Ctrl-C, the part that there is."""
    try:
        stream.finish()
    except KeyboardInterrupt:
        stream.close()
        if stream.result.tokens:
            typer.echo(_as_json(asked, stream.result, chat=chat))
        raise
    typer.echo(_as_json(asked, stream.result, chat=chat))


def _write_several(
    engine: Engine, asked: list[Asked], sequences: list[Text], n: int, *, chat: bool, as_json: bool, verbose: bool
) -> list[GenerationResult]:
    """Write n texts for each prompt in order, each as soon as it is done."""
    done = list[GenerationResult]()

    def shown(number: int, result: GenerationResult) -> str:
        done.append(result)
        of = asked[number // n]
        if as_json:
            return _as_json(of, result, chat=chat)
        return f"==> {number + 1}: {of.named()}, seed {result.seed} <==\n{result.text}\n"

    begin, total = time.monotonic(), n * len(sequences)
    tokens = write_in_order(engine.repeated(sequences, n), total, shown)
    seconds = time.monotonic() - begin
    if not as_json:
        texts = f"{total} text{'s' if total > 1 else ''}"
        report(f"{texts}, {tokens} tokens in {seconds:.1f} seconds, {tokens / seconds:.1f} per second together")
    if num_full := sum(fills_context(engine, each) for each in done):
        report(of_context(engine, f"is full in {num_full} of {total} texts"))
    if verbose and not as_json:
        report(str(engine.passes))
    return done


def _as_json(asked: Asked, result: GenerationResult, *, chat: bool) -> str:
    """A prompt and its result as a line of JSON."""
    return json.dumps(asked.fields() | result.to_dict() | ({"message": result.message} if chat else {}))


def write_in_order(sequences: Iterable[Text], total: int, shown: Callable[[int, GenerationResult], str]) -> int:
    """Generate sequences together, and write each to standard output as soon as it and those before it are done. After
    an error, which is raised again, or Ctrl-C the finished ones are written. Returns the number of tokens of all.

    shown: called with a sequence's number, from 0, and its result; returns the text to write.
    """
    numbers, done = dict[Text, int](), dict[int, GenerationResult]()  # of sequences not yet written
    num_written = tokens = 0

    def begun() -> Iterator[Text]:
        for number, sequence in enumerate(sequences):
            numbers[sequence] = number
            yield sequence

    def write(number: int) -> None:
        nonlocal num_written
        with Interrupts():  # completely, and once
            hide()
            typer.echo(shown(number, done.pop(number)))
            num_written += 1

    done_of, and_tokens = "{task.completed} of {task.total} texts are done", "{task.fields[tokens]} tokens"
    with late_bar(done_of, and_tokens, tokens=0) as (count, hide):
        try:
            with closing(pieces(begun())) as said:
                for sequence, piece in said:
                    if piece is None:
                        done[numbers.pop(sequence)] = sequence.result()
                    else:
                        tokens += len(piece.tokens)
                    while num_written in done:
                        write(num_written)
                    count(num_written + len(done), total, tokens=tokens)
        except BaseException:
            for number in sorted(done):
                write(number)
            report(f"{num_written} of {total} texts are done")
            raise
    return tokens
