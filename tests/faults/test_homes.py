"""Homes that cannot be written, that are not there, that others use too, and whose clock is wrong."""

from __future__ import annotations

import os
import pwd
import shutil
import subprocess
from pathlib import Path

import pytest
from support.commands import PROGRAM, environment
from support.families import CASES
from support.random_models import write

import pystaged
from pystaged.loading import cache
from pystaged.loading.kept import RECYCLED

# Even root may then write only where it is allowed to, as everybody else.
POWERLESS = ["setpriv", "--bounding-set=-dac_override,-dac_read_search"] if os.geteuid() == 0 else []
needs_setpriv = pytest.mark.skipif(bool(POWERLESS) and not shutil.which("setpriv"), reason="root without setpriv")
HOMES = ("HOME", "XDG_CACHE_HOME", "XDG_CONFIG_HOME", "XDG_DATA_HOME", "HF_HOME")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("model") / "model.gguf", CASES["llama"])


def said(model: Path, folder: Path, **home: str) -> bytes:
    """What is generated, in that folder and with no home but this. Nothing fails, and nothing is written there."""
    options = ["--max-tokens", "8", "--weight-cache"]
    done = subprocess.run(
        [*POWERLESS, *PROGRAM, "generate", "the tree", "--model", model, *options],
        capture_output=True,
        check=False,
        cwd=folder,
        timeout=600,
        env={key: value for key, value in environment().items() if key not in HOMES} | home,
    )
    assert done.returncode == 0, done.stderr
    assert b"Traceback" not in done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def text(model: Path, tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """What is generated where all is well."""
    folder = tmp_path_factory.mktemp("well")
    return said(model, folder, HOME=str(folder), XDG_CACHE_HOME=str(folder / "cache"))


@pytest.fixture
def empty(tmp_path: Path) -> Path:
    """A folder to work in, which stays empty."""
    (tmp_path / "work").mkdir()
    return tmp_path / "work"


@pytest.mark.slow
@needs_setpriv
def test_a_home_that_cannot_be_written(model: Path, text: bytes, empty: Path, tmp_path: Path) -> None:
    home = tmp_path / "home"
    home.mkdir(mode=0o555)
    assert said(model, empty, HOME=str(home)) == text
    assert list(home.iterdir()) == []
    for folder in (home, home / ".cache"):
        folder.chmod(0o755)
        (home / ".cache").mkdir(exist_ok=True)
        (home / ".cache").chmod(0o555)
    assert said(model, empty, HOME=str(home)) == text
    assert list(empty.iterdir()) == []


@pytest.mark.slow
@pytest.mark.parametrize("home", ["/dev/null/nowhere", ""])
@needs_setpriv
def test_a_home_that_is_not_there(model: Path, text: bytes, empty: Path, home: str) -> None:
    assert said(model, empty, XDG_CACHE_HOME="/dev/null/cache", **({"HOME": home} if home else {})) == text
    assert list(empty.iterdir()) == []


def test_a_user_whom_the_system_does_not_know(
    model: Path, text: bytes, empty: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in containers: no HOME, and no entry in the list of users. No folder named ~ is made where one is."""
    for name in HOMES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(pwd, "getpwuid", lambda _: {}[0])
    monkeypatch.chdir(empty)
    with pystaged.load(model, weight_cache=True, report=lambda _: None) as engine:
        assert engine.generate("the tree", max_tokens=8).text == text.decode().rstrip("\n")
    assert [*cache.files()] == RECYCLED.all() == []
    with pytest.raises(OSError, match="there is no home folder, set XDG_CACHE_HOME"):
        cache.folder("some/one").mkdir(parents=True)
    assert list(empty.iterdir()) == []


@pytest.mark.slow
@needs_setpriv
def test_a_cache_of_others(model: Path, text: bytes, empty: Path, tmp_path: Path) -> None:
    """What others wrote and one may not read, or replace, is done without; what one may is used."""
    cache = tmp_path / "cache"
    home = {"HOME": str(tmp_path), "XDG_CACHE_HOME": str(cache)}
    assert said(model, empty, **home) == text
    kept = [path for path in cache.rglob("*") if path.is_file()]
    assert {path.parent.name for path in kept} >= {"costs", "packed"}
    for change in (unreadable, unwritable, hidden):
        before = {path: path.read_bytes() for path in kept}
        for path in sorted(cache.rglob("*")):
            change(path)
        change(cache)
        assert said(model, empty, **home) == text
        for path in (cache, cache / "pystaged", *(path.parent for path in kept), *kept):
            path.chmod(0o755 if path.is_dir() else 0o644)
        if change is not unreadable:
            assert {path: path.read_bytes() for path in kept} == before
    assert list(empty.iterdir()) == []


def unreadable(path: Path) -> None:
    """The files are another's, in a folder of all."""
    if path.is_file():
        path.chmod(0)


def unwritable(path: Path) -> None:
    path.chmod(0o555 if path.is_dir() else 0o444)


def hidden(path: Path) -> None:
    """The innermost folders; those around them are changed last."""
    if path.is_dir() and path.parent.name == "pystaged":
        path.chmod(0)


YEAR = 365 * 24 * 3600


@pytest.mark.parametrize("seconds", [0, -10 * YEAR, 200 * YEAR], ids=["1970", "before", "to come"])
def test_clocks_that_jump(
    model: Path, text: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seconds: int
) -> None:
    """Times of files are compared and never believed."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    copy = tmp_path / "model.gguf"
    shutil.copyfile(model, copy)
    for change in (lambda: [copy], lambda: (tmp_path / "cache").rglob("*"), list):
        for path in change():
            os.utime(path, (seconds, seconds))
        with pystaged.load(copy, weight_cache=True, report=lambda _: None) as engine:
            assert engine.generate("the tree", max_tokens=8).text == text.decode().rstrip("\n")
            assert engine.model.is_mapped
