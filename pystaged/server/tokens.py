"""/tokenize and /detokenize."""

from __future__ import annotations

from typing import Any

from pystaged._core import Tokenizer
from pystaged.server.errors import ApiError
from pystaged.server.request_types import DetokenizeRequest, TokenizeRequest
from pystaged.server.state import State

_MOST_PIECES = 1 << 17  # encoding more as JSON would block the server for seconds


def tokenize(state: State, request: TokenizeRequest) -> dict[str, Any]:
    """Tokenize a text: `content` without bos, as llama-server does, or `prompt` with it, as vLLM does."""
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
        message = f"the text has {len(found)} tokens; with_pieces supports at most {_MOST_PIECES}"
        raise ApiError(400, message, param="with_pieces")
    return {
        "tokens": [_piece(tokenizer, token) for token in found] if request.with_pieces else found,
        "count": len(found),
        "max_model_len": state.engine.n_ctx,
    }


def detokenize(state: State, request: DetokenizeRequest) -> dict[str, Any]:
    """Decode tokens, including control tokens."""
    try:
        text = state.engine.tokenizer.decode(request.tokens, special=True)
    except ValueError as error:
        raise ApiError(400, str(error), param="tokens") from None
    return {"content": text, "prompt": text}


def _piece(tokenizer: Tokenizer, token: int) -> dict[str, Any]:
    data = tokenizer.token_bytes(token, special=True)
    try:
        return {"id": token, "piece": data.decode()}
    except UnicodeDecodeError:
        return {"id": token, "piece": list(data)}
