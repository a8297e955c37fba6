"""Which room may know which, in the package and in C++: arrows point down, and nobody needs the command line."""

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
# The rooms of the package from the lowest up, with as many lines of Python as each may have.
ROOMS = {
    "platform": 859,
    "options": 1142,
    "sampling": 1239,
    "chat": 2736,
    "decoding": 2696,
    "drafting": 1655,
    "backends": 387,
    "loading": 3965,
    "receipts": 721,
    "server": 3884,
    "integrations": 829,
    "bench": 2657,
    "distill": 1707,
    "cli": 2996,
}
ROOT = 11  # files in no room

CPP = Path(__file__).parent.parent / "cpp"
# The rooms of C++ from the lowest up, with as many lines as each may have.
CPP_ROOMS = {
    "kernels": 3005,
    "machine": 1473,
    "files": 411,
    "weights": 918,
    "llama": 639,
    "model": 2426,
    "state": 901,
    "pass": 2770,
    "sampling": 751,
    "text": 1322,
    "drafting": 195,
    "bindings": 729,
}


def imported(file: Path) -> Iterator[str]:
    """Full names of what a file imports, wherever in it."""
    for node in ast.walk(ast.parse(file.read_text("utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.module:
            yield from (f"{node.module}.{each.name}" for each in node.names)
        elif isinstance(node, ast.Import):
            yield from (each.name for each in node.names)


@pytest.mark.parametrize("room", ROOMS)
def test_a_room_knows_those_below_it(room: str) -> None:
    names = {name for file in (SOURCE / room).glob("*.py") for name in imported(file) if name.startswith("pystaged.")}
    height = list(ROOMS).index(room)
    assert {name.split(".")[1] for name in names} & ROOMS.keys() <= set(list(ROOMS)[: height + 1])


@pytest.mark.parametrize("room", ROOMS)
def test_a_room_stays_small(room: str) -> None:
    assert sum(len(file.read_text("utf-8").splitlines()) for file in (SOURCE / room).glob("*.py")) <= ROOMS[room]


def test_the_root_is_no_room() -> None:
    files = {file.name for file in SOURCE.iterdir() if file.is_file() and not file.name.startswith("_core.c")}
    assert len(files - {"llama_cpp_version.txt"}) <= ROOT  # which a build writes


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
    """Of modules, and of what is called engine or scheduler: so the engine is the one way in."""
    ours = {"_core", "_llama", "_program", "__version__"}
    for file in SOURCE.rglob("*.py"):
        private = {name.split("._")[1] for name in imported(file) if name.startswith("pystaged.") and "._" in name}
        assert {f"_{name.split('.')[0]}" for name in private} <= ours, file
        text = file.read_text("utf-8")
        assert not re.search(r"\b_?(engine|scheduler|bundle|sequence|stream)\._[a-z]", text), file


def test_every_room_is_named_here() -> None:
    found = {file.parent.name for file in SOURCE.glob("*/__init__.py")}
    assert found - {"models"} == ROOMS.keys()  # which an installed package has inside


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


def included() -> dict[str, set[str]]:
    """Each C++ file with those of ours that it includes."""
    files = {file.relative_to(CPP).as_posix(): file for file in CPP.rglob("*") if file.suffix in {".h", ".cpp"}}
    return {
        name: {
            where
            for each in re.findall(r'^#include "(.+)"$', file.read_text("utf-8"), re.MULTILINE)
            for where in (each, f"{name.rpartition('/')[0]}/{each}")
            if where in files
        }
        for name, file in files.items()
    }


def test_includes_point_down() -> None:
    height = {room: i for i, room in enumerate(["", *CPP_ROOMS])}
    for name, others in included().items():
        room = name.rpartition("/")[0]
        up = {each for each in others if height[each.rpartition("/")[0]] > height[room]}
        assert not up, name


def test_no_circle_of_headers_and_what_they_declare() -> None:
    """A header and the file that defines what it declares are one."""
    graph: dict[str, set[str]] = {}
    for name, others in included().items():
        needed = {each.removesuffix(".h") for each in others}
        stem = name.rpartition(".")[0]
        graph.setdefault(stem, set()).update(needed - {stem})
    TopologicalSorter(graph).prepare()


def test_rooms_of_cpp_stay_small() -> None:
    lines = dict.fromkeys(CPP_ROOMS, 0)
    for name in included():
        room = name.rpartition("/")[0]
        if room:
            lines[room] += len((CPP / name).read_text("utf-8").splitlines())
    assert {room: n for room, n in lines.items() if n > CPP_ROOMS[room]} == {}
    assert len([file for file in CPP.iterdir() if file.is_file()]) <= 2


def test_a_constructor_takes_at_most_eight_things() -> None:
    """Those of dataclasses aside, which are records."""
    for file in SOURCE.rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text("utf-8"))):
            if isinstance(node, ast.FunctionDef) and node.name == "__init__":
                given = node.args
                assert len([*given.posonlyargs, *given.args, *given.kwonlyargs]) <= 1 + 8, f"{file}:{node.lineno}"
