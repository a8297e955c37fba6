"""A Hugging Face hub on loopback: what huggingface_hub asks of the real one to find and download a model's files."""

from __future__ import annotations

import hashlib
import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, NamedTuple
from urllib.parse import unquote, urlsplit

TOKEN = "hf_testtoken"


class Request(NamedTuple):
    """One that was answered."""

    method: str
    path: str
    range: str
    token: str
    status: int


@dataclass
class Repository:
    """A model repository.

    Args:
        files: contents by name.
        large: names kept as LFS does: behind a redirect, known by their SHA-256.
        about: more fields of the API's answer.
        gated, private: what a request without the token is told.
    """

    files: dict[str, bytes]
    large: tuple[str, ...] = (".gguf", ".safetensors")
    about: dict[str, Any] = field(default_factory=dict)
    gated: bool = False
    private: bool = False

    @property
    def commit(self) -> str:
        digest = hashlib.sha1(usedforsecurity=False)
        for name, data in sorted(self.files.items()):
            digest.update(name.encode() + b"\0" + data)
        return digest.hexdigest()

    def describe(self, name: str) -> dict[str, Any]:
        """The API's answer about it."""
        siblings = []
        for file, data in self.files.items():
            entry: dict[str, Any] = {"rfilename": file, "size": len(data), "blobId": git_hash(data)}
            if file.endswith(self.large):
                entry["lfs"] = {"sha256": hashlib.sha256(data).hexdigest(), "size": len(data), "pointerSize": 130}
            siblings.append(entry)
        return {"id": name, "modelId": name, "sha": self.commit, "siblings": siblings, "tags": []} | self.about


@dataclass
class Fault:
    """What goes wrong once with requests whose path holds `path`: a status, a cut connection, or altered bytes."""

    path: str
    status: int = 0
    cut_after: int = -1
    corrupt: bool = False
    method: str = "GET"


class Hub:
    """The server's state; `url` is its endpoint."""

    def __init__(self) -> None:
        self.repositories: dict[str, Repository] = {}
        self.faults: list[Fault] = []
        self.requests: list[Request] = []
        self.url = self.cdn_url = ""
        self._lock = threading.Lock()

    def take_fault(self, method: str, path: str) -> Fault | None:
        """The next fault for a request, used up."""
        with self._lock:
            for fault in self.faults:
                if fault.method == method and fault.path in path:
                    self.faults.remove(fault)
                    return fault
        return None

    def blob(self, digest: str) -> bytes | None:
        """A large file by its SHA-256."""
        for repository in self.repositories.values():
            for data in repository.files.values():
                if hashlib.sha256(data).hexdigest() == digest:
                    return data
        return None


def git_hash(data: bytes) -> str:
    """Of a file, as git has it."""
    return hashlib.sha1(f"blob {len(data)}\0".encode() + data, usedforsecurity=False).hexdigest()


def _handler(hub: Hub) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *_: object) -> None:
            pass

        def do_GET(self) -> None:
            path = unquote(urlsplit(self.path).path)
            fault = hub.take_fault(self.command, path)
            if fault and fault.status:
                self.refuse(fault.status, "")
            elif found := re.fullmatch(r"/api/models/([^/]+/[^/]+)", path):
                if self.allowed(found[1]):
                    self.send(json.dumps(hub.repositories[found[1]].describe(found[1])).encode(), {}, None)
            elif found := re.fullmatch(r"/([^/]+/[^/]+)/resolve/([^/]+)/(.+)", path):
                if self.allowed(found[1]):
                    self.resolve(hub.repositories[found[1]], found[2], found[3], fault)
            elif (found := re.fullmatch(r"/cdn/([0-9a-f]{64})", path)) and (data := hub.blob(found[1])) is not None:
                self.send(data, {"ETag": f'"{found[1]}"'}, fault)
            else:
                self.refuse(404, "")

        do_HEAD = do_GET

        def allowed(self, name: str) -> bool:
            repository = hub.repositories.get(name)
            shown = self.headers.get("Authorization", "")
            known = shown == f"Bearer {TOKEN}"
            if shown and not known:
                self.refuse(401, "", {"X-Error-Message": "Invalid credentials in Authorization header"})
                return False
            if repository is None or (repository.private and not known):
                # As the hub does, so that nobody learns which private repositories there are.
                self.refuse(404 if known else 401, "RepoNotFound" if known else "")
                return False
            if repository.gated and not known:
                self.refuse(401, "GatedRepo")
                return False
            return True

        def resolve(self, repository: Repository, revision: str, name: str, fault: Fault | None) -> None:
            if revision not in ("main", repository.commit):
                self.refuse(404, "RevisionNotFound")
            elif name not in repository.files:
                self.refuse(404, "EntryNotFound", {"X-Repo-Commit": repository.commit})
            elif name.endswith(repository.large):
                data = repository.files[name]
                digest = hashlib.sha256(data).hexdigest()
                headers = {
                    "Location": f"{hub.cdn_url}/cdn/{digest}",
                    "X-Repo-Commit": repository.commit,
                    "X-Linked-Etag": f'"{digest}"',
                    "X-Linked-Size": str(len(data)),
                }
                self.answer(302, headers, b"")
            else:
                data = repository.files[name]
                self.send(data, {"ETag": f'"{git_hash(data)}"', "X-Repo-Commit": repository.commit}, fault)

        def send(self, data: bytes, headers: dict[str, str], fault: Fault | None) -> None:
            """A file, or the range of it that was asked for."""
            status, total = 200, len(data)
            if found := re.fullmatch(r"bytes=(\d+)-", self.headers.get("Range", "")):
                start = int(found[1])
                if start >= total:
                    self.refuse(416, "")
                    return
                status, data = 206, data[start:]
                headers = headers | {"Content-Range": f"bytes {start}-{total - 1}/{total}"}
            if fault and fault.corrupt:
                data = bytes([data[0] ^ 1]) + data[1:]
            cut = fault.cut_after if fault else -1
            self.answer(status, headers | {"Accept-Ranges": "bytes"}, data, cut)

        def refuse(self, status: int, code: str, headers: dict[str, str] | None = None) -> None:
            self.answer(status, (headers or {}) | ({"X-Error-Code": code} if code else {}), b"{}")

        def answer(self, status: int, headers: dict[str, str], data: bytes, cut_after: int = -1) -> None:
            token = self.headers.get("Authorization", "").removeprefix("Bearer ")
            request = Request(self.command, unquote(self.path), self.headers.get("Range", ""), token, status)
            hub.requests.append(request)
            self.send_response(status)
            for name, value in headers.items():
                self.send_header(name, value)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            if self.command == "HEAD":
                return
            if cut_after >= 0:
                self.wfile.write(data[:cut_after])
                self.close_connection = True
                return
            self.wfile.write(data)

    return Handler


@contextmanager
def running() -> Iterator[Hub]:
    """A hub and, on a host of its own, what its redirects lead to."""
    hub = Hub()
    servers = [ThreadingHTTPServer(("127.0.0.1", 0), _handler(hub)) for _ in range(2)]
    hub.url, hub.cdn_url = (
        f"http://{host}:{server.server_port}" for host, server in zip(("127.0.0.1", "localhost"), servers, strict=True)
    )
    threads = [threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}) for server in servers]
    for thread in threads:
        thread.start()
    try:
        yield hub
    finally:
        for server in servers:
            server.shutdown()
            server.server_close()
        for thread in threads:
            thread.join()
