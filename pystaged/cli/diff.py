"""`pystaged diff`: two models on the same prompts."""

from __future__ import annotations

import json
from dataclasses import asdict
from functools import partial
from pathlib import Path
from textwrap import indent

import typer
from rich.table import Table

import pystaged
from pystaged.bench.prompts import in_order
from pystaged.bench.report import markdown_table
from pystaged.cli.console import open_engine, print_table, progress_bars, report
from pystaged.cli.options import ContextLength, Given, Json, KeysAndValues, Threads, one_of, option
from pystaged.platform.files import destination, whole_file
from pystaged.receipts.comparison import WORDED, compare, figure_rows, figures, text_rows


def diff(
    a: str = typer.Argument(help="The model that writes the texts, named as in generate.", metavar="A"),
    b: str = typer.Argument(help="The model that is compared with it; may be the same.", metavar="B"),
    prompts: Path | None = option(None, "File of prompts as in generate; else the packaged ones."),
    limit: int = option(20, "Maximum number of prompts.", min=1),
    max_tokens: int = option(64, "Maximum tokens that A writes to a prompt; 0 compares the prompts themselves.", min=0),
    kv: KeysAndValues = "f16",
    kv_b: str = option("", "Type of B's KV cache; by default that of A's, --kv.", **one_of("", "f16", "q8_0")),
    n_ctx: ContextLength = 0,
    out: Path | None = option(None, "Also write a page in Markdown, with the prompts, to this file."),
    as_json: Json = False,
    threads: Threads = 0,
) -> None:
    """Compare two models, quantizations or KV types that have one vocabulary.

    A continues prompts greedily (it answers messages in its chat format), and both models evaluate what it wrote. Shown
    are where B's greedy text would differ or end, how often both find the same token likeliest, the Kullback-Leibler
    divergence in nats, and the perplexities of A's text; with ten texts or more also 95 % intervals by the bootstrap.

    Example: pystaged diff model.Q8_0.gguf model.Q4_K_M.gguf

    Example: pystaged diff smollm2 smollm2 --kv-b q8_0 --limit 10
    """
    if out:
        destination(out)  # fails now, not after the comparison

    def load(name: str, kv: str, draft: str) -> pystaged.Engine:
        return open_engine(name, Given(draft=draft, n_ctx=n_ctx, kv=kv, num_threads=threads, recycle=False))

    with load(a, kv, "auto") as first, load(b, kv_b or kv, "none") as second, progress_bars() as progress:
        asked = in_order(first, prompts, limit, report)
        texts = compare(first, second, asked, max_tokens, partial(progress, "comparing"))
        found = figures(texts)
        tables = {"": figure_rows(found), "Each text:": text_rows(texts, first.tokenizer)}
        read = {text.number: first.tokenizer.decode(asked[text.number], special=True) for text in texts}
    conditions = {
        "a": a,
        "b": b,
        "kv_a": kv,
        "kv_b": kv_b or kv,
        "prompts": str(prompts or "packaged"),
        "max_tokens": max_tokens,
        "tokens": sum(len(text.tokens) for text in texts),
        "pystaged": pystaged.__version__,
    }
    title = f"A: {a}, kv {kv}; B: {b}, kv {kv_b or kv}; texts: {len(texts)}, tokens: {conditions['tokens']}"
    if as_json:
        described = [text.to_dict() for text in texts]
        typer.echo(json.dumps(conditions | {"figures": [asdict(each) for each in found], "texts": described}))
    else:
        for heading, (headings, *rows) in tables.items():
            table = Table(*headings, box=None, pad_edge=False, title=heading or title, title_justify="left")
            for row in rows:
                table.add_row(*row)
            print_table(table)
    if out:
        # Indented, Markdown leaves the prompts as they are.
        shown = [f"## Text {number + 1}\n\n{indent(text, '    ', lambda _: True)}" for number, text in read.items()]
        pages = ["\n".join(markdown_table(headings, rows, WORDED)) for headings, *rows in tables.values()]
        with whole_file(out) as part:
            part.write_text("\n\n".join([f"# {title}", *pages, *shown]) + "\n", "utf-8")
