"""The application: routes and endpoints."""

from __future__ import annotations

import asyncio
import json
import re
import time
from collections.abc import Callable
from typing import Any, NoReturn, TypeVar

import anyio
from anyio.to_thread import run_sync
from pydantic import BaseModel, ValidationError
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route

import pystaged
from pystaged.elsewhere import ADDRESSES
from pystaged.engine import Engine
from pystaged.server import chats, completions, messages, native, responses, settings, tokens
from pystaged.server.answer_types import ModelCard
from pystaged.server.errors import ApiError, ending, explained, refusal
from pystaged.server.messages import MessageRequest
from pystaged.server.openapi import describe
from pystaged.server.options import renamed
from pystaged.server.page import page
from pystaged.server.reply import Reply, Sender, encoded
from pystaged.server.request_types import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    ModelRequest,
    NativeRequest,
    TextRequest,
    TokenizeRequest,
)
from pystaged.server.responses import ResponseRequest
from pystaged.server.security import Guard
from pystaged.server.settings import Settings
from pystaged.server.state import State
from pystaged.validation import plainly

R = TypeVar("R", bound=BaseModel)
_FORMS = ("grammar", "json_schema", "response_format", "text", "tools")  # members that constrain a text
_MOST_FORMS = 4  # requests with such members that are checked at once
_MEMBER = re.compile("(?!(str|int|float|bool)$)[a-z_]+")


def application(engine: Engine, settings: Settings) -> Starlette:
    """The ASGI application of an engine."""
    server = _Endpoints(State(engine, settings))
    both = [
        ("/models", server.models, "GET"),
        ("/models/{name:path}", server.model, "GET"),
        ("/health", server.health, "GET"),
        ("/completions", server.completions, "POST"),
        ("/chat/completions", server.chats, "POST"),
        ("/responses", server.responses, "POST"),
        ("/messages", server.messages, "POST"),
        ("/messages/count_tokens", server.count_tokens, "POST"),
    ]
    routes = [Route(prefix + path, run, methods=[method]) for path, run, method in both for prefix in ("/v1", "")]
    routes += [
        Route("/", server.page),
        Route("/props", server.props),
        Route("/metrics", server.metrics),
        Route("/tokenizer_info", server.tokenizer_info),
        Route("/completion", server.native, methods=["POST"]),
        Route("/tokenize", server.tokenize, methods=["POST"]),
        Route("/detokenize", server.detokenize, methods=["POST"]),
        Route("/openapi.json", server.openapi),
    ]
    return Starlette(
        routes=routes,
        middleware=[Middleware(Guard, settings=settings)],
        exception_handlers={404: _nowhere, 405: _nowhere, ApiError: _refused, Exception: _refused},
    )


class _Endpoints:
    """The endpoints."""

    def __init__(self, state: State) -> None:
        self._state = state
        self._openapi = encoded(describe(pystaged.__version__))
        self._page = page()
        self._forms = anyio.CapacityLimiter(_MOST_FORMS)

    async def page(self, request: Request) -> Response:
        del request
        return self._page

    async def models(self, request: Request) -> Response:
        del request
        return _json({"object": "list", "data": [self._card()]})

    async def model(self, request: Request) -> Response:
        name = request.path_params["name"]
        if name != self._state.settings.name:
            raise ApiError(404, f"there is no model {name!r}", param="model", code="model_not_found")
        return _json(self._card())

    def _card(self) -> ModelCard:
        engine = self._state.engine
        return {
            "id": self._state.settings.name,
            "object": "model",
            "created": self._state.created,
            "owned_by": "pystaged",
            "meta": {
                "n_vocab": engine.tokenizer.num_tokens,
                "n_ctx": engine.n_ctx,
                "n_ctx_train": engine.model.max_context,
                "n_embd": engine.model.width,
                "size": engine.model.file_bytes,
            },
        }

    async def health(self, request: Request) -> Response:
        del request
        return _json({"status": "ok"})

    async def props(self, request: Request) -> Response:
        del request
        return _json(tokens.properties(self._state))

    async def metrics(self, request: Request) -> Response:
        del request
        text = self._state.metrics.text(self._state.engine, self._state.gate)
        headers = {"Process-Start-Time-Unix": str(self._state.created)}  # as llama-server has it
        return PlainTextResponse(text, headers=headers, media_type="text/plain; version=0.0.4; charset=utf-8")

    async def tokenizer_info(self, request: Request) -> Response:
        del request
        return _json(tokens.tokenizer_info(self._state))

    async def openapi(self, request: Request) -> Response:
        del request
        return Response(self._openapi, media_type="application/json")

    async def tokenize(self, request: Request) -> Response:
        asked = await self._read(request, TokenizeRequest)
        return await run_sync(lambda: _json(tokens.tokenize(self._state, asked)))

    async def detokenize(self, request: Request) -> Response:
        asked = await self._read(request, DetokenizeRequest)
        return await run_sync(lambda: _json(tokens.detokenize(self._state, asked)))

    async def completions(self, request: Request) -> Reply:
        return await self._text(request, CompletionRequest, completions.begin)

    async def native(self, request: Request) -> Reply:
        return await self._text(request, NativeRequest, native.begin)

    async def chats(self, request: Request) -> Reply:
        return await self._text(request, ChatRequest, chats.begin)

    async def responses(self, request: Request) -> Reply:
        return await self._text(request, ResponseRequest, responses.begin)

    async def messages(self, request: Request) -> Reply:
        return await self._text(request, MessageRequest, messages.begin)

    async def count_tokens(self, request: Request) -> Response:
        asked = await self._read(request, MessageRequest)
        try:
            return _json(await run_sync(messages.count, self._state, asked))
        except (ValueError, TypeError) as error:
            raise refusal(error) from None

    async def _text(self, request: Request, kind: type[Any], begin: Callable[[State, Any], Any]) -> Reply:
        path, begun = request.scope["path"], time.monotonic()
        answers: list[Any] = []

        def over(status: int) -> None:
            self._state.metrics.request_over(path, status)
            if self._state.settings.log:
                words = answers[0].summary() if answers else ""
                took = time.monotonic() - begun
                self._state.settings.log(f"{path} {status or 'left'} {took:.2f} s{words}")

        try:
            asked = await self._read(request, kind)
        except ApiError as error:
            over(error.status)
            raise

        async def work(sender: Sender) -> None:
            with self._state.gate.coming():
                try:
                    answers.append(await run_sync(begin, self._state, asked, limiter=self._limiter(asked)))
                except (ValueError, TypeError, ModuleNotFoundError) as error:
                    raise refusal(error) from None
            await answers[0].send(sender)

        return Reply(work, pings=bool(asked.stream), timeout=self._state.settings.timeout, over=over)

    def _limiter(self, asked: Any) -> anyio.CapacityLimiter | None:
        """The limit of threads that compile grammars, which may take long; None for the usual one."""
        return self._forms if any(getattr(asked, name, None) for name in _FORMS) else None

    async def _read(self, request: Request, kind: type[R]) -> R:
        """A request's body, checked. Raises ApiError."""
        body = await self._body(request)
        try:
            value = json.loads(body, parse_constant=_no_number)
        except (ValueError, RecursionError):
            raise ApiError(400, "the body is not valid JSON") from None
        if not isinstance(value, dict):
            raise ApiError(400, "the body must be a JSON object")
        if issubclass(kind, TextRequest):
            value = renamed(value)
        try:
            asked = kind.model_validate(value)
        except ValidationError as error:
            raise _invalid(error) from None
        if isinstance(asked, ModelRequest):
            self._state.check_model(asked)
        return asked

    async def _body(self, request: Request) -> bytes:
        most = self._state.settings.max_body
        body = bytearray()
        try:
            with anyio.fail_after(settings.STALL):
                async for part in request.stream():
                    body += part
                    if len(body) > most:
                        message = f"the request is larger than {most} bytes"
                        raise ApiError(413, message, code="request_too_large", headers={"Connection": "close"})
        except TimeoutError:
            raise ApiError(408, "the request did not come in time", headers={"Connection": "close"}) from None
        except asyncio.CancelledError:
            raise ending() from None
        except ClientDisconnect:
            raise ApiError(400, "the request was not finished") from None
        return bytes(body)


def _no_number(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON")


def _invalid(error: ValidationError) -> ApiError:
    """The error of a request's first invalid member."""
    found: list[tuple[list[str | int], str]] = []
    for each in error.errors(include_url=False, include_context=False, include_input=False):
        # The forms that a member may have are named by their types, too.
        path = [part for part in each["loc"] if isinstance(part, int) or _MEMBER.fullmatch(part)]
        found.append((path, plainly(each["msg"])))
    # The form that fits best fails last.
    parts, words = max(found, key=lambda each: (len(each[0]), [part for part in each[0] if isinstance(part, int)]))
    name = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in parts).lstrip(".")
    return ApiError(400, f"{name or 'the request'}: {words}", param=str(parts[0]) if parts else None)


def _json(value: Any) -> Response:
    return Response(encoded(value), media_type="application/json")


def _error(error: ApiError) -> Response:
    return Response(error.json(), error.status, error.headers, media_type="application/json")


async def _refused(request: Request, error: Exception) -> Response:
    del request
    return _error(explained(error))


async def _nowhere(request: Request, error: Exception) -> Response:
    path = request.scope["path"]
    words = f"there is no {request.method} {path}; {ADDRESSES.get(path, '/openapi.json says what there is')}"
    status, headers = getattr(error, "status_code", 404), getattr(error, "headers", None)
    return _error(ApiError(status, words, headers=headers))
