"""Convert the tokenizer.json of a Hugging Face checkpoint to GGUF: byte-level BPE, or SentencePiece's BPE."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Container, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gguf import TokenType

from pystaged.platform.files import read_small

END_OF_TEXT = "<|endoftext|>"
TOKENIZER = "tokenizer.json"
_TEMPLATES = "additional_chat_templates"  # a folder
# Names of a checkpoint's files beside config.json and the weights.
SETTINGS_FILES = re.compile(
    r"(tokenizer|tokenizer_config|special_tokens_map|chat_template|generation_config)\.json|"
    rf"(chat_template|{_TEMPLATES}/[^/]+)\.jinja"
)
_MOST_BYTES = 1 << 28  # far beyond any vocabulary
_ROLES = ("bos", "eos", "unk", "sep", "pad", "mask")
# Tokens that are special although their tokenizers do not mark them so.
_SPECIAL = re.compile(r"<[|\uff5c].*[|\uff5c]>|<unused\d+>|<pad>|<mask>", re.DOTALL)
# Tokens that end texts in llama.cpp whatever the file's metadata say.
_ENDS = {
    *("</s>", "<EOT>", "_<EOT>", "[EOT]", "[EOS]", "<eos>", "<end_of_turn>", "<end_of_utterance>"),
    *(f"<|{name}|>" for name in ("eot_id", "eom_id", "im_end", "end", "return", "call", "flush", "calls")),
    *(END_OF_TEXT, "<|end_of_text|>"),
}
_SPACE = "\u2581"  # SentencePiece's
_BYTES = {f"<0x{byte:02X}>" for byte in range(256)}
# Steps by which tokenizer.json does with spaces what SentencePiece does.
_SPACES: list[dict[str, Any]] = [
    {"type": "Prepend", "prepend": _SPACE},
    {"type": "Replace", "pattern": {"String": " "}, "content": _SPACE},
    {"type": "Replace", "pattern": {"Regex": rf"\A{_SPACE}"}, "content": 2 * _SPACE},
    {"type": "Split", "pattern": {"String": " "}, "behavior": "MergedWithPrevious", "invert": False},
    *(
        {"type": "Metaspace", "replacement": _SPACE, "prepend_scheme": scheme, "split": False}
        for scheme in ("always", "first", "never")
    ),
]
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
    r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]++[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+": (
        "dbrx",
        "llama-bpe",
    ),
    rf"[^\r\n\p{{L}}\p{{N}}]?{_HEAD}*{_TAIL}+{_CONTRACTIONS}?|[^\r\n\p{{L}}\p{{N}}]?{_HEAD}+{_TAIL}*{_CONTRACTIONS}?"
    rf"|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_BLANKS}": ("gpt-4o", None),
    rf"[^\r\n\p{{L}}\p{{N}}]?{_HEAD}*{_TAIL}+|[^\r\n\p{{L}}\p{{N}}]?{_HEAD}+{_TAIL}*"
    rf"|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_BLANKS}": (None, "tekken"),
}


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


def read_vocabulary(
    folder: Path, num_rows: int, config: dict[str, Any], generation: dict[str, Any]
) -> list[tuple[str, Any]]:
    """Read tokenizer.json and the settings beside it, and pad to the embedding's rows; returns names of methods of
    GGUFWriter, with the value that each is to write.

    Args:
        folder: of the checkpoint.
        num_rows: rows of the token embedding; rows without a token become unused tokens.
        config: config.json, for special tokens that the tokenizer does not name.
        generation: generation_config.json, for further tokens that end texts.

    Raises:
        ValueError: the tokenizer is damaged, of an unsupported kind, or has tokens without a row.
        OSError: a file cannot be read.
    """
    settings = _read(folder / "special_tokens_map.json") | _read(folder / "tokenizer_config.json")
    check_tokenizer(str(folder), [TOKENIZER] if (folder / TOKENIZER).is_file() else [])
    whole = read_json(folder / TOKENIZER)
    model = _model(folder / TOKENIZER, whole)
    space_first = settings.get("add_prefix_space")
    space_first = space_first if isinstance(space_first, bool) else model.space_first
    if space_first and not model.is_sentencepiece:
        raise ValueError(f"{folder}: a tokenizer that puts a space before every text cannot be written as GGUF")
    added: dict[str, bool] = {}
    for content, token, special in _added_tokens(model.path, whole, settings):
        model.ids.setdefault(content, token)
        added.setdefault(content, special or bool(_SPECIAL.fullmatch(content)))
    named = [settings.get(f"{role}_token") for role in _ROLES] + _list(settings, "additional_special_tokens")
    for token in (END_OF_TEXT, *named):  # special ones, which are recognized in texts and never written
        if (found := _content(token)) in model.ids:
            added[found] = True
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
    ends = _ends(model, settings, {"eos_token_id": generation.get("eos_token_id"), **config})
    said = generation.get("eos_token_id")
    ends |= _further_ends(model, ends["eos"], config.get("eos_token_id") if said in (None, []) else said)
    made: list[tuple[str, Any]] = [
        ("add_tokenizer_model", "llama" if model.is_sentencepiece else "gpt2"),
        ("add_tokenizer_pre", model.pre),
        ("add_token_list", tokens),
        ("add_token_types", [int(kind) for kind in kinds]),
        ("add_token_scores", scores) if model.is_sentencepiece else ("add_token_merges", model.merges),
        *((f"add_{role}_token_id", token) for role, token in ends.items()),
        *((f"add_{key}", value) for key, value in _adds(model, whole, settings, tokens, ends).items()),
    ]
    if model.is_sentencepiece:
        made.append(("add_add_space_prefix", space_first))
    template = _chat_template(folder, settings)
    return [*made, ("add_chat_template", template)] if template else made


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file. Raises ValueError where there is none, or more than 256 MiB, and OSError for a file
    that cannot be read."""
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


def check_tokenizer(place: str, files: Container[str]) -> None:
    """Raise ValueError if a checkpoint of these files has no tokenizer.json."""
    if TOKENIZER not in files:
        raise ValueError(
            f"{place} has no {TOKENIZER}; in its folder, transformers writes one: "
            "python -c \"import transformers as t; t.AutoTokenizer.from_pretrained('.').save_pretrained('.')\""
        )


def _model(path: Path, whole: dict[str, Any]) -> _Model:
    model = whole.get("model")
    if not isinstance(model, dict) or not isinstance(model.get("vocab"), dict):
        raise ValueError(f"{path} holds no BPE vocabulary")
    # Newer files store the two halves of a merge.
    merges = [" ".join(each) if isinstance(each, list) and _all_text(each) else each for each in _list(model, "merges")]
    if not _all_text(merges):
        raise ValueError(f"{path} is damaged: merges")
    odd = any(model.get(name) for name in ("continuing_subword_prefix", "end_of_word_suffix", "dropout"))
    found = None
    if model.get("type", "BPE") == "BPE" and not odd:
        make = _sentencepiece if model.get("byte_fallback") else _byte_level
        found = make(path, whole, model, merges)
    if found is None:
        raise ValueError(f"{path}: GGUF files cannot say how this tokenizer splits texts")
    return found


def _steps(whole: dict[str, Any], key: str, several: str) -> list[dict[str, Any]]:
    """The steps of one kind by which tokenizer.json changes or splits a text before merging, in order."""
    found = whole.get(key)
    if not isinstance(found, dict):
        return []
    steps = _list(found, several) if found.get("type") == "Sequence" else [found]
    return [step if isinstance(step, dict) else {} for step in steps]


def _byte_level(path: Path, whole: dict[str, Any], model: dict[str, Any], merges: list[str]) -> _Model | None:
    pre = _splitting(_steps(whole, "pre_tokenizer", "pretokenizers"), model.get("ignore_merges") is True)
    # Qwen composes characters (NFC), llama.cpp does not; nearly all texts are composed already.
    if not pre or whole.get("normalizer") not in (None, {"type": "NFC"}):
        return None
    return _Model(path, pre, dict(model["vocab"]), merges)


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


def _all_text(values: list[Any]) -> bool:
    return all(isinstance(value, str) for value in values)


def _sentencepiece(path: Path, whole: dict[str, Any], model: dict[str, Any], merges: list[str]) -> _Model | None:
    """SentencePiece's BPE as transformers writes it: what merges first scores highest."""
    steps = [*_steps(whole, "normalizer", "normalizers"), *_steps(whole, "pre_tokenizer", "pretokenizers")]
    if not all(step in _SPACES for step in steps):
        return None
    vocab, known = dict(model["vocab"]), set(merges)
    added = {_content(token) for token in _list(whole, "added_tokens")}
    for token in vocab.keys() - added:
        for i in range(1, len(token)):
            left, right = token[:i], token[i:]
            # A GGUF file has no merges, so whatever can make a token does.
            if left in vocab and right in vocab and f"{left} {right}" not in known and not {left, right} & added:
                return None
    missing = _BYTES - vocab.keys()
    if missing and not (missing == {"<0x09>"} and "\t" in vocab):  # as Gemma spells it
        raise ValueError(f"{path} has no tokens for bytes, so llama.cpp cannot write all texts with it")
    scores: dict[str, float] = {}
    for merge in merges:
        scores.setdefault(merge.replace(" ", ""), -float(len(scores)))
    kinds = dict.fromkeys(_BYTES, TokenType.BYTE)
    if isinstance(unknown := model.get("unk_token"), str):
        kinds[unknown] = TokenType.UNKNOWN
    space_first = any(step["type"] == "Prepend" or step.get("prepend_scheme") in ("always", "first") for step in steps)
    return _Model(path, "default", vocab, merges, kinds, scores, space_first)


def _added_tokens(path: Path, whole: dict[str, Any], settings: dict[str, Any]) -> Iterator[tuple[str, Any, bool]]:
    """Tokens beside the vocabulary proper: content, id, and whether it is special."""
    for token in _list(whole, "added_tokens"):
        if not isinstance(token, dict) or not isinstance(token.get("content"), str):
            raise ValueError(f"{path} is damaged: added_tokens")
        yield token["content"], token.get("id"), token.get("special") is True
    decoder = settings.get("added_tokens_decoder")
    for number, token in decoder.items() if isinstance(decoder, dict) else ():
        if isinstance(token, dict) and isinstance(token.get("content"), str) and number.isdecimal():
            yield token["content"], int(number), token.get("special") is True


def _content(token: object) -> str | None:
    """The text of a token, which may be an object that has it as its content; None where there is none."""
    found = token.get("content") if isinstance(token, dict) else token
    return found if isinstance(found, str) else None


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
    if not model.merges:
        raise ValueError(f"{model.path}: the tokenizer has no merges")
    for merge in model.merges:
        halves = merge.split(" ")
        if len(halves) != 2 or not all(part in model.ids for part in (*halves, "".join(halves))):
            raise ValueError(f"{model.path} is damaged: the merge {merge!r} names tokens outside the vocabulary")


def _ends(model: _Model, settings: dict[str, Any], config: dict[str, Any]) -> dict[str, int]:
    """Ids of special tokens by role. Raises ValueError where nothing names the token that ends a text."""
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


def _further_ends(model: _Model, eos: int, listed: object) -> dict[str, int]:
    """Roles for tokens that end texts besides eos. Raises ValueError where a GGUF file has none for so many. listed: an
    id, or a list of ids."""
    ids = {token for token in (listed if isinstance(listed, list) else [listed]) if type(token) is int}
    further = [token for content, token in model.ids.items() if token in ids and token != eos and content not in _ENDS]
    if len(further) > 2:
        raise ValueError(f"{model.path.parent}: {len(further) + 1} tokens end a text, but a GGUF file can name three")
    return dict(zip(("eot", "eom"), further, strict=False))


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
    """The chat template, or several with names; files of their own win over settings, as in transformers."""
    files = {"default": folder / "chat_template.jinja"}
    files |= {path.stem: path for path in sorted((folder / _TEMPLATES).glob("*.jinja"))}
    found: Any = {name: _text(path).replace("\r\n", "\n") for name, path in files.items() if path.is_file()}
    if not found:
        found = settings.get("chat_template") or _read(folder / "chat_template.json").get("chat_template")
    if isinstance(found, dict):
        found = [{"name": name, "template": text} for name, text in found.items()]
    if not isinstance(found, list):
        return found if isinstance(found, str) else None
    pairs = [(each.get("name"), each.get("template")) for each in found if isinstance(each, dict)]
    several = [
        {"name": name, "template": text} for name, text in pairs if isinstance(name, str) and isinstance(text, str)
    ]
    return several[0]["template"] if [each["name"] for each in several] == ["default"] else several
