"""Recurrent layers of checkpoints: which layers they are, and how GGUF's tensors differ from the checkpoint's."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from pystaged.loading.config_reader import ConfigReader

Floats = npt.NDArray[np.float32]
Change = Callable[[Floats], Floats]
Metadata = dict[str, "int | float | str | bool | list[int]"]

_MOST_LAYERS = 1 << 12
_ATTENDING = ("full_attention", "attention")
_NAMES = {
    "delta net": ("linear_attention",),
    "short convolution": ("conv",),
    "state space": ("mamba", "linear_attention"),
}


@dataclass(frozen=True)
class Recurrence:
    """The recurrent layers of a model.

    Args:
        layers: their numbers.
        metadata: entries by GGUF key.
        shapes: of their tensors in a GGUF file, outputs first, by GGUF's names.
        stored: shapes in the checkpoint, where they differ.
        changes: functions that make GGUF's tensor of the checkpoint's.
    """

    layers: frozenset[int]
    metadata: Metadata
    shapes: Mapping[str, tuple[int, ...]]
    stored: Mapping[str, tuple[int, ...]]
    changes: Mapping[str, Change] = field(default_factory=dict)

    @classmethod
    def of(cls, reader: ConfigReader, width: int, layers: int, kv_heads: int) -> Recurrence | None:
        """Read and check them in a config.json; None if the family has none, or all layers attend and it allows that.

        Raises:
            ValueError: the layers or their numbers are impossible, or GGUF cannot express them.
        """
        mixer = reader.family.mixer
        if not mixer:
            return None
        if layers > _MOST_LAYERS:
            raise ValueError(
                f"{reader.path}: {reader.key('num_hidden_layers')} is {layers}, above {_MOST_LAYERS} for a model with "
                "recurrent layers"
            )
        recurrent = _layers(reader, layers)
        if not recurrent and reader.family.attending:
            return None
        metadata, shapes, stored, changes = _MIXERS[mixer](reader, width)
        if mixer == "delta net":
            metadata["full_attention_interval"] = _interval(reader, recurrent, layers)
        else:
            metadata["attention.head_count_kv"] = [0 if i in recurrent else kv_heads for i in range(layers)]
        return cls(recurrent, metadata, shapes, stored, changes)


def _layers(reader: ConfigReader, layers: int) -> frozenset[int]:
    """The numbers of recurrent layers."""
    kinds, names = reader.get("layer_types"), _NAMES[reader.family.mixer]
    if kinds is None:
        attending = reader.get("full_attn_idxs")
        if reader.family.mixer == "delta net":
            interval = reader.number("full_attention_interval", 4)
            return frozenset(i for i in range(layers) if (i + 1) % interval)
        if reader.family.mixer == "state space":
            return frozenset(range(layers))
        if attending is None:
            return frozenset()
        if not isinstance(attending, list) or not all(type(each) is int for each in attending):
            raise ValueError(f"{reader.path} is damaged: full_attn_idxs")
        return frozenset(range(layers)) - frozenset(attending)
    if not isinstance(kinds, list) or len(kinds) != layers:
        raise ValueError(f"{reader.path}: layer_types is no list of {layers} kinds of layers")
    for kind in kinds:
        if kind not in (*_ATTENDING, *names):
            raise ValueError(
                f"{reader.path}: layer_types has {kind!r}, but only {', '.join((*_ATTENDING, *names))} are supported"
            )
    return frozenset(i for i, kind in enumerate(kinds) if kind in names)


def _interval(reader: ConfigReader, recurrent: frozenset[int], layers: int) -> int:
    """The n for which every n-th layer attends, and no other.

    Raises:
        ValueError: there is none.
    """
    interval = next((i + 1 for i in range(layers) if i not in recurrent), layers + 1)
    if recurrent != {i for i in range(layers) if (i + 1) % interval}:
        raise ValueError(
            f"{reader.path}: layer_types is {reader.get('layer_types')!r}, which a GGUF file of "
            f"{reader.family.architecture} cannot express"[:500]
        )
    return interval


_Parts = tuple[Metadata, Mapping[str, tuple[int, ...]], Mapping[str, tuple[int, ...]], Mapping[str, Change]]


def _delta_net(reader: ConfigReader, width: int) -> _Parts:
    taps, size = reader.number("linear_conv_kernel_dim"), reader.number("linear_key_head_dim")
    keys, values = reader.number("linear_num_key_heads"), reader.number("linear_num_value_heads")
    if reader.number("linear_value_head_dim") != size:
        raise ValueError(
            f"{reader.path}: linear_value_head_dim is {reader.get('linear_value_head_dim')}, but must be "
            f"linear_key_head_dim, {size}"
        )
    if values % keys:
        raise ValueError(
            f"{reader.path}: {values} value heads (linear_num_value_heads) do not share {keys} key heads "
            "(linear_num_key_heads) evenly"
        )
    inner, first = values * size, 2 * keys * size
    metadata: Metadata = {
        "ssm.conv_kernel": taps,
        "ssm.state_size": size,
        "ssm.group_count": keys,
        "ssm.time_step_rank": values,
        "ssm.inner_size": inner,
    }
    shapes = {
        "attn_qkv": (first + inner, width),
        "attn_gate": (inner, width),
        "ssm_alpha": (values, width),
        "ssm_beta": (values, width),
        "ssm_conv1d": (first + inner, taps),
        "ssm_dt": (values,),
        "ssm_a": (values,),
        "ssm_norm": (size,),
        "ssm_out": (width, inner),
    }
    rows, one = _tiled(keys, size), _tiled(keys, 1)
    behind = _tiled(keys, size, first)
    changes: dict[str, Change] = {
        "attn_qkv": behind,
        "attn_gate": rows,
        "ssm_alpha": one,
        "ssm_beta": one,
        "ssm_conv1d": behind,
        "ssm_dt": one,
        "ssm_a": lambda values: one(_decay(values)),
        "ssm_out": lambda values: rows(values.T).T,
    }
    return metadata, shapes, {"ssm_conv1d": (first + inner, 1, taps)}, changes


def _short_convolution(reader: ConfigReader, width: int) -> _Parts:
    taps = reader.number("conv_L_cache")
    shapes = {
        "shortconv.in_proj": (3 * width, width),
        "shortconv.conv": (width, taps),
        "shortconv.out_proj": (width, width),
    }
    return {"shortconv.l_cache": taps}, shapes, {"shortconv.conv": (width, 1, taps)}, {}


def _state_space(reader: ConfigReader, width: int) -> _Parts:
    heads, groups = reader.number("mamba_n_heads"), reader.number("mamba_n_groups")
    state, taps, inner = reader.number("mamba_d_state"), reader.number("mamba_d_conv"), 2 * width
    size = inner // heads if reader.get("mamba_d_head") == "auto" else reader.number("mamba_d_head")
    if size * heads != inner or heads % groups:
        raise ValueError(
            f"{reader.path}: {inner} numbers do not split into {heads} heads (mamba_n_heads) of {size} (mamba_d_head) "
            f"in {groups} groups (mamba_n_groups)"
        )
    channels = inner + 2 * groups * state
    metadata: Metadata = {
        "ssm.conv_kernel": taps,
        "ssm.state_size": state,
        "ssm.group_count": groups,
        "ssm.time_step_rank": heads,
        "ssm.inner_size": inner,
    }
    shapes = {
        "ssm_in": (inner + channels + heads, width),
        "ssm_conv1d": (channels, taps),
        "ssm_dt": (heads,),
        "ssm_a": (heads, 1),
        "ssm_d": (heads, 1),
        "ssm_norm": (groups, inner // groups),
        "ssm_out": (width, inner),
    }
    stored = {"ssm_conv1d": (channels, 1, taps), "ssm_a": (heads,), "ssm_d": (heads,), "ssm_norm": (inner,)}
    return metadata, shapes, stored, {"ssm_a": _decay}


_MIXERS: Mapping[str, Callable[[ConfigReader, int], _Parts]] = {
    "delta net": _delta_net,
    "short convolution": _short_convolution,
    "state space": _state_space,
}


def _decay(values: Floats) -> Floats:
    with np.errstate(over="ignore"):
        return -np.exp(values)


def _tiled(keys: int, rows: int, first: int = 0) -> Change:
    """Reorder the value heads of a tensor's rows from the first one on.

    Checkpoints put the heads that share a key head side by side; in GGUF files head j uses key head j modulo `keys`.
    """

    def change(values: Floats) -> Floats:
        heads = values[first:].reshape(keys, -1, rows, *values.shape[1:])
        return np.concatenate([values[:first], heads.swapaxes(0, 1).reshape(values[first:].shape)])

    return change
