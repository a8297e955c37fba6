"""One product for all: every kernel gives the scalar one's bits, and a row the same whatever it is computed beside."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from gguf import GGMLQuantizationType, quants
from hypothesis import given, settings
from hypothesis import strategies as st
from support.commands import run_python
from support.kernels import EVERY_KERNEL, KERNELS

from pystaged import _core

Floats = npt.NDArray[np.float32]
Packed = npt.NDArray[np.uint8]

FLOAT_TYPES = ("f32", "f16", "bf16")
# What a file's block has: its size in bytes and where its F16 numbers stand. MXFP4 has an exponent, at 0.
INTEGER_TYPES = {
    "q8_0": (34, (0,)),
    "q4_0": (18, (0,)),
    "q4_1": (20, (0, 2)),
    "q5_0": (22, (0,)),
    "q5_1": (24, (0, 2)),
    "q4_K": (144, (0, 2)),
    "q5_K": (176, (0, 2)),
    "q6_K": (210, (208,)),
    "iq4_nl": (18, (0,)),
    "iq4_xs": (136, (0,)),
    "mxfp4": (17, ()),
    "q3_K": (110, (108,)),
    "q2_K": (84, (80, 82)),
}
TYPES = (*FLOAT_TYPES, *INTEGER_TYPES)
BLOCK = 32  # activations of one scale


def block_size(kind: str) -> int:
    """Weights of a file's block."""
    return 1 if kind in FLOAT_TYPES else 256 if kind.endswith("K") or kind == "iq4_xs" else 32


def whole_blocks(kind: str, cols: int) -> int:
    """As many blocks as cols inputs take, in inputs."""
    return block_size(kind) * -(-cols // block_size(kind))


shapes = st.tuples(st.sampled_from(TYPES), st.integers(1, 70), st.integers(1, 170)).map(
    lambda shape: (*shape[:2], shape[2] if shape[0] in FLOAT_TYPES else block_size(shape[0]) * -(-shape[2] // 34))
)


def draw_weights(kind: str, rows: int, cols: int, seed: int = 0) -> Packed:
    """Random weights as a file holds them, uint8[rows, bytes]: every integer occurs, and scales of both signs."""
    generator = np.random.default_rng(seed)
    values = generator.standard_normal((rows, cols), dtype=np.float32)
    if kind == "f32":
        return values.view(np.uint8)
    if kind == "f16":
        return values.astype(np.float16).view(np.uint8)
    if kind == "bf16":
        return (values.view(np.uint32) >> 16).astype(np.uint16).view(np.uint8)
    size, fields = INTEGER_TYPES[kind]
    blocks = generator.integers(0, 256, (rows, cols // block_size(kind), size), dtype=np.uint8)
    for i, field in enumerate(fields):
        scales = (values[:, i :: block_size(kind)] * 0.05).astype(np.float16)
        blocks[..., field : field + 2] = scales[..., None].view(np.uint8)
    if kind == "mxfp4":
        blocks[..., 0] = generator.integers(118, 128, blocks.shape[:-1])
    return blocks.reshape(rows, -1)


def draw_rows(n: int, cols: int, seed: int = 0) -> Floats:
    """Random activations, float32[n, cols]; each row has a size of its own."""
    generator = np.random.default_rng([1, seed])
    sizes = np.exp2(generator.integers(-12, 12, (n, 1))).astype(np.float32)
    return generator.standard_normal((n, cols), dtype=np.float32) * sizes


def multiply(kind: str, weights: Packed, x: Floats, kernel: str = "scalar", num_threads: int = 1) -> Floats:
    """W x: float32[n, rows]."""
    return _core.multiply(kind, weights.tobytes(), len(weights), x, kernel, num_threads)


def rounded(x: Floats) -> npt.NDArray[np.float64]:
    """Activations as the integer types see them: int8 blocks of 32, scaled by their largest."""
    blocks = x.reshape(len(x), -1, BLOCK)
    largest = np.abs(blocks).max(axis=-1, keepdims=True)
    inverse = np.divide(np.float32(127), largest, out=np.zeros_like(largest), where=largest > 0)
    integers, scales = np.rint(blocks * inverse), (largest / np.float32(127)).astype(np.float16).astype(np.float32)
    result: npt.NDArray[np.float64] = (integers.astype(np.float64) * scales).reshape(x.shape)
    return result


def assert_close(kind: str, weights: Packed, x: Floats, actual: Floats) -> None:
    """Against float64 sums: a block's integers and scales fit into 53 bits, so its own sum there is exact."""
    w = quants.dequantize(weights, GGMLQuantizationType[kind.upper()]).astype(np.float64)
    activations = x.astype(np.float64) if kind in FLOAT_TYPES else rounded(x)
    error = np.abs(actual - activations @ w.T)
    assert (error <= 1e-5 * (np.abs(activations) @ np.abs(w).T)).all()


@pytest.mark.slow
@given(shape=shapes, n=st.integers(1, 40), num_threads=st.integers(1, 3), seed=st.integers(0, 2**32 - 1))
@settings(max_examples=200)
def test_any_shape(shape: tuple[str, int, int], n: int, num_threads: int, seed: int) -> None:
    kind, rows, cols = shape
    weights, x = draw_weights(kind, rows, cols, seed), draw_rows(n, cols, seed)
    scalar = multiply(kind, weights, x)
    assert scalar.shape == (n, rows)
    assert_close(kind, weights, x, scalar)
    for kernel in KERNELS:
        np.testing.assert_array_equal(multiply(kind, weights, x, kernel, num_threads), scalar)


@pytest.mark.parametrize("kind", TYPES)
@pytest.mark.parametrize("kernel", EVERY_KERNEL)
def test_large_matrix_shared_by_threads(kernel: str, kind: str) -> None:
    weights, x = draw_weights(kind, 500, 512), draw_rows(3, 512)
    scalar = multiply(kind, weights, x)
    assert_close(kind, weights, x, scalar)
    for num_threads in (1, 2, 3):
        np.testing.assert_array_equal(multiply(kind, weights, x, kernel, num_threads), scalar)


@pytest.mark.parametrize("kernel", EVERY_KERNEL)
@pytest.mark.parametrize("kind", ["f16", "bf16"])
def test_every_half_is_read_exactly(kind: str, kernel: str) -> None:
    halves = np.arange(1 << 16, dtype=np.uint16)
    values = halves.view(np.float16) if kind == "f16" else (halves.astype(np.uint32) << 16).view(np.float32)
    actual = multiply(kind, halves.view(np.uint8).reshape(-1, 2), np.ones((1, 1), np.float32), kernel)
    np.testing.assert_array_equal(actual[0], values.astype(np.float32))


@pytest.mark.parametrize("kernel", EVERY_KERNEL)
@pytest.mark.parametrize("kind", INTEGER_TYPES)
def test_activations_round_half_to_even(kind: str, kernel: str) -> None:
    x = np.tile(np.arange(-126.5, 127, dtype=np.float32)[:, None], block_size(kind))
    x[:, ::BLOCK] = 127  # so that the scale is 1
    weights = draw_weights(kind, 5, block_size(kind))
    assert_close(kind, weights, x, multiply(kind, weights, x, kernel))


def extreme_rows(cols: int) -> dict[str, Floats]:
    """Activations at the edges of float32, each float32[cols]."""
    ordinary = draw_rows(1, cols)[0]
    spike = ordinary.copy()
    spike[::BLOCK] = 3e38
    return {
        "zeros": np.zeros(cols, np.float32),
        "minus-zeros": np.full(cols, -0.0, np.float32),
        "ordinary": ordinary,
        "spikes": spike,
        "huge": np.sign(ordinary) * np.float32(3e38),
        "tiny": ordinary * np.float32(1e-33),
        "subnormal": np.sign(ordinary) * np.float32(1e-42),
        "infinite": np.where(np.arange(cols) % 7 == 3, np.float32(-np.inf), ordinary),
    }


def extreme_weights(kind: str, cols: int) -> Packed:
    """Ordinary weights, then rows of the least and the greatest ones, and of zeros."""
    weights = np.repeat(draw_weights(kind, 1, cols), 5, axis=0)
    if kind in FLOAT_TYPES:
        numbers = weights.view(np.float32 if kind == "f32" else np.uint16)
        numbers[1:4] = numbers[1:4, :1]
    else:
        size, fields = INTEGER_TYPES[kind]
        blocks = weights.reshape(5, -1, size)
        scales = blocks.copy()
        # -128, 127 and 0 of Q8_0; the least and the greatest of the others, and zeros of Q4_0.
        blocks[1:4] = np.array([[0x80, 0x7F, 0]] if kind == "q8_0" else [[0x00, 0xFF, 0x88]]).T[:, None]
        for field in fields:
            blocks[..., field : field + 2] = scales[..., field : field + 2]
        if kind == "mxfp4":
            blocks[..., 0] = scales[..., 0]
    weights[4] = 0
    return weights


@pytest.mark.parametrize("kernel", EVERY_KERNEL)
@pytest.mark.parametrize("kind", TYPES)
def test_extremes(kind: str, kernel: str) -> None:
    cols = whole_blocks(kind, 96)
    rows, weights = extreme_rows(cols), extreme_weights(kind, cols)
    x = np.stack(list(rows.values()))
    scalar = multiply(kind, weights, x)
    np.testing.assert_array_equal(multiply(kind, weights, x, kernel), scalar)
    assert not scalar[[0, 1]].any()
    usual = np.flatnonzero([name in ("zeros", "minus-zeros", "ordinary") for name in rows])
    assert_close(kind, weights, x[usual], scalar[usual])
    assert np.isfinite(scalar[[name not in ("spikes", "huge", "infinite") for name in rows]]).all()


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf], ids=str)
@pytest.mark.parametrize("kind", TYPES)
@pytest.mark.parametrize("kernel", EVERY_KERNEL)
def test_bad_row_leaves_the_others_alone(kernel: str, kind: str, bad: float) -> None:
    cols = whole_blocks(kind, 96)
    weights, x = draw_weights(kind, 33, cols), draw_rows(17, cols)
    good = np.delete(np.arange(17), [0, 8, 16])
    expected = multiply(kind, weights, x, kernel)[good]
    x[[0, 8, 16], [0, 50, 95]] = bad
    x[8] = bad
    actual = multiply(kind, weights, x, kernel)
    np.testing.assert_array_equal(actual[good], expected)
    assert not np.isfinite(actual[8]).any()


@pytest.mark.parametrize("kind", TYPES)
@pytest.mark.parametrize("kernel", EVERY_KERNEL)
def test_no_rows(kernel: str, kind: str) -> None:
    assert multiply(kind, draw_weights(kind, 7, 256), np.empty((0, 256), np.float32), kernel).shape == (0, 7)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"type": "nonsense"}, "'nonsense'"),
        ({"type": "iq3_s", "weights": bytes(110), "x": np.zeros((1, 256), np.float32)}, "iq3_s are not supported"),
        ({"weights": bytes(33)}, "weights' size"),
        ({"weights": bytes(35)}, "weights' size"),
        ({"rows": 2}, "weights' size"),
        ({"x": np.zeros((1, 31), np.float32)}, "weights' size"),
        ({"x": np.zeros(32, np.float32)}, "x must have shape"),
        ({"x": np.zeros((1, 0), np.float32)}, "x must have shape"),
        ({"rows": 0, "weights": b""}, "at least one output"),
        ({"kernel": "abacus"}, f"'abacus'.*{KERNELS[-1]}"),
    ],
    ids=["type", "unsupported", "short", "long", "rows", "block", "1-d", "no-inputs", "no-outputs", "kernel"],
)
def test_refusals(changes: dict[str, Any], message: str) -> None:
    usual: dict[str, Any] = {"type": "q8_0", "weights": bytes(34), "rows": 1, "x": np.zeros((1, 32), np.float32)}
    with pytest.raises(ValueError, match=message):
        _core.multiply(**(usual | changes))


@pytest.mark.parametrize(
    "arguments",
    ["'q8_0', bytes(34), 1, np.zeros((1, 32), 'f4'), '', 0", "'DEPRECATED', b'', 1, np.zeros((1, 32), 'f4')"],
    ids=["no-threads", "removed-type"],
)
def test_refusals_that_once_divided_by_zero(arguments: str) -> None:
    done = run_python(f"import numpy as np; from pystaged import _core; _core.multiply({arguments})")
    assert done.returncode == 1
    assert "ValueError" in done.stderr
