"""Receipts: small files with all inputs of a text, so that another machine can generate it again and compare."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import numpy as np
from numpy.typing import NDArray

import pystaged
from pystaged._llama import VERSION as LLAMA_CPP_PYTHON
from pystaged.config import GenerationConfig, Grammar, SamplingConfig
from pystaged.files import read_small, whole_file
from pystaged.loading.seen import SeenModel

# Versions of pystaged with the same number generate the same bytes. Raise it with any change of logits, of sampled
# tokens, of the end of a text, or of the decoding of its bytes; tests/test_receipts.py checks it.
ARITHMETIC = 1
MOST_BYTES = 16_000_000
_FORMAT = "pystaged receipt 1"
# Options without effect on the text; a receipt has all others.
_WITHOUT_EFFECT = {"speculate", "progress", "logprobs", "prompt_logprobs", "reuse", "prediction"}
# Options that a receipt omits if they have these values.
_UNLESS: dict[str, Any] = {"stop_loops": False}
_FIELDS = (
    *("format", "versions", "arithmetic", "model", "vocabulary", "device", "kv", "n_ctx"),
    *("prompt", "options", "text"),
)
_LONGEST_WORD = 256  # characters of a name or version
_HASHED = 4096  # tokens hashed at a time

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class ModelRecord:
    """A model's file, or its parts concatenated. name: from its metadata. file: name of the first part's file."""

    name: str
    file: str
    size: int
    sha256: str


@dataclass(frozen=True, slots=True)
class Origin:
    """The inputs of a text: the fields of its Receipt that are known before it is generated.

    file: the model's file as it was when it was loaded; it is hashed when a receipt needs the hash. prompt: int32[n].
    """

    file: SeenModel
    name: str
    vocabulary: str
    device: str
    kv: str
    n_ctx: int
    prompt: NDArray[np.int32]
    config: GenerationConfig


@dataclass(frozen=True, slots=True)
class Receipt:
    """The inputs of a text, and the text as token ids and as a hash.

    versions: of pystaged and llama-cpp-python, and of llguidance if the text has a grammar.
    arithmetic: versions of pystaged with the same number generate the same bytes.
    vocabulary: fingerprint. device, kv, n_ctx: as for `load`, but "rpc" without addresses; n_ctx is never 0.
    prompt: token ids. config: options; those without effect on the text have their defaults.
    tokens: ids of the new tokens. text_sha256: SHA-256 of the text in UTF-8.
    """

    versions: dict[str, str]
    arithmetic: int
    model: ModelRecord
    vocabulary: str
    device: str
    kv: str
    n_ctx: int
    prompt: tuple[int, ...]
    config: GenerationConfig
    tokens: tuple[int, ...]
    text_sha256: str
    finish_reason: str

    @classmethod
    def of(cls, origin: Origin, text: str, tokens: Sequence[int], finish_reason: str) -> Receipt:
        """Make the receipt of a text. The first one reads the model's file to hash it.

        Raises:
            ValueError: the text was cancelled.
            OSError: the model's file cannot be read, or was changed since it was loaded.
        """
        if finish_reason == "cancelled":
            raise ValueError("a cancelled text has no receipt; to end a text early, use max_tokens")
        file = origin.file
        return cls(
            current_versions(origin.config.grammar),
            ARITHMETIC,
            ModelRecord(_word(origin.name), _word(file.path.name), file.size, file.sha256()),
            origin.vocabulary,
            "rpc" if origin.device.startswith("rpc:") else _word(origin.device),  # no addresses
            origin.kv,
            origin.n_ctx,
            tuple(origin.prompt.tolist()),
            _config(_options(origin.config)),
            tuple(tokens),
            text_hash(text),
            finish_reason,
        )

    def to_json(self) -> str:
        """The content of its file, which is the same for equal receipts."""
        written = {
            "format": _FORMAT,
            "versions": self.versions,
            "arithmetic": self.arithmetic,
            "model": {each.name: getattr(self.model, each.name) for each in fields(ModelRecord)},
            "vocabulary": self.vocabulary,
            "device": self.device,
            "kv": self.kv,
            "n_ctx": self.n_ctx,
            "prompt": {"tokens": self.prompt, "sha256": token_hash(self.prompt)},
            "options": _options(self.config),
            "text": {"tokens": self.tokens, "sha256": self.text_sha256, "finish_reason": self.finish_reason},
        }
        lines = ",\n".join(f"  {json.dumps(name)}: {json.dumps(value)}" for name, value in written.items())
        return f"{{\n{lines}\n}}\n"

    def save(self, path: str | Path) -> None:
        """Write it to a file atomically. Raises OSError; ValueError if it is too large for `load`."""
        data = self.to_json().encode()
        if len(data) > MOST_BYTES:
            raise ValueError(
                f"the receipt would be larger than {MOST_BYTES / 1e6:.0f} MB: prompt or grammar are too long"
            )
        with whole_file(Path(path)) as part:
            part.write_bytes(data)

    @classmethod
    def load(cls, path: str | Path) -> Receipt:
        """Read a receipt from an untrusted file.

        Raises:
            OSError: the file cannot be read.
            ValueError: the file is no receipt; names the field.
        """
        path = Path(path)
        try:
            data = read_small(path, MOST_BYTES)
        except ValueError as error:
            raise ValueError(f"{error}, so it is no receipt") from None
        try:
            return cls.from_json(data.decode())
        except RecursionError:
            reason = "it is nested too deeply"
        except UnicodeError:
            reason = "it is no text in UTF-8"
        except json.JSONDecodeError as error:
            reason = f"line {error.lineno}, column {error.colno} is no JSON" if data.strip() else "it is empty"
        except ValueError as error:
            reason = str(error)
        raise ValueError(f"{path} is no receipt: {reason}")

    @classmethod
    def from_json(cls, text: str) -> Receipt:
        """Parse the content of a file. Raises ValueError; RecursionError if JSON is nested too deeply."""
        given = json.loads(
            text, object_pairs_hook=_object, parse_int=_integer, parse_float=_float, parse_constant=_constant
        )
        json.dumps(given, ensure_ascii=False).encode()  # refuses lone surrogates
        whole = _Fields(given, "")
        if isinstance(given.get("format"), str) and given["format"] != _FORMAT:
            raise ValueError(f"its format is {_word(given['format'])!r}, and this pystaged reads {_FORMAT!r}")
        whole.check_names(_FIELDS)
        versions, model, prompt, said = (
            _Fields(given[name], f"{name}.") for name in ("versions", "model", "prompt", "text")
        )
        config = _config(whole.take("options", dict))
        versions.check_names([*current_versions(config.grammar)])
        model.check_names([each.name for each in fields(ModelRecord)])
        prompt.check_names(["tokens", "sha256"])
        said.check_names(["tokens", "sha256", "finish_reason"])
        receipt = cls(
            {name: versions.word(name) for name in versions.given},
            whole.count("arithmetic"),
            ModelRecord(model.word("name"), model.word("file"), model.count("size"), model.hash("sha256")),
            whole.word("vocabulary"),
            whole.word("device"),
            whole.take("kv", str),
            whole.count("n_ctx"),
            prompt.tokens("tokens"),
            config,
            said.tokens("tokens"),
            said.hash("sha256"),
            said.take("finish_reason", str),
        )
        if receipt.kv not in ("f16", "q8_0"):
            raise ValueError("kv must be f16 or q8_0")
        if receipt.finish_reason not in ("stop", "length", "loop"):
            raise ValueError("text.finish_reason must be stop, length or loop")
        if not 0 < receipt.n_ctx < 2**31:
            raise ValueError("n_ctx is out of range")
        if prompt.hash("sha256") != token_hash(receipt.prompt):
            raise ValueError("prompt.sha256 is not that of prompt.tokens")
        return receipt


def text_hash(text: str) -> str:
    """SHA-256 of a text in UTF-8."""
    return hashlib.sha256(text.encode()).hexdigest()


def token_hash(tokens: Sequence[int]) -> str:
    """SHA-256 of token ids in decimal, with a space between them."""
    digest, space = hashlib.sha256(), ""
    for first in range(0, len(tokens), _HASHED):  # in pieces, as one string would take a multiple of the tokens' memory
        digest.update((space + " ".join(map(str, tokens[first : first + _HASHED]))).encode())
        space = " "
    return digest.hexdigest()


def current_versions(grammar: Grammar | None) -> dict[str, str]:
    """The installed versions of the packages that a text depends on, with llguidance if it has a grammar."""
    found = {"pystaged": pystaged.__version__, "llama-cpp-python": LLAMA_CPP_PYTHON}
    if grammar:
        from importlib import metadata  # noqa: PLC0415  slow to import

        try:
            found["llguidance"] = metadata.version("llguidance")
        except metadata.PackageNotFoundError:
            found["llguidance"] = "missing"
    return found


def _names(kind: type[Any]) -> list[str]:
    """Names of a dataclass's options that have an effect on the text."""
    names = [each.name for each in fields(kind)]
    return [name for name in names if not name.startswith("_") and name not in _WITHOUT_EFFECT]


def _options(config: GenerationConfig | SamplingConfig | Grammar) -> dict[str, Any]:
    """The options that have an effect on the text, as JSON values."""
    values = {name: _value(getattr(config, name)) for name in _names(type(config))}
    return {name: value for name, value in values.items() if name not in _UNLESS or value != _UNLESS[name]}


def _value(value: Any) -> Any:
    if isinstance(value, (SamplingConfig, Grammar)):
        return _options(value)
    if isinstance(value, Mapping):  # logit_bias
        return [[key, _value(each)] for key, each in value.items()]
    if isinstance(value, tuple):
        return [_value(each) for each in value]
    return "-inf" if value == -math.inf else value


def _config(given: Mapping[str, Any]) -> GenerationConfig:
    """Check options from JSON; those without effect on the text get their defaults. Raises ValueError."""
    whole = _Fields(given, "options.")
    whole.check_names([name for name in _names(GenerationConfig) if name not in _UNLESS or name in given])
    sampling = _Fields(given["sampling"], "options.sampling.")
    sampling.check_names(_names(SamplingConfig))
    grammar = given["grammar"]
    if grammar is not None:
        part = _Fields(grammar, "options.grammar.")
        part.check_names(_names(Grammar))
        grammar = Grammar(part.take("option", str), part.take("text", str))
        if grammar.option not in ("json_schema", "regex", "grammar"):
            raise ValueError("options.grammar.option must be json_schema, regex or grammar")
    values = sampling.given | {"logit_bias": _biases(sampling.take("logit_bias", list))}
    try:
        config = GenerationConfig(**whole.given | {"grammar": grammar, "sampling": SamplingConfig(**values)})
    except (ValueError, TypeError) as error:
        raise ValueError(_word(f"options: {error}")) from None
    sampling.check_written(_options(config.sampling))
    whole.check_names([*_options(config)])
    whole.check_written(_options(config))
    return config


def _biases(given: list[Any]) -> dict[int | str, float]:
    biases: dict[int | str, float] = {}
    for each in given:
        if not isinstance(each, list) or len(each) != 2 or type(each[0]) not in (int, str):
            raise ValueError("options.sampling.logit_bias must have pairs of a token and a number")
        biases[each[0]] = -math.inf if each[1] == "-inf" else each[1]
    return biases


class _Fields:
    """The fields of a JSON object. Methods raise ValueError with the name of the field."""

    def __init__(self, given: Any, where: str) -> None:
        if not isinstance(given, dict):
            raise ValueError(f"{where.rstrip('.') or 'a receipt'} must be an object")
        self.given: dict[str, Any] = given
        self._where = where

    def check_names(self, names: Sequence[str]) -> None:
        """Check that the object has exactly these fields."""
        for name in names:
            if name not in self.given:
                raise ValueError(f"{self._where}{name} is missing")
        for name in self.given.keys() - set(names):
            raise ValueError(f"there is no field {self._where}{_word(name)}")

    def check_written(self, as_written: Mapping[str, Any]) -> None:
        """Refuse values that options accept but receipts never contain, such as a string for a list of stop strings."""
        for name, value in as_written.items():
            if self.given[name] != value:
                raise ValueError(f"{self._where}{name} does not have the form that receipts use")

    def take(self, name: str, kind: type[T]) -> T:
        value = self.given[name]
        if type(value) is not kind:
            known = {str: "a string", int: "a whole number", dict: "an object", list: "a list"}
            raise ValueError(f"{self._where}{name} must be {known[kind]}")
        return value

    def word(self, name: str) -> str:
        """A string that is safe to show in a terminal."""
        value = self.take(name, str)
        if value != _word(value):
            raise ValueError(f"{self._where}{name} must have at most {_LONGEST_WORD} characters, all printable")
        return value

    def count(self, name: str) -> int:
        value = self.take(name, int)
        if value < 0:
            raise ValueError(f"{self._where}{name} must not be negative")
        return value

    def hash(self, name: str) -> str:
        value = self.take(name, str)
        if len(value) != 64 or value.strip("0123456789abcdef"):
            raise ValueError(f"{self._where}{name} must be 64 hexadecimal digits")
        return value

    def tokens(self, name: str) -> tuple[int, ...]:
        value = self.take(name, list)
        if not all(type(token) is int and 0 <= token < 2**31 for token in value):
            raise ValueError(f"{self._where}{name} must hold token ids")
        return tuple(value)


def _word(text: str) -> str:
    """Shorten a string and replace control characters, so that it is safe to show in a terminal."""
    return "".join(each if each.isprintable() else "?" for each in text)[:_LONGEST_WORD]


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError("an object has a field twice")
    return found


def _integer(digits: str) -> int:
    if len(digits) > 20:  # 2**64 - 1 has 20
        raise ValueError("a number has too many digits")
    return int(digits)


def _float(digits: str) -> float:
    value = float(digits)
    if not math.isfinite(value):
        raise ValueError("a number is out of range")
    return value


def _constant(word: str) -> NoReturn:
    raise ValueError(f"{word} is no number")
