"""Pydantic's error messages in plain words."""

from __future__ import annotations

import re

_WORDS = [
    (r"^Value error, ", ""),
    (r"^Field required$", "is missing"),
    (r"^Extra inputs are not permitted$", "is unknown"),
    (r"^Unable to extract tag using discriminator '(\w+)'.*", r"has no '\1' that says what it is"),
    (r"^(Input|String|List|Tuple|Set|Dictionary|Value|Number|Data) should ", "must "),
    (r"greater than or equal to", "at least"),
    (r"less than or equal to", "at most"),
    (r"less than", "below"),
    (r"\ba valid integer\b", "an integer"),
    (r"\ba valid (\w)", r"a \1"),
    (r"\ba dictionary\b.*", "an object"),
    (r"\ba boolean\b.*", "true or false"),
    (r", (?:unable to|got) .*", ""),
    (r" after validation", ""),
]


def plainly(message: str) -> str:
    """Reword a message so that it can follow the name of the value."""
    for theirs, ours in _WORDS:
        message = re.sub(theirs, ours, message)
    return message
