"""Settings of a server."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from pystaged.options.table import declared, declared_in
from pystaged.result import GenerationResult

STALL = 60.0  # longest time, in seconds, to send a request, or without reading any of the answer


@dataclass(frozen=True, slots=True)
class Settings:
    """Settings of a server; those of SERVER have their description there.

    name: an only model's name for clients. defaults: TextOptions that requests may override; max_tokens is also a
    limit. think: whether models that can reason do so, None for what their templates prefer; requests may override it.
    max_body: most bytes of a request. log: called with a line for each request, or None. written: called with the
    results of each request, in the request's task, before the end of its answer is sent.
    """

    name: str
    defaults: dict[str, Any] = field(default_factory=dict)
    think: bool | None = None
    max_body: int = 4 << 20
    log: Any = None
    written: Callable[[Sequence[GenerationResult]], object] | None = None
    # fmt: off
    api_keys: Sequence[str] = declared((), flags=("--api-key",), help=
        "API key that requests need; may be repeated, then any is valid; also PYSTAGED_API_KEY.")
    allowed_hosts: Sequence[str] = declared((), flags=("--allowed-host",), help=
        "Further host name of the server; may be repeated.")
    cors_origins: Sequence[str] = declared((), flags=("--cors-origin",), help=
        "Site whose pages may use the server, such as https://example.com, or * for all; may be repeated.")
    parallel: int = declared(16, "Maximum number of sequences decoded at once.", ge=1)
    queue: int = declared(512, "Maximum number of sequences waiting; more are refused.", ge=0)
    timeout: float = declared(3600.0, "Longest time of a request, in seconds.", ge=1)
    queue_timeout: float = declared(600.0, "Longest wait in the queue, in seconds.", ge=1)
    keep_alive: float = declared(300.0, ge=0, help=
        "Of several models: seconds that one stays loaded without requests.")
    default: str | None = declared(None, help=
        "Of several models: the one that answers requests for any other name.")
    strict: bool = declared(False, "Requests must name the model.")
    reasoning_budget: int | None = declared(None, ge=-1, help=
        "Maximum tokens of an answer's reasoning, -1 for no limit.")
    billing_header: bool = declared(False, help=
        "Keep Claude Code's line x-anthropic-billing-header, whose change at every turn prevents reuse.")
    metrics_prefix: str = declared("pystaged:", "Prefix of the names in /metrics.")
    # fmt: on


SERVER = declared_in(Settings)
