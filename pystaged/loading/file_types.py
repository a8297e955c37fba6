"""Types of GGUF files: the names that users write, and libllama's numbers (llama_ftype)."""

from __future__ import annotations

FILE_TYPES = {
    "f32": 0,
    "f16": 1,
    "bf16": 32,
    "q8_0": 7,
    "q6_k": 18,
    "q5_k_m": 17,
    "q5_k_s": 16,
    "q5_1": 9,
    "q5_0": 8,
    "q4_k_m": 15,
    "q4_k_s": 14,
    "q4_1": 3,
    "q4_0": 2,
    "iq4_nl": 25,
    "iq4_xs": 30,
    "q3_k_l": 13,
    "q3_k_m": 12,
    "q3_k_s": 11,
    "q2_k": 10,
}
UNQUANTIZED = {FILE_TYPES[name] for name in ("f32", "f16", "bf16")}


def file_type_name(number: str) -> str:
    """The name of a type by a file's metadata, such as "Q4_K_M"; "?" for none."""
    from gguf import LlamaFileType  # noqa: PLC0415

    try:
        return LlamaFileType(int(number)).name.removeprefix("MOSTLY_").removeprefix("ALL_")
    except ValueError:
        return "?"
