"""Small random EAGLE-3, DFlash and DSpark drafts as GGUF files, and their arithmetic in doubles.

In shapes: H is the draft's width, H_t the target's, V the target's vocabulary, V_d the draft's, n a number of rows.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt
from gguf import GGMLQuantizationType, quants

from pystaged._core import Model
from support.family_reference import Contents, Reference
from support.random_models import Tensors, add_key, add_vocabulary, gguf_file

Array = npt.NDArray[Any]
Floats = npt.NDArray[np.float32]
Doubles = npt.NDArray[np.float64]
MASK = "tokenizer.ggml.mask_token_id"


@dataclass
class RandomDraft:
    """What both kinds of drafts have.

    Attributes:
        target_width, vocab_size: the target's H_t and V.
        taps: of target layers a, whose input the draft reads; behind the last layer for their number.
        draft_vocab: V_d; 0 for V, which needs no table of token ids.
        width: H; 0 for the target's.
        own_embedding, own_head: stored in the file instead of borrowed from the target.
        rope_factors: divide the rotary frequencies; stored as rope_freqs.weight.
        tokenizer: writes a tokenizer of V tokens, which libllama needs.
        metadata: other values of keys, under the architecture's name; None to leave one out.
    """

    target_width: int = 64
    vocab_size: int = 300
    taps: list[int] = field(default_factory=lambda: [1, 2])
    draft_vocab: int = 0
    width: int = 0
    layers: int = 1
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 16
    ffn_width: int = 96
    context: int = 512
    rope_base: float = 10000.0
    rope_factors: bool = False
    own_embedding: bool = False
    own_head: bool = False
    quantization: str = "F32"
    seed: int = 0
    tokenizer: bool = False
    metadata: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.width = self.width or self.target_width

    @property
    def num_rows(self) -> int:
        """V_d."""
        return self.draft_vocab or self.vocab_size

    def keys(self) -> dict[str, Any]:
        return {
            "block_count": self.layers,
            "context_length": self.context,
            "embedding_length": self.width,
            "feed_forward_length": self.ffn_width,
            "attention.head_count": self.heads,
            "attention.head_count_kv": self.kv_heads,
            "attention.key_length": self.head_dim,
            "attention.value_length": self.head_dim,
            "attention.layer_norm_rms_epsilon": 1e-6,
            "rope.freq_base": self.rope_base,
            "rope.dimension_count": self.head_dim,
            "target_layers": self.taps,
            "target_hidden_size": self.target_width,
        }


@dataclass
class Eagle3(RandomDraft):
    """An EAGLE-3 draft; `separate_fc_norm` (one norm per tap) and `norm_output` are EAGLE 3.1's."""

    architecture: ClassVar[str] = "eagle3"
    norm_before_residual: bool = False
    norm_before_fc: bool = False
    separate_fc_norm: bool = False
    norm_output: bool = False
    head_norms: bool = False

    def keys(self) -> dict[str, Any]:
        own = ("norm_before_residual", "norm_before_fc", "norm_output")
        return super().keys() | {name: getattr(self, name) for name in own}

    def tensors(self) -> dict[str, Array]:
        made = _Made(self)
        taps, wide = len(self.taps), len(self.taps) * self.target_width
        made.matrix("fc", self.width, wide)
        if self.norm_before_fc:
            made.norm("enc.output_norm", wide)
        if self.separate_fc_norm:
            made.norm("fc_norm", taps, self.target_width)
        for layer in range(self.layers):
            if not layer:
                made.norm("blk.0.attn_norm_2", self.width)
            made.layer(layer, self.width if layer else 2 * self.width, self.head_norms)
        return made


@dataclass
class Block(RandomDraft):
    """A DFlash draft, or DSpark: DFlash with a Markov head.

    Attributes:
        block: its number of places, the last committed token's included.
        from_anchor: place i predicts the token behind it, else the one at it, and place 0 none.
        markov_rank: 0 for no Markov head.
        mask_token: -1 for the last of V.
    """

    architecture: ClassVar[str] = "dflash"
    layers: int = 2
    block: int = 4
    from_anchor: bool = False
    markov_rank: int = 0
    causal: bool = False
    mask_token: int = -1

    def keys(self) -> dict[str, Any]:
        return super().keys() | {
            "block_size": self.block,
            "sample_from_anchor": self.from_anchor,
            "attention.causal": self.causal,
            MASK: self.mask_token % self.vocab_size,
        }

    def tensors(self) -> dict[str, Array]:
        made, rank = _Made(self), self.markov_rank
        made.matrix("fc", self.width, len(self.taps) * self.target_width)
        made.norm("enc.output_norm", self.width)
        for layer in range(self.layers):
            made.layer(layer, self.width, True)
        if rank:
            made.matrix("markov_w1", self.vocab_size, rank)
            made.matrix("markov_w2", self.num_rows, rank, scale=4)
        return made


def dspark(**options: Any) -> Block:
    """A DSpark draft as DeepSeek makes them."""
    return Block(**{"from_anchor": True, "markov_rank": 16} | options)


def write_draft(path: Path, draft: Any, changed: Mapping[str, Array | None] | None = None) -> Path:
    """Write a draft; the same seed gives the same file.

    Args:
        draft: a RandomDraft or an Assistant: what it has as keys(), without the architecture's name, and as tensors().
        changed: tensors that differ, by name; None to leave one out.
    """
    kind = GGMLQuantizationType[draft.quantization]
    with gguf_file(path, draft.architecture) as writer:
        writer.add_name("a random draft")
        if draft.tokenizer:
            add_vocabulary(writer, draft.vocab_size)
        for key, value in (draft.keys() | draft.metadata).items():
            if value is not None:
                add_key(writer, key if key == MASK else f"{draft.architecture}.{key}", value)
        for name, values in (draft.tensors() | dict(changed or {})).items():
            if values is not None and values.ndim == 2 and "norm" not in name:
                writer.add_tensor(name, quants.quantize(values, kind), raw_dtype=kind)
            elif values is not None:
                writer.add_tensor(name, values)
    return path


def load_pair(target_path: Path, path: Path, threads: int = 2, kv: str = "f16") -> tuple[Model, Model]:
    """A target that keeps what the draft reads, and the draft."""
    target = Model(target_path, "", threads, kv=kv)
    draft = Model(path, "", threads, target=target)
    tap(target, draft)
    return target, draft


def tap(target: Model, draft: Model) -> None:
    """Let a target keep what a draft reads."""
    target.tap(draft.target_layers, all_rows=not draft.borrows_cells, last_row=draft.borrows_cells)


class _Made(Tensors):
    """What all drafts have; layers are added."""

    def __init__(self, draft: RandomDraft) -> None:
        super().__init__(draft.seed)
        self._draft = draft
        if draft.own_embedding:
            self.matrix("token_embd", draft.vocab_size, draft.width)
        self.norm("output_norm", draft.width)
        if draft.own_head:
            self.matrix("output", draft.num_rows, draft.width)
        if draft.num_rows < draft.vocab_size:
            kept = self.random.choice(draft.vocab_size, draft.num_rows, replace=False)
            self["d2t"] = np.sort(kept).astype(np.int64)
        if draft.rope_factors:
            self["rope_freqs.weight"] = np.linspace(1, 8, draft.head_dim // 2).astype(np.float32)

    def layer(self, layer: int, inputs: int, head_norms: bool) -> None:
        m = self._draft
        block, q, kv = f"blk.{layer}", m.heads * m.head_dim, m.kv_heads * m.head_dim
        self.norm(f"{block}.attn_norm", m.width)
        for name, rows in (("q", q), ("k", kv), ("v", kv)):
            self.matrix(f"{block}.attn_{name}", rows, inputs)
        for name in ("q", "k") if head_norms else ():
            self.norm(f"{block}.attn_{name}_norm", m.head_dim)
        self.matrix(f"{block}.attn_output", m.width, q)
        self.norm(f"{block}.ffn_norm", m.width)
        self.matrix(f"{block}.ffn_gate", m.ffn_width, m.width)
        self.matrix(f"{block}.ffn_up", m.ffn_width, m.width)
        self.matrix(f"{block}.ffn_down", m.width, m.ffn_width)


class _Twin(Reference):
    """What both kinds compute alike.

    Args:
        embedding, head: the target's, [V, H_t]; used where the file has none of its own.
        adjacent: the rotary pairs' layout, a file's by default; else halves of a head.
    """

    def __init__(
        self,
        contents: Contents,
        embedding: Array | None = None,
        head: Array | None = None,
        *,
        adjacent: bool | None = None,
    ) -> None:
        super().__init__(contents)
        self.layers = self.keys["block_count"]
        self.d2t: npt.NDArray[np.int64] | None = self.weights.get("d2t")
        if head is not None and self.d2t is not None:
            head = head[self.d2t]
        self.embedding = self._own("token_embd.weight", embedding)
        self.head = self._own("output.weight", head)
        self.adjacent = self.adjacent if adjacent is None else adjacent
        self.clear()

    @classmethod
    def of(cls, path: Path, embedding: Array | None = None, head: Array | None = None) -> Any:
        """The twin of a file."""
        return cls(Contents.of(path), embedding, head)

    def clear(self) -> None:
        """Forget all rows."""
        empty = np.empty((0, self.kv_heads, self.dim))
        self.kept = [(empty, empty)] * self.layers  # keys and values of rows, by layer

    def _own(self, name: str, borrowed: Array | None) -> Doubles:
        found = self.weights.get(name, borrowed)
        if found is None:
            raise ValueError(f"the draft borrows {name} from its target, and none is given")
        return np.asarray(found, np.float64)

    def longer(self, layer: int, x: Doubles, positions: npt.ArrayLike) -> tuple[Doubles, Doubles]:
        """A layer's keys and values with those of these inputs [n, H or 2H] behind the kept ones."""
        k, v = (self.linear(f"blk.{layer}.attn_{part}", x).reshape(len(x), self.kv_heads, self.dim) for part in "kv")
        new = self.turned(f"blk.{layer}.attn_k", k, positions), v
        k, v = (np.concatenate(each) for each in zip(self.kept[layer], new, strict=True))
        return k, v

    def behind(
        self, layer: int, x: Doubles, read: Doubles, positions: npt.ArrayLike, seen: npt.NDArray[np.bool_], keep: bool
    ) -> Doubles:
        """What is behind a layer [n, H] of rows x that it reads in this form; `seen` says which rows each sees."""
        k, v = self.longer(layer, read, positions)
        if keep:
            self.kept[layer] = k, v
        q = self.linear(f"blk.{layer}.attn_q", read).reshape(len(x), self.heads, self.dim)
        q = self.turned(f"blk.{layer}.attn_q", q, positions)
        r = x + self.attended(f"blk.{layer}.attn_output", q, k, v, seen)
        return r + self.feed_forward(f"blk.{layer}.", self.norm(f"blk.{layer}.ffn_norm", r))


class Eagle3Twin(_Twin):
    """EAGLE-3's arithmetic.

    Rows are numbered in the order in which they are added; a row sees itself and its ancestors. Committed rows form a
    chain: row P reads the features of position P and the token of position P + 1.
    """

    def clear(self) -> None:
        super().clear()
        self._parents: list[int] = []
        self._depths: list[int] = []

    def crop(self, rows: int) -> None:
        """Keep the first rows only."""
        self._parents, self._depths = self._parents[:rows], self._depths[:rows]
        self.kept = [(k[:rows], v[:rows]) for k, v in self.kept]

    def fuse(self, features: Array) -> Doubles:
        """g [n, H] of features [n, taps * H_t]."""
        x = np.asarray(features, np.float64)
        if self.keys.get("norm_before_fc"):
            x = self.norm("enc.output_norm", x)
        if "fc_norm.weight" in self.weights:
            taps = len(self.keys["target_layers"])
            x = self.norm("fc_norm", x.reshape(len(x), taps, -1)).reshape(len(x), -1)
        return self.linear("fc", x)

    def add(
        self, vectors: Doubles, tokens: Sequence[int], parents: Sequence[int] | None = None
    ) -> tuple[Doubles, Doubles]:
        """Logits [n, V_d] of rows, and what their children read [n, H].

        Args:
            vectors: g of each row, or what its parent's child reads, [n, H].
            tokens: target ids.
            parents: of each row, among all rows; -1 for none. None for a chain behind the last row.
        """
        start, count = len(self._parents), len(tokens)
        parents = range(start - 1, start + count - 1) if parents is None else parents
        for parent in parents:
            self._parents.append(parent)
            self._depths.append(self._depths[parent] + 1 if parent >= 0 else 0)
        seen = np.zeros((count, start + count), bool)
        for i in range(count):
            row = start + i
            while row >= 0:
                seen[i, row] = True
                row = self._parents[row]
        positions = self._depths[start:]
        y = np.asarray(vectors, np.float64)
        for layer in range(self.layers):
            residual, read = y, self.norm(f"blk.{layer}.attn_norm{'' if layer else '_2'}", y)
            if not layer:
                residual = read if self.keys.get("norm_before_residual") else y
                embedded = self.norm("blk.0.attn_norm", self.embedding[np.asarray(tokens)])
                read = np.concatenate([embedded, read], -1)
            y = self.behind(layer, residual, read, positions, seen, keep=True)
        out = self.norm("output_norm", y)
        return out @ self.head.T, out if self.keys.get("norm_output") else y

    def commit(self, features: Array, tokens: Sequence[int]) -> tuple[Doubles, Doubles]:
        """The same for a chain of rows with the target's features [n, taps * H_t]."""
        return self.add(self.fuse(features), tokens)


class BlockTwin(_Twin):
    """The arithmetic of DFlash and DSpark."""

    @property
    def mask_token(self) -> int:
        return int(self.keys[MASK])

    @property
    def first_place(self) -> int:
        """The first place of a block that predicts a token."""
        return 0 if self.keys.get("sample_from_anchor") else 1

    def fuse(self, features: Array) -> Doubles:
        """c [n, H] of features [n, taps * H_t]."""
        return self.norm("enc.output_norm", self.linear("fc", np.asarray(features, np.float64)))

    def commit(self, features: Array) -> None:
        """Append K and V of the next positions' features [n, taps * H_t] to every layer's."""
        c, start = self.fuse(features), len(self.kept[0][0])
        self.kept = [self.longer(layer, c, np.arange(start, start + len(c))) for layer in range(self.layers)]

    def block(self, last: int) -> tuple[Doubles, Doubles]:
        """Logits [places, V_d] without a Markov head's correction, and y [places, H] behind the last norm; `last` is
        the last committed token, whose features are not in the context yet."""
        places, context = int(self.keys["block_size"]), len(self.kept[0][0])
        tokens = [last] + [self.mask_token] * (places - 1)
        positions = np.arange(context, context + places)
        seen = np.ones((places, context + places), bool)
        if self.keys.get("attention.causal"):
            seen = np.tri(places, context + places, context, dtype=bool)
        x = self.embedding[np.array(tokens)]
        for layer in range(self.layers):
            x = self.behind(layer, x, self.norm(f"blk.{layer}.attn_norm", x), positions, seen, keep=False)
        y = self.norm("output_norm", x)
        return y @ self.head.T, y

    def correction(self, token: int) -> Doubles:
        """What a Markov head adds to the logits [V_d] behind a target's token; zeros without one."""
        if "markov_w1.weight" not in self.weights:
            return np.zeros(len(self.head))
        return self.linear("markov_w2", self.weights["markov_w1.weight"][token])
