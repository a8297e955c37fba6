"""Checkpoints of Hugging Face: weights and shapes, and tokenizers."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

from support.checkpoints import write_checkpoint, write_family, write_sentencepiece
from support.convert import convert
from support.paths import table
from support.steps import evaluate

from fuzz.mutate import damage, damage_json, damage_value, spelled
from fuzz.target import Case, Target, short
from pystaged import _core

FAMILIES: dict[str, dict[str, Any]] = dict(table("fuzzed_families"))
(SETTINGS,) = table("tokenizer_settings")
Files = dict[str, bytes]


class Checkpoint(Target):
    """config.json, model.safetensors and the index of its parts: converted, then loaded."""

    damaged = ("config.json", "model.safetensors", "model.safetensors.index.json", "model-00001-of-00002.safetensors")

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self._at = folder / "checkpoint"
        self._bases = {name: self._written(partial(write_family, self._at, name, **more)) for name, more in self._all()}
        self._bases |= self._more()

    def _all(self) -> list[tuple[str, dict[str, Any]]]:
        return list(FAMILIES.items())

    def _more(self) -> dict[str, Files]:
        return {
            "gpt2": self._written(partial(write_checkpoint, self._at, n_embd=32, n_layer=1)),
            "parts": self._written(partial(write_family, self._at, "llama", shards=2)),
        }

    def _written(self, write: Any) -> Files:
        shutil.rmtree(self._at, ignore_errors=True)
        self._at.mkdir()
        write()
        return {path.name: path.read_bytes() for path in self._at.iterdir()}

    def sound(self) -> Iterator[Case]:
        for name, files in self._bases.items():
            yield Case(name, sum(map(len, files.values())), partial(self.use, files))

    def case(self, r: random.Random) -> Case:
        name = r.choice(list(self._bases))
        files = dict(self._bases[name])
        file = r.choice([each for each in self.damaged if each in files])
        files[file] = damaged_file(r, file, files[file], r.choice(list(self._bases.values())).get(file, b""))
        words = f"{name}: {file}: {short(files[file])}"
        if r.random() < 0.05:
            del files[file]
        return Case(words, sum(map(len, files.values())), partial(self.use, files))

    def use(self, files: Files) -> None:
        shutil.rmtree(self._at, ignore_errors=True)
        self._at.mkdir()
        for name, data in files.items():
            (self._at / name).write_bytes(data)
        out = self.folder / "model.gguf"
        convert(self._at, out, quantization="F16")
        tokenizer = _core.Tokenizer(str(out))
        tokenizer.encode("Hello the world\n 12 \u00e9\U0001f999<|endoftext|><s>")
        model = _core.Model(str(out), "", 1)
        if tokenizer.num_tokens != model.vocab_size:
            raise AssertionError(f"{tokenizer.num_tokens} tokens, {model.vocab_size} rows")
        session = _core.Session(model, 8)
        evaluate(session, [1], [-1])
        session.follow(_core.Sampling())


class Tokenizer(Checkpoint):
    """The files of tokenizers of each kind."""

    damaged = ("tokenizer.json", "tokenizer_config.json", "generation_config.json")

    def _all(self) -> list[tuple[str, dict[str, Any]]]:
        return [("llama", {"num_hidden_layers": 1})]

    def _more(self) -> dict[str, Files]:
        files = self._written(partial(write_family, self._at, "llama", num_hidden_layers=1))
        pieces = ["he", "\u2581he", "ll", "llo", "\u2581hello", "\u2581", *"helowrd"]
        whole = self._written(lambda: write_sentencepiece(self._at, pieces))
        settings = {"tokenizer_config.json": SETTINGS, "generation_config.json": {"eos_token_id": [2, 291], "top_k": 5}}
        files |= {name: json.dumps(found).encode() for name, found in settings.items()}
        return {"sentencepiece": files | whole}


def damaged_file(r: random.Random, name: str, data: bytes, other: bytes) -> bytes:
    """A file damaged as one of its kind."""
    if name.endswith(".json"):
        return damage_json(r, data)
    if name.endswith(".safetensors") and r.random() < 0.6:
        size = int.from_bytes(data[:8], "little")
        header = spelled(r, damage_value(r, json.loads(data[8 : 8 + size])))
        size = len(header) if r.random() < 0.9 else r.choice([0, len(header) - 1, len(header) + 9, 2**63, 2**64 - 1])
        return size.to_bytes(8, "little") + header + data[8 + int.from_bytes(data[:8], "little") :]
    return damage(r, data, other)
