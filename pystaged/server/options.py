"""Convert a request's members to options of the engine."""

from __future__ import annotations

import re
import secrets
from collections.abc import Mapping, Sequence
from typing import Any

from pystaged._core import Tokenizer
from pystaged.decoding.text import USUAL, Text, TokenRoles
from pystaged.engine import Engine
from pystaged.options.config import GenerationConfig, TextOptions
from pystaged.options.recommended import ANSWER_TOKENS
from pystaged.options.table import SAMPLING
from pystaged.sampling.definitions import GrammarError
from pystaged.sampling.text import Prompt, encode_continuation
from pystaged.server.errors import ApiError, unsupported
from pystaged.server.request_types import ChatRequest, Part, TextRequest, TurnRequest, joined

# Other servers' names for the same options.
_ALIASES = {
    "repetition_penalty": "repeat_penalty",
    "n_predict": "max_tokens",
    "n_cmpl": "n",
    "thinking_budget_tokens": "reasoning_budget_tokens",
    "thinking_token_budget": "reasoning_budget_tokens",
}
# Unsupported members that would change the answer, with the values that have no effect.
_UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    "audio": (),
    "modalities": (["text"],),
    "functions": ([],),
    "function_call": ("none",),
    "web_search_options": (),
    "use_beam_search": (False,),
    "chat_template": (),
    "mirostat": (0,),
    "dynatemp_range": (0,),
    "top_n_sigma": (-1, 0),
    "tfs_z": (1,),
    "adaptive_target": (-1,),
    "n_indent": (0,),
    "t_max_predict_ms": (-1, 0),
    "samplers": ([], ["top_k", "top_p", "infill"]),  # llama.vim's; "infill" rounds off rare texts, and is left out
    "lora": ([],),
    "post_sampling_probs": (False,),
    "image_data": ([],),
    **dict.fromkeys(("guided_json", "guided_regex", "guided_choice", "guided_grammar", "structured_outputs"), ()),
    **dict.fromkeys(("allowed_token_ids", "bad_words"), ([],)),
}


def renamed(body: dict[str, Any], ignored: Sequence[str] = ()) -> dict[str, Any]:
    """Rename other servers' members to this server's names. Raises ApiError for unsupported ones, but for `ignored`."""
    refuse({name: value for name, value in body.items() if name not in ignored}, _UNSUPPORTED)
    return {_ALIASES.get(name, name) if _ALIASES.get(name) not in body else name: value for name, value in body.items()}


def refuse(given: Mapping[str, Any], names: Mapping[str, tuple[Any, ...]]) -> None:
    """Raise ApiError for an unsupported member, unless its value has no effect."""
    for name, harmless in names.items():
        value = given.get(name)
        if value is not None and value not in harmless:
            raise unsupported(name, f"{name} is not supported by this server; leave it out")


def chat_request(request: TurnRequest, messages: Sequence[Mapping[str, Any]], **more: Any) -> ChatRequest:
    """Convert a request of another interface to one for /v1/chat/completions."""
    same = request.model_dump(include=set(TurnRequest.model_fields), exclude_none=True)
    given = {name: value for name, value in more.items() if value is not None}
    return ChatRequest.model_validate({**same, "messages": messages, **given})


def text_of(content: str | Sequence[Part], param: str, types: Sequence[str]) -> str:
    """The text of a message's content. Raises ApiError for a part of no such type, which the model would miss."""
    for part in () if isinstance(content, str) else content:
        if part.type not in types:
            raise unsupported(param, f"content of type {part.type} is not supported: the model reads text only")
    return joined(content)


def text_options(
    request: TextRequest, defaults: dict[str, Any], engine: Engine, usual: int = ANSWER_TOKENS
) -> dict[str, Any]:
    """The TextOptions of a request's sequences. defaults: the server's options, which a request may override; its
    max_tokens is also a limit. usual: the default of max_tokens."""
    given = {name: getattr(request, name) for name in (*SAMPLING, "grammar", "json_schema", "speculate", "stop_loops")}
    given["logit_bias"] = _biases(request.logit_bias, engine.tokenizer) if request.logit_bias else None
    if request.top_k is not None:
        given["top_k"] = max(request.top_k, 0)  # vLLM's -1
    if request.stop is not None:
        given["stop"] = [text for text in ([request.stop] if isinstance(request.stop, str) else request.stop) if text]
    given["reuse"] = False if request.cache_prompt is False else None
    options = engine.recommended_sampling | defaults | {name: each for name, each in given.items() if each is not None}
    options["max_tokens"] = _max_tokens(request.max_tokens, defaults.get("max_tokens"), engine.n_ctx, usual)
    options["seed"] = _seed(request.seed, defaults.get("seed"))
    return options


def checked(options: dict[str, Any]) -> GenerationConfig:
    """Check options and make the engine's config. Raises ApiError that names the wrong option."""
    try:
        return GenerationConfig(**options)
    except (ValueError, TypeError) as error:
        raise _blamed(error) from None


def begun(
    engine: Engine, prompts: Sequence[Prompt], config: GenerationConfig, n: int, form: str, roles: TokenRoles = USUAL
) -> list[Text]:
    """Prepare n sequences for each prompt; seeds as in Engine.repeated. Raises ApiError. form: the request member that
    constrains the output."""
    try:
        sequences = [engine.start(prompt, config, roles) for prompt in prompts]
        return list(engine.repeated(sequences, n))
    except (GrammarError, ModuleNotFoundError) as error:
        raise ApiError(400, str(error), param=form) from None
    except ValueError as error:
        raise _blamed(error) from None


def _blamed(error: Exception) -> ApiError:
    """Convert an engine's error, which begins with the name of an option."""
    name = re.match(r"(?:an? )?(\w*)", str(error))
    return ApiError(400, str(error), param=name[1] if name and name[1] in TextOptions.__annotations__ else None)


def _max_tokens(asked: int | None, most: int | None, room: int, usual: int) -> int:
    given = (most or usual) if asked is None else room if asked < 0 else asked
    return min(given, most or room, room)


def _seed(asked: int | None, default: int | None) -> int:
    """The seed of the request or of the server; a random one if there is none, or for -1."""
    seed = default if asked is None else asked
    return secrets.randbits(32) if seed is None or seed == -1 else seed % 2**64


def _biases(given: dict[str, float], tokenizer: Tokenizer) -> dict[int | str, float]:
    """Biases by token id. A key is an id in digits, or a text whose tokens all get the bias; -1e30 or less excludes
    them."""
    found: dict[int | str, float] = {}
    for key, bias in given.items():
        try:
            tokens = [int(key)] if re.fullmatch("[0-9]{1,9}", key) else encode_continuation(tokenizer, key).tolist()
        except UnicodeError:
            raise ApiError(400, "logit_bias has a text that is not valid Unicode", param="logit_bias") from None
        found |= dict.fromkeys(tokens, float("-inf") if bias <= -1e30 else bias)
    return found
