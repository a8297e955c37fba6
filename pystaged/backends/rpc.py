"""Models that llama.cpp splits over RPC servers, in a child process, and stand-ins for Model and Session.

ggml aborts the process when a server dies or its answer is invalid. The client therefore runs in a child process, whose
end raises an exception here.
"""

from __future__ import annotations

import math
import os
import socket
import struct
from contextlib import suppress
from functools import partial
from typing import Any

from pystaged import _core
from pystaged._core import DeviceError, Sampling
from pystaged.platform.process import Child, ChildError, ChildSilentError

_CONNECT_SECONDS, _PROBE_SECONDS = 5.0, 1.0  # before a model is loaded, and to find which of some servers is lost
_ANSWER_SECONDS = 60.0  # longest time without an answer or a sign of life; PYSTAGED_RPC_TIMEOUT overrides it
_MOST_SECONDS = 1e6  # sockets take no larger times
_ROWS = 64  # rows of one prefill pass
_HELLO = 14  # command number, the same in every version of the protocol
_CAPABILITIES = 24  # bytes
KEPT = ...  # stands in calls for the sampling that the host has stored
_PROPERTIES = ("tokens", "num_bytes", "num_pending", "closed")
_METHODS = ("follow", "commit", "discard", "keep_states", "rewind", "stretch", "logits")
_SIZES = ("vocab_size", "weight_bytes", "cell_bytes", "state_bytes", "kept_state_bytes", "most_pending")


def endpoints(device: str) -> list[str]:
    """Split "rpc:HOST:PORT,HOST:PORT" into servers.

    Raises:
        ValueError: a part is not HOST:PORT.
    """
    found = device.removeprefix("rpc:").split(",")
    for endpoint in found:
        host, _, port = endpoint.rpartition(":")
        if not host or ":" in host or not port.isascii() or not port.isdigit() or not 0 < int(port) < 1 << 16:
            raise ValueError(f"'{endpoint}' in device '{device}' is not HOST:PORT; write rpc:192.168.0.7:50052")
    return found


def check_server(endpoint: str, most_seconds: float = math.inf) -> None:
    """Connect to a server, check its protocol version, and disconnect; 5 seconds at most.

    Raises:
        DeviceError: the installed llama-cpp-python has no RPC; or no server answers there, or with another version.
    """
    own = _core.rpc_version()
    host, _, port = endpoint.rpartition(":")
    seconds = min(most_seconds, _CONNECT_SECONDS)
    try:
        with socket.create_connection((host, int(port)), seconds) as connection:
            connection.sendall(struct.pack("<BQ", _HELLO, _CAPABILITIES) + bytes(_CAPABILITIES))
            with connection.makefile("rb") as answer:
                head = answer.read(8 + 3)
    except TimeoutError:
        raise DeviceError(
            f"RPC server {endpoint} does not answer within {seconds:g} seconds; does it serve another client?"
        ) from None
    except OSError as error:
        raise DeviceError(f"RPC server {endpoint} cannot be reached: {error.strerror or error}") from None
    if len(head) < 8 + 3 or not 3 <= struct.unpack("<Q", head[:8])[0] <= 1 << 10:
        raise DeviceError(f"{endpoint} is not a ggml RPC server; start one there with: pystaged rpc-server")
    major, minor = head[8], head[9]
    if major != own[0] or minor > own[1]:
        raise DeviceError(
            f"RPC server {endpoint} has version {major}.{minor} of the protocol, this machine has {own[0]}.{own[1]}; "
            "install the same version of pystaged on both machines"
        )


def _timeout() -> float:
    """Seconds that servers may be silent. Raises ValueError."""
    given = os.environ.get("PYSTAGED_RPC_TIMEOUT", _ANSWER_SECONDS)
    with suppress(ValueError):
        if 0 < (seconds := float(given)) < _MOST_SECONDS:
            return seconds
    raise ValueError(f"PYSTAGED_RPC_TIMEOUT is a number of seconds, not {given!r}")


class Servers:
    """Connection to RPC servers that hold one model, in a child process. Calls are serialized.

    Args:
        device: "rpc:HOST:PORT,HOST:PORT".

    Raises:
        DeviceError: a server cannot be reached, or has another version.
    """

    def __init__(self, device: str) -> None:
        self._endpoints = endpoints(device)
        for endpoint in self._endpoints:
            check_server(endpoint)
        self._timeout = _timeout()
        self._child = Child("pystaged.backends.rpc_host")
        self.failure = ""  # why every call fails

    def call(self, name: str, *args: object) -> Any:
        """Call a method of the child's Host, see rpc_host.py; returns its result or raises its error.

        Raises:
            DeviceError: a server died or did not answer in time, in this call or an earlier one.
        """
        if self.failure:
            raise DeviceError(self.failure)
        try:
            return self._child.call(name, *args, timeout=self._timeout)
        except ChildError as error:
            self.failure = self.failure or self._describe(error)
            raise DeviceError(self.failure) from None

    def close(self) -> None:
        """End the child process; later calls raise DeviceError."""
        self.failure = self.failure or "the connection to the RPC servers is closed"
        self._child.close()

    def _describe(self, error: ChildError) -> str:
        lost = []
        for endpoint in self._endpoints:
            try:
                check_server(endpoint, _PROBE_SECONDS)
            except DeviceError:
                lost.append(endpoint)
        names = ", ".join(lost or self._endpoints)
        silent = isinstance(error, ChildSilentError)
        what = f"has been silent for {self._timeout:g} seconds" if silent else "ended the connection"
        return f"RPC server {names} {what}; start it again and load the model again"


class RemoteModel:
    """Stands in for _core.Model: has its properties."""

    def __init__(self, path: bytes, kernel: str, num_threads: int, device: str) -> None:
        self.servers = Servers(device)
        try:
            vars(self).update(self.servers.call("load", path, kernel, num_threads, device))
        except BaseException:
            self.servers.close()
            raise


class RemoteSession:
    """Stands in for _core.Session."""

    # llama.cpp keeps all tokens in layers with a sliding window.
    windowed_cell_bytes = most_windowed = 0

    def __init__(self, model: RemoteModel, n_ctx: int, begun: int | None = None) -> None:
        self._model, self._servers = model, model.servers
        if begun is None:
            begun, n_ctx = self._servers.call("open", n_ctx)
        self._id, self.n_ctx = begun, n_ctx
        self._sampling: Sampling | None = None  # that the host has stored

    def fork(self, length: int) -> RemoteSession:
        return RemoteSession(self._model, self.n_ctx, self._servers.call("fork", self._id, length))

    def run(self, kind: str, *arguments: Any) -> Any:
        """As pystaged.decoding.requests.perform."""
        if kind != "read":
            return self._servers.call("run", self._id, kind, *map(self._told, arguments))
        tokens, length = arguments[0], len(self.tokens)
        try:
            # One call for each pass, so that the timeout counts from the last pass and Ctrl-C is handled between.
            for first in range(0, len(tokens), _ROWS):
                self._servers.call("run", self._id, kind, tokens[first : first + _ROWS])
        except BaseException:
            with suppress(DeviceError):  # the servers are gone
                self.rewind(length)
            raise

    def reachable(self, length: int) -> int:
        return int(self._call("reachable", length)) if self.state_bytes else length

    def __getattr__(self, name: str) -> Any:
        """A property, what the model says of its sessions, or a method whose arguments are sent as they are."""
        if name in _SIZES:
            return getattr(self._model, name)
        if name in _PROPERTIES:
            return self._servers.call("get", self._id, name)
        if name in _METHODS:
            return partial(self._call, name)
        raise AttributeError(f"a session on an RPC server has no {name}")

    def close(self) -> None:
        try:
            self._call("close")
        except DeviceError:
            return  # the server is gone, and the session with it

    def _told(self, argument: object) -> object:
        """Send a sampling to the host if it is new, and return its stand-in. It is sent once, because its rules may
        be as large as the vocabulary."""
        if not isinstance(argument, Sampling):
            return argument
        if argument is not self._sampling:
            self._servers.call("keep", self._id, argument)
            self._sampling = argument
        return KEPT

    def _call(self, name: str, *args: object) -> Any:
        return self._servers.call("call", self._id, name, *args)
