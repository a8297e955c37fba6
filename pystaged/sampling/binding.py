"""Binds a sampling to a vocabulary and a prompt."""

from __future__ import annotations

import math
import weakref

from pystaged._core import Tokenizer
from pystaged.options.config import SamplingConfig
from pystaged.sampling.constraint import Constraint, count_allowed
from pystaged.sampling.text import encode_continuation

_NEVER = 1 << 62  # tokens that no sequence can have


def bind(
    sampling: SamplingConfig,
    tokenizer: Tokenizer,
    prompt_length: int,
    logprobs: int | None = None,
    constraint: Constraint | None = None,
) -> SamplingConfig:
    """The sampling of one sequence, with tokens for its strings and the position where min_tokens end.

    Args:
        prompt_length: tokens of the prompt.
        logprobs: number of likeliest tokens whose log-probabilities are reported; None reports none at all.
        constraint: the sequence's constraint, or None.

    Raises:
        ValueError: a token is not in the vocabulary, or no first token is allowed.
    """
    suppressed = tokenizer.suppressed
    if not sampling.has_rules and logprobs is None and not suppressed:
        return sampling
    num_tokens = tokenizer.num_tokens
    if logprobs is not None and logprobs > num_tokens:
        raise ValueError(f"logprobs must be at most the vocabulary's {num_tokens}, not {logprobs}")
    biases: dict[int, float] = {}
    for key, bias in sampling.logit_bias.items():
        token = _token(tokenizer, key)
        if token in biases:
            raise ValueError(f"logit_bias names token {token} twice, as a number and as {key!r}")
        biases[token] = bias
    biases |= dict.fromkeys(suppressed, -math.inf)
    ends = tokenizer.end_tokens.tolist() if sampling.min_tokens or sampling.ignore_eos else []
    excluded = {token for token, bias in biases.items() if bias == -math.inf}
    if len(excluded.union(ends)) == num_tokens:
        raise ValueError("logit_bias, min_tokens and ignore_eos exclude all tokens; allow at least one")
    first = None if constraint is None or constraint.is_complete else constraint.mask([])
    if first is not None and not count_allowed(first, excluded.union(ends)):
        raise ValueError(
            "logit_bias, min_tokens, ignore_eos and the grammar together exclude all first tokens; allow at least one"
        )
    breaks = sampling.dry_multiplier and sampling.dry_penalty_last_n
    rules = sampling.native_rules(
        logit_bias=list(biases.items()),
        end_tokens=ends,
        min_length=_NEVER if sampling.ignore_eos else prompt_length + sampling.min_tokens,
        dry_breakers=_breakers(tokenizer, sampling.dry_sequence_breakers) if breaks else [],
    )
    return sampling.with_native(sampling.native_sampling(rules if sampling.has_rules or suppressed else None, logprobs))


def _token(tokenizer: Tokenizer, key: int | str) -> int:
    """The token that a key of logit_bias names."""
    if isinstance(key, int):
        if key >= tokenizer.num_tokens:
            raise ValueError(f"logit_bias names token {key}, but the vocabulary has {tokenizer.num_tokens}")
        return key
    tokens = encode_continuation(tokenizer, key).tolist()
    if len(tokens) != 1:
        raise ValueError(f"logit_bias names {key!r}, which is {len(tokens)} tokens, {tokens}; give one or its number")
    return int(tokens[0])


_MOST_KNOWN = 32  # cached strings per vocabulary
_known: weakref.WeakKeyDictionary[Tokenizer, dict[str, list[list[int]]]] = weakref.WeakKeyDictionary()


def _breakers(tokenizer: Tokenizer, texts: tuple[str, ...]) -> list[list[int]]:
    """Token sequences that contain one of DRY's sequence breakers; cached for each vocabulary."""
    known = _known.setdefault(tokenizer, {})
    pieces = [] if known.keys() >= set(texts) else _pieces(tokenizer)
    breakers = []
    for text in texts:
        if text not in known:
            if len(known) >= _MOST_KNOWN:
                known.clear()
            known[text] = sequences_of(tokenizer, text, pieces)
        breakers += known[text]
    return breakers


def _pieces(tokenizer: Tokenizer) -> list[bytes]:
    return [tokenizer.token_bytes(token, True) for token in range(tokenizer.num_tokens)]


def sequences_of(tokenizer: Tokenizer, text: str, pieces: list[bytes] | None = None) -> list[list[int]]:
    """Token sequences that contain a string: one token that contains it, or a token that ends with its beginning,
    followed by the tokens of the rest. pieces: of all tokens, if known. Raises ValueError for an empty string."""
    if not text:
        raise ValueError("the text is empty")
    data, pieces = text.encode(), pieces or _pieces(tokenizer)
    rests = _rests(tokenizer, text, max(map(len, pieces)))
    begins = tuple(data[:at] for at in rests)
    return [
        [token, *rest]
        for token, piece in enumerate(pieces)
        if data in piece or piece.endswith(begins)  # of a large vocabulary few are
        for rest in ([[]] if data in piece else [rest for at, rest in rests.items() if piece.endswith(data[:at])])
    ]


def _rests(tokenizer: Tokenizer, text: str, longest: int) -> dict[int, list[int]]:
    """The tokens of the rests of a string, by the byte at which a rest begins: after each character within `longest`
    and after each token of the string."""
    rests: dict[int, list[int]] = {}
    for i in range(1, min(len(text), longest + 1)):
        rests[len(text[:i].encode())] = encode_continuation(tokenizer, text[i:], parse_special=False).tolist()
    whole, at = encode_continuation(tokenizer, text, parse_special=False).tolist(), 0
    for i, token in enumerate(whole[:-1], 1):
        at += len(tokenizer.token_bytes(token, True))
        rests.setdefault(at, whole[i:])  # in the middle of a character
    return rests
