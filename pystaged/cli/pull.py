"""`pystaged pull`: get a model from the hub."""

from __future__ import annotations

import typer

from pystaged.cli.console import progress_bars, report
from pystaged.cli.options import check_type, option
from pystaged.loading import hub, names
from pystaged.loading.metadata import FILE_TYPES
from pystaged.loading.quantize import DEFAULT_TYPE
from pystaged.platform.process import orderly_end


def pull(
    model: str = typer.Argument(metavar="MODEL", help="Hub id: owner/name, owner/name:TYPE or owner/name:FILE.gguf."),
    quantization: str = option(
        "", f"One of {', '.join(FILE_TYPES)}; of a checkpoint {DEFAULT_TYPE}.", "--type", callback=check_type
    ),
) -> None:
    """Download a model into the cache and print its path. GGUF files are taken as they are; checkpoints
    are converted and quantized.

    Example: pystaged pull openai-community/gpt2-large --type q8_0
    """
    if names.packaged_name(model) in names.PACKAGED:
        path = names.resolve(model)
        report(f"{model} is there already, in a package")
    else:
        with orderly_end(), progress_bars() as progress:
            path = hub.pull(model, quantization, progress)
    typer.echo(path)
