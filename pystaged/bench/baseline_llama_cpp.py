"""Runner for llama-server, from a build of llama.cpp or ik_llama.cpp."""

from __future__ import annotations

import contextlib
import http.client
import json
import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from typing import Any

from pystaged.bench.worker import Measurement, peak_bytes

_SECONDS_TO_LOAD = 300.0
_LONGEST_SILENCE = 600.0  # seconds; longer than any prefill
_SAMPLERS = ["top_k", "top_p", "min_p", "temperature"]


def command(setup: dict[str, Any]) -> list[str]:
    """The command line of llama-server with a model and its draft.

    Args:
        setup: program (its path), model, draft (path or None), threads, n_ctx (tokens).
    """
    threads = str(setup["threads"])
    found = [str(setup["program"]), "-m", setup["model"], "-c", str(setup["n_ctx"]), "-t", threads, "-tb", threads]
    return found + (["-md", setup["draft"], "-td", threads, "-tbd", threads] if setup["draft"] else [])


class Runner:
    """Decodes with one server process, which keeps running.

    Args:
        setup: as in command, and arguments: further options of this way.
    """

    def __init__(self, setup: dict[str, Any]) -> None:
        self._server = Server([*command(setup), "-np", "1", *setup["arguments"]])

    def run(self, job: dict[str, Any]) -> Measurement:
        sampling = job["sampling"]
        request = {
            "prompt": job["prompt"],
            "n_predict": job["max_tokens"],
            **{name: getattr(sampling, name) for name in (*_SAMPLERS, "seed")},
            "samplers": _SAMPLERS,
            "cache_prompt": False,
            "return_tokens": True,
        }
        try:
            found = self._server.complete(request)
        except RuntimeError:
            # ik_llama.cpp gives no whole answer that ends within a character, only a stream.
            *_, found = self._server.stream(request | {"stream": True})
        times, tokens = found["timings"], found.get("tokens", [])
        counted = times["predicted_n"] - 1  # the first token comes from prefill
        return Measurement(
            counted,
            times["predicted_ms"] / 1e3,
            times["prompt_ms"] / 1e3,
            tokens,
            max(counted - times.get("draft_n_accepted", 0), 0),
            peak_bytes=peak_bytes(self._server.process.pid),
        )

    def close(self) -> None:
        self._server.close()


class Server:
    """llama-server, or a compatible server, on a free port of this machine.

    Args:
        command: the program and its options.
        output: destination of its output, as in Popen.

    Raises:
        RuntimeError: it does not become ready.
    """

    def __init__(self, command: list[str], output: int | None = None) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        self._url = f"http://127.0.0.1:{port}"
        # The server is local, so proxies must not be used.
        self._opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        command = [*command, "--host", "127.0.0.1", "--port", str(port)]
        self.process = subprocess.Popen(command, stdout=output, stderr=output)
        try:
            self._wait()
        except BaseException:  # Ctrl-C, too
            self.close()
            raise

    def complete(self, request: dict[str, Any]) -> dict[str, Any]:
        """Post a completion. Raises RuntimeError where it is refused, the server ends, or the answer is not JSON."""
        with self._post(request) as response:
            found: dict[str, Any] = json.load(response)
            return found

    def stream(self, request: dict[str, Any]) -> Iterator[dict[str, Any]]:
        """Post a streaming completion and yield its parts; also raises RuntimeError if none comes for a long time."""
        with self._post(request, _LONGEST_SILENCE) as response:
            for line in response:
                if line.startswith(b"data: {"):
                    yield json.loads(line.removeprefix(b"data: "))

    @contextlib.contextmanager
    def _post(self, request: dict[str, Any], timeout: float | None = None) -> Iterator[Any]:
        data = json.dumps(request).encode()
        headers = {"Content-Type": "application/json"}
        try:
            asked = urllib.request.Request(f"{self._url}/completion", data, headers)
            with self._opener.open(asked, timeout=timeout) as response:
                yield response
        except urllib.error.HTTPError as error:
            raise RuntimeError(f"llama-server refused: {error.read().decode('utf-8', 'replace')[:200]}") from error
        except TimeoutError:
            raise RuntimeError(f"llama-server was silent for {timeout:g} seconds") from None
        except (urllib.error.URLError, OSError) as error:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(5)
            raise RuntimeError(f"llama-server ended with {self.process.poll()}: {error}") from error
        except (ValueError, http.client.HTTPException) as error:
            raise RuntimeError(f"llama-server answers oddly: {error!r}") from error

    def close(self) -> None:
        """End it."""
        self.process.kill()
        self.process.wait()

    def _wait(self) -> None:
        deadline = time.monotonic() + _SECONDS_TO_LOAD
        while not self._ready():
            if self.process.poll() is not None:
                raise RuntimeError(f"llama-server ended with {self.process.returncode} while loading")
            if time.monotonic() > deadline:
                raise RuntimeError("llama-server does not become ready")
            time.sleep(0.1)

    def _ready(self) -> bool:
        try:
            with self._opener.open(f"{self._url}/health", timeout=5) as response:
                return bool(response.status == 200)
        except (urllib.error.URLError, OSError):
            return False
