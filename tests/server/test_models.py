"""Several models in one server: the bundled one under several names, so that texts are known."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import json
import threading
import weakref
from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import pytest
from support.browser import chromium
from support.scheduling import held, in_loop, wait_until
from support.server import PATH, Server, asked, live_of

import pystaged
from pystaged.decoding.policy import FixedPolicy
from pystaged.engine import Engine
from pystaged.server.models import Models
from pystaged.server.settings import Settings

NAMES = ("one", "two", "three")
ASK: Any = {"prompt": "def f(", "max_tokens": 4, "temperature": 0}


class Loads:
    """Loads engines of one file, and remembers them."""

    def __init__(self) -> None:
        self.engines: list[Engine] = []

    def __call__(self, path: Path) -> Engine:
        if path.name == "none.gguf":
            raise pystaged.ModelError("secret")
        policy = FixedPolicy(2, 3, 6)  # nothing to measure
        engine = pystaged.load(path, draft=None, recycle=False, policy=policy, n_ctx=512, report=lambda _: None)
        self.engines.append(engine)
        return engine


@pytest.fixture
def several(bundled_target: Path) -> Iterator[Callable[..., tuple[Models, Loads]]]:
    """Makes models of which so many fit into memory."""
    made: list[Models] = []

    def make(fit: int = 3, files: dict[str, Path] | None = None, **settings: Any) -> tuple[Models, Loads]:
        loads, size = Loads(), bundled_target.stat().st_size
        files = files or dict.fromkeys(NAMES, bundled_target)
        made.append(Models(Settings("", **settings), files, loads, memory=fit * (size + 1000), kv_memory=1000))
        return made[-1], loads

    yield make
    for models in made:
        models.close()


def loaded(server: Server) -> list[str]:
    return [each["name"] for each in server.ask("/api/ps")[1]["models"]]


def test_they_are_listed_loaded_when_asked_for_and_unloaded_in_turn(several: Any, bundled_target: Path) -> None:
    (models, loads), both = several(fit=2), {"one", "two"}
    with pystaged.load(bundled_target, draft=None, policy=FixedPolicy(1, 0, 0)) as plain:
        expected = plain.generate(ASK["prompt"], max_tokens=4).text
    with live_of(models) as server:
        assert [card["id"] for card in server.ask("/v1/models")[1]["data"]] == [*NAMES]
        tags = server.ask("/api/tags")[1]["models"]
        assert [(each["name"], len(each["digest"])) for each in tags] == [(name, 64) for name in NAMES]
        assert (loaded(server), loads.engines) == ([], [])
        for name, left in (("one", {"one"}), ("two", both), ("one", both), ("three", {"one", "three"})):
            status, answer = server.ask(PATH, ASK | {"model": name})
            assert (status, answer["model"], answer["choices"][0]["text"]) == (200, name, expected)
            assert set(loaded(server)) == left
        assert len(loads.engines) == 3  # "one" stayed
        metrics = server.ask("/metrics")[1]
        assert "pystaged:tokens_predicted_total 16\n" in metrics
        assert server.ask("/props?model=three")[1]["model_alias"] == "three"
        assert server.ask("/props")[1]["model_alias"] == "three"  # the one used last


def test_an_unloaded_model_is_not_kept_by_its_answers(several: Any) -> None:
    models, loads = several(fit=1)
    with live_of(models) as server:
        gc.disable()  # by itself it would come at some time
        try:
            for stream in (False, True):
                server.ask(PATH, ASK | {"model": "one", "stream": stream})
            engine = weakref.ref(loads.engines.pop())
            server.ask(PATH, ASK | {"model": "two"})
            assert engine() is None
        finally:
            gc.enable()


@in_loop
async def test_what_is_loaded_when_the_server_ends_is_closed(several: Any) -> None:
    """uvicorn cancels the request that waits for it; the thread that loads goes on."""
    models, loads = several()
    begun, go_on = threading.Event(), threading.Event()

    def load(path: Path) -> Engine:
        begun.set()
        assert go_on.wait(600)
        return loads(path)

    models._load = load
    asked = asyncio.ensure_future(models.lent("one").__aenter__())
    while not begun.is_set():
        await asyncio.sleep(0.001)
    asked.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await asked
    models.close()
    go_on.set()
    while not (loads.engines and loads.engines[0]._contexts.closed):
        await asyncio.sleep(0.001)


@pytest.mark.usefixtures("nothing_is_resolved")
def test_a_name_is_compared_with_theirs_alone(
    several: Any, bundled_target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with live_of(several()[0]) as server:
        for name in (str(bundled_target), "bundled", "openai-community/gpt2", "../one", "", "on"):
            status, answer = server.ask(PATH, ASK | {"model": name})
            assert (status, answer["error"]["code"]) == (404, "model_not_found")
            assert answer["error"]["message"].endswith("this server has 'one', 'two', 'three'")
        status, answer = server.ask(PATH, ASK)
        assert (status, answer["error"]["param"]) == (400, "model")
        assert server.ask("/v1/models/two")[0] == 200
        assert server.ask("/v1/models/four")[0] == 404
        monkeypatch.undo()  # what is loaded is resolved
        for name in ("two:latest", "Two", "TWO:Latest"):  # as Ollama's clients write
            assert server.ask(PATH, ASK | {"model": name})[1]["model"] == "two"
        shown = [server.ask("/api/show", {"name": name})[0] for name in ("two", "four")]  # Ollama's older key
        assert shown == [200, 404]


def test_one_can_answer_to_all_other_names(several: Any) -> None:
    with live_of(several(default="two")[0]) as server:
        for body in (ASK, ASK | {"model": "gpt-4"}):
            assert server.ask(PATH, body)[1]["model"] == "two"
        assert server.ask(PATH, ASK | {"model": "one"})[1]["model"] == "one"
    with pytest.raises(ValueError, match="--default names 'four'"):
        several(default="four")


def test_names_are_read_as_in_ollama(several: Any, bundled_target: Path) -> None:
    files = dict.fromkeys(("smollm2:135m", "two:latest"), bundled_target)
    with live_of(several(files=files, default="Two")[0]) as server:
        for name, known in (("smollm2", "smollm2:135m"), ("SmolLM2:latest", "smollm2:135m"), ("two", "two:latest")):
            assert server.ask(PATH, ASK | {"model": name})[1]["model"] == known
        assert server.ask(PATH, ASK | {"model": "gpt-4"})[1]["model"] == "two:latest"


def test_a_text_in_progress_ends_before_its_model_is_unloaded(several: Any) -> None:
    models, loads = several(fit=1)
    with live_of(models) as server:
        long = ASK | {"model": "one", "max_tokens": 300, "ignore_eos": True, "stream": True}
        first = server.send("POST", PATH, long)
        first.read(10)  # it has begun
        answers: list[Any] = []
        waiting = [
            threading.Thread(target=lambda name=name: answers.append(server.ask(PATH, ASK | {"model": name})))
            for name in ("two", "one", "three")
        ]
        for each in waiting:
            each.start()
        assert first.read().endswith(b"data: [DONE]\n\n")
        for each in waiting:
            each.join()
        assert [status for status, _ in answers] == [200] * 3
        assert {answer["model"] for _, answer in answers} == {*NAMES}
        assert len({answer["choices"][0]["text"] for _, answer in answers}) == 1
        assert len(loaded(server)) == 1
        assert len(loads.engines) >= 3


@contextlib.contextmanager
def busy(server: Server, models: Models, loads: Loads) -> Iterator[None]:
    """ "one" has a text that does not end while the context lasts."""
    assert server.ask(PATH, ASK | {"model": "one"})[0] == 200
    wait_until(lambda: not models.all["one"].users)
    with held(loads.engines[0]):
        text = asked(server, ASK | {"model": "one"})
        wait_until(lambda: models.all["one"].users)
        yield
    text.close()


def test_so_many_wait_for_a_model_and_no_more(several: Any) -> None:
    models, loads = several(fit=1, queue=0)
    with live_of(models) as server:
        body = ASK | {"model": "two"}
        with busy(server, models, loads):
            waiting = [asked(server, body) for _ in range(2)]
            wait_until(lambda: models._turn.statistics().tasks_waiting == 1)  # besides the one whose turn it is
            status, answer = server.ask(PATH, body)
            assert (status, answer["error"]["code"]) == (429, "queue_full")
        for each in waiting:
            assert each.recv(12) == b"HTTP/1.1 200"
            each.close()


def test_who_waits_for_a_model_and_leaves_keeps_nobody_waiting(several: Any) -> None:
    models, loads = several(fit=1)
    with live_of(models) as server:
        with busy(server, models, loads):
            gone = asked(server, ASK | {"model": "two"})
            wait_until(lambda: models.all["one"].is_leaving)
            gone.close()
            wait_until(lambda: not models.all["one"].is_leaving)
        assert server.ask(PATH, ASK | {"model": "one"})[0] == 200
        assert loaded(server) == ["one"]
        assert len(loads.engines) == 1


def test_one_that_rests_is_unloaded(several: Any) -> None:
    models, loads = several(keep_alive=0.05)
    with live_of(models) as server:
        assert server.ask(PATH, ASK | {"model": "one"})[0] == 200
        wait_until(lambda: not models.loaded())
        assert server.ask("/v1/models/one")[1]["meta"].keys() == {"size"}
        assert server.ask(PATH, ASK | {"model": "one"})[0] == 200
        assert len(loads.engines) == 2


def test_requests_say_how_long_one_rests(several: Any) -> None:
    """As Ollama's: keep_alive 0 unloads, after the text if there is one; below 0 it stays."""
    models, loads = several(keep_alive=0.05)
    with live_of(models) as server:
        expires = {}
        for name, kept in (("one", -1), ("two", "1h30m"), ("three", "90s")):
            assert server.ask("/api/generate", {"model": name, "keep_alive": kept})[1]["done_reason"] == "load"
        for each in server.ask("/api/ps")[1]["models"]:
            rest = datetime.fromisoformat(each["expires_at"].replace("Z", "+00:00")) - datetime.now(timezone.utc)
            expires[each["name"]] = rest.total_seconds()
        assert expires["one"] > 1e9
        assert 5300 < expires["two"] <= 5400
        assert 60 < expires["three"] <= 90
        for path, said in (("generate", {"response": ""}), ("chat", {"message": {"role": "assistant", "content": ""}})):
            answer = server.ask(f"/api/{path}", {"model": "one", "keep_alive": 0})[1]
            assert answer.items() >= {"model": "one", "done": True, "done_reason": "unload", **said}.items()
            wait_until(lambda: "one" not in loaded(server))
        assert len(loads.engines) == 3  # to unload one, it is not loaded
        ask = {"model": "two", "prompt": "def f(", "stream": False, "options": {"num_predict": 3}, "keep_alive": "0s"}
        assert server.ask("/api/generate", ask)[1]["eval_count"] == 3
        wait_until(lambda: loaded(server) == ["three"])
        assert server.ask("/api/generate", ask | {"keep_alive": "soon"})[0] == 400
        assert server.ask("/api/generate", {"model": "three", "keep_alive": 0})[1]["done_reason"] == "unload"
        wait_until(lambda: not models.loaded())
        models.settings = replace(models.settings, keep_alive=1e6)
        assert server.ask(PATH, ASK | {"model": "three"})[0] == 200  # loaded anew, it rests as the server says
        assert models.all["three"].rest == 1e6
        assert "choices" in server.ask(PATH, ASK | {"model": "three", "keep_alive": 0, "unloads": True})[1]


@pytest.mark.parametrize("stream", [False, True])
def test_the_time_of_loading_is_part_of_an_answers(several: Any, stream: bool) -> None:
    models, loads = several(fit=1)
    with live_of(models) as server:
        chat: Any = {"messages": [{"role": "user", "content": "Hi"}]}
        for path, asked in (("chat", chat), ("generate", {"prompt": "def f("}), ("embed", {"input": "a"})):
            for name in ("one", "two", "two"):
                known = len(loads.engines)
                body = asked | {"model": name, "stream": stream, "options": {"num_predict": 3}}
                answer = server.send("POST", f"/api/{path}", body).read().decode()
                found = json.loads(answer.splitlines()[-1])
                loading, rest = found["load_duration"], found.get("prompt_eval_duration", 0)
                assert found["total_duration"] >= loading + rest + found.get("eval_duration", 0)
                assert (loading > 0) is (len(loads.engines) > known)


def test_one_that_cannot_be_loaded(several: Any, bundled_target: Path, tmp_path: Path) -> None:
    (tmp_path / "none.gguf").write_bytes(b"")
    models, _ = several(files={"good": bundled_target, "bad": tmp_path / "none.gguf"})
    with live_of(models) as server:
        status, answer = server.ask(PATH, ASK | {"model": "bad"})
        assert (status, answer["error"]["type"]) == (503, "unavailable_error")
        assert "secret" not in answer["error"]["message"]
        assert server.ask(PATH, ASK | {"model": "good"})[0] == 200


def test_a_model_alone_is_always_loaded(several: Any) -> None:
    with live_of(several(fit=0)[0]) as server:
        for name in ("one", "two"):
            assert server.ask(PATH, ASK | {"model": name})[0] == 200
            assert loaded(server) == [name]


@pytest.mark.slow
def test_the_page_lets_people_choose(several: Any) -> None:
    models, _ = several(fit=1)
    with live_of(models) as server, chromium() as browser:
        browser.get(server.url)
        choice = browser.find_element("id", "which")
        wait_until(lambda: choice.get_property("value") == "one")
        assert [each.text for each in choice.find_elements("css selector", "option")] == [*NAMES]
        script = "arguments[0].value = 'three'; arguments[0].dispatchEvent(new Event('change'))"
        browser.execute_script(script, choice)
        wait_until(lambda: loaded(server) == ["three"])
        browser.find_element("id", "ask").send_keys("Hello")
        browser.find_element("id", "send").click()
        wait_until(lambda: "pystaged:tokens_predicted_total 0\n" not in server.ask("/metrics")[1])
        assert loaded(server) == ["three"]
