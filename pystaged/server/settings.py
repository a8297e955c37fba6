"""Settings of a server."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, get_type_hints

from pystaged.options.table import Option
from pystaged.result import GenerationResult

STALL = 60.0  # longest time, in seconds, to send a request, or without reading any of the answer


def _option(default: Any, help: str, **more: Any) -> Any:
    """A field that is an option of the command line, too; arguments as in Option."""
    return field(default=default, metadata={"option": Option(default, help, **more)})


@dataclass(frozen=True, slots=True)
class Settings:
    """Settings of a server; those of SERVER have their description there.

    name: an only model's name for clients. defaults: TextOptions that requests may override; max_tokens is also a
    limit.
    think: whether models that can reason do so, None for what their templates prefer; requests may override it.
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
    api_keys: Sequence[str] = _option((), flags=("--api-key",), help=
        "API key that requests need; may be repeated, then any is valid; also PYSTAGED_API_KEY.")
    allowed_hosts: Sequence[str] = _option((), flags=("--allowed-host",), help=
        "Further host name of the server; may be repeated.")
    cors_origins: Sequence[str] = _option((), flags=("--cors-origin",), help=
        "Site whose pages may use the server, such as https://example.com, or * for all; may be repeated.")
    parallel: int = _option(16, "Maximum number of sequences decoded at once.", ge=1)
    queue: int = _option(512, "Maximum number of sequences waiting; more are refused.", ge=0)
    timeout: float = _option(3600.0, "Longest time of a request, in seconds.", ge=1)
    queue_timeout: float = _option(600.0, "Longest wait in the queue, in seconds.", ge=1)
    keep_alive: float = _option(300.0, ge=0, help=
        "Of several models: seconds that one stays loaded without requests.")
    default: str | None = _option(None, help=
        "Of several models: the one that answers requests for any other name.")
    strict: bool = _option(False, "Requests must name the model.")
    reasoning_budget: int | None = _option(None, ge=-1, help=
        "Maximum tokens of an answer's reasoning, -1 for no limit.")
    billing_header: bool = _option(False, help=
        "Keep Claude Code's line x-anthropic-billing-header, whose change at every turn prevents reuse.")
    metrics_prefix: str = _option("pystaged:", "Prefix of the names in /metrics.")
    # fmt: on


SERVER: dict[str, Option] = {
    each.name: replace(each.metadata["option"], type=get_type_hints(Settings)[each.name])
    for each in fields(Settings)
    if each.metadata
}
