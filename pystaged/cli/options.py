"""Options that several commands have."""

from __future__ import annotations

from typing import Annotated

import typer

from pystaged.cli.painting import Color

ModelName = Annotated[str, typer.Option("--model", help="Path of a GGUF file, name in the cache, hub id, or 'house'.")]
DraftName = Annotated[
    str,
    typer.Option(
        "--draft", help="Draft with the same vocabulary, named like the model; 'none' for n-grams alone, 'auto'."
    ),
]
Device = Annotated[
    str, typer.Option(help="Where the target runs: cpu, metal, gpu, auto, rpc:HOST:PORT,..., or a name from info.")
]
DraftDevice = Annotated[str, typer.Option(help="Where the draft runs, likewise.")]
MaxTokens = Annotated[int, typer.Option(help="New tokens at most.")]
Temperature = Annotated[float, typer.Option(help="0 always takes the likeliest token.")]
TopK = Annotated[int, typer.Option(help="Keep this many of the likeliest tokens; 0 keeps all.")]
TopP = Annotated[float, typer.Option(help="Keep the fewest tokens that have this probability together.")]
MinP = Annotated[float, typer.Option(help="Keep tokens at least this likely relative to the likeliest.")]
Seed = Annotated[int, typer.Option(help="Same seed, same text.")]
Threads = Annotated[int, typer.Option(help="0 takes one per physical core.")]
Colors = Annotated[Color, typer.Option("--color", help="Paint each token by who proposed it; in terminals only.")]
ShowTree = Annotated[bool, typer.Option("--show-tree", help="Draw each tree, its accepted path bright.")]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object instead.")]
