"""What an engine is made of."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from pystaged import DeviceError
from pystaged.loading import bundle


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
