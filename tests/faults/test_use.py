"""Model files that change while they are in use, and memory that runs out in the middle of a text."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from support.chat import write_chat
from support.commands import run_python
from support.families import CASES
from support.random_models import write

import pystaged
from pystaged.decoding.policy import FixedPolicy
from pystaged.loading.kept import PACKED, load_packed

PROMPT = "the tree and the house"


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return write_chat(tmp_path / "model.gguf", "{{ messages[0].content }}, it says", **vars(CASES["llama"]))


def replace(model: Path) -> None:
    write(model.with_name("new.gguf"), CASES["qwen3"]).replace(model)


def overwrite(model: Path) -> None:
    model.write_bytes(bytes(model.stat().st_size))


def pack_another(model: Path) -> None:
    """Another process finds another model under that name, and packs it."""
    replace(model)
    load_packed(model, "", 1, lambda _: None)


CHANGES = {
    "replaced": replace,
    "overwritten": overwrite,
    "cut short": lambda model: os.truncate(model, 1000),
    "empty": lambda model: os.truncate(model, 0),
    "removed": lambda model: model.unlink(),
    "packed weights removed": lambda model: PACKED.path(model).unlink(missing_ok=True),
    "packed weights of another": pack_another,
}


@pytest.mark.parametrize(
    ("device", "keep"), [("cpu", False), ("cpu", True), pytest.param("ggml-cpu", False, marks=pytest.mark.slow)]
)
@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_a_file_that_changes_while_it_is_used(
    model: Path, change: Callable[[Path], object], device: str, keep: bool
) -> None:
    """The text goes on, and those after it are the same model's: nothing is read from the file any more."""
    options = {"device": device, "weight_cache": keep, "policy": FixedPolicy(2, 2, 4), "report": lambda _: None}
    with pystaged.load(model, **options) as engine:
        expected = engine.generate(PROMPT, max_tokens=24).text
        stream = engine.stream(PROMPT, max_tokens=24)
        pieces = [next(stream)]
        change(model)
        assert "".join([*pieces, *stream]) == expected
        assert engine.generate(PROMPT, max_tokens=24).text == expected
        assert engine.chat_format.render([{"role": "user", "content": "a"}]) == "a, it says"


LIMITED = """
import resource, sys
from pathlib import Path
import pystaged
from pystaged.decoding.policy import FixedPolicy

def addresses():
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("VmSize"))

prompt = "the tree and the house"
with pystaged.load(sys.argv[1], policy=FixedPolicy(2, 2, 4), report=lambda _: None) as engine:
    expected = engine.generate(prompt, max_tokens=200, temperature=1, seed=5).text
    stream = engine.stream(prompt, max_tokens=200, temperature=1, seed=5)
    pieces = [next(stream)]
    resource.setrlimit(resource.RLIMIT_AS, (addresses(), resource.RLIM_INFINITY))
    refused = 0
    try:
        pieces += stream
        assert "".join(pieces) == expected, "another text"
    except MemoryError:
        refused += 1
    for n in range(40):  # texts at once, each with a context of its own
        try:
            results = engine.generate([f"{prompt} {i}" for i in range(n)], max_tokens=4) if n else []
            assert len(results) == n
        except (MemoryError, RuntimeError):  # the latter where no thread can be started
            refused += 1
    resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    assert engine.generate(prompt, max_tokens=200, temperature=1, seed=5).text == expected
    print("refused", refused > 0)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="the limit is Linux's")
def test_memory_that_ends_in_the_middle_of_a_text(model: Path) -> None:
    """What does not fit is refused with MemoryError; the engine goes on as soon as there is room."""
    done = run_python(LIMITED, model)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "refused True\n"
