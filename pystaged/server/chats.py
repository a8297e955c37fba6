"""/v1/chat/completions."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

from pystaged.chat import ChatTemplateError
from pystaged.chat.call_grammar import call_grammar
from pystaged.chat.calls import Schemas
from pystaged.chat.format import SWITCHES
from pystaged.chat.turn import Begun, Block, Dialect, Thinking, TurnReader
from pystaged.decoding.text import TokenRoles
from pystaged.options.config import GenerationConfig
from pystaged.result import GenerationResult, Piece
from pystaged.sampling.definitions import GrammarError
from pystaged.sampling.text import encode_continuation
from pystaged.sampling.thinking import Reasoning
from pystaged.server.answer import Answer, Texts, ended
from pystaged.server.errors import ApiError, too_long, unsupported
from pystaged.server.figures import of_chat
from pystaged.server.models import State
from pystaged.server.options import begun, checked, text_options
from pystaged.server.request_types import ChatRequest, Tool, ToolChoice, joined

T = TypeVar("T")
_EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")
_MEMBERS = {"text": "content", "reasoning": "reasoning_content"}  # of a part, by the kind of its block


def begin(state: State, request: ChatRequest) -> ChatAnswer:
    """Check a request and prepare its sequences; may take seconds. Raises ApiError and ChatTemplateError."""
    return ChatAnswer(state, request, turns(state, request))


def turns(state: State, request: ChatRequest, param: str = "messages") -> Texts:
    """Prepare the answers to a request. Errors as in begin. param: the member that errors about the messages name."""
    engine, tools, settings = state.engine, _offered(request), state.settings
    template = engine.chat_format.source(bool(tools))
    dialect = Dialect.of(template, engine.tokenizer, engine.chat_format.knows_tools)
    prompt = _written(state, request, engine.chat_format.encode, param)
    if len(prompt) > engine.n_ctx:
        raise too_long(len(prompt), engine.n_ctx, engine.model.max_context, param)
    prefill = request.messages[-1].model_dump() if _continues(request) else None
    start = dialect.begun(prompt.tolist(), engine.tokenizer, prefill)
    schemas = {tool.function.name: tool.function.parameters or {} for tool in tools}
    # What is apart from an answer's text.
    thinking = dialect.thinking if request.reasoning_format != "none" else None
    form = dialect.form if schemas else None
    marks = (*(form.marks if form else ()), *(thinking.marks if thinking else ()))
    spelled = frozenset(dialect.controls[mark] for mark in marks if mark in dialect.controls)
    config, ends = _config(state, request, dialect, schemas), engine.chat_format.stop
    reader = partial(TurnReader, thinking, start, form, schemas)
    hides = (form or thinking) and config.stop
    if not hides:
        config, ends = replace(config, stop=(*config.stop, *ends)), ()
    limit = settings.reasoning_budget
    if _thinks(state, request) is False and engine.chat_format.variables(bool(tools)).isdisjoint(SWITCHES):
        limit = 0
    thoughts = _reasoning(request, dialect.thinking, start, limit, engine.tokenizer, config.grammar is not None)
    roles = TokenRoles(spelled=spelled, reasoning=thoughts, reader=reader if hides else None, ends=ends)
    sequences = begun(engine, [prompt], config, request.n or 1, _form(request, schemas), roles)
    return Texts(sequences, config.sampling.seed, [reader() for _ in sequences])


def count(state: State, request: ChatRequest) -> int:
    """The number of tokens of a conversation. Errors as in begin."""
    return len(_written(state, request, state.engine.chat_format.encode))


def template(state: State, request: ChatRequest) -> dict[str, str]:
    """The prompt that the chat template makes of a request. Errors as in begin."""
    return {"prompt": _written(state, request, state.engine.chat_format.render)}


def _offered(request: ChatRequest) -> list[Tool]:
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


def _thinks(state: State, request: ChatRequest) -> bool | None:
    """Whether the answer is to be reasoned; None for what the template prefers."""
    effort = request.reasoning_effort or None
    if effort not in (None, *_EFFORTS):
        raise ApiError(400, f"reasoning_effort must be one of {', '.join(_EFFORTS)}", param="reasoning_effort")
    return state.settings.think if effort is None else effort != "none"


def _written(state: State, request: ChatRequest, write: Callable[..., T], param: str = "messages") -> T:
    """A conversation, written by a method of the chat format."""
    chat_format, tools = state.engine.chat_format, _offered(request)
    # Clients' "tokens" could be forged.
    messages = [message.model_dump(exclude_none=True, exclude={"tokens"}) for message in request.messages]
    given = [tool.model_dump(exclude_none=True) for tool in tools]
    think, effort, known = _thinks(state, request), request.reasoning_effort, chat_format.variables(bool(tools))
    options: dict[str, Any] = {name: think for name in SWITCHES if think is not None and name in known}
    if effort not in (None, "none") and "reasoning_effort" in known:
        options["reasoning_effort"] = effort
    options |= request.chat_template_kwargs or {}
    try:
        return write(messages, tools=given or None, template_options=options or None, continues=_continues(request))
    except ChatTemplateError:
        raise
    except (ValueError, TypeError) as error:
        blamed = "chat_template_kwargs" if str(error).startswith("template_options") else param
        raise ApiError(400, str(error), param=blamed) from None


def _continues(request: ChatRequest) -> bool:
    """Whether the answer goes on where the last message ends, an answer without calls. Raises ApiError."""
    last, asked, begins = request.messages[-1], request.continue_final_message, request.add_generation_prompt
    can = last.role == "assistant" and not last.tool_calls
    if asked and (begins or not can):
        needs = "a last message of the assistant, without tool_calls, and add_generation_prompt: false"
        raise ApiError(400, f"continue_final_message needs {needs}", param="continue_final_message")
    if begins is False and (asked is False or not can):
        raise unsupported("add_generation_prompt", "a prompt without the beginning of an answer is not supported")
    continues = can and asked is not False and not begins
    if continues and _must_call(request):
        message = "a call can be forced only where an answer begins; continue_final_message: false closes the last"
        raise ApiError(400, message, param="tool_choice")
    return continues


def _must_call(request: ChatRequest) -> bool:
    return request.tool_choice not in (None, "none", "auto")


def _config(state: State, request: ChatRequest, dialect: Dialect, schemas: Schemas) -> GenerationConfig:
    asked = request.max_completion_tokens if request.max_completion_tokens is not None else request.max_tokens
    if asked == 0:
        raise ApiError(400, "max_tokens must be at least 1", param="max_tokens")
    options = text_options(request.model_copy(update={"max_tokens": asked}), state.settings.defaults, state.engine)
    options.setdefault("stop_loops", True)
    if request.top_logprobs is not None and not request.logprobs:
        raise ApiError(400, "top_logprobs needs logprobs: true", param="top_logprobs")
    if request.logprobs:
        options["logprobs"] = request.top_logprobs or 0
    if request.prediction:
        options["prediction"] = joined(request.prediction.content)
    if (schema := _schema(request)) is not None:
        options["json_schema"] = schema
    given, grammar, must_call = options.get("json_schema"), options.get("grammar"), _must_call(request)
    if must_call and (given is not None or grammar is not None):
        raise unsupported("tool_choice", "a required tool call cannot be combined with another output format")
    if schemas and grammar is None and (must_call or given is not None):
        # The answer is calls, or has the form.
        several = request.parallel_tool_calls is not False and not isinstance(request.tool_choice, ToolChoice)
        try:
            options["grammar"] = call_grammar(dialect, schemas, several=several, answer=given)
        except GrammarError as error:
            raise ApiError(400, str(error), param="tools") from None
        options["json_schema"] = None
    return checked(options)


def _reasoning(
    request: ChatRequest, thinking: Thinking | None, start: Begun, limit: int | None, tokenizer: Any, has_grammar: bool
) -> Reasoning | None:
    """How the answer reasons, if that needs a limit, or a grammar waits for its end. limit: most tokens of reasoning if
    the request does not say, None for no limit."""
    asked, is_open = request.reasoning_budget_tokens, start in ("thinking", "reasoning")
    budget = limit if asked is None else asked if asked >= 0 else None
    if thinking is None or (budget is None and not (has_grammar and is_open)):
        return None
    closing = encode_continuation(tokenizer, thinking.closing).tolist()
    return Reasoning(thinking.begin.encode(), thinking.end.encode(), tuple(closing), is_open, budget)


def _form(request: ChatRequest, schemas: Schemas) -> str:
    """The request member that constrains the answer."""
    if schemas and _must_call(request):
        return "tools"
    if request.grammar is not None:
        return "grammar"
    return "json_schema" if request.json_schema is not None else "response_format"


def _schema(request: ChatRequest) -> dict[str, Any] | None:
    """The JSON schema that the answer must match, None if there is none."""
    given = request.response_format
    if given is None or given.type == "text":
        return None
    if given.type == "json_object":
        return given.schema_ if given.schema_ is not None else {"type": "object"}
    if given.json_schema is None or given.json_schema.schema_ is None:
        raise ApiError(400, "response_format of type json_schema needs json_schema.schema", param="response_format")
    return given.json_schema.schema_


class ChatAnswer(Answer):
    """An answer of /v1/chat/completions."""

    mark = b"data: [DONE]\n\n"
    prefix, kinds = "chatcmpl", ("chat.completion", "chat.completion.chunk")
    request: ChatRequest

    def choice(self, i: int, result: GenerationResult) -> dict[str, Any]:
        reader = self.readers[i]
        content = "".join(block.text for block in reader.of_kind("text"))
        calls = [self._call(i, block) for block in reader.of_kind("call")]
        message: dict[str, Any] = {"role": "assistant", "content": content, "refusal": None, "annotations": []}
        if thoughts := reader.of_kind("reasoning"):
            message["reasoning_content"] = "".join(block.text for block in thoughts)
        if calls:
            message |= {"content": content or None, "tool_calls": calls}
        found = {"index": i, "message": message, "logprobs": self._logprobs(result), **self._end(i, result)}
        return found | self.ours(i, result)

    def empty_part(self, i: int) -> dict[str, Any]:
        return _part(i)

    def first_parts(self, i: int) -> list[dict[str, Any]]:
        return [_part(i, role="assistant", content=None)]

    def parts(self, i: int, piece: Piece) -> list[dict[str, Any]]:
        found = super().parts(i, piece)
        logprobs, ours = self._logprobs(piece), self.ours(i, piece)
        if logprobs or ours:
            found = found or [_part(i)]
            found[0] |= {"logprobs": logprobs} | ours
        return found

    def opened(self, i: int, block: Block) -> list[dict[str, Any]]:
        return [self._calling(i, block, **self._call(i, block, "")) for _ in range(block.kind == "call")]

    def more(self, i: int, block: Block, text: str) -> list[dict[str, Any]]:
        if block.kind == "call":
            return [self._calling(i, block, function={"arguments": text})]
        return [_part(i, **{_MEMBERS[block.kind]: text})]

    def ending(self, i: int, result: GenerationResult) -> list[dict[str, Any]]:
        return [_part(i) | self._end(i, result)]

    def _calling(self, i: int, block: Block, **members: Any) -> dict[str, Any]:
        return _part(i, tool_calls=[{"index": self.readers[i].of_kind("call").index(block), **members}])

    def _call(self, i: int, block: Block, arguments: str | None = None) -> dict[str, Any]:
        function = {"name": block.name, "arguments": block.text if arguments is None else arguments}
        return {"id": self.call_id("call", i, block), "type": "function", "function": function}

    def _logprobs(self, found: GenerationResult | Piece) -> dict[str, Any] | None:
        return of_chat(self.tokenizer, found.logprobs or []) if self.request.logprobs else None

    def _end(self, i: int, result: GenerationResult) -> dict[str, str]:
        """The finish_reason."""
        called = self.has_called(i) and result.finish_reason == "stop"
        return {"finish_reason": "tool_calls"} if called else ended(result)


def _part(i: int, **delta: Any) -> dict[str, Any]:
    return {"index": i, "delta": delta, "logprobs": None, "finish_reason": None}
