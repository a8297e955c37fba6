"""Devices by name: "cpu" has pystaged's kernels, all others run llama.cpp."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import cast

from pystaged import _core
from pystaged._core import Model, Session
from pystaged.backends.rpc import RemoteModel, RemoteSession, endpoints
from pystaged.platform.memory import available_memory


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
    found = [Device(*fields) for fields in _core.devices()]
    # ggml says that all of the CPU's memory is free, and its own name is that of our kernels.
    return [
        replace(each, name="ggml-cpu", free_bytes=available_memory()) if each.name == "CPU" else each for each in found
    ]


def candidates(name: str, kv: str = "f16") -> list[str]:
    """Names of the devices among which "auto" chooses for a type of KV cache; any other name is the only candidate."""
    if name != "auto":
        return [name]
    return ["cpu", *(device.name for device in devices() if device.is_gpu and kv == "f16")]


def check(name: str, kv: str = "f16") -> str:
    """Check the form of a device's name and its type of KV cache before anything is loaded; returns the name without
    spaces, and the names that are ours in small letters.

    Raises:
        ValueError: an empty name, "rpc:" without HOST:PORT, or a type other than "f16" on a device other than the CPU.
    """
    name = "".join(name.split())
    if name.lower() in ("cpu", "auto", "ggml-cpu") or name.lower().startswith("rpc:"):
        name = name.lower()
    if not name:
        raise ValueError("a device needs a name; 'cpu' always exists, `pystaged info` lists the others")
    if name.startswith("rpc:"):
        endpoints(name)
    elif len(names := name.lower().split(",")) > 1 and (len({*names}) < len(names) or {"cpu", "auto", ""} & {*names}):
        raise ValueError(f"a list of devices has each once, and neither cpu nor auto, not {name!r}")
    if name not in ("cpu", "auto") and kv != "f16":
        raise ValueError(f"keys and values of type {kv} are for the device cpu, not {name}; leave them at f16")
    return name


def load_model(path: bytes, kernel: str, num_threads: int, device: str, kv: str = "f16") -> Model:
    """Load the model of a GGUF file on a device.

    Raises:
        DeviceError: no such device, or no room on it.
        ModelError, ValueError: as in Model.
    """
    device = check(device, kv)
    if device.startswith("rpc:"):
        return cast(Model, RemoteModel(path, kernel, num_threads, device))
    return Model(path, kernel, num_threads, device, kv=kv)


def reserve(model: Model, num_cells: int) -> None:
    """Let llama.cpp's context of a model have room for so many tokens of all texts together."""
    if isinstance(model, RemoteModel):
        model.servers.call("reserve", num_cells)
    else:
        model.reserve(num_cells)


def failure(model: Model) -> str:
    """Why a model computes nothing any more; "" where it does."""
    return model.servers.failure if isinstance(model, RemoteModel) else ""


def close_model(model: Model) -> None:
    """Disconnect from RPC servers, which frees their weights. A local model is freed with its last session."""
    if isinstance(model, RemoteModel):
        model.servers.close()


def open_session(model: Model, n_ctx: int = 0) -> Session:
    """Open a context of a local or remote model; errors as in Session."""
    if isinstance(model, RemoteModel):
        return cast(Session, RemoteSession(model, n_ctx))
    return Session(model, n_ctx)
