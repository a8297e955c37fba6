"""Skeletons of popular models, whose numbers are in data/known_models.jsonl."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from gguf import GGUFWriter, TokenType

from support.paths import table
from support.random_models import RandomModel, add_sentencepiece, add_vocabulary, recorded

SIZE = 320  # of a vocabulary
LONG = {
    f"rope_factors_{kind}.weight": np.linspace(1, most, 48, dtype=np.float32)
    for kind, most in (("long", 60), ("short", 1))
}
FACTORS = {
    "gemma 4": {"rope_freqs.weight": np.array([1] * 64 + [1e30] * 192, dtype=np.float32)},
    "llama 3": {"rope_freqs.weight": np.geomspace(1, 32, 32, dtype=np.float32)},
    "long and short": LONG,
}


@dataclass(frozen=True)
class Known:
    """A model.

    Attributes:
        pre: tokenizer.ggml.pre; "gemma4" for that vocabulary, "" for SentencePiece.
        begins, ends: the special tokens of a text.
        others: further special tokens.
        source, assumed: where its numbers are published, and what is as in other models of the architecture.
        adds: whether the first is put before every text.
    """

    model: dict[str, Any]
    pre: str
    begins: str
    ends: str
    source: str
    assumed: str = ""
    others: tuple[str, ...] = ()
    adds: bool = False

    @property
    def written(self) -> RandomModel:
        """What to write."""
        return replace(recorded(self.model, FACTORS), vocab_size=SIZE, vocabulary=self._add_vocabulary)

    def _add_vocabulary(self, writer: GGUFWriter, size: int) -> None:
        special = list(dict.fromkeys([self.begins, self.ends, *self.others]))
        writer.add_add_bos_token(self.adds)
        if self.pre in ("", "gemma4"):
            _add_pieces(writer, size, special, self)
            return
        ids = {name: size - 1 - len(special) + i for i, name in enumerate(special)} | {"<|endoftext|>": size - 1}
        marks = {token: name for name, token in ids.items()}
        for token in {*range(size - 1 - len(special), size)} - marks.keys():
            marks[token] = f"<|reserved_{token}|>"
        add_vocabulary(writer, size, marks, pre=self.pre, begins=ids[self.begins], ends=ids[self.ends])


def _add_pieces(writer: GGUFWriter, size: int, special: list[str], known: Known) -> None:
    if not known.pre:
        add_sentencepiece(writer, size, marks=special)
        first = writer.kv_data[0]["tokenizer.ggml.tokens"].value.index(special[0])
        writer.add_bos_token_id(first)
        writer.add_eos_token_id(first + 1)
        return
    letters = ["\u2581", *"ethoainsrl"]
    merges = ["h e", "t h", "t he", "\u2581 t", "i n"]
    names = [*special, *(f"<0x{byte:02X}>" for byte in range(256)), *letters, *(m.replace(" ", "") for m in merges)]
    names += [f"<unused{i}>" for i in range(size - len(names))]
    kinds = (
        [TokenType.CONTROL] * len(special) + [TokenType.BYTE] * 256 + [TokenType.NORMAL] * (size - len(special) - 256)
    )
    writer.add_tokenizer_model("gemma4")
    writer.add_token_list(names)
    writer.add_token_scores([-float(i) for i in range(size)])
    writer.add_token_types([int(kind) for kind in kinds])
    writer.add_token_merges(merges)
    writer.add_bos_token_id(names.index(known.begins))
    writer.add_eos_token_id(names.index(known.ends))


MODELS = {found.pop("name"): Known(**found) for found in table("known_models")}
