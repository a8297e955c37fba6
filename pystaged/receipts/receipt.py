"""Receipts: small files with all inputs of a text, so that another machine can generate it again and compare."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, fields
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import pystaged
from pystaged._llama import VERSION as LLAMA_CPP_PYTHON
from pystaged.decoding.origin import ARITHMETIC, Origin
from pystaged.options.config import GenerationConfig, Grammar, SamplingConfig
from pystaged.platform.files import open_regular, read_small, whole_file

MOST_BYTES = 16_000_000
_FORMAT = "pystaged receipt 1"
_CHAIN = b'{"format": "pystaged chain 1"}\n'  # began files of several receipts
KEPT_TEXT = "pystaged text 1"  # format of the files that the plugin for pytest keeps
# Options without effect on the text; a receipt has all others.
_SCORES = {"logprobs", "prompt_logprobs", "prompt_logprobs_start"}
_WITHOUT_EFFECT = {"speculate", "progress", "reuse", "prediction"} | _SCORES
# Options that a receipt omits if they have these values.
_UNLESS: dict[str, Any] = {"stop_loops": False}
_AS_THEY_ARE = ("versions", "arithmetic", "model", "vocabulary", "device", "kv", "n_ctx")  # fields in a file
_LONGEST_WORD = 256  # characters of a name or version
_HASHED = 4096  # tokens hashed at a time


@dataclass(frozen=True, slots=True)
class ModelRecord:
    """A model's file, or its parts concatenated. name: from its metadata. file: name of the first part's file."""

    name: str
    file: str
    size: int
    sha256: str


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
            ValueError: the text was cancelled, or the model has no receipts.
            OSError: the model's file cannot be read, or was changed since it was loaded.
        """
        if finish_reason == "cancelled":
            raise ValueError("a cancelled text has no receipt; to end a text early, use max_tokens")
        if origin.inexact:
            raise ValueError(f"a receipt promises an exact text, and {origin.inexact}")
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
        written = {"format": _FORMAT} | {name: getattr(self, name) for name in _AS_THEY_ARE}
        written |= {
            "model": asdict(self.model),
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
            with open_regular(path) as file:
                data = file.read(MOST_BYTES + 1)
        except ValueError as error:
            raise ValueError(f"{error}, so it is no receipt") from None
        if data.startswith(_CHAIN):
            raise ValueError(
                f"{path} is a chain of receipts, one in each line after the first; write them to files of their own, "
                f"for example: tail -n +2 {path} | split -l 1 - {path}."
            )
        if len(data) > MOST_BYTES:
            raise ValueError(f"{path} is larger than {MOST_BYTES / 1e6:g} MB, so it is no receipt")
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
        """Parse the content of a file, also of a text that the plugin for pytest keeps.

        Raises:
            ValueError: it is no receipt.
            RecursionError: JSON is nested too deeply.
        """
        given = json.loads(
            text, object_pairs_hook=_object, parse_int=_integer, parse_float=_float, parse_constant=_constant
        )
        json.dumps(given, ensure_ascii=False).encode()  # refuses lone surrogates
        if isinstance(given, dict) and given.get("format") == KEPT_TEXT:
            given = given.get("receipt")
            if given is None:
                raise ValueError("the kept text has none, because no text of the model is that string")
        _check(given, _SHAPE, "")
        config = _config(given["options"])
        _check(given["versions"], dict.fromkeys(current_versions(config.grammar), _WORD), "versions")
        prompt, said, plain = given["prompt"], given["text"], {name: given[name] for name in _AS_THEY_ARE}
        if prompt["sha256"] != token_hash(prompt["tokens"]):
            raise ValueError("prompt.sha256 is not that of prompt.tokens")
        return cls(
            **plain | {"model": ModelRecord(**given["model"])},
            prompt=tuple(prompt["tokens"]),
            config=config,
            tokens=tuple(said["tokens"]),
            text_sha256=said["sha256"],
            finish_reason=said["finish_reason"],
        )


def kept_text(path: Path) -> dict[str, Any] | None:
    """The members of a file that the plugin for pytest keeps, None for another one."""
    with suppress(OSError, ValueError, RecursionError):
        kept = json.loads(read_small(path, MOST_BYTES))
        if isinstance(kept, dict) and kept.get("format") == KEPT_TEXT and isinstance(kept.get("text"), str):
            return kept
    return None


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
    names = [name for name in _names(GenerationConfig) if name not in _UNLESS or name in given]
    sampling = dict.fromkeys(_names(SamplingConfig), _ANY) | {"logit_bias": _BIASES}
    _check(given, dict.fromkeys(names, _ANY) | {"sampling": sampling}, "options")
    grammar, chosen = given["grammar"], given["sampling"]
    if grammar is not None:
        _check(grammar, {"option": _one_of("json_schema", "regex", "grammar"), "text": _TEXT}, "options.grammar")
        grammar = Grammar(**grammar)
    biases = {token: -math.inf if bias == "-inf" else bias for token, bias in chosen["logit_bias"]}
    try:
        bound = SamplingConfig(**chosen | {"logit_bias": biases})
        config = GenerationConfig(**{**given, "grammar": grammar, "sampling": bound})
    except (ValueError, TypeError) as error:
        raise ValueError(_word(f"options: {error}")) from None
    # Options accept other forms, too, such as a string for a list of stop strings.
    for where, part, written in (
        ("options.sampling", chosen, _options(config.sampling)),
        ("options", given, _options(config)),
    ):
        for name in part.keys() | written:
            if part.get(name) != written.get(name):
                raise ValueError(f"{where}.{name} does not have the form that receipts use")
    return config


_Check = Callable[[Any, str], None]  # of a value and its name; raises ValueError with the name


def _check(value: Any, shape: Mapping[str, Any], where: str) -> None:
    """Check that a value is an object with exactly the shape's fields: each has a shape of its own, or a _Check."""
    if not isinstance(value, dict):
        raise ValueError(f"{where or 'a receipt'} must be an object")
    prefix = f"{where}." if where else ""
    for name, part in shape.items():
        if name not in value:
            raise ValueError(f"{prefix}{name} is missing")
        check = part if callable(part) else partial(_check, shape=part)
        check(value[name], where=f"{prefix}{name}")
    for name in value.keys() - shape.keys():
        raise ValueError(f"there is no field {prefix}{_word(name)}")


def _is(kind: type[Any] | None, what: str, holds: Callable[[Any], bool] = lambda _: True) -> _Check:
    def check(value: Any, where: str) -> None:
        if kind is not None and (type(value) is not kind or not holds(value)):
            raise ValueError(f"{where} must be {what}")

    return check


def _one_of(*words: str) -> _Check:
    return _is(str, " or ".join(words), words.__contains__)


def _word(text: str) -> str:
    """Shorten a string and replace control characters, so that it is safe to show in a terminal."""
    return "".join(each if each.isprintable() else "?" for each in text)[:_LONGEST_WORD]


_ANY = _is(None, "")
_TEXT = _is(str, "a string")
_WORD = _is(str, f"at most {_LONGEST_WORD} characters, all printable", lambda value: value == _word(value))
_COUNT = _is(int, "a whole number of at least 0", lambda value: value >= 0)
_HASH = _is(str, "64 hexadecimal digits", lambda value: len(value) == 64 and not value.strip("0123456789abcdef"))
_TOKENS = _is(
    list, "a list of token ids", lambda value: all(type(token) is int and 0 <= token < 2**31 for token in value)
)
_BIASES = _is(
    list,
    "a list of pairs of a token and a number",
    lambda value: all(isinstance(pair, list) and len(pair) == 2 and type(pair[0]) in (int, str) for pair in value),
)
_SHAPE: dict[str, Any] = {
    "format": _one_of(_FORMAT),
    "versions": _is(dict, "an object"),
    "arithmetic": _COUNT,
    "model": {"name": _WORD, "file": _WORD, "size": _COUNT, "sha256": _HASH},
    "vocabulary": _WORD,
    "device": _WORD,
    "kv": _one_of("f16", "q8_0"),
    "n_ctx": _is(int, "a whole number from 1 to 2^31 - 1", lambda value: 0 < value < 2**31),
    "prompt": {"tokens": _TOKENS, "sha256": _HASH},
    "options": _ANY,
    "text": {"tokens": _TOKENS, "sha256": _HASH, "finish_reason": _one_of("stop", "length", "loop")},
}


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
