"""Check host, origin and API key before anything else."""

from __future__ import annotations

import hmac
import ipaddress
import os
import re
from collections.abc import Container, Sequence
from contextlib import suppress
from pathlib import Path

from starlette.datastructures import Headers
from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp, Receive, Scope, Send

from pystaged.platform.files import read_small
from pystaged.server.errors import ApiError
from pystaged.server.settings import Settings

_HOST = re.compile(r"([a-z0-9_.-]+|\[[0-9a-f:.]+\])(:[0-9]+)?")
_MOST_KEYS = 1 << 20  # bytes of a file
_PUBLIC = ("/", "/health", "/v1/health")


def guarded(app: ASGIApp, settings: Settings) -> ASGIApp:
    """An application that refuses requests with a wrong host, origin or key, and answers the pages of listed sites.

    A page of another site can make its host name resolve to this server (DNS rebinding). Its requests then carry that
    name, so only the server's own names and addresses are accepted. Other sites' requests carry their origin.
    Starlette's TrustedHostMiddleware has no pattern for all addresses.
    """
    origins = {origin.lower().rstrip("/") for origin in settings.cors_origins}
    hosts = {"localhost", *(name.lower() for name in settings.allowed_hosts)}
    keys = [key.encode() for key in settings.api_keys]

    def problem(path: str, headers: Headers) -> ApiError | None:
        host, origin = headers.get("host", ""), headers.get("origin", "").lower().rstrip("/")
        if not _is_ours(host, hosts):
            return ApiError(403, f"this server does not accept the host name {host!r}; allow it with --allowed-host")
        is_listed = "*" in origins or origin in origins
        if origin and not is_listed and origin.partition("://")[2] != host.lower():
            return ApiError(403, f"pages of {origin!r} may not use this server; allow them with --cors-origin")
        if keys and path not in _PUBLIC and not _has_key(headers, keys):
            return ApiError(401, "invalid API key", code="invalid_api_key", headers={"WWW-Authenticate": "Bearer"})
        return None

    async def guard(scope: Scope, receive: Receive, send: Send) -> None:
        error = problem(scope["path"], Headers(scope=scope)) if scope["type"] == "http" else None
        await (error.response(scope["path"]) if error else app)(scope, receive, send)

    return CORSMiddleware(guard, [*origins], allow_methods=("GET", "POST"), allow_headers=("*",)) if origins else guard


def _is_ours(host: str, hosts: Container[str]) -> bool:
    found = _HOST.fullmatch(host.lower())
    name = found[1].strip("[]") if found else ""
    with suppress(ValueError):
        return name in hosts or name.endswith(".localhost") or bool(ipaddress.ip_address(name))
    return False


def _has_key(headers: Headers, keys: Sequence[bytes]) -> bool:
    given = headers.get("x-api-key", "")
    scheme, _, token = headers.get("authorization", "").partition(" ")
    if scheme.lower() == "bearer":
        given = token.strip()
    # All keys are compared, so that the time does not reveal which one matched.
    matches = [hmac.compare_digest(given.encode("latin-1"), key) for key in keys]  # headers are latin-1
    return any(matches)


def read_keys(given: Sequence[str], file: Path | None = None) -> list[str]:
    """All API keys: those given, that of the environment, and the lines of a file. Raises OSError and ValueError for a
    file that cannot be read or has none, or an empty key."""
    lines: list[str] = []
    if file is not None:
        lines = [line for line in read_small(file, _MOST_KEYS).decode().splitlines() if line.strip()]
        if not lines:
            raise ValueError(f"{file} has no keys")
    keys = [key.strip() for key in [*given, *filter(None, [os.environ.get("PYSTAGED_API_KEY")]), *lines]]
    if not all(keys):
        raise ValueError("an API key must not be empty")
    return keys
