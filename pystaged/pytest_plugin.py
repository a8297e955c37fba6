"""Plugin for pytest: texts of a local model that must stay the same, and a server for the application under test.

Nothing is loaded before a test uses a fixture.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

import pytest

if TYPE_CHECKING:
    from pystaged.receipt import Receipt
    from pystaged.server.shared import SharedServer

MARKER = "local_llm"
_FIXTURES = {"local_llm", "local_llm_url", "assert_same_text"}
_LONGEST_NAME = 180  # characters
_KEPT = "pystaged kept"  # property of a test's report
_UNUSABLE = {"n", "progress", "logprobs", "prompt_logprobs", "prompt_logprobs_start"}


@dataclass(frozen=True, slots=True)
class LocalText:
    """A text of the local model; its str() is the text.

    tokens: ids of its tokens. finish_reason, seed: as in pystaged.GenerationResult. fields: its receipt as JSON values.
    """

    text: str
    tokens: list[int]
    finish_reason: str
    seed: int
    fields: dict[str, Any] = field(repr=False)

    @property
    def receipt(self) -> Receipt:
        """Its receipt, for pystaged.repeat."""
        import json  # noqa: PLC0415

        from pystaged.receipt import Receipt  # noqa: PLC0415

        return Receipt.from_json(json.dumps(self.fields))

    def __str__(self) -> str:
        return self.text


class LocalLLM:
    """The local model, in a server that all processes of the test run share.

    model: its name, as given. base_url: address for OpenAI's clients, which need any API key.
    """

    def __init__(self, server: SharedServer, model: str) -> None:
        self._server, self.model = server, model
        self.base_url = f"{server.url}/v1"

    def generate(self, prompt: str | Sequence[int] | Sequence[Mapping[str, Any]], **options: Any) -> LocalText:
        """Continue a text or token ids, or answer messages; the options are those of pystaged.Engine.generate and
        Engine.chat. Without options decoding is greedy.

        Raises:
            ValueError: the prompt or an option is invalid, with the engine's message.
        """
        __tracebackhide__ = True
        if unusable := sorted(options.keys() & _UNUSABLE):
            raise ValueError(f"local_llm.generate returns one text and nothing else, so it takes no {unusable[0]}")
        if isinstance(options.get("logit_bias"), Mapping):
            options["logit_bias"] = list(options["logit_bias"].items())
        found = self._server.ask("generate", prompt=prompt, options=options)
        return LocalText(found["text"], found["tokens"], found["finish_reason"], found["seed"], found["receipt"])


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("pystaged", "texts of a local model (pystaged)")
    group.addoption(
        "--pystaged-model",
        metavar="MODEL",
        help="model of the fixture local_llm: a GGUF file, a hub id, a name in pystaged's cache, or smollm2",
    )
    group.addoption(
        "--pystaged-update",
        action="store_true",
        help="keep the texts given to assert_same_text, instead of comparing them with those kept",
    )
    group.addoption(
        "--pystaged-update-in-ci",
        action="store_true",
        help="as --pystaged-update, also where the environment variable CI is set",
    )
    parser.addini("pystaged_model", "model of the fixture local_llm, as for --pystaged-model", default="smollm2")
    parser.addini(
        "pystaged_n_ctx", "context length of the local model in tokens; 0 for its own, at most 8192", default="0"
    )
    parser.addini("pystaged_kv", "type of the local model's KV cache: f16 or q8_0", default="f16")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", f"{MARKER}: uses a local model (set by pystaged for tests with its fixtures)")
    if config.getoption("--pystaged-update") and os.environ.get("CI"):
        raise pytest.UsageError(
            "--pystaged-update is not for CI, where the kept texts would be lost; if they are not, use "
            "--pystaged-update-in-ci"
        )


@pytest.hookimpl(tryfirst=True)  # before -m selects by the marker
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if not _FIXTURES.isdisjoint(getattr(item, "fixturenames", ())):
            item.add_marker(MARKER)


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """List the files that --pystaged-update has written."""
    reports = [report for each in terminalreporter.stats.values() for report in each]
    written = {
        value
        for report in reports
        if getattr(report, "when", "") == "call"
        for name, value in report.user_properties
        if name == _KEPT
    }
    if written:
        terminalreporter.section(f"pystaged: {len(written)} texts were kept; look at them before you commit them")
        for file in sorted(written):
            terminalreporter.line(file)


@pytest.fixture(scope="session")
def local_llm(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalLLM]:
    """The local model: `generate(prompt or messages, **options)`, and `base_url` for OpenAI's clients."""
    from pystaged.server.shared import Loading, SharedServer, SharedServerError  # noqa: PLC0415

    config = request.config
    model = config.getoption("--pystaged-model")
    if not model:
        model = config.getini("pystaged_model")
        if (config.rootpath / model).is_file():
            model = str(config.rootpath / model)
    folder, worker = tmp_path_factory.getbasetemp(), os.environ.get("PYTEST_XDIST_WORKER", "")
    if worker:
        folder = folder.parent  # the run's own; each worker has one in it
    n_ctx, kv = config.getini("pystaged_n_ctx"), config.getini("pystaged_kv")
    problem = ""
    try:
        if not n_ctx.strip().isdecimal():
            raise ValueError(f"pystaged_n_ctx must be a number of tokens, not {n_ctx!r}")
        server = SharedServer(folder / "pystaged", worker or "main", Loading(model, int(n_ctx), kv))
    except (SharedServerError, ValueError) as error:
        problem = str(error)
    if problem:
        pytest.fail(
            f"the local model cannot be used: {problem}\n"
            f"Settings: pystaged_model = {model}, pystaged_n_ctx = {n_ctx}, pystaged_kv = {kv}",
            pytrace=False,
        )
    yield LocalLLM(server, model)
    server.close()


@pytest.fixture(scope="session")
def local_llm_url(local_llm: LocalLLM) -> str:
    """Address of the local model's server for OpenAI's clients, such as http://127.0.0.1:41234/user/main/v1."""
    return local_llm.base_url


@pytest.fixture
def assert_same_text(request: pytest.FixtureRequest, local_llm: LocalLLM) -> Callable[..., None]:
    """A function of a text, as a string or from `local_llm.generate`, and optionally a name: compares it with the text
    kept in the folder `receipts` beside the test's file. `pytest --pystaged-update` keeps it."""
    from pystaged.kept_texts import check  # noqa: PLC0415

    config, path, ask = request.config, request.path, local_llm._server.ask
    update = config.getoption("--pystaged-update") or config.getoption("--pystaged-update-in-ci")
    test = request.node.nodeid.partition("::")[2].replace("::", ".")
    used: set[str] = set()

    def assert_same_text(text: str | LocalText, name: str | None = None) -> None:
        __tracebackhide__ = True
        if not isinstance(text, str | LocalText):
            raise TypeError(f"assert_same_text takes a string or a result of local_llm, not {type(text).__name__}")
        stem = test if name is None else f"{test}-{name}"
        number = 2
        while (numbered := stem if stem not in used else f"{stem}-{number}") in used:
            number += 1
        used.add(numbered)
        file = path.parent / "receipts" / path.stem / f"{_file_name(numbered)}.json"
        shown = os.path.relpath(file, config.rootpath)
        problem = check(
            str(text),
            file,
            update=(lambda: request.node.user_properties.append((_KEPT, shown))) if update else None,
            receipt=lambda: text.fields if isinstance(text, LocalText) else ask("receipt", text=text)["receipt"],
            ask=ask,
            shown=shown,
        )
        if problem:
            pytest.fail(problem)

    return assert_same_text


def _file_name(test: str) -> str:
    """A name without characters that file systems refuse; different for different tests."""
    name = quote(test, safe="[]()=,+@!")
    if len(name) <= _LONGEST_NAME:
        return name
    return f"{name[:_LONGEST_NAME]}-{hashlib.sha256(test.encode()).hexdigest()[:16]}"
