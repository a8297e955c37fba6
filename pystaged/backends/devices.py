"""Devices by name: "cpu" has pystaged's kernels, all others run llama.cpp."""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

from pystaged import _core
from pystaged._core import Model, Session
from pystaged.backends.rpc import RemoteModel, RemoteSession, endpoints


@dataclass(frozen=True, slots=True)
class Device:
    """A device of ggml's registry. free_bytes, total_bytes: of the device's memory."""

    name: str
    description: str
    is_gpu: bool
    free_bytes: int
    total_bytes: int


def devices() -> list[Device]:
    """ggml's devices on this machine."""
    return [Device(*fields) for fields in _core.devices()]


def candidates(name: str, kv: str = "f16") -> list[str]:
    """Names of the devices among which "auto" chooses for a type of KV cache; any other name is the only candidate."""
    if name != "auto":
        return [name]
    return ["cpu", *(device.name for device in devices() if device.is_gpu and kv == "f16")]


def check(name: str, kv: str = "f16") -> None:
    """Check the form of a device's name and its type of KV cache before anything is loaded.

    Raises:
        ValueError: an empty name, "rpc:" without HOST:PORT, or a type other than "f16" on a device other than the CPU.
    """
    if not name:
        raise ValueError("a device needs a name; 'cpu' always exists, `pystaged info` lists the others")
    if name.startswith("rpc:"):
        endpoints(name)
    if name not in ("cpu", "auto") and kv != "f16":
        raise ValueError(f"keys and values of type {kv} are for the device cpu, not {name}; leave them at f16")


def load_model(path: bytes, kernel: str, num_threads: int, device: str, kv: str = "f16") -> Model:
    """Load the model of a GGUF file on a device.

    Raises:
        DeviceError: no such device, or no room on it.
        ModelError, ValueError: as in Model.
    """
    check(device, kv)
    if device.startswith("rpc:"):
        return cast(Model, RemoteModel(path, kernel, num_threads, device))
    return Model(path, kernel, num_threads, device, kv=kv)


def reserve(model: Model, num_cells: int) -> None:
    """Let llama.cpp's context of a model have room for so many tokens of all texts together."""
    if isinstance(model, RemoteModel):
        model.servers.call("reserve", num_cells)
    else:
        model.reserve(num_cells)


def close_model(model: Model) -> None:
    """Disconnect from RPC servers, which frees their weights. A local model is freed with its last session."""
    if isinstance(model, RemoteModel):
        model.servers.close()


def open_session(model: Model, n_ctx: int = 0) -> Session:
    """Open a context of a local or remote model; errors as in Session."""
    if isinstance(model, RemoteModel):
        return cast(Session, RemoteSession(model, n_ctx))
    return Session(model, n_ctx)
