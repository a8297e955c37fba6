"""What the server tells of itself and its models: /v1/models, /health, /props, /tokenizer_info and /openapi.json; and
its page."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Callable, Mapping
from importlib.resources import files
from typing import Any, get_type_hints

from pydantic import TypeAdapter
from starlette.responses import HTMLResponse

import pystaged
from pystaged.chat.format import spelled
from pystaged.options.recommended import ANSWER_TOKENS, toy_words
from pystaged.platform.memory import loadable_memory
from pystaged.server.errors import ApiError, is_ollamas
from pystaged.server.models import Models, State

_TEMPLATE = "tokenizer.chat_template"
_Endpoints = Mapping[str, Callable[..., Any]]  # by path
_REF = "#/components/schemas/{model}"
_ERRORS = {"400": "Invalid request", "401": "Invalid key", "413": "Too large", "429": "Queue full", "503": "Not now"}
# An event's data is the JSON of a part, or [DONE].
_EVENT = {"type": "object", "properties": {"data": {"type": "string"}}, "required": ["data"]}


def models(models: Models) -> dict[str, Any]:
    """List the models."""
    return {"object": "list", "data": [model(models, name) for name in models.all]}


def model(models: Models, name: str) -> dict[str, Any]:
    """Describe the model of that name; one that is not loaded by its size alone. Raises ApiError (404) for others."""
    served = models.known(name)
    if served is None:
        raise ApiError(404, f"there is no model {name!r}", param="model", code="model_not_found")
    state, meta = served.state, {"size": served.size}
    if state:
        engine = state.engine
        meta |= {
            "n_vocab": engine.tokenizer.num_tokens,
            "n_ctx": engine.n_ctx,
            "n_ctx_train": engine.model.max_context,
            "n_embd": engine.model.width,
        }
    created = state.created if state else models.created
    return {"id": served.name, "object": "model", "created": created, "owned_by": "pystaged", "meta": meta}


def health(models: Models) -> dict[str, Any]:
    """Health check; the server is ready as soon as it answers. Raises ApiError (503) if no loaded model can write."""
    loaded = models.loaded()
    if loaded and all(state.engine.failure for state in loaded):
        raise ApiError(503, "the device is lost; the server's log names it")  # addresses are not for everybody
    return {"status": "ok"}


def tokenizer_info(state: State) -> dict[str, Any]:
    """Properties of the vocabulary, for clients that count tokens."""
    tokenizer = state.engine.tokenizer
    return {
        "bos_token": spelled(tokenizer, tokenizer.bos) or None,
        "eos_token": spelled(tokenizer, tokenizer.eos) or None,
        "pad_token": None,
        "chat_template": tokenizer.metadata.get(_TEMPLATE),
        "vocab_size": tokenizer.num_tokens,
        "fingerprint": tokenizer.fingerprint,
    }


def properties(state: State) -> dict[str, Any]:
    """The server's properties, without file paths."""
    engine, tokenizer = state.engine, state.engine.tokenizer
    answers = {"max_tokens": min(ANSWER_TOKENS, engine.n_ctx), "stop_loops": True}
    params = answers | engine.recommended_sampling | state.settings.defaults
    params["max_tokens"] = min(params["max_tokens"], engine.n_ctx)
    return {
        "default_generation_settings": {"n_ctx": engine.n_ctx, "params": params},
        "total_slots": state.settings.parallel,
        "model_alias": state.name,
        "chat_template": tokenizer.metadata.get(_TEMPLATE, ""),
        "bos_token": spelled(tokenizer, tokenizer.bos),
        "eos_token": spelled(tokenizer, tokenizer.eos),
        "build_info": f"pystaged {pystaged.__version__}",
        "system_fingerprint": state.fingerprint,
        "draft": engine.draft_name or "n-grams",
        "note": toy_words(tokenizer.metadata, loadable_memory()),
    }


def page() -> HTMLResponse:
    """The page, with a policy that allows only its own script and this server."""
    text = files("pystaged.server").joinpath("page.html").read_text("utf-8")
    policy = (
        f"default-src 'none'; script-src {_hash_of(text, 'script')}; style-src {_hash_of(text, 'style')}; connect-src "
        "'self'; img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )
    headers = {
        "Content-Security-Policy": policy,
        "X-Content-Type-Options": "nosniff",
        "Referrer-Policy": "no-referrer",
        "Cache-Control": "no-cache",
    }
    return HTMLResponse(text, headers=headers)


def _hash_of(text: str, tag: str) -> str:
    """The policy's source expression for the page's only element of this kind."""
    content = text.partition(f"<{tag}>")[2].partition(f"</{tag}>")[0]
    return f"'sha256-{base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()}'"


def describe(given: _Endpoints, computed: _Endpoints, written: _Endpoints) -> dict[str, Any]:
    """Describe the server in OpenAPI 3.1, by path: `given` GET endpoints; `computed` and `written` POST endpoints,
    whose annotation of `request` is the request's type, and of which the latter generate."""
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
        responses = {"200": answer, **errors}
        paths[path] = {"post": {"summary": request.__doc__, "requestBody": body, "responses": responses}}
    return {
        "openapi": "3.1.0",
        "info": {"title": "pystaged", "version": pystaged.__version__},
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
