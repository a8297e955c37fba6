"""What `pystaged diff` says, beside logits of whole texts and the models' own greedy texts."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from gguf import GGUFReader
from support.commands import here
from support.logits import engine_logits

import pystaged
from pystaged.engine import Engine
from pystaged.loading.quantize import quantize
from pystaged.receipts.comparison import compare, figures, text_rows

PROMPTS = [np.arange(5 + i, 25 + 3 * i, dtype=np.int32) for i in range(10)]


@pytest.fixture(scope="module")
def files(random_gguf: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    source, folder = random_gguf("F32", context=256, width=256), tmp_path_factory.mktemp("types")
    a, b = folder / "a.gguf", folder / "b.gguf"
    quantize(source, a, "q8_0")
    quantize(source, b, "q4_k_m")
    return a, b


@pytest.fixture(scope="module")
def engines(files: tuple[Path, Path]) -> Iterator[tuple[Engine, Engine]]:
    first, second = (pystaged.load(path, draft=None, recycle=False, report=print) for path in files)
    with first, second:
        yield first, second


@pytest.mark.parametrize("max_tokens", [40, 0])
def test_it_is_what_the_logits_say(files: tuple[Path, Path], engines: tuple[Engine, Engine], max_tokens: int) -> None:
    a, b = engines
    found = compare(a, b, PROMPTS, max_tokens)
    divergences, agrees, losses = [], [], []
    for text, prompt in zip(found, PROMPTS, strict=True):
        start, tokens = (len(prompt), [*prompt, *text.tokens]) if max_tokens else (1, prompt.tolist())
        logits = [engine_logits(path, tokens).astype(np.float64)[start - 1 : -1] for path in files]
        p, q = (np.exp(each) / np.exp(each).sum(1, keepdims=True) for each in logits)
        divergences.append((p * np.log(p / q)).sum(1))
        agrees.append(p.argmax(1) == q.argmax(1))
        losses.append([-np.log(each[np.arange(len(each)), text.tokens]) for each in (p, q)])
        np.testing.assert_allclose(text.divergence, divergences[-1], rtol=0, atol=1e-9)
        np.testing.assert_array_equal(text.agrees, agrees[-1])
        np.testing.assert_allclose(text.best_b, np.log(q.max(1)), rtol=0, atol=1e-9)
        if max_tokens:
            mine, theirs = (each.generate(prompt, max_tokens=max_tokens).tokens for each in (a, b))
            assert text.tokens.tolist() == mine
            same = next((i for i, pair in enumerate(zip(mine, theirs, strict=True)) if pair[0] != pair[1]), None)
            assert text.first == same
    assert any(text.first for text in found)
    told = {figure.name: figure for figure in figures(found)}
    whole, loss_a, loss_b = (np.concatenate(divergences), *(np.concatenate(each) for each in zip(*losses, strict=True)))
    for name, value in {
        "same likeliest token": np.concatenate(agrees).mean(),
        "KL(A || B), mean": whole.mean(),
        "KL(A || B), 99 %": np.quantile(whole, 0.99),
        "perplexity of A": np.exp(loss_a.mean()),
        "perplexity of B": np.exp(loss_b.mean()),
        "perplexity of B / of A": np.exp(loss_b.mean() - loss_a.mean()),
    }.items():
        assert told[name].value == pytest.approx(value, abs=1e-9)
        if told[name].interval:
            low, high = told[name].interval
            assert low <= value <= high
    assert figures(found) == figures(compare(a, b, PROMPTS, max_tokens))


def test_a_model_beside_itself(engines: tuple[Engine, Engine]) -> None:
    (text,) = compare(engines[0], engines[0], PROMPTS[:1], 8)
    assert text.first is None
    assert not text.divergence.any()
    assert all(figure.interval is None for figure in figures([text]))


def test_where_a_text_ends_counts(files: tuple[Path, Path], engines: tuple[Engine, Engine], tmp_path: Path) -> None:
    """The token after which the texts differ ends A's in copies of the files."""
    for prompt in PROMPTS:
        mine, theirs = (each.generate(prompt, max_tokens=40).tokens for each in engines)
        at = next((i for i in range(40) if mine[i] != theirs[i]), 0)
        if at and mine[at] not in mine[:at] + theirs[: at + 1]:
            break
    copies = [Path(shutil.copy(path, tmp_path)) for path in files]
    for path in copies:
        GGUFReader(path, "r+").fields["tokenizer.ggml.eos_token_id"].parts[-1][0] = mine[at]
    first, second = (pystaged.load(path, draft=None, recycle=False, report=print) for path in copies)
    with first, second:
        (text,) = compare(first, second, [prompt], 40)
        assert (text.tokens.tolist(), text.first) == (mine[: at + 1], at)
        assert text.choices_b[at] == theirs[at]
        assert text_rows([text], first.tokenizer)[1][3].endswith("(end)")
        (text,) = compare(second, first, [prompt], 40)
        assert (text.tokens[: at + 1].tolist(), text.first) == (theirs[: at + 1], at)
        assert text_rows([text], first.tokenizer)[1][6].endswith("(end)")
        (text,) = compare(first, first, [np.array([*prompt, *mine[:at]], np.int32)], 40)
        assert (text.tokens.tolist(), text.first) == ([mine[at]], None)  # it ends at once


def test_what_cannot_be_compared(engines: tuple[Engine, Engine], bundled_target: Path) -> None:
    a, b = engines
    with (
        pystaged.load(bundled_target, draft=None, recycle=False) as other,
        pytest.raises(ValueError, match="vocabular"),
    ):
        compare(a, other, PROMPTS, 8)
    with pytest.raises(ValueError, match="no text has tokens"):
        compare(a, b, [np.array([5], np.int32)], 0)
    with pytest.raises(pystaged.ContextFullError, match="a text has 300 tokens, and a context 256"):
        compare(a, b, [np.full(300, 5, np.int32)], 0)


def test_the_command(tmp_path: Path) -> None:
    prompts, page = tmp_path / "prompts.txt", tmp_path / "page.md"
    prompts.write_text("def f(n):\nclass A:\nimport\n")
    bounds = ("--limit", "2", "--max-tokens", "6")
    command = ("diff", "bundled", "bundled", "--kv-b", "q8_0", "--prompts", prompts, *bounds)
    done = here(*command, "--out", page)
    assert done.returncode == 0, done.stderr
    nowhere = here(*command, "--out", tmp_path / "no" / "page.md")
    assert (nowhere.returncode, nowhere.stdout) == (1, b"")
    assert b"there is no folder" in nowhere.stderr
    assert b"A: bundled, kv f16; B: bundled, kv q8_0; texts: 2, tokens: 12" in done.stdout
    said = page.read_text("utf-8")
    assert "| same likeliest token | " in said
    assert "| text | tokens | same for | then A has | p in A | p in B | and B | p in B | KL |\n" in said
    assert "\n|---|--:|--:|---|--:|--:|---|--:|--:|\n" in said  # words begin at the left
    assert said.endswith("## Text 1\n\n    def f(n):\n\n## Text 2\n\n    class A:\n")
    short = here(*command, "--n-ctx", "2")
    assert b"the context holds 2; " in short.stderr
    told = json.loads(here(*command, "--json").stdout)
    assert [text["number"] for text in told["texts"]] == [1, 2]
    assert (told["kv_a"], told["kv_b"], told["tokens"]) == ("f16", "q8_0", 12)
    assert {figure["name"]: figure["value"] for figure in told["figures"]}["KL(A || B), mean"] > 0
    begun = tmp_path / "begun.jsonl"
    messages = [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": "x = 1"}]
    begun.write_text(json.dumps({"messages": messages}))
    here("diff", "bundled", "bundled", "--prompts", begun, *bounds, "--out", page)
    assert page.read_text("utf-8").endswith("<|im_start|>assistant\n    x = 1\n")
