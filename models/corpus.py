"""Tokenize the Python source files of a machine with the vocabulary of a GPT-2 GGUF file.

Writes train.bin and val.bin: uint16 token ids, end-of-text before each file.
"""

import argparse
import ast
import hashlib
import random
import re
import subprocess
import warnings
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np
from gguf import GGUFReader
from tokenizers import Tokenizer, models, pre_tokenizers

END_OF_TEXT = 50256
DEEP_INDENT = re.compile(r"^ {32}", re.MULTILINE)
LONG_GAP = re.compile(r"\S {24}")


def vocabulary(path: Path) -> tuple[list[str], list[int], list[str]]:
    """Tokens, token types and merges of a GGUF file."""
    reader = GGUFReader(path)

    def contents(key: str) -> list[str]:
        field = reader.get_field(f"tokenizer.ggml.{key}")
        if field is None:
            raise ValueError(f"{path} has no tokenizer.ggml.{key}")
        return list(field.contents())

    return contents("tokens"), [int(kind) for kind in contents("token_type")], contents("merges")


def tokenizer(path: Path) -> Tokenizer:
    """The byte-level BPE tokenizer that a GGUF file describes."""
    tokens, _, merges = vocabulary(path)
    pairs = [(left, right) for left, right in (merge.split(" ") for merge in merges)]
    bpe = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=pairs))
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    return bpe


def is_python3(text: str) -> bool:
    """Whether this Python can parse the text."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            ast.parse(text)
        except (SyntaxError, ValueError, RecursionError, MemoryError):
            return False
    return True


def is_plain_code(text: str) -> bool:
    """Leave out short, minified, generated, data-heavy and deeply indented files, and Python 2."""
    lines = text.split("\n")
    return (
        len(text) >= 400
        and max(map(len, lines)) <= 400
        and sum(map(len, lines)) / len(lines) <= 70
        and sum(c.isdigit() for c in text) / len(text) <= 0.15
        and (text.count(" ") + text.count("\t")) / len(text) <= 0.45
        and text.count("\t") <= len(lines) / 50
        and len(DEEP_INDENT.findall(text)) <= len(lines) / 50
        and len(LONG_GAP.findall(text)) <= 2
        and is_python3(text)
    )


class NearDuplicates:
    """Recognizes files most of whose longer lines stood in files seen before."""

    def __init__(self, share: float) -> None:
        self.share = share
        self.lines: set[int] = set()

    def admits(self, text: str) -> bool:
        """Whether the text is new enough; if so, remember its lines."""
        lines = {hash(line.strip()) for line in text.split("\n") if len(line.strip()) >= 16}
        if not lines or len(lines & self.lines) > self.share * len(lines):
            return False
        self.lines |= lines
        return True


def python_files(roots: list[str], exclude: list[str]) -> list[str]:
    """Python files under the roots (one file system each), in an order that depends on their names only."""
    command = ["find", *roots, "-xdev", "-name", "*.py", "-size", "-200k"]
    found = subprocess.run(command, capture_output=True, text=True, check=False).stdout.splitlines()
    files = sorted(name for name in found if not any(part in name for part in exclude))
    random.Random(0).shuffle(files)
    return files


def documents(files: Iterable[str], share: float) -> Iterator[str]:
    """The texts worth keeping."""
    exact: set[bytes] = set()
    near = NearDuplicates(share)
    for name in files:
        try:
            text = Path(name).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError):
            continue
        digest = hashlib.md5(text.encode(), usedforsecurity=False).digest()
        if digest not in exact and is_plain_code(text) and near.admits(text):
            exact.add(digest)
            yield text


def take(texts: Iterable[str], characters: float) -> list[str]:
    """Texts until they hold that many characters together."""
    taken: list[str] = []
    for text in texts:
        taken.append(text)
        characters -= len(text)
        if characters <= 0:
            break
    return taken


def write_tokens(texts: list[str], bpe: Tokenizer, path: Path) -> int:
    """Write the token ids of the texts; returns their number."""
    count = 0
    with path.open("wb") as file:
        for i in range(0, len(texts), 256):
            for encoding in bpe.encode_batch(texts[i : i + 256]):
                file.write(np.array([END_OF_TEXT, *encoding.ids], dtype=np.uint16).tobytes())
                count += 1 + len(encoding.ids)
    return count


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path, help="folder for train.bin and val.bin")
    parser.add_argument("roots", nargs="+", help="folders to search")
    parser.add_argument("--vocab", type=Path, required=True, help="any GGUF file with the GPT-2 vocabulary")
    parser.add_argument("--exclude", nargs="*", default=[], help="leave out paths that contain one of these")
    parser.add_argument("--seen-lines", type=float, default=0.5, help="drop files with a larger share of known lines")
    parser.add_argument("--characters", type=float, default=240e6, help="stop after this much text")
    args = parser.parse_args()

    args.out.mkdir(parents=True, exist_ok=True)
    texts = take(documents(python_files(args.roots, args.exclude), args.seen_lines), args.characters)
    held_out = max(50, len(texts) // 200)
    bpe = tokenizer(args.vocab)
    for name, part in (("val.bin", texts[:held_out]), ("train.bin", texts[held_out:])):
        tokens = write_tokens(part, bpe, args.out / name)
        print(f"{name}: {len(part)} files, {sum(map(len, part)) / 1e6:.1f}M characters, {tokens / 1e6:.2f}M tokens")


if __name__ == "__main__":
    main()
