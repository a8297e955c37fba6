"""/openapi.json: the OpenAPI description of paths and requests; what answers have, their makers describe."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, get_type_hints

from pydantic import TypeAdapter

from pystaged.server.errors import is_ollamas

_Endpoints = Mapping[str, Callable[..., Any]]  # by path
_REF = "#/components/schemas/{model}"
_ERRORS = {"400": "Invalid request", "401": "Invalid key", "413": "Too large", "429": "Queue full", "503": "Not now"}
# An event's data is the JSON of a part, or [DONE].
_EVENT = {"type": "object", "properties": {"data": {"type": "string"}}, "required": ["data"]}


def describe(version: str, given: _Endpoints, computed: _Endpoints, written: _Endpoints) -> dict[str, Any]:
    """Describe the server in OpenAPI 3.1.

    Args:
        given: GET endpoints by path.
        computed: POST endpoints by path; the annotation of `request` is the request's type.
        written: generation endpoints by path, as before.
    """
    requests = {path: request_of(answer) for path, answer in [*computed.items(), *written.items()]}
    schemas, definitions = TypeAdapter.json_schemas(
        [(path, "validation", TypeAdapter(each)) for path, each in requests.items()], ref_template=_REF
    )
    errors = {status: _told(what, {"type": "object"}) for status, what in _ERRORS.items()}
    paths: dict[str, Any] = {
        "/metrics": {"get": {"summary": "Metrics for Prometheus", "responses": {"200": {"description": "The metrics"}}}}
    }
    for path, function in given.items():
        responses = {"200": _told("The answer", {}), "401": errors["401"]}
        paths[path] = {"get": {"summary": function.__doc__, "responses": responses}}
    for path, request in requests.items():
        answer = _told("The answer", {})
        if path in written:
            kind, part = ("application/x-ndjson", {}) if is_ollamas(path) else ("text/event-stream", _EVENT)
            answer["content"][kind] = {"schema": part}
        body = {"required": True, "content": _json(schemas[path, "validation"])}
        paths[path] = {
            "post": {"summary": request.__doc__, "requestBody": body, "responses": {"200": answer, **errors}}
        }
    return {
        "openapi": "3.1.0",
        "info": {"title": "pystaged", "version": version},
        "paths": paths,
        "components": {"schemas": definitions.get("$defs", {})},
    }


def request_of(answer: Callable[..., Any]) -> Any:
    """The request type of a function."""
    return get_type_hints(answer)["request"]


def _told(what: str, schema: Any) -> dict[str, Any]:
    return {"description": what, "content": _json(schema)}


def _json(schema: Any) -> dict[str, Any]:
    return {"application/json": {"schema": schema}}
