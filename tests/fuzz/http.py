"""Requests, as bytes on a socket: no answer is a fault of the server's, and the next request is answered."""

from __future__ import annotations

import json
import random
import socket
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from support.families import CASES
from support.paths import table
from support.random_models import write
from support.server import NAME, live

import pystaged
from fuzz.mutate import damage, damage_value, spelled
from fuzz.target import Case, Target, short
from pystaged.decoding.policy import FixedPolicy

BODIES: list[tuple[str, dict[str, Any]]] = table("requests")
GETS = ["/", "/health", "/v1/models", f"/v1/models/{NAME}", "/props", "/metrics", "/tokenizer_info", "/openapi.json"]
GETS += ["/api/tags", "/api/ps", "/api/version"]
HEADERS = [*table("odd_headers"), "X-Long: " + "x" * 70_000]
SECONDS = 600
PATIENCE = 0.5  # with requests that may never end


class Http(Target):
    """A server in this process."""

    refusals = ()

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        path = write(folder / "model.gguf", replace(CASES["llama"], context=1024))
        self._engine = pystaged.load(path, policy=FixedPolicy(2, 3, 6), recycle=False, report=lambda _: None)
        self._live = live(self._engine, defaults={"max_tokens": 8})
        self._server = self._live.__enter__()

    def sound(self) -> Iterator[Case]:
        for path, body in BODIES:
            yield self.of(path, request("POST", path, json.dumps(body).encode()), True)
        for path in GETS:
            yield self.of(path, request("GET", path, b""), True)

    def case(self, r: random.Random) -> Case:
        path, body = r.choice(BODIES)
        data = spelled(r, damage_value(r, body)) if r.random() < 0.8 else damage(r, json.dumps(body).encode())
        whole = request("POST", path, data)
        what = r.random()
        if what < 0.1:
            method = r.choice(["GET", "PUT", "OPTIONS", "HEAD", "\0"])
            whole = request(method, r.choice([*GETS, path, "*", "//", "/%ff%00"]), data)
        elif what < 0.2:
            head, _, rest = whole.partition(b"\r\n")
            whole = b"\r\n".join([head, r.choice(HEADERS).encode("utf-8"), rest])
        elif what < 0.3:
            whole = damage(r, whole)
        elif what < 0.4:
            half = r.randrange(len(data) + 1)
            parts = b"".join(b"%x\r\n%s\r\n" % (len(part), part) for part in (data[:half], data[half:]) if part)
            parts = damage(r, parts) if r.random() < 0.5 else parts
            whole = request("POST", path, b"")[:-4].replace(b"\r\nContent-Length: 0", b"\r\nTransfer-Encoding: chunked")
            whole += b"\r\n\r\n" + parts + b"0\r\n\r\n"
        return self.of(short(whole), whole, False, r.random() < 0.1)

    def use(self, data: bytes, well: bool, leaves: bool = False) -> None:
        answer = self._ask(data, SECONDS if well else PATIENCE, leaves=leaves)
        if leaves:
            answer = self._ask(request("GET", "/health", b""))
        if not answer and not well:
            return
        head, _, body = answer.partition(b"\r\n\r\n")
        status = int(head.split(b" ", 2)[1])
        if status == 500 or (well and status != 200):
            raise AssertionError(f"{answer!r}")
        is_json = b"application/json" in head and b"content-length" in head
        if body and status == 200 and is_json and b"HTTP/1.1 " not in body:
            json.loads(body)

    def _ask(self, data: bytes, patience: float = SECONDS, *, leaves: bool = False) -> bytes:
        """The whole answer; where none comes for so many seconds, the server is told that no more will be sent."""
        with socket.create_connection(("127.0.0.1", self._server.port), timeout=patience) as connection:
            answer = b""
            with suppress(ConnectionError):
                connection.sendall(data)
                while not leaves and (part := self._part(connection)):
                    answer += part
        return answer

    def _part(self, connection: socket.socket) -> bytes:
        try:
            return connection.recv(1 << 16)
        except TimeoutError:
            if connection.gettimeout() == SECONDS:
                raise
            connection.settimeout(SECONDS)
            connection.shutdown(socket.SHUT_WR)
            return connection.recv(1 << 16)


def request(method: str, path: str, body: bytes) -> bytes:
    lines = [f"{method} {path} HTTP/1.1", "Host: localhost", "Connection: close", "Content-Type: application/json"]
    return "\r\n".join([*lines, f"Content-Length: {len(body)}", "", ""]).encode() + body
