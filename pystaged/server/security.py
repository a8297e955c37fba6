"""Check host, origin and API key before anything else."""

from __future__ import annotations

import hmac
import ipaddress
import os
import re
from collections.abc import Sequence
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
    """An application that refuses requests with a wrong host, origin or key, and answers the pages of listed sites."""
    origins = {origin.lower().rstrip("/") for origin in settings.cors_origins}
    guard = _Guard(app, settings, origins)
    return CORSMiddleware(guard, [*origins], allow_methods=("GET", "POST"), allow_headers=("*",)) if origins else guard


class _Guard:
    """Refuses requests with a wrong host, origin or key.

    A page of another site can make its host name resolve to this server (DNS rebinding). Its requests then carry that
    name, so only the server's own names and addresses are accepted. Other sites' requests carry their origin.
    Starlette's TrustedHostMiddleware has no pattern for all addresses.
    """

    def __init__(self, app: ASGIApp, settings: Settings, origins: set[str]) -> None:
        self._app, self._origins = app, origins
        self._hosts = {"localhost", *(name.lower() for name in settings.allowed_hosts)}
        self._keys = [key.encode() for key in settings.api_keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        error = self._problem(scope) if scope["type"] == "http" else None
        await (error.response(scope["path"]) if error else self._app)(scope, receive, send)

    def _problem(self, scope: Scope) -> ApiError | None:
        headers = Headers(scope=scope)
        host, origin = headers.get("host", ""), headers.get("origin", "").lower().rstrip("/")
        if not self._is_ours(host):
            return ApiError(403, f"this server does not accept the host name {host!r}; allow it with --allowed-host")
        is_listed = "*" in self._origins or origin in self._origins
        if origin and not is_listed and origin.partition("://")[2] != host.lower():
            return ApiError(403, f"pages of {origin!r} may not use this server; allow them with --cors-origin")
        if self._keys and scope["path"] not in _PUBLIC and not self._has_key(headers):
            return ApiError(401, "invalid API key", code="invalid_api_key", headers={"WWW-Authenticate": "Bearer"})
        return None

    def _is_ours(self, host: str) -> bool:
        found = _HOST.fullmatch(host.lower())
        name = found[1].strip("[]") if found else ""
        return name in self._hosts or name.endswith(".localhost") or _is_address(name)

    def _has_key(self, headers: Headers) -> bool:
        given = headers.get("x-api-key", "")
        scheme, _, token = headers.get("authorization", "").partition(" ")
        if scheme.lower() == "bearer":
            given = token.strip()
        # All keys are compared, so that the time does not reveal which one matched.
        matches = [hmac.compare_digest(given.encode("latin-1"), key) for key in self._keys]  # headers are latin-1
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


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True
