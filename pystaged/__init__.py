"""Staged speculative decoding for quantized GGUF models: faster, and exactly the text the model alone would write."""

from pystaged import _llama  # noqa: F401, I001  first, so that the extension finds llama_cpp's libraries already loaded
from pystaged._core import ContextFullError, DeviceError, ModelError
from pystaged.config import SamplingConfig
from pystaged.backends.devices import Device, devices
from pystaged.engine import Engine, generate, load, stream
from pystaged.decoding.policy import FixedPolicy, GainPolicy, Growth, TreePolicy
from pystaged.result import DeviceLostError, GenerationResult, Piece
from pystaged.stats import GenerationStats
from pystaged.decoding.tree import Stage, TokenTree

__version__ = "0.1.0"

__all__ = [
    "ContextFullError",
    "Device",
    "DeviceError",
    "DeviceLostError",
    "Engine",
    "FixedPolicy",
    "GainPolicy",
    "GenerationResult",
    "GenerationStats",
    "Growth",
    "ModelError",
    "Piece",
    "SamplingConfig",
    "Stage",
    "TokenTree",
    "TreePolicy",
    "devices",
    "generate",
    "load",
    "stream",
]
