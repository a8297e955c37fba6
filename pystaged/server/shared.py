"""A server that the processes of a test run share; it ends with the last of them, even if that crashes.

Each of them holds a shared lock of a file, which the system releases when the process ends. The server waits for an
exclusive lock of that file.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from collections import deque
from contextlib import closing, suppress
from contextvars import ContextVar
from dataclasses import asdict, dataclass
from http.client import HTTPConnection, HTTPException
from multiprocessing.connection import Pipe
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from pystaged import process, system
from pystaged.files import keep

if TYPE_CHECKING:
    from collections.abc import Sequence
    from multiprocessing.connection import Connection

    from starlette.requests import Request
    from starlette.types import ASGIApp, Receive, Scope, Send

    from pystaged.result import GenerationResult

_START, _USERS, _PORT, _LOG = "start.lock", "users.lock", "port", "log"
_MOST_TEXTS = 1024  # remembered of each user
_PATIENCE = 0.2  # seconds between looks at whether a starting server still runs
_user: ContextVar[str] = ContextVar("user", default="")


class SharedServerError(RuntimeError):
    """The server could not be started, or refuses a request."""


@dataclass(frozen=True, slots=True)
class Loading:
    """What the server loads: model, n_ctx and kv as for pystaged.load."""

    model: str
    n_ctx: int = 0
    kv: str = "f16"


class SharedServer:
    """A connection to the server of a folder, which is started if there is none.

    url: its address for this user; /v1 below it is OpenAI's. No text depends on other users.

    Args:
        folder: where its files are; it is made.
        user: a name for this process, in letters and digits.

    Raises:
        SharedServerError: it could not be started; the message is that of pystaged.load.
    """

    def __init__(self, folder: Path, user: str, loading: Loading) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        with (folder / _START).open("ab") as start:
            system.lock(start, wait=True)
            # While a server ends it has this lock exclusively.
            self._lock: IO[bytes] = (folder / _USERS).open("ab")
            system.lock(self._lock, shared=True, wait=True)
            self._port = _port(folder)
            if self._port is None:
                try:
                    self._port = _started(folder, loading)
                except BaseException:
                    self._lock.close()
                    raise
        self._user = user
        self.url = f"http://127.0.0.1:{self._port}/user/{user}"

    def ask(self, name: str, **given: Any) -> Any:
        """The answer to a question at /pystaged/NAME. Raises ValueError with the engine's message."""
        path, headers = f"/user/{self._user}/pystaged/{name}", {"Content-Type": "application/json"}
        try:
            with closing(HTTPConnection("127.0.0.1", self._port)) as connection:
                connection.request("POST", path, json.dumps(given).encode(), headers)
                response = connection.getresponse()
                status, body = response.status, json.loads(response.read())
        except (OSError, HTTPException) as error:
            raise SharedServerError(
                "the server of the local model ended during this run (killed, or out of memory?), so no later test "
                f"can use it; run pytest again ({type(error).__name__})"
            ) from None
        if status != 200:
            raise ValueError(body["error"] if isinstance(body["error"], str) else body["error"]["message"])
        return body

    def close(self) -> None:
        """Leave; the server ends when nobody is left."""
        self._lock.close()


def _port(folder: Path) -> int | None:
    """The port of the folder's server, if that answers."""
    try:
        port = int((folder / _PORT).read_text())
        with closing(HTTPConnection("127.0.0.1", port, timeout=60)) as connection:
            connection.request("GET", "/health")
            return port if connection.getresponse().status == 200 else None
    except (OSError, HTTPException, ValueError):
        return None


def _started(folder: Path, loading: Loading) -> int:
    """Start a server that outlives this process; returns its port when it answers."""
    with suppress(FileNotFoundError):
        (folder / _PORT).unlink()
    reader, writer = Pipe(duplex=False)
    with reader, (folder / _LOG).open("wb") as log:
        with writer:
            number, options = system.inheriting(writer)
            # A group of its own, so that Ctrl-C ends the tests first.
            server = process.start(
                __name__,
                str(folder),
                json.dumps(asdict(loading)),
                number,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                **options,
                **system.group_of_its_own(),
            )
        # The end of the connection alone would not do: a child that this process forks meanwhile has it, too.
        while not reader.poll(_PATIENCE) and server.poll() is None:
            pass
        port = None
        with suppress(EOFError):
            port = reader.recv() if reader.poll() else None
    if system.POSIX or port is None:
        server.wait()
    else:
        server.returncode = 0  # it outlives this process, which Popen would complain about
    if not isinstance(port, int):
        said = (folder / _LOG).read_text("utf-8", "replace").strip().splitlines()
        raise SharedServerError(said[-1] if said else "the server of the local model ended while it was starting")
    keep(folder / _PORT, str(port).encode())
    return port


def main() -> int:
    """Serve while there are users. Arguments: the folder, a Loading as JSON, and a connection that gets the port when
    the server answers."""
    folder, loading, starter = Path(sys.argv[1]), Loading(**json.loads(sys.argv[2])), system.inherited(sys.argv[3])
    if system.POSIX:
        starter = _in_background(starter)
    threading.Thread(target=_end_without_users, args=(folder,), daemon=True).start()
    try:
        _serve(loading, starter)
    except Exception as error:
        print(error, file=sys.stderr, flush=True)  # noqa: T201
    os._exit(1)


def _in_background(starter: Connection) -> Connection:
    """Continue in a process that is not a child of the tests, which may wait for all their children. This process
    passes on the other's message and exits. Returns the connection for the message."""
    reader, writer = Pipe(duplex=False)
    server = os.fork()  # nothing that has threads is imported yet
    if server == 0:
        reader.close()
        starter.close()
        return writer
    writer.close()
    try:
        starter.send(reader.recv())
    except EOFError:
        os._exit(1)
    except OSError:  # nobody knows of the server, because the starter was killed
        os.kill(server, signal.SIGKILL)
    os._exit(0)


def _end_without_users(folder: Path) -> None:
    with (folder / _USERS).open("ab") as users:
        system.lock(users, wait=True)
        with suppress(FileNotFoundError):
            (folder / _PORT).unlink()
        os._exit(0)


def _serve(loading: Loading, starter: Connection) -> None:
    try:
        from starlette.routing import Route  # noqa: PLC0415

        from pystaged.server import run  # noqa: PLC0415
        from pystaged.server.app import application  # noqa: PLC0415
        from pystaged.server.settings import Settings  # noqa: PLC0415
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(f'it needs {error.name}: pip install "pystaged[server]"') from None
    import pystaged  # noqa: PLC0415

    engine = pystaged.load(loading.model, n_ctx=loading.n_ctx, kv=loading.kv, recycle=False, report=lambda _: None)
    texts = _Texts(engine)
    name = Path(loading.model).name.removesuffix(".gguf")
    # A seed that is not drawn, so that clients need not give one.
    app = application(engine, Settings(name, defaults={"seed": 0}, queue=1 << 16, written=texts.add))
    for question in (texts.generate, texts.receipt, texts.score):
        app.routes.append(Route(f"/pystaged/{question.__name__}", _answering(question), methods=["POST"]))
    listener = run.bound("127.0.0.1", 0)

    def ready() -> None:
        starter.send(listener.getsockname()[1])
        starter.close()

    run.serve(_of_users(app), listener, grace=1, ready=ready)


def _of_users(app: ASGIApp) -> ASGIApp:
    """Take the user's name from the beginning of the path."""

    async def of_user(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"].startswith("/user/"):
            user, _, rest = scope["path"].removeprefix("/user/").partition("/")
            _user.set(user)
            scope = {**scope, "path": f"/{rest}", "raw_path": f"/{rest}".encode()}
        await app(scope, receive, send)

    return of_user


def _answering(question: Any) -> Any:
    """An endpoint that calls a function with the members of a request."""
    from anyio.to_thread import run_sync  # noqa: PLC0415
    from starlette.responses import JSONResponse  # noqa: PLC0415

    async def endpoint(request: Request) -> JSONResponse:
        given = await request.json()
        try:
            return JSONResponse(await run_sync(lambda: question(**given)))
        except Exception as error:  # the client raises it
            return JSONResponse({"error": str(error)}, 400)

    return endpoint


class _Texts:
    """The texts that the server has written, and answers about them."""

    def __init__(self, engine: Any) -> None:
        self._engine = engine
        self._texts: dict[str, deque[GenerationResult]] = {}

    def add(self, results: Sequence[GenerationResult]) -> None:
        """Remember texts of the current user."""
        self._texts.setdefault(_user.get(), deque(maxlen=_MOST_TEXTS)).extend(results)

    def generate(self, prompt: Any, options: dict[str, Any]) -> dict[str, Any]:
        """Continue a text, or answer messages."""
        if "logit_bias" in options:  # pairs, because keys of JSON are strings
            options["logit_bias"] = dict(options["logit_bias"])
        is_chat = isinstance(prompt, list) and bool(prompt) and isinstance(prompt[0], dict)
        result = (self._engine.chat if is_chat else self._engine.generate)(prompt, **options)
        self.add([result])
        return {
            "text": result.text,
            "tokens": result.tokens,
            "finish_reason": result.finish_reason,
            "seed": result.seed,
            "receipt": json.loads(result.receipt.to_json()),
        }

    def receipt(self, text: str) -> dict[str, Any]:
        """The receipt of the user's newest text that is this one up to white space around it; None without one."""
        known = list(self._texts.get(_user.get(), ()))  # at once, because other requests may add some
        found = [each for each in known if each.text.strip() == text.strip()]
        if not found or found[-1].origin is None:
            return {"receipt": None}
        return {"receipt": json.loads(found[-1].receipt.to_json())}

    def score(self, before: list[int], tokens: list[int]) -> dict[str, Any]:
        """Log-probabilities and texts of tokens after others."""
        found = self._engine.score([*before, *tokens])
        pieces = [piece.decode("utf-8", "replace") for piece in found.pieces[len(before) :]]
        return {"logprobs": found.logprobs[len(before) :].tolist(), "pieces": pieces}
