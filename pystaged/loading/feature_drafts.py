"""Checkpoints of drafts that read the target's hidden states (EAGLE-3, DFlash, DSpark): their settings and tensors.

Supported are checkpoints in the formats of SafeAILab's EAGLE, SpecForge, AngelSlim, NVIDIA's
ModelOpt, Speculators, DeepSpec and z-lab's DFlash.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pystaged.loading.families import DFLASH, EAGLE3, HEAD_NORMS, LLAMA
from pystaged.loading.shapes import Shape, Wanted, whole

MASK_EMBEDDING = "mask_embedding.pt"  # beside the checkpoints of some drafts
# Names of architectures, and Speculators' of algorithms.
_OF_EAGLE3 = "LlamaForCausalLMEagle3 Eagle3LlamaForCausalLM Eagle3DraftModel Eagle3Speculator Qwen3Eagle3Model eagle3"
_OF_DFLASH = (
    "DFlashDraftModel DFlashSpeculator dflash "
    "DSparkDraftModel DSparkSpeculator Qwen3DSparkModel Lfm2DSparkDraftModel dspark"
)
_KNOWN = dict.fromkeys(_OF_EAGLE3.split(), EAGLE3) | dict.fromkeys(_OF_DFLASH.split(), DFLASH)
# Parts of names of drafts; the others of such names are not supported.
_DRAFTS = re.compile("eagle|medusa|hydra|dflash|dspark|domino", re.IGNORECASE)
_KINDS = "EAGLE-3, DFlash, and DSpark with a plain Markov head"
# Values that keys may have; the drafts of targets that are not supported have others.
_ONLY: Mapping[str, tuple[Any, ...]] = {
    **dict.fromkeys(
        ("attention_bias", "mlp_bias", "use_sliding_window", "use_swa", "use_mtp_layernorm"), (False, None)
    ),
    **dict.fromkeys(("use_aux_hidden_state", "use_input_layernorm_in_first_layer"), (True, None)),
    **dict.fromkeys(("attention_value_scale", "output_multiplier", "input_embedding_scale"), (None, 1)),
    "rope_is_neox_style": (True, False, None),
    "final_logit_softcapping": (None, 0),
    "markov_head_type": ("vanilla", None),
    "parallel_draft_step": (None, 0, 1),
    "conv_kernel_size": (None,),
}
# A confidence head is not used: acceptance rates are learnt instead.
_UNUSED = re.compile(
    r"t2d|verifier_(norm|lm_head)\.weight|(layers\.\d+\.self_attn\.)?rotary_emb\.inv_freq|"
    r"confidence_(head\.)?proj\.(weight|bias)"
)
_LAYER = LLAMA | HEAD_NORMS
_OTHER_NAMES = (
    (re.compile(r"^model\."), ""),
    (re.compile(r"^midlayer\."), "layers.0."),
    (re.compile(r"^markov_head\."), ""),
)


def _kind_of(config: Mapping[str, Any], path: Path) -> str | None:
    """EAGLE3 or DFLASH, by a config.json; None for that of a model. Raises ValueError for a draft of another kind."""
    part = config.get("dflash_config")
    part = part if isinstance(part, dict) else {}
    named = (config.get("speculators_model_type"), *_listed(config.get("architectures")), part.get("projector_type"))
    names = [name for name in named if isinstance(name, str)]
    for name in names:
        if name not in _KNOWN and _DRAFTS.search(name):
            raise ValueError(f"{path}: a draft of the kind {name[:40]!r} is not supported, only {_KINDS}")
    if known := [_KNOWN[name] for name in names if name in _KNOWN]:
        return known[0]
    return EAGLE3 if "draft_vocab_size" in config else None


def _listed(value: object) -> list[object]:
    return value if isinstance(value, list) else [value]


@dataclass(frozen=True)
class Numbers:
    """A draft's settings in config.json.

    shape: what the draft's layers have in common with Llama's. taps: ids of the target's layers, from 0, whose inputs
    the draft reads; None if config.json names none. num_tokens, num_rows: sizes of the target's vocabulary and of the
    draft's. feature_norms: each feature has a norm of its own. metadata: further GGUF keys. own_embedding, own_head:
    False if the checkpoint's are copies of the target's. mask_token: id, None for EAGLE-3. neighbours: RoPE rotates
    neighbouring dimensions together, not those half a head apart.
    """

    kind: str
    shape: Shape
    taps: list[int] | None
    num_tokens: int
    num_rows: int
    target_width: int | None
    feature_norms: bool
    metadata: dict[str, int]
    own_embedding: bool
    own_head: bool
    mask_token: int | None
    neighbours: bool

    @classmethod
    def of(cls, config: Mapping[str, Any], path: Path) -> Numbers | None:
        """Read and check a config.json; None for that of a model. Raises ValueError for another kind of draft, for a
        variant that is not supported, and for an impossible number."""
        kind = _kind_of(config, path)
        if kind is None:
            return None
        config = dict(config)
        for name in ("transformer_layer_config", "eagle_config", "dflash_config"):
            part = config.pop(name, None)
            if part is not None and not isinstance(part, dict):
                raise ValueError(f"{path} is damaged: {name}")
            # A model's own keys come last, but for those that Speculators leaves empty.
            config = (part or {}) | {key: value for key, value in config.items() if value is not None}
        for key, values in _ONLY.items():
            if config.get(key) not in values:
                raise ValueError(f"{path}: {key} is {config[key]!r}, which is not supported in a draft")
        kinds = config.get("layer_types") or []
        if not isinstance(kinds, list) or "sliding_attention" in kinds:
            raise ValueError(f"{path}: layer_types is {str(kinds)[:80]}, which is not supported in a draft")
        shape = Shape.of(config | {"model_type": "llama"}, path)

        def number(key: str, default: int | None = None, least: int = 1) -> int:
            return whole(path, key, config.get(key, default), least)

        def flag(key: str) -> bool:
            value = config.get(key, False)
            if type(value) is not bool:
                raise ValueError(f"{path}: {key} is {value!r}, but must be true or false")
            return value

        tokens = number("vocab_size")
        rows = number("draft_vocab_size", tokens)
        if rows > tokens:
            raise ValueError(f"{path}: draft_vocab_size is {rows}, above vocab_size, {tokens}")
        width = number("target_hidden_size") if "target_hidden_size" in config else None
        metadata: dict[str, int] = {}
        speculators = "speculators_model_type" in config
        deepspec = "Qwen3Eagle3Model" in _listed(config.get("architectures"))
        mask, feature_norms = None, False
        if kind == EAGLE3:
            for key in ("norm_before_residual", "norm_before_fc", "norm_output"):
                metadata[key] = flag(key)
            feature_norms = flag("fc_norm")
            if feature_norms and metadata["norm_before_fc"]:
                raise ValueError(f"{path}: norm_before_fc and fc_norm exclude each other")
            own_embedding = flag("embed_requires_grad") or not (speculators or deepspec)
            own_head = not deepspec
        else:
            metadata["block_size"] = number("block_size", least=2)
            metadata["sample_from_anchor"] = _from_anchor(config, flag)
            metadata["attention.causal"] = flag("is_causal" if "is_causal" in config else "causal")
            own_embedding, own_head = False, rows < tokens
            mask = number("mask_token_id", least=0)
            if mask >= tokens:
                raise ValueError(f"{path}: mask_token_id is {mask}, which is no token of vocab_size, {tokens}")
        taps = _taps(config, path)
        if taps is None and kind == DFLASH:
            raise ValueError(f"{path}: target_layer_ids is missing")
        neighbours = config.get("rope_is_neox_style") is False
        return cls(
            kind, shape, taps, tokens, rows, width, feature_norms, metadata, own_embedding, own_head, mask, neighbours
        )


def _from_anchor(config: Mapping[str, Any], flag: Callable[[str], bool]) -> bool:
    """Whether place i of a block predicts token i + 1. If no key says so, it does in DSpark's, but not Speculators'."""
    for key in ("sample_from_anchor", "shift_label"):
        if key in config:
            return flag(key)
    names = [*_listed(config.get("architectures")), config.get("projector_type")]
    return any("dspark" in str(name).lower() for name in names) and "aux_hidden_state_layer_ids" not in config


def _taps(config: Mapping[str, Any], path: Path) -> list[int] | None:
    """Ids of layers whose input is read: as in the file, or one more where it says whose output is read."""
    for key in ("eagle_aux_hidden_state_layer_ids", "aux_hidden_state_layer_ids", "target_layer_ids"):
        ids = config.get(key)
        if ids is None:
            continue
        least = -1 if key == "target_layer_ids" else 0
        if not isinstance(ids, list) or not 0 < len(ids) <= 64:
            raise ValueError(f"{path}: {key} is {str(ids)[:60]}, but must be a list of layers")
        for each in ids:
            if type(each) is not int or not least <= each < 1 << 16:
                raise ValueError(f"{path}: {key} names the layer {each!r}"[:200])
        return [each - least for each in ids]
    return None


@dataclass(frozen=True)
class Plan:
    """The tensors of a draft's GGUF file, each made from one of the checkpoint's, and its keys of this kind of draft.

    feature_norms: names of the checkpoint's norms, one for each feature; the file has them in one tensor. ids: name of
    the checkpoint's tensor of target ids minus draft ids (d2t); None if the vocabularies are the same.
    """

    tensors: list[Wanted]
    feature_norms: list[str]
    ids: str | None
    target_width: int
    metadata: dict[str, int]


def plan(folder: Path, numbers: Numbers, shapes: Mapping[str, tuple[int, ...]]) -> Plan:
    """Find the tensors in a checkpoint, of which these are the shapes by name. Raises ValueError for a tensor that is
    missing or unknown, and for features that do not fit together."""
    check_files(str(folder), [MASK_EMBEDDING] if (folder / MASK_EMBEDDING).is_file() else [])
    names = _usual_names(folder, shapes)

    def shape_of(usual: str) -> tuple[int, ...]:
        if usual not in names:
            raise ValueError(f"{folder}: tensor {usual!r} is missing")
        return shapes[names[usual]]

    count = len(numbers.taps) if numbers.taps else 3
    fused = shape_of("fc.weight")
    target_width = numbers.target_width or (fused[-1] if fused else 0) // count
    if len(fused) != 2 or not target_width or fused[1] != count * target_width:
        raise ValueError(
            f"{folder}: tensor {names['fc.weight']!r} has shape {list(fused)}, which does not fit {count} features"
            + (f" of {numbers.target_width} numbers" if numbers.target_width else "")
        )
    metadata = dict(numbers.metadata)
    if numbers.kind == EAGLE3:
        metadata["norm_before_fc"] = metadata["norm_before_fc"] or "input_norm.weight" in names
    wanted = []
    for each in _wanted(numbers, names, shapes, count, target_width):  # an absurd number of layers ends at the first
        shape_of(each.source)
        wanted.append(each)
    has_norms = numbers.feature_norms or "fc_norm.0.weight" in names
    feature_norms = [f"fc_norm.{i}.weight" for i in range(count)] if has_norms and numbers.kind == EAGLE3 else []
    cut = numbers.num_rows < numbers.num_tokens
    vectors = dict.fromkeys(feature_norms, target_width) | ({"d2t": numbers.num_rows} if cut else {})
    for usual, size in vectors.items():
        if shape_of(usual) != (size,):
            raise ValueError(f"{folder}: tensor {names[usual]!r} has shape {list(shape_of(usual))}, not {[size]}")
    used = {each.source for each in wanted} | {*feature_norms, "d2t", "embed_tokens.weight", "lm_head.weight"}
    for usual in sorted(names.keys() - used):
        if not _UNUSED.fullmatch(usual):
            raise ValueError(f"{folder}: tensor {names[usual]!r} is unknown in {numbers.kind}; there are {_KINDS}")
    return Plan(
        [Wanted(each.name, names[each.source], each.shape, each.layer) for each in wanted],
        [names[usual] for usual in feature_norms],
        names["d2t"] if cut else None,
        target_width,
        metadata,
    )


def check_files(place: str, files: Iterable[str]) -> None:
    """Raise ValueError if there is a file with further tensors of the draft, which are not supported."""
    if MASK_EMBEDDING in files:
        raise ValueError(f"{place}: a draft's own mask embedding ({MASK_EMBEDDING}) is not supported")


def _usual_names(folder: Path, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, str]:
    """The checkpoint's names of tensors, by the usual names."""
    names: dict[str, str] = {}
    for name in shapes:
        usual = name
        for pattern, replacement in _OTHER_NAMES:
            usual = pattern.sub(replacement, usual)
        if usual in names:
            raise ValueError(f"{folder}: tensors {names[usual]!r} and {name!r} have the same meaning")
        names[usual] = name
    return names


def _wanted(
    numbers: Numbers, names: Mapping[str, str], shapes: Mapping[str, tuple[int, ...]], count: int, target_width: int
) -> Iterator[Wanted]:
    """The tensors by the usual names, also missing ones."""
    shape, width = numbers.shape, numbers.shape.width
    tokens, rows = numbers.num_tokens, numbers.num_rows

    def one(name: str, usual: str, *size: int, layer: int | None = None) -> Wanted:
        return Wanted(f"{name}.weight", f"{usual}.weight", size, layer)

    if width != target_width or (numbers.own_embedding and "embed_tokens.weight" in names):
        yield one("token_embd", "embed_tokens", tokens, width)
    if width != target_width or rows < tokens or (numbers.own_head and "lm_head.weight" in names):
        yield one("output", "lm_head", rows, width)
    yield one("output_norm", "norm", width)
    yield one("fc", "fc", width, count * target_width)
    if numbers.kind == DFLASH:
        yield one("enc.output_norm", "hidden_norm", width)
        if first_matrix := names.get("markov_w1.weight", names.get("markov_w2.weight")):  # DSpark's Markov head
            rank = max((1, *shapes[first_matrix][1:]))  # one that does not fit is named by its shape
            yield one("markov_w1", "markov_w1", tokens, rank)
            yield one("markov_w2", "markov_w2", rows, rank)
    elif numbers.metadata["norm_before_fc"] or "input_norm.weight" in names:
        yield one("enc.output_norm", "input_norm", count * target_width)
    for layer in range(shape.layers):
        first = numbers.kind == EAGLE3 and layer == 0
        sizes = shape.sizes(2 * width if first else width)
        if first:
            yield one("blk.0.attn_norm_2", "layers.0.hidden_norm", width, layer=0)
        for name, usual in _LAYER.items():
            source = f"layers.{layer}.{usual}"
            if numbers.kind == DFLASH or not name.endswith(("q_norm", "k_norm")) or f"{source}.weight" in names:
                yield one(f"blk.{layer}.{name}", source, *sizes.get(name, (width,)), layer=layer)
