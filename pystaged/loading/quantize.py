"""Quantize GGUF files with libllama's quantizer.

It runs in a process of its own, so that a bad file or Ctrl-C ends that process only.
"""

from __future__ import annotations

import errno
import os
import re
import shutil
import signal
import sys
from pathlib import Path
from subprocess import DEVNULL, PIPE

from pystaged.loading.metadata import FILE_TYPES, UNQUANTIZED, About, read_metadata
from pystaged.loading.progress import Progress
from pystaged.platform import process
from pystaged.platform.files import check_room, destination, open_regular, part_file, whole_file

DEFAULT_TYPE = "q8_0"
_TENSOR = re.compile(r"\[\s*(\d+)/\s*(\d+)\]")
_SIZE = re.compile(r"\b(model|quant) size *= *([\d.]+) MiB")
_REQUANTIZING = re.compile(r"requantizing from type (\w+) is disabled")
_FAILURE = re.compile(r"\berror\b|fail|invalid|assert", re.IGNORECASE)


def check_type(quantization: str) -> str:
    """Return the type in lower case. Raises ValueError for an unknown one."""
    if quantization.lower() not in FILE_TYPES:
        raise ValueError(f"unknown type {quantization!r}: choose from {', '.join(FILE_TYPES)}")
    return quantization.lower()


def quantize(
    source: Path, out: Path, quantization: str, *, allow_requantize: bool = False, progress: Progress = lambda *_: None
) -> None:
    """Write a GGUF file in another type; a mixed type such as q4_k_m gives some tensors more bits, as in llama.cpp.

    Args:
        out: written beside it under a temporary name, and renamed when complete.
        quantization: a name from FILE_TYPES.
        allow_requantize: accept a quantized source, whose rounding error stays in the result.
        progress: called with numbers of tensors.

    Raises:
        ValueError: an unknown type, a quantized source without allow_requantize, or a file that cannot be quantized.
        OSError: a file cannot be read or written; with the size of what the disk has no room for.
    """
    quantization = check_type(quantization)
    open_regular(source).close()
    stored = read_metadata(source).get("general.file_type", "")
    if not allow_requantize and stored.isdecimal() and int(stored) not in UNQUANTIZED:
        raise _requantizing(source, next((name for name, number in FILE_TYPES.items() if str(number) == stored), ""))
    with whole_file(out) as part:
        sizes: dict[str, int] = {}  # of all tensors
        needed, failure = 0, ""
        words = __name__, source, part, str(FILE_TYPES[quantization]), str(int(allow_requantize))
        # The child watches its standard input, which closes when this process ends.
        with process.start(*words, stdin=PIPE, stdout=DEVNULL, stderr=PIPE, text=True, errors="replace") as child:
            try:
                for line in child.stderr or ():
                    if not needed and (found := _SIZE.search(line)):
                        sizes[found[1]] = int(float(found[2]) * 2**20)
                        if len(sizes) == 2:  # the dry run is over
                            needed = source.stat().st_size - sizes["model"] + sizes["quant"]
                            check_room(part.parent, needed)
                    elif needed and (found := _TENSOR.search(line)):
                        progress("quantizing", int(found[1]), int(found[2]))
                    if _FAILURE.search(line):  # may be on the failed tensor's line
                        failure = line.strip()
            finally:
                child.kill()
        # llama.cpp opens files on Windows by their names in the system's code page, so it may have written another.
        if not child.returncode and not part.stat().st_size:
            raise ValueError(f"{out} cannot be written by llama.cpp; choose a name and folder of ASCII letters")
        # With libc++ libllama does not notice that its last write failed.
        if child.returncode or _damage(part):
            if shutil.disk_usage(part.parent).free < needed - part.stat().st_size:
                raise OSError(errno.ENOSPC, f"{os.strerror(errno.ENOSPC)}; {needed / 1e6:.1f} MB are needed")
            if damage := _damage(source):
                raise ValueError(damage)
            if found := _REQUANTIZING.search(failure):
                raise _requantizing(source, found[1])
            ended = f"the quantizer ended with {child.returncode}"
            reason = failure or (ended if child.returncode else "the written file is incomplete")
            raise ValueError(f"{source} cannot be quantized to {quantization}: {reason}")


def _damage(path: Path) -> str:
    """What is wrong with a file that is damaged or not GGUF; "" for a whole one."""
    from pystaged._core import ModelError, metadata  # noqa: PLC0415

    try:
        metadata(path)
    except ModelError as error:
        return str(error)
    return ""


def _requantizing(source: Path, kind: str) -> ValueError:
    return ValueError(
        f"{source} is quantized already{kind and f' ({kind})'}, and quantizing it again adds to its rounding error; "
        "quantize the original weights (F32, F16, BF16 or a checkpoint), or allow it with --allow-requantize"
    )


def quantize_checkpoint(
    folder: Path, out: Path, quantization: str, *, about: About | None = None, progress: Progress = lambda *_: None
) -> None:
    """Convert a checkpoint to a GGUF file of any type; arguments and errors as in write_gguf and quantize."""
    from pystaged.loading.convert import TYPES, check, read_config, write_gguf  # noqa: PLC0415  imports gguf

    quantization, about = check_type(quantization), about or About()
    if check(*read_config(folder), quantization) or quantization.upper() in TYPES:
        with whole_file(out) as part:
            write_gguf(folder, part, quantization.upper(), about, progress)
        return
    out = destination(out)
    with part_file(out) as floats:
        write_gguf(folder, floats, "", about, progress)
        quantize(floats, out, quantization, progress=progress)


def main() -> int:
    """Entry point of the quantizing process; libllama's log goes to standard error."""
    from pystaged import _core  # noqa: PLC0415

    signal.signal(signal.SIGINT, signal.SIG_DFL)
    process.end_with_parent()
    source, out, file_type, allow_requantize = sys.argv[1:]
    options = source, out, int(file_type), allow_requantize == "1"
    _core.quantize(*options, True)  # a dry run, which logs the file's size
    return int(not _core.quantize(*options, False))
