"""/tokenize, /detokenize and /tokenizer_info."""

from __future__ import annotations

from typing import Any

import pystaged
from pystaged._core import Tokenizer
from pystaged.recommended import ANSWER_TOKENS
from pystaged.server.answer_types import Detokenized, TokenizerInfo, TokenPiece, Tokens
from pystaged.server.errors import ApiError
from pystaged.server.request_types import DetokenizeRequest, TokenizeRequest
from pystaged.server.state import State

_MOST_PIECES = 1 << 17  # more, as JSON, would take seconds in which nobody else is answered
_TEMPLATE = "tokenizer.chat_template"


def tokenize(state: State, request: TokenizeRequest) -> Tokens:
    """The tokens of a text: as llama-server counts them, without what begins texts, or as vLLM, with it."""
    is_content = request.content is not None
    text = request.content if is_content else request.prompt
    if text is None:
        raise ApiError(400, "give the text as content or as prompt", param="content")
    asked = request.add_special if request.add_special is not None else request.add_special_tokens
    tokenizer = state.engine.tokenizer
    try:
        found = tokenizer.encode(
            text,
            add_special=not is_content if asked is None else asked,
            parse_special=request.parse_special is not False,
        ).tolist()
    except ValueError as error:
        words = "the text is not valid Unicode" if isinstance(error, UnicodeError) else str(error)
        raise ApiError(400, words, param="content" if is_content else "prompt") from None
    if request.with_pieces and len(found) > _MOST_PIECES:
        message = f"the text has {len(found)} tokens; with_pieces tells of {_MOST_PIECES} at most"
        raise ApiError(400, message, param="with_pieces")
    return {
        "tokens": [_piece(tokenizer, token) for token in found] if request.with_pieces else found,
        "count": len(found),
        "max_model_len": state.engine.n_ctx,
    }


def detokenize(state: State, request: DetokenizeRequest) -> Detokenized:
    """The text of tokens, control tokens too."""
    try:
        text = state.engine.tokenizer.decode(request.tokens, special=True)
    except ValueError as error:
        raise ApiError(400, str(error), param="tokens") from None
    return {"content": text, "prompt": text}


def tokenizer_info(state: State) -> TokenizerInfo:
    """Properties of the vocabulary, for clients that count tokens themselves."""
    tokenizer = state.engine.tokenizer
    return {
        "bos_token": token_text(tokenizer, tokenizer.bos) or None,
        "eos_token": token_text(tokenizer, tokenizer.eos) or None,
        "pad_token": None,
        "chat_template": tokenizer.metadata.get(_TEMPLATE),
        "vocab_size": tokenizer.num_tokens,
        "fingerprint": tokenizer.fingerprint,
    }


def properties(state: State) -> dict[str, Any]:
    """The server's properties, without paths."""
    engine, tokenizer = state.engine, state.engine.tokenizer
    answers = {"max_tokens": min(ANSWER_TOKENS, engine.n_ctx), "stop_loops": True}
    params = answers | engine.recommended_sampling | state.settings.defaults
    return {
        "default_generation_settings": {
            "n_ctx": engine.n_ctx,
            "params": params,
        },
        "total_slots": state.settings.parallel,
        "model_alias": state.settings.name,
        "chat_template": tokenizer.metadata.get(_TEMPLATE, ""),
        "bos_token": token_text(tokenizer, tokenizer.bos),
        "eos_token": token_text(tokenizer, tokenizer.eos),
        "build_info": f"pystaged {pystaged.__version__}",
        "system_fingerprint": state.fingerprint,
        "draft": engine.draft_name or "n-grams",
    }


def token_text(tokenizer: Tokenizer, token: int) -> str:
    """How the vocabulary spells a token, "" for -1."""
    return tokenizer.token_text(token) if token >= 0 else ""


def _piece(tokenizer: Tokenizer, token: int) -> TokenPiece:
    data = tokenizer.token_bytes(token, special=True)
    try:
        return {"id": token, "piece": data.decode()}
    except UnicodeDecodeError:
        return {"id": token, "piece": list(data)}
