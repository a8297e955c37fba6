"""Errors in OpenAI's format, and in Ollama's."""

from __future__ import annotations

import json
from typing import Any

from starlette.responses import Response

from pystaged._core import ContextFullError, DeviceError
from pystaged.chat import ChatTemplateError
from pystaged.sampling.definitions import GrammarError

_KINDS = {  # others are invalid_request_error
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    429: "rate_limit_error",
    500: "server_error",
    503: "unavailable_error",
}


class ApiError(Exception):
    """An error that is sent as the answer.

    status: of HTTP. message: text for people. param: the request member that is wrong. code: identifier for programs.
    kind: the error's `type`; by default that of the status. headers: of the answer. more: members of the error object.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        kind: str | None = None,
        headers: dict[str, str] | None = None,
        **more: Any,
    ) -> None:
        super().__init__(message)
        self.status, self.headers = status, headers or {}
        self.body: dict[str, Any] = {
            "type": "error",
            "error": {
                "message": message,
                "type": kind or _KINDS.get(status, "invalid_request_error"),
                "param": param,
                "code": code or status,
                **more,
            },
        }

    def json(self, path: str = "") -> bytes:
        """The body for a path, in ASCII, because a message may quote invalid Unicode."""
        return json.dumps({"error": str(self)} if is_ollamas(path) else self.body).encode()

    def response(self, path: str) -> Response:
        """The answer to a request for a path."""
        return Response(self.json(path), self.status, self.headers, media_type="application/json")


def is_ollamas(path: str) -> bool:
    """Whether a path is of Ollama's interface."""
    return path.startswith("/api/")


def unsupported(param: str, why: str) -> ApiError:
    """The error for an unsupported request member."""
    return ApiError(400, why, param=param, code="unsupported_parameter")


def too_long(num_tokens: int, n_ctx: int, most: int, param: str) -> ApiError:
    """The error for a prompt longer than the context, in the words that clients search for. most: the context length of
    the model."""
    more = ", or start the server with a longer context (--n-ctx)" if most > n_ctx else ""
    return ApiError(
        400,
        f"This model's maximum context length is {n_ctx} tokens, but the prompt has {num_tokens}. Shorten the "
        f"prompt{more}.",
        param=param,
        code="context_length_exceeded",
        kind="exceed_context_size_error",
        n_prompt_tokens=num_tokens,
        n_ctx=n_ctx,
    )


def ending() -> ApiError:
    """The error for answers that are cut when the server shuts down."""
    return ApiError(503, "the server is shutting down", code="server_ends", headers={"Connection": "close"})


def explained(error: BaseException, other: ApiError | None = None) -> ApiError:
    """The error that says what another one says. other: for those whose messages are not sent."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, ContextFullError):
        return ApiError(400, str(error), code="context_length_exceeded", kind="exceed_context_size_error")
    if isinstance(error, ChatTemplateError):
        return ApiError(400, str(error), param="messages")
    if isinstance(error, GrammarError):
        return ApiError(400, str(error))
    if isinstance(error, (DeviceError, MemoryError)):
        return ApiError(503, str(error) or "there is not enough memory")
    return other or ApiError(500, "internal error; the server's log has details")
