"""Settings of a server."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from pystaged.options import SAMPLING
from pystaged.result import GenerationResult

STALL = 60.0  # longest time, in seconds, to send a request, or without reading any of the answer


@dataclass(frozen=True, slots=True)
class Settings:
    """Settings of a server.

    name: the model's name for clients. strict: requests must give that name. defaults: TextOptions that requests
    may override; max_tokens is also a limit. think: whether models that can reason do so, None for what their
    templates prefer; reasoning_budget: most tokens of it, None for no limit; requests may override both. api_keys:
    keys of which a request needs one; empty for no check. allowed_hosts: host names to accept, besides localhost
    and addresses. cors_origins: sites whose pages may use the server, "*" for all. parallel: most sequences in
    progress; queue: most sequences waiting. max_body: most bytes of a request. timeout, queue_timeout: longest time
    of a request, in all and in the queue, in seconds. billing_header: whether the system messages of /v1/messages keep
    Claude Code's x-anthropic-billing-header line, which changes with every turn. metrics_prefix: of the names in
    /metrics. log: called with a line for each request, or None. written: called with the results of each request, in
    the request's task, before the end of its answer is sent.
    """

    name: str
    strict: bool = False
    defaults: dict[str, Any] = field(default_factory=dict)
    think: bool | None = None
    reasoning_budget: int | None = None
    api_keys: Sequence[str] = ()
    allowed_hosts: Sequence[str] = ()
    cors_origins: Sequence[str] = ()
    parallel: int = 16
    queue: int = 64
    max_body: int = 4 << 20
    timeout: float = 3600.0
    queue_timeout: float = 600.0
    billing_header: bool = False
    metrics_prefix: str = "pystaged:"
    log: Any = None
    written: Callable[[Sequence[GenerationResult]], object] | None = None

    @property
    def sampling(self) -> dict[str, Any]:
        """The defaults that belong to SamplingConfig."""
        return {name: self.defaults[name] for name in SAMPLING if name in self.defaults}
