"""What a server is told when it starts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from pystaged.options import SAMPLING

STALL = 60.0  # seconds that a client may take to send a request, or to read anything of what it is sent


@dataclass(frozen=True, slots=True)
class Settings:
    """How a server behaves.

    name: of its model, for clients. strict: a request must name it. defaults: options of every text, by the names of
    TextOptions, that a request may set otherwise; max_tokens bounds what it may ask for, too.
    api_keys: a request needs one of them; none for anybody. allowed_hosts: names the server may be called by, besides
    this machine's own and addresses. cors_origins: pages of which sites may use it, "*" for all.
    parallel: texts that are written at once; queue: texts that may wait for that.
    max_body: bytes of a request. timeout: seconds for a request in all; queue_timeout: for it to wait.
    metrics_prefix: of the names in /metrics. log: called with a line for each request; None for no lines.
    """

    name: str
    strict: bool = False
    defaults: dict[str, Any] = field(default_factory=dict)
    api_keys: Sequence[str] = ()
    allowed_hosts: Sequence[str] = ()
    cors_origins: Sequence[str] = ()
    parallel: int = 16
    queue: int = 64
    max_body: int = 4 << 20
    timeout: float = 3600.0
    queue_timeout: float = 600.0
    metrics_prefix: str = "pystaged:"
    log: Any = None

    @property
    def sampling(self) -> dict[str, Any]:
        """Of the defaults, those of SamplingConfig."""
        return {name: self.defaults[name] for name in SAMPLING if name in self.defaults}
