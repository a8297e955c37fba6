"""Texts that stay as they are: tests/data/corpus.jsonl has the receipts, and how each text was made.

`PYTHONPATH=tests python -m support.corpus` lists the entries that this version makes otherwise;
with --write it makes those anew and leaves the others alone. An entry has

    name, model     the model: smollm2, bundled, or a case of families.py with a type of its matrices
    kernel          empty for the one that any text would have
    kv              as for `load`
    how             "alone"; "reuse", of the prefix of an earlier entry; "batch", with its neighbours
    told            whether the drafters are given the text, so that all guesses are right
    prompt          text, or messages to answer
    options         of the generation
    logprobs        digest of the log-probabilities, if the options ask for them
    receipt         of the text
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import cycle, groupby
from operator import itemgetter
from pathlib import Path
from typing import Any
from unittest import mock

import pystaged
from pystaged import Engine, FixedPolicy, GenerationResult
from pystaged.decoding.readers import Stream, results
from support.families import CASES
from support.random_models import write

FILE = Path(__file__).parents[1] / "data" / "corpus.jsonl"
TRAINED = ("smollm2", "bundled")
TYPES = ("F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0")
MADE = ("logprobs", "receipt")  # fields of an entry
Entry = dict[str, Any]

SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 8}, "age": {"type": "integer", "maximum": 99}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
OPTIONS: dict[str, dict[str, Any]] = {
    "greedy": {"logprobs": 2},
    "greedy, told": {"max_tokens": 40},
    "T=1": {"temperature": 1.0, "seed": 1, "logprobs": 1},
    "T=1, told": {"temperature": 1.0, "seed": 2**64 - 1, "max_tokens": 40},
    "top_k": {"temperature": 1.0, "seed": 2, "top_k": 20},
    "top_p": {"temperature": 1.2, "seed": 3, "top_p": 0.8},
    "min_p": {"temperature": 1.3, "seed": 4, "min_p": 0.05, "logprobs": 0},
    "typical": {"temperature": 1.0, "seed": 5, "typical_p": 0.7},
    "xtc": {"temperature": 0.9, "seed": 6, "xtc_probability": 0.5, "xtc_threshold": 0.08},
    "all filters, temperature last": {
        "temperature": 1.5,
        "temperature_last": True,
        "seed": 7,
        "top_k": 50,
        "typical_p": 0.95,
        "top_p": 0.95,
        "min_p": 0.01,
        "xtc_probability": 0.3,
    },
    "repeat_penalty": {"repeat_penalty": 1.3, "repeat_last_n": -1, "logprobs": 0},
    "presence and frequency": {"presence_penalty": 0.5, "frequency_penalty": 0.4, "repeat_last_n": 16},
    "dry": {"dry_multiplier": 0.8, "dry_allowed_length": 1, "dry_sequence_breakers": ["x", "\n"], "max_tokens": 40},
    "logit_bias": {"logit_bias": {"e": 4.0, "\n": -100.0, ",": 2.5}, "temperature": 0.7, "seed": 8},
    "min_tokens": {"min_tokens": 12, "ignore_eos": True, "temperature": 2.0, "seed": 9},
    "stop": {"stop": ["e", " the", "ü"], "temperature": 1.0, "seed": 10, "min_tokens": 3},
    "regex": {"regex": r"[a-z]{4,9}(, [a-z]+){2}\.", "temperature": 1.0, "seed": 11, "logprobs": 0},
    "json_schema": {"json_schema": SCHEMA, "max_tokens": 40},
    "lark": {"grammar": 'start: ("yes" | "no" | "perhaps") (" " /[a-z]{2,6}/)~3 "."', "temperature": 1.0, "seed": 12},
    "gbnf": {"grammar": 'root ::= "- " [a-z ]+ "\\n- " [a-z ]+ "\\n"', "temperature": 0.8, "max_tokens": 32},
}
ENGLISH = "The tree stood|Once upon a time|1, 2, 3, 4,|To bake bread, first|Ünter den|In 1905,|In Paris,|Dear Sir,"
CODE = (
    "def fibonacci(n):|import os\n|class Stack:\n|for i in range(|# Sort it\n|x = [1, 2|if __name__ ==|def even(n):\n"
)
PROMPTS = {"smollm2": ENGLISH.split("|"), "bundled": CODE.split("|")}
LONG = "she said that the other one, taller than a tree, had not seen the rain in the north of this island since then"
COLOURS = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Name three colours."}]
CHATS: dict[str, tuple[str, list[dict[str, str]], dict[str, Any]]] = {
    "greedy": ("alone", COLOURS, {}),
    "next turn": (
        "reuse",
        [
            *COLOURS,
            {"role": "assistant", "content": "Red, blue, and yellow."},
            {"role": "user", "content": "Name more!"},
        ],
        {"temperature": 0.8, "seed": 1, "logprobs": 0},
    ),
    "recommended": ("alone", COLOURS[1:], {"temperature": 0.6, "top_p": 0.9, "seed": 2}),
    "json": ("alone", [{"role": "user", "content": "Who are you?"}], {"json_schema": SCHEMA, "temperature": 1.0}),
    "regex": ("alone", [{"role": "user", "content": "Is snow white?"}], {"regex": "(yes|no), because [a-z ]{9,30}"}),
}


def plan() -> list[Entry]:
    """The entries without what was made of them."""
    made: list[Entry] = []

    def add(model: str, name: str, prompt: object, options: dict[str, Any], how: str = "alone", **other: Any) -> None:
        usual = {"kernel": "", "kv": "f16", "how": how, "told": "told" in name}
        of_text = {"prompt": prompt, "options": {"max_tokens": 20} | options}
        made.append({"name": f"{model}: {name}", "model": model} | usual | other | of_text)

    for model in TRAINED:
        prompts = cycle(PROMPTS[model])
        for name, options in OPTIONS.items():
            add(model, name, next(prompts), options)
        if model == "bundled":
            add(model, "loop", "1", {"stop_loops": True, "logit_bias": {"e": 100.0}, "max_tokens": 140})
        for name, options in (("greedy", {}), ("T=1, told", {"temperature": 1.0, "logprobs": 1})):
            add(model, f"prefix, {name}", PROMPTS[model][0] + " there, and then", options, "reuse")
        for number, (name, options) in enumerate(list(OPTIONS.items())[:16:2]):
            add(model, f"batch, {name}", next(prompts), options | {"seed": 100 + number}, "batch")
        if model == "smollm2":
            for name, (how, messages, options) in CHATS.items():
                add(model, f"chat, {name}", messages, options, how)
        add(model, "q8_0, T=1", PROMPTS[model][1], {"temperature": 1.0, "logprobs": 0}, kv="q8_0")
        short = {"max_tokens": 4, "speculate": False, "logprobs": 1}
        add(model, "scalar, T=1", "The", short | {"temperature": 1.0}, kernel="scalar")
    add("bundled", "scalar, greedy", PROMPTS["bundled"][0], {"max_tokens": 8}, kernel="scalar")
    # The second text of a family shares the first one's passes, begins like it, or is made by another kernel.
    models = [*CASES, *(f"llama {each}" for each in TYPES)]
    for number, (model, how) in enumerate(zip(models, cycle(["batch", "reuse", "scalar"]), strict=False)):
        prompt, options = LONG[number % 12 :], {"temperature": 1.0, "seed": number, "logprobs": 0}
        if how == "batch":
            add(model, "greedy", prompt, {"logprobs": 1}, how)
            add(model, "T=1, told", prompt[5:], options, how)
        elif how == "reuse":
            add(model, "greedy", prompt, {"logprobs": 1})
            add(model, "T=1", prompt + ", and so he sang.", options, how)
        else:
            add(model, "greedy, told", prompt, {"logprobs": 1})
            add(model, "T=1", prompt, options, kernel=how)
    add("llama", "q8_0", LONG, {"temperature": 1.0, "logprobs": 0}, kv="q8_0")
    return made


def read() -> list[Entry]:
    """The entries of the file."""
    return [json.loads(line) for line in FILE.read_text("utf-8").splitlines()] if FILE.exists() else []


def texts(entries: Sequence[Entry], folder: Path) -> Iterator[tuple[Engine, Entry, Entry]]:
    """Make each text again as it was made; yields its engine, the entry, and the entry as it is now.

    Args:
        entries: each engine is loaded once for those that follow each other.
        folder: for random models.

    Raises:
        FileNotFoundError: the model is not installed.
    """
    of_engine = itemgetter("model", "kernel", "kv")
    for (model, kernel, kv), group in groupby(entries, of_engine):
        file: Path | str = model
        if model not in TRAINED:
            case, _, kind = model.partition(" ")
            file = folder / f"{model}.gguf"
            file = file if file.exists() else write(file, replace(CASES[case], quantization=kind or "F32"))
        with mock.patch.dict(os.environ, {"PYSTAGED_KERNEL": kernel} if kernel else {}):
            engine = pystaged.load(file, n_ctx=512, kv=kv, policy=FixedPolicy(2, 3, 6), report=lambda _: None)
        with engine:
            for _, each in groupby(group, lambda entry: entry["how"] == "batch" or entry["name"]):
                batch = list(each)
                streams = (_stream(engine, entry) for entry in batch)
                found = results(stream.text for stream in streams)
                for entry, result in zip(batch, found, strict=True):
                    yield engine, entry, _made(entry, result)


def _stream(engine: Engine, entry: Entry) -> Stream:
    options = entry["options"] | {"reuse": entry["how"] == "reuse"}
    if entry["told"] and "receipt" in entry:
        options["prediction"] = entry["receipt"]["text"]["tokens"]
    of_prompt = engine.stream if isinstance(entry["prompt"], str) else engine.stream_chat
    return of_prompt(entry["prompt"], **options)


def _made(entry: Entry, result: GenerationResult) -> Entry:
    """An entry with what is made of it now."""
    assert (result.stats.reused_tokens > 0) == (entry["how"] == "reuse"), entry["name"]
    made = {name: value for name, value in entry.items() if name not in MADE}
    if result.logprobs is not None:
        found = [[each.token, each.logprob.hex()] for one in result.logprobs for each in (one, *one.top)]
        made["logprobs"] = hashlib.sha256(json.dumps(found).encode()).hexdigest()[:16]
    return made | {"receipt": json.loads(result.receipt.to_json())}


def differences(kept: Entry, made: Entry) -> list[str]:
    """Where two entries differ, the versions of packages aside."""
    both = [entry | entry.get("receipt", {}) | {"receipt": 0, "versions": 0} for entry in (kept, made)]
    return [name for name in both[0] | both[1] if both[0].get(name) != both[1].get(name)]


def main() -> None:
    parser = argparse.ArgumentParser(description="List the texts that this version makes otherwise.")
    parser.add_argument("--write", action="store_true", help="make them anew")
    arguments = parser.parse_args()
    kept = {entry["name"]: entry for entry in read()}
    # Entries of the file, but those of which the plan says otherwise.
    entries = [old if (old := kept.get(entry["name"], {})) == old | entry else entry for entry in plan()]
    lines = []
    with tempfile.TemporaryDirectory() as folder, mock.patch.dict(os.environ, XDG_CACHE_HOME=folder):
        for _, entry, made in texts(entries, Path(folder)):
            old = kept.get(entry["name"], {})
            if found := differences(old, made):
                print(f"{entry['name']}: {', '.join(found) if old else 'new'}")  # noqa: T201
            lines.append(json.dumps(made if found else old, ensure_ascii=False) + "\n")
    if arguments.write:
        FILE.write_text("".join(lines), "utf-8")


if __name__ == "__main__":
    main()
