"""The conversation of the command line."""

from __future__ import annotations

import io
import json
import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from support.commands import assert_refused, here, run
from support.paths import table

import pystaged
from pystaged import Engine
from pystaged.chat.messages import Message
from pystaged.chat.saved import read_conversation
from pystaged.cli import lines, turns
from pystaged.cli.lines import Lines
from pystaged.cli.options import Given
from pystaged.cli.turns import Chat
from pystaged.platform.ctrl_c import Interrupts

Capture = pytest.CaptureFixture[str]
Session = Callable[..., Chat]
QUESTION = "def fibonacci(n):"
PLAIN: dict[str, Any] = {"temperature": 0.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "seed": 0}
UNFILTERED = ("--top-k", "0", "--top-p", "1", "--min-p", "0")


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    with pystaged.load("bundled", report=lambda _: None) as opened:
        yield opened


@pytest.fixture
def session(engine: Engine) -> Iterator[Session]:
    with Interrupts() as interrupts:
        yield lambda max_tokens=6, **options: Chat(
            engine, Given(PLAIN | {"max_tokens": max_tokens, "stop_loops": False} | options), interrupts
        )


def asks(content: str) -> dict[str, Any]:
    return {"role": "user", "content": content}


# ---- Turns ----


def test_each_turn_goes_on(engine: Engine, session: Session, capsys: Capture) -> None:
    made = session(temperature=1.0, seed=3)
    messages: list[dict[str, Any]] = []
    for question in ("one", "two\nlines", "three"):
        assert made.take(question)
        messages.append(asks(question))
        result = engine.chat(messages, max_tokens=6, temperature=1.0, seed=3)
        messages.append(result.message)
        assert capsys.readouterr().out == result.text + "\n"
    assert made.messages == messages
    assert made._last
    assert made._last.stats.reused_tokens > 0
    assert made._last.stats.prompt_tokens == result.stats.prompt_tokens


def test_system_clear_and_seed(engine: Engine, session: Session, capsys: Capture) -> None:
    made = session(temperature=1.0)
    made.take("/system Be brief. ")
    made.take("/system")
    made.take("forgotten")
    made.take("/clear")
    made.take("/seed 7")
    made.take("/set max_tokens 4")
    capsys.readouterr()
    made.take(QUESTION)
    messages = [{"role": "system", "content": "Be brief."}, asks(QUESTION)]
    result = engine.chat(messages, max_tokens=4, temperature=1.0, seed=7)
    assert capsys.readouterr().out == result.text + "\n"


def test_retry_takes_the_next_seed(engine: Engine, session: Session, capsys: Capture) -> None:
    made = session(temperature=1.0, seed=5)
    with pytest.raises(ValueError, match="no turn to take again"):
        made.take("/retry")
    made.take(QUESTION)
    capsys.readouterr()
    made.take("/retry")
    result = engine.chat([asks(QUESTION)], max_tokens=6, temperature=1.0, seed=6)
    assert capsys.readouterr().out == result.text + "\n"
    assert made.messages == [asks(QUESTION), result.message]
    made.take("/seed 18446744073709551615")
    made.take("/retry")
    made.take("/retry")
    assert made.given["seed"] == 1
    with pytest.raises(ValueError, match="seed must be between"):
        made.take("/seed 18446744073709551616")


def test_retry_after_undo(session: Session, tmp_path: Path) -> None:
    """Takes the turn again that is the last one now, also in a conversation that was loaded or cleared."""
    made = session(max_tokens=8, temperature=1.0)
    for said in ("a", "b", "c"):
        made.take(said)
    made.take(f"/save {tmp_path / 'kept'}")

    def asked() -> list[str]:
        return [message["content"] for message in made.messages[::2]]

    made.take("/undo")
    made.take("/retry")
    assert asked() == ["a", "b"]
    made.take("/undo")
    made.take("/retry")
    assert asked() == ["a"]
    made.take("/clear")
    made.take("/undo")
    made.take("/retry")
    assert asked() == ["a"]
    made.take(f"/load {tmp_path / 'kept'}")
    made.take("/undo")
    made.take("/retry")
    assert asked() == ["a", "b"]
    for _ in range(2):
        made.take("/undo")
    with pytest.raises(ValueError, match="no turn to take again"):
        made.take("/retry")


def test_retry_without_chance(session: Session, monkeypatch: pytest.MonkeyPatch) -> None:
    """Is refused only where the answer is whole and nothing has changed."""
    made = session(max_tokens=8, temperature=1.0)
    made.take(QUESTION)
    answer = made.messages[1]["content"]
    made.take("/set temperature 0")
    for line in (None, "/system Be brief.", "/set max_tokens 7", "/set stop_loops on"):
        if line:
            made.take(line)
        made.take("/retry")
    assert made.messages[1]["content"] != answer
    assert made._last
    monkeypatch.setattr(made, "_last", replace(made._last, finish_reason="length"))
    made.take("/retry")
    monkeypatch.setattr(made, "_last", replace(made._last, finish_reason="stop"))
    with pytest.raises(ValueError, match="at temperature 0 the answer would be the same"):
        made.take("/retry")
    made.take("/set max_tokens 1")
    made.take("/retry")
    assert len(made.messages[1]["tokens"]) <= 1


def test_retry_of_a_question_that_did_not_fit(session: Session, engine: Engine) -> None:
    made = session()
    made.take(QUESTION)
    kept = made.messages
    for line in ("x " * engine.n_ctx, "/retry"):
        with pytest.raises(ValueError, match=r"too small for what is asked: shorten the question, or write /clear"):
            made.take(line)
        assert made.messages == kept
    made.take("/clear")
    with pytest.raises(ValueError, match="no turn to take again"):
        made.take("/retry")


def test_stats_and_color(session: Session, capsys: Capture) -> None:
    made = session()
    with pytest.raises(ValueError, match="there is no answer yet"):
        made.take("/stats")
    made.take(QUESTION)
    assert "per second" not in capsys.readouterr().err
    made.take("/stats")
    shown = capsys.readouterr().err
    assert "per second" in shown
    assert "emitted" in shown
    made.take("/stats on")
    made.take("/color on")
    made.take("again")
    assert "n-gram" in capsys.readouterr().err
    made.take("/clear")
    with pytest.raises(ValueError, match="there is no answer yet"):
        made.take("/stats")
    for line in ("/stats maybe", "/color maybe"):
        with pytest.raises(ValueError, match="must be on or off, not maybe"):
            made.take(line)


@pytest.mark.slow
@pytest.mark.parametrize("limit", [[], ["-n", "-1"]], ids=str)
def test_a_full_context_is_said(random_gguf: Callable[..., Path], limit: list[str]) -> None:
    model = random_gguf(context=96)
    done = here("chat", model, "--draft", "none", *limit, stdin=b"x")
    assert done.returncode == 0, done.stderr
    assert "the context of 96 tokens is full\n" in done.stderr.decode()


@pytest.mark.parametrize("drops", [True, False])
def test_a_full_context_loses_the_oldest_turns(capsys: Capture, drops: bool) -> None:
    given: list[list[Any]] = []
    with pystaged.load("bundled", n_ctx=96, report=lambda _: None) as engine, Interrupts() as interrupts:
        answer = engine.stream_chat
        engine.stream_chat = lambda messages, **options: given.append(messages) or answer(messages, **options)
        overflow = "drop" if drops else "stop"
        options = {"max_tokens": 6, "stop_loops": False, "context_overflow": overflow, "system": "Go on."}
        made = Chat(engine, Given(PLAIN | options), interrupts)
        questions = [f"{number}: {'x ' * 12}" for number in range(4)]
        if not drops:
            made.take(questions[0])
            with pytest.raises(ValueError, match="the context of 96 tokens is too small for what is asked"):
                made.take("x " * 40)
            return
        for question in questions:
            made.take(question)
        for begun, messages in enumerate(given):
            # The system message and the last question stay, and what is read are whole turns.
            assert messages[0] == {"role": "system", "content": "Go on."}
            assert messages[-1] == asks(questions[begun])
            assert messages[1:] == made.messages[2 * begun + 2 - len(messages) : 2 * begun + 1]
            assert len(engine.chat_format.encode(messages)) <= 90
        assert len(given[-1]) < 8
        dropped, shown = made._num_dropped, capsys.readouterr().err
        assert f"the context of 96 tokens is full: the oldest {dropped} messages are no longer read" in shown
        assert len(made.messages) == 8
        with pytest.raises(ValueError, match="too small"):
            made.take("x " * 96)
        assert made._num_dropped == dropped
        made.take("/clear")
        assert not made._num_dropped


def test_what_it_is_told(session: Session, capsys: Capture) -> None:
    made = session()
    assert made.take("")
    assert made.take("/help")
    shown = capsys.readouterr().err
    assert "/retry" in shown
    assert max(map(len, shown.splitlines())) <= 80
    assert made.take("/HELP")
    assert capsys.readouterr().err == shown
    assert not any(made.take(line) for line in ("/bye", "/exit", "/quit"))
    assert "; 6 tokens at most; " in made.greeting("x")
    n_ctx = made.engine.n_ctx
    assert f"; context of {n_ctx} tokens; " in session(max_tokens=2 * n_ctx).greeting("x")
    with pytest.raises(ValueError, match="there is no command /nonsense; /help shows"):
        made.take("/nonsense")


@pytest.mark.parametrize(("line", "words"), table("settings_refused"))
def test_what_cannot_be_set(session: Session, line: str, words: str) -> None:
    made = session()
    before = dict(made.given)
    with pytest.raises(ValueError, match=words):
        made.take(line)
    assert made.given == before


@pytest.mark.parametrize("between", [" ", "\t", "  ", "\n"])
def test_settings_may_be_written_with_any_space(session: Session, capsys: Capture, between: str) -> None:
    made = session()
    for line in ("temperature{}0.5", "parameter top_k{}7", "system{}Be brief."):
        made.take(f"/set {line.format(between)}")
    assert (made.given["temperature"], made.given["top_k"], made.given["system"]) == (0.5, 7, "Be brief.")
    capsys.readouterr()
    made.take("/set system")
    assert capsys.readouterr().out == "Be brief.\n"


def test_a_system_message_can_be_taken_back(session: Session, capsys: Capture) -> None:
    made = session()
    made.take("/system Be brief.")
    assert capsys.readouterr().err == "the system message is set\n"
    made.take('/system ""')
    assert made.given["system"] == ""
    assert capsys.readouterr().err == "there is no system message any more\n"
    made.take("/system")
    assert capsys.readouterr().err == "there is no system message\n"


def test_what_is_set_is_shown(session: Session, capsys: Capture) -> None:
    made = session()
    numbers = ("temp 1", "parameter top_k 7", "num_predict 31")
    for line in (*numbers, "stop_loops on", "ignore_eos on", "system Hi,\n  you."):
        made.take(f"/set {line}")
    capsys.readouterr()
    made.take("/show")
    made.take("/system")
    shown = capsys.readouterr()
    made.take("/set max_tokens -1")  # no limit
    made.take("/show")
    assert "max_tokens 0\n" in capsys.readouterr().err
    assert "top-k 7" in shown.err
    assert "max_tokens 31\nstop_loops on\n" in shown.err
    assert "system Hi,\n  you.\n" in shown.err
    assert shown.out == "Hi,\n  you.\n"
    made.take("/show system")
    shown = capsys.readouterr()
    assert (shown.out, shown.err) == ("Hi,\n  you.\n", "")


def test_thinking_is_switched(
    engine: Engine, session: Session, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: list[Any] = []
    answer = engine.stream_chat

    def stream_chat(messages: list[Message], **options: Any) -> pystaged.Stream:
        given.append(options.pop("template_options"))
        return answer(messages, **options)

    monkeypatch.setattr(engine, "stream_chat", stream_chat)
    made = session()
    with pytest.raises(ValueError, match="cannot switch thinking"):
        made.take("/think on")
    monkeypatch.setattr(engine.chat_format, "variables", lambda: {"enable_thinking"})
    made.take(QUESTION)
    for line in ("/think off", "/set think", "/set nothink"):  # of Ollama
        made.take(line)
        made.take("/retry")  # greedy, and another turn
    assert given == [{}, *({"enable_thinking": each} for each in (False, True, False))]
    capsys.readouterr()
    made.take("/show")
    assert "think off" in capsys.readouterr().err


@pytest.mark.parametrize("end", ["/bye", "exit", "quit", "bye "])
def test_nothing_in_quotes_is_a_command(session: Session, monkeypatch: pytest.MonkeyPatch, end: str) -> None:
    made = session(max_tokens=2)
    lines = ['"""/bye', 'x"""', '"""/etc/hosts"""', '"""', '"""', '"""exit"""', "exit how?", end, "never"]
    monkeypatch.setattr("sys.stdin", io.StringIO("\n".join(lines)))
    turns.take_lines(made, made.interrupts)
    assert [message["content"] for message in made.messages[::2]] == ["/bye\nx", "/etc/hosts", "exit", "exit how?"]


@pytest.mark.parametrize("begin", ["/bye", "/quit", "/exit"])
def test_a_message_of_several_lines_is_asked_however_it_begins(session: Session, begin: str) -> None:
    made, message = session(max_tokens=2), f"{begin} was what he typed,\nand the chat ended."
    assert made.take(message)
    assert made.messages[0] == asks(message)


def test_a_cut_answer_says_so(session: Session, capsys: Capture) -> None:
    made = session(max_tokens=2)
    made.take(QUESTION)
    assert capsys.readouterr().err == "cut at 2 tokens; /set max_tokens allows more\n"


def test_a_seed_that_was_drawn_is_told(session: Session, capsys: Capture) -> None:
    made = session(temperature=1.0, seed=None)
    made.take(QUESTION)
    made.take("/stats")
    assert made._last
    assert f"; seed {made._last.seed}\n" in capsys.readouterr().err


# ---- Saved conversations ----


def test_a_saved_conversation_is_resumed(engine: Engine, tmp_path: Path) -> None:
    file = tmp_path / " talk.json "
    messages: list[Message] = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Yes?"}]
    file.write_text(json.dumps({"system": "", "messages": messages}))
    done = here("chat", "bundled", "--resume", file, "--temperature", "0", "-n", "6", stdin=b"Go on")
    expected = engine.chat([*messages, {"role": "user", "content": "Go on"}], max_tokens=6).text
    assert done.stdout.decode() == expected + "\n"
    assert b"loaded" in done.stderr
    for given in ((b"x", "bundled"), (b"", "no_such_model.gguf")):  # before the model is loaded
        done = here("chat", given[1], "--resume", tmp_path / "none.json", stdin=given[0])
        assert_refused(done, "none.json: no such saved conversation")


def test_save_and_load(engine: Engine, session: Session, tmp_path: Path, capsys: Capture) -> None:
    made, file = session(temperature=1.0), tmp_path / "talk.json"
    made.take("/system Say \u00e9.")
    made.take(QUESTION)
    made.take(f"/save {file}")
    made.take("next")
    expected, content = made.messages, file.read_text("utf-8")
    other = session(temperature=1.0)
    other.take(f"/load {file}")
    assert "2 messages" in capsys.readouterr().err
    other.take("next")
    assert other.messages == expected
    third = session()
    with pytest.raises(ValueError, match=r"talk\.json is there already; the same command again replaces it"):
        third.take(f"/save {file}")
    assert file.read_text("utf-8") == content
    third.take(f"/save {file}")
    assert json.loads(file.read_text("utf-8"))["messages"] == []
    other.take(f"/save {file}")  # which it has read
    made.take("/undo")
    made.take(f"/save {file}")  # which it has written
    assert json.loads(file.read_text("utf-8")) == json.loads(content)
    made._states[-1] = expected
    assert [each.name for each in tmp_path.iterdir()] == [file.name]
    outside = ([10**6], "token 1000000 is outside")
    for tokens, error in (("x", "not a list of integers"), ([1.0], "not a list of integers"), outside):
        kept = json.loads(file.read_text("utf-8"))
        kept["messages"][1]["tokens"] = tokens
        file.write_text(json.dumps(kept))
        with pytest.raises(ValueError, match=f"is not a conversation saved with /save: .*{error}"):
            made.take(f"/load {file}")
        assert made.messages == expected
    file.write_text(json.dumps(kept | {"vocabulary": "another"}))
    _, messages = read_conversation(file, engine.tokenizer)
    assert [sorted(message) for message in messages] == [["content", "role"]] * 2
    with pytest.raises(OSError, match="there is no folder"):
        made.take(f"/save {tmp_path / 'nowhere' / 'talk.json'}")
    for line in ("/save ~nobody-at-all/talk.json", "/load ~nobody-at-all/talk.json"):
        with pytest.raises(FileNotFoundError, match="no home folder"):
            made.take(line)
    for line in ("/save", "/load"):
        with pytest.raises(ValueError, match=f"write {line} FILE"):
            made.take(line)
    assert engine.tokenizer.fingerprint == kept["vocabulary"]


@pytest.mark.parametrize("text", [*table("no_conversations"), "[" * 100_000])
def test_files_that_hold_none(tmp_path: Path, text: str, session: Session) -> None:
    file = tmp_path / "talk.json"
    file.write_text(text, "utf-8")
    made = session()
    with pytest.raises(ValueError, match=r"talk\.json is not a conversation saved with /save: ") as caught:
        made.take(f"/load {file}")
    assert text not in ("", "{") or str(caught.value).endswith(": it is no JSON")
    assert made.messages == []
    with pytest.raises(FileNotFoundError, match=r"nothing\.json: no such saved conversation; to change the"):
        made.take(f"/load {tmp_path / 'nothing.json'}")


# ---- The command ----


@pytest.mark.slow
def test_answers_of_a_form() -> None:
    done = here("chat", "bundled", "--regex", "7{3}", stdin=b"Which?")
    assert (done.returncode, done.stdout) == (0, b"777\n"), done.stderr
    assert_refused(here("chat", "bundled", "--regex", "(", stdin=b"Which?"), "regex cannot be used")
    schema = ("--json-schema", '{"type": "string", "minLength": 9}', "--max-tokens", "3", "--temperature", "0")
    for given in (["chat", "bundled"], ["generate", "-"], ["generate", "-", "--n", "2", "--json"]):
        done = here(*given, *schema, stdin=b"Which?")
        assert done.returncode == 1
        assert done.stdout
        assert "error: the text of 3 tokens is no whole JSON: it was cut at max_tokens" in done.stderr.decode()


@pytest.mark.slow
def test_a_sampling_that_no_answer_can_have_is_refused_at_the_start() -> None:
    assert_refused(here("chat", "bundled", "--logit-bias", "no such token=1", stdin=b"Which?"), "tokens")
    answer = ("generate", "--chat", "Which?")
    for given in (("chat", "bundled", "Which?"), (*answer, "--max-tokens", "300"), answer):
        done = here(*given, "--min-tokens", "200", "--regex", "7{3}")
        assert (done.returncode, done.stdout) == (0, b"777\n"), done.stderr


@pytest.mark.slow
def test_piped_input_is_one_question(engine: Engine) -> None:
    question = "a = 1\nb ="
    expected = engine.chat([asks(question)], max_tokens=8).text
    done = run("chat", "bundled", "--temperature", "0", "--max-tokens", "8", "--stats", stdin=f"{question}\n".encode())
    assert (done.returncode, done.stdout.decode()) == (0, expected + "\n")
    assert "no chat template; conversations are written as ChatML" in done.stderr.decode()
    assert "per second" in done.stderr.decode()
    done = here("chat", "--max-tokens", "2", "--model", "bundled", "--temperature", "0", stdin=question.encode())
    assert "cut at 2 tokens; --max-tokens allows more" in done.stderr.decode()
    assert done.stdout == b"<|\n"  # the beginning of a stop string that is not whole
    done = here("chat", "bundled", "--temperature", "0", "--max-tokens", "2", "--stop", "|", stdin=question.encode())
    assert (done.returncode, done.stdout) == (0, b"<\n")
    for given in (["generate", "--chat", "--model", "bundled", question], ["chat", "bundled", question]):
        done = here(*given, "--temperature", "0", "--max-tokens", "8")
        assert (done.returncode, done.stdout.decode()) == (0, expected + "\n")


@pytest.mark.slow
def test_piped_input_stands_before_a_question() -> None:
    told, question = "The secret word is BANANA.", "What is the secret word?"
    with pystaged.load("smollm2") as model:
        expected = model.chat([asks(f"{told}\n\n{question}")], max_tokens=8).text
    assert "BANANA" in expected
    for given in (["generate", "--chat", "--model", "smollm2"], ["chat", "smollm2"], ["run", "smollm2"]):
        done = here(*given, question, "--temperature", "0", "--max-tokens", "8", stdin=f"{told}\n".encode())
        assert (done.returncode, done.stdout.decode()) == (0, expected + "\n")


@pytest.mark.slow
def test_several_questions(engine: Engine, tmp_path: Path) -> None:
    questions = ["a = 1", "def f(x):"]
    file = tmp_path / "questions.txt"
    file.write_text("\n".join(questions))
    system = {"role": "system", "content": "Go on."}
    options: dict[str, Any] = {"max_tokens": 8, "temperature": 1.0, "stop": "z"}
    each = product(questions, (3, 4))
    expected = [engine.chat([system, asks(question)], seed=seed, **options).tokens for question, seed in each]
    given = ("--system", "Go on.", "--max-tokens", "8", "--temperature", "1", "--seed", "3", "--stop", "z", "--json")
    given += ("--model", "bundled", *UNFILTERED)
    done = here("generate", "--chat", "--prompts", file, "--n", "2", *given)
    assert done.returncode == 0, done.stderr
    found = [json.loads(line) for line in done.stdout.splitlines()]
    assert [each["prompt"] for each in found] == [question for question in questions for _ in range(2)]
    assert [each["tokens"] for each in found] == expected
    conversations = tmp_path / "questions.jsonl"
    messages = [asks("a = 1"), {"role": "assistant", "content": "b"}, asks("c"), {"role": "assistant", "content": "d "}]
    conversations.write_text(json.dumps({"messages": messages}) + '\n{"prompt": "def f(x):"}\n')
    done = here("generate", "--chat", "--prompts", conversations, *given)
    first, second = (json.loads(line) for line in done.stdout.splitlines())
    answer = engine.chat([system, *messages], seed=3, **options)
    assert (first["messages"], first["message"]) == (messages, answer.message)
    assert second["tokens"] == expected[2]
    conversations.write_text(json.dumps({"messages": [system, *messages]}))
    done = here("generate", "--chat", "--prompts", conversations, *given)
    assert (done.returncode, done.stdout) == (1, b"")
    assert "line 1: the messages have a system message, too; leave --system out" in done.stderr.decode()
    # As many tokens as there is room for, and the stop string of models without a template.
    done = here("generate", "--chat", "a = 1", "--model", "bundled", "--n-ctx", "192", "--temperature", "0", "--json")
    whole = json.loads(done.stdout)
    with pystaged.load("bundled", n_ctx=192, report=lambda _: None) as short:
        assert whole["tokens"] == short.chat([asks("a = 1")]).tokens


@pytest.mark.slow
@pytest.mark.parametrize("options", [["--system", "y"], ["--think"], ["--no-think"], ["--n", "2", "--system", "y"]])
def test_options_of_a_chat_without_one(options: list[str]) -> None:
    done = here("generate", "x", *options)
    assert (done.returncode, done.stdout) == (2, b"")
    assert "for --chat" in done.stderr.decode()


@pytest.mark.slow
def test_wrong_usage() -> None:
    assert_refused(here("chat", "nothing.gguf", stdin=b"x"), "there is no model file nothing.gguf")
    assert_refused(here("chat", "--model", "", stdin=b"x"), "the name of the model is empty; give the path")
    assert_refused(here("chat", "bundled", stdin=b" \n\n"), "nothing is asked: the question is empty")
    assert_refused(run("chat", "bundled", stdin=b"\xff"), "standard input is not UTF-8")


@pytest.mark.slow
@pytest.mark.skipif(sys.platform == "win32", reason="there are no pseudo-terminals")
def test_pasted_lines_are_one_message(tmp_path: Path) -> None:
    from cli.test_terminal import terminal  # noqa: PLC0415

    file = tmp_path / "talk.json"
    window = terminal("chat", "bundled", "--max-tokens", "2", "--stats", columns=200, lines=60)
    start = 0
    for text in ("Fix:\n    return x\n\nf(2)", '"""a\nb', "/etc/a\n/etc/b"):
        window.wait_for(b"\x1b[?2004h", start=start)
        start = len(window.output)
        window.type(f"\x1b[200~{text}\x1b[201~\n".encode())
        window.wait_for(b"per step", start=start)
        start = window.output.index(b"per step", start)
    window.wait_for(b"\x1b[?2004h", start=start)
    window.type(f"/save {file}\n/bye\n".encode())
    assert window.finish() == 0
    asked = [message["content"] for message in json.loads(file.read_text("utf-8"))["messages"][::2]]
    assert asked == ["Fix:\n    return x\n\nf(2)", '"""a\nb', "/etc/a\n/etc/b"]


def test_pastes_that_libedit_marks(monkeypatch: pytest.MonkeyPatch) -> None:
    history = ["before"]
    lines = iter(["Fix \x01a", "", "b\x02!", "next"])

    def read(prompt: str = "") -> str:
        del prompt
        history.append(line := next(lines))
        return line

    monkeypatch.setattr("builtins.input", read)
    with Interrupts() as interrupts:
        reader = Lines(interrupts)
        reader._marked = SimpleNamespace(
            get_current_history_length=lambda: len(history), remove_history_item=history.pop, add_history=history.append
        )
        assert [reader.read(), reader.read()] == [("Fix a\n\nb!", False), ("next", False)]
    assert history == ["before", "Fix a\n\nb!", "next"]


def test_chats_at_once_keep_the_lines_of_each(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    readline = pytest.importorskip("readline")
    monkeypatch.setattr(lines, "cache_folder", lambda: tmp_path)
    monkeypatch.setattr("sys.stdin", SimpleNamespace(isatty=lambda: True))
    monkeypatch.delenv("PYSTAGED_NOHISTORY", raising=False)

    def history() -> list[str]:
        return [readline.get_history_item(1 + i) for i in range(readline.get_current_history_length())]

    def begun(interrupts: Interrupts, *typed: str) -> Lines:
        """A chat as in a process of its own, in which lines have been typed."""
        readline.clear_history()
        made = Lines(interrupts)
        made._typed += typed
        return made

    with Interrupts() as interrupts:
        begun(interrupts, "before").keep()
        first, second = begun(interrupts, "of the first"), begun(interrupts, "of the second")
        second.keep()
        first.keep()
        begun(interrupts)
        assert history() == ["before", "of the second", "of the first"]
        readline.clear_history()


@pytest.mark.parametrize("end", [EOFError, KeyboardInterrupt])
def test_an_unfinished_message_is_dropped(monkeypatch: pytest.MonkeyPatch, end: type[BaseException]) -> None:
    lines = iter(['"""abc', end, "next", EOFError])

    def read(_: str) -> str:
        line = next(lines)
        if isinstance(line, str):
            return line
        raise line

    monkeypatch.setattr("builtins.input", read)
    with Interrupts() as interrupts:
        reader = Lines(interrupts)
        assert [reader.read(), reader.read()] == [("next", False), None]


@pytest.mark.slow
@pytest.mark.skipif(sys.platform == "win32", reason="there are no pseudo-terminals")
def test_in_a_terminal(engine: Engine, tmp_path: Path) -> None:
    from cli.test_terminal import terminal  # noqa: PLC0415

    question = "def f(x):\n    return x"
    expected = engine.chat([asks(question)], max_tokens=8)
    file = tmp_path / "talk.json"
    window = terminal("chat", "bundled", "--temperature", "0", "--max-tokens", "8", "--stats", columns=200, lines=60)
    window.wait_for(b"> ")
    window.type(b'"""')
    window.wait_for(b'> """')
    start = window.output.index(b'> """') + 1
    while b'> """' not in window.output[start:]:
        os.kill(window.process, signal.SIGCONT)  # as the shell's fg after Ctrl-Z; too early where it does not read yet
        with suppress(AssertionError):
            window.wait_for(b'> """', 1, start=start)
    window.type(b"\n")
    for line in question.split("\n"):
        window.wait_for(b". ")
        window.type(line.encode() + b"\n")
    window.type(b'"""\n')
    window.wait_for(b"per step")
    window.type(f"/save {file}\n".encode())
    window.wait_for(b"saved ")
    window.type(b"/nothing\n")
    window.wait_for(b"there is no command")
    window.type(b"/bye\n")
    assert window.finish() == 0
    assert json.loads(file.read_text("utf-8"))["messages"] == [asks(question), expected.message]
    # The next chat knows the lines.
    window = terminal("chat", "bundled", columns=200)
    window.wait_for(b"> ")
    window.type(b"\x1b[A")
    window.wait_for(b"/bye")
    window.type(b"\n")
    assert window.finish() == 0


def test_the_help_names_all_commands() -> None:
    commands = [name.replace("_do_", "/") for name in dir(Chat) if name.startswith("_do_")]
    commands += [f"/{name}" for name in turns._SHORT]
    assert len(commands) > 12
    assert all(name in turns._HELP for name in commands)
