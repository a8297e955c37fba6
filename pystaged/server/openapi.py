"""/openapi.json: the OpenAPI description of requests and answers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, get_type_hints

from pydantic import TypeAdapter
from pydantic.json_schema import JsonSchemaMode

from pystaged.server import answer_types
from pystaged.server.answer import Answer
from pystaged.server.errors import is_ollamas

_REF = "#/components/schemas/{model}"
_ERRORS = {"400": "Invalid request", "401": "Invalid key", "413": "Too large", "429": "Queue full", "503": "Not now"}
# An event's data is the JSON of a part, or [DONE].
_EVENT = {"type": "object", "properties": {"data": {"type": "string"}}, "required": ["data"]}


def describe(
    version: str,
    given: dict[str, Callable[..., Any]],
    computed: dict[str, Callable[..., Any]],
    written: dict[str, Callable[..., Answer]],
) -> dict[str, Any]:
    """Describe the server in OpenAPI 3.1.

    Args:
        given: GET endpoints by path; the return annotation is the answer's type.
        computed: POST endpoints by path; the annotation of `request` is the request's type.
        written: generation endpoints by path; they return an Answer, whose `described` is the answer's type.
    """
    requests = {path: get_type_hints(answer)["request"] for path, answer in {**computed, **written}.items()}
    answers = {path: get_type_hints(answer)["return"] for path, answer in {**given, **computed, **written}.items()}
    answers |= {path: answers[path].described for path in written}
    kinds: list[tuple[str, JsonSchemaMode, TypeAdapter[Any]]] = [
        *((path, "validation", TypeAdapter(each)) for path, each in requests.items()),
        *((path, "serialization", TypeAdapter(each)) for path, each in answers.items()),
        ("error", "serialization", TypeAdapter(answer_types.Error)),
    ]
    schemas, definitions = TypeAdapter.json_schemas(kinds, ref_template=_REF)
    error = _json(schemas["error", "serialization"])
    errors = {status: {"description": what, "content": error} for status, what in _ERRORS.items()}
    paths: dict[str, Any] = {}
    for path, answer in answers.items():
        told: dict[str, Any] = {"200": {"description": "The answer", "content": _json(schemas[path, "serialization"])}}
        if path in given:
            paths[path] = {"get": {"summary": answer.__doc__, "responses": told | {"401": errors["401"]}}}
            continue
        if path in written:
            if is_ollamas(path):
                told["200"]["content"]["application/x-ndjson"] = {"schema": schemas[path, "serialization"]}
            else:
                told["200"]["content"]["text/event-stream"] = {"schema": _EVENT}
        body = {"required": True, "content": _json(schemas[path, "validation"])}
        paths[path] = {"post": {"summary": requests[path].__doc__, "requestBody": body, "responses": told | errors}}
    metrics = {"200": {"description": "The metrics", "content": {"text/plain": {"schema": {"type": "string"}}}}}
    paths["/metrics"] = {"get": {"summary": "Metrics for Prometheus", "responses": metrics | {"401": errors["401"]}}}
    return {
        "openapi": "3.1.0",
        "info": {"title": "pystaged", "version": version},
        "paths": paths,
        "components": {"schemas": definitions.get("$defs", {})},
    }


def _json(schema: Any) -> dict[str, Any]:
    return {"application/json": {"schema": schema}}
