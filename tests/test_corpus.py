"""The texts of tests/support/corpus.py, made again: nothing that is not meant to change them does."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from support import corpus, paths

import pystaged

KEPT = corpus.read()
ANEW = "if meant, run PYTHONPATH=tests python -m support.corpus --write, and CHANGELOG.md lists the entries"


def test_the_entries_are_those_of_the_plan() -> None:
    assert [{name: entry[name] for name in entry.keys() - {*corpus.MADE}} for entry in KEPT] == corpus.plan(), ANEW


@pytest.mark.parametrize("model", dict.fromkeys(entry["model"] for entry in KEPT))
def test_texts_are_what_they_were(model: str, tmp_path: Path) -> None:
    if model == "smollm2":
        paths.smollm2()
    for engine, kept, made in corpus.texts([entry for entry in KEPT if entry["model"] == model], tmp_path):
        assert not corpus.differences(kept, made), f"{kept['name']} has changed; {ANEW}"
        if ": T=1" in kept["name"]:
            receipt = pystaged.Receipt.from_json(json.dumps(kept["receipt"]))
            assert pystaged.repeat(engine, receipt, speculate=False) is None, kept["name"]
