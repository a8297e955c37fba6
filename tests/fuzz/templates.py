"""Chat templates, and the messages, tools and options that they are given."""

from __future__ import annotations

import random
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

from support.chat import chat_format, write_vocabulary
from support.conversations import CASES, TEMPLATES
from support.paths import table

from fuzz.mutate import damage, damage_value
from fuzz.target import Case, Target, short
from pystaged.chat import ChatTemplateError, format

EVIL = [
    *table("endless_templates"),
    *table("forbidden_templates"),
    *table("odd_templates"),
    "{% if a %}" * 80,
    "{{ x" + ".x" * 3000 + " }}",
    "{{ 1" + " + 1" * 9000 + " }}",
    "{{ " + "[" * 9000,
]


class Template(Target):
    """What a file's template makes of a conversation."""

    refusals = (ChatTemplateError, ValueError, TypeError)

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        format._SECONDS = 1.0
        self._tokenizer = write_vocabulary(folder / "model.gguf", "sentencepiece")

    def sound(self) -> Iterator[Case]:
        for name, template in TEMPLATES.items():
            yield self._case(template, CASES["question"], name)

    def case(self, r: random.Random) -> Case:
        name = r.choice(list(TEMPLATES))
        template, given = TEMPLATES[name], r.choice(list(CASES.values()))
        if r.random() < 0.7:
            template = self._damaged(r, template)
        if r.random() < 0.5:
            given = damage_value(r, given)
        return self._case(template, given, f"{name}: {short(template)} {short(repr(given))}")

    def _damaged(self, r: random.Random, template: str) -> str:
        for _ in range(r.choice([1, 1, 2, 4])):
            at = r.randrange(len(template) + 1)
            what = r.randrange(4)
            if what == 0:
                template = template[:at] + r.choice(EVIL) + template[at:]
            elif what == 1:
                other = r.choice(list(TEMPLATES.values()))
                begin = r.randrange(len(other))
                template = template[:at] + other[begin : begin + r.choice([5, 40, 400])] + template[at:]
            elif what == 2:
                # One name for another: filters, tests and methods get what they do not expect.
                words = template.split(" ")
                words[r.randrange(len(words))] = r.choice(words)
                template = " ".join(words)
            else:
                template = damage(r, template.encode()).decode("utf-8", "replace")
        return template

    def _case(self, template: str, given: Any, words: str) -> Case:
        return Case(words, len(template) + len(repr(given)), partial(self.use, template, given))

    def use(self, template: str, given: Any) -> None:
        known = {"messages", "tools", "template", "template_options", "add_generation_prompt"}
        chat = chat_format(template, self._tokenizer)
        chat.variables()
        if not isinstance(given, dict):
            given = {"messages": given}
        given = {"messages": []} | {key: value for key, value in given.items() if key in known}
        chat.render(**given)
        given.pop("add_generation_prompt", None)
        tokens = chat.encode(**given)
        if len(tokens) and not 0 <= tokens.min() <= tokens.max() < self._tokenizer.num_tokens:
            raise AssertionError(f"tokens {tokens}")
