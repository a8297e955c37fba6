"""A vocabulary with the control tokens of chats."""

from __future__ import annotations

import pytest
from support.chat import write_vocabulary

from pystaged._core import Tokenizer


@pytest.fixture(scope="session")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return write_vocabulary(tmp_path_factory.mktemp("vocabulary") / "model.gguf", "sentencepiece")
