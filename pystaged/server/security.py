"""Check host, origin and API key before anything else."""

from __future__ import annotations

import hmac
import ipaddress
import re
from collections.abc import Sequence

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from pystaged.server.errors import ApiError
from pystaged.server.reply import Sender
from pystaged.server.settings import Settings

_HOST = re.compile(r"([a-z0-9_.-]+|\[[0-9a-f:.]+\])(:[0-9]+)?")
_PUBLIC = ("/", "/health", "/v1/health")


class Guard:
    """Refuses requests with a wrong host, origin or key.

    A page of another site can make its host name resolve to this server (DNS rebinding). Its requests then carry that
    name, so only the server's own names and addresses are accepted. Other sites' requests carry their origin.
    """

    def __init__(self, app: ASGIApp, settings: Settings) -> None:
        self._app = app
        self._hosts = {"localhost", *(name.lower() for name in settings.allowed_hosts)}
        self._origins = {origin.lower().rstrip("/") for origin in settings.cors_origins}
        self._keys = [key.encode() for key in settings.api_keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        origin = headers.get("origin", "").lower().rstrip("/")
        is_listed = bool(origin) and ("*" in self._origins or origin in self._origins)

        async def send_with_origin(message: Message) -> None:
            if is_listed and message["type"] == "http.response.start":
                found = MutableHeaders(scope=message)
                found["Access-Control-Allow-Origin"] = origin
                found.add_vary_header("Origin")
            await send(message)

        error = self._problem(scope, headers, origin, is_listed)
        if error:
            await Sender(send_with_origin, scope["path"]).fail(error)
        elif is_listed and scope["method"] == "OPTIONS":
            asked = headers.get("access-control-request-headers", "*")
            allowed = {"Access-Control-Allow-Methods": "GET, POST", "Access-Control-Allow-Headers": asked}
            await Sender(send_with_origin, scope["path"]).whole(b"", 200, allowed)
        else:
            await self._app(scope, receive, send_with_origin)

    def _problem(self, scope: Scope, headers: Headers, origin: str, is_listed: bool) -> ApiError | None:
        host = headers.get("host", "")
        if not self._is_ours(host):
            return ApiError(403, f"this server does not accept the host name {host!r}; allow it with --allowed-host")
        if origin and not is_listed and origin.partition("://")[2] != host.lower():
            return ApiError(403, f"pages of {origin!r} may not use this server; allow them with --cors-origin")
        is_asked_before = is_listed and scope["method"] == "OPTIONS"
        if self._keys and scope["path"] not in _PUBLIC and not is_asked_before and not self._has_key(headers):
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


def read_keys(given: Sequence[str]) -> list[str]:
    """Strip white space around API keys. Raises ValueError for an empty one."""
    keys = [key.strip() for key in given]
    if not all(keys):
        raise ValueError("an API key must not be empty")
    return keys


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True
