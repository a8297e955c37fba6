"""Vocabularies with the control tokens of chats, and what a file says of a template."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from gguf import GGUFWriter

from pystaged._core import Tokenizer
from pystaged.chat.format import ChatFormat
from support.random_models import RandomModel, add_sentencepiece, add_vocabulary, write

MARKS = [
    *("<|im_start|>", "<|im_end|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"),
    *("<start_of_turn>", "<end_of_turn>", "[INST]", "[/INST]", "[TOOL_CALLS]", "[AVAILABLE_TOOLS]"),
    *("[/AVAILABLE_TOOLS]", "[TOOL_RESULTS]", "[/TOOL_RESULTS]", "<|system|>", "<|user|>", "<|assistant|>", "<|end|>"),
]
KEY = "tokenizer.chat_template"
CHATML = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "<|im_start|>assistant\n"
)


def _byte_pairs(writer: GGUFWriter, size: int) -> None:
    add_vocabulary(writer, size, dict(enumerate(MARKS, 300)))


def _byte_pairs_with_bos(writer: GGUFWriter, size: int) -> None:
    _byte_pairs(writer, size)
    writer.add_add_bos_token(True)


VOCABULARIES = {
    "byte pairs": _byte_pairs,
    "byte pairs with BOS": _byte_pairs_with_bos,
    "sentencepiece": partial(add_sentencepiece, marks=MARKS),
}


def write_chat(path: Path, template: Any, marks: Sequence[str] = (), **shape: Any) -> Path:
    """A model with a template, or several, and with control tokens from 300 on."""

    def vocabulary(writer: GGUFWriter, size: int) -> None:
        add_vocabulary(writer, size, dict(enumerate(marks, 300)))
        writer.add_chat_template(template)

    return write(path, RandomModel(**{"family": "llama", "vocab_size": 320} | shape | {"vocabulary": vocabulary}))


def write_vocabulary(path: Path, kind: str) -> Tokenizer:
    """One of the vocabularies, by way of a file."""
    return Tokenizer(write(path, RandomModel("llama", vocab_size=400, vocabulary=VOCABULARIES[kind])))


def chat_format(template: str, tokenizer: Tokenizer, **named: str) -> ChatFormat:
    """As of a file with these templates."""
    metadata = {KEY: template} | {f"{KEY}.{name}": source for name, source in named.items()}
    return ChatFormat(metadata, tokenizer, print)


def controls(tokenizer: Tokenizer, tokens: list[int]) -> list[str]:
    """Those of the tokens that are no text."""
    return [tokenizer.token_text(token) for token in tokens if not tokenizer.token_bytes(token)]
