"""Values of options that are written as words, or in files."""

from __future__ import annotations

import re

from pystaged.platform.files import expanded

_MOST_BYTES = 1 << 24  # of a schema, grammar or message
_SIZE = re.compile(r"([0-9]+\.?[0-9]*|\.[0-9]+)\s*([KMGT]?)(I?B)?", re.IGNORECASE)
_MARKS = {"json_schema": r"^\s*\{", "grammar": r"::=|\bstart\s*(\[[^\]]*\]\s*)?:"}  # of one that is given itself


def read_text(path: str) -> str:
    """The text of a file or pipe. Raises OSError and ValueError if it cannot be read or is not text."""
    with expanded(path).open("rb") as file:
        data = file.read(_MOST_BYTES + 1)
    if len(data) > _MOST_BYTES:
        raise ValueError(f"{path} is larger than {_MOST_BYTES / 1e6:.0f} MB")
    try:
        return data.decode()
    except UnicodeDecodeError:
        raise ValueError(f"{path} is not UTF-8") from None


def read_system(words: str) -> str:
    """A system message, or the content of the file that it names. Raises as read_text."""
    return read_text(words[1:]).rstrip("\n") if words.startswith("@") else words


def read_form(name: str, words: str) -> str:
    """A json_schema or grammar that is given itself, or the content of the file or pipe that is named. Raises as
    read_text."""
    return words if re.search(_MARKS[name], words) else read_text(words)


def biases(words: list[str]) -> dict[int | str, float]:
    """Biases that are written 15043+1 or 15043-1 as in llama.cpp, or TEXT=BIAS. Raises ValueError."""
    found: dict[int | str, float] = {}
    for word in words:
        by_number = re.fullmatch(r"(\d+)([+-].+)", word)
        token, bias = by_number.groups() if by_number else word.rpartition("=")[::2]
        try:
            number = float(bias if token else "")
        except ValueError:
            raise ValueError(f"--logit-bias is written 15043+1, 15043-1 or TEXT=BIAS, not {word!r}") from None
        found[int(token) if by_number else token] = number
    return found


def size(words: str) -> int:
    """A number of bytes: 2G, 2GB and 2 GiB are 2 * 2**30. Raises ValueError."""
    found = _SIZE.fullmatch(words.strip())
    number = float(found[1]) * 1024 ** ("KMGT".find(found[2].upper()) + 1 if found[2] else 0) if found else 0.0
    if found and number < 1:
        raise ValueError(f"{words!r} is too small; leave it out, or write 512M or 2.5G.")
    if not found or number >= 2**63:
        raise ValueError(f"{words!r} is not a size; write 512M or 2.5G.")
    return int(number)
