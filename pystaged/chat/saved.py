"""Conversations in files: the system message, and the messages of user and model in turn."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from pystaged._core import Tokenizer
from pystaged.chat.messages import Message, marked_messages
from pystaged.platform.files import read_small, whole_file

TURN = 2  # messages of one
_MOST_BYTES = 64 << 20


def save_conversation(path: Path, system: str, messages: Sequence[Message], tokenizer: Tokenizer) -> None:
    """Write a conversation atomically, with the tokens of messages that have them. Raises OSError."""
    kept = {"vocabulary": tokenizer.fingerprint, "system": system, "messages": messages}
    with whole_file(path) as part:
        part.write_text(json.dumps(kept, ensure_ascii=False, indent=1) + "\n", "utf-8")


def read_conversation(path: Path, tokenizer: Tokenizer | None = None) -> tuple[str, list[dict[str, object]]]:
    """Read the system message and the messages; tokens of another vocabulary than the tokenizer's are dropped. Raises
    OSError, and ValueError for another file."""
    try:
        kept = json.loads(read_small(path, _MOST_BYTES).decode("utf-8"))
        system, messages = kept["system"], kept["messages"]
        roles = [message["role"] for message in messages]
        if not isinstance(system, str) or roles != ["user", "assistant"] * (len(roles) // TURN):
            raise TypeError("user and assistant do not alternate")
        if not all(isinstance(message["content"], str) for message in messages):
            raise TypeError("a message's content is not text")
        if messages:
            marked_messages(messages)
        fields = ["role", "content"]
        if tokenizer and kept.get("vocabulary") == tokenizer.fingerprint:
            fields.append("tokens")
            for tokens in (message.get("tokens", []) for message in messages):
                if not isinstance(tokens, list) or not all(type(token) is int for token in tokens):
                    raise TypeError("the tokens of a message are not a list of integers")
                tokenizer.decode(tokens)  # refuses those outside of the vocabulary
    except FileNotFoundError:
        raise FileNotFoundError(f"{path}: no such saved conversation; to change the model, start again") from None
    except (KeyError, TypeError, ValueError, OverflowError, RecursionError) as error:
        why = "it is no JSON" if isinstance(error, (json.JSONDecodeError, UnicodeDecodeError)) else error
        raise ValueError(f"{path} is not a conversation saved with /save: {why}") from None
    return system, [{name: message[name] for name in fields if name in message} for message in messages]
