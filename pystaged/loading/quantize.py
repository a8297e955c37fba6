"""GGUF files of any type, by libllama's own quantizer.

It runs in a process of its own: what is wrong with a file ends that process and not this one, and so does Ctrl-C.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections import deque
from pathlib import Path

import llama_cpp
from gguf import LlamaFileType

from pystaged.files import whole_file
from pystaged.loading.convert import FILE_TYPES as FLOAT_TYPES
from pystaged.loading.convert import Progress, convert

FILE_TYPES = {
    "f32": LlamaFileType.ALL_F32,
    "f16": LlamaFileType.MOSTLY_F16,
    "bf16": LlamaFileType.MOSTLY_BF16,
    "q8_0": LlamaFileType.MOSTLY_Q8_0,
    "q6_k": LlamaFileType.MOSTLY_Q6_K,
    "q5_k_m": LlamaFileType.MOSTLY_Q5_K_M,
    "q5_k_s": LlamaFileType.MOSTLY_Q5_K_S,
    "q5_1": LlamaFileType.MOSTLY_Q5_1,
    "q5_0": LlamaFileType.MOSTLY_Q5_0,
    "q4_k_m": LlamaFileType.MOSTLY_Q4_K_M,
    "q4_k_s": LlamaFileType.MOSTLY_Q4_K_S,
    "q4_1": LlamaFileType.MOSTLY_Q4_1,
    "q4_0": LlamaFileType.MOSTLY_Q4_0,
    "iq4_nl": LlamaFileType.MOSTLY_IQ4_NL,
    "iq4_xs": LlamaFileType.MOSTLY_IQ4_XS,
    "q3_k_l": LlamaFileType.MOSTLY_Q3_K_L,
    "q3_k_m": LlamaFileType.MOSTLY_Q3_K_M,
    "q3_k_s": LlamaFileType.MOSTLY_Q3_K_S,
    "q2_k": LlamaFileType.MOSTLY_Q2_K,
}
DEFAULT_TYPE = "q8_0"
_TENSOR = re.compile(r"\[\s*(\d+)/\s*(\d+)\]")
_FAILURE = re.compile(r"\berror\b|fail|invalid|assert", re.IGNORECASE)


def check_type(quantization: str) -> str:
    """The type in lower case.

    Raises:
        ValueError: an unknown type.
    """
    if quantization.lower() not in FILE_TYPES:
        raise ValueError(f"unknown type {quantization!r}: choose from {', '.join(FILE_TYPES)}")
    return quantization.lower()


def quantize(source: Path, out: Path, quantization: str, *, progress: Progress = lambda *_: None) -> None:
    """Write a GGUF file in another type; a mixed type such as q4_k_m gives some tensors more bits, as llama.cpp does.

    Args:
        source: GGUF file, of any type: from a quantized one the result is worse than from the original.
        out: written under a temporary name beside it, and moved there when whole.
        quantization: a name from FILE_TYPES.
        progress: called with tensors.

    Raises:
        ValueError: an unknown type, or a file that cannot be quantized.
        OSError: a file cannot be read or written.
    """
    quantization = check_type(quantization)
    with source.open("rb"):
        pass
    with whole_file(out) as part:
        with part.open("wb"):
            pass
        command = [
            sys.executable,
            "-m",
            "pystaged.loading.quantize",
            str(source),
            str(part),
            str(int(FILE_TYPES[quantization])),
        ]
        last: deque[str] = deque(maxlen=1)
        with subprocess.Popen(
            command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, errors="replace"
        ) as child:
            try:
                for line in child.stderr or ():
                    if found := _TENSOR.search(line):
                        progress("quantizing", int(found[1]), int(found[2]))
                    elif _FAILURE.search(line):
                        last.append(line.strip())
            finally:
                child.kill()
        if child.returncode:
            reason = last[0] if last else f"the quantizer ended with {child.returncode}"
            raise ValueError(f"{source} cannot be quantized to {quantization}: {reason}")


def quantize_checkpoint(
    folder: Path,
    out: Path,
    quantization: str,
    *,
    name: str = "",
    license_name: str = "",
    source_url: str = "",
    progress: Progress = lambda *_: None,
) -> None:
    """Convert a GPT-2 checkpoint to a GGUF file of any type; arguments and errors as in convert and quantize."""
    quantization = check_type(quantization)
    about = {"name": name, "license_name": license_name, "source_url": source_url}
    if quantization.upper() in FLOAT_TYPES:
        convert(folder, out, quantization=quantization.upper(), progress=progress, **about)
        return
    whole = out.with_name(f"{out.name}.{os.getpid()}.f32.part")
    try:
        convert(folder, whole, progress=progress, **about)
        quantize(whole, out, quantization, progress=progress)
    finally:
        whole.unlink(missing_ok=True)


def _main(source: str, out: str, file_type: int) -> int:
    """The process that quantizes; libllama's log goes to standard error."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)

    @llama_cpp.llama_log_callback  # type: ignore[untyped-decorator]
    def log(_level: int, text: bytes, _user_data: object) -> None:
        sys.stderr.buffer.write(text)
        sys.stderr.buffer.flush()

    llama_cpp.llama_log_set(log, None)
    params = llama_cpp.llama_model_quantize_default_params()
    params.ftype = file_type
    params.allow_requantize = True
    return int(llama_cpp.llama_model_quantize(os.fsencode(source), os.fsencode(out), params))


if __name__ == "__main__":
    sys.exit(_main(sys.argv[1], sys.argv[2], int(sys.argv[3])))
