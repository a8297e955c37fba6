"""`pystaged serve`: a server for clients of OpenAI, Anthropic and Ollama."""

from __future__ import annotations

import os
import re
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

import typer

from pystaged.aliases import hub_id
from pystaged.cli.console import errors, open_engine, report
from pystaged.cli.options import (
    LoadOptions,
    ModelArgument,
    ModelToo,
    SamplingOptions,
    StopLoops,
    Think,
    check,
    either,
    grouped,
    is_loopback,
    token_limit,
    usage,
)
from pystaged.config import SamplingConfig
from pystaged.engine import Engine
from pystaged.files import expanded, read_small
from pystaged.loading.names import SMOLLM2
from pystaged.process import bound_heaps
from pystaged.recommended import described

if TYPE_CHECKING:
    from pystaged.server.settings import Settings

_KEY_VARIABLE = "PYSTAGED_API_KEY"
_MOST_KEYS = 1 << 20  # bytes of a file
_GIB = 1 << 30


@dataclass
class AddressOptions:
    """Where the server listens, and whose requests it answers."""

    host: Annotated[
        str, typer.Option(help="Address to listen on; the default is reachable from this machine only.", callback=check)
    ] = "127.0.0.1"
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port to listen on; 0 takes a free one.")] = 8080
    api_key: Annotated[
        list[str] | None,
        typer.Option(
            help=f"API key that requests need; may be repeated, then any is valid; also {_KEY_VARIABLE}.",
            callback=check,
            show_default=False,
        ),
    ] = None
    api_key_file: Annotated[Path | None, typer.Option(help="File of keys, one per line.", show_default=False)] = None
    allowed_host: Annotated[
        list[str] | None,
        typer.Option(help="Further host name of the server; may be repeated.", callback=check, show_default=False),
    ] = None
    cors_origin: Annotated[
        list[str] | None,
        typer.Option(
            help="Site whose pages may use the server, such as https://example.com, or * for all; may be repeated.",
            callback=check,
            show_default=False,
        ),
    ] = None

    def keys(self) -> list[str]:
        """All API keys. Raises OSError and ValueError for a file that cannot be read, or an empty key."""
        from pystaged.server.security import read_keys  # noqa: PLC0415

        given = list(self.api_key or [])
        if os.environ.get(_KEY_VARIABLE):
            given.append(os.environ[_KEY_VARIABLE])
        if self.api_key_file is not None:
            given += [line for line in read_small(self.api_key_file, _MOST_KEYS).decode().splitlines() if line.strip()]
            if not given:
                raise ValueError(f"{self.api_key_file} has no keys")
        return read_keys(given)


@dataclass
class QueueOptions:
    """Limits on the requests in progress."""

    parallel: Annotated[
        int, typer.Option(min=1, help="Maximum number of sequences decoded at once.", callback=check)
    ] = 16
    queue: Annotated[
        int, typer.Option(min=0, help="Maximum number of sequences waiting; more are refused.", callback=check)
    ] = 64
    timeout: Annotated[float, typer.Option(min=1, help="Longest time of a request, in seconds.")] = 3600.0
    queue_timeout: Annotated[float, typer.Option(min=1, help="Longest wait in the queue, in seconds.")] = 600.0
    grace: Annotated[
        int, typer.Option(min=0, help="Seconds that sequences in progress may take when the server stops.")
    ] = 30


class SharedOptions(LoadOptions):
    """LoadOptions for users who may not know each other."""

    settings: ClassVar = {
        "recycle": {
            "default": False,
            "help": "Draft from likely tokens of all users' earlier texts; the speed of a text may then reveal others' "
            "texts.",
        },
        "n_ctx": {
            "help": "Context length in tokens, prompt and new text together; 0 for the model's own, but at most 32768, "
            "16384 or 8192, the largest that fits into a quarter of the free memory.",
        },
    }


@grouped
def serve(
    model: ModelArgument = None,
    *,
    named: ModelToo = None,
    address: AddressOptions,
    waiting: QueueOptions,
    alias: Annotated[
        str | None, typer.Option(help="The model's name for clients; by default its own.", callback=check)
    ] = None,
    strict: Annotated[bool, typer.Option("--strict", help="Requests must name the model.")] = False,
    max_tokens: Annotated[
        int | None,
        typer.Option(
            "--max-tokens",
            "-n",
            min=-1,
            callback=token_limit,
            help="Default and maximum of a request's max_tokens, 0 or -1 for the context length; 2048 by default.",
        ),
    ] = None,
    stop_loops: StopLoops = None,
    think: Think = None,
    reasoning_budget: Annotated[
        int | None,
        typer.Option(
            min=-1, callback=check, help="Maximum tokens of an answer's reasoning, -1 for no limit.", show_default=False
        ),
    ] = None,
    billing_header: Annotated[
        bool,
        typer.Option(
            "--billing-header",
            help="Keep Claude Code's line x-anthropic-billing-header, whose change at every turn prevents reuse.",
        ),
    ] = False,
    sampling: SamplingOptions,
    loading: SharedOptions,
    log_requests: Annotated[bool, typer.Option("--log-requests", help="Print a line for each request.")] = False,
    metrics_prefix: Annotated[str, typer.Option(help="Prefix of the names in /metrics.", callback=check)] = (
        "pystaged:"
    ),
) -> None:
    """Run a server compatible with OpenAI's, Anthropic's and Ollama's interfaces, with a chat page.

    The model is smollm2 unless you name another. Texts share passes, and each is the same as alone. Sampling options
    are defaults of requests; those not given are as the model's makers recommend. Ctrl-C ends the server after the
    texts in progress, a second Ctrl-C at once.

    Example: pystaged serve smollm2

    Example: pystaged serve model.gguf --draft small.gguf --parallel 8 --kv-memory 4G

    Example: PYSTAGED_API_KEY=secret pystaged serve smollm2 --host 0.0.0.0 --port 8000
    """
    try:
        from pystaged.server.app import application  # noqa: PLC0415
        from pystaged.server.run import address as address_of  # noqa: PLC0415
        from pystaged.server.run import answering_that_it_loads, bound, serve  # noqa: PLC0415
        from pystaged.server.settings import Settings  # noqa: PLC0415
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            f'serving needs {error.name}: pip install "pystaged[server]"', name=error.name
        ) from None
    bound_heaps()
    name = either(model, named)
    name = SMOLLM2 if name is None else name  # what the bundled pair writes is no answer
    keys = address.keys()
    with usage():
        defaults = _defaults(sampling, max_tokens, stop_loops)
        if not re.fullmatch(r"[a-zA-Z_:][a-zA-Z0-9_:]*", metrics_prefix):
            raise ValueError(f"--metrics-prefix must be letters, digits, _ and :, not {metrics_prefix!r}")
    with bound(address.host, address.port) as listener:
        if not is_loopback(address.host) and not keys:
            errors.print(
                f"[bold yellow]warning:[/bold yellow] whoever reaches {address.host}:{address.port} can use this "
                "server; --api-key asks for a key"
            )
        settings = Settings(
            alias or _name_of(name),
            strict=strict,
            defaults=defaults,
            think=think,
            reasoning_budget=None if reasoning_budget == -1 else reasoning_budget,
            api_keys=keys,
            allowed_hosts=[*(address.allowed_host or []), address.host],
            cors_origins=address.cors_origin or [],
            parallel=waiting.parallel,
            queue=waiting.queue,
            timeout=waiting.timeout,
            queue_timeout=waiting.queue_timeout,
            billing_header=billing_header,
            metrics_prefix=metrics_prefix,
            log=report if log_requests else None,
        )
        with ExitStack() as stack:
            with answering_that_it_loads(listener, settings):
                engine = stack.enter_context(open_engine(name, loading, long_context=True))
                app = application(engine, settings)
            serve(
                app,
                listener,
                grace=waiting.grace,
                ready=lambda: _greet(engine, settings, address_of(listener)),
            )


def _greet(engine: Engine, settings: Settings, where: str) -> None:
    name, model = settings.name, engine.model
    draft = f"{engine.draft_name} and n-grams draft" if engine.draft_name else "n-grams draft"
    report(f"{name}: {model.architecture}, {model.file_bytes / _GIB:.2f} GiB on {model.devices or 'cpu'}; {draft}")
    room = engine.kv_memory // max(1, engine.context_bytes)
    memory = f"{engine.kv_memory / _GIB:.2f} GiB for keys and values"
    report(f"contexts of {engine.n_ctx} tokens; {memory}, enough for {room} of them")
    sampling = SamplingConfig(**engine.recommended_sampling | settings.sampling)
    report(f"default sampling: {described(sampling)}")
    report(f"listening on {where}, which has a chat page; OpenAI's clients use {where}/v1; Ctrl-C stops the server")


def _defaults(sampling: SamplingOptions, max_tokens: int | None, stop_loops: bool | None) -> dict[str, Any]:
    """The options given, as defaults of requests. Raises ValueError for invalid ones."""
    sampling.config()
    found = sampling.fields()
    if stop_loops is not None:
        found["stop_loops"] = stop_loops
    if max_tokens is not None:
        found["max_tokens"] = max_tokens
    return found


def _name_of(model: str) -> str:
    """What clients call a model: a hub id or a name as it is, of a file its name without the folder."""
    path = expanded(model)
    return path.name.removesuffix(".gguf") if path.is_file() else hub_id(model)
