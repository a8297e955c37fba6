"""Tools and reasoning of chat requests: what the model is told of them, and how its answer is limited and read."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pystaged.chat.format import SWITCHES, ChatFormat
from pystaged.chat.turn import Begun, Dialect, TurnReader
from pystaged.sampling.text import encode_continuation
from pystaged.sampling.thinking import Reasoning
from pystaged.server.errors import ApiError
from pystaged.server.request_types import ChatRequest, Tool, ToolChoice


@dataclass(frozen=True)
class Manner:
    """How an answer is written and read.

    dialect: the model's. splits: whether reasoning is apart. begun: where the answer begins.
    schemas: of the arguments of the tools on offer; None for no tools.
    """

    dialect: Dialect
    splits: bool
    begun: Begun
    schemas: Mapping[str, Mapping[str, Any]] | None

    @property
    def spelled(self) -> frozenset[int]:
        """The control tokens that the reader needs."""
        thinking = self.dialect.thinking if self.splits else None
        marks = (*(self.dialect.form.marks if self.schemas is not None else ()), *(thinking.marks if thinking else ()))
        return frozenset(self.dialect.controls[mark] for mark in marks if mark in self.dialect.controls)

    @property
    def hides(self) -> bool:
        """Whether an answer may have parts that are not its text."""
        return self.schemas is not None or (self.splits and self.dialect.thinking is not None)

    def reader(self) -> TurnReader:
        """Reads one answer."""
        thinking = self.dialect.thinking if self.splits else None
        form = self.dialect.form if self.schemas is not None else None
        return TurnReader(thinking, self.begun, form, self.schemas or {})


def offered(request: ChatRequest) -> list[Tool]:
    """The tools that the model may call. Raises ApiError for an invalid tool_choice."""
    tools = [] if request.tool_choice == "none" else request.tools or []
    if request.tool_choice not in (None, "none", "auto") and not tools:
        raise ApiError(400, "tool_choice needs tools", param="tool_choice")
    if isinstance(request.tool_choice, ToolChoice):
        name = request.tool_choice.function.name
        tools = [tool for tool in tools if tool.function.name == name]
        if not tools:
            raise ApiError(400, f"tool_choice names {name!r}, which is not one of the tools", param="tool_choice")
    return tools


def template_options(request: ChatRequest, chat_format: ChatFormat, think: bool | None, tools: bool) -> dict[str, Any]:
    """The variables for a template: the request's own, and those for reasoning that the template knows."""
    effort, known = request.reasoning_effort, chat_format.variables(tools)
    found: dict[str, Any] = {name: think for name in SWITCHES if think is not None and name in known}
    if effort not in (None, "none") and "reasoning_effort" in known:
        found["reasoning_effort"] = effort
    return found | (request.chat_template_kwargs or {})


def reasoning(
    request: ChatRequest, manner: Manner, limit: int | None, tokenizer: Any, has_grammar: bool
) -> Reasoning | None:
    """How the answer reasons, if that needs a limit, or a grammar waits for its end.

    Args:
        limit: most tokens of reasoning if the request does not say, None for no limit.
    """
    thinking, asked = manner.dialect.thinking, request.reasoning_budget_tokens
    budget = limit if asked is None else asked if asked >= 0 else None
    is_open = manner.begun in ("thinking", "reasoning")
    if thinking is None or (budget is None and not (has_grammar and is_open)):
        return None
    closing = encode_continuation(tokenizer, thinking.closing).tolist()
    return Reasoning(thinking.begin.encode(), thinking.end.encode(), tuple(closing), is_open, budget)
