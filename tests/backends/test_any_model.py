"""Causal decoders that libllama has and our kernels lack: trees by LlamaPass against libllama itself, which decodes one
token after another."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest
from support.commands import run_python

# In a process of its own: what a tree's nodes, and the text that goes on from there, differ at most.
CHILD = """
import json
import sys
from pathlib import Path
import numpy as np
from support.any_model import Asking
from support.family_reference import log_softmax
from support.logits import llama_context, llama_pass
from support.steps import evaluate, path_to, prefill
from pystaged._core import Model, Session
path = Path(sys.argv[2])
asking = Asking(sys.argv[1], path)
asking.load()
model = Model(path, num_threads=1, device="ggml-cpu")
session, rng = Session(model, 200), np.random.default_rng(1)
text = rng.integers(0, 256, 30).tolist()
prefill(session, text)
if model.is_chained:
    parents = list(range(-1, model.most_pending - 1))
else:
    parents = [-1, 0, 0, 1, 1, 2, 5, 6, 6, 0, 9, 9, 7, 12]
tree = rng.integers(0, 256, len(parents)).tolist()

def one_by_one(tokens):
    with llama_context(path, num_threads=1) as context:
        return [llama_pass(context, [token], i)[0] for i, token in enumerate(tokens)][-1]

def gap(found, tokens):
    return float(np.abs(log_softmax(found) - log_softmax(one_by_one(tokens))).max())

evaluate(session, tree, parents)
gaps = [gap(session.logits(row), text + [tree[i] for i in path_to(row, parents)]) for row in range(len(tree))]
kept = path_to(len(tree) - 1, parents)
session.commit(kept)
text += [tree[i] for i in kept]
fork = session.fork(len(text))
for each in (session, fork):
    evaluate(each, [5], [-1])
    gaps.append(gap(each.logits(0), [*text, 5]))
session.discard()
session.rewind(20)
prefill(session, text[len(session.tokens) : 25])
evaluate(session, [7], [-1])
gaps.append(gap(session.logits(0), [*text[:25], 7]))
print(json.dumps([gaps, float(session.logits(0).std())]))
"""
CELLS = """
import sys
from pathlib import Path
import pystaged
from support.any_model import Asking
path = Path(sys.argv[1])
Asking("mamba", path).load()
policy = pystaged.FixedPolicy(1, 1, 1)
with pystaged.load(path, kv_memory=4 << 30, num_threads=1, policy=policy, report=lambda _: None) as engine:
    assert engine.model.cell_bytes == 0
    print(len(engine.generate([1, 2, 3], max_tokens=4, ignore_eos=True).tokens))
"""
SOME = "falcon gemma mamba mpt phimoe jamba qwen3vlmoe"
MORE = """
arcee arctic baichuan bailingmoe bitnet bloom chatglm codeshell cogvlm cohere2 cohere2moe command-r dbrx deci deepseek
deepseek2-ocr ernie4_5 exaone exaone-moe exaone4 gemma3n glm4 gptneox granite_swa grok grovemoe hunyuan-dense
hunyuan-moe hunyuan_vl hy_v3 internlm2 jais jais2 maincoder mamba2 mellum mimo2 minicpm minicpm3 muse-glimmer nanbeige
nemotron olmo openelm orion pangu-embedded phi2 plamo plamo3 qwen qwen2vl qwen3vl refact seed_oss spark2_5 starcoder
step35 talkie xverse
"""


SLOW = [pytest.param(each, marks=pytest.mark.slow) for each in MORE.split()]


@pytest.mark.parametrize("family", [*SOME.split(), *SLOW])
def test_trees_are_libllamas_own(tmp_path: Path, family: str) -> None:
    done = run_python(CHILD, family, tmp_path / "model.gguf", PYTHONPATH=os.pathsep.join(sys.path))
    assert done.returncode == 0, done.stderr[-2000:]
    gaps, spread = json.loads(done.stdout.splitlines()[-1])
    assert spread > 0.01
    assert max(gaps) <= 0.03, gaps


def test_a_text_without_keys_and_values_may_take_any_memory(tmp_path: Path) -> None:
    done = run_python(CELLS, tmp_path / "mamba.gguf", PYTHONPATH=os.pathsep.join(sys.path))
    assert done.stdout.split()[-1:] == ["4"], done.stderr[-2000:]
