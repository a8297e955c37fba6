"""Schemas, expressions and grammars, and the texts that they allow."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from support.chat import write_vocabulary
from support.paths import table
from support.schemas import schema_of

from fuzz.mutate import damage, damage_value, spelled
from fuzz.target import Case, Target, short
from pystaged.options.config import Grammar
from pystaged.sampling.definitions import GrammarError
from pystaged.sampling.grammars import Grammars

MOST_TOKENS = 40
EVIL: list[Any] = [
    *table("odd_schemas"),
    {"allOf": [{"type": "integer", "multipleOf": each} for each in (2, 3, 5, 7, 11, 13, 17, 19, 23)]},
    {"type": "integer", "exclusiveMinimum": -(10**300), "exclusiveMaximum": 10**300},
    {"allOf": [{"anyOf": [{"type": "string", "pattern": f"^a{i}{j}.*"} for j in range(4)]} for i in range(12)]},
]
EXPRESSIONS = ["(a|b)*a(a|b){30}c", "((a{1000}){1000}){1000}", r"(\p{L}|\p{N}){1,5000}", "(.*a.{25}){3}", "((a+)+)+b"]
LARK = [
    "start: A\nA: " + " & ".join(f"/([ab]{{{each}}})*/" for each in (2, 3, 5, 7, 11)),
    "start: A\nA: ~/(.|\\n)*a.{20}/",
    'start: a{1000}\na: b{1000}\nb: "a" | "b"',
    'root ::= root root root | "a"',
    'root ::= ("a" | "b"){1,1000000}',
    'start: j\nj: %json {"type": "integer", "multipleOf": 30030}',
]


class Grammatical(Target):
    """A grammar, and some of a text that it allows."""

    refusals = (GrammarError,)

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self._grammars = Grammars(write_vocabulary(folder / "model.gguf", "sentencepiece"))

    def sound(self) -> Iterator[Case]:
        for k in range(10):
            yield self._case(Grammar("json_schema", json.dumps(schema_of(k, k))), random.Random(k))
        for text in ('root ::= "a" | "b" root', 'start: "a" | "b" start'):
            yield self._case(Grammar("grammar", text), random.Random(0))
        yield self._case(Grammar("regex", "[ab]{3,9}c"), random.Random(0))

    def case(self, r: random.Random) -> Case:
        option = r.choice(["json_schema", "json_schema", "regex", "grammar"])
        if option == "json_schema":
            schema = r.choice([*EVIL, *(schema_of(k, k) for k in range(10))])
            if r.random() < 0.3:
                schema = {"type": "object", "properties": {"a": schema, "b": r.choice(EVIL)}, "required": ["a"]}
            text = spelled(r, damage_value(r, schema)) if r.random() < 0.8 else json.dumps(schema).encode()
        else:
            text = r.choice(EXPRESSIONS if option == "regex" else LARK).encode()
            text = damage(r, text) if r.random() < 0.8 else text
        return self._case(Grammar(option, text.decode("utf-8", "replace")), r)

    def _case(self, grammar: Grammar, r: random.Random) -> Case:
        return Case(short(repr(grammar)), len(grammar.text), partial(self.use, grammar, r.randrange(2**32)))

    def use(self, grammar: Grammar, seed: int) -> None:
        constraint, draw = self._grammars.constraint(grammar), np.random.default_rng(seed)
        for _ in range(MOST_TOKENS):
            if constraint.is_complete:
                return
            mask = constraint.mask([])
            assert mask is not None
            allowed = np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little"))
            token = int(draw.choice(allowed))
            if token in constraint._ends:
                return
            constraint.advance([token])
