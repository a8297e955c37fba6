"""Convert the tokenizer of a Hugging Face checkpoint to GGUF: byte-level BPE, or SentencePiece's BPE."""

from __future__ import annotations

import json
import math
import re
import struct
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gguf import GGUFWriter, TokenType

from pystaged.files import read_small

END_OF_TEXT = "<|endoftext|>"
SENTENCEPIECE = "tokenizer.model"
TOKENIZER_FILES = (
    "tokenizer.json",
    SENTENCEPIECE,
    "vocab.json",
    "merges.txt",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "chat_template.json",
)
_MOST_BYTES = 1 << 28  # far beyond any vocabulary
_ROLES = ("bos", "eos", "unk", "sep", "pad", "mask")
# Tokens that are special although their tokenizers do not mark them so.
_SPECIAL = re.compile(r"<[|\uff5c].*[|\uff5c]>|<unused\d+>|<pad>|<mask>", re.DOTALL)
_SPACE = "\u2581"  # SentencePiece's
_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_WORDS = rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+"
_BLANKS = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_MARKS = r" ?[^\s\p{L}\p{N}]+[\r\n]*"
_HEAD, _TAIL = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
# Patterns that split texts before merging, with llama.cpp's name for each; the second is for tokenizers that keep
# whole words that are tokens, whatever the merges say.
_SPLITS = {
    rf"{_WORDS}|\p{{N}}{{1,3}}|{_MARKS}|{_BLANKS}": ("smaug-bpe", "llama-bpe"),
    rf"{_WORDS}|\p{{N}}|{_MARKS}|{_BLANKS}": ("qwen2", None),
    rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}"
    rf"| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*|{_BLANKS}": ("qwen35", None),
    r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]++[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+": (
        "dbrx",
        "llama-bpe",
    ),
    rf"[^\r\n\p{{L}}\p{{N}}]?{_HEAD}*{_TAIL}+{_CONTRACTIONS}?|[^\r\n\p{{L}}\p{{N}}]?{_HEAD}+{_TAIL}*{_CONTRACTIONS}?"
    rf"|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_BLANKS}": ("gpt-4o", None),
    rf"[^\r\n\p{{L}}\p{{N}}]?{_HEAD}*{_TAIL}+|[^\r\n\p{{L}}\p{{N}}]?{_HEAD}+{_TAIL}*"
    rf"|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_BLANKS}": (None, "tekken"),
}


@dataclass(frozen=True)
class Vocabulary:
    """Tokens by id, merges in order, and special tokens by role.

    Args:
        model: gguf's kind of vocabulary: gpt2 for byte-level BPE, llama for SentencePiece.
        pre: gguf's name for how texts are split.
        tokens: byte-level BPE spells bytes as GPT-2's 256 characters; added tokens stay as they are.
        kinds: gguf's type of each token.
        scores: of SentencePiece's tokens, the highest merged first; empty for others.
        merges: two halves with a space between; empty for SentencePiece.
        ends: ids by role: bos, eos, unk and the like.
        flags: whether bos, eos and a leading space are added to a text, by GGUF's keys.
        template: the Jinja chat template, or several by name.
    """

    model: str
    pre: str
    tokens: list[str]
    kinds: list[TokenType]
    scores: list[float]
    merges: list[str]
    ends: dict[str, int]
    flags: dict[str, bool]
    template: str | list[dict[str, str]] | None = None

    def write(self, writer: GGUFWriter) -> None:
        """Write it into the metadata of a GGUF file."""
        writer.add_tokenizer_model(self.model)
        writer.add_tokenizer_pre(self.pre)
        writer.add_token_list(self.tokens)
        writer.add_token_types([int(kind) for kind in self.kinds])
        if self.scores:
            writer.add_token_scores(self.scores)
        if self.merges:
            writer.add_token_merges(self.merges)
        for role, token in self.ends.items():
            getattr(writer, f"add_{role}_token_id")(token)
        for key, value in self.flags.items():
            writer.add_bool(f"tokenizer.ggml.{key}", value)
        if self.template:
            writer.add_chat_template(self.template)


@dataclass
class _Model:
    """The vocabulary without added tokens."""

    path: Path
    pre: str
    ids: dict[str, Any]
    merges: list[str] = field(default_factory=list)
    kinds: dict[str, TokenType] = field(default_factory=dict)
    scores: dict[str, float] = field(default_factory=dict)
    space_first: bool = False

    @property
    def is_sentencepiece(self) -> bool:
        return bool(self.scores)


def read_vocabulary(folder: Path, num_rows: int, config: dict[str, Any]) -> Vocabulary:
    """Read tokenizer.json, tokenizer.model, or vocab.json and merges.txt, and pad to the embedding's rows.

    Args:
        folder: of the checkpoint.
        num_rows: rows of the token embedding; rows without a token become unused tokens.
        config: config.json, for special tokens that the tokenizer does not name.

    Raises:
        ValueError: the tokenizer is damaged, of an unsupported kind, or has tokens without a row.
        OSError: a file cannot be read.
    """
    settings = _read(folder / "special_tokens_map.json") | _read(folder / "tokenizer_config.json")
    whole = _read(folder / "tokenizer.json")
    model = _model(folder, whole)
    space_first = settings.get("add_prefix_space", model.space_first)
    if space_first is True and not model.is_sentencepiece:
        raise ValueError(f"{folder}: a tokenizer that puts a space before every text cannot be written as GGUF")
    added: dict[str, bool] = {}
    for content, token, special in _added_tokens(folder, whole, settings):
        model.ids.setdefault(content, token)
        added.setdefault(content, special or bool(_SPECIAL.fullmatch(content)))
    added |= dict.fromkeys(_special_tokens(settings) & model.ids.keys(), True)
    _check_ids(model.path, model.ids, num_rows)
    _check_merges(model)

    tokens = [f"[PAD{token}]" for token in range(num_rows)]
    kinds, scores = [TokenType.UNUSED] * num_rows, [-10000.0] * num_rows
    for content, token in model.ids.items():
        tokens[token], kinds[token] = content, model.kinds.get(content, TokenType.NORMAL)
        scores[token] = model.scores.get(content, -1000.0)
        if content in added:
            kinds[token] = TokenType.CONTROL if added[content] else TokenType.USER_DEFINED
            scores[token] = -1000.0
        if kinds[token] == TokenType.USER_DEFINED and model.is_sentencepiece:
            tokens[token] = content.replace(_SPACE, " ")
    if len(set(tokens)) < num_rows:
        ((twice, _),) = Counter(tokens).most_common(1)
        raise ValueError(f"{model.path}: two tokens would be spelled {twice!r}")
    ends = _ends(model, settings, config)
    flags = _adds(model, whole, settings, tokens, ends)
    if model.is_sentencepiece:
        flags["add_space_prefix"] = space_first is True
    return Vocabulary(
        model="llama" if model.is_sentencepiece else "gpt2",
        pre=model.pre,
        tokens=tokens,
        kinds=kinds,
        scores=scores if model.is_sentencepiece else [],
        merges=model.merges,
        ends=ends,
        flags=flags,
        template=_chat_template(folder, settings),
    )


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file.

    Raises:
        ValueError: the file holds no JSON object, or more than 256 MiB; the message names it.
        OSError: the file cannot be read.
    """
    text = _text(path)
    try:
        found = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is damaged: {error}; get it again") from None
    if not isinstance(found, dict):
        raise ValueError(f"{path} is damaged: it holds no JSON object")
    return found


def _text(path: Path) -> str:
    try:
        return read_small(path, _MOST_BYTES).decode("utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is damaged: {error}; get it again") from None


def _read(path: Path) -> dict[str, Any]:
    return read_json(path) if path.is_file() else {}


# ---- Kinds of vocabularies ----


def _model(folder: Path, whole: dict[str, Any]) -> _Model:
    """Read the vocabulary from the file that holds it; tokenizer.json first, unless it copies a SentencePiece model."""
    sentencepiece = folder / SENTENCEPIECE
    if sentencepiece.is_file() and not any(splitter.get("type") == "ByteLevel" for splitter in _splitters(whole)):
        return _sentencepiece(sentencepiece)
    return _byte_level(folder / "tokenizer.json", whole) if whole else _vocab_and_merges(folder)


def _splitters(whole: dict[str, Any]) -> list[dict[str, Any]]:
    """The steps by which tokenizer.json splits a text before merging, in order."""
    found = whole.get("pre_tokenizer")
    if not isinstance(found, dict):
        return []
    steps = _list(found, "pretokenizers") if found.get("type") == "Sequence" else [found]
    return [step if isinstance(step, dict) else {} for step in steps]


def _byte_level(path: Path, whole: dict[str, Any]) -> _Model:
    model = whole.get("model")
    if not isinstance(model, dict) or not isinstance(model.get("vocab"), dict):
        raise ValueError(f"{path} holds no byte-level BPE vocabulary")
    if model.get("byte_fallback"):
        raise ValueError(f"{path} is made from a SentencePiece model: put its {SENTENCEPIECE} beside it")
    odd = any(model.get(name) for name in ("continuing_subword_prefix", "end_of_word_suffix", "dropout"))
    pre = _splitting(_splitters(whole), model.get("ignore_merges") is True)
    # Qwen composes characters (NFC), llama.cpp does not; nearly all texts are composed already.
    normalizer = whole.get("normalizer")
    composed = isinstance(normalizer, dict) and normalizer.get("type") == "NFC"
    if model.get("type", "BPE") != "BPE" or odd or not pre or (normalizer and not composed):
        raise ValueError(f"{path}: GGUF files cannot say how this tokenizer splits texts")
    return _Model(path, pre, dict(model["vocab"]), [_merge(path, merge) for merge in _list(model, "merges")])


def _splitting(steps: list[dict[str, Any]], whole_words: bool) -> str | None:
    """llama.cpp's name for a way of splitting texts, None if it has none."""
    if not steps or steps[-1].get("type") != "ByteLevel" or steps[-1].get("add_prefix_space"):
        return None
    regex = steps[-1].get("use_regex") is not False
    match steps[:-1]:
        case []:
            return "gpt-2" if regex and not whole_words else None
        case [{"type": "Digits", "individual_digits": True}]:
            return "smollm" if regex and not whole_words else None
        # The patterns match whole texts, so nothing is lost where only what matches is kept.
        case [
            {"type": "Split", "pattern": {"Regex": str(pattern)}, "behavior": "Isolated", "invert": False}
            | {"type": "Split", "pattern": {"Regex": str(pattern)}, "behavior": "Removed", "invert": True}
        ]:
            return None if regex else _SPLITS.get(pattern, (None, None))[whole_words]
    return None


def _list(found: dict[str, Any], key: str) -> list[Any]:
    """A list in a JSON object, empty where there is none."""
    value = found.get(key)
    return value if isinstance(value, list) else []


def _merge(path: Path, merge: object) -> str:
    """A merge as one string; newer files store its two halves."""
    if isinstance(merge, list) and all(isinstance(half, str) for half in merge):
        merge = " ".join(merge)
    if not isinstance(merge, str):
        raise ValueError(f"{path} is damaged: merges")
    return merge


def _vocab_and_merges(folder: Path) -> _Model:
    vocab, merges = folder / "vocab.json", folder / "merges.txt"
    for path in (vocab, merges):
        if not path.is_file():
            raise ValueError(
                f"{folder} has no tokenizer: neither tokenizer.json nor {SENTENCEPIECE} nor vocab.json with merges.txt"
            )
    lines = _text(merges).split("\n")
    return _Model(
        vocab, "gpt-2", read_json(vocab), [line for line in lines if line and not line.startswith("#version")]
    )


def _sentencepiece(path: Path) -> _Model:
    """The pieces of a SentencePiece model of kind BPE (sentencepiece_model.proto in its sources)."""
    model, kind, normalizer = _Model(path, "default", {}), 0, dict[int, Any]()
    try:
        for number, value in _fields(read_small(path, _MOST_BYTES)):
            if number == 1:
                piece: dict[int, Any] = {1: b"", 2: bytes(4), 3: TokenType.NORMAL, **dict(_fields(value))}
                content = piece[1].decode("utf-8")
                if content in model.ids:
                    raise ValueError(f"two pieces are spelled {content!r}")
                model.ids[content] = len(model.ids)
                model.kinds[content] = TokenType(piece[3])
                (score,) = struct.unpack("<f", piece[2])
                if not math.isfinite(score):
                    raise ValueError(f"the score of {content!r} is {score}")
                model.scores[content] = score
            elif number == 2:
                kind = dict(_fields(value)).get(3, kind)
            elif number == 3:
                normalizer = {2: b"", 3: True, 4: True, **dict(_fields(value))}
    except (ValueError, TypeError, AttributeError, struct.error) as error:
        raise ValueError(f"{path} is damaged: {error}; get it again") from None
    if kind != 2 or normalizer.get(2) or normalizer.get(4, True):
        raise ValueError(f"{path}: GGUF files can hold SentencePiece models of kind BPE that keep texts as they are")
    if list(model.kinds.values()).count(TokenType.BYTE) != 256:
        raise ValueError(f"{path} has no tokens for bytes, so llama.cpp cannot write all texts with it")
    model.space_first = bool(normalizer.get(3, True))
    return model


def _fields(data: bytes) -> Iterator[tuple[int, Any]]:
    """Field numbers and values of a protobuf message: integers, and bytes for all other types.

    Raises:
        ValueError: the data are no such message.
    """
    place, end = 0, len(data)

    def varint() -> int:
        nonlocal place
        value = shift = 0
        while place < end and shift < 64:
            byte = data[place]
            place += 1
            value |= (byte & 127) << shift
            if byte < 128:
                return value
            shift += 7
        raise ValueError("it ends within a number")

    while place < end:
        key = varint()
        if key & 7 == 0:
            yield key >> 3, varint()
            continue
        if key & 7 not in (1, 2, 5):
            raise ValueError(f"fields of kind {key & 7}")
        size = varint() if key & 7 == 2 else 8 if key & 7 == 1 else 4
        if size > end - place:
            raise ValueError("it ends within a field")
        yield key >> 3, data[place : place + size]
        place += size


# ---- Added tokens ----


def _added_tokens(folder: Path, whole: dict[str, Any], settings: dict[str, Any]) -> Iterator[tuple[str, Any, bool]]:
    """Tokens beside the vocabulary proper: content, id, and whether it is special."""
    path = folder / "tokenizer.json"
    for token in _list(whole, "added_tokens"):
        if not isinstance(token, dict) or not isinstance(token.get("content"), str):
            raise ValueError(f"{path} is damaged: added_tokens")
        yield token["content"], token.get("id"), token.get("special") is True
    decoder = settings.get("added_tokens_decoder")
    for number, token in decoder.items() if isinstance(decoder, dict) else ():
        if isinstance(token, dict) and isinstance(token.get("content"), str) and number.isdecimal():
            yield token["content"], int(number), token.get("special") is True
    for content, number in _read(folder / "added_tokens.json").items():
        yield content, number, False


def _special_tokens(settings: dict[str, Any]) -> set[str]:
    """Contents of special tokens, which are recognized in texts and never written."""
    named = [settings.get(f"{role}_token") for role in _ROLES] + _list(settings, "additional_special_tokens")
    return {END_OF_TEXT} | {content for content in map(_content, named) if content}


def _content(token: object) -> str | None:
    if isinstance(token, dict):
        token = token.get("content")
    return token if isinstance(token, str) else None


# ---- Checks ----


def _check_ids(path: Path, ids: dict[str, Any], num_rows: int) -> None:
    seen: dict[int, str] = {}
    for content, token in ids.items():
        if not isinstance(token, int) or isinstance(token, bool) or token < 0:
            raise ValueError(f"{path} is damaged: token {content!r} has the id {token!r}")
        if token >= num_rows:
            raise ValueError(f"{path}: token {content!r} has the id {token}, but the embedding has {num_rows} rows")
        if token in seen:
            raise ValueError(f"{path} is damaged: tokens {seen[token]!r} and {content!r} have the same id {token}")
        if not content:
            raise ValueError(f"{path} is damaged: token {token} is empty")
        seen[token] = content


def _check_merges(model: _Model) -> None:
    if not model.merges and not model.is_sentencepiece:
        raise ValueError(f"{model.path}: the tokenizer has no merges")
    for merge in model.merges:
        halves = merge.split(" ")
        if len(halves) != 2 or not all(part in model.ids for part in (*halves, "".join(halves))):
            raise ValueError(f"{model.path} is damaged: the merge {merge!r} names tokens outside the vocabulary")


# ---- Ends of a text ----


def _ends(model: _Model, settings: dict[str, Any], config: dict[str, Any]) -> dict[str, int]:
    """Ids of special tokens by role.

    Raises:
        ValueError: nothing names the token that ends a text.
    """
    known = set(model.ids.values())
    ends = {}
    for role in _ROLES:
        content, token = _content(settings.get(f"{role}_token")), config.get(f"{role}_token_id")
        token = token[0] if isinstance(token, list) and token else token
        if content in model.ids:
            ends[role] = model.ids[content]
        elif isinstance(token, int) and token in known:
            ends[role] = token
    end = ends.get("eos", model.ids.get(END_OF_TEXT))
    if end is None:
        raise ValueError(f"{model.path} does not say which token ends a text (eos_token)")
    return {"bos": model.ids.get(END_OF_TEXT, end), "eos": end} | ends


def _adds(
    model: _Model, whole: dict[str, Any], settings: dict[str, Any], tokens: list[str], ends: dict[str, int]
) -> dict[str, bool]:
    """Whether to add bos and eos to texts, by GGUF's keys."""
    found = whole.get("post_processor")
    steps = [found, *_list(found, "processors")] if isinstance(found, dict) else []
    flags = {"add_bos_token": model.is_sentencepiece, "add_eos_token": False}
    for step in steps:
        if isinstance(step, dict) and step.get("type") == "TemplateProcessing":
            single = [_template_token(part) for part in _list(step, "single")]
            flags["add_bos_token"] = single[:1] == [tokens[ends["bos"]]]
            flags["add_eos_token"] = single[-1:] == [tokens[ends["eos"]]]
    return {key: settings[key] if isinstance(settings.get(key), bool) else value for key, value in flags.items()}


def _template_token(part: object) -> str | None:
    """The special token in one part of a post-processor's template."""
    token = part.get("SpecialToken") if isinstance(part, dict) else None
    return token.get("id") if isinstance(token, dict) else None


def _chat_template(folder: Path, settings: dict[str, Any]) -> str | list[dict[str, str]] | None:
    """The chat template, from the tokenizer's settings or a file of its own."""
    found = settings.get("chat_template") or _read(folder / "chat_template.json").get("chat_template")
    path = folder / "chat_template.jinja"
    if not found and path.is_file():
        found = _text(path)
    several = isinstance(found, list) and all(
        isinstance(entry, dict) and isinstance(entry.get("name"), str) and isinstance(entry.get("template"), str)
        for entry in found
    )
    return found if isinstance(found, str) or several else None
