"""The idea in a hundred lines writes what the whole engine writes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

import pystaged
from pystaged import Engine
from pystaged._core import Model, Session, Tokenizer
from pystaged.decoding.drafter import Drafter
from pystaged.decoding.policy import FixedPolicy
from pystaged.decoding.speculate import speculate
from pystaged.drafting.drafter import TreeDrafter
from pystaged.drafting.lookups import lookups
from pystaged.drafting.model import ModelProposer
from pystaged.loading.tables import find_table
from pystaged.options.config import SamplingConfig

TREE = FixedPolicy(width=3, depth=5, budget=12)
SAMPLINGS = [SamplingConfig(), SamplingConfig(temperature=1.0, seed=7), SamplingConfig(temperature=0.7, top_p=0.9)]
PROMPT = "import os\nimport sys\n\nclass Stack:\n    def __init__(self"


@pytest.fixture(scope="module", params=["n-grams", "draft model"])
def pair(
    request: pytest.FixtureRequest, bundled_target: Path, bundled_draft: Path
) -> Iterator[tuple[Engine, Session, Drafter]]:
    """An engine, and a target with a drafter of the same kind."""
    path, draft = bundled_target, bundled_draft
    model, tokenizer = Model(str(path)), Tokenizer(str(path))
    if request.param == "n-grams":
        drafter = TreeDrafter(lookups(find_table(path, None, tokenizer)), TREE, model.vocab_size)
        engine, session = pystaged.load(path, draft=None), Session(model, 512)
    else:
        drafter = TreeDrafter([ModelProposer(Session(Model(str(draft))))], TREE, model.vocab_size)
        engine, session = pystaged.load(path, draft=draft), Session(model, 512)
    with engine:
        yield engine, session, drafter


@pytest.mark.parametrize("sampling", SAMPLINGS, ids=["greedy", "sampled", "top-p"])
def test_it_writes_what_the_engine_writes(sampling: SamplingConfig, pair: tuple[Engine, Session, Drafter]) -> None:
    engine, session, drafter = pair
    options = {"temperature": sampling.temperature, "seed": sampling.seed, "top_p": sampling.top_p}
    tokenizer = engine.tokenizer
    for prompt in (PROMPT, PROMPT[:9]):
        expected = engine.generate(prompt, max_tokens=24, **options)
        steps = speculate(session, drafter, tokenizer.encode(prompt), sampling, 24, tokenizer.is_end)
        tokens = [token for step in steps for token in step]
        assert tokens == expected.tokens
    assert drafter.work().popitem()[1].passes > 0


def test_a_full_context_and_an_early_end(bundled_target: Path) -> None:
    model = Model(str(bundled_target))
    drafter = TreeDrafter(lookups(), TREE, model.vocab_size)
    prompt = np.array([5, 6, 7, 5, 6, 7, 5], np.int32)
    whole = [token for step in speculate(Session(model, 20), drafter, prompt, SAMPLINGS[0], 99) for token in step]
    assert len(whole) == 20 - len(prompt) + 1
    end = whole[6]
    found = speculate(Session(model), drafter, prompt, SAMPLINGS[0], 99, lambda token: token == end)
    assert [token for step in found for token in step] == whole[: whole.index(end)]
