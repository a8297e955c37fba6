"""Where a model runs: by name, with our kernels on the CPU or with ggml's operations on any of its devices."""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

from pystaged import _core
from pystaged._core import Model, Session
from pystaged.backends.rpc import RemoteModel, RemoteSession, endpoints


@dataclass(frozen=True, slots=True)
class Device:
    """A device of ggml's registry. free_bytes and total_bytes: of its memory."""

    name: str
    description: str
    is_gpu: bool
    free_bytes: int
    total_bytes: int


def devices() -> list[Device]:
    """ggml's devices on this machine."""
    return [Device(*fields) for fields in _core.devices()]


def candidates(name: str, kv: str = "f16") -> list[str]:
    """The devices among which "auto" chooses, for keys and values of a type; any other name is the only candidate."""
    if name != "auto":
        return [name]
    return ["cpu", *(device.name for device in devices() if device.is_gpu and kv == "f16")]


def check(name: str, kv: str = "f16") -> None:
    """Refuse what is no name of a device, and keys and values that it has not, before anything is loaded.

    Raises:
        ValueError: an empty name, "rpc:" without HOST:PORT, or another type than "f16" on other devices than the CPU.
    """
    if not name:
        raise ValueError("a device needs a name; 'cpu' is there everywhere, `pystaged info` lists the others")
    if name.startswith("rpc:"):
        endpoints(name)
    if name not in ("cpu", "auto") and kv != "f16":
        raise ValueError(f"keys and values of type {kv} are for the device cpu, not {name}; leave them at f16")


def load_model(path: bytes, kernel: str, num_threads: int, device: str, kv: str = "f16") -> Model:
    """The model of a GGUF file on a device.

    Raises:
        DeviceError: no such device, or no room on it.
        ModelError, ValueError: as Model.
    """
    check(device, kv)
    if device.startswith("rpc:"):
        return cast(Model, RemoteModel(path, kernel, num_threads, device))
    return Model(path, kernel, num_threads, device, kv=kv)


def close_model(model: Model) -> None:
    """Hang up on RPC servers; their weights are freed. A model of this machine goes with its last session."""
    if isinstance(model, RemoteModel):
        model.servers.close()


def open_session(model: Model, n_ctx: int = 0) -> Session:
    """A new context of a model, wherever that is; errors as Session."""
    if isinstance(model, RemoteModel):
        return cast(Session, RemoteSession(model, n_ctx))
    return Session(model, n_ctx)
