"""Which room of the package may know which: arrows point down, and nobody needs the command line."""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from graphlib import TopologicalSorter
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest

import pystaged

SOURCE = Path(pystaged.__file__).parent
USES = {
    "decoding": {"decoding"},
    "drafting": {"chat", "decoding", "drafting"},
    "backends": {"backends"},
    "chat": {"chat"},
    "loading": {"backends", "decoding", "drafting", "loading"},
    "bench": {"backends", "bench", "chat", "decoding", "drafting", "loading"},
    "server": {"chat", "decoding", "loading", "server"},
    "distill": {"chat", "decoding", "distill", "drafting", "loading"},
    "cli": {"backends", "bench", "chat", "cli", "decoding", "distill", "drafting", "loading", "server"},
}


def imported(file: Path) -> Iterator[str]:
    """Full names of what a file imports, wherever in it."""
    for node in ast.walk(ast.parse(file.read_text("utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.module:
            yield from (f"{node.module}.{each.name}" for each in node.names)
        elif isinstance(node, ast.Import):
            yield from (each.name for each in node.names)


def rooms(folder: Path) -> set[str]:
    """The rooms that the files of a folder import from."""
    names = {name for file in folder.glob("*.py") for name in imported(file) if name.startswith("pystaged.")}
    return {name.split(".")[1] for name in names} & USES.keys()


@pytest.mark.parametrize("room", USES)
def test_a_room_knows_those_below_it(room: str) -> None:
    assert rooms(SOURCE / room) <= USES[room]


def test_no_file_is_in_a_circle() -> None:
    """The package itself aside, which imports names when they are used."""
    files = {name_of(file): file for file in SOURCE.rglob("*.py")}
    graph = {
        name: {each if each in files else each.rpartition(".")[0] for each in imported(file)} & files.keys() - {name}
        for name, file in files.items()
        if name != "pystaged"
    }
    TopologicalSorter(graph).prepare()


def name_of(file: Path) -> str:
    """How a file of the package is imported."""
    return ".".join(file.relative_to(SOURCE.parent).with_suffix("").parts).removesuffix(".__init__")


def test_nothing_reaches_into_private_parts_of_others() -> None:
    """Of modules, and of what is called engine, runtime or scheduler."""
    ours = {"_core", "_llama", "_ctrl_c", "_program", "__version__"}
    for file in SOURCE.rglob("*.py"):
        private = {name.split("._")[1] for name in imported(file) if name.startswith("pystaged.") and "._" in name}
        assert {f"_{name.split('.')[0]}" for name in private} <= ours, file
        text = file.read_text("utf-8")
        assert not re.search(r"\b(engine|runtime|scheduler|bundle|sequence|stream)\._[a-z]", text), file


def test_every_room_is_named_here() -> None:
    found = {file.parent.name for file in SOURCE.glob("*/__init__.py")}
    assert found - {"models"} == USES.keys()  # which an installed package has inside


def test_what_users_touch_knows_neither_benchmark_nor_command_line() -> None:
    above = {"__main__.py", "_program.py"}
    for file in SOURCE.glob("*.py"):
        if file.name not in above:
            assert not any(name.startswith(("pystaged.bench", "pystaged.cli")) for name in imported(file)), file


def test_what_is_imported_is_declared() -> None:
    tomllib = pytest.importorskip("tomllib", reason="Python 3.10 has no reader of TOML")
    file = Path(__file__).parent.parent / "pyproject.toml"
    project = tomllib.loads(file.read_text("utf-8"))["project"]
    declared = [
        *project["dependencies"],
        *(name for extra in project["optional-dependencies"].values() for name in extra),
    ]
    names = {re.split(r"[^\w.-]", each)[0].lower().replace("_", "-") for each in declared}
    roots = {name.split(".")[0] for each in SOURCE.rglob("*.py") for name in imported(each)}
    by_import = packages_distributions()
    for root in roots - sys.stdlib_module_names - {"pystaged"}:
        owners = {owner.lower().replace("_", "-") for owner in by_import.get(root, [root])}
        assert owners & names, root
