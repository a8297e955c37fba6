"""Settings of a server."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from pystaged.options import SAMPLING

STALL = 60.0  # seconds that a client may take to send a request, or to read anything of what it is sent


@dataclass(frozen=True, slots=True)
class Settings:
    """Settings of a server.

    name: the model's name for clients. strict: requests must name it. defaults: TextOptions that requests may override;
    max_tokens is also a limit. api_keys: a request needs one of them; none needed where there are none.
    allowed_hosts: names of the server in requests, besides localhost and addresses. cors_origins: sites whose pages may
    use it, "*" for all. parallel: texts in progress at most; queue: texts waiting at most.
    max_body: bytes of a request at most. timeout, queue_timeout: longest time of a request in all and in the queue, in
    seconds. metrics_prefix: of the names in /metrics. log: called with a line for each request, or None.
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
