"""The provider `pystaged` of inspect_ai: `inspect eval task.py --model pystaged/smollm2`.

inspect_ai imports this module by its entry point. Messages are read and answered as by `pystaged serve`.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from functools import cache
from logging import getLogger
from pathlib import Path
from typing import Any

from anyio.to_thread import run_sync
from inspect_ai import hooks, model
from inspect_ai.solver._task_state import sample_state  # nothing public tells the epoch
from inspect_ai.tool import ToolCall, ToolFunction

import pystaged
from pystaged.async_stream import AsyncStream
from pystaged.chain import Chain
from pystaged.options import SAMPLING
from pystaged.receipt import Receipt, text_hash
from pystaged.result import GenerationResult
from pystaged.server import chats
from pystaged.server.errors import ApiError
from pystaged.server.options import renamed
from pystaged.server.request_types import ChatRequest
from pystaged.server.settings import Settings
from pystaged.server.state import State

_AT_ONCE = 16  # texts, where inspect_ai does not adapt their number
_SAME = "frequency_penalty logprobs max_tokens parallel_tool_calls presence_penalty reasoning_effort temperature "
_SAME += "top_k top_logprobs top_p"  # options that are members of requests, too
_OTHER = {"num_choices": "n", "reasoning_tokens": "reasoning_budget_tokens", "stop_seqs": "stop"}


@model.modelapi(name="pystaged")
class InspectModel(model.ModelAPI):  # type: ignore[misc]
    """A model of inspect_ai.

    A text depends on its prompt and its options alone. Without a temperature decoding is greedy; the seed is 0 if none
    is given, and counts up from epoch to epoch. extra_body has members of requests to `pystaged serve`. Options that
    have no equivalent there are ignored.

    Args:
        model_name: a name or path, as for pystaged.load.
        receipts: a new file; the receipts of all texts so far are written to it at the end of a run, as a chain. Texts
            whose options receipts do not hold are left out: those with limits or control tokens for reasoning or calls.
        **options: of pystaged.load, such as draft, n_ctx, kv and num_threads.
        base_url, api_key, config: of inspect_ai.

    Raises:
        As pystaged.load; FileExistsError, FileNotFoundError for `receipts`.
    """

    def __init__(
        self, model_name: str, base_url: Any, api_key: Any, config: Any, receipts: str | None = None, **options: Any
    ) -> None:
        super().__init__(model_name, base_url, api_key, [], config)
        self._receipts = _receipts_for(Path(receipts).absolute()) if receipts else None
        self._engine = pystaged.load(model_name, report=getLogger(__name__).info, **options)
        defaults = {name: option.default for name, option in SAMPLING.items()}
        self._state = State(self._engine, Settings(model_name, defaults=defaults))

    def close(self) -> None:
        """Free the model."""
        self._engine.close()

    def max_connections(self) -> int:
        """The number of texts at once."""
        return _AT_ONCE

    async def tokenize(self, text: str) -> list[int]:
        """The tokens of a text."""
        return self._engine.encode(text, add_special=False).tolist() if text else []

    async def count_text_tokens(self, text: str) -> int:
        """The number of tokens of a text."""
        return len(await self.tokenize(text))

    async def generate(self, input: Any, tools: Any, tool_choice: Any, config: Any) -> model.ModelOutput:
        """Answer messages. The output's metadata has the SHA-256 of each choice's receipt, None for a text without one,
        and the first one's seed.

        Raises:
            ValueError: messages, tools or options are invalid.
            ApiError, ChatTemplateError: they cannot be used with this model.
        """
        members = _members(input, tools, tool_choice, config)
        try:
            answer = await run_sync(chats.begin, self._state, ChatRequest.model_validate(renamed(members)))
        except ApiError as error:
            if "n_prompt_tokens" not in error.body["error"]:
                raise
            said = f"{error.body['error']['n_prompt_tokens']} tokens do not fit into -M n_ctx={self._engine.n_ctx}"
            return model.ModelOutput.from_content(self.model_name, said, "model_length", said)
        streams = [AsyncStream(self._engine.runtime.scheduler, text) for text in answer.sequences]
        texts = [asyncio.ensure_future(stream.finish()) for stream in streams]
        try:
            results = await asyncio.gather(*texts)
        except BaseException:
            for text in texts:
                text.cancel()
            raise
        return await run_sync(self._output, answer, results)  # the first receipt hashes the model's file

    def _output(self, answer: chats.ChatAnswer, results: Sequence[GenerationResult]) -> model.ModelOutput:
        receipts = [result.receipt.to_json() if result.origin else None for result in results]
        if self._receipts is not None:
            self._receipts.update(filter(None, receipts))
        keys = [text_hash(f"{text.prompt_tokens.tolist()}{text.tokens}") for text in answer.sequences]
        choices = [self._choice(answer.choice(i, result), keys[i]) for i, result in enumerate(results)]
        usage: Any = answer.usage()  # after the choices, whose reasoning it counts
        cached = usage["prompt_tokens_details"]["cached_tokens"]
        return model.ModelOutput(
            model=self.model_name,
            choices=choices,
            usage=model.ModelUsage(
                input_tokens=usage["prompt_tokens"] - cached,
                input_tokens_cache_read=cached,
                output_tokens=usage["completion_tokens"],
                total_tokens=usage["total_tokens"],
                reasoning_tokens=usage.get("completion_tokens_details", {}).get("reasoning_tokens"),
            ),
            metadata={"receipts": [each and text_hash(each) for each in receipts], "seed": results[0].seed},
        )

    def _choice(self, choice: dict[str, Any], key: str) -> model.ChatCompletionChoice:
        """A choice of the server's in inspect_ai's form. key: identifies its text; prompts of later turns have it."""
        message, stop, logprobs = choice["message"], choice["finish_reason"], choice["logprobs"]
        content: Any = message["content"] or ""
        if "reasoning_content" in message:
            reasoning = model.ContentReasoning(reasoning=message["reasoning_content"])
            content = [reasoning, model.ContentText(text=content)]
        calls = [
            _call(f"call_{key[:8]}{i}", **call["function"]) for i, call in enumerate(message.get("tool_calls", ()))
        ]
        return model.ChatCompletionChoice(
            message=model.ChatMessageAssistant(
                content=content, tool_calls=calls or None, model=self.model_name, source="generate"
            ),
            stop_reason="max_tokens" if stop == "length" else stop,
            stop_details=model.StopDetails(type=choice["stop_reason"]) if "stop_reason" in choice else None,
            logprobs=model.Logprobs(content=logprobs["content"]) if logprobs else None,
        )


@cache  # a hook that is registered is announced with each evaluation, so it is only where it is needed
def _chains() -> dict[Path, set[str]]:
    """Receipts as JSON by the file that they are written to at the end of a run."""
    chains: dict[Path, set[str]] = {}

    @hooks.hooks(name="receipts", description="receipts of pystaged's texts")
    class Receipts(hooks.Hooks):  # type: ignore[misc]
        async def on_run_end(self, _: Any) -> None:
            for path, receipts in chains.items():
                if receipts:  # sorted, because texts end in any order
                    Chain.save(path, map(Receipt.from_json, sorted(receipts)))

    return chains


def _receipts_for(path: Path) -> set[str]:
    """The receipts for a file. Raises FileExistsError, FileNotFoundError."""
    chains = _chains()
    if path not in chains and path.exists():
        raise FileExistsError(f"{path} exists; name a new file for the receipts of this evaluation")
    if not path.parent.is_dir():
        raise FileNotFoundError(f"there is no folder {path.parent} for the receipts")
    return chains.setdefault(path, set())


def _members(messages: Any, tools: Any, tool_choice: Any, config: Any) -> dict[str, Any]:
    """The members of a request for a chat completion."""
    found = {_OTHER.get(name, name): getattr(config, name) for name in (*_SAME.split(), *_OTHER)}
    state, seed = sample_state(), config.seed or 0
    if state and seed >= 0:  # -1 draws one
        seed += (state.epoch - 1) * (config.num_choices or 1)
    found["seed"] = seed
    found["messages"] = [_message(message) for message in messages]
    found["logit_bias"] = {str(token): bias for token, bias in (config.logit_bias or {}).items()}
    if tools:
        schemas = [each.model_dump(include={"name", "description", "parameters"}, exclude_none=True) for each in tools]
        found["tools"] = [{"type": "function", "function": schema} for schema in schemas]
        one = {"function": {"name": tool_choice.name}} if isinstance(tool_choice, ToolFunction) else tool_choice
        found["tool_choice"] = "required" if one == "any" else one
    if schema := config.response_schema:
        described = {"name": schema.name, "schema": schema.json_schema.model_dump(exclude_none=True)}
        found["response_format"] = {"type": "json_schema", "json_schema": described}
    return found | (config.extra_body or {})


def _message(message: Any) -> dict[str, Any]:
    """A message in OpenAI's form. Raises ValueError for images and the like."""
    parts = message.content_list
    if other := next((part.type for part in parts if part.type not in ("text", "reasoning")), None):
        raise ValueError(f"pystaged's models read text alone, but a message has content of type {other}")
    found = {"role": message.role, "content": message.text}
    if message.role == "tool":
        found["tool_call_id"] = message.tool_call_id
        found["content"] = f"Error: {message.error.message}" if message.error else message.text
    if message.role == "assistant":
        found["reasoning_content"] = "".join(part.reasoning for part in parts if part.type == "reasoning") or None
        found["tool_calls"] = [
            {"id": call.id, "function": {"name": call.function, "arguments": json.dumps(call.arguments)}}
            for call in message.tool_calls or ()
        ] or None
    return found


def _call(key: str, name: str, arguments: str) -> ToolCall:
    """A call that the model wrote; inspect_ai tells the model what is wrong with its arguments."""
    try:
        found, problem = {**json.loads(arguments or "{}")}, None
    except (ValueError, TypeError, RecursionError) as error:
        found, problem = {}, f"The arguments are not a JSON object ({error}): {arguments}"
    return ToolCall(id=key, function=name, arguments=found, parse_error=problem)
