"""Small random EAGLE-3, DFlash and DSpark drafts as GGUF files, and their arithmetic in doubles.

In shapes: H is the draft's width, H_t the target's, V the target's vocabulary, V_d the draft's, n a number of rows.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Protocol, TypeVar

import numpy as np
import numpy.typing as npt
from gguf import GGMLQuantizationType, GGUFReader, quants

from pystaged._core import Model
from support.random_models import add_key, add_vocabulary, gguf_file

Array = npt.NDArray[Any]
Floats = npt.NDArray[np.float32]
Doubles = npt.NDArray[np.float64]
AnyTwin = TypeVar("AnyTwin", bound="_Twin")
MASK = "tokenizer.ggml.mask_token_id"


class Writable(Protocol):
    """What a draft's file is made of."""

    architecture: ClassVar[str]
    quantization: str
    metadata: dict[str, Any]

    @property
    def tokenizer(self) -> bool: ...

    @property
    def vocab_size(self) -> int: ...

    def keys(self) -> dict[str, Any]:
        """Keys of the file, without the architecture's name."""

    def tensors(self) -> dict[str, Array]:
        """Matrices [outputs, inputs], norms around 1, token ids; before they are quantized."""


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
        made = _Maker(self)
        taps, wide = len(self.taps), len(self.taps) * self.target_width
        made.matrix("fc.weight", self.width, wide)
        if self.norm_before_fc:
            made.norm("enc.output_norm.weight", wide)
        if self.separate_fc_norm:
            made.norm("fc_norm.weight", taps, self.target_width)
        for layer in range(self.layers):
            if not layer:
                made.norm("blk.0.attn_norm_2.weight", self.width)
            made.layer(layer, self.width if layer else 2 * self.width, self.head_norms)
        return made.tensors


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
        made, rank = _Maker(self), self.markov_rank
        made.matrix("fc.weight", self.width, len(self.taps) * self.target_width)
        made.norm("enc.output_norm.weight", self.width)
        for layer in range(self.layers):
            made.layer(layer, self.width, True)
        if rank:
            made.matrix("markov_w1.weight", self.vocab_size, rank)
            made.matrix("markov_w2.weight", self.num_rows, rank, scale=4)
        return made.tensors


def dspark(**options: Any) -> Block:
    """A DSpark draft as DeepSeek makes them."""
    return Block(**{"from_anchor": True, "markov_rank": 16} | options)


def write_draft(path: Path, draft: Writable, changed: Mapping[str, Array | None] | None = None) -> Path:
    """Write a draft; the same seed gives the same file.

    Args:
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


class _Maker:
    """Makes random tensors by name."""

    def __init__(self, draft: RandomDraft) -> None:
        self._draft, self._random = draft, np.random.default_rng(draft.seed)
        self.tensors: dict[str, Array] = {}
        if draft.own_embedding:
            self.matrix("token_embd.weight", draft.vocab_size, draft.width)
        self.norm("output_norm.weight", draft.width)
        if draft.own_head:
            self.matrix("output.weight", draft.num_rows, draft.width)
        if draft.num_rows < draft.vocab_size:
            kept = self._random.choice(draft.vocab_size, draft.num_rows, replace=False)
            self.tensors["d2t"] = np.sort(kept).astype(np.int64)
        if draft.rope_factors:
            factors = np.linspace(1, 8, draft.head_dim // 2)
            self.tensors["rope_freqs.weight"] = factors.astype(np.float32)

    def matrix(self, name: str, rows: int, cols: int, scale: float = 1) -> None:
        values = scale * self._random.standard_normal((rows, cols)) / np.sqrt(cols)
        self.tensors[name] = values.astype(np.float32)

    def norm(self, name: str, *shape: int) -> None:
        self.tensors[name] = (1 + 0.1 * self._random.standard_normal(shape)).astype(np.float32)

    def layer(self, layer: int, inputs: int, head_norms: bool) -> None:
        m = self._draft
        block, q, kv = f"blk.{layer}", m.heads * m.head_dim, m.kv_heads * m.head_dim
        self.norm(f"{block}.attn_norm.weight", m.width)
        for name, rows in (("q", q), ("k", kv), ("v", kv)):
            self.matrix(f"{block}.attn_{name}.weight", rows, inputs)
        for name in ("q", "k") if head_norms else ():
            self.norm(f"{block}.attn_{name}_norm.weight", m.head_dim)
        self.matrix(f"{block}.attn_output.weight", m.width, q)
        self.norm(f"{block}.ffn_norm.weight", m.width)
        self.matrix(f"{block}.ffn_gate.weight", m.ffn_width, m.width)
        self.matrix(f"{block}.ffn_up.weight", m.ffn_width, m.width)
        self.matrix(f"{block}.ffn_down.weight", m.width, m.ffn_width)


@dataclass
class Contents:
    """A draft's file: keys without the architecture's name, and tensors in doubles or int64."""

    architecture: str
    keys: dict[str, Any]
    tensors: dict[str, Array]

    @classmethod
    def made(cls, draft: Eagle3 | Block) -> Contents:
        """Of a draft that no file holds, unquantized."""
        doubles = {name: each if name == "d2t" else each.astype(np.float64) for name, each in draft.tensors().items()}
        return cls(draft.architecture, draft.keys() | draft.metadata, doubles)

    @classmethod
    def of(cls, path: Path) -> Contents:
        reader = GGUFReader(path)
        found = {name: value.contents() for name, value in reader.fields.items()}
        architecture = found["general.architecture"]
        tensors = {}
        for tensor in reader.tensors:
            if tensor.tensor_type in (GGMLQuantizationType.I32, GGMLQuantizationType.I64):
                tensors[tensor.name] = np.array(tensor.data, np.int64)
            else:
                tensors[tensor.name] = quants.dequantize(tensor.data, tensor.tensor_type).astype(np.float64)
        keys = {name.removeprefix(f"{architecture}."): value for name, value in found.items()}
        return cls(architecture, keys, tensors)


class _Twin:
    """What both kinds compute alike.

    Args:
        embedding, head: the target's, [V, H_t]; used where the file has none of its own.
        adjacent: the rotary pairs' layout, a file's by default; else halves of a head.
    """

    are_adjacent: bool  # in files

    def __init__(
        self,
        contents: Contents,
        embedding: Array | None = None,
        head: Array | None = None,
        *,
        adjacent: bool | None = None,
    ) -> None:
        self.keys, self.tensors = contents.keys, contents.tensors
        self.width, self.layers = self.keys["embedding_length"], self.keys["block_count"]
        self.heads, self.kv_heads = self.keys["attention.head_count"], self.keys["attention.head_count_kv"]
        self.dim = self.keys["attention.key_length"]
        self.d2t: npt.NDArray[np.int64] | None = self.tensors.get("d2t")
        if head is not None and self.d2t is not None:
            head = head[self.d2t]
        self.embedding = self._own("token_embd.weight", embedding)
        self.head = self._own("output.weight", head)
        self._adjacent = self.are_adjacent if adjacent is None else adjacent
        self._epsilon = self.keys["attention.layer_norm_rms_epsilon"]
        pairs = np.arange(self.keys.get("rope.dimension_count", self.dim) // 2)
        frequencies = self.keys["rope.freq_base"] ** (-pairs / len(pairs))
        if self.keys.get("rope.scaling.type") == "linear":
            frequencies /= self.keys["rope.scaling.factor"]
        self._frequencies = frequencies / self.tensors.get("rope_freqs.weight", 1)
        self.clear()

    @classmethod
    def of(cls: type[AnyTwin], path: Path, embedding: Array | None = None, head: Array | None = None) -> AnyTwin:
        """The twin of a file."""
        return cls(Contents.of(path), embedding, head)

    def clear(self) -> None:
        """Forget all rows."""
        raise NotImplementedError

    def _own(self, name: str, borrowed: Array | None) -> Doubles:
        found = self.tensors.get(name, borrowed)
        if found is None:
            raise ValueError(f"the draft borrows {name} from its target, and none is given")
        return np.asarray(found, np.float64)

    def logits(self, vectors: Doubles) -> Doubles:
        """Logits [n, V_d] of vectors [n, H] behind the last norm."""
        return vectors @ self.head.T

    def norm(self, vectors: Doubles, name: str) -> Doubles:
        """RMS norm over the last axis."""
        scale = np.sqrt((vectors**2).mean(-1, keepdims=True) + self._epsilon)
        return np.asarray(vectors / scale * self.tensors[f"{name}.weight"])

    def keys_values(self, layer: int, x: Doubles, positions: npt.ArrayLike) -> tuple[Doubles, Doubles]:
        """K and V [n, kv heads, head width] of a layer's inputs [n, H or 2H]."""
        return (
            self._rotated(layer, "k", x, self.kv_heads, positions),
            (x @ self._matrix(layer, "attn_v").T).reshape(len(x), self.kv_heads, self.dim),
        )

    def attention(
        self, layer: int, x: Doubles, positions: npt.ArrayLike, k: Doubles, v: Doubles, seen: npt.NDArray[np.bool_]
    ) -> Doubles:
        """What attention adds [n, H]; `seen` [n, m] says which of m keys each row sees."""
        q = self._rotated(layer, "q", x, self.heads, positions)
        found = np.empty((len(x), self.heads, self.dim))
        for h in range(self.heads):
            g = h // (self.heads // self.kv_heads)
            scores = np.where(seen, q[:, h] @ k[:, g].T / np.sqrt(self.dim), -np.inf)
            weights = np.exp(scores - scores.max(-1, keepdims=True))
            found[:, h] = weights / weights.sum(-1, keepdims=True) @ v[:, g]
        return np.asarray(found.reshape(len(x), -1) @ self._matrix(layer, "attn_output").T)

    def feed_forward(self, layer: int, r: Doubles) -> Doubles:
        """What the feed-forward part adds [n, H]."""
        z = self.norm(r, f"blk.{layer}.ffn_norm")
        gate = z @ self._matrix(layer, "ffn_gate").T
        hidden = gate / (1 + np.exp(-gate)) * (z @ self._matrix(layer, "ffn_up").T)
        return np.asarray(hidden @ self._matrix(layer, "ffn_down").T)

    def _matrix(self, layer: int, name: str) -> Doubles:
        return np.asarray(self.tensors[f"blk.{layer}.{name}.weight"])

    def _rotated(self, layer: int, part: str, x: Doubles, heads: int, positions: npt.ArrayLike) -> Doubles:
        found = (x @ self._matrix(layer, f"attn_{part}").T).reshape(len(x), heads, self.dim)
        if f"blk.{layer}.attn_{part}_norm.weight" in self.tensors:
            found = self.norm(found, f"blk.{layer}.attn_{part}_norm")
        half = len(self._frequencies)
        angles = np.asarray(positions, np.float64)[:, None, None] * self._frequencies
        first, second = (
            (slice(0, 2 * half, 2), slice(1, 2 * half, 2))
            if self._adjacent
            else (slice(0, half), slice(half, 2 * half))
        )
        a, b = found[..., first], found[..., second]
        turned = found.copy()
        turned[..., first] = a * np.cos(angles) - b * np.sin(angles)
        turned[..., second] = a * np.sin(angles) + b * np.cos(angles)
        return turned


class Eagle3Twin(_Twin):
    """EAGLE-3's arithmetic.

    Rows are numbered in the order in which they are added; a row sees itself and its ancestors. Committed rows form a
    chain: row P reads the features of position P and the token of position P + 1.
    """

    are_adjacent = True

    def clear(self) -> None:
        self.crop(0)

    def crop(self, rows: int) -> None:
        """Keep the first rows only."""
        if not rows:
            self._parents: list[int] = []
            self._depths: list[int] = []
            empty = np.empty((0, self.kv_heads, self.dim))
            self._kept = [(empty, empty)] * self.layers
        self._parents, self._depths = self._parents[:rows], self._depths[:rows]
        self._kept = [(k[:rows], v[:rows]) for k, v in self._kept]

    def fuse(self, features: Array) -> Doubles:
        """g [n, H] of features [n, taps * H_t]."""
        x = np.asarray(features, np.float64)
        if self.keys.get("norm_before_fc"):
            x = self.norm(x, "enc.output_norm")
        if "fc_norm.weight" in self.tensors:
            taps = len(self.keys["target_layers"])
            x = self.norm(x.reshape(len(x), taps, -1), "fc_norm").reshape(len(x), -1)
        return np.asarray(x @ self.tensors["fc.weight"].T)

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
            residual, read = y, self.norm(y, f"blk.{layer}.attn_norm{'' if layer else '_2'}")
            if not layer:
                residual = read if self.keys.get("norm_before_residual") else y
                embedded = self.norm(self.embedding[np.asarray(tokens)], "blk.0.attn_norm")
                read = np.concatenate([embedded, read], -1)
            new = self.keys_values(layer, read, positions)
            k, v = (np.concatenate(each) for each in zip(self._kept[layer], new, strict=True))
            self._kept[layer] = k, v
            r = residual + self.attention(layer, read, positions, k, v, seen)
            y = r + self.feed_forward(layer, r)
        out = self.norm(y, "output_norm")
        return self.logits(out), out if self.keys.get("norm_output") else y

    def commit(self, features: Array, tokens: Sequence[int]) -> tuple[Doubles, Doubles]:
        """The same for a chain of rows with the target's features [n, taps * H_t]."""
        return self.add(self.fuse(features), tokens)


class BlockTwin(_Twin):
    """The arithmetic of DFlash and DSpark."""

    are_adjacent = False

    def clear(self) -> None:
        empty = np.empty((0, self.kv_heads, self.dim))
        self.kept = [(empty, empty)] * self.layers

    @property
    def mask_token(self) -> int:
        return int(self.keys[MASK])

    @property
    def first_place(self) -> int:
        """The first place of a block that predicts a token."""
        return 0 if self.keys.get("sample_from_anchor") else 1

    def fuse(self, features: Array) -> Doubles:
        """c [n, H] of features [n, taps * H_t]."""
        return self.norm(np.asarray(features, np.float64) @ self.tensors["fc.weight"].T, "enc.output_norm")

    def commit(self, features: Array) -> list[tuple[Doubles, Doubles]]:
        """Append K and V of the next positions' features [n, taps * H_t] to every layer's; the appended ones."""
        c = self.fuse(features)
        start = len(self.kept[0][0])
        new = [self.keys_values(layer, c, np.arange(start, start + len(c))) for layer in range(self.layers)]
        self.kept = [
            (np.concatenate([k, more_k]), np.concatenate([v, more_v]))
            for (k, v), (more_k, more_v) in zip(self.kept, new, strict=True)
        ]
        return new

    def block(self, last: int, places: int | None = None) -> tuple[Doubles, Doubles]:
        """Logits [places, V_d] without a Markov head's correction, and y [places, H] behind the last norm.

        Args:
            last: the last committed token, whose features are not in the context yet.
            places: block_size if None.
        """
        places = places or int(self.keys["block_size"])
        context = len(self.kept[0][0])
        tokens = [last] + [self.mask_token] * (places - 1)
        positions = np.arange(context, context + places)
        seen = np.ones((places, context + places), bool)
        if self.keys.get("attention.causal"):
            seen = np.tri(places, context + places, context, dtype=bool)
        x = self.embedding[np.array(tokens)]
        for layer in range(self.layers):
            read = self.norm(x, f"blk.{layer}.attn_norm")
            new = self.keys_values(layer, read, positions)
            k, v = (np.concatenate(each) for each in zip(self.kept[layer], new, strict=True))
            r = x + self.attention(layer, read, positions, k, v, seen)
            x = r + self.feed_forward(layer, r)
        y = self.norm(x, "output_norm")
        return self.logits(y), y

    def correction(self, token: int) -> Doubles:
        """What a Markov head adds to the logits [V_d] behind a target's token; zeros without one."""
        if "markov_w1.weight" not in self.tensors:
            return np.zeros(len(self.head))
        return np.asarray(self.tensors["markov_w2.weight"] @ self.tensors["markov_w1.weight"][token])
