"""The tokenizer of a Hugging Face checkpoint: byte-level BPE as GPT-2 has it, as GGUF wants it."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gguf import GGUFWriter, TokenType

from pystaged.files import read_small

END_OF_TEXT = "<|endoftext|>"
_MOST_BYTES = 1 << 28  # far beyond any vocabulary
_ROLES = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token", "mask_token")


@dataclass(frozen=True)
class Vocabulary:
    """Tokens by their ids, merges in their order, and the tokens that begin and end a text.

    Args:
        tokens: spelled with GPT-2's 256 characters for bytes; added tokens as they are.
        kinds: gguf's kind of each.
        merges: two halves with a space between.
        add_bos: a text is preceded by the token `bos`.
    """

    tokens: list[str]
    kinds: list[TokenType]
    merges: list[str]
    bos: int
    eos: int
    add_bos: bool

    def write(self, writer: GGUFWriter) -> None:
        """Put it into the metadata of a GGUF file."""
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre("gpt-2")
        writer.add_token_list(self.tokens)
        writer.add_token_types([int(kind) for kind in self.kinds])
        writer.add_token_merges(self.merges)
        writer.add_bos_token_id(self.bos)
        writer.add_eos_token_id(self.eos)
        writer.add_add_bos_token(self.add_bos)


def read_vocabulary(folder: Path, num_rows: int, config: dict[str, Any]) -> Vocabulary:
    """The vocabulary in tokenizer.json, or else in vocab.json and merges.txt, padded to the rows of the embedding.

    Args:
        folder: of the checkpoint.
        num_rows: rows of the token embedding; rows without a token become unused tokens.
        config: what config.json says, for the ends of a text where the tokenizer names none.

    Raises:
        ValueError: a tokenizer that is damaged, of another kind, or has tokens without a row.
        OSError: a file cannot be read.
    """
    settings = _read(folder / "special_tokens_map.json") | _read(folder / "tokenizer_config.json")
    if settings.get("add_prefix_space") is True:
        raise ValueError(f"{folder}: a tokenizer that puts a space before every text cannot be written as GGUF")
    whole = folder / "tokenizer.json"
    path = whole if whole.is_file() else folder / "vocab.json"
    ids, merges, added = _tokenizer_json(path) if path == whole else _vocab_and_merges(folder)
    for content, token, special in _added_tokens(folder, settings):
        ids.setdefault(content, token)
        added.setdefault(content, special)
    added |= dict.fromkeys(_special_tokens(settings) & ids.keys(), True)
    _check_ids(path, ids, num_rows)
    _check_merges(path, merges, ids)

    tokens = [f"[PAD{token}]" for token in range(num_rows)]
    kinds = [TokenType.UNUSED] * num_rows
    for content, token in ids.items():
        tokens[token] = content
        kinds[token] = TokenType.NORMAL
        if content in added:
            kinds[token] = TokenType.CONTROL if added[content] else TokenType.USER_DEFINED
    bos, eos = (_end(path, name, ids, settings, config) for name in ("bos_token", "eos_token"))
    return Vocabulary(tokens, kinds, merges, bos, eos, settings.get("add_bos_token") is True)


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file.

    Raises:
        ValueError: naming the file, where it holds no JSON object.
        OSError: the file cannot be read.
    """
    try:
        found = json.loads(read_small(path, _MOST_BYTES).decode("utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is damaged: {error}; get it again") from None
    if not isinstance(found, dict):
        raise ValueError(f"{path} is damaged: it holds no JSON object")
    return found


def _read(path: Path) -> dict[str, Any]:
    return read_json(path) if path.is_file() else {}


def _tokenizer_json(path: Path) -> tuple[dict[str, int], list[str], dict[str, bool]]:
    """Ids by token, merges, and whether each added token is special."""
    found = read_json(path)
    model, splitter = found.get("model"), found.get("pre_tokenizer")
    splitter = splitter if isinstance(splitter, dict) else {}
    if not isinstance(model, dict) or not isinstance(model.get("vocab"), dict):
        raise ValueError(f"{path} holds no byte-level BPE vocabulary, the only kind GPT-2 has")
    odd = [name for name in ("continuing_subword_prefix", "end_of_word_suffix", "dropout") if model.get(name)]
    odd += [name for name in ("byte_fallback", "ignore_merges") if model.get(name)]
    if splitter.get("type") != "ByteLevel":
        odd.append("pre_tokenizer")
    if model.get("type", "BPE") != "BPE" or odd or found.get("normalizer"):
        raise ValueError(f"{path}: this tokenizer is not GPT-2's byte-level BPE, so GGUF files cannot say what it does")
    if splitter.get("add_prefix_space") or splitter.get("use_regex") is False:
        raise ValueError(f"{path}: this tokenizer splits texts otherwise than GPT-2's, which GGUF files cannot say")
    ids, added = dict(model["vocab"]), {}
    for token in found.get("added_tokens") or ():
        if not isinstance(token, dict) or not isinstance(token.get("content"), str):
            raise ValueError(f"{path} is damaged: added_tokens")
        ids[token["content"]] = token.get("id")
        added[token["content"]] = token.get("special") is True
    return ids, [_merge(path, merge) for merge in model.get("merges") or ()], added


def _merge(path: Path, merge: object) -> str:
    """A merge as one string; newer files hold its halves."""
    if isinstance(merge, list) and all(isinstance(half, str) for half in merge):
        merge = " ".join(merge)
    if not isinstance(merge, str):
        raise ValueError(f"{path} is damaged: merges")
    return merge


def _vocab_and_merges(folder: Path) -> tuple[dict[str, int], list[str], dict[str, bool]]:
    vocab, merges = folder / "vocab.json", folder / "merges.txt"
    for path in (vocab, merges):
        if not path.is_file():
            raise ValueError(f"{folder} has no tokenizer: neither tokenizer.json nor vocab.json with merges.txt")
    try:
        lines = merges.read_text("utf-8").split("\n")
    except UnicodeDecodeError as error:
        raise ValueError(f"{merges} is damaged: {error}; get it again") from None
    return read_json(vocab), [line for line in lines if line and not line.startswith("#version")], {}


def _added_tokens(folder: Path, settings: dict[str, Any]) -> list[tuple[str, Any, bool]]:
    """Added tokens outside the vocabulary itself: content, id, and whether it is special."""
    found = [(content, token, False) for content, token in _read(folder / "added_tokens.json").items()]
    decoder = settings.get("added_tokens_decoder")
    for token, entry in decoder.items() if isinstance(decoder, dict) else ():
        if isinstance(entry, dict) and isinstance(entry.get("content"), str) and token.isdecimal():
            found.insert(0, (entry["content"], int(token), entry.get("special") is True))
    return found


def _special_tokens(settings: dict[str, Any]) -> set[str]:
    """What the tokenizer recognizes in a text and never writes."""
    more = settings.get("additional_special_tokens")
    named = [settings.get(role) for role in _ROLES] + (more if isinstance(more, list) else [])
    return {END_OF_TEXT} | {content for content in map(_content, named) if content}


def _content(token: object) -> str | None:
    if isinstance(token, dict):
        token = token.get("content")
    return token if isinstance(token, str) else None


def _check_ids(path: Path, ids: dict[str, Any], num_rows: int) -> None:
    seen: dict[int, str] = {}
    for content, token in ids.items():
        if not isinstance(token, int) or isinstance(token, bool) or token < 0:
            raise ValueError(f"{path} is damaged: token {content!r} has the id {token!r}")
        if token >= num_rows:
            raise ValueError(f"{path}: token {content!r} has the id {token}, but the model's embedding {num_rows} rows")
        if token in seen:
            raise ValueError(f"{path} is damaged: tokens {seen[token]!r} and {content!r} have the same id {token}")
        if not content:
            raise ValueError(f"{path} is damaged: token {token} is empty")
        seen[token] = content


def _check_merges(path: Path, merges: list[str], ids: dict[str, Any]) -> None:
    if not merges:
        raise ValueError(f"{path}: the tokenizer has no merges")
    for merge in merges:
        halves = merge.split(" ")
        if len(halves) != 2 or not all(part in ids for part in (*halves, "".join(halves))):
            raise ValueError(f"{path} is damaged: the merge {merge!r} is not of tokens in the vocabulary")


def _end(path: Path, name: str, ids: dict[str, int], settings: dict[str, Any], config: dict[str, Any]) -> int:
    """The token at an end of a text."""
    content = _content(settings.get(name))
    if content in ids:
        return ids[content]
    token = config.get(f"{name}_id")
    if isinstance(token, int) and token in ids.values():
        return token
    if END_OF_TEXT not in ids:
        raise ValueError(f"{path} does not say which token ends a text ({name})")
    return ids[END_OF_TEXT]
