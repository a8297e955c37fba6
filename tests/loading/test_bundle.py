"""What an engine is made of, and its contexts."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from support.random_models import gguf_file

from pystaged import DeviceError
from pystaged._core import Model
from pystaged.decoding.cost import PassCost
from pystaged.decoding.policy import FixedPolicy
from pystaged.loading import bundle
from pystaged.loading.costs import Costs
from pystaged.loading.factory import ContextFactory


def on_device(path: Path, device: str) -> tuple[bundle.Bundle, list[str]]:
    """A target alone, and what is said of it."""
    said: list[str] = []
    return bundle.Bundle(path, draft=None, num_threads=1, report=said.append, device=device), said


def test_auto_does_without_a_device_that_the_model_does_not_fit(
    random_gguf: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bundle, "candidates", lambda name, _: ["cpu", "none"] if name == "auto" else [name])
    made, said = on_device(random_gguf("Q8_0"), "auto")
    assert made.device == "cpu"
    assert [line for line in said if line.startswith("passed over: ")]
    with pytest.raises(DeviceError):
        on_device(random_gguf("Q8_0"), "none")


def test_auto_does_without_a_device_that_has_no_room_for_a_context(
    random_gguf: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    full = ["ggml-cpu"]

    def cost(_: Costs, path: Path, device: str, model: Model, *, compared: bool) -> PassCost:
        assert compared
        del path, model
        if device in full:
            raise DeviceError(f"no room on {device}")
        return PassCost({1: 1e-3})

    monkeypatch.setattr(bundle, "candidates", lambda *_: ["ggml-cpu", "cpu"])
    monkeypatch.setattr(Costs, "of", cost)
    made, said = on_device(random_gguf("Q8_0"), "auto")
    assert (made.device, said) == ("cpu", ["passed over: no room on ggml-cpu"])
    full.append("cpu")
    with pytest.raises(DeviceError, match="no room on ggml-cpu"):
        on_device(random_gguf("Q8_0"), "auto")


def test_a_draft_has_as_long_a_context_as_its_target(random_gguf: Callable[..., Path]) -> None:
    long, short = random_gguf("Q8_0", context=9000), random_gguf("Q8_0", context=96)
    for draft, n_ctx in ((long, 8500), (short, 96)):
        made = bundle.Bundle(long, draft=draft, num_threads=1)
        decoder = ContextFactory(made).context(8500, FixedPolicy(2, 2, 4))
        assert [session.n_ctx for session in decoder.sessions] == [8500, n_ctx]


def test_draft_heads_of_earlier_versions_are_refused(random_gguf: Callable[..., Path], tmp_path: Path) -> None:
    with gguf_file(tmp_path / "my.head.gguf", "draft-head"):
        pass
    with pytest.raises(ValueError, match=r"my\.head\.gguf is a draft head, .* supported; leave out the draft"):
        bundle.Bundle(random_gguf("Q8_0"), draft=tmp_path / "my.head.gguf")
