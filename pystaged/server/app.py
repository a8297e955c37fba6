"""The ASGI application: routes and endpoints."""

from __future__ import annotations

import asyncio
import json
import re
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from functools import partial
from inspect import iscoroutinefunction
from typing import Any, TypeVar

import anyio
from anyio.to_thread import run_sync
from pydantic import BaseModel, ValidationError
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route

from pystaged.chat.calls import no_json
from pystaged.options.aliases import ADDRESSES, plainly
from pystaged.server import about, chats, completions, messages, ollama, responses, settings, tokens
from pystaged.server.answer import Answer
from pystaged.server.errors import ApiError, ending, explained
from pystaged.server.models import Models, State
from pystaged.server.options import renamed
from pystaged.server.reply import Reply, as_json, encoded
from pystaged.server.request_types import InfillRequest, TextRequest
from pystaged.server.security import guarded

R = TypeVar("R", bound=BaseModel)
Work = Callable[[Any, Reply], Awaitable[None]]
# The function for each path; /openapi.json takes the types of requests and answers from their annotations.
_LISTED: dict[str, Callable[[Models], Any]] = {
    "/v1/models": about.models,
    "/health": about.health,
    "/api/version": ollama.version,
    "/api/tags": ollama.tags,
    "/api/ps": ollama.running,
}
_GIVEN: dict[str, Callable[[State], Any]] = {"/props": about.properties, "/tokenizer_info": about.tokenizer_info}
_COMPUTED: dict[str, Callable[[State, Any], Any]] = {
    "/v1/messages/count_tokens": messages.count,
    "/apply-template": chats.template,
    "/tokenize": tokens.tokenize,
    "/detokenize": tokens.detokenize,
    "/v1/embeddings": tokens.embeddings,
    "/api/embed": ollama.embed,
    "/api/embeddings": ollama.embed_one,
    "/api/show": ollama.show,
}
_WRITTEN: dict[str, Callable[[State, Any], Answer]] = {
    "/v1/completions": completions.begin,
    "/v1/chat/completions": chats.begin,
    "/v1/responses": responses.begin,
    "/v1/messages": messages.begin,
    "/completion": completions.begin_native,
    "/infill": completions.infill,
    "/api/chat": ollama.chat,
    "/api/generate": ollama.generate,
}
# Members that constrain the output.
_FORMS = ("grammar", "json_schema", "response_format", "text", "output_config", "tools", "format")
_MOST_FORMS = _MOST_LISTS = 4  # such requests checked, and lists made, at the same time, in threads of their own
_MEMBER = re.compile("(?!(str|int|float|bool)$)[a-z_]+")


def application(models: Models) -> Starlette:
    """Build the ASGI application."""
    server = _Endpoints(models)
    described = about.describe({**_LISTED, **_GIVEN}, _COMPUTED, _WRITTEN)
    routes = [
        *(Route(path, partial(server.listed, answer)) for path, answer in _LISTED.items()),
        *(Route(path, partial(server.given, answer)) for path, answer in _GIVEN.items()),
        *(
            Route(path, partial(endpoint, answer, about.request_of(answer)), methods=["POST"])
            for answers, endpoint in ((_COMPUTED, server.computed), (_WRITTEN, server.written))
            for path, answer in answers.items()
        ),
        Route("/", about.page(), methods=["GET"]),
        Route("/metrics", server.metrics),
        Route("/openapi.json", as_json(encoded(described)), methods=["GET"]),
        Route("/v1/models/{name:path}", server.model),
    ]
    routes += [
        Route(route.path.removeprefix("/v1"), route.endpoint, methods=route.methods)
        for route in routes
        if route.path.startswith("/v1")
    ]
    routes.append(Route("/v1/health", partial(server.listed, about.health)))
    return Starlette(
        routes=routes,
        middleware=[Middleware(guarded, settings=models.settings)],
        exception_handlers={404: _nowhere, 405: _nowhere, ApiError: _refused, Exception: _refused},
    )


class _Endpoints:
    """The endpoints."""

    def __init__(self, models: Models) -> None:
        self._models, self._settings = models, models.settings
        self._forms, self._lists = anyio.CapacityLimiter(_MOST_FORMS), anyio.CapacityLimiter(_MOST_LISTS)

    async def metrics(self, _: Request) -> Response:
        states = self._models.loaded()
        text = self._models.metrics.text([each.engine for each in states], [each.gate for each in states])
        headers = {"Process-Start-Time-Unix": str(self._models.created)}  # as llama-server has it
        return PlainTextResponse(text, headers=headers, media_type="text/plain; version=0.0.4; charset=utf-8")

    async def model(self, request: Request) -> Response:
        return as_json(encoded(about.model(self._models, request.path_params["name"])))

    async def listed(self, answer: Callable[[Models], Any], _: Request) -> Response:
        return as_json(await run_sync(lambda: encoded(answer(self._models)), limiter=self._lists))

    async def given(self, answer: Callable[[State], Any], request: Request) -> Response:
        # A client that names no model asks for the one used last.
        known = [*(state.name for state in self._models.loaded()), *self._models.all]
        async with self._models.lent(request.query_params.get("model", known[0])) as state:
            return as_json(encoded(answer(state)))

    async def computed(self, answer: Callable[[State, Any], Any], kind: type[R], request: Request) -> Reply:
        async def work(asked: Any, reply: Reply) -> None:
            async with self._models.lent(asked.model, asked.keep_alive) as state:
                with _refusing():
                    is_task = iscoroutinefunction(answer)
                    found = await (answer(state, asked) if is_task else run_sync(answer, state, asked))
                    body = await run_sync(encoded, found)
            await reply.whole(as_json(body))

        return await self._reply(request, kind, work)

    async def written(self, begin: Callable[[State, Any], Answer], kind: type[R], request: Request) -> Reply:
        answers: list[Answer] = []

        async def work(asked: Any, reply: Reply) -> None:
            if ollama.is_empty(asked):
                await reply.whole(as_json(encoded(await ollama.moved(self._models, asked))))
                return
            async with self._models.lent(asked.model, asked.keep_alive) as state:
                with state.gate.coming(), _refusing():
                    answers.append(await run_sync(begin, state, asked, limiter=self._limiter(asked)))
                answers[0].begun = asked.came
                await answers[0].send(reply)

        return await self._reply(request, kind, work, lambda: answers[0].summary() if answers else "", streams=True)

    async def _reply(
        self, request: Request, kind: type[R], work: Work, summary: Callable[[], str] = str, *, streams: bool = False
    ) -> Reply:
        """The response of work on a request's body; at its end it is counted and logged. streams: whether it may be a
        stream."""
        path, begun = request.scope["path"], time.monotonic()

        def over(status: int) -> None:
            self._models.metrics.request_over(path, status)
            if self._settings.log:
                self._settings.log(f"{path} {status or 'left'} {time.monotonic() - begun:.2f} s{summary()}")

        try:
            asked: Any = await self._read(request, kind)
        except ApiError as error:
            over(error.status)
            raise

        pings, timeout = streams and bool(getattr(asked, "stream", False)), self._settings.timeout
        return Reply(partial(work, asked), pings=pings, timeout=timeout, over=over)

    def _limiter(self, asked: Any) -> anyio.CapacityLimiter | None:
        """The limit on threads that compile grammars, which is slow; None for other requests."""
        parts = (asked, getattr(asked, "options", None))
        return self._forms if any(getattr(part, name, None) for part in parts for name in _FORMS) else None

    async def _read(self, request: Request, kind: type[R]) -> R:
        """Read and check a request's body. Raises ApiError."""
        body = await self._body(request)
        try:
            value = json.loads(body, parse_constant=no_json)
        except (ValueError, RecursionError) as error:
            raise ApiError(400, f"the body is not valid JSON: {error}") from None
        if not isinstance(value, dict):
            raise ApiError(400, "the body must be a JSON object")
        if issubclass(kind, TextRequest):
            value = renamed(value, completions.IGNORED if kind is InfillRequest else ())
        try:
            return kind.model_validate(value)
        except ValidationError as error:
            raise _invalid(error) from None

    async def _body(self, request: Request) -> bytes:
        most = self._settings.max_body
        body = bytearray()
        try:
            with anyio.fail_after(settings.STALL):
                async for part in request.stream():
                    body += part
                    if len(body) > most:
                        message = f"the request is larger than {most} bytes"
                        raise ApiError(413, message, code="request_too_large", headers={"Connection": "close"})
        except TimeoutError:
            raise ApiError(408, "the request took too long to arrive", headers={"Connection": "close"}) from None
        except asyncio.CancelledError:
            raise ending() from None
        except ClientDisconnect:
            raise ApiError(400, "the request is incomplete") from None
        return bytes(body)


@contextmanager
def _refusing() -> Iterator[None]:
    """Raise errors of a request's values as ApiError."""
    try:
        yield
    except (ValueError, TypeError, ModuleNotFoundError) as error:
        raise explained(error, ApiError(400, str(error))) from None


def _invalid(error: ValidationError) -> ApiError:
    """The error for a request's first invalid member."""
    found: list[tuple[list[str | int], bool, str]] = []
    for each in error.errors(include_url=False, include_context=False, include_input=False):
        # pydantic puts the types of a union's alternatives into the path, too.
        path = [part for part in each["loc"] if isinstance(part, int) or _MEMBER.fullmatch(part)]
        found.append((path, not each["type"].endswith("_type"), plainly(each["msg"])))
    # The alternative that fits best fails last, and not by its type.
    parts, _, words = max(found, key=lambda each: (len(each[0]), [i for i in each[0] if isinstance(i, int)], each[1]))
    name = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in parts).lstrip(".")
    return ApiError(400, f"{name or 'the request'}: {words}", param=str(parts[0]) if parts else None)


async def _refused(request: Request, error: Exception) -> Response:
    return explained(error).response(request.scope["path"])


async def _nowhere(request: Request, error: Exception) -> Response:
    path = request.scope["path"]
    words = f"there is no {request.method} {path}; {ADDRESSES.get(path, 'see /openapi.json for all paths')}"
    status, headers = getattr(error, "status_code", 404), getattr(error, "headers", None)
    return ApiError(status, words, headers=headers).response(path)
