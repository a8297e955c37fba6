"""What a GGUF file says about itself."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from pystaged.loading.families import DRAFT_ARCHITECTURES

# Types of GGUF files: the names that users write, and libllama's numbers (llama_ftype).
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


@dataclass(frozen=True, slots=True)
class About:
    """What a new file says about its model; empty values are left out, except that an empty name becomes the
    checkpoint folder's."""

    name: str = ""
    license: str = ""
    source_url: str = ""
    commit: str = ""


COMMIT = "pystaged.commit"  # GGUF key: the commit of the checkpoint
PARD_TOKEN = "pystaged.pard_token"  # GGUF key: id of a parallel draft's mask token, as config.json's pard_token


def read_metadata(path: Path) -> dict[str, str]:
    """Scalar metadata of a GGUF file as text; empty where it cannot be read."""
    from pystaged._core import ModelError, metadata  # noqa: PLC0415  who lists no models needs none

    try:
        return metadata(path)
    except ModelError:
        return {}


def reads_target(path: Path, target: Mapping[str, str] | None = None) -> bool:
    """Whether a GGUF file holds a draft that reads its target's hidden states; with the target's metadata its MTP layer
    is recognized, too. Raises ModelError where the file is not GGUF."""
    from pystaged._core import metadata  # noqa: PLC0415

    found = metadata(path)
    return found.get("general.architecture") in DRAFT_ARCHITECTURES or (
        target is not None and predicts_ahead(found, target)
    )


def predicts_ahead(found: Mapping[str, str], target: Mapping[str, str]) -> bool:
    """Whether a file has an MTP layer for a model of the target's architecture, width and depth, by the metadata of the
    file and of the target's, which may be the same."""
    draft, model = ((each.get("general.architecture"), *depth_and_width(each)) for each in (found, target))
    return draft == model and _number(found, "nextn_predict_layers") > 0


def depth_and_width(metadata: Mapping[str, str]) -> tuple[int, int]:
    """A model's number of layers, without MTP layers, and its width, by its file's metadata; 0 where they are not
    stated."""
    layers, ahead = (_number(metadata, key) for key in ("block_count", "nextn_predict_layers"))
    return max(0, layers - ahead), _number(metadata, "embedding_length")


def _number(metadata: Mapping[str, str], key: str) -> int:
    text = metadata.get(f"{metadata.get('general.architecture', '')}.{key}", "")
    return int(text) if text.isascii() and text.isdecimal() and len(text) < 10 else 0


def file_type_name(number: str) -> str:
    """The name of a type by a file's metadata, such as "Q4_K_M"; "?" for none."""
    from gguf import LlamaFileType  # noqa: PLC0415

    try:
        return LlamaFileType(int(number)).name.removeprefix("MOSTLY_").removeprefix("ALL_")
    except ValueError:
        return "?"
