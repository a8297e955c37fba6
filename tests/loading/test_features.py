"""The form of a draft that reads hidden states: how it is counted, chosen and kept."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.family_reference import FamilyReference
from support.feature_drafts import Block, BlockTwin, Eagle3, Eagle3Twin, write_draft
from support.random_models import write
from support.right_drafts import KINDS, TARGET, write_right
from support.steps import prefill, verify

from pystaged import Engine
from pystaged._core import Model, Session, Tokenizer
from pystaged.decoding.policy import FixedPolicy
from pystaged.loading import features
from pystaged.loading.features import Form, describe, known_form, load_features


def lines(load: Any) -> list[str]:
    """What loading reports."""
    said: list[str] = []
    load(said.append)
    return said


@pytest.fixture(scope="module")
def target_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("target") / "target.gguf", TARGET)


@pytest.mark.parametrize("kind", KINDS)
def test_right_guesses_are_those_of_the_twin(tmp_path: Path, kind: str) -> None:
    target_path, path = write_right(tmp_path, kind)
    target = Model(target_path)
    draft = Model(path, target=target)
    target.tap(draft.target_layers, all_rows=True)
    session = Session(target)
    prefill(session, [3, 4, 5])
    tokens = [3, 4, 5, 6]
    while len(tokens) < 40:
        # Some tokens are not the likeliest one, so that some guesses are wrong.
        found = verify(session, [tokens[-1]], [-1], features._GREEDY)[1].tolist()
        tokens += found if len(tokens) % 5 else [(found[0] + 1) % 300]
    session.rewind(0)
    prefill(session, tokens[:-1])
    hidden = session.hidden.numpy().astype(np.float64)
    embedding = FamilyReference(target_path).weights["token_embd.weight"]
    first = second = tried = 0
    if kind == "eagle":
        twin = Eagle3Twin.of(path, embedding)
        logits, states = twin.commit(hidden[:38], tokens[1:39])
        for row in range(3, 38):
            tried += 1
            if logits[row].argmax() == tokens[row + 2]:
                first += 1
                if row + 3 < 40:
                    twin.crop(row + 1)
                    second += twin.add(states[row : row + 1], [tokens[row + 2]])[0][0].argmax() == tokens[row + 3]
                    twin.crop(0)
                    twin.commit(hidden[:38], tokens[1:39])
    else:
        block, read = BlockTwin.of(path, embedding), 0
        for root in range(4, 38, 3):
            block.commit(hidden[read:root])
            read = root
            expected, _ = block.block(tokens[root])
            at = block.first_place
            tried += 1
            if (expected[at] + block.correction(tokens[root])).argmax() == tokens[root + 1]:
                first += 1
                second += (expected[at + 1] + block.correction(tokens[root + 1])).argmax() == tokens[root + 2]
    assert features._right(target, draft, np.array(tokens, np.int32), 4) == (first, second, tried)
    assert 0 < first < tried


@pytest.mark.parametrize(
    "best", [{}, {"deeper": True}, {"other_pairs": True}, {"deeper": True, "other_feedback": True}]
)
@pytest.mark.parametrize("kind", ["eagle", "block"])
def test_the_form_that_guesses_best_is_kept(
    target_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, best: dict[str, bool], kind: str
) -> None:
    if kind == "block":
        best = {name: value for name, value in best.items() if name != "other_feedback"}
        path = write_draft(tmp_path / "draft.gguf", Block())
    else:
        path = write_draft(tmp_path / "draft.gguf", Eagle3())
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    wanted, loaded = replace(Form(), **best), dict[int, Form]()
    load_as = features._load

    def load(path: Path, target: Model, form: Form) -> Model:
        draft = load_as(path, target, form)
        loaded[id(draft)] = form
        return draft

    def right(target: Model, draft: Model, *_: Any) -> tuple[int, int, int]:
        form = loaded[id(draft)]
        alike = (
            ((target.taps != draft.target_layers) == wanted.deeper)
            + (form.other_pairs == wanted.other_pairs)
            + (form.other_feedback == wanted.other_feedback)
        )
        return 20 * alike, 10 * alike, 100

    monkeypatch.setattr(features, "_load", load)
    monkeypatch.setattr(features, "_right", right)
    target = Model(target_path)
    tokenizer = Tokenizer(target_path)
    said = lines(lambda report: load_features(path, target, target_path, tokenizer, report))
    form = known_form(path, target, target_path)
    assert form == replace(wanted, first=0.6, second=0.5)
    assert said[-1] == f"the draft draft.gguf is {describe(form)}"
    assert target.taps == [layer + wanted.deeper for layer in (1, 2)]
    # The second time nothing is tried; a damaged note is no note.
    assert lines(lambda report: load_features(path, Model(target_path), target_path, tokenizer, report)) == []
    (note,) = (tmp_path / "cache").rglob("*.json")
    for damaged in ("{", '{"deeper": 1}', '{"other": true}', '{"first": 2.0}'):
        note.write_text(damaged)
        assert known_form(path, target, target_path) is None


def test_a_draft_that_is_seldom_right_is_told(target_path: Path, tmp_path: Path) -> None:
    path = write_draft(tmp_path / "draft.gguf", Block())
    target = Model(target_path)
    said = lines(lambda report: load_features(path, target, target_path, Tokenizer(target_path), report))
    assert "seldom right" in said[-1]


def test_a_draft_whose_levels_are_costly_guesses_common_tokens_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write(tmp_path / "target.gguf", replace(TARGET, ahead=1))
    block = write_draft(tmp_path / "block.gguf", Block())

    def load(path: Path, target_path: Path) -> Model:
        return load_features(path, Model(target_path), target_path, Tokenizer(target_path), lambda _: None)

    whole, blocks = load(path, path), load(block, path)
    monkeypatch.setattr(features, "_COMMON", 64)
    rows = 320 - 64  # 300 are padded to 320
    assert whole.weight_bytes - load(path, path).weight_bytes == rows * TARGET.width * 4
    assert load(block, path).weight_bytes == blocks.weight_bytes  # a block reads its head once for all levels
    with Engine(path, policy=FixedPolicy(2, 3, 6)) as engine, Engine(path, draft=None) as plain:
        result = engine.generate([5, 6, 7], max_tokens=40)
        assert result.tokens == plain.generate([5, 6, 7], max_tokens=40).tokens
        assert result.stats.stages["draft"].drafted > 0
