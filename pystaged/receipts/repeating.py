"""Generates a receipt's text again and compares them."""

from __future__ import annotations

import math
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from pystaged._core import Tokenizer
from pystaged.decoding.origin import ARITHMETIC
from pystaged.decoding.readers import Stream
from pystaged.engine import Engine
from pystaged.loading import names
from pystaged.platform.seen import SeenModel
from pystaged.receipts.receipt import Receipt, current_versions, text_hash


@dataclass(frozen=True, slots=True)
class Difference:
    """The first difference between a text generated here and a receipt's.

    index: of the first token that differs, or the number of tokens if all are the same. receipt, here: the two tokens;
    None where a text has ended. gap: log-probability of the token here less that of the receipt's, natural, unfiltered,
    at temperature 1; nan if one of them is None or cannot be evaluated. what: "tokens"; if all tokens are the same,
    "end" (another finish_reason) or "text" (another hash).
    """

    index: int
    receipt: int | None
    here: int | None
    gap: float = math.nan
    what: str = "tokens"


def find_model(receipt: Receipt) -> Path:
    """Find a receipt's model by its hash, ignoring its name, among those here: of packages, in the cache, and Ollama's.
    Nothing is downloaded. Raises FileNotFoundError if it is not there."""
    record = receipt.model
    for path in names.here().values():
        with suppress(OSError):  # removed, or another user's
            file = SeenModel.now(path)
            if file.size == record.size and file.sha256() == record.sha256:
                return path
    raise FileNotFoundError(
        f"no model here has the receipt's SHA-256 {record.sha256}; its model was {record.file} ({record.name}), "
        f"{record.size} bytes; pass its file with --model"
    )


def check_model(receipt: Receipt, file: SeenModel) -> None:
    """Check that a file is the receipt's model. Raises ValueError if not; OSError as SeenModel.sha256."""
    expected = receipt.model
    if file.size != expected.size or file.sha256() != expected.sha256:
        raise ValueError(
            f"the receipt is of {expected.file} ({expected.name}), {expected.size} bytes with SHA-256 "
            f"{expected.sha256}; {file.path} is another: {file.size} bytes with SHA-256 {file.sha256()}"
        )


def repeat(engine: Engine, receipt: Receipt, *, speculate: bool = True) -> Difference | None:
    """Generate a receipt's text again, up to the first difference.

    Args:
        speculate: False decodes plainly.

    Returns:
        The first difference, None if the text is the same.

    Raises:
        ValueError: the model, kv or n_ctx differs from the receipt's, the model lacks its tokens or options, or is not
            exact; see Engine.check_exact.
        ContextFullError, DeviceLostError: as in Engine.stream.
        OSError: the model's file cannot be read, or was changed since it was loaded.
    """
    check_model(receipt, engine.file)
    engine.check_exact()
    for name, expected, found in (("kv", receipt.kv, engine.model.kv), ("n_ctx", receipt.n_ctx, engine.n_ctx)):
        if expected != found:
            raise ValueError(
                f"the receipt's {name} is {expected}, and here it is {found}; load the model with {name}={expected!r}"
            )
    if receipt.vocabulary != engine.vocabulary:
        raise ValueError(
            f"the receipt's vocabulary is {receipt.vocabulary}, and the model's is {engine.vocabulary}: "
            "the receipt was changed, or another version of llama-cpp-python reads the file differently"
        )
    config = replace(receipt.config, speculate=speculate)
    at, count, other = 0, len(receipt.tokens), None
    with Stream(engine.start(receipt.prompt, config)) as stream:
        for token in (token for piece in stream for token in piece.tokens):
            if at == count or token != receipt.tokens[at]:
                other = token
                break
            at += 1
    result = stream.result
    if other is not None:
        there = receipt.tokens[at] if at < count else None
        return Difference(at, there, other, _gap(engine, receipt, at, there, other))
    if at < count:
        return Difference(at, receipt.tokens[at], None)
    if result.finish_reason != receipt.finish_reason:
        return Difference(at, None, None, what="end")
    return None if text_hash(result.text) == receipt.text_sha256 else Difference(at, None, None, what="text")


def _gap(engine: Engine, receipt: Receipt, at: int, there: int | None, here: int) -> float:
    """Log-probability of the token here less that of the receipt's, natural; nan if one cannot be evaluated."""
    if there is None:
        return math.nan
    before = [*receipt.prompt, *receipt.tokens[:at]]
    try:
        ours, theirs = (engine.score([*before, token]).logprobs[-1] for token in (here, there))
    except ValueError:  # the context is full, or the model has no such token
        return math.nan
    return float(ours - theirs)


def described(difference: Difference | None, receipt: Receipt, tokenizer: Tokenizer) -> str:
    """That the texts are the same, or where and how far they differ, in a line."""

    def spelled(token: int | None) -> str:
        if token is None:
            return "the end"
        if token >= tokenizer.num_tokens:
            return f"token {token}, which the model lacks,"
        return f"{tokenizer.token_bytes(token, True).decode('utf-8', 'replace')!r} (token {token})"

    count = len(receipt.tokens)
    if difference is None:
        return f"same: {count} tokens, ended by {receipt.finish_reason}, text with SHA-256 {receipt.text_sha256}"
    if difference.what == "end":
        return f"differs: the {count} tokens are the same, but the end is not: {receipt.finish_reason!r} in the receipt"
    if difference.what == "text":
        another = f"another text, SHA-256 {receipt.text_sha256}"
        return f"differs: the {count} tokens are the same, but the receipt has {another}"
    two = f"{spelled(difference.receipt)} in the receipt and {spelled(difference.here)} here"
    apart = f"; the model's log-probabilities of the two are {abs(difference.gap):.2g} apart"
    apart = "" if math.isnan(difference.gap) else apart
    return f"differs: {difference.index} of {count} tokens are the same, then comes {two}{apart}"


def promise(receipt: Receipt, device: str) -> str:
    """A sentence on whether the versions here promise the same text as the receipt's; "" if nothing differs.

    Args:
        device: the device of the repetition, as for `load`.
    """
    here = current_versions(receipt.config.grammar)
    others = [
        f"{name} {version}, here {here[name]}" for name, version in receipt.versions.items() if version != here[name]
    ]
    said = f"The receipt has {' and '.join(others)}. " if others else ""
    if receipt.device != "cpu":
        return f"{said}It was generated on device {receipt.device!r}; the same text is promised for the CPU only."
    if device != "cpu":
        return f"{said}It is repeated on device {device!r}; the same text is promised for the CPU only."
    if receipt.arithmetic != ARITHMETIC:
        return (
            f"{said}The receipt has arithmetic {receipt.arithmetic} and this version {ARITHMETIC}; the same text is "
            "promised only for the same arithmetic."
        )
    if not others:
        return ""
    same = here.get("llguidance") == receipt.versions.get("llguidance")
    return said + (
        f"Both versions of pystaged have arithmetic {ARITHMETIC} and promise the same text."
        if same
        else "What a grammar allows depends on llguidance, so the same text is not promised."
    )
