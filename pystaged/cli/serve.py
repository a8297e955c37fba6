"""`pystaged serve`: a server for clients of OpenAI, Anthropic and Ollama."""

from __future__ import annotations

import re
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import typer

from pystaged.cli.console import model_name, open_engine, report, size_words, warn_of_strangers
from pystaged.cli.options import HOST, MODEL_HELP, MODEL_TOO, OF_LOADING, SHOWN, Given, option, takes, usage
from pystaged.engine import Engine
from pystaged.loading import names
from pystaged.loading.names import SMOLLM2
from pystaged.options.config import SamplingConfig
from pystaged.options.recommended import described
from pystaged.options.table import SAMPLING, TEXT
from pystaged.platform import ctrl_c
from pystaged.platform.memory import available_memory
from pystaged.platform.process import bound_heaps
from pystaged.server.settings import SERVER, Settings

_KV_SHARE = 8  # the keys and values of each of several models get the free memory divided by this


@takes(
    {"think": SHOWN["think"], **SERVER, "max_tokens": TEXT["max_tokens"], "stop_loops": TEXT["stop_loops"]}
    | SAMPLING
    | OF_LOADING,
    max_tokens={
        "help": "Default and maximum of a request's max_tokens, 0 or -1 for the context length; 2048 by default."
    },
    recycle={
        "default": False,
        "help": "Draft from likely tokens of all users' earlier texts; a text's speed may then reveal other texts.",
    },
    n_ctx={
        "help": "Context length in tokens of prompt and new text, the last aside; 0 for the model's own, but at most "
        "32768, 16384 or 8192, the largest that fits into a quarter of the free memory."
    },
)
def serve(
    models: list[str] | None = typer.Argument(
        None, metavar="MODEL", help=f"{MODEL_HELP} Several are loaded when asked for.", show_default=SMOLLM2
    ),
    *,
    named: str | None = MODEL_TOO,
    folder: Path | None = option(None, "Serve the GGUF files in a folder, too.", "--models", metavar="FOLDER"),
    host: str = HOST,
    port: int = option(8080, "Port to listen on; 0 takes a free one.", min=0, max=65535),
    api_key_file: Path | None = option(None, "File of keys, one per line."),
    grace: int = option(30, "Seconds that sequences in progress may take when the server stops.", min=0),
    alias: str | None = option(None, "The model's name for clients; by default its own."),
    given: Given,
    log_requests: bool = option(False, "Print a line for each request.", "--log-requests"),
) -> None:
    """Run a server compatible with OpenAI's, Anthropic's and Ollama's interfaces, with a chat page.

    The model is smollm2 unless you name another. If you name several, or a folder, requests name one of these or of
    those in the cache; it is loaded when it is asked for, and unloaded when it rests or its memory is needed. Texts
    share passes, and each is the same as alone. Sampling options are defaults of requests; those not given are as the
    model's makers recommend. Ctrl-C ends the server after the texts in progress, a second Ctrl-C at once.

    Example: pystaged serve smollm2

    Example: pystaged serve smollm2 model.gguf --default smollm2

    Example: pystaged serve model.gguf --draft small.gguf --parallel 8 --kv-memory 4G

    Example: PYSTAGED_API_KEY=secret pystaged serve smollm2 --host 0.0.0.0 --port 8000
    """
    try:
        from pystaged.server.app import application  # noqa: PLC0415
        from pystaged.server.models import Models  # noqa: PLC0415
        from pystaged.server.run import address, answering_that_it_loads, bound, serve  # noqa: PLC0415
        from pystaged.server.security import read_keys  # noqa: PLC0415
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            f'serving needs {error.name}: pip install ".[server]" in a clone of pystaged', name=error.name
        ) from None
    bound_heaps()
    if models and named is not None:
        raise typer.BadParameter("name the models once, by MODEL or --model")
    models = [named] if named is not None else models or []
    name = models[0] if models else SMOLLM2  # what the bundled pair writes is no answer
    is_one = len(models) <= 1 and folder is None
    if not is_one and (alias is not None or given["draft"] not in ("auto", "none")):
        raise typer.BadParameter("--alias and --draft are for one model")
    if is_one and given.get("default") is not None:
        raise typer.BadParameter("--default is for several models")
    keys = read_keys(given.get("api_keys", []), api_key_file)
    with usage():
        SamplingConfig(**given.only(SAMPLING))
        if not re.fullmatch(r"[a-zA-Z_:][a-zA-Z0-9_:]*", given["metrics_prefix"]):
            raise ValueError(f"--metrics-prefix must be letters, digits, _ and :, not {given['metrics_prefix']!r}")
    if given.get("reasoning_budget") == -1:
        del given["reasoning_budget"]
    with bound(host, port) as listener:
        if not keys:
            warn_of_strangers(host, f"whoever reaches {host}:{port} can use this server; --api-key asks for a key")
        of_server = given.only(SERVER) | {"api_keys": keys, "allowed_hosts": [*given.get("allowed_hosts", []), host]}
        settings = Settings(
            alias or names.name_of(name) if is_one else "",
            defaults=given.only([*SAMPLING, "stop_loops", "max_tokens"]),
            think=given.get("think"),
            log=report if log_requests else None,
            **of_server,
        )
        with ExitStack() as stack:
            with answering_that_it_loads(listener, settings):
                if is_one:
                    engine = stack.enter_context(open_engine(name, given, long_context=True))
                    app, greet = application(Models.of(engine, settings)), partial(_greet, engine, settings.name, given)
                else:
                    free = available_memory()
                    given.setdefault("kv_memory", free // _KV_SHARE)
                    files = names.several(models, folder, model_name)
                    load = partial(open_engine, given=given, long_context=True)
                    served = Models(settings, files, load, memory=free, kv_memory=given["kv_memory"])
                    stack.callback(served.close)
                    words = f"models, loaded when they are asked for, {size_words(free)} of them at once: "
                    app, greet = application(served), partial(report, words + ", ".join(files))
            ctrl_c.let_tidy_up(1)  # it is handled by the server, and by what comes after it
            serve(
                app,
                listener,
                grace=grace,
                ready=lambda: _listening(greet, address(listener)),
                waiting=lambda requests: report(
                    f"requests in progress: {requests}; waiting {grace} s at most, Ctrl-C again ends at once"
                ),
            )


def _greet(engine: Engine, name: str, given: Given) -> None:
    model = engine.model
    draft = f"{engine.draft_name} and n-grams draft" if engine.draft_name else "n-grams draft"
    report(f"{name}: {model.architecture}, {size_words(model.file_bytes)} on {engine.device}; {draft}")
    room = engine.kv_memory // max(1, engine.context_bytes)
    memory = f"{size_words(engine.kv_memory)} for keys and values"
    report(f"contexts of {engine.n_ctx} tokens; {memory}, enough for {room} of them")
    report(f"default sampling: {described(given.sampling(engine))}")


def _listening(greet: Callable[[], object], where: str) -> None:
    greet()
    report(f"listening on {where}, which has a chat page; OpenAI's clients use {where}/v1; Ctrl-C stops the server")
