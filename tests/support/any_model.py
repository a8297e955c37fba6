"""Small random files of any architecture that libllama has, by asking it: it says which key or tensor is missing, and
which shape it wants. In a process of its own, because it ends that on some files."""

from __future__ import annotations

import ctypes
import re
from pathlib import Path
from typing import Any

import llama_cpp
import numpy as np
import numpy.typing as npt

from support.paths import table
from support.random_models import add_key, add_vocabulary, gguf_file

LAYERS, WIDTH = 2, 64
# Keys of every file, those that libllama asks for (other numbers are 2), and mixtures of experts.
KEYS, ASKED, MIXTURES = table("any_model")
# Layers without attention.
OWN: dict[str, dict[str, Any]] = {"jamba": {"attention.head_count_kv": [0, 4]}}
Floats = npt.NDArray[np.float32]


class Asking:
    """A file that is written again until libllama loads it."""

    def __init__(self, family: str, path: Path) -> None:
        self.family, self.path = family, path
        self.keys = dict(KEYS) | OWN.get(family, {})
        if family in MIXTURES:
            self.keys |= {"expert_count": 4, "expert_used_count": 2}
        self.shapes: dict[str, tuple[int, ...]] = {"token_embd.weight": (300, WIDTH)}
        self.said = ""
        self._log = llama_cpp.llama_log_callback(self._hear)
        llama_cpp.llama_log_set(self._log, ctypes.c_void_p(0))

    def load(self) -> None:
        """Write the file that libllama loads. Raises RuntimeError where it cannot be found."""
        for _ in range(400):
            self._write()
            self.said = ""
            model = llama_cpp.llama_model_load_from_file(
                str(self.path).encode(), llama_cpp.llama_model_default_params()
            )
            if model:
                llama_cpp.llama_model_free(model)
                return
            self._learn()
        raise RuntimeError(f"no end of: {self.said}")

    def _learn(self) -> None:
        if found := re.search(r"array key not found in model: \S+?[.](\S+pattern)", self.said):
            self.keys[found[1]] = [True, False]
        elif found := re.search(r"key not found in model: (\S+)", self.said):
            key = found[1].removeprefix(f"{self.family}.")
            if key in self.keys:
                raise RuntimeError(self.said)
            usual = 1.0 if re.search("scale|eps|base|clamp|factor|softcap", key) else 2
            self.keys[key] = ASKED.get(key, usual)
        elif found := re.search(r"(?:missing tensor|tensor) '(\S+?)'(?: not found|\n)", self.said):
            # As in the layer before, or of unknown shape.
            before = re.sub(r"blk\.(\d+)", lambda number: f"blk.{int(number[1]) - 1}", found[1])
            self.shapes[found[1]] = self.shapes.get(before, (WIDTH,)) if before != found[1] else (WIDTH,)
        elif found := re.search(r"tensor '(\S+)' has wrong shape; expected +([0-9, ]+), got", self.said):
            self.shapes[found[1]] = tuple(int(n) for n in reversed(found[2].replace(" ", "").split(",")))
        elif found := re.search(r"key (\S+) has wrong type \w+ but expected type (\w+)", self.said):
            self.keys[found[1].removeprefix(f"{self.family}.")] = {"bool": True, "f32": 1.0, "str": "none"}[found[2]]
        else:
            raise RuntimeError(self.said or "libllama does not say why")

    def _hear(self, level: int, text: bytes, data: Any) -> None:
        del data
        if level == 4 and not re.search("failed to load model", text.decode()):  # an error
            self.said += text.decode()

    def _write(self) -> None:
        rng = np.random.default_rng(0)
        with gguf_file(self.path, self.family) as writer:
            for key, value in self.keys.items():
                add_key(writer, f"{self.family}.{key}", value)
            add_vocabulary(writer, 300)
            for name, shape in self.shapes.items():
                writer.add_tensor(name, _weights(rng, name, shape))


def _weights(rng: np.random.Generator, name: str, shape: tuple[int, ...]) -> Floats:
    if "norm" in name and name.endswith("weight"):
        values = rng.normal(1, 0.1, shape)
    elif name.endswith(("ssm_a", "A_log")):
        values = -np.exp(rng.normal(0, 0.3, shape))
    elif "rope_f" in name:
        values = np.ones(shape)
    else:
        values = rng.normal(0, 1 / max(1, shape[-1]) ** 0.5 if len(shape) > 1 else 0.1, shape)
    return values.astype(np.float32)
