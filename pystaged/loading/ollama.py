"""Models that Ollama has downloaded: a name stands for a manifest, which names the model's file by its digest."""

from __future__ import annotations

import json
import os
import re
from contextlib import suppress
from pathlib import Path

from pystaged.loading.metadata import read_metadata
from pystaged.platform.files import expanded, read_small

_NAME = re.compile(
    r"(?:(?P<host>[\w-]+\.[\w.-]+(?::\d+)?)/)?(?:(?P<owner>[\w-][\w.-]*)/)?(?P<name>[\w-][\w.-]*)(?::(?P<tag>[\w-][\w.-]*))?"
)
_DIGEST = re.compile(r"sha256[:-]([0-9a-f]{64})")
_HOST, _OWNER, _TAG = "registry.ollama.ai", "library", "latest"
_MODEL, _ADAPTER = (f"application/vnd.ollama.image.{kind}" for kind in ("model", "adapter"))
_MOST = 1 << 20  # bytes of a manifest


def _folders() -> list[Path]:
    """Where it keeps models: the user's own, and those of its service on Linux."""
    with suppress(FileNotFoundError):
        if own := os.environ.get("OLLAMA_MODELS"):
            return [expanded(own)]
        return [expanded("~/.ollama/models"), Path("/usr/share/ollama/.ollama/models")]
    return []


def find(name: str) -> Path | None:
    """The file of a model, such as "llama3.2", "qwen3:4b", "hf.co/owner/name:Q4_K_M" or "sha256-..."; None where Ollama
    has none of that name.

    Raises:
        ValueError: a model with an adapter.
        FileNotFoundError: the manifest is there, but not the file.
    """
    for folder in _folders():
        blobs = folder / "blobs"
        if digest := _DIGEST.fullmatch(name):
            if os.access(path := blobs / f"sha256-{digest[1]}", os.R_OK):  # another user's may not be
                return path
        elif layers := _layers(folder / "manifests", name) or _layers(folder / "manifests", name.lower()):
            if _ADAPTER in layers:
                raise ValueError(
                    f"Ollama's {name} has an adapter, and adapters are not read here; merge it into the model first"
                )
            if digest := _DIGEST.fullmatch(layers.get(_MODEL, "")):
                path = blobs / f"sha256-{digest[1]}"
                if not path.is_file():
                    raise FileNotFoundError(f"Ollama's {name} lacks its file {path}; run: ollama pull {name}")
                return path
    return None


def _layers(manifests: Path, name: str) -> dict[str, str]:
    """Digests in a model's manifest by their kind, empty where there is none: "owner/name" is a name on the hub."""
    if not (match := _NAME.fullmatch(name)) or bool(match["host"]) != bool(match["owner"]):
        return {}
    path = manifests / (match["host"] or _HOST) / (match["owner"] or _OWNER) / match["name"] / (match["tag"] or _TAG)
    try:
        found = json.loads(read_small(path, _MOST))
        return {str(layer["mediaType"]): str(layer["digest"]) for layer in found["layers"]}
    except (OSError, ValueError, LookupError, TypeError):
        return {}


def files() -> dict[str, Path]:
    """The files of its models by name, without those that `find` refuses."""
    found = {}
    for folder in _folders():
        with suppress(OSError):  # another user's
            for path in sorted((folder / "manifests").glob("*/*/*/*")):
                host, owner, name, tag = path.parts[-4:]
                full = f"{'' if (host, owner) == (_HOST, _OWNER) else f'{host}/{owner}/'}{name}:{tag}"
                with suppress(OSError, ValueError):
                    if file := find(full):
                        found[full] = file
    return found


def reads_text_alone(path: Path) -> bool:
    """Whether a file has nothing that reads images or sound, which its converter puts beside the model's weights."""
    return not any(re.search(r"\.(vision|audio)\.", key) for key in read_metadata(path))
