"""Requests that cannot be answered: the error names the member that is wrong, on all interfaces alike."""

from __future__ import annotations

from typing import Any

import pytest
from support.paths import table
from support.server import Server

# Members without which a request is refused.
_NEEDED: dict[str, Any] = {
    "/v1/completions": {"prompt": "a", "max_tokens": 4},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 4},
    "/v1/responses": {"input": "a"},
}
_BREAKER = "e" + "x y " * 1_000_000
_LARGE: list[list[Any]] = [
    ["/v1/completions", {"stop": [" " * 600_000, " " * 599_999]}, "stop", "stop has "],
    ["/v1/completions", {"dry_multiplier": 1, "dry_sequence_breakers": [_BREAKER]}, "dry_sequence_breakers", ""],
]


@pytest.mark.parametrize(("path", "options", "param", "words"), [*table("refused"), *_LARGE])
def test_what_cannot_be_answered_names_the_parameter(
    server: Server, path: str, options: dict[str, Any], param: str, words: str
) -> None:
    for stream in (False, True):
        status, body = server.ask(path, _NEEDED.get(path, {}) | {"stream": stream} | options)
        assert (status, body["error"]["param"]) == (400, param), body
        assert body["error"]["type"] in ("invalid_request_error", "exceed_context_size_error")
        assert body["error"]["message"].startswith(words)
