"""`pystaged rpc-server`: lend this machine's devices to another."""

from __future__ import annotations

import signal

from pystaged import _core
from pystaged.cli.console import warn_of_strangers
from pystaged.cli.options import HOST, Threads, check_device, option


def rpc_server(
    host: str = HOST,
    port: int = option(50052, "Port to listen on.", min=1, max=65535),
    device: str = option("ggml-cpu", "Device to lend: ggml-cpu, metal, gpu, or a name of info.", callback=check_device),
    threads: Threads = 0,
) -> None:
    """Run layers of models for other machines, which use it with --device rpc:HOST:PORT.

    Example: pystaged rpc-server --host 127.0.0.1 --port 50052
    """
    warn_of_strangers(
        host,
        f"anyone who reaches {host}:{port} can use this machine: the protocol has neither passwords nor encryption. "
        "Listen only on a network you trust.",
    )
    # The server waits in C++, where Python cannot handle Ctrl-C.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    _core.serve_devices(f"{host}:{port}", device, threads or _core.choose_cores().few)
