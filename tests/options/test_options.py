"""Every interface offers what pystaged.options has, and the docs say the same."""

from __future__ import annotations

import builtins
from pathlib import Path
from typing import Any

import pytest
from support.paths import table

from pystaged import cli
from pystaged.engine import LoadOptions
from pystaged.options import table as options
from pystaged.options.config import GenerationConfig, SamplingConfig, TextOptions
from pystaged.server.request_types import TextRequest

USAGE = Path(__file__).parents[2] / "docs" / "usage.md"


def documented() -> str:
    """The Markdown of the tables in docs/usage.md."""
    lines: list[str] = []
    for heading, some in (("sampling", options.SAMPLING), ("text", options.TEXT), ("loading", options.LOADING)):
        lines += [f"| {heading} | command line | default | range | |", "|---|---|---|---|---|"]
        for name, option in some.items():
            spelled = ", ".join(f"`{flag}`" for flag in options.flags(name, option))
            texts = option.default if isinstance(option.default, tuple) else [option.default]
            default = " ".join("`" + repr(each).replace("'", "") + "`" for each in texts)
            words = option.help.replace("*", "\\*")
            lines.append(f"| `{name}` | {spelled} | {default} | {option.range.replace('**', '^')} | {words} |")
        lines.append("")
    return "\n".join(lines)


def test_the_docs_have_the_tables() -> None:
    assert documented() in USAGE.read_text("utf-8")


def test_types_and_tables_name_the_same() -> None:
    assert TextOptions.__annotations__.keys() == options.SAMPLING.keys() | options.TEXT.keys() | {"sampling"}
    assert LoadOptions.__annotations__.keys() == options.LOADING.keys() | {"policy"}
    config = SamplingConfig()
    for name, option in options.SAMPLING.items():
        assert getattr(config, name) == (option.default if name != "logit_bias" else {})


@pytest.mark.parametrize("command", ["generate", "chat", "serve"])
def test_commands_have_the_options_of_the_tables(command: str) -> None:
    found = {flag for param in cli._command(command).params for flag in (*param.opts, *param.secondary_opts)}
    offered = {name: option for name, option in options.ALL.items() if name not in options.TEXT}
    offered |= {"max_tokens": options.TEXT["max_tokens"], "stop_loops": options.TEXT["stop_loops"]}
    if command == "generate":
        offered |= options.TEXT
    for name, option in offered.items():
        for flag in options.flags(name, option):
            assert found.issuperset(flag.split("/")), name


def test_requests_have_the_sampling_options() -> None:
    described = TextRequest.model_json_schema()["properties"]
    assert options.SAMPLING.keys() <= described.keys()
    assert described["top_p"]["anyOf"][0] | {"exclusiveMinimum": 0, "maximum": 1} == described["top_p"]["anyOf"][0]


@pytest.mark.parametrize(("given", "error", "message"), table("out_of_range"), ids=repr)
def test_what_is_out_of_range_is_named(given: dict[str, Any], error: str, message: str) -> None:
    with pytest.raises(getattr(builtins, error), match=message):
        GenerationConfig(**given)


def test_the_first_options_may_come_without_names() -> None:
    assert SamplingConfig(0.5, 3, seed=2) == SamplingConfig(temperature=0.5, top_k=3, seed=2)
    with pytest.raises(TypeError, match="temperature is given twice"):
        SamplingConfig(0.5, temperature=1.0)
    with pytest.raises(TypeError, match="may be positional arguments"):
        SamplingConfig(0.5, 0, 1.0, 0.0, 1, 0.5)
