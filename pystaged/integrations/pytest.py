"""Plugin for pytest: a local model's server for the application under test, and texts that must stay the same.

A test run has one server, which xdist's controller starts when a test first asks for it, and which ends with the run.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, suppress
from contextvars import ContextVar
from http.client import HTTPConnection, HTTPException
from itertools import chain, count
from multiprocessing.connection import Client, Listener
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

import pytest

if TYPE_CHECKING:
    from pystaged import Engine, GenerationResult

_FORMAT = "pystaged text 1"  # of a kept file
_MARKER, _FIXTURES = "local_llm", {"local_llm_url", "assert_same_text"}
_LONGEST_NAME, _AROUND = 180, 30  # characters: of a file's name; of a text, shown on both sides of a difference
_MOST_TEXTS = 1024  # that the server remembers of each process
_process: ContextVar[str] = ContextVar("process", default="")  # that sent the request


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("pystaged", "tests with a local model")
    group.addoption("--pystaged-model", help="a GGUF file, a hub id, a name in pystaged's cache, or smollm2")
    what = "keep the texts given to assert_same_text, instead of comparing them with those kept"
    group.addoption("--pystaged-update", action="store_true", help=what)
    parser.addini("pystaged_model", "the local model, as for --pystaged-model", default="smollm2")
    parser.addini("pystaged_n_ctx", "its context length in tokens; 0 for its own, at most 8192", default="0")
    parser.addini("pystaged_kv", "type of its KV cache: f16 or q8_0", default="f16")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", f"{_MARKER}: uses a local model (set by pystaged for tests with its fixtures)")
    if config.getoption("--pystaged-update") and os.environ.get("CI"):
        raise pytest.UsageError("--pystaged-update is not for CI, where the texts would be lost; otherwise, unset CI")
    config.stash[_SERVER] = _Server(config)


def pytest_unconfigure(config: pytest.Config) -> None:
    if _SERVER in config.stash:
        config.stash[_SERVER].close()


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    """Tell a worker of xdist where to ask for the server."""
    node.workerinput["pystaged"] = node.config.stash[_SERVER].listen()


@pytest.hookimpl(tryfirst=True)  # before -m selects by the marker
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if not _FIXTURES.isdisjoint(getattr(item, "fixturenames", ())):
            item.add_marker(_MARKER)


@pytest.fixture(scope="session")
def local_llm_url(request: pytest.FixtureRequest) -> str:
    """Address of the local model's server for OpenAI's clients, such as http://127.0.0.1:41234/user/main/v1."""
    config, name = request.config, "main"
    if worker := getattr(config, "workerinput", None):
        name, (address, key) = worker["workerid"], worker["pystaged"]
        with Client(tuple(address), authkey=key) as controller:
            found = controller.recv()
    else:
        found = config.stash[_SERVER].start()
    if isinstance(found, str):
        settings = ", ".join(f"pystaged_{name} = {value}" for name, value in _settings(config).items())
        pytest.fail(f"the local model cannot be used: {found}\nSettings: {settings}", pytrace=False)
    return f"http://127.0.0.1:{found}/user/{name}/v1"


@pytest.fixture
def assert_same_text(request: pytest.FixtureRequest, local_llm_url: str) -> Callable[..., None]:
    """A function of a text and optionally a name: compares it with the text kept in the folder `receipts` beside the
    test's file. `pytest --pystaged-update` keeps it."""
    config, path = request.config, request.path
    test, used = request.node.nodeid.partition("::")[2].replace("::", "."), set[str]()

    def assert_same_text(text: str, name: str | None = None) -> None:
        __tracebackhide__ = True
        if not isinstance(text, str):
            raise TypeError(f"assert_same_text takes a string, not {type(text).__name__}")
        stem = test if name is None else f"{test}-{name}"
        stem = next(each for each in chain([stem], (f"{stem}-{i}" for i in count(2))) if each not in used)
        used.add(stem)
        file = quote(stem, safe="[]()=,+@!")  # file systems refuse some characters, and long names
        if len(file) > _LONGEST_NAME:
            file = f"{file[:_LONGEST_NAME]}-{hashlib.sha256(stem.encode()).hexdigest()[:16]}"
        kept = path.parent / "receipts" / path.stem / f"{file}.json"
        shown, then = os.path.relpath(kept, config.rootpath), _kept(kept)
        if then and then["text"] == text:
            return
        found = _ask(local_llm_url, {"text": text, "then": then})
        if config.getoption("--pystaged-update"):
            values = {"format": _FORMAT, "text": text, "receipt": found["receipt"]}
            content = ",\n".join(f"{json.dumps(name)}: {json.dumps(value)}" for name, value in values.items())
            kept.parent.mkdir(parents=True, exist_ok=True)
            kept.write_text(f"{{\n{content}\n}}\n", "utf-8", newline="\n")
        elif then:
            pytest.fail("\n".join([f"the text differs from the one in {shown}", *found["why"]]))
        else:
            why = "no kept text (damaged, or a merge conflict?):" if kept.exists() else "no text is kept yet in"
            pytest.fail(f"{why} {shown}; if this text is right, keep it with pytest --pystaged-update:\n{text}")

    return assert_same_text


def _settings(config: pytest.Config) -> dict[str, str]:
    model = config.getini("pystaged_model")
    if (config.rootpath / model).is_file():
        model = str(config.rootpath / model)
    model = config.getoption("--pystaged-model") or model
    return {"model": model, "n_ctx": config.getini("pystaged_n_ctx"), "kv": config.getini("pystaged_kv")}


def _kept(file: Path) -> dict[str, Any] | None:
    """The members of a kept file, None for another one."""
    with suppress(OSError, ValueError, TypeError, KeyError):
        kept = json.loads(file.read_text("utf-8"))
        if kept["format"] == _FORMAT and (not kept["receipt"] or kept["receipt"]["text"]["tokens"]):
            return {"text": str(kept["text"]), "receipt": kept["receipt"]}
    return None


def _ask(url: str, given: dict[str, Any]) -> Any:
    """The answer of the server's `_compare`."""
    host, _, path = url.removeprefix("http://").removesuffix("/v1").partition("/")
    try:
        with closing(HTTPConnection(host)) as connection:
            connection.request("POST", f"/{path}/pystaged/compare", json.dumps(given).encode())
            return json.loads(connection.getresponse().read())
    except (OSError, HTTPException) as error:
        raise RuntimeError(f"the local model's server has ended (out of memory?); run pytest again ({error})") from None


class _Server:
    """The server of a test run. It ends with this process, however that ends."""

    def __init__(self, config: pytest.Config) -> None:
        self._config, self._starting, self._key = config, threading.Lock(), os.urandom(16)
        self._child: subprocess.Popen[bytes] | None = None
        self._found: int | str = 0
        self._listener: Listener | None = None

    def start(self) -> int | str:
        """Its port, or the error that keeps it from starting; the first call starts it."""
        from pystaged.platform import process, system  # noqa: PLC0415  pytest loads this module in every run

        with self._starting:
            if not self._found:
                options: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
                options |= {"stderr": subprocess.DEVNULL, **system.GROUP_OF_ITS_OWN}  # Ctrl-C ends the tests first
                self._child = process.start(__name__, json.dumps(_settings(self._config)), **options)
                said = self._child.stdout.readline() if self._child.stdout else b""
                self._found = json.loads(said or '"its server ended while it was starting"')
            return self._found

    def listen(self) -> tuple[Any, bytes]:
        """The address and the key by which a worker asks for what `start` returns."""
        if self._listener is None:
            self._listener = Listener(("127.0.0.1", 0), backlog=1024, authkey=self._key)
            threading.Thread(target=self._tell, args=[self._listener], daemon=True).start()
        return self._listener.address, self._key

    def _tell(self, listener: Listener) -> None:
        while True:
            with suppress(Exception), listener.accept() as worker:
                worker.send(self.start())

    def close(self) -> None:
        if self._child:
            with self._child:
                self._child.kill()


_SERVER = pytest.StashKey[_Server]()


def main() -> int:
    """Serve until the standard input ends. Argument: settings as JSON. Prints the port, or a string with an error."""
    from pystaged.platform import process  # noqa: PLC0415

    process.end_with_parent()
    try:
        _serve(**json.loads(sys.argv[1]))
    except Exception as error:
        print(json.dumps(str(error)))  # noqa: T201
    return 1


def _serve(model: str, n_ctx: str, kv: str) -> None:
    try:
        from anyio.to_thread import run_sync  # noqa: PLC0415
        from starlette.responses import JSONResponse  # noqa: PLC0415
        from starlette.routing import Route  # noqa: PLC0415

        from pystaged.server import app, models, run, settings  # noqa: PLC0415
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(f'it needs {error.name}: pip install ".[server]" in a clone of pystaged') from None
    import pystaged  # noqa: PLC0415

    engine = pystaged.load(model, n_ctx=int(n_ctx), kv=kv, recycle=False, report=lambda _: None)
    engine.check_exact()
    texts: dict[str, deque[GenerationResult]] = {}

    def remember(results: Sequence[GenerationResult]) -> None:
        texts.setdefault(_process.get(), deque(maxlen=_MOST_TEXTS)).extend(results)

    async def compare(request: Any) -> JSONResponse:
        given, known = await request.json(), list(texts.get(_process.get(), ()))
        return JSONResponse(await run_sync(lambda: _compare(engine, known, **given)))

    name, defaults = Path(model).name.removesuffix(".gguf"), {"seed": 0}  # or each request would draw one
    chosen = settings.Settings(name, defaults=defaults, queue=1 << 16, written=remember)
    served = app.application(models.Models.of(engine, chosen))
    served.routes.append(Route("/pystaged/compare", compare, methods=["POST"]))

    async def of_process(scope: Any, receive: Any, send: Any) -> None:
        """Take /user/NAME from the beginning of the path: equal texts of other processes give no receipt."""
        name, _, path = scope["path"].removeprefix("/user/").partition("/")
        _process.set(name)
        await served({**scope, "path": f"/{path}", "raw_path": f"/{path}".encode()}, receive, send)

    listener = run.bound("127.0.0.1", 0)
    run.serve(of_process, listener, grace=1, ready=lambda: print(listener.getsockname()[1], flush=True))  # noqa: T201


def _compare(engine: Engine, known: list[GenerationResult], text: str, then: dict[str, Any] | None) -> dict[str, Any]:
    """The receipt of a text, and lines on how it differs from a kept one, and why. known: texts that the engine wrote;
    the newest that is this one up to white space around it gives the receipt."""
    found = [each for each in known if each.text.strip() == text.strip()]
    now = json.loads(found[-1].receipt.to_json()) if found and found[-1].origin else None
    return {"receipt": now, "why": [*_difference(engine, then, now, text)] if then else []}


def _difference(engine: Engine, then: dict[str, Any], now: Any, text: str) -> Iterator[str]:
    old = then["receipt"]
    if old and now and old["vocabulary"] == now["vocabulary"] and old["text"]["tokens"] != now["text"]["tokens"]:
        prompt, after = now["prompt"]["tokens"], now["text"]["tokens"]
        at, said = _same(old["text"]["tokens"], after), []
        for tokens in (old["text"]["tokens"], after):
            if at == len(tokens):
                said.append("the end")
            else:
                scored = engine.score([*prompt, *after[:at], tokens[at]])
                piece, chance = scored.pieces[-1].decode("utf-8", "replace"), math.exp(scored.logprobs[-1])
                said.append(f"{piece!r} (probability {chance:.2g} now)")
        yield f"  token {at + 1} was {said[0]} and is {said[1]}"
    at = _same(then["text"], text)
    for when, each in (("then: ", then["text"]), ("now:  ", text)):
        first, last = max(0, at - _AROUND), at + _AROUND
        yield f"  {when}{'...' * (first > 0)}{each[first:last]!r}{'...' * (last < len(each))}"
    yield f"  {_reason(old, now)}\n  If the new text is right, keep it with pytest --pystaged-update."


def _reason(then: Any, now: Any) -> str:
    """A sentence on what differs of what a text depends on, by receipts."""
    if not then or not now:
        which = "neither text has a" if not then and not now else f"the {'new' if then else 'kept'} text has no"
        return f"What differs is unknown: {which} receipt, because the model did not write exactly that string."
    old, new, found = then["prompt"]["tokens"], now["prompt"]["tokens"], list[str]()
    if old != new:
        found.append(f"the prompt ({len(old)} tokens then, {len(new)} now, the first {_same(old, new)} are the same)")
    was, is_now = (_values({**each, "prompt": {}, "text": {}}) for each in (then, now))
    for name in sorted(was | is_now):
        if was.get(name) != is_now.get(name):
            found.append(f"{name} ({json.dumps(was.get(name))} then, {json.dumps(is_now.get(name))} now)")
    if found:
        return f"What differs: {'; '.join(found)}."
    if then["text"] == now["text"]:
        return "The model wrote the same text. What the application makes of it has changed, or the file was edited."
    return "Nothing does, so the file was edited, or this is an error of pystaged; `pystaged verify` of it tells which."


def _same(a: Sequence[Any], b: Sequence[Any]) -> int:
    """How many first items are the same."""
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def _values(receipt: dict[str, Any]) -> dict[str, Any]:
    """All values in it, by name."""
    found: dict[str, Any] = {}
    for name, value in receipt.items():
        found |= _values(value) if isinstance(value, dict) else {name: value}
    return found
