"""What the server reports about itself and its model: /v1/models, /health, /props and /tokenizer_info."""

from __future__ import annotations

import pystaged
from pystaged._core import Tokenizer
from pystaged.recommended import ANSWER_TOKENS
from pystaged.server.answer_types import Health, ModelCard, Models, Properties, TokenizerInfo
from pystaged.server.errors import ApiError
from pystaged.server.state import State

_TEMPLATE = "tokenizer.chat_template"


def models(state: State) -> Models:
    """List the server's model."""
    return {"object": "list", "data": [model(state, state.settings.name)]}


def model(state: State, name: str) -> ModelCard:
    """Describe the model of that name. Raises ApiError (404) for any other than the server's."""
    if name != state.settings.name:
        raise ApiError(404, f"there is no model {name!r}", param="model", code="model_not_found")
    engine = state.engine
    return {
        "id": name,
        "object": "model",
        "created": state.created,
        "owned_by": "pystaged",
        "meta": {
            "n_vocab": engine.tokenizer.num_tokens,
            "n_ctx": engine.n_ctx,
            "n_ctx_train": engine.model.max_context,
            "n_embd": engine.model.width,
            "size": engine.model.file_bytes,
        },
    }


def health(state: State) -> Health:
    """Health check; the server is ready as soon as it answers."""
    del state
    return {"status": "ok"}


def tokenizer_info(state: State) -> TokenizerInfo:
    """Properties of the vocabulary, for clients that count tokens."""
    tokenizer = state.engine.tokenizer
    return {
        "bos_token": _spelled(tokenizer, tokenizer.bos) or None,
        "eos_token": _spelled(tokenizer, tokenizer.eos) or None,
        "pad_token": None,
        "chat_template": tokenizer.metadata.get(_TEMPLATE),
        "vocab_size": tokenizer.num_tokens,
        "fingerprint": tokenizer.fingerprint,
    }


def properties(state: State) -> Properties:
    """The server's properties, without file paths."""
    engine, tokenizer = state.engine, state.engine.tokenizer
    answers = {"max_tokens": min(ANSWER_TOKENS, engine.n_ctx), "stop_loops": True}
    params = answers | engine.recommended_sampling | state.settings.defaults
    params["max_tokens"] = min(params["max_tokens"], engine.n_ctx)
    return {
        "default_generation_settings": {"n_ctx": engine.n_ctx, "params": params},
        "total_slots": state.settings.parallel,
        "model_alias": state.settings.name,
        "chat_template": tokenizer.metadata.get(_TEMPLATE, ""),
        "bos_token": _spelled(tokenizer, tokenizer.bos),
        "eos_token": _spelled(tokenizer, tokenizer.eos),
        "build_info": f"pystaged {pystaged.__version__}",
        "system_fingerprint": state.fingerprint,
        "draft": engine.draft_name or "n-grams",
    }


def _spelled(tokenizer: Tokenizer, token: int) -> str:
    """How the vocabulary spells a token, "" for -1."""
    return tokenizer.token_text(token) if token >= 0 else ""
