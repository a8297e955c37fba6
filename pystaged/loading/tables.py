"""Which n-gram table belongs to a draft."""

from __future__ import annotations

import errno
from collections.abc import Callable
from pathlib import Path

from pystaged._core import Tokenizer
from pystaged.drafting.table import NgramTable, OtherVocabularyError
from pystaged.files import expanded
from pystaged.loading import names

_NO_FILE = (errno.ENOENT, errno.ENOTDIR, errno.ENAMETOOLONG)  # a model's name may leave no room for its table's


def table_path(model: Path) -> Path:
    """Where the table of a model's own text lies: beside it, DRAFT.ngram.npz for DRAFT.gguf."""
    return model.with_name(f"{model.stem}.ngram.npz")


def find_table(
    model: Path | None,
    ngrams: str | Path | None,
    tokenizer: Tokenizer,
    report: Callable[[str], None] = lambda _: None,
) -> NgramTable | None:
    """The table that is named, else one beside the model, else one in the package; None where no vocabulary fits.

    Args:
        model: file whose text a table may be of: the draft's, or the target's where there is no draft. Beside it are
            looked for `table_path` and `draft.ngram.npz`.
        ngrams: path of a table.
        tokenizer: the target's.
        report: told of a table that is of no use; not of the package's own for other vocabularies.

    Raises:
        OSError: the table that is named cannot be read.
        ValueError: it is damaged, or for another vocabulary.
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
            # The package's own are for few models; that they do not fit others is no news.
            if path not in ours or not isinstance(error, OtherVocabularyError):
                report(f"passed over: {error}")
    return None
