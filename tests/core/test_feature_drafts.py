"""Drafts that read their target's hidden states, against twins in doubles and libllama: EAGLE-3, MTP layers, DFlash,
DSpark and Gemma 4's assistants."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from support.assistants import Assistant
from support.draft_checkpoints import FORMS, filled, write_form
from support.families import CASES
from support.family_reference import FamilyReference, log_softmax
from support.feature_drafts import Block, BlockTwin, Contents, Eagle3, Eagle3Twin, dspark, load_pair, write_draft
from support.logits import llama_ahead, llama_assistant
from support.memory import resident
from support.paths import table
from support.random_models import RandomModel, write, write_without
from support.steps import evaluate, prefill, verify

from pystaged._core import ContextFullError, HiddenRows, Model, ModelError, Sampling, Session, Work, run
from pystaged.loading.quantize import quantize_checkpoint

TARGET = RandomModel("llama", layers=3, head_dim=32, context=1024)
TOKENS = np.random.default_rng(1).integers(0, 300, 700, dtype=np.int32)
GREEDY = Sampling()
PATH, FORK = [-1, 0, 1, 2], [-1, 0, 0, 1, 2, 2]  # parents of rows

EAGLES: dict[str, dict[str, Any]] = dict(table("eagles"))
UNUSED = {"conf_proj.weight": np.ones((1, 80), np.float32), "conf_proj.bias": np.ones(1, np.float32)}  # DSpark's
BLOCKS: dict[str, Block] = {
    "dflash": Block(),
    "causal": Block(causal=True, layers=1),
    "dspark": dspark(draft_vocab=120, own_head=True),
    "own embedding": dspark(own_embedding=True),
    "markov without anchor": Block(markov_rank=16, taps=[1, 2, 3], block=6),
}
HYBRID = RandomModel("qwen35", layers=3, recurrent=(0, 2), ahead=1, rotary=8, tie=False, context=1024)
AHEAD = RandomModel("qwen3", layers=3, ahead=1, head_dim=32, context=1024)
LATENT = replace(CASES["deepseek2"], ahead=1, tie=False, context=1024)
GEMMA4 = {name: replace(CASES[name], context=1024) for name in ("gemma4", "gemma4-keys-are-values")}


@pytest.fixture(scope="module")
def target_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("target") / "target.gguf", TARGET)


def read(target: Model, count: int) -> HiddenRows:
    """The hidden states of the first tokens."""
    session = Session(target)
    prefill(session, TOKENS[:count])
    return session.hidden


def close(found: npt.NDArray[Any], expected: npt.NDArray[Any], tolerance: float = 1e-3) -> None:
    np.testing.assert_allclose(found, expected, atol=tolerance * expected.std())


def lent(target_path: Path) -> npt.NDArray[np.float64]:
    """The target's embedding, which is its head."""
    return FamilyReference(target_path).weights["token_embd.weight"]


@pytest.mark.parametrize("options", EAGLES.values(), ids=EAGLES)
def test_an_eagle_draft_is_its_twin(target_path: Path, tmp_path: Path, options: dict[str, Any]) -> None:
    path = write_draft(tmp_path / "draft.gguf", Eagle3(**options))
    target, draft = load_pair(target_path, path)
    embedding = lent(target_path)
    twin = Eagle3Twin.of(path, embedding, embedding)
    hidden, session = read(target, 40), Session(draft)
    run([Work.read(session, TOKENS[1:33], hidden[:32])])
    run([Work.propose(session, TOKENS[33:37], PATH, 4, 1, GREEDY, hidden=hidden[32:36])])
    logits, states = twin.commit(hidden.numpy()[:36].astype(np.float64), TOKENS[1:37].tolist())
    for row in range(4):
        close(session.logits(row), logits[32 + row])
    close(session.hidden_of([0, 1, 2, 3]).numpy(), states[32:])
    # A tree behind the last row; each row reads what its parent hands on.
    last = session.hidden_of([3])
    session.commit([0, 1, 2, 3])
    run([Work.propose(session, [7, 8], [-1, -1], 2, 1, GREEDY, hidden=last + last)])
    first = session.hidden_of([0, 1])
    run([Work.propose(session, [9, 10, 11], [0, 1, 1], 3, 1, GREEDY, hidden=first[:1] + first[1:] + first[1:])])
    logits, states = twin.add(np.stack([states[-1]] * 2), [7, 8], [35, 35])
    close(session.logits(1), logits[1])
    logits, states = twin.add(states[[0, 1, 1]], [9, 10, 11], [36, 37, 37])
    for row in range(3):
        close(session.logits(2 + row), logits[row])
    if "draft_vocab" in options:
        np.testing.assert_array_equal(draft.head_tokens, twin.d2t)


LAYERS = ["blk.0.", "blk.1.", "blk.2."]


@pytest.mark.parametrize(
    ("model", "absent"),
    [(HYBRID, []), (HYBRID, ["shared_head_norm"]), (HYBRID, LAYERS), (LATENT, [])],
    ids=["hybrid", "norm of the target", "file of the layer alone", "latent"],
)
def test_an_mtp_layer_is_llama_cpps(tmp_path: Path, model: RandomModel, absent: list[str]) -> None:
    target_path = write(tmp_path / "target.gguf", model)
    path = write_without(tmp_path / "draft.gguf", model, absent) if absent else target_path
    target, draft = load_pair(target_path, path)
    assert (draft.target_layers, draft.num_layers, draft.vocab_size) == ([3], 1, 300)
    hidden, session, reference = read(target, 40), Session(draft), FamilyReference(target_path)
    run([Work.read(session, TOKENS[1:33], hidden[:32])])
    run([Work.propose(session, TOKENS[33:37], PATH, 4, 1, GREEDY, hidden=hidden[32:36])])
    states, text = reference.judged(hidden.numpy()[:36].astype(np.float64)), TOKENS[1:37].tolist()

    def theirs(handed: list[HiddenRows], tokens: list[int]) -> npt.NDArray[np.float32]:
        """llama.cpp's logits after guesses, each of which reads what the row before handed on."""
        given = np.concatenate([states, *(each.numpy() for each in handed)]).astype(np.float32)
        return llama_ahead(target_path if absent == LAYERS else path, given, [*text, *tokens])

    def check(rows: list[int], expected: npt.NDArray[Any]) -> HiddenRows:
        """What rows hand on is what the head makes their logits of."""
        handed = session.hidden_of(rows)
        close(np.stack([session.logits(row) for row in rows]), expected)
        close(handed.numpy() @ reference.weights["output.weight"].T, expected)
        return handed

    last = check([0, 1, 2, 3], theirs([], [])[32:])[3:]
    session.commit([0, 1, 2, 3])
    run([Work.propose(session, [7, 8], [-1, -1], 2, 1, GREEDY, hidden=last + last)])
    first = check([0, 1], np.stack([theirs([last], [token])[-1] for token in (7, 8)]))
    run([Work.propose(session, [9, 10], [0, 1], 2, 1, GREEDY, hidden=first)])
    check([2, 3], np.stack([theirs([last, first[i : i + 1]], [7 + i, 9 + i])[-1] for i in range(2)]))


@pytest.mark.parametrize("case", GEMMA4)
@pytest.mark.parametrize("length", [1, 120, 300])
def test_an_assistant_is_llama_cpps(tmp_path: Path, case: str, length: int) -> None:
    target_path = write(tmp_path / "target.gguf", GEMMA4[case])
    plain = write_draft(tmp_path / "plain.gguf", Assistant(GEMMA4[case]))
    # A head that scores few tokens is not used here; llama.cpp would.
    path = write_draft(tmp_path / "draft.gguf", Assistant(GEMMA4[case], centroids=True)) if length > 250 else plain
    target, draft = load_pair(target_path, path)
    assert (draft.target_layers, draft.borrows_cells, draft.cell_bytes) == ([target.num_layers], True, 0)
    text = TOKENS[:length].tolist()
    source = Session(target)
    session = Session(draft, target=source)
    prefill(source, text)
    assert len(source.hidden) == 1
    run([Work.propose(session, [5, 6], [-1, -1], 2, 1, GREEDY, hidden=source.hidden + source.hidden)])
    # A level behind, whose rows read what their parents hand on.
    first, second = session.hidden_of([0]), session.hidden_of([1])
    run([Work.propose(session, [7, 8, 9], [0, 1, 1], 3, 1, GREEDY, hidden=first + second + second)])
    read = FamilyReference(target_path).judged(source.hidden.numpy().astype(np.float64)).repeat(2, axis=0)
    states = np.concatenate([read, (first + second + second).numpy()]).astype(np.float32)
    found = np.stack([session.logits(row) for row in range(5)])
    close(found, llama_assistant(target_path, plain, text, states, [5, 6, 7, 8, 9]), 3e-3)  # its GELU is a table
    # The head and what is handed on are two projections of the same numbers.
    weights = FamilyReference(plain).weights
    behind = np.linalg.lstsq(weights["token_embd.weight"], found.T)[0]
    handed = session.hidden_of(range(5)).numpy()
    close(handed, (weights["nextn.post_projection.weight"] @ behind).T)


@pytest.mark.parametrize("quantization", ["F32", "Q8_0", "Q4_1"])
def test_a_cut_head_has_the_first_tokens_logits(tmp_path: Path, quantization: str) -> None:
    model = RandomModel("qwen2", layers=3, ahead=1, tie=False, head_bias=True, quantization=quantization)
    path = write(tmp_path / "target.gguf", model)
    target, whole = load_pair(path, path)
    cut = Model(path, "", 2, target=target)
    cut.cut_head(100)
    hidden, sessions = read(target, 8), [Session(whole), Session(cut)]
    found = [run([Work.propose(each, TOKENS[1:9], range(-1, 7), 8, 3, GREEDY, hidden=hidden)])[0] for each in sessions]
    for row in range(8):
        logits = sessions[0].logits(row)
        np.testing.assert_array_equal(sessions[1].logits(row), logits[:100])
        np.testing.assert_array_equal(found[1][0][row], np.argsort(-logits[:100], kind="stable")[:3])
    sessions[1].discard()
    allowed = np.zeros((1, 10), np.uint32)
    allowed[0, 5] = 1  # a token that the cut head lacks
    sampling = Sampling(temperature=1.0)
    nothing = Work.propose(sessions[1], TOKENS[1:2], [-1], 1, 2, sampling, masks=allowed, hidden=hidden[:1])
    assert run([nothing])[0][0].tolist() == [[-1, -1]]
    assert cut.weight_bytes < whole.weight_bytes
    with pytest.raises(ValueError, match="before the first session"):
        cut.cut_head(50)
    blocks = [Model(write_draft(tmp_path / "block.gguf", dspark(taps=[1])), target=target) for _ in range(2)]
    blocks[1].cut_head(100)
    tokens, found = [5, *[blocks[0].mask_token] * 3], []
    for model in blocks:
        session = Session(model)
        run([Work.propose(session, tokens, range(-1, 3), 4, 1, GREEDY)])
        found.append(session.likeliest([0, 2], [5, 7], 100))
    for whole_tokens, chances, cut_tokens, cut_chances in zip(*found[0], *found[1], strict=True):
        kept = whole_tokens < 100
        assert cut_tokens[: kept.sum()].tolist() == whole_tokens[kept].tolist()
        np.testing.assert_allclose(np.diff(cut_chances[: kept.sum()]), np.diff(chances[kept]), atol=1e-4)
    own = Model(write_draft(tmp_path / "own.gguf", Eagle3(own_head=True)), target=target)
    before = own.weight_bytes
    own.cut_head(100)  # stays whole
    assert own.weight_bytes == before


@pytest.mark.parametrize("block", BLOCKS.values(), ids=BLOCKS)
def test_a_block_draft_is_its_twin(target_path: Path, tmp_path: Path, block: Block) -> None:
    path = write_draft(tmp_path / "draft.gguf", block, UNUSED if block.markov_rank else None)
    embedding = lent(target_path)
    compare(target_path, path, BlockTwin.of(path, embedding, embedding), block)


@pytest.mark.parametrize("form", ["LFM2.5's DSpark", "MiniCPM5's DSpark"])
def test_a_converted_checkpoint_is_its_twin(target_path: Path, tmp_path: Path, form: str) -> None:
    made = FORMS[form]()
    draft = replace(made.draft, taps=[1, 2, 3])
    ids = {"target_layer_ids": [0, 1, 2]}
    config = made.config | ids | ({"dflash_config": {"mask_token_id": 64} | ids} if made.neighbours else {})
    quantize_checkpoint(
        write_form(tmp_path / "draft", replace(made, draft=draft, config=config)), tmp_path / "draft.gguf", "f32"
    )
    embedding = lent(target_path)
    twin = BlockTwin(Contents.made(draft), embedding, embedding, adjacent=made.neighbours)
    compare(target_path, tmp_path / "draft.gguf", twin, draft)


def compare(target_path: Path, path: Path, twin: BlockTwin, block: Block) -> None:
    """A draft's blocks behind contexts of several lengths, and the corrections of its Markov head."""
    target, draft = load_pair(target_path, path)
    assert (draft.block_size, draft.is_anchored, draft.mask_token) == (block.block, block.from_anchor, twin.mask_token)
    hidden, session = read(target, 310), Session(draft)
    states = hidden.numpy().astype(np.float64)
    for first, last in ((0, 300), (300, 303)):  # more rows than a pass takes, then a few
        run([Work.read(session, TOKENS[first:last], hidden[first:last])])
        twin.commit(states[first:last])
        tokens = [int(TOKENS[last]), *[draft.mask_token] * (block.block - 1)]
        run([Work.propose(session, tokens, range(-1, block.block - 1), block.block, 1, GREEDY)])
        expected, _ = twin.block(tokens[0])
        for row in range(block.block):
            close(session.logits(row), expected[row])
        before = [tokens[0], 5, 6]
        found, chances = session.likeliest([0, 1, 1], before if draft.has_markov else [], 20)
        for i, row in enumerate((0, 1, 1)):
            logprobs = log_softmax(expected[row] + twin.correction(before[i]))
            close(chances[i], np.sort(logprobs)[::-1][:20])
            close(logprobs[found[i]], np.sort(logprobs)[::-1][:20])
        session.discard()


@pytest.mark.parametrize("kind", ["eagle", "mtp", "block"])
def test_a_row_has_the_same_bits_alone_and_with_other_texts(target_path: Path, tmp_path: Path, kind: str) -> None:
    if kind == "eagle":
        path = write_draft(tmp_path / "draft.gguf", Eagle3(quantization="Q8_0", taps=[1, 2, 3]))
    elif kind == "mtp":
        path = target_path = write(tmp_path / "target.gguf", replace(HYBRID, quantization="Q8_0"))
    else:
        path = write_draft(tmp_path / "draft.gguf", dspark(quantization="Q8_0", markov_rank=32))
    target, draft = load_pair(target_path, path)
    hidden = read(target, 200)
    lengths = [1, 40, 130]
    several, alone = ([Session(draft) for _ in lengths] for _ in range(2))
    run([Work.read(each, TOKENS[1 : n + 1], hidden[:n]) for each, n in zip(several[:2], lengths, strict=False)])
    for each, n in zip(alone, lengths, strict=True):
        for row in range(n):
            run([Work.read(each, TOKENS[row + 1 : row + 2], hidden[row : row + 1])])

    def grow(session: Session, n: int) -> Work:
        if kind == "block":
            return Work.propose(session, [3, *[draft.mask_token] * 3], range(-1, 3), 4, 1, GREEDY)
        return Work.propose(session, TOKENS[n + 1 : n + 7], FORK, 6, 1, GREEDY, hidden=hidden[n : n + 6])

    # One text still reads while the others grow their trees.
    run([grow(several[0], 1), Work.read(several[2], TOKENS[1:131], hidden[:130]), grow(several[1], 40)])
    run([grow(several[2], 130)])
    for one, other, n in zip(several, alone, lengths, strict=True):
        run([grow(other, n)])
        for row in range(4):
            np.testing.assert_array_equal(one.logits(row), other.logits(row))
        rows, before = [0, 1, 1, 3], [1, 2, 3, 4] if kind == "block" else []
        for found, expected in zip(one.likeliest(rows, before, 9), other.likeliest(rows, before, 9), strict=True):
            np.testing.assert_array_equal(found, expected)


def test_an_assistants_row_has_the_same_bits_alone_and_with_other_texts(tmp_path: Path) -> None:
    model = replace(GEMMA4["gemma4-keys-are-values"], quantization="Q8_0")
    target_path = write(tmp_path / "target.gguf", model)
    path = write_draft(tmp_path / "draft.gguf", Assistant(model, quantization="Q8_0"))
    target, draft = load_pair(target_path, path, kv="q8_0")
    sources, lengths = [Session(target) for _ in range(3)], (3, 80, 300)
    for source, n in zip(sources, lengths, strict=True):
        prefill(source, TOKENS[:n])
    several, alone = ([Session(draft, target=source) for source in sources] for _ in range(2))
    hidden = [sum([source.hidden] * 5, source.hidden) for source in sources]
    run([Work.propose(each, TOKENS[:6], FORK, 6, 1, GREEDY, hidden=h) for each, h in zip(several, hidden, strict=True)])
    for one, other, h in zip(several, alone, hidden, strict=True):
        for row in range(6):
            run([Work.propose(other, TOKENS[row : row + 1], [-1], 1, 1, GREEDY, hidden=h[:1])])
            np.testing.assert_array_equal(one.logits(row), other.logits(row))
            np.testing.assert_array_equal(one.hidden_of([row]).numpy(), other.hidden_of([row]).numpy())


def test_an_assistant_needs_its_targets_text(tmp_path: Path) -> None:
    model = GEMMA4["gemma4"]
    target_path = write(tmp_path / "target.gguf", model)
    path = write_draft(tmp_path / "draft.gguf", Assistant(model))
    target, draft = load_pair(target_path, path)
    with pytest.raises(ValueError, match="needs its target's session"):
        Session(draft)
    with pytest.raises(ValueError, match="another model"):
        Session(draft, target=Session(Model(target_path)))
    source = Session(target, 100)
    session = Session(draft, 40, target=source)
    hidden = read(target, 3)
    row = Work.propose(session, [1], [-1], 1, 1, GREEDY, hidden=hidden)
    with pytest.raises(ValueError, match="no tokens"):
        run([row])
    prefill(source, TOKENS[:30])
    run([row])
    before = session.logits(0)
    with pytest.raises(ValueError, match="parent"):
        run([Work.propose(session, [1], [1], 1, 1, GREEDY, hidden=hidden)])
    for wrong in (hidden + hidden, None):
        with pytest.raises(ValueError, match="64 numbers of another one's hidden states"):
            run([Work.propose(session, [1], [-1], 1, 1, GREEDY, hidden=wrong)])
    with pytest.raises(ValueError, match="no context"):
        session.commit([0])
    empty = Session(draft, target=source)
    with pytest.raises(ValueError, match="reads and verifies no text"):
        run([Work.read(empty, [1], hidden)])
    with pytest.raises(ValueError, match="reads and verifies no text"):
        verify(empty, [1], [-1], GREEDY)
    with pytest.raises(ContextFullError, match="rows here"):
        run([Work.propose(session, [1] * 600, [-1] * 600, 0, 0, GREEDY, hidden=sum([hidden] * 599, hidden))])
    # Another text of the target's session, and the same one again.
    assert source.rewind(10) == 10
    run([row])
    assert not np.array_equal(session.logits(1), before)
    prefill(source, TOKENS[10:30])
    copy = session.fork(0)
    run([row, Work.propose(copy, [1], [-1], 1, 1, GREEDY, hidden=hidden)])
    np.testing.assert_array_equal(session.logits(2), before)
    np.testing.assert_array_equal(copy.logits(0), before)
    assert (session.num_pending, len(session.tokens), session.num_bytes) == (3, 0, 0)
    prefill(source, TOKENS[30:50])
    with pytest.raises(ContextFullError, match="40 tokens"):
        run([row])
    source.close()
    with pytest.raises(ValueError, match="target is closed"):
        run([row])
    session.close()
    with pytest.raises(ValueError, match="the session is closed"):
        run([row])


@pytest.mark.skipif(sys.platform != "linux", reason="/proc is Linux's")
def test_an_assistant_that_is_closed_lets_go_of_its_targets_text(tmp_path: Path) -> None:
    model = GEMMA4["gemma4"]
    path = write_draft(tmp_path / "draft.gguf", Assistant(model))
    target, draft = load_pair(write(tmp_path / "target.gguf", model), path)
    source = Session(target)
    prefill(source, TOKENS)
    drafts = [Session(draft, target=source.fork(len(TOKENS))) for _ in range(20)]
    before = resident()
    for session in drafts:
        session.close()
    assert before - resident() > 10 * source.num_bytes


def test_an_assistant_that_does_not_fit_its_target_is_refused(tmp_path: Path) -> None:
    model = GEMMA4["gemma4"]
    target = Model(write(tmp_path / "target.gguf", model))
    path = tmp_path / "draft.gguf"
    fits = Assistant(model)
    cases: list[tuple[Assistant, dict[str, Any], str]] = [
        (Assistant(replace(model, width=96)), {}, "96 wide, but this one is 64"),
        (Assistant(replace(model, vocab_size=280)), {}, "280 tokens, but the target has 300"),
        (Assistant(replace(model, vocab_size=320)), {}, "320 tokens, but the target has 300"),
        (Assistant(replace(model, kv_heads=2)), {}, "2 heads of 16 numbers in layers with a window, but.* 1 of 16"),
        (replace(fits, metadata={"attention.sliding_window": 60}), {}, "window is 60 positions, the target's 50"),
        (replace(fits, metadata={"embedding_length_out": None}), {}, "embedding_length_out"),
        (replace(fits, metadata={"attention.sliding_window_pattern": [True]}), {}, "1 entries for 3 layers"),
        (fits, {"nextn.pre_projection.weight": None}, "nextn.pre_projection"),
        (fits, {"nextn.post_projection.weight": np.ones((64, 31), np.float32)}, "nextn.post_projection"),
        (fits, {"token_embd.weight": None}, "token_embd"),
        (fits, {"blk.1.attn_q_norm.weight": None}, "attn_q_norm"),
        (fits, {"output.weight": np.ones((300, 32), np.float32)}, "output.weight"),
    ]
    for draft, changed, message in cases:
        write_draft(path, draft, changed)
        with pytest.raises(ModelError, match=message):
            Model(path, target=target)
    write_draft(path, fits)
    with pytest.raises(ModelError, match="name this file as its draft"):
        Model(path)
    with pytest.raises(ModelError, match="for 'gemma4' models, but the target is of architecture 'llama'"):
        Model(path, target=Model(write(tmp_path / "llama.gguf", TARGET)))
    no_window = {"attention.sliding_window_pattern": [False] * 2, "attention.shared_kv_layers": 0}
    metadata = model.metadata | no_window | {"feed_forward_length": 96}
    global_only = replace(model, layers=2, metadata=metadata)
    with pytest.raises(ModelError, match="layers with a window of its target, which has none"):
        Model(path, target=Model(write(tmp_path / "global.gguf", global_only)))
    narrow = replace(model, metadata=model.metadata | {"attention.sliding_window": 1})
    with pytest.raises(ModelError, match="nothing to attend to"):
        Model(write_draft(path, Assistant(narrow)), target=Model(write(tmp_path / "narrow.gguf", narrow)))


def test_what_a_draft_cannot_read_is_refused(target_path: Path, tmp_path: Path) -> None:
    eagle = write_draft(tmp_path / "eagle.gguf", Eagle3())
    block = write_draft(tmp_path / "block.gguf", dspark())
    with pytest.raises(ModelError, match="name this file as its draft"):
        Model(eagle)
    target, draft = load_pair(target_path, block)
    hidden, session, plain = read(target, 8), Session(draft), Session(target)
    run([Work.read(session, TOKENS[:6], hidden[:6])])
    with pytest.raises(ValueError, match="hidden states"):
        run([Work.propose(session, [1, 2], [-1, 0], 2, 1, GREEDY, hidden=hidden[:2])])
    with pytest.raises(ValueError, match="hidden states"):
        run([Work.read(session, [1, 2])])
    with pytest.raises(ValueError, match="verifies no trees"):
        verify(session, [1], [-1], GREEDY)
    run([Work.propose(session, [1, 2], [-1, 0], 2, 1, GREEDY)])
    with pytest.raises(ValueError, match="pending rows"):
        run([Work.propose(session, [1, 2], [-1, 0], 2, 1, GREEDY)])
    with pytest.raises(ValueError, match="no context"):
        session.commit([0])
    for rows, before in (([0], []), ([0], [300]), ([2], [1])):
        with pytest.raises(ValueError, match=r"token|row"):
            session.likeliest(rows, before, 3)
    session.discard()
    with pytest.raises(ValueError, match="256 rows"):
        run([Work.propose(session, [1] * 257, range(-1, 256), 0, 0, GREEDY)])
    full = Session(draft, 7)
    run([Work.read(full, TOKENS[:6], hidden[:6])])
    with pytest.raises(ContextFullError):
        run([Work.propose(full, [1, 2], [-1, 0], 2, 1, GREEDY)])
    assert (len(full.tokens), full.num_pending) == (6, 0)
    prefill(plain, [1])
    evaluate(plain, [1], [-1])
    with pytest.raises(ValueError, match="no Markov"):
        plain.likeliest([0], [1], 3)


@pytest.mark.parametrize(("draft", "fields", "changed", "message"), table("unfit_drafts"))
def test_a_file_that_does_not_fit_its_target_is_refused(
    target_path: Path, tmp_path: Path, draft: str, fields: dict[str, Any], changed: dict[str, Any], message: str
) -> None:
    values = {name: value and filled(*value) for name, value in changed.items()}
    path = tmp_path / "draft.gguf"
    write_draft(path, {"Eagle3": Eagle3, "Block": Block}[draft](**fields), values)
    with pytest.raises(ModelError, match=message):
        Model(path, target=Model(target_path))


@pytest.mark.parametrize(
    ("model", "absent", "message"),
    [
        (replace(AHEAD, ahead=0), "none", "0 layers that predict further tokens"),
        (replace(AHEAD, ahead=2), "none", "2 layers that predict further tokens"),
        (replace(AHEAD, layers=2), "none", "layer 2 predicts further tokens"),
        (replace(AHEAD, width=32), "none", "32 wide"),
        (replace(AHEAD, vocab_size=280), "none", "300 tokens, but a vocabulary of 280"),
        (replace(AHEAD, family="starcoder2"), "none", "architecture 'starcoder2'"),
        (AHEAD, "eh_proj", "eh_proj"),
        (AHEAD, "blk.3.attn_k.", "attn_k"),
        (replace(AHEAD, vectors={"blk.3.extra.weight": np.ones(3, np.float32)}), "none", "extra"),
    ],
)
def test_an_mtp_layer_that_does_not_fit_its_target_is_refused(
    tmp_path: Path, model: RandomModel, absent: str, message: str
) -> None:
    path = write_without(tmp_path / "draft.gguf", model, [absent])
    with pytest.raises(ModelError, match=message):
        Model(path, target=Model(write(tmp_path / "target.gguf", AHEAD)))


def test_a_file_of_an_mtp_layer_alone_is_no_model(tmp_path: Path) -> None:
    path = write_without(tmp_path / "layer.gguf", AHEAD, LAYERS)
    with pytest.raises(ModelError, match="name this file as its draft"):
        Model(path)
