"""Checks an installed wheel that has llama.cpp's libraries inside: generates, verifies, quantizes and serves."""

import json
import socket
import subprocess
import sys
import tempfile
import time
from importlib import util
from pathlib import Path
from urllib.error import URLError
from urllib.request import ProxyHandler, Request, build_opener

COMMAND = [sys.executable, "-m", "pystaged"]
PROMPT = "def fibonacci(n):"


def main() -> None:
    if util.find_spec("llama_cpp"):
        sys.exit("llama-cpp-python is installed here; the wheel must be tested without it")
    # Elsewhere than in the repository, where Python would find the source.
    with tempfile.TemporaryDirectory() as folder:
        receipt, smaller = (str(Path(folder) / name) for name in ("text.receipt", "draft.gguf"))
        usual = ("--model", "bundled", "--max-tokens", "40", "--temperature", "0")
        text = run(folder, "generate", PROMPT, *usual, "--receipt", receipt)
        run(folder, "verify", receipt)
        run(folder, "quantize", "bundled-draft", smaller, "--type", "q4_k_m", "--allow-requantize")
        run(folder, "generate", PROMPT, "--model", smaller, "--max-tokens", "8", "--device", "ggml-cpu")
        served = serve(folder)
        if served not in text:
            sys.exit(f"generate wrote {text!r}, and the server {served!r}")
        print(run(folder, "info"))


def run(folder: str, *arguments: str) -> str:
    done = subprocess.run(
        [*COMMAND, *arguments], cwd=folder, stdout=subprocess.PIPE, text=True, timeout=600, check=True
    )
    return done.stdout


def serve(folder: str) -> str:
    """The continuation of the prompt that the server writes."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = str(free.getsockname()[1])
    server = subprocess.Popen([*COMMAND, "serve", "bundled", "--port", port], cwd=folder)
    body = json.dumps({"prompt": PROMPT, "max_tokens": 40, "temperature": 0}).encode()
    request = Request(f"http://127.0.0.1:{port}/v1/completions", body, {"Content-Type": "application/json"})
    opener = build_opener(ProxyHandler({}))
    try:
        end = time.monotonic() + 600
        while server.poll() is None and time.monotonic() < end:
            try:
                with opener.open(request, timeout=60) as answer:
                    return str(json.load(answer)["choices"][0]["text"])
            except URLError:  # not yet there, or it still loads the model
                time.sleep(0.5)
    finally:
        server.terminate()
        server.wait(60)
    sys.exit("the server did not answer")


if __name__ == "__main__":
    main()
