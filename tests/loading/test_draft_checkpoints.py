"""Checkpoints of drafts that read the target's features become GGUF files that compute the same."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf import GGUFReader
from safetensors.numpy import load_file, save_file
from support.convert import change_json, convert, write_bfloat16
from support.draft_checkpoints import EMBEDDING, FORMS, HEAD, Form, filled, write_form
from support.feature_drafts import Array, BlockTwin, Contents, Eagle3Twin
from support.paths import table

from pystaged.loading import feature_drafts
from pystaged.loading.quantize import quantize_checkpoint


def outputs(contents: Contents, adjacent: bool | None = None) -> list[Array]:
    """What a draft computes for some features and tokens; `adjacent` None for a GGUF file's rotary pairs."""
    random = np.random.default_rng(1)
    features = random.standard_normal((6, contents.tensors["fc.weight"].shape[1]))
    narrow = contents.keys["embedding_length"] < 64
    parts: dict[str, Any] = {} if narrow else {"embedding": EMBEDDING, "head": HEAD}
    if contents.architecture == "eagle3":
        eagle3 = Eagle3Twin(contents, **parts, adjacent=adjacent)
        logits, fed = eagle3.commit(features, [5, 7, 299, 0, 7, 11])
        deeper, _ = eagle3.add(fed[[5, 5]], [20, 21], [5, 5])
        return [logits, fed, deeper]
    block = BlockTwin(contents, **parts, adjacent=adjacent)
    block.commit(features)
    logits, y = block.block(9)
    return [logits, y, block.correction(3)]


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
def test_converted_drafts_compute_what_their_checkpoints_do(form: Callable[[], Form], tmp_path: Path) -> None:
    made = form()
    convert(write_form(tmp_path / "draft", made), tmp_path / "draft.gguf")
    expected, found = Contents.made(made.draft), Contents.of(tmp_path / "draft.gguf")
    assert found.architecture == expected.architecture
    said = made.numbers()
    if "target_layer" not in json.dumps(said) and "layer_ids" not in json.dumps(said):
        assert "target_layers" not in found.keys  # they follow from the target's number of layers
        found.keys["target_layers"] = made.draft.taps
    for key, value in expected.keys.items():
        assert found.keys[key] == (pytest.approx(value) if isinstance(value, float) else value), key
    assert found.tensors.keys() == expected.tensors.keys()
    for ours, theirs in zip(outputs(found), outputs(expected, adjacent=made.neighbours), strict=True):
        np.testing.assert_allclose(ours, theirs, atol=1e-9)


def test_bfloat16_stays_and_small_tensors_are_floats(tmp_path: Path) -> None:
    made = FORMS["DSpark"]()
    folder = write_form(tmp_path / "draft", made)
    floats = {name: values for name, values in made.tensors().items() if values.dtype == np.float32}
    write_bfloat16(folder / "model.safetensors", floats)
    convert(folder, tmp_path / "draft.gguf", "BF16")
    types = {tensor.name: tensor.tensor_type.name for tensor in GGUFReader(tmp_path / "draft.gguf").tensors}
    assert {name for name, kind in types.items() if kind == "F32"} == {name for name in types if "norm" in name}
    assert set(types.values()) == {"F32", "BF16"}
    fused = Contents.of(tmp_path / "draft.gguf").tensors["fc.weight"]
    assert np.array_equal(fused, (floats["fc.weight"].view(np.uint32) >> 16 << 16).view(np.float32))


@pytest.mark.parametrize("form", ["Speculators", "SpecForge", "DeepSpec", "DSpark", "Speculators' DSpark"])
@pytest.mark.parametrize("kind", ["q8_0", "q4_0"])
def test_drafts_are_quantized_as_asked(form: str, kind: str, tmp_path: Path) -> None:
    made = FORMS[form]()
    quantize_checkpoint(write_form(tmp_path / "draft", made), tmp_path / "draft.gguf", kind)
    exact, found = Contents.made(made.draft), Contents.of(tmp_path / "draft.gguf")
    types = {tensor.name: tensor.tensor_type.name for tensor in GGUFReader(tmp_path / "draft.gguf").tensors}
    for name, values in exact.tensors.items():
        if values.ndim == 1 or name == "fc_norm.weight":
            assert types[name] == ("I64" if name == "d2t" else "F32")
            assert np.array_equal(np.sort(found.tensors[name]), np.sort(values))
        else:
            assert types[name] == ("F16" if values.shape[1] % 32 else kind.upper())
    found.keys.setdefault("target_layers", made.draft.taps)
    ours, theirs = outputs(found)[0], outputs(exact, adjacent=False)[0]
    assert np.abs(ours - theirs).max() > 0
    assert np.corrcoef(ours.ravel(), theirs.ravel())[0, 1] > (0.999 if kind == "q8_0" else 0.9)


def test_types_that_a_draft_cannot_have_are_refused(tmp_path: Path) -> None:
    folder = write_form(tmp_path / "draft", FORMS["EAGLE"]())
    with pytest.raises(ValueError, match=r"q4_k_m.*q8_0"):
        quantize_checkpoint(folder, tmp_path / "draft.gguf", "q4_k_m")


def spoil(folder: Path, row: dict[str, Any]) -> None:
    """Change keys of config.json, or a tensor, as a row of data/bad_drafts.jsonl says."""
    if "config" in row:
        change_json("config.json", **row["config"])(folder)
    elif "file" in row:
        (folder / row["file"]).write_bytes(b"")
    else:
        found = load_file(folder / "model.safetensors")
        if "without" in row:
            del found[row["without"]]
        else:
            name, *values = row["other"]
            found[name] = -np.arange(90) if values == ["falling"] else filled(*values)
        save_file(found, folder / "model.safetensors")


@pytest.mark.parametrize("row", table("bad_drafts"), ids=lambda row: f"{row['form']}: {row['says']}")
def test_what_is_wrong_with_a_draft_is_named(row: dict[str, Any], tmp_path: Path) -> None:
    folder = write_form(tmp_path / "draft", FORMS[row["form"]]())
    spoil(folder, row)
    with pytest.raises(ValueError, match=re.escape(row["says"])) as error:
        convert(folder, tmp_path / "draft.gguf")
    assert str(folder) in str(error.value)
    assert not (tmp_path / "draft.gguf").exists()


def test_an_absurd_number_of_layers_ends_at_the_first_missing_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write_form(tmp_path / "draft", FORMS["EAGLE"]())
    change_json("config.json", num_hidden_layers=1 << 24)(folder)
    found = feature_drafts._wanted

    def counted(*given: Any) -> Iterator[Any]:
        for number, each in enumerate(found(*given)):
            assert number < 100
            yield each

    monkeypatch.setattr(feature_drafts, "_wanted", counted)
    with pytest.raises(ValueError, match=r"layers\.1\.input_layernorm\.weight' is missing"):
        convert(folder, tmp_path / "draft.gguf")
