"""What an engine is made of."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from pystaged import DeviceError
from pystaged._core import Model
from pystaged.decoding.cost import PassCost
from pystaged.loading import bundle
from pystaged.loading.costs import Costs


def test_auto_does_without_a_device_that_the_model_does_not_fit(
    random_gguf: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bundle, "candidates", lambda name, _: ["cpu", "none"] if name == "auto" else [name])
    said: list[str] = []
    made = bundle.Bundle(random_gguf("Q8_0"), None, 1, said.append, device="auto")
    assert made.device == "cpu"
    assert [line for line in said if line.startswith("passed over: ")]
    with pytest.raises(DeviceError):
        bundle.Bundle(random_gguf("Q8_0"), None, 1, said.append, device="none")


def test_auto_does_without_a_device_that_has_no_room_for_a_context(
    random_gguf: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    def cost(_: Costs, path: Path, device: str, model: Model) -> PassCost:
        del path, model
        if device != "cpu":
            raise DeviceError(f"no room on {device}")
        return PassCost({1: 1e-3})

    monkeypatch.setattr(bundle, "candidates", lambda *_: ["ggml-cpu", "cpu"])
    monkeypatch.setattr(Costs, "of", cost)
    said: list[str] = []
    assert bundle.Bundle(random_gguf("Q8_0"), None, 1, said.append, device="auto").device == "cpu"
    assert said == ["passed over: no room on ggml-cpu"]
