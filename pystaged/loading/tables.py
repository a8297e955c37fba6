"""Find the n-gram table for a draft."""

from __future__ import annotations

import errno
from collections.abc import Callable
from pathlib import Path

from pystaged._core import Tokenizer
from pystaged.drafting.table import NgramTable, OtherVocabularyError
from pystaged.loading import names
from pystaged.loading.cache import own_place
from pystaged.platform.files import expanded

_NO_FILE = (errno.ENOENT, errno.ENOTDIR, errno.ENAMETOOLONG)  # a model's name may make its table's too long


def table_path(model: Path) -> Path:
    """Path of the table of a model's own text: DRAFT.ngram.npz beside DRAFT.gguf, or in our folder for a model in
    Hugging Face's cache."""
    return own_place(model).with_name(f"{model.stem}.ngram.npz")


def find_table(
    model: Path | None, ngrams: str | Path | None, tokenizer: Tokenizer, report: Callable[[str], None] = lambda _: None
) -> NgramTable | None:
    """The named table, else one beside the model, else one in the package; None where none fits the vocabulary.

    Args:
        model: file of the draft, or of the target where there is no draft. Its folder is searched for `table_path` and
            `draft.ngram.npz`.
        ngrams: path of a table.
        tokenizer: the target's.
        report: called with a line about an unusable table, except a packaged one for another vocabulary.

    Raises:
        OSError, ValueError: the named table cannot be read, is damaged, or for another vocabulary.
    """
    if ngrams is not None:
        return NgramTable.load(expanded(ngrams), vocab_hash=tokenizer.fingerprint)
    ours = names.tables()
    beside = [table_path(model), model.with_name(names.BUNDLED_TABLE)] if model else []
    for path in dict.fromkeys((*beside, *ours)):
        try:
            return NgramTable.load(path, vocab_hash=tokenizer.fingerprint)
        except OSError as error:
            if error.errno not in _NO_FILE:
                report(f"passed over: {error}")
        except ValueError as error:
            # Packaged tables fit few models, so a mismatch is not worth a line.
            if path not in ours or not isinstance(error, OtherVocabularyError):
                report(f"passed over: {error}")
    return None
