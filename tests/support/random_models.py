"""Small random GGUF models of every family, written with the gguf package alone."""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import llama_cpp
import numpy as np
import numpy.typing as npt
from gguf import GGMLQuantizationType, GGUFReader, GGUFValueType, GGUFWriter, LlamaFileType, TokenType, quants

Floats = npt.NDArray[np.float32]

LAYER_NORM = {"gpt2", "starcoder2", "stablelm"}
NO_GATE = {"gpt2", "starcoder2"}
SPACES = {"granitehybrid", "nemotron_h", "nemotron_h_moe", "falcon-h1"}
DELTA_NETS = {"qwen35", "qwen35moe", "qwen3next"}
SHORT_CONVOLUTIONS = {"lfm2", "lfm2moe"}
SHARED_GATE = {"qwen2moe", "qwen35moe", "qwen3next"}
END_OF_TEXT = "<|endoftext|>"
SPACE = "\u0120"  # how GPT-2 spells the byte 0x20
# Roughly as often as in English, so that merges apply to real text.
LETTERS = "eeeeeeeeettttttaaaaaoooooiiiiinnnnnsssshhhhrrrrdddlllccuummwwffggyyppbvkjxqz"
TAPS, LONG_TAPS = 3, 4  # of short convolutions, and of those before other recurrences


@dataclass
class RandomModel:
    """What to write: a shape, and which of a family's options.

    Attributes:
        family: general.architecture.
        head_dim: 0 for width / heads.
        biases: of every matrix of a layer that the family may have them for.
        fused: one matrix for queries, keys and values.
        recurrent: layers that are recurrent, where the family has such.
        feeding: layers that are feed-forward networks alone, where the family has such.
        ahead: layers behind the last that predict further tokens (MTP).
        delta_heads: of a delta net's keys and of its values, and how wide they are.
        spaces: heads of a state space, groups of them, and numbers of a state; together they are twice as wide as the
            model.
        keys_are_values: in layers without a window, where layers differ.
        space_norm: whether there is a norm of what state spaces make.
        experts: experts of a layer, those of a row, how wide each is, and how wide the one that all rows share is; 0
            for none. dense: layers before the first one with experts.
        selection_bias: of the scores that experts are chosen by.
        fused_experts: one tensor for the gates and what they open.
        latent: of latent attention, numbers of a latent row, of what queries are made of (0 for the input itself), of a
            query's own part, of its turned part and of a value; 0 for other attention.
        absorbed: whether heads attend to latent rows as they are; the same model either way.
        vocabulary: writes a tokenizer of so many tokens; add_vocabulary() if there is none.
        metadata: further keys under the family's name, or other values: floats, integers, booleans, strings, lists.
        vectors: further tensors of one dimension, by name.
        marks: control tokens that take the place of made-up ones, by id.
        quantization: of the matrices: a type that gguf can quantize to.
        types: of single matrices, by a part of their name.
    """

    family: str
    width: int = 64
    layers: int = 2
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 0
    ffn_width: int = 96
    vocab_size: int = 300
    context: int = 512
    rotary: int = 0
    tie: bool = True
    biases: bool = False
    fused: bool = False
    recurrent: tuple[int, ...] = ()
    feeding: tuple[int, ...] = ()
    ahead: int = 0
    delta_heads: tuple[int, int, int] = (2, 4, 16)
    spaces: tuple[int, int, int] = (8, 2, 32)
    space_norm: bool = True
    experts: tuple[int, int, int, int] = (0, 0, 0, 0)
    dense: int = 0
    selection_bias: bool = False
    fused_experts: bool = False
    latent: tuple[int, int, int, int, int] = (0, 0, 0, 0, 0)
    absorbed: bool = True
    keys_are_values: bool = False
    parallel: bool = False
    own_head_norms: bool = False
    head_bias: bool = False
    quantization: str = "F32"
    types: dict[str, str] = field(default_factory=dict)
    seed: int = 0
    vocabulary: Callable[[GGUFWriter, int], object] | None = None
    metadata: dict[str, Any] = field(default_factory=dict)
    vectors: dict[str, Floats] = field(default_factory=dict)
    marks: dict[int, str] = field(default_factory=dict)

    @property
    def dim(self) -> int:
        return self.head_dim or self.width // self.heads

    def windowed(self, layer: int) -> bool:
        pattern = self.metadata.get("attention.sliding_window_pattern", ())
        return self.family == "gemma4" and bool(pattern[layer])

    def stores_keys(self, layer: int) -> bool:
        return not 0 < self.layers - layer <= int(self.metadata.get("attention.shared_kv_layers", 0))

    def number(self, key: str, layer: int, otherwise: int) -> int:
        """One that layers may differ in."""
        value = self.metadata.get(key, otherwise)
        return int(value if isinstance(value, int) else value[layer])


def recorded(record: Mapping[str, Any], vectors: Mapping[str, dict[str, Floats]]) -> RandomModel:
    """A model of a line of JSON, which has its fields and the name of its vectors."""
    fields = {name: tuple(value) if isinstance(value, list) else value for name, value in record.items()}
    return RandomModel(**fields | {"vectors": vectors[record["vectors"]] if "vectors" in record else {}})


Change = Callable[[dict[str, Floats]], object]


def write(path: Path, model: RandomModel, change: Change | None = None) -> Path:
    """Write a model: matrices and biases around 0, norms around 1; the same seed gives the same file.

    Args:
        path: the file.
        model: what to write.
        change: called with the tensors, by name, to damage them.
    """
    m = model
    found = tensors(m)
    if change:
        change(found)
    with gguf_file(path, m.family) as writer:
        writer.add_name("random weights")
        keys: dict[str, Any] = {
            "context_length": m.context,
            "embedding_length": m.width,
            "feed_forward_length": m.ffn_width,
            "block_count": m.layers + m.ahead,
            "attention.head_count": m.heads,
            "attention.head_count_kv": m.kv_heads,
        }
        if m.head_dim:
            keys |= {"attention.key_length": m.head_dim, "attention.value_length": m.head_dim}
        if m.experts[0]:
            keys["expert_count"], keys["expert_used_count"], width, shared = m.experts
            keys["expert_feed_forward_length"] = width
            if shared:
                keys["expert_shared_feed_forward_length"], keys["expert_shared_count"] = shared, shared // width
            if m.dense:
                keys["leading_dense_block_count"] = m.dense
        if m.family in (*LAYER_NORM, "nemotron_h", "nemotron_h_moe"):
            keys["attention.layer_norm_epsilon"] = 1e-5
        else:
            keys["attention.layer_norm_rms_epsilon"] = 1e-6
        if m.family != "gpt2":
            keys["rope.dimension_count"] = m.rotary or m.dim
        if m.family in ("granite", "granitemoe"):
            keys["logit_scale"] = 8.0
        if m.family in (*SHORT_CONVOLUTIONS, "granitehybrid", "nemotron_h", "nemotron_h_moe"):
            apart = (*m.recurrent, *m.feeding)
            keys["attention.head_count_kv"] = [0 if i in apart else m.kv_heads for i in range(m.layers)]
        if m.family.startswith("nemotron_h"):
            keys["feed_forward_length"] = [m.ffn_width if i in m.feeding else 0 for i in range(m.layers)]
        if m.family in SHORT_CONVOLUTIONS:
            keys["shortconv.l_cache"] = TAPS
        if m.family in SPACES:
            keys["ssm.conv_kernel"], keys["ssm.inner_size"] = LONG_TAPS, 2 * m.width
            keys["ssm.time_step_rank"], keys["ssm.group_count"], keys["ssm.state_size"] = m.spaces
        if m.family in DELTA_NETS:
            key_heads, value_heads, size = m.delta_heads
            keys["ssm.conv_kernel"], keys["ssm.state_size"] = LONG_TAPS, size
            keys["ssm.group_count"], keys["ssm.time_step_rank"] = key_heads, value_heads
            keys["ssm.inner_size"] = value_heads * size
            pairs = (m.rotary or m.dim) // 2
            keys["rope.dimension_sections"] = [(pairs + 2) // 3, (pairs + 1) // 3, pairs // 3, 0]
            if m.recurrent != tuple(i for i in range(m.layers) if i % 4 != 3):
                keys["attention.recurrent_layers"] = [i in m.recurrent for i in range(m.layers + m.ahead)]
        if m.latent[0]:
            rank, query_rank, own, turned, value = m.latent
            keys["attention.kv_lora_rank"], keys["rope.dimension_count"] = rank, turned
            keys["attention.key_length"], keys["attention.value_length"] = own + turned, value
            if query_rank:
                keys["attention.q_lora_rank"] = query_rank
            if m.absorbed:
                keys["attention.key_length_mla"], keys["attention.value_length_mla"] = own + turned, value
                keys["attention.key_length"], keys["attention.value_length"] = rank + turned, rank
            keys["attention.head_count_kv"] = 1 if m.absorbed else m.heads
        if m.ahead:
            keys["nextn_predict_layers"] = m.ahead
        for key, value in (keys | m.metadata).items():
            add_key(writer, f"{m.family}.{key}", value)
        if m.vocabulary:
            m.vocabulary(writer, m.vocab_size)
        else:
            add_vocabulary(writer, m.vocab_size, m.marks)
        for name, values in found.items():
            if values.ndim >= 2 and not re.search(r"^position|norm|conv1d|\.conv\.|ssm_[ad]$|bias$|gate_inp", name):
                own = [kind for part, kind in m.types.items() if part in name]
                kind = GGMLQuantizationType[own[0] if own else m.quantization]
                writer.add_tensor(name, quants.quantize(values, kind), raw_dtype=kind)
            else:
                writer.add_tensor(name, values)
    return path


def write_without(path: Path, model: RandomModel, parts: Sequence[str]) -> Path:
    """Write a model without the tensors that have one of these parts in their names."""

    def drop(tensors: dict[str, Floats]) -> None:
        for name in [name for name in tensors if any(part in name for part in parts)]:
            del tensors[name]

    return write(path, model, drop)


def quantize(source: Path, path: Path, file_type: str) -> Path:
    """A copy of a model in one of llama.cpp's mixtures, by its own quantizer: "MOSTLY_Q4_K_M", ..."""
    params = llama_cpp.llama_model_quantize_default_params()
    params.ftype, params.nthread = LlamaFileType[file_type].value, 1
    if llama_cpp.llama_model_quantize(str(source).encode(), str(path).encode(), params) != 0:
        raise ValueError(f"llama.cpp cannot quantize {source} to {file_type}")
    return path


def split(
    path: Path, folder: Path, count: int, *, overlap: bool = False, changed: Mapping[str, int] | None = None
) -> list[Path]:
    """A model in several files, as llama.cpp's tool splits them."""
    reader = GGUFReader(path)
    share = -(-len(reader.tensors) // count)
    paths = [folder / f"part-{i + 1:05d}-of-{count:05d}.gguf" for i in range(count)]
    for i, part in enumerate(paths):
        with gguf_file(part, "llama") as writer:
            if i == 0:
                _copy_keys(reader, writer)
            numbers = {"split.no": i, "split.count": count, "split.tensors.count": len(reader.tensors)}
            for key, number in (numbers | dict(changed or {})).items():
                (writer.add_int32 if "tensors" in key else writer.add_uint16)(key, number)
            for tensor in reader.tensors[i * share - overlap : (i + 1) * share]:
                writer.add_tensor(tensor.name, np.array(tensor.data), raw_dtype=tensor.tensor_type)
    return paths


def dequantized(path: Path, copy: Path) -> Path:
    """A copy of a model whose weights are F32, the numbers that the file's stand for."""
    reader = GGUFReader(path)
    with gguf_file(copy, reader.fields["general.architecture"].contents()) as writer:
        _copy_keys(reader, writer)
        for tensor in reader.tensors:
            writer.add_tensor(tensor.name, quants.dequantize(tensor.data, tensor.tensor_type).astype(np.float32))
    return copy


def _copy_keys(reader: GGUFReader, writer: GGUFWriter) -> None:
    for name, value in reader.fields.items():
        if not name.startswith(("GGUF.", "general.architecture")):
            element = value.types[-1] if value.types[0] is GGUFValueType.ARRAY else None
            writer.add_key_value(name, value.contents(), value.types[0], sub_type=element)


@contextmanager
def gguf_file(path: Path, family: str) -> Iterator[GGUFWriter]:
    """A writer of a file, which is whole when the context ends."""
    with closing(GGUFWriter(path, family)) as writer:
        yield writer
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()


def add_key(writer: GGUFWriter, key: str, value: Any) -> None:
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    else:
        writer.add_array(key, value)


def add_pairs(
    writer: GGUFWriter, tokens: Sequence[str], kinds: Sequence[int] = (), merges: Sequence[str] = (), pre: str = "gpt-2"
) -> None:
    """A byte-pair vocabulary of these tokens; without merges, one of the first two that applies to none."""
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(tokens)
    if kinds:
        writer.add_token_types([int(kind) for kind in kinds])
    writer.add_token_merges(merges or [f"{tokens[0]} {tokens[1]}"])


def add_vocabulary(
    writer: GGUFWriter,
    size: int,
    marks: Mapping[int, str] | None = None,
    *,
    pre: str = "gpt-2",
    begins: int | None = None,
    ends: int | None = None,
    merges: Sequence[str] | None = None,
) -> None:
    """A byte-level BPE vocabulary: 256 bytes, what merges make, marks in place of some of that, and the end of text."""
    tokens = byte_alphabet()
    if merges is None:
        merges = [f"{a} {b}" for a in "etaoinshr" for b in tokens[:94]][: size - 257]
    marks = {**(marks or {}), size - 1: END_OF_TEXT}
    names = dict(enumerate([*tokens, *(merge.replace(" ", "") for merge in merges)])) | marks
    kinds = [TokenType.CONTROL if token in marks else TokenType.NORMAL for token in range(size)]
    kept = [merge for i, merge in enumerate(merges) if 256 + i not in marks] or [f"a {END_OF_TEXT}"]
    add_pairs(writer, [names[token] for token in range(size)], kinds, kept, pre=pre)
    writer.add_bos_token_id(size - 1 if begins is None else begins)
    writer.add_eos_token_id(size - 1 if ends is None else ends)


def add_english(writer: GGUFWriter, size: int) -> None:
    """The vocabulary of synthetic_merges."""
    add_vocabulary(writer, size, merges=synthetic_merges(size))


def synthetic_merges(vocab_size: int) -> list[str]:
    """Merges of a made-up byte-level vocabulary, each making a token; those of a smaller one are the first of a larger
    one's."""
    merges, known, stems = list[str](), set(byte_alphabet()), [SPACE, *LETTERS]
    choose = random.Random(0).choice
    while len(merges) < vocab_size - 257:
        left, right = choose(stems), choose(LETTERS)
        if left + right not in known:
            known.add(left + right)
            stems.append(left + right)
            merges.append(f"{left} {right}")
    return merges


def byte_alphabet() -> list[str]:
    """The 256 characters GPT-2 spells bytes with, in its vocabulary's order: bytes that stand for themselves first."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    return [chr(byte) for byte in printable] + [chr(0x100 + i) for i in range(256 - len(printable))]


def add_sentencepiece(writer: GGUFWriter, size: int, byte_tokens: bool = True, marks: Sequence[str] = ()) -> None:
    """A SentencePiece vocabulary: three control tokens, bytes, made-up pieces, a mark, a user-defined token, and more
    marks."""
    pieces = ["\u2581", *"ethoainsrl", "he", "th", "the", "\u2581the", "\u2581o", "ing", "in", "er", "\u2581\u2581"]
    tokens = ["<unk>", "<s>", "</s>"]
    types = [TokenType.UNKNOWN, TokenType.CONTROL, TokenType.CONTROL]
    if byte_tokens:
        tokens += [f"<0x{byte:02X}>" for byte in range(256)]
        types += [TokenType.BYTE] * 256
    tokens += [*pieces, "<|tool|>", "<think>"]
    types += [TokenType.NORMAL] * len(pieces) + [TokenType.CONTROL, TokenType.USER_DEFINED]
    tokens += marks
    types += [TokenType.CONTROL] * len(marks)
    spare = size - len(tokens)
    tokens += [f"<unused{i}>" for i in range(spare)]
    types += [TokenType.UNUSED] * spare
    writer.add_tokenizer_model("llama")
    writer.add_token_list(tokens)
    writer.add_token_scores([-float(i) for i in range(len(tokens))])
    writer.add_token_types([int(kind) for kind in types])


class Tensors(dict[str, Any]):
    """Random tensors by name, drawn in the order in which they are added: matrices and biases around 0, norms around
    1."""

    def __init__(self, seed: int) -> None:
        self.random = np.random.default_rng(seed)

    def matrix(self, name: str, rows: int, cols: int, bias: bool = False, scale: float = 1) -> None:
        values = scale * self.random.standard_normal((rows, cols)) / np.sqrt(cols)
        self._add(name, values, bias, (rows,))

    def norm(self, name: str, *shape: int, bias: bool = False, scale: float = 1) -> None:
        self._add(name, scale * (1 + 0.1 * self.random.standard_normal(shape)), bias, shape)

    def _add(self, name: str, values: npt.NDArray[np.float64], bias: bool, shape: tuple[int, ...]) -> None:
        self[f"{name}.weight"] = values.astype(np.float32)
        if bias:
            self[f"{name}.bias"] = (self.random.standard_normal(shape) * 0.1).astype(np.float32)


def tensors(m: RandomModel) -> dict[str, Floats]:
    """All tensors of a model, outputs before inputs."""
    found = Tensors(m.seed)
    generator, matrix, norm = found.random, found.matrix, found.norm
    family, layer_norm = m.family, m.family in LAYER_NORM
    matrix("token_embd", m.vocab_size, m.width)
    own = int(m.metadata.get("embedding_length_per_layer_input", 0))
    if own:
        matrix("per_layer_token_embd", m.vocab_size, m.layers * own)
        matrix("per_layer_model_proj", m.layers * own, m.width)
        norm("per_layer_proj_norm", own)
    if family == "gpt2":
        matrix("position_embd", m.context, m.width)
    norm("token_embd_norm" if family in SHORT_CONVOLUTIONS else "output_norm", m.width, bias=layer_norm)
    if not m.tie:
        matrix("output", m.vocab_size, m.width)
    if m.head_bias:
        found["output.bias"] = generator.standard_normal(m.vocab_size).astype(np.float32)
    found.update(m.vectors)
    for layer in range(m.layers + m.ahead):
        block = f"blk.{layer}"
        dim = int(m.metadata["attention.key_length_swa"]) if m.windowed(layer) else m.dim
        ffn_width = m.number("feed_forward_length", layer, m.ffn_width)
        q, kv = m.heads * dim, m.number("attention.head_count_kv", layer, m.kv_heads) * dim
        if family != "olmo2":
            norm(f"{block}.attn_norm", m.width, bias=layer_norm)
            if family in (*DELTA_NETS, "glm4moe", "gpt-oss"):
                norm(f"{block}.post_attention_norm", m.width)
            elif family == "falcon-h1":
                norm(f"{block}.ffn_norm", m.width)
                found[f"{block}.ffn_norm"] = found.pop(f"{block}.ffn_norm.weight")
            elif not m.parallel and not family.startswith("nemotron_h"):
                norm(f"{block}.ffn_norm", m.width, bias=layer_norm)
        if family in ("olmo2", "gemma2", "gemma3", "gemma4"):
            norm(f"{block}.post_attention_norm", m.width)
            norm(f"{block}.post_ffw_norm", m.width)
        if layer >= m.layers:
            matrix(f"{block}.nextn.eh_proj", m.width, 2 * m.width)
            for name in ("enorm", "hnorm", "shared_head_norm"):
                norm(f"{block}.nextn.{name}", m.width)
        if layer in m.recurrent and family in DELTA_NETS:
            key_heads, value_heads, size = m.delta_heads
            channels = (2 * key_heads + value_heads) * size
            if family == "qwen3next":  # in the order of its older files
                matrix(f"{block}.ssm_in", channels + value_heads * size, m.width)
                matrix(f"{block}.ssm_ba", 2 * value_heads, m.width)
            else:
                matrix(f"{block}.attn_qkv", channels, m.width)
                matrix(f"{block}.attn_gate", value_heads * size, m.width)
                matrix(f"{block}.ssm_beta", value_heads, m.width)
                matrix(f"{block}.ssm_alpha", value_heads, m.width)
            matrix(f"{block}.ssm_conv1d", channels, LONG_TAPS)
            found[f"{block}.ssm_a"] = -np.exp(generator.standard_normal(value_heads) / 2).astype(np.float32)
            found[f"{block}.ssm_dt.bias"] = generator.standard_normal(value_heads).astype(np.float32)
            norm(f"{block}.ssm_norm", size)
            matrix(f"{block}.ssm_out", m.width, value_heads * size)
        elif (layer in m.recurrent and family in SPACES) or family == "falcon-h1":
            count, groups, size = m.spaces
            inner, channels = 2 * m.width, 2 * m.width + 2 * groups * size
            matrix(f"{block}.ssm_in", inner + channels + count, m.width)
            matrix(f"{block}.ssm_conv1d", channels, LONG_TAPS, bias=True)
            found[f"{block}.ssm_a"] = -np.exp(generator.standard_normal((count, 1)) / 2).astype(np.float32)
            found[f"{block}.ssm_dt.bias"] = generator.standard_normal(count).astype(np.float32)
            found[f"{block}.ssm_d"] = generator.standard_normal((count, 1)).astype(np.float32)
            if m.space_norm:
                norm(f"{block}.ssm_norm", groups, inner // groups)
            matrix(f"{block}.ssm_out", m.width, inner)
        elif layer in m.recurrent:
            matrix(f"{block}.shortconv.in_proj", 3 * m.width, m.width)
            matrix(f"{block}.shortconv.conv", m.width, TAPS)
            matrix(f"{block}.shortconv.out_proj", m.width, m.width)
        elif family in ("qwen3", "qwen3moe", "bailingmoe2", "gemma3", "gemma4", *SHORT_CONVOLUTIONS, *DELTA_NETS):
            norm(f"{block}.attn_q_norm", dim)
            if family == "gemma4":
                found[f"{block}.attn_q_norm.weight"] /= np.float32(np.sqrt(dim))  # as nothing else scales scores
            if m.stores_keys(layer):
                norm(f"{block}.attn_k_norm", dim)
        elif family in ("olmo2", "olmoe"):
            norm(f"{block}.attn_q_norm", q)
            norm(f"{block}.attn_k_norm", kv)
        elif m.own_head_norms:
            norm(f"{block}.attn_q_norm", m.heads, m.dim)
            norm(f"{block}.attn_k_norm", m.kv_heads, m.dim)
        always = family in NO_GATE
        other = always or (m.biases and family in ("llama", "mistral3", "granite", "nemotron_h", "gpt-oss"))
        if m.latent[0]:
            rank, query_rank, own_dim, turned, value = m.latent
            queries = m.heads * (own_dim + turned)
            if query_rank:
                matrix(f"{block}.attn_q_a", query_rank, m.width)
                norm(f"{block}.attn_q_a_norm", query_rank)
                matrix(f"{block}.attn_q_b", queries, query_rank)
            else:
                matrix(f"{block}.attn_q", queries, m.width)
            matrix(f"{block}.attn_kv_a_mqa", rank + turned, m.width)
            norm(f"{block}.attn_kv_a_norm", rank)
            matrix(f"{block}.attn_kv_b", m.heads * (own_dim + value), rank)
            if m.absorbed:
                of_heads = found.pop(f"{block}.attn_kv_b.weight").reshape(m.heads, -1, rank)
                found[f"{block}.attn_k_b.weight"] = of_heads[:, :own_dim].transpose(0, 2, 1).copy()
                found[f"{block}.attn_v_b.weight"] = of_heads[:, own_dim:].copy()
            matrix(f"{block}.attn_output", m.width, m.heads * value)
        elif layer not in (*m.recurrent, *m.feeding):
            if m.fused or family == "gpt2":
                matrix(f"{block}.attn_qkv", q + 2 * kv, m.width, m.biases or family == "gpt2")
            else:
                gates = q if family in DELTA_NETS else 0
                matrix(f"{block}.attn_q", q + gates, m.width, m.biases)
                if m.stores_keys(layer):
                    matrix(f"{block}.attn_k", kv, m.width, m.biases)
                    if m.windowed(layer) or not m.keys_are_values:
                        matrix(f"{block}.attn_v", kv, m.width, m.biases)
            matrix(f"{block}.attn_output", m.width, q, other)
            if family == "gpt-oss":
                found[f"{block}.attn_sinks.weight"] = generator.standard_normal(m.heads).astype(np.float32)
        if family.startswith("nemotron_h") and layer not in m.feeding:
            continue
        gated = family not in (*NO_GATE, "nemotron_h", "nemotron_h_moe")
        if m.experts[0] and layer >= m.dense:
            count, _, width, shared = m.experts

            def experts(name: str, rows: int, cols: int, block: str = block, count: int = count) -> None:
                values = generator.standard_normal((count, rows, cols)) / np.sqrt(cols)
                if family == "gpt-oss" and name != "down":
                    values *= 4  # so that clamps bind
                found[f"{block}.ffn_{name}_exps.weight"] = values.astype(np.float32)
                if family == "gpt-oss":
                    found[f"{block}.ffn_{name}_exps.bias"] = generator.standard_normal((count, rows)).astype(np.float32)

            # Scores far apart, so that no rounding changes the choice.
            matrix(f"{block}.ffn_gate_inp", count, m.width, other)
            found[f"{block}.ffn_gate_inp.weight"] *= 3
            if m.selection_bias:
                found[f"{block}.exp_probs_b.bias"] = (generator.standard_normal(count) * 0.2).astype(np.float32)
            if m.fused_experts:
                experts("gate_up", 2 * width, m.width)
            else:
                if gated:
                    experts("gate", width, m.width)
                experts("up", width, m.width)
            experts("down", m.width, width)
            if shared:
                if gated:
                    matrix(f"{block}.ffn_gate_shexp", shared, m.width)
                matrix(f"{block}.ffn_up_shexp", shared, m.width)
                matrix(f"{block}.ffn_down_shexp", m.width, shared)
            if family == "gemma4":
                for name in ("pre_ffw_norm_2", "post_ffw_norm_1", "post_ffw_norm_2", "ffn_gate_inp", "ffn_down_exps"):
                    norm("beside", count if name == "ffn_down_exps" else m.width)
                    ending = "weight" if "norm" in name else "scale"
                    found[f"{block}.{name}.{ending}"] = found.pop("beside.weight")
                found[f"{block}.ffn_gate_inp.scale"] *= np.float32(np.sqrt(m.width))
            if shared and family in SHARED_GATE:
                opening = generator.standard_normal(m.width) / np.sqrt(m.width)
                found[f"{block}.ffn_gate_inp_shexp.weight"] = opening.astype(np.float32)
            if family != "gemma4":
                continue
        if family == "phi3":
            matrix(f"{block}.ffn_up", 2 * m.ffn_width, m.width)
        else:
            if gated:
                matrix(f"{block}.ffn_gate", ffn_width, m.width, other)
            matrix(f"{block}.ffn_up", ffn_width, m.width, other)
        matrix(f"{block}.ffn_down", m.width, ffn_width, other)
        if own:
            matrix(f"{block}.inp_gate", own, m.width)
            matrix(f"{block}.proj", m.width, own)
            norm(f"{block}.post_norm", m.width)
        if family == "gemma4":
            norm(f"{block}.layer_output_scale", 1)
    return found
