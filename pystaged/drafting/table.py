"""N-gram tables: a trigram with backoff, counted on the draft's own text, and its file format."""

from __future__ import annotations

import io
import math
import zipfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from pystaged.drafting.katz import LARGEST_VOCABULARY, estimate
from pystaged.platform.files import read_small, whole_file

MOST_TOKENS = 10_000_000
"""Most tokens to count: the table of a larger text may be too large to load."""

_FORMAT_VERSION = 1
_MOST_BYTES = 1 << 28  # bytes of a file
_MOST_UNPACKED = 16, 1 << 20  # times a file's size, plus bytes: tables unpack to two to five times their size
_ARRAYS = (
    "sizes",
    "older",  # keys // (vocab_size + 1), as differences
    "newer",  # keys % (vocab_size + 1)
    "lengths",  # differences of offsets
    "tokens",
    "logprobs",  # steps of -1/16
    "log_backoffs",  # steps of 1/16
)
_STEPS_PER_NAT = 16  # log-probabilities are kept in steps of 1/16 nat: one byte each


class OtherVocabularyError(ValueError):
    """A table's vocabulary is not the model's."""


@dataclass(frozen=True, slots=True, eq=False)
class NgramTable:
    """The most probable next tokens after known pairs of tokens, single tokens, and no token. Immutable.

    A trigram with backoff, counted on text sampled from the draft, as in Spector & Ré 2023 (arXiv
    2308.04623). A row holds the likeliest tokens after one context. It gives the other tokens the log-probabilities of
    the shorter context, plus `log_backoffs[row]`.

    vocab_hash: Tokenizer.fingerprint of the vocabulary; num_tokens: size of the counted text.
    keys: int64[rows], ascending: 0, then v + 1 after v, then (u + 1) * (vocab_size + 1) + v + 1 after u, v.
    offsets: int64[rows + 1] into tokens: int32 and logprobs: float32, natural log rounded to 1/16, best first.
    log_backoffs: float32[rows], natural log.
    """

    vocab_size: int
    vocab_hash: str
    num_tokens: int
    max_successors: int
    keys: NDArray[np.int64] = field(repr=False)
    offsets: NDArray[np.int64] = field(repr=False)
    tokens: NDArray[np.int32] = field(repr=False)
    logprobs: NDArray[np.float32] = field(repr=False)
    log_backoffs: NDArray[np.float32] = field(repr=False)

    def __post_init__(self) -> None:
        for array in (self.keys, self.offsets, self.tokens, self.logprobs, self.log_backoffs):
            array.setflags(write=False)

    @classmethod
    def build(
        cls,
        documents: Iterable[NDArray[np.integer]],
        *,
        vocab_size: int,
        vocab_hash: str,
        max_successors: int = 16,
        min_count: int = 2,
    ) -> NgramTable:
        """Count n-grams inside each document and estimate the table.

        Args:
            documents: token ids, integer[n] each.
            max_successors: tokens kept per context, at most 255.
            min_count: trigrams seen less often are dropped; their probability goes to the backoff.

        Raises:
            ValueError: the vocabulary is too large, or there is no text, or some outside of it.
        """
        _require(1 <= vocab_size <= LARGEST_VOCABULARY, f"vocab_size must be in 1..{LARGEST_VOCABULARY}")
        katz = estimate(documents, vocab_size=vocab_size, max_successors=max_successors, min_count=min_count)
        return cls(
            vocab_size=vocab_size,
            vocab_hash=vocab_hash,
            num_tokens=katz.num_tokens,
            max_successors=max_successors,
            keys=katz.contexts,
            offsets=np.append(0, np.cumsum(katz.lengths)),
            tokens=katz.tokens.astype(np.int32),
            logprobs=np.maximum(_log_steps(katz.probabilities), np.float32(-255 / _STEPS_PER_NAT)),
            log_backoffs=_log_steps(katz.backoffs),
        )

    def after(self, context: Sequence[int], k: int) -> dict[int, float]:
        """The k likeliest of the kept tokens after the last two of `context`, with their probabilities, likeliest
        first; fewer if there are not so many, and none after a token outside the vocabulary."""
        base, last = self.vocab_size + 1, [int(token) + 1 for token in context[-2:]]
        if not all(0 < code < base for code in last):
            return {}
        found, shift = dict[int, float](), 0.0
        for key in [last[0] * base + last[1], last[1], 0] if len(last) == 2 else [*last, 0]:
            row = int(self.keys.searchsorted(key))
            if row < len(self.keys) and self.keys[row] == key:
                head = slice(self.offsets[row], self.offsets[row + 1])
                for token, logprob in zip(self.tokens[head].tolist(), self.logprobs[head].tolist(), strict=True):
                    found.setdefault(token, min(0.0, logprob + shift))
                shift += float(self.log_backoffs[row])
        return {token: math.exp(found[token]) for token in sorted(found, key=found.__getitem__, reverse=True)[:k]}

    def save(self, path: str | Path) -> None:
        """Write one compressed file; after a failure the path is unchanged."""
        older, newer = np.divmod(self.keys, self.vocab_size + 1)
        with whole_file(Path(path)) as part, part.open("wb") as file:
            np.savez_compressed(
                file,
                sizes=np.array([_FORMAT_VERSION, self.vocab_size, self.num_tokens, self.max_successors], np.int64),
                vocab_hash=np.array(self.vocab_hash),
                older=np.diff(older, prepend=0).astype(np.uint32),
                newer=newer.astype(np.uint32),
                lengths=np.diff(self.offsets).astype(np.uint8),
                tokens=self.tokens.astype(np.uint32),
                logprobs=(-_STEPS_PER_NAT * self.logprobs).astype(np.uint8),
                log_backoffs=(_STEPS_PER_NAT * self.log_backoffs).astype(np.int16),
            )

    @classmethod
    def load(cls, path: str | Path, *, vocab_hash: str | None = None) -> NgramTable:
        """Read a saved table and check what lookups rely on.

        Raises:
            OSError: the file cannot be read.
            ValueError: it is no n-gram table, or damaged.
            OtherVocabularyError: its vocabulary is not `vocab_hash`.
        """
        try:
            table = _decode(read_small(Path(path), _MOST_BYTES))
        except ValueError as error:
            raise ValueError(f"{path}: {error}; build the n-gram table again or fetch a fresh copy") from error
        if vocab_hash is not None and vocab_hash != table.vocab_hash:
            raise OtherVocabularyError(
                f"{path}: this n-gram table is for vocabulary {table.vocab_hash!r}, the model has {vocab_hash!r}; "
                "use the model's own table or build one from its text"
            )
        return table


def _log_steps(probabilities: NDArray[np.float64]) -> NDArray[np.float32]:
    """Natural logs rounded to steps of 1/16. The floor 1e-300 stands for a backoff of 0, which no lookup reaches."""
    logs: NDArray[np.float64] = np.log(np.maximum(probabilities, 1e-300))
    return (np.rint(logs * _STEPS_PER_NAT) / _STEPS_PER_NAT).astype(np.float32)


def _decode(content: bytes) -> NgramTable:
    """Build a table from the bytes of a file. Raises ValueError if a lookup could fail in it."""
    times, more = _MOST_UNPACKED
    try:
        with np.load(io.BytesIO(content), allow_pickle=False) as file:
            members = file.zip.infolist()
            # By other methods a member may unpack to more than it says.
            usual = all(each.compress_type in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED) for each in members)
            size = sum(each.file_size for each in members)
            _require(usual and size <= min(times * len(content) + more, _MOST_BYTES // 4), "too large for a table")
            vocab_hash = str(file["vocab_hash"])[:64]
            sizes, *arrays = (file[name].astype(np.int64, casting="safe") for name in _ARRAYS)
        version, vocab_size, num_tokens, max_successors = sizes.tolist()
    # The zip, deflate and npy readers raise a dozen unrelated types on invalid bytes.
    except Exception as error:
        raise ValueError("not an n-gram table, or a damaged one") from error
    _require(version == _FORMAT_VERSION, f"format version {version}, but this pystaged reads {_FORMAT_VERSION}")
    older, newer, lengths, tokens, steps, log_backoffs = arrays
    limits = (older, vocab_size), (newer, vocab_size), (lengths, max_successors), (tokens, vocab_size - 1)
    _require(
        1 <= vocab_size <= LARGEST_VOCABULARY
        and 1 <= max_successors <= 255
        and all(each.ndim == 1 and len(each) for each in arrays)
        and all(each.min() >= 0 and each.max() <= most for each, most in limits)
        and len(older) == len(newer) == len(lengths) == len(log_backoffs)
        and len(tokens) == len(steps) == lengths.sum()
        and lengths[0] > 0,
        "a damaged n-gram table: sizes or tokens are out of range",
    )
    keys = np.cumsum(older) * (vocab_size + 1) + newer
    _require(bool(np.all(np.diff(keys) > 0)), "a damaged n-gram table: its contexts are not in order")
    return NgramTable(
        vocab_size=vocab_size,
        vocab_hash=vocab_hash,
        num_tokens=num_tokens,
        max_successors=max_successors,
        keys=keys,
        offsets=np.append(0, np.cumsum(lengths)),
        tokens=tokens.astype(np.int32),
        logprobs=(steps / -_STEPS_PER_NAT).astype(np.float32),
        log_backoffs=(log_backoffs / _STEPS_PER_NAT).astype(np.float32),
    )


def _require(condition: bool, problem: str) -> None:
    if not condition:
        raise ValueError(problem)
