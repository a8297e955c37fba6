"""Models shared by the tests: small random ones made once a session, and the bundled models of the package."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from random_weights import write_random
from support.random_models import add_english

from pystaged.loading import names

SHAPE = {"width": 64, "layers": 2, "heads": 2, "vocab_size": 300, "context": 96, "seed": 0, "tie": True}

# A shell makes what it starts in the background ignore interrupts, and so would the programs that tests interrupt.
signal.signal(signal.SIGINT, signal.default_int_handler)

# The same examples each time; how long one takes, or is drawn, says nothing on a busy machine.
settings.register_profile("pystaged", derandomize=True, deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("pystaged")


@pytest.fixture(scope="session", autouse=True)
def _environment_of_its_own(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Measured costs and models of tests stay out of the user's caches, and the user's out of the tests; servers are
    asked without a proxy."""
    with pytest.MonkeyPatch.context() as patch:
        cache = tmp_path_factory.mktemp("cache")
        patch.setenv("XDG_CACHE_HOME", str(cache))
        patch.setenv("OLLAMA_MODELS", str(cache / "ollama"))
        patch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(cache / "huggingface" / "hub"))  # read once
        for name in ("NO_PROXY", "no_proxy"):
            patch.setenv(name, "*")
        yield


@pytest.fixture(scope="session")
def random_gguf(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """A function that gives a small random GPT-2 GGUF of a shape, made once: width, layers, heads, quantization, ..."""
    folder = tmp_path_factory.mktemp("models")

    def make(quantization: str = "F32", **changes: Any) -> Path:
        shape: dict[str, Any] = SHAPE | changes
        path = folder / f"{'-'.join(map(str, (quantization, *shape.values())))}.gguf"
        if not path.exists():
            write_random(path, "gpt2", quantization=quantization, add_vocabulary=add_english, **shape)
        return path

    return make


@pytest.fixture(scope="session")
def bundled_target() -> Path:
    return names.resolve("bundled")


@pytest.fixture(scope="session")
def bundled_draft() -> Path:
    return names.bundled_file("draft.Q8_0.gguf")
