"""Conversations as prompts, by a model's own chat template. The room can be called: `pystaged.chat(messages)`."""

import sys
from importlib import import_module
from types import ModuleType
from typing import Any

ENDLESS = "does not come to an end, or writes far more than its messages"


class ChatTemplateError(ValueError):
    """A chat template that is damaged, fails, refuses the messages, or does not come to an end."""


class _Room(ModuleType):
    def __call__(self, *messages: Any, **options: Any) -> Any:
        return import_module("pystaged.engine").chat(*messages, **options)


sys.modules[__name__].__class__ = _Room
