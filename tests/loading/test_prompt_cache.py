"""Prompts on disk: a text that goes on from restored bytes is the text of a cold start, and no bad file is trusted."""

from __future__ import annotations

import errno
import os
import stat
import weakref
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.commands import run_python
from support.families import models
from support.random_models import write
from support.scheduling import wait_until
from support.steps import evaluate, prefill

import pystaged
from pystaged import FixedPolicy, GenerationResult, ModelError, _core
from pystaged._core import Session, read_texts, write_texts
from pystaged.loading import prompt_cache

PathOf = Callable[[str], Path]
POLICY = FixedPolicy(width=1, depth=0, budget=0)
PROMPT = np.random.default_rng(7).integers(1, 200, 300).tolist()
MODELS = models("prompt_cache")
PROGRAM = """
import sys, pystaged
tokens = [int(each) for each in sys.argv[4].split(",")]
options = {"draft": None, "recycle": False, "policy": pystaged.FixedPolicy(width=1, depth=0, budget=0)}
with pystaged.load(sys.argv[1], prompt_cache=sys.argv[2], kv=sys.argv[3], **options) as engine:
    result = engine.generate(tokens, max_tokens=20)
print(result.stats.reused_tokens, *result.tokens)
"""


@pytest.fixture(scope="module")
def path_of(tmp_path_factory: pytest.TempPathFactory) -> PathOf:
    folder = tmp_path_factory.mktemp("models")
    return cache(lambda name: write(folder / f"{name}.gguf", MODELS[name]))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "prompts"


def text(model: Path, tokens: list[int], folder: Path | None, **options: Any) -> GenerationResult:
    """A text of a new engine."""
    options = {"draft": None, "recycle": False, "policy": POLICY, **options}
    with pystaged.load(model, prompt_cache=folder, **options) as engine:
        return engine.generate(tokens, max_tokens=20)


def files(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.prompt"))


@pytest.mark.parametrize("kv", ["f16", "q8_0"])
@pytest.mark.parametrize("name", MODELS)
def test_restored_bytes_give_the_text_of_a_cold_start(path_of: PathOf, folder: Path, name: str, kv: str) -> None:
    first = text(path_of(name), PROMPT, folder, kv=kv)
    turn = [*PROMPT, *first.tokens, 5, 6, 7]
    warm, cold = text(path_of(name), turn, folder, kv=kv), text(path_of(name), turn, None, kv=kv)
    assert warm.tokens == cold.tokens
    assert warm.stats.reused_tokens >= len(PROMPT)
    assert cold.stats.reused_tokens == 0


@pytest.mark.parametrize("name", ["llama", "qwen35"])
def test_another_process_with_another_kernel_goes_on(path_of: PathOf, folder: Path, name: str) -> None:
    def run(tokens: list[int], folder: Path, kernel: str) -> list[int]:
        done = run_python(PROGRAM, path_of(name), folder, "q8_0", ",".join(map(str, tokens)), PYSTAGED_KERNEL=kernel)
        assert done.returncode == 0, done.stderr
        return [int(word) for word in done.stdout.split()]

    _, *tokens = run(PROMPT, folder, "scalar")
    turn = [*PROMPT, *tokens, 5]
    reused, *warm = run(turn, folder, _core.kernels()[-1])
    assert warm == run(turn, folder.with_name("none"), "scalar")[1:]
    assert reused >= len(PROMPT)


def test_an_edit_in_the_middle_reuses_what_stands_before_it(path_of: PathOf, folder: Path) -> None:
    text(path_of("llama"), PROMPT, folder)
    edited = [*PROMPT[:200], 3, *PROMPT[201:]]
    warm = text(path_of("llama"), edited, folder)
    assert warm.stats.reused_tokens == 200
    assert warm.tokens == text(path_of("llama"), edited, None).tokens


def test_the_text_of_a_draft_is_kept_too(path_of: PathOf, folder: Path) -> None:
    options: dict[str, Any] = {"draft": path_of("llama"), "policy": FixedPolicy(width=2, depth=2, budget=4)}
    first = text(path_of("llama"), PROMPT, folder, **options)
    turn = [*PROMPT, *first.tokens, 5]
    warm, cold = text(path_of("llama"), turn, folder, **options), text(path_of("llama"), turn, None, **options)
    assert warm.tokens == cold.tokens
    assert warm.stats.reused_tokens >= len(PROMPT)


def test_a_text_replaces_those_that_it_begins_with(path_of: PathOf, folder: Path) -> None:
    first = text(path_of("llama"), PROMPT, folder)
    text(path_of("llama"), PROMPT, folder)
    (kept,) = files(folder)
    text(path_of("llama"), [*PROMPT, *first.tokens, 5], folder)
    assert len(files(folder)) == 1
    assert files(folder) != [kept]


def test_a_conversation_is_written_when_it_has_grown(path_of: PathOf, folder: Path) -> None:
    options: dict[str, Any] = {"draft": None, "recycle": False, "policy": POLICY, "prompt_cache": folder}
    with pystaged.load(path_of("llama"), **options) as engine:
        turn = [*PROMPT, *engine.generate(PROMPT, max_tokens=20).tokens]
        wait_until(lambda: len(files(folder)) == 1)
        first = files(folder)
        for _ in range(2):
            turn = [*turn, 5, *engine.generate([*turn, 5], max_tokens=3).tokens]
        assert files(folder) == first
    assert len(files(folder)) == 1
    assert files(folder) != first
    assert text(path_of("llama"), turn, folder).stats.reused_tokens == len(turn) - 1


def test_the_user_alone_can_read_them(path_of: PathOf, folder: Path) -> None:
    text(path_of("llama"), PROMPT, folder)
    assert [stat.S_IMODE(path.stat().st_mode) for path in (folder, *files(folder))] == [0o700, 0o600]
    folder.chmod(0o777)
    with pytest.raises(ValueError, match="others can write into"):
        text(path_of("llama"), PROMPT, folder)


def test_a_file_is_no_folder(path_of: PathOf, tmp_path: Path) -> None:
    """Of a file's name, as llama.cpp takes one for it, no folder is made."""
    (tmp_path / "there").touch()
    for name in ("there", "prompt.bin"):
        with pytest.raises(ValueError, match=f"{tmp_path / name} looks like a file; name a folder"):
            text(path_of("llama"), PROMPT, tmp_path / name)
    assert [each.name for each in tmp_path.iterdir()] == ["there"]
    (tmp_path / "prompts.1").mkdir(mode=0o700)
    text(path_of("llama"), PROMPT, tmp_path / "prompts.1")
    assert len(files(tmp_path / "prompts.1")) == 1


@pytest.mark.parametrize("harm", ["cut", "longer", "head", "state", "end", "empty"])
def test_a_damaged_file_is_removed_with_a_line(path_of: PathOf, folder: Path, harm: str) -> None:
    model = path_of("llama")
    text(model, PROMPT, folder)
    (path,) = files(folder)
    data = bytearray(path.read_bytes())
    at = {"head": 30, "state": len(data) // 2, "end": len(data) - 1}.get(harm, 0)
    data[at] ^= 4 if at else 0
    path.write_bytes({"cut": data[:-100], "longer": data + b"0", "empty": b""}.get(harm, data))
    lines: list[str] = []
    again = text(model, PROMPT, folder, report=lines.append)
    assert again.stats.reused_tokens == 0
    assert again.tokens == text(model, PROMPT, None).tokens
    assert any(line.startswith("a kept prompt is removed: ") for line in lines)
    assert path.read_bytes() != data or harm in ("cut", "longer", "empty")


def test_a_file_of_another_model_or_kv_type_is_not_used(path_of: PathOf, folder: Path) -> None:
    text(path_of("llama"), PROMPT, folder)
    (ours,) = files(folder)
    assert text(path_of("llama"), PROMPT, folder, kv="q8_0").stats.reused_tokens == 0
    assert text(path_of("gemma3"), PROMPT, folder).stats.reused_tokens == 0
    theirs = next(path for path in files(folder) if path.name[:16] != ours.name[:16])
    theirs.replace(ours)
    assert text(path_of("llama"), PROMPT, folder, report=lambda _: None).stats.reused_tokens == 0


def test_the_users_files_stay(path_of: PathOf, folder: Path) -> None:
    own = [folder / name for name in ("film.mkv.part", "below/film.part", "summarise.prompt")]
    for path in own:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        path.write_bytes(b"0" * 3000)
    left = folder / f"{'0' * 16}.{'1' * 16}.prompt.{'2' * 16}.part"
    left.write_bytes(b"")
    text(path_of("llama"), PROMPT, folder, prompt_cache_size=1 << 30)
    text(path_of("llama"), PROMPT, folder, prompt_cache_size=1)
    assert all(path.exists() for path in own)
    assert not left.exists()


def test_the_texts_used_longest_ago_make_room(path_of: PathOf, folder: Path) -> None:
    model = path_of("llama")
    text(model, PROMPT, folder)
    (first,) = files(folder)
    os.utime(first, (1, 1))
    size = first.stat().st_size
    other = PROMPT[::-1]
    text(model, other, folder, prompt_cache_size=size * 3 // 2)
    assert first not in files(folder)
    assert len(files(folder)) == 1
    text(model, [9, *PROMPT], folder, prompt_cache_size=size // 2)
    assert len(files(folder)) == 1


def test_a_full_disk_costs_one_line(path_of: PathOf, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(prompt_cache, "write_texts", full)
    lines: list[str] = []
    options: dict[str, Any] = {"draft": None, "recycle": False, "policy": POLICY, "report": lines.append}
    with pystaged.load(path_of("llama"), prompt_cache=folder, **options) as engine:
        found = [engine.generate(prompt, max_tokens=3).tokens for prompt in (PROMPT, PROMPT[::-1])]
    assert [len(tokens) for tokens in found] == [3, 3]
    assert len([line for line in lines if line.startswith("a prompt is not kept: ")]) == 1
    assert list(folder.iterdir()) == []


def test_what_cannot_be_read_or_written_is_refused(path_of: PathOf, tmp_path: Path) -> None:
    model, file = _core.Model(path_of("llama")), tmp_path / "file"
    session = Session(model)
    prefill(session, PROMPT)
    with pytest.raises(ModelError, match="No such file"):
        write_texts(file, b"head", [session])
    file.touch()
    write_texts(file, b"head", [session])
    with pytest.raises(ValueError, match="new sessions"):
        read_texts(file, b"head", [session])
    with pytest.raises(TypeError):
        read_texts(file, b"head", [None])  # type: ignore[list-item]
    with pytest.raises(ModelError, match="another model"):
        read_texts(file, b"hear", [Session(model)])
    with pytest.raises(ModelError, match="longer than the context"):
        read_texts(file, b"head", [Session(model, 100)])
    evaluate(session, [1], [-1])
    with pytest.raises(ValueError, match="pending"):
        write_texts(file, b"head", [session])


def test_a_list_may_change_while_its_texts_are_written(path_of: PathOf, tmp_path: Path) -> None:
    model, file = _core.Model(path_of("llama")), tmp_path / "file"
    file.touch()
    texts = [Session(model)]
    prefill(texts[0], PROMPT)
    held = weakref.ref(texts[0])

    class ClearsTheList:
        def __fspath__(self) -> str:
            texts.clear()
            assert held() is not None
            return str(file)

    write_texts(ClearsTheList(), b"head", texts)
    assert held() is None
    again = Session(model)
    read_texts(file, b"head", [again])
    assert again.tokens.tolist() == list(PROMPT)


def test_a_model_on_a_device_keeps_none(path_of: PathOf, folder: Path) -> None:
    with pytest.raises(ValueError, match="on the cpu only"):
        text(path_of("llama"), PROMPT, folder, device="ggml-cpu")
