"""`pystaged quantize`: a model in another type."""

from __future__ import annotations

from pathlib import Path

import typer

from pystaged.cli.console import errors, progress_bars
from pystaged.cli.options import check_type, option
from pystaged.loading import names
from pystaged.loading.metadata import FILE_TYPES
from pystaged.loading.quantize import DEFAULT_TYPE, quantize_checkpoint
from pystaged.loading.quantize import quantize as quantize_file
from pystaged.platform.files import destination
from pystaged.platform.process import orderly_end


def quantize(
    source: str = typer.Argument(help="A model as in generate, or the folder of a checkpoint.", metavar="IN"),
    out: Path = typer.Argument(help="GGUF file to write; a link is followed.", metavar="OUT"),
    type_too: str | None = typer.Argument(None, metavar="TYPE", help="The same as --type.", callback=check_type),
    *,
    quantization: str = option(
        "", f"One of {', '.join(FILE_TYPES)}; {DEFAULT_TYPE} if not given.", "--type", callback=check_type
    ),
    allow_requantize: bool = option(
        False, "Accept a quantized model, whose rounding error stays in the result; needs --type.", "--allow-requantize"
    ),
    force: bool = option(False, "Replace an existing file.", "--force"),
) -> None:
    """Convert a model to another type with llama.cpp's quantizer. A checkpoint's folder is converted to GGUF first.

    Example: pystaged quantize gpt2.F16.gguf gpt2.Q4_0.gguf --type q4_0
    """
    if type_too and quantization:
        raise typer.BadParameter("give the type once, as the last argument or by --type")
    quantization = type_too or quantization
    if not quantization and out.name.lower() in FILE_TYPES:
        raise typer.BadParameter(f"{out} is a type; name the file to write before it")
    if allow_requantize and not quantization:
        # The default type may be larger than the source's.
        raise typer.BadParameter("--allow-requantize needs a --type.")
    if not force and destination(out).exists():
        raise FileExistsError(f"{out} is there already; --force replaces it")
    quantization = quantization or DEFAULT_TYPE
    with orderly_end(), progress_bars() as progress:
        if Path(source).is_dir():
            quantize_checkpoint(Path(source), out, quantization, progress=progress)
        else:
            path = names.resolve(source, progress)
            quantize_file(path, out, quantization, allow_requantize=allow_requantize, progress=progress)
    if allow_requantize:
        errors.print("Made from a quantized model: less accurate than from the original weights.", markup=False)
    errors.print(f"{out}: {out.stat().st_size / 1e6:.1f} MB", style="dim", markup=False)
