"""/tokenize and /detokenize, and embeddings in OpenAI's format."""

from __future__ import annotations

import base64
from typing import Any

import numpy as np
from anyio.to_thread import run_sync
from numpy.typing import NDArray

from pystaged._core import Tokenizer
from pystaged.engine import Engine
from pystaged.sampling.text import Prompt
from pystaged.server.completions import listed
from pystaged.server.errors import ApiError, too_long
from pystaged.server.models import State
from pystaged.server.options import refuse
from pystaged.server.request_types import DetokenizeRequest, EmbeddingsRequest, TokenizeRequest

_MOST_TOKENS = 300_000  # of a request for embeddings, as OpenAI has it
_MOST_PIECES = 1 << 17  # encoding more as JSON would block the server for seconds


def tokenize(state: State, request: TokenizeRequest) -> dict[str, Any]:
    """Tokenize a text: `content` without bos, as llama-server does, or `prompt` with it, as vLLM does."""
    is_content = request.content is not None
    text = request.content if is_content else request.prompt
    if text is None:
        raise ApiError(400, "give the text as content or as prompt", param="content")
    asked = request.add_special if request.add_special is not None else request.add_special_tokens
    adds = not is_content if asked is None else asked
    tokenizer = state.engine.tokenizer
    try:
        found = tokenizer.encode(text, add_special=adds, parse_special=request.parse_special is not False).tolist()
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


async def embeddings(state: State, request: EmbeddingsRequest) -> dict[str, Any]:
    """Embed texts. Raises ApiError."""
    vectors, count = await embedded(state, request)
    in_text = request.encoding_format == "base64"
    told = [base64.b64encode(each.astype("<f4").tobytes()).decode() if in_text else each.tolist() for each in vectors]
    data = [{"object": "embedding", "index": i, "embedding": each} for i, each in enumerate(told)]
    usage = {"prompt_tokens": count, "total_tokens": count}
    return {"object": "list", "data": data, "model": state.name, "usage": usage}


async def embedded(state: State, request: EmbeddingsRequest) -> tuple[NDArray[np.float32], int]:
    """The embeddings of texts, float32[n, width], and the number of their tokens. Raises ApiError."""
    refuse({"dimensions": request.dimensions}, {"dimensions": ()})
    tokens = await run_sync(_tokens, state.engine, listed(request.input))
    # One text at a time, so that the work ends when the client disconnects; of all requests, because each text takes a
    # context of its own, outside the limits on texts that are written.
    vectors = [await run_sync(state.engine.embed, [text], limiter=state.embedding) for text in tokens]
    return np.concatenate(vectors), sum(map(len, tokens))


def _tokens(engine: Engine, texts: list[Prompt]) -> list[Prompt]:
    """The tokens of each text. Raises ApiError."""
    tokens: list[Prompt] = []
    for i, text in enumerate(texts):
        if not text:
            raise ApiError(400, f"text {i} of the input is empty", param="input")
        try:
            ids = engine.tokenizer.encode(text) if isinstance(text, str) else text
        except UnicodeError:
            raise ApiError(400, "the input is not valid Unicode text", param="input") from None
        if len(ids) > engine.n_ctx:
            raise too_long(len(ids), engine.n_ctx, engine.model.max_context, "input")
        tokens.append(ids)
    if (count := sum(map(len, tokens))) > _MOST_TOKENS:
        raise ApiError(400, f"the input has {count} tokens; send at most {_MOST_TOKENS} at once", param="input")
    return tokens
