"""Staged speculative decoding for quantized GGUF models: the same text as the model alone generates, but faster."""

from __future__ import annotations

import os  # and not pathlib, which takes several times as long to import
import sys
from importlib import import_module, util

if not util.find_spec(f"{__name__}._core"):
    # Started beside the source's folder, Python finds that before an installed package.
    _source = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))  # noqa: PTH100, PTH120
    raise ImportError(
        f"{_source} holds pystaged's source without its compiled module; run: pip install -e {_source}, "
        "or start Python in another folder if pystaged is installed"
    )

TYPE_CHECKING = False  # importing typing takes time before the command line can handle Ctrl-C
if TYPE_CHECKING:
    from typing import Any

    from pystaged._core import ContextFullError, DeviceError, ModelError
    from pystaged.backends.devices import Device, devices
    from pystaged.chat import ChatTemplateError
    from pystaged.chat.format import ChatFormat
    from pystaged.decoding.policy import FixedPolicy, GainPolicy, Growth, TreePolicy
    from pystaged.decoding.tree import Stage, TokenTree
    from pystaged.engine import Engine, generate, load, stream
    from pystaged.options.config import SamplingConfig
    from pystaged.receipts.receipt import Receipt
    from pystaged.receipts.repeating import Difference, repeat
    from pystaged.result import DeviceLostError, GenerationResult, Piece, Score, TokenLogprob
    from pystaged.sampling.definitions import GrammarError
    from pystaged.stats import GenerationStats, PassStats

__version__ = "0.1.0"

__all__ = [
    "ChatFormat",
    "ChatTemplateError",
    "ContextFullError",
    "Device",
    "DeviceError",
    "DeviceLostError",
    "Difference",
    "Engine",
    "FixedPolicy",
    "GainPolicy",
    "GenerationResult",
    "GenerationStats",
    "GrammarError",
    "Growth",
    "ModelError",
    "PassStats",
    "Piece",
    "Receipt",
    "SamplingConfig",
    "Score",
    "Stage",
    "TokenLogprob",
    "TokenTree",
    "TreePolicy",
    "devices",
    "generate",
    "load",
    "repeat",
    "stream",
]

# Imported on first use, so that the command line shows its help without loading the compiled module.
_MODULES = {
    "_core": ("ContextFullError", "DeviceError", "ModelError"),
    "backends.devices": ("Device", "devices"),
    "chat": ("ChatTemplateError",),
    "chat.format": ("ChatFormat",),
    "options.config": ("SamplingConfig",),
    "decoding.policy": ("FixedPolicy", "GainPolicy", "Growth", "TreePolicy"),
    "decoding.tree": ("Stage", "TokenTree"),
    "engine": ("Engine", "generate", "load", "stream"),
    "sampling.definitions": ("GrammarError",),
    "receipts.receipt": ("Receipt",),
    "receipts.repeating": ("Difference", "repeat"),
    "result": ("DeviceLostError", "GenerationResult", "Piece", "Score", "TokenLogprob"),
    "stats": ("GenerationStats", "PassStats"),
}


class _LibrariesFirst:
    """Loads llama_cpp's libraries before the first import of the extension, which is linked against them."""

    @staticmethod
    def find_spec(name: str, path: object = None, target: object = None) -> None:
        del path, target
        if name == f"{__name__}._core":
            import_module(f"{__name__}._llama")


sys.meta_path.insert(0, _LibrariesFirst)


def __getattr__(name: str) -> Any:
    for module, names in _MODULES.items():
        if name in names:
            value = globals()[name] = getattr(import_module(f"pystaged.{module}"), name)
            return value
    raise AttributeError(f"module 'pystaged' has no attribute '{name}'")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
