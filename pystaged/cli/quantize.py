"""`pystaged quantize`: a model in another type."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from pystaged.cli.console import errors, progress_bars
from pystaged.cli.options import check_type
from pystaged.loading import names
from pystaged.loading.file_types import FILE_TYPES
from pystaged.loading.quantize import DEFAULT_TYPE, quantize_checkpoint
from pystaged.loading.quantize import quantize as quantize_file
from pystaged.process import orderly_end


def quantize(
    source: Annotated[
        str,
        typer.Argument(help="A model as in generate, or the folder of a checkpoint (safetensors).", metavar="IN"),
    ],
    out: Annotated[Path, typer.Argument(help="GGUF file to write; a link is followed.")],
    quantization: Annotated[
        str, typer.Option("--type", help=f"One of {', '.join(FILE_TYPES)}.", callback=check_type)
    ] = DEFAULT_TYPE,
) -> None:
    """Write a model in another type, with llama.cpp's quantizer. A folder is converted first.

    Example: pystaged quantize gpt2.F16.gguf gpt2.Q4_0.gguf --type q4_0
    """
    with orderly_end(), progress_bars() as progress:
        if Path(source).is_dir():
            quantize_checkpoint(Path(source), out, quantization, progress=progress)
        else:
            quantize_file(names.resolve(source, progress), out, quantization, progress=progress)
    errors.print(f"{out}: {out.stat().st_size / 1e6:.1f} MB", style="dim", markup=False)
