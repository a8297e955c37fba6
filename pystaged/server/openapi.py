"""/openapi.json: the description of requests and answers."""

from __future__ import annotations

from typing import Any

from pydantic import TypeAdapter
from pydantic.json_schema import JsonSchemaMode

from pystaged.server import answer_types, messages, request_types, responses

_REF = "#/components/schemas/{model}"
_ERRORS = {"400": "Not to be answered", "401": "No key", "413": "Too large", "429": "Too busy", "503": "Not now"}

_WHOLE = ("/v1/messages/count_tokens",)  # has no events

# An event's data are JSON, as the whole answer is, or the word [DONE].
_EVENT = {"type": "object", "properties": {"data": {"type": "string"}}, "required": ["data"]}


def describe(version: str) -> dict[str, Any]:
    """The description, OpenAPI 3.1."""
    requests: dict[str, tuple[Any, Any]] = {
        "/v1/completions": (request_types.CompletionRequest, answer_types.Completion),
        "/v1/chat/completions": (request_types.ChatRequest, answer_types.ChatCompletion),
        "/v1/responses": (responses.ResponseRequest, responses.Response),
        "/v1/messages": (messages.MessageRequest, messages.Message),
        "/v1/messages/count_tokens": (messages.MessageRequest, messages.TokenCount),
        "/completion": (request_types.NativeRequest, list[answer_types.Native] | answer_types.Native),
        "/tokenize": (request_types.TokenizeRequest, answer_types.Tokens),
        "/detokenize": (request_types.DetokenizeRequest, answer_types.Detokenized),
    }
    reads: dict[str, Any] = {
        "/v1/models": answer_types.Models,
        "/health": answer_types.Health,
        "/props": answer_types.Properties,
        "/tokenizer_info": answer_types.TokenizerInfo,
    }
    kinds: list[tuple[str, JsonSchemaMode, TypeAdapter[Any]]] = [
        *((path, "validation", TypeAdapter(each)) for path, (each, _) in requests.items()),
        *((path, "serialization", TypeAdapter(each)) for path, (_, each) in requests.items()),
        *((path, "serialization", TypeAdapter(each)) for path, each in reads.items()),
        ("error", "serialization", TypeAdapter(answer_types.Error)),
    ]
    schemas, definitions = TypeAdapter.json_schemas(kinds, ref_template=_REF)
    paths: dict[str, Any] = {}
    errors = {
        status: {"description": what, "content": _json(schemas["error", "serialization"])}
        for status, what in _ERRORS.items()
    }
    for path, (request, _) in requests.items():
        content = _json(schemas[path, "serialization"])
        if "stream" in request.model_fields and path not in _WHOLE:
            content["text/event-stream"] = {"schema": _EVENT}
        paths[path] = {
            "post": {
                "summary": request.__doc__,
                "requestBody": {"required": True, "content": _json(schemas[path, "validation"])},
                "responses": {"200": {"description": "The answer", "content": content}, **errors},
            }
        }
    for path, answer in reads.items():
        content = _json(schemas[path, "serialization"])
        told = {"200": {"description": "The answer", "content": content}, "401": errors["401"]}
        paths[path] = {"get": {"summary": answer.__doc__, "responses": told}}
    metrics = {"200": {"description": "The metrics", "content": {"text/plain": {"schema": {"type": "string"}}}}}
    paths["/metrics"] = {"get": {"summary": "Metrics, for Prometheus", "responses": metrics | {"401": errors["401"]}}}
    return {
        "openapi": "3.1.0",
        "info": {"title": "pystaged", "version": version},
        "paths": paths,
        "components": {"schemas": definitions.get("$defs", {})},
    }


def _json(schema: Any) -> dict[str, Any]:
    return {"application/json": {"schema": schema}}
