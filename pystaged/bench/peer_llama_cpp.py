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
from pathlib import Path
from typing import Any

from pystaged.bench.worker import peak_bytes

_SECONDS_TO_LOAD = 300.0


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
        self._server = _Server(self._command) if Path(setup["program"]).stem == "llama-server" else None

    def run(self, job: dict[str, Any]) -> dict[str, Any]:
        return self._server_reply(self._server, job) if self._server else self._program_reply(job)

    def close(self) -> None:
        if self._server:
            self._server.close()

    def _program_reply(self, job: dict[str, Any]) -> dict[str, Any]:
        sampling = job["sampling"]
        options = {
            "-p": job["text"],
            "-n": job["max_tokens"],
            "--temp": sampling["temperature"],
            "--top-k": sampling["top_k"],
            "--top-p": sampling["top_p"],
            "--min-p": sampling["min_p"],
            "--samplers": "top_k;top_p;min_p;temperature",
            "-s": sampling["seed"],
        }
        command = [*self._command, "--no-escape", "--ignore-eos"]
        command += [str(word) for option in options.items() for word in option]
        code, said, peak = _run(command)
        if code != 0:
            raise RuntimeError(f"{Path(self._command[0]).name} ended with {code}: {_last_line(said)}")
        tokens, seconds = _numbers(r"decoded\s+(\d+) tokens in\s+([\d.]+) seconds", said)
        _, prefill = _numbers(r"encoded\s+(\d+) tokens in\s+([\d.]+) seconds", said)
        (drafted,) = _numbers(r"n_drafted\s*=\s*(\d+)", said)
        (accepted,) = _numbers(r"n_accept\s*=\s*(\d+)", said)
        return self._reply(int(tokens), seconds, prefill, drafted, accepted) | {"peak_bytes": peak}

    def _server_reply(self, server: _Server, job: dict[str, Any]) -> dict[str, Any]:
        sampling = job["sampling"]
        found = server.complete(
            {
                "prompt": job["prompt"],
                "n_predict": job["max_tokens"],
                "temperature": sampling["temperature"],
                "top_k": sampling["top_k"],
                "top_p": sampling["top_p"],
                "min_p": sampling["min_p"],
                "seed": sampling["seed"],
                "samplers": ["top_k", "top_p", "min_p", "temperature"],
                "ignore_eos": True,
                "cache_prompt": False,
                "return_tokens": True,
            }
        )
        times = found["timings"]
        drafted, accepted = times.get("draft_n", 0), times.get("draft_n_accepted", 0)
        reply = self._reply(
            times["predicted_n"], times["predicted_ms"] / 1e3, times["prompt_ms"] / 1e3, drafted, accepted
        )
        return reply | {"tokens": found.get("tokens", []), "peak_bytes": peak_bytes(server.pid)}

    def _reply(self, tokens: int, seconds: float, prefill: float, drafted: float, accepted: float) -> dict[str, Any]:
        steps = tokens - int(accepted)
        return {
            "counted": tokens,
            "seconds": seconds,
            "first_token_seconds": prefill + seconds / max(1, steps),
            "steps": steps,
            # One pass of the draft for each token it drafted.
            "relative_weight_bytes": (steps + self._draft_share * drafted) / tokens,
        }


class _Server:
    """llama-server on a free port of this machine."""

    def __init__(self, command: list[str]) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        self._url = f"http://127.0.0.1:{port}"
        # Only this machine is asked, whatever proxy is set.
        self._opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        self._process = subprocess.Popen([*command, "--host", "127.0.0.1", "--port", str(port), "-np", "1"])
        deadline = time.monotonic() + _SECONDS_TO_LOAD
        while not self._ready():
            if self._process.poll() is not None:
                raise RuntimeError(f"llama-server ended with {self._process.returncode} while loading")
            if time.monotonic() > deadline:
                self.close()
                raise RuntimeError("llama-server does not become ready")
            time.sleep(0.1)

    def complete(self, request: dict[str, Any]) -> dict[str, Any]:
        """Post a completion."""
        data = json.dumps(request).encode()
        headers = {"Content-Type": "application/json"}
        try:
            with self._opener.open(urllib.request.Request(f"{self._url}/completion", data, headers)) as response:
                found: dict[str, Any] = json.load(response)
                return found
        except urllib.error.HTTPError as error:
            raise RuntimeError(f"llama-server refused: {error.read().decode('utf-8', 'replace')[:200]}") from error
        except (urllib.error.URLError, OSError) as error:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(5)
            raise RuntimeError(f"llama-server ended with {self._process.poll()}: {error}") from error

    @property
    def pid(self) -> int:
        """Of the process."""
        return self._process.pid

    def close(self) -> None:
        """End it."""
        self._process.terminate()
        try:
            self._process.wait(5)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

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


def _last_line(text: str) -> str:
    return next((line.strip() for line in reversed(text.splitlines()) if line.strip()), "")[:200]
