"""The runner of llama.cpp's own programs: llama-speculative, llama-speculative-simple, llama-lookup, llama-server."""

from __future__ import annotations

import contextlib
import json
import re
import socket
import subprocess
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from pystaged.bench.worker import Measurement, peak_bytes

_SECONDS_TO_LOAD = 300.0
_SAMPLERS = ["top_k", "top_p", "min_p", "temperature"]


class Runner:
    """Decodes with a program of a llama.cpp build: the server stays, the others start for every prompt.

    Args:
        setup: program (its path), arguments of this way, model, draft (path or None), threads, n_ctx; draft_share:
            weights of a draft pass over those of a target pass.
    """

    def __init__(self, setup: dict[str, Any]) -> None:
        self._draft_share = setup["draft_share"]
        threads = str(setup["threads"])
        self._command = [setup["program"], "-m", setup["model"], "-c", str(setup["n_ctx"])]
        self._command += ["-t", threads, "-tb", threads]
        if setup["draft"]:
            self._command += ["-md", setup["draft"], "-td", threads, "-tbd", threads]
        self._command += setup["arguments"]
        self._server = Server(self._command) if Path(setup["program"]).stem == "llama-server" else None

    def run(self, job: dict[str, Any]) -> Measurement:
        return self._ask(self._server, job) if self._server else self._start(job)

    def close(self) -> None:
        if self._server:
            self._server.close()

    def _start(self, job: dict[str, Any]) -> Measurement:
        sampling = job["sampling"]
        options = {
            "-p": job["text"],
            "-n": job["max_tokens"],
            "--temp": sampling.temperature,
            "--top-k": sampling.top_k,
            "--top-p": sampling.top_p,
            "--min-p": sampling.min_p,
            "--samplers": ";".join(_SAMPLERS),
            "-s": sampling.seed,
        }
        command = [*self._command, "--no-escape", "--ignore-eos"]
        command += [str(word) for option in options.items() for word in option]
        code, said, peak = _run(command)
        if code != 0:
            last = next((line.strip() for line in reversed(said.splitlines()) if line.strip()), "")[:200]
            raise RuntimeError(f"{Path(self._command[0]).name} ended with {code}: {last}")
        tokens, seconds = _numbers(r"decoded\s+(\d+) tokens in\s+([\d.]+) seconds", said)
        _, prefill = _numbers(r"encoded\s+(\d+) tokens in\s+([\d.]+) seconds", said)
        (drafted,) = _numbers(r"n_drafted\s*=\s*(\d+)", said)
        (accepted,) = _numbers(r"n_accept\s*=\s*(\d+)", said)
        return self._measurement(int(tokens), seconds, prefill, drafted, accepted, peak)

    def _ask(self, server: Server, job: dict[str, Any]) -> Measurement:
        sampling = job["sampling"]
        found = server.complete(
            {
                "prompt": job["prompt"],
                "n_predict": job["max_tokens"],
                **{name: getattr(sampling, name) for name in (*_SAMPLERS, "seed")},
                "samplers": _SAMPLERS,
                "ignore_eos": True,
                "cache_prompt": False,
                "return_tokens": True,
            }
        )
        times, tokens = found["timings"], found.get("tokens", [])
        seconds, prefill = times["predicted_ms"] / 1e3, times["prompt_ms"] / 1e3
        drafted, accepted = times.get("draft_n", 0), times.get("draft_n_accepted", 0)
        peak = peak_bytes(server.process.pid)
        return self._measurement(times["predicted_n"], seconds, prefill, drafted, accepted, peak, tokens)

    def _measurement(
        self,
        counted: int,
        seconds: float,
        prefill: float,
        drafted: float,
        accepted: float,
        peak: int,
        tokens: Sequence[int] = (),
    ) -> Measurement:
        steps = counted - int(accepted)
        # One pass of the draft for each token it drafted.
        weights = (steps + self._draft_share * drafted) / counted
        first = prefill + seconds / max(1, steps)
        return Measurement(counted, seconds, first, list(tokens), steps, weights, peak_bytes=peak)


class Server:
    """llama-server on a free port of this machine.

    Args:
        command: the program and its options.
        slots: requests that it works on at once.
        output: where what it prints goes, as in Popen.

    Raises:
        RuntimeError: it does not become ready.
    """

    def __init__(self, command: list[str], slots: int = 1, output: int | None = None) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        self._url = f"http://127.0.0.1:{port}"
        # Only this machine is asked, whatever proxy is set.
        self._opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        command = [*command, "--host", "127.0.0.1", "--port", str(port), "-np", str(slots)]
        self.process = subprocess.Popen(command, stdout=output, stderr=output)
        deadline = time.monotonic() + _SECONDS_TO_LOAD
        while not self._ready():
            if self.process.poll() is not None:
                raise RuntimeError(f"llama-server ended with {self.process.returncode} while loading")
            if time.monotonic() > deadline:
                self.close()
                raise RuntimeError("llama-server does not become ready")
            time.sleep(0.1)

    def complete(self, request: dict[str, Any]) -> dict[str, Any]:
        """Post a completion. Raises RuntimeError where it is refused, or the server ends."""
        with self._post(request) as response:
            found: dict[str, Any] = json.load(response)
            return found

    def stream(self, request: dict[str, Any]) -> Iterator[dict[str, Any]]:
        """The same piece by piece, for a request that asks for that."""
        with self._post(request) as response:
            for line in response:
                if line.startswith(b"data: {"):
                    yield json.loads(line.removeprefix(b"data: "))

    @contextlib.contextmanager
    def _post(self, request: dict[str, Any]) -> Iterator[Any]:
        data = json.dumps(request).encode()
        headers = {"Content-Type": "application/json"}
        try:
            with self._opener.open(urllib.request.Request(f"{self._url}/completion", data, headers)) as response:
                yield response
        except urllib.error.HTTPError as error:
            raise RuntimeError(f"llama-server refused: {error.read().decode('utf-8', 'replace')[:200]}") from error
        except (urllib.error.URLError, OSError) as error:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(5)
            raise RuntimeError(f"llama-server ended with {self.process.poll()}: {error}") from error

    def close(self) -> None:
        """End it."""
        self.process.kill()
        self.process.wait()

    def _ready(self) -> bool:
        try:
            with self._opener.open(f"{self._url}/health", timeout=5) as response:
                return bool(response.status == 200)
        except (urllib.error.URLError, OSError):
            return False


def _run(command: list[str]) -> tuple[int, str, int]:
    """Exit status, what was printed, and most bytes of memory, of a program."""
    with (
        tempfile.TemporaryFile() as said,
        subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=said, stderr=subprocess.STDOUT) as process,
    ):
        peak = 0
        while process.poll() is None:
            peak = max(peak, peak_bytes(process.pid))
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(0.2)
        said.seek(0)
        return process.returncode, said.read().decode("utf-8", "replace"), peak


def _numbers(pattern: str, text: str) -> list[float]:
    found = re.search(pattern, text)
    if found is None:
        raise RuntimeError(f"no line like '{pattern}' in what it printed; is this llama.cpp too old or too new?")
    return [float(group) for group in found.groups()]
