"""What the documents show runs, and the names they give exist."""

from __future__ import annotations

import importlib
import inspect
import re
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pluggy
import pytest
from llm import hookspecs

import pystaged
from pystaged.chat.format import ChatFormat
from pystaged.engine import LoadOptions
from pystaged.integrations import llm as llm_plugin
from pystaged.loading import names
from pystaged.options.config import TextOptions

ROOT = Path(__file__).parents[1]
PAGES = ["README.md", "docs/coming-from.md", "docs/policies.md", "docs/receipts.md", "docs/usage.md"]
BLOCK = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def page(name: str) -> str:
    return (ROOT / name).read_text("utf-8")


@pytest.fixture
def plugin(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """Our plugin alone is known to `llm`, whether or not it is installed."""
    monkeypatch.setenv("LLM_USER_PATH", str(tmp_path))
    monkeypatch.setattr("llm.plugins._loaded", True)
    monkeypatch.setattr("llm.plugins.pm", manager := pluggy.PluginManager("llm"))
    monkeypatch.setattr("llm.pm", manager)
    manager.add_hookspecs(hookspecs)
    manager.register(llm_plugin)
    yield
    for _, loaded in llm_plugin._engines.values():
        loaded.close()
    llm_plugin._engines.clear()


@pytest.mark.slow
@pytest.mark.usefixtures("plugin")
@pytest.mark.parametrize("name", PAGES)
def test_snippets_run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, name: str) -> None:
    """The Python of a page, from its beginning to its end; where SmolLM2 is not installed, with the bundled model."""
    monkeypatch.chdir(tmp_path)  # some write files
    blocks = BLOCK.findall(page(name))
    assert blocks
    try:
        names.resolve("smollm2")
        model = "smollm2"
    except FileNotFoundError:
        model = "bundled"
    there: dict[str, Any] = {"__name__": "snippets"}
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "the model has no chat template")
        for block in blocks:
            exec(compile(re.sub(r"\bsmollm2\b", model, block), name, "exec"), there)
    for each in there.values():
        if isinstance(each, pystaged.Engine):
            each.close()


def column(text: str, heading: str) -> list[str]:
    """The code in a column of a page's tables."""
    found: list[str] = []
    at = None
    for line in text.splitlines():
        cells = [cell.strip() for cell in line.split("|")] if line.startswith("|") else []
        at = (cells.index(heading) if heading in cells else at) if cells else None
        if at is not None:
            found += re.findall(r"`([^`]+)`", cells[at])
    return found


def test_names_of_other_libraries_have_ours_beside_them() -> None:
    code = column(page("docs/coming-from.md"), "here")
    assert len(code) > 50
    engine = {name for name, _ in inspect.getmembers(pystaged.Engine)}
    results = set(pystaged.GenerationResult.__dataclass_fields__) | set(pystaged.Score.__dataclass_fields__)
    options = {*TextOptions.__annotations__, *LoadOptions.__annotations__}
    for method in (pystaged.Engine.generate, pystaged.Engine.stream_chat, ChatFormat.render):
        options |= inspect.signature(method).parameters.keys()
    for each in code:
        words = re.sub(r'"[^"]*"', '""', each)
        assert set(re.findall(r"\bengine\.(\w+)", words)) <= engine, each
        assert set(re.findall(r"\bpystaged\.(\w+)", words)) <= set(pystaged.__all__), each
        assert set(re.findall(r"\bresult\.(\w+)", words)) <= results, each
        assert set(re.findall(r"\bpiece\.(\w+)", words)) <= set(pystaged.Piece.__slots__), each
        assert set(re.findall(r"\bchat_format\.(\w+)", words)) <= {name for name, _ in inspect.getmembers(ChatFormat)}
        assert set(re.findall(r"\b(\w+)=", words)) <= options, each


def test_an_install_from_source_takes_the_versions_that_the_project_names() -> None:
    built = re.findall(r'"(.+?)"', re.findall(r"^requires = \[(.*)\]", page("pyproject.toml"), re.MULTILINE)[0])
    assert set(built) <= set(page("cmake/requirements.txt").splitlines())


def test_ci_runs_the_line_for_developers() -> None:
    (line,) = re.findall(r"To develop pystaged:\n\n((?:    .+\n)+)", page("README.md"))
    assert line in page(".ci/run")


def test_a_tokens_way_names_what_there_is() -> None:
    lines = page("DEVELOPING.md").split("A token's way")[1].split("In the extension")[0].strip().splitlines()[2:]
    assert len(lines) == 15
    for line in lines:
        module = importlib.import_module("pystaged." + line.split()[0].replace("/", "."))
        names = re.findall(r"\b([A-Z]\w+)\.(\w+)", line)
        assert names, line
        for kind, member in names:
            assert hasattr(getattr(module, kind), member), line
