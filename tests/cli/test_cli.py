"""The command line in processes of its own: text on standard output, everything else on standard error."""

from __future__ import annotations

import contextlib
import json
import math
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from support.commands import PROGRAM, assert_refused, environment, here, run
from support.paths import table
from support.random_models import RandomModel, write
from typer.testing import CliRunner

import pystaged
from pystaged import _core, cli
from pystaged.chat.prompts import Asked
from pystaged.cli import texts
from pystaged.decoding.readers import Stream
from pystaged.options.config import GenerationConfig

PROMPT = "the tree then "
WARM = ["--temperature", "1", "--seed", "3", "--top-k", "200", "--max-tokens", "40"]

FULL = pytest.mark.skipif(not Path("/dev/full").exists(), reason="this system has no device that is always full")


@pytest.fixture(scope="module")
def path(random_gguf: Callable[..., Path]) -> Path:
    return random_gguf(vocab_size=300, context=96)


@pytest.fixture(scope="module")
def result(path: Path) -> pystaged.GenerationResult:
    return pystaged.generate(PROMPT, model=path, max_tokens=40, temperature=1.0, seed=3, top_k=200)


# ---- generate ----


@pytest.mark.parametrize("several", [[], ["--n", "2", "--seed", "1"]])
def test_a_full_context_is_told(path: Path, several: list[str]) -> None:
    done = here("generate", "e", "--model", path, "--n-ctx", "2", "--json", "--temperature", "1", *several)
    assert done.returncode == 0, done.stderr
    where = " in 2 of 2 texts" if several else ""
    assert f"the context of 2 tokens is full{where}; --n-ctx allows more, up to 96\n" in done.stderr.decode()
    done = here("generate", "e", "--model", path, "--n-ctx", "2", "--verbose", "--temperature", "1", *several)
    said = done.stderr.decode()
    order = ["per second", f"is full{where}", "passes of the target in" if several else "of the prompt in"]
    assert sorted(order, key=said.index) == order
    enough = here("generate", "e", "--model", path, "--json", "--max-tokens", "2", *several)
    assert b"is full" not in enough.stderr


@pytest.mark.slow
def test_rules_and_logprobs(path: Path) -> None:
    options: dict[str, Any] = {"temperature": 0.9, "seed": 3, "repeat_penalty": 1.2, "presence_penalty": 0.1}
    options |= {"frequency_penalty": -0.1, "repeat_last_n": -1, "typical_p": 0.9, "min_tokens": 5, "max_tokens": 12}
    options |= {"dry_multiplier": 0.8, "dry_base": 1.5, "dry_allowed_length": 1, "dry_penalty_last_n": 20}
    options |= {"xtc_probability": 0.5, "xtc_threshold": 0.01, "logprobs": 2}
    arguments = [word for name, value in options.items() for word in (f"--{name.replace('_', '-')}", str(value))]
    arguments += ["--temperature-last", "--ignore-eos", "-l", "5+1.5", "--logit-bias", "17-inf", "-l", "e=-2"]
    done = here("generate", PROMPT, "--model", path, *arguments, "--dry-sequence-breaker", "x", "--json")
    assert done.returncode == 0, done.stderr
    options |= {"temperature_last": True, "ignore_eos": True, "logit_bias": {5: 1.5, 17: -math.inf, "e": -2.0}}
    expected = pystaged.generate(PROMPT, model=path, dry_sequence_breakers="x", **options)
    found = json.loads(done.stdout)
    assert found["tokens"] == expected.tokens
    assert expected.logprobs is not None

    def told(each: Any) -> dict[str, Any]:
        return {"token": each.token, "text": each.text, "logprob": each.logprob}

    logprobs = [told(each) | {"top": [told(other) for other in each.top]} for each in expected.logprobs]
    assert found["logprobs"] == logprobs


@pytest.mark.parametrize(("arguments", "status", "words"), table("rules_refused"), ids=str)
def test_rules_that_are_refused(path: Path, arguments: list[str], status: int, words: str) -> None:
    done = CliRunner().invoke(cli.app, ["generate", PROMPT, "--model", str(path), *arguments])
    assert (done.exit_code, done.stdout) == (status, "")
    assert words in " ".join(f"{done.stderr} {done.exception}".replace("│", " ").split())


def test_generate_from_standard_input(path: Path, result: pystaged.GenerationResult) -> None:
    done = run("generate", "-", "--model", path, *WARM, stdin=PROMPT.encode() + b"\n")  # as echo writes it
    assert (done.returncode, done.stdout.decode()) == (0, result.text + "\n")
    assert f"{len(result.tokens)} tokens" in done.stderr.decode()
    assert b"\x1b" not in done.stdout + done.stderr


def test_json(path: Path, result: pystaged.GenerationResult) -> None:
    done = here("generate", PROMPT, "--model", path, *WARM, "--json")
    assert done.returncode == 0
    assert done.stdout.count(b"\n") == 1
    found = json.loads(done.stdout)
    stats = found.pop("stats")
    expected = {"text": result.text, "tokens": result.tokens, "finish_reason": result.finish_reason}
    assert {name: found[name] for name in expected} == expected
    assert found["prompt"] == PROMPT
    assert stats.keys() == result.stats.to_dict().keys()
    for name in ("prompt_tokens", "reused_tokens", "new_tokens"):
        assert stats[name] == result.stats.to_dict()[name]


@pytest.mark.slow
def test_a_seed_is_drawn(path: Path) -> None:
    arguments = ["generate", PROMPT, "--model", path, "--temperature", "1", "--max-tokens", "20", "--json"]
    drawn, other = (json.loads(here(*arguments, "--seed", "-1").stdout) for _ in range(2))
    assert drawn["seed"] != other["seed"]
    assert json.loads(here(*arguments, "--seed", str(drawn["seed"])).stdout)["tokens"] == drawn["tokens"]
    said = here(*arguments[:-1], "-v", "--seed", str(drawn["seed"])).stderr.decode()
    read = drawn["stats"]["prompt_tokens"]
    assert re.search(rf"read {read} tokens of the prompt in \d+\.\d\d seconds; seed {drawn['seed']}\n", said)


@pytest.mark.slow
def test_several_texts(tmp_path: Path, path: Path) -> None:
    prompts = tmp_path / "prompts.txt"
    prompts.write_bytes("the tree then \r\n\nher hat [bold]\né".encode())
    texts = ["the tree then ", "her hat [bold]", "é"]
    given = product(texts, (4, 5))
    expected = [pystaged.generate(text, model=path, max_tokens=12, temperature=1.0, seed=seed) for text, seed in given]
    options = ("--model", path, "--max-tokens", "12", "--temperature", "1", "--seed", "4", "--n", "2")
    done = here("generate", "--prompts", prompts, *options, "--verbose")
    assert done.returncode == 0, done.stderr
    named = ""
    for i, each in enumerate(expected):
        named += f"==> {i + 1}: {texts[i // 2]!r}, seed {each.seed} <==\n{each.text}\n\n"
    assert done.stdout.decode() == named
    assert b"6 texts, " in done.stderr
    assert b"passes of the target in " in done.stderr
    lines = tmp_path / "prompts.jsonl"
    lines.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in texts))
    done = here("generate", "--prompts", lines, *options, "--json")
    found = [json.loads(line) for line in done.stdout.splitlines()]
    assert [each["prompt"] for each in found] == [text for text in texts for _ in range(2)]
    assert [(each["tokens"], each["seed"]) for each in found] == [(each.tokens, each.seed) for each in expected]
    done = here("generate", texts[0], *options, "--json")
    assert [json.loads(line)["tokens"] for line in done.stdout.splitlines()] == [each.tokens for each in expected[:2]]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["prompts.txt", "prompts.JSONL"])
def test_files_of_prompts(tmp_path: Path, path: Path, name: str) -> None:
    """A byte order mark is none of the text, nor are lines of white space; pipes are read as files are."""
    file = tmp_path / name
    texts = [PROMPT, " \t", "her hat\u2028é"]
    in_json = name.endswith("L")
    if in_json:
        texts[::2] = [json.dumps({"prompt": text, "id": 1}, ensure_ascii=False) for text in texts[::2]]
    file.write_bytes(b"\xef\xbb\xbf" + "\r\n".join([*texts, ""]).encode())
    options = ("--model", path, "--max-tokens", "4", "--json")
    done = here("generate", "--prompts", file, *options)
    assert done.returncode == 0, done.stderr
    found = [json.loads(line) for line in done.stdout.splitlines()]
    assert [each["prompt"] for each in found] == [PROMPT, "her hat\u2028é"]
    assert (f"{file}: members of its lines that are not used: 'id'\n" in done.stderr.decode()) == in_json
    again = here("generate", "--prompts", "-", *options, stdin=file.read_bytes())
    command = ["bash", "-c", '"$@" --prompts <(cat "$0")', file, *PROGRAM, "generate", *options]
    piped = subprocess.run(command, capture_output=True, check=False, env=environment(), timeout=600)
    for other in (again, piped):
        tokens = [json.loads(line)["tokens"] for line in other.stdout.splitlines()]
        assert tokens == [each["tokens"] for each in found]


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("a.txt", b"\n \n", "a.txt has no prompts"),
        ("a.txt", b"x\n\xff\n", "a.txt, line 2: not UTF-8"),
        ("a.txt", b"x\n" + b"y " * 200, "a.txt, line 2: the prompt has 400 tokens"),
        ("a.jsonl", b'{"prompt": "x"}\n\n{"prompt": "\xff"}\n', "a.jsonl, line 3: not UTF-8"),
        ("a.jsonl", b'{"prompt": "x"}\n{"prompt": ""}\n', "a.jsonl, line 2: the prompt is empty"),
        ("a.jsonl", b'{"prompt": "\\ud800"}\n', "a.jsonl, line 1: the prompt is not valid Unicode"),
        ("a.jsonl", b'{"promt": "x"}\n', "a.jsonl, line 1: not a JSON object with a 'prompt' or 'messages'"),
        ("a.json", b"[\n", "a.json, line 1: not a JSON object"),
        ("a.jsonl", b"[" * 100_000, "a.jsonl, line 1: not a JSON object"),
        ("a.jsonl", b'{"prompt": 1}\n', "a.jsonl, line 1: the prompt is not a string"),
        ("a.jsonl", b'{"messages": 1}\n', "a.jsonl, line 1: the messages are not a list"),
        ("a.jsonl", b'{"messages": [{}]}\n', "a.jsonl, line 1: messages[0] has the role None; the roles are system, "),
        ("a.jsonl", b'[{"role": "user", "content": "x"}]\n', "a.jsonl, line 1: messages are answered with --chat"),
        ("a.jsonl", b'{"question": "x"}\n', "a.jsonl, line 1: messages are answered with --chat"),
        ("a.jsonl", b'{"prompt": "x", "messages": []}\n', "a.jsonl, line 1: only one of 'prompt', 'messages' and "),
    ],
)
def test_prompts_that_are_none(tmp_path: Path, path: Path, name: str, content: bytes, words: str) -> None:
    file = tmp_path / name
    file.write_bytes(content)
    done = CliRunner().invoke(cli.app, ["generate", "--prompts", str(file), "--model", str(path)])
    assert (done.exit_code, done.stdout) == (1, "")
    assert isinstance(done.exception, ValueError)
    assert str(done.exception).startswith(str(tmp_path / words))


def test_ctrl_c_keeps_what_is_done(
    path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of several texts those that are, of one what there is."""
    lengths = [80, 3, 80]

    @contextlib.contextmanager
    def late_bar(*_: str, **_begun: int) -> Iterator[tuple[Callable[..., None], Callable[[], None]]]:
        def count(done: int, total: int, tokens: int) -> None:
            assert (total, tokens > 0) == (3, True)
            if done:
                raise KeyboardInterrupt

        yield count, lambda: None

    monkeypatch.setattr(texts, "late_bar", late_bar)
    with pystaged.load(path, draft=None, report=lambda _: None) as engine:
        expected = [engine.generate(PROMPT, max_tokens=length).text for length in lengths]
        sequences = [engine.start(PROMPT, GenerationConfig(max_tokens=length)) for length in lengths]
        with pytest.raises(KeyboardInterrupt):
            texts.write_in_order(sequences, 3, lambda number, result: f"{number} {result.text}")
        shown = capsys.readouterr()
        assert (shown.out, shown.err) == (f"1 {expected[1]}\n", "1 of 3 texts are done\n")

        def press(stream: Stream) -> None:
            next(stream)
            raise KeyboardInterrupt

        monkeypatch.setattr(Stream, "finish", press)
        monkeypatch.setattr(pystaged.decoding.scheduler, "MOST_UNREAD", 1)  # so that the text cannot end meanwhile
        stream = Stream(engine.start(PROMPT, GenerationConfig(max_tokens=80)))
        with pytest.raises(KeyboardInterrupt):
            texts._write_json(stream, Asked("", PROMPT), chat=True)
        found = json.loads(capsys.readouterr().out)
        assert (found["prompt"], found["finish_reason"]) == (PROMPT, "cancelled")
        assert found["message"] == {"role": "assistant", "content": found["text"], "tokens": found["tokens"]}
        assert expected[0].startswith(found["text"])


def test_stop_strings(path: Path, result: pystaged.GenerationResult) -> None:
    late, early = result.text[25:28], result.text[10:12]
    done = here("generate", PROMPT, "--model", path, *WARM, "--stop", late, "--stop", early)
    cut = min(result.text.index(late), result.text.index(early))
    assert (done.returncode, done.stdout.decode()) == (0, result.text[:cut] + "\n")


@pytest.mark.slow
def test_text_is_not_markup(path: Path, tmp_path: Path) -> None:
    """A model may write, or be called, what the console would take for colours or smileys."""
    model = tmp_path / "[bold]m[/red] :smile:.gguf"
    model.parent.mkdir()
    shutil.copy(path, model)
    shown = here("info", model)
    assert shown.returncode == 0
    assert str(model) in shown.stdout.decode()
    assert_refused(run("info", tmp_path / "[bold]none[/red] :smile:.gguf"), "[bold]none[/red] :smile:.gguf")


# ---- Failures ----


@pytest.mark.slow
def test_refusals(path: Path, tmp_path: Path) -> None:
    assert_refused(here("generate", "", "--model", path), "the prompt is empty")
    assert_refused(here("generate", "a", "--model", path, "--draft", "16"), "--draft names a model, not a number")
    assert_refused(run("generate", ".", "--model", tmp_path / "none.gguf"), "none.gguf", "no model file")
    assert_refused(here("generate", "-", "--model", path, stdin=b"a b " * 250_000), "tokens", "96")


@pytest.mark.slow
@pytest.mark.skipif(sys.platform == "win32", reason="arguments do not depend on a locale there")
def test_a_locale_without_utf8(path: Path) -> None:
    done = run("generate", "\u65e5".encode(), "--model", path, PYTHONUTF8="0", LC_ALL="C")
    if sys.platform != "darwin":  # whose arguments are UTF-8 always
        assert_refused(done, "the locale is the cause, LC_ALL=C.UTF-8 is one that helps")


@pytest.mark.slow
@pytest.mark.parametrize("changes", [{}, {"PYTHONUTF8": "0", "LC_ALL": "C.UTF-8"}], ids=["utf8 mode", "locale"])
@pytest.mark.parametrize("prompt", [b"-", b"def \xff"], ids=["stdin", "argument"])
def test_bytes_that_are_no_text(path: Path, prompt: bytes, changes: dict[str, str]) -> None:
    done = run("generate", prompt, "--model", path, stdin=b"def \xff", **changes)
    assert_refused(done, "standard input is not UTF-8" if prompt == b"-" else "the prompt is not valid Unicode text")


def test_output_is_utf8_whatever_its_encoding(path: Path) -> None:
    text = "\u65e5\u672c \u00e9"
    done = run("generate", "x", "--model", path, "--regex", text, PYTHONIOENCODING="cp1252")
    assert (done.returncode, done.stdout.decode()) == (0, f"{text}\n"), done.stderr
    done = run("generate", "-", "--json", "--model", path, "-n", "1", stdin=text.encode(), PYTHONIOENCODING="cp1252")
    assert json.loads(done.stdout)["prompt"] == text
    assert_refused(run("info", text, PYTHONIOENCODING="cp1252"), text)


@pytest.mark.parametrize("number", ["0", "-1"])
def test_no_limit_of_tokens(path: Path, number: str) -> None:
    done = here("generate", "e", "--model", path, "-n", number, "--ignore-eos", "--no-stop-loops", "--json")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["stats"]["prompt_tokens"] + len(found["tokens"]) == 97  # the last one is not read
    assert b"the context of 96 tokens is full" in done.stderr


@pytest.mark.parametrize("arguments", table("wrong_usage"), ids=str)
def test_wrong_usage(arguments: list[str]) -> None:
    done = CliRunner().invoke(cli.app, arguments)
    assert (done.exit_code, done.stdout) == (2, "")
    assert "Usage: " in done.stderr


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["x", "--prompts", "y"], "a prompt and --prompts cannot both be given"),
        (["x", "--seed", "-2"], f"Invalid value for '--seed': must be at least -1 and at most {2**64 - 1}"),
        (["x", "--seed", str(2**64)], f"Invalid value for '--seed': must be at least -1 and at most {2**64 - 1}"),
        (["--prompts", "y", "x", "--stop", "--help-all", "-n", "1"], "a prompt and --prompts cannot both be given"),
        (["--prompts", "y", "--", "--help-all"], "a prompt and --prompts cannot both be given"),
    ],
    ids=str,
)
def test_wrong_usage_in_words(arguments: list[str], words: str) -> None:
    done = CliRunner().invoke(cli.app, ["generate", *arguments], env={"COLUMNS": "200"})
    assert (done.exit_code, words in done.stderr) == (2, True), done.stderr


# ---- Standard streams ----


@pytest.mark.slow
@pytest.mark.parametrize(
    "arguments", [[], ["--json"], ["--show-tree"], ["--color", "stages"], ["--help"], ["info"]], ids=str
)
def test_nobody_reads(path: Path, arguments: list[str]) -> None:
    is_short = arguments in (["--help"], ["info"])
    command = arguments if is_short else ["generate", PROMPT, "--model", path, *WARM, *arguments]
    reading, writing = os.pipe()
    os.close(reading)
    done = subprocess.run(
        [*PROGRAM, *command], stdout=writing, stderr=subprocess.PIPE, check=False, env=environment(), timeout=600
    )
    os.close(writing)
    assert done.returncode == 141
    assert b"Traceback" not in done.stderr
    assert b"Exception" not in done.stderr
    if is_short or arguments != ["--show-tree"]:
        assert done.stderr == b""


@pytest.mark.slow
def test_the_reader_has_enough() -> None:
    command = [*PROGRAM, "generate", "def f(x):\n", "--max-tokens", "300"]
    reading, writing = os.pipe()
    if sys.platform == "linux":  # it holds one piece, so that no text ends before its reader goes
        import fcntl  # noqa: PLC0415

        fcntl.fcntl(writing, fcntl.F_SETFL, os.O_DIRECT)
        fcntl.fcntl(writing, fcntl.F_SETPIPE_SZ, 4096)
    with (
        os.fdopen(reading, "rb") as out,
        subprocess.Popen(command, stdout=writing, stderr=subprocess.PIPE, env=environment()) as child,
    ):
        os.close(writing)
        assert child.stderr is not None
        assert len(out.read(5)) == 5
        out.close()
        said = child.stderr.read()
    assert child.returncode == 141
    assert b"Traceback" not in said
    assert b"Exception" not in said


def shell(redirections: str, *arguments: str | Path) -> subprocess.CompletedProcess[bytes]:
    """Run the program as a shell does that was told these redirections."""
    command = ["sh", "-c", f'"$@" {redirections}', "sh", *PROGRAM, *arguments]
    return subprocess.run(command, input=b"", capture_output=True, check=False, env=environment(), timeout=600)


@pytest.mark.slow
@pytest.mark.parametrize("arguments", [["generate", PROMPT], ["generate", PROMPT, "--json"], ["--help"]], ids=str)
@pytest.mark.parametrize("redirection", [">&-", pytest.param("> /dev/full", marks=FULL)])
def test_output_that_cannot_be_written(path: Path, arguments: list[str], redirection: str) -> None:
    model = ["--model", path, *WARM] if arguments[0] == "generate" else []
    done = shell(redirection, *arguments, *model)
    *_, last = done.stderr.decode().splitlines()
    assert last.startswith("error: standard output cannot be written: ")
    assert done.returncode == 1
    assert b"Traceback" not in done.stderr
    assert b"Exception" not in done.stderr


@pytest.mark.parametrize("command", [["generate", "-", *WARM], ["chat"]], ids=str)
def test_closed_input(path: Path, command: list[str]) -> None:
    assert_refused(shell("<&-", *command, "--model", path), "standard input is closed")


def test_closed_input_that_nobody_reads(path: Path, result: pystaged.GenerationResult) -> None:
    done = shell("<&-", "generate", PROMPT, "--model", path, *WARM)
    assert (done.returncode, done.stdout.decode()) == (0, result.text + "\n")


@pytest.mark.slow
@pytest.mark.parametrize("redirection", ["2>&-", "2>&1 >/dev/null | head -c 0"], ids=["closed", "nobody reads"])
def test_messages_may_get_lost(tmp_path: Path, path: Path, result: pystaged.GenerationResult, redirection: str) -> None:
    out = tmp_path / "text"
    done = shell(redirection.replace("/dev/null", str(out)), "generate", PROMPT, "--model", path, *WARM)
    assert done.returncode == 0
    written = out.read_bytes() if out.exists() else done.stdout
    assert written.decode() == result.text + "\n"


# ---- Ctrl-C while the program starts ----

PRESS = """
import os, signal, sys

def press(event, arguments):
    if event == "import" and arguments[0] == os.environ["PRESS_AT"]:
        os.kill(os.getpid(), signal.SIGINT)

sys.addaudithook(press)
"""


def before(folder: Path) -> str:
    """A PYTHONPATH that begins with a folder."""
    return os.pathsep.join([str(folder), os.environ.get("PYTHONPATH", "")])


@pytest.mark.parametrize("module", ["typer", "pystaged.cli.console", "pystaged.decoding.readers"])
def test_ctrl_c_while_modules_are_imported(tmp_path: Path, module: str) -> None:
    (tmp_path / "sitecustomize.py").write_text(PRESS)
    done = run("generate", PROMPT, PYTHONPATH=before(tmp_path), PRESS_AT=module)
    assert (done.returncode, done.stdout, done.stderr) == (130, b"", b"interrupted\n")


def test_help_is_also_a_word() -> None:
    asked = here("--help")
    assert (asked.returncode, asked.stderr) == (0, b"")
    assert b"Usage" in asked.stdout
    assert here("help").stdout == here().stdout == asked.stdout
    assert here("ngram").stdout == here("ngram", "--help").stdout
    assert here("help", "pull").stdout == here("pull", "-h").stdout == here("pull", "--help").stdout


@pytest.mark.parametrize("command", [[], *([name] for name in cli._COMMANDS), ["models", "remove"]], ids=str)
def test_help_fits_on_a_page(command: list[str]) -> None:
    """Whatever the width of the terminal; and all options are in the longer one, by their sections."""
    short, whole = (CliRunner().invoke(cli.app, [*command, word]).stdout for word in ("--help", "--help-all"))
    lines = short.splitlines()
    words = [line for line in lines if not line.startswith("  pystaged ")]  # commands to copy stay whole
    assert (len(lines) <= 40, max(map(len, words)) <= 80) == (True, True), short
    assert lines[0].partition("[OPTIONS]")[2].isupper() or lines[0].endswith("[OPTIONS]")
    if command == ["generate"]:
        assert CliRunner().invoke(cli.app, ["generate", "--help-all", "--stop", "x"]).stdout == whole
        assert str(2**64 - 1) not in whole
        assert "--help-all" in lines[-1]
        assert [word in whole for word in ("Model and drafts:\n", "--typical-p X ", "[default: 64")] == [True] * 3
        assert not any(word in short for word in ("Model and drafts:\n", "--typical-p", "default:"))


def completed(words: str) -> list[str]:
    """What a shell may write in place of the last word."""
    asked = {"COMP_WORDS": f"pystaged {words}", "COMP_CWORD": str(len(words.split()))}
    return run(_PYSTAGED_COMPLETE="complete_bash", **asked).stdout.decode().split()


@pytest.mark.slow
def test_completion_knows_choices() -> None:
    asked = ("generate --color st", "chat --context-overflow d", "diff a b --kv-b q", "serve --kv f")
    assert [completed(words) for words in asked] == [["stages"], ["drop"], ["q8_0"], ["f16"]]


@pytest.mark.slow
def test_completion_knows_commands_and_options() -> None:
    asked = ("gen", "generate --col", "models r")
    assert [completed(words) for words in asked] == [["generate"], ["--color"], ["remove"]]
    shown = run("--show-completion", "bash", _TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION="1").stdout
    assert b"_PYSTAGED_COMPLETE=complete_bash" in shown


@pytest.mark.slow
@pytest.mark.parametrize("typed", ["run sm", "chat x --draft sm", "models remove sm"])
def test_completion_knows_models_and_paths(tmp_path: Path, typed: str) -> None:
    assert completed(typed) == ["smollm2", "smollm3"]
    for name in ("model.gguf", "more/x.gguf", "model.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    assert sorted(completed(f"{typed[:-2]}{tmp_path}/mo")) == [f"{tmp_path}/model.gguf", f"{tmp_path}/more/"]


@pytest.mark.parametrize("arguments", [["--help"], ["--version"], []], ids=str)
def test_help_imports_little(tmp_path: Path, arguments: list[str]) -> None:
    (tmp_path / "sitecustomize.py").write_text(
        "import atexit, sys; atexit.register(lambda: print(*sys.modules, file=sys.stderr))"
    )
    done = run(*arguments, PYTHONPATH=before(tmp_path))
    modules = set(done.stderr.decode().split())
    assert "pystaged.cli" in modules
    heavy = {"gguf", "huggingface_hub", "llama_cpp", "multiprocessing", "numpy", "platformdirs", "safetensors", "tqdm"}
    assert not modules & heavy
    ours = ("options", "options.aliases", "platform", "platform.ctrl_c", "_program", "cli", "cli.command", "cli.help")
    found = {name for name in modules if name.startswith("pystaged")}
    assert found == {"pystaged", *(f"pystaged.{name}" for name in ours)}


def test_each_command_is_listed_and_there() -> None:
    listed = " ".join(run("--help").stdout.decode().split())
    for name, line in cli._COMMANDS.items():
        assert f"{name} " in listed
        assert line in listed
        command = cli._command(name)
        assert command.name == name
        assert command.help
    assert cli._command("ngram").commands.keys() == {"build"}
    assert "remove" in cli._command("models").commands


# ---- info, version, help ----


@pytest.mark.slow
def test_info(path: Path) -> None:
    done = here("info", path)
    shown = done.stdout.decode()
    assert (done.returncode, done.stderr) == (0, b"")
    words = [pystaged.__version__, _core.kernels()[0], "2 layers, 64 wide, 2 heads", "96 tokens", "300 tokens", "f32"]
    assert [each for each in words if each not in shown] == []
    assert any(line.split() == ["model", str(path)] for line in shown.splitlines())
    assert "none of its own: n-grams draft" in shown
    bundled = here("info", "bundled").stdout.decode()
    assert "house target" in bundled
    assert any(line.startswith("draft ") and line.endswith(".gguf") for line in bundled.splitlines())


@pytest.mark.slow
def test_info_of_experts(tmp_path: Path) -> None:
    model = write(tmp_path / "model.gguf", RandomModel("qwen3moe", experts=(8, 2, 32, 0)))
    assert b"4 heads (2 of keys) of 16, 2 of 8 experts\n" in here("info", model).stdout


@pytest.mark.slow
def test_info_of_a_context(path: Path) -> None:
    assert b"0.5 MB per 1,000 tokens" in here("info", path).stdout
    assert b"0.3 MB per 1,000 tokens" in here("info", path, "--kv", "q8_0").stdout


def test_info_of_a_model_with_windows(tmp_path: Path) -> None:
    path = write(tmp_path / "m.gguf", RandomModel("gemma3", layers=6, metadata={"attention.sliding_window": 16}))
    assert b"0.8 MB per 1,000 tokens, 0.1 MB outside attention windows; " in here("info", path).stdout


@pytest.mark.slow
def test_info_of_what_fits(path: Path) -> None:
    full = (96 + 64) * 512  # bytes of a context

    def said(size: str) -> str:
        shown = here("info", path, "--kv-memory", size).stdout.decode()
        (line,) = [line for line in shown.splitlines() if "MB per" in line]
        return line.partition("enough for ")[2]

    assert said(str(full)) == "1 text of 96 tokens"
    assert said("1 MiB") == said("1mb") == said(" 1m ") == f"{2**20 // full} texts of 96 tokens"
    assert said("1.5G") == f"{3 * 2**29 // full:,} texts of 96 tokens"
    assert said(str(full - 1)) == "less than 96 tokens"


@pytest.mark.parametrize("size", ["0", "-1G", "G", "2XB", "nan", "inf", "", "0.5", "9999999T"])
def test_sizes_that_are_none(path: Path, size: str) -> None:
    words = "too small; leave it out, or" if size.startswith("0") else "not a size;"
    done = CliRunner().invoke(cli.app, ["generate", PROMPT, "--model", str(path), f"--kv-memory={size}"])
    assert (done.exit_code, done.stdout) == (2, "")
    assert f"{size!r} is {words} write 512M or 2.5G." in " ".join(done.stderr.replace("│", " ").split())


def test_a_bound_of_memory_changes_nothing(path: Path, result: pystaged.GenerationResult) -> None:
    done = here("generate", PROMPT, "--model", path, *WARM, "--kv-memory", "1K")
    assert (done.returncode, done.stdout.decode()) == (0, result.text + "\n")


def test_info_of_mixed_types(tmp_path: Path) -> None:
    model = RandomModel("llama", quantization="Q8_0", types={"ffn_up": "Q4_0", "attn_v": "F16"}, layers=1)
    shown = here("info", write(tmp_path / "mixed.gguf", model)).stdout.decode()
    q8_0, q4_0, f16 = (300 * 64 + 2 * 64 * 64 + 32 * 64 + 2 * 96 * 64) * 34, 96 * 64 * 18, 32 * 64 * 2 * 32
    total = q8_0 + q4_0 + f16
    assert f"q8_0 {q8_0 / total:.1%} f16 {f16 / total:.1%} q4_0 {q4_0 / total:.1%}, " in shown


@pytest.mark.parametrize("command", [["info"], ["generate", PROMPT, "--model"]], ids=["info", "generate"])
def test_unknown_kernel(path: Path, command: list[str]) -> None:
    done = run(*command, path, PYSTAGED_KERNEL="abacus")
    assert_refused(done, "no kernel 'abacus' for this CPU in this build", *_core.kernels())


def test_version() -> None:
    done = run("--version")
    assert run("version").stdout == run("-v").stdout == done.stdout
    assert (done.returncode, done.stdout.decode()) == (0, f"pystaged {pystaged.__version__}\n")


def test_a_file_that_is_not_there_is_named_plainly(path: Path, tmp_path: Path) -> None:
    table = tmp_path / "none.npz"
    done = run("generate", PROMPT, "--model", path, "--ngrams", table)
    assert_refused(done, f"error: {table}: No such file or directory\n")


# ---- Forms ----


@pytest.mark.slow
def test_a_text_of_a_form(tmp_path: Path) -> None:
    schema, grammar, latin = tmp_path / "schema.json", tmp_path / "grammar.lark", tmp_path / "latin.lark"
    latin.write_bytes(b'start: "\xe4"')
    schema.write_text('{"enum": ["alpha", "beta"]}')
    grammar.write_text('start: "yes" | "no"')
    for options, expected in (
        (["--json-schema", schema], ('"alpha"\n', '"beta"\n')),
        (["--json-schema", schema.read_text()], ('"alpha"\n', '"beta"\n')),
        (["--regex", "cat|dog"], ("cat\n", "dog\n")),
        (["--grammar", grammar], ("yes\n", "no\n")),
        (["--grammar", 'root ::= "yes" | "no"'], ("yes\n", "no\n")),
    ):
        done = here("generate", "The answer is ", *options)
        assert done.returncode == 0, done.stderr
        assert done.stdout.decode() in expected
    for arguments, words in (
        (["--regex", "("], "regex cannot be used"),
        (["--json-schema", tmp_path / "none"], "No such file"),
        (["--grammar", tmp_path], "Is a directory"),
        (["--grammar", latin], "latin.lark is not UTF-8"),
        (["--grammar", "/dev/zero"], "/dev/zero is larger than 17 MB"),
    ):
        assert_refused(here("generate", "The answer is ", *arguments), words)
    for arguments, words in (
        (["--regex", "a", "--grammar", grammar], b"give one of"),
        (["--json-schema", ""], b"is empty"),
    ):
        done = here("generate", "The answer is ", *arguments)
        assert done.returncode == 2
        assert words in done.stderr


@pytest.mark.slow
def test_a_form_from_a_pipe() -> None:
    """As shells make one of <(...)."""
    done = run("generate", "The answer is ", "--grammar", "/dev/stdin", stdin=b'start: "yes"')
    assert (done.returncode, done.stdout) == (0, b"yes\n"), done.stderr
    reading, writing = os.pipe()
    os.write(writing, b'{"const": 7}')
    os.close(writing)
    command = [*PROGRAM, "generate", "The answer is ", "--json-schema", f"/dev/fd/{reading}"]
    done = subprocess.run(command, pass_fds=[reading], capture_output=True, check=False, env=environment(), timeout=600)
    os.close(reading)
    assert (done.returncode, done.stdout) == (0, b"7\n"), done.stderr


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (ImportError("LLAMA_CPP_LIB_PATH is set"), "LLAMA_CPP_LIB_PATH is set"),
        (MemoryError("std::bad_alloc"), "not enough memory; a smaller model or a smaller --n-ctx needs less"),
        (RuntimeError("can't start new thread"), "not enough memory; a smaller model or a smaller --n-ctx needs less"),
    ],
    ids=repr,
)
def test_what_a_user_can_mend_is_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], error: Exception, words: str
) -> None:
    def fail() -> None:
        raise error

    monkeypatch.setattr(cli, "_run", fail)
    monkeypatch.setattr(os, "dup2", lambda *_: None)
    with pytest.raises(SystemExit) as end:
        cli.main()
    assert end.value.code == 1
    assert capsys.readouterr().err == f"error: {words}\n"
