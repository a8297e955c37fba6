"""GGUF files of drafts that read their target's hidden states, beside a sound target."""

from __future__ import annotations

import random
from abc import abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from support.assistants import Assistant
from support.families import CASES
from support.feature_drafts import Block, Eagle3, dspark, tap, write_draft
from support.gguf_parts import Gguf as Parts
from support.random_models import RandomModel, write, write_without
from support.steps import prefill, rank

from fuzz.gguf import CHANGES
from fuzz.target import Case, Target
from pystaged._core import HiddenRows, Model, Sampling, Session, Work, run

GREEDY = Sampling()
LLAMA = RandomModel("llama", layers=3, head_dim=32, context=1024)
GEMMA4 = replace(CASES["gemma4"], context=1024)
Files = dict[str, tuple[RandomModel, Callable[[Path], Path]]]  # by name: the target, and what writes the draft


class Drafts(Target):
    """What the loader makes of such a file, and passes over its rows."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self._targets: dict[str, Model] = {}
        self._bases: dict[str, bytes] = {}
        for name, (target, make) in self._files().items():
            self._targets[name] = Model(write(folder / f"{name}.gguf", target), "", 1)
            self._bases[name] = make(self.path).read_bytes()
        self._parts = {name: Parts(data) for name, data in self._bases.items()}

    @abstractmethod
    def _files(self) -> Files:
        """Sound files."""

    @abstractmethod
    def _guesses(self, draft: Model, session: Session, hidden: HiddenRows) -> Any:
        """Rows of the draft's head, int32[n, k], behind a text of which the target keeps these hidden states."""

    def sound(self) -> Iterator[Case]:
        for name, data in self._bases.items():
            yield self.of(name, data, name)

    def case(self, r: random.Random) -> Case:
        name = r.choice(list(self._bases))
        data, step = r.choice(CHANGES)(r, self._parts[name])
        return self.of(f"{name}; {step}", data, name)

    def use(self, data: bytes, name: str) -> None:
        self.path.write_bytes(data)
        target = self._targets[name]
        draft = Model(self.path, "", 1, target=target)
        tap(target, draft)
        source = Session(target, 130)
        prefill(source, range(120))  # beyond the window
        rows = self._guesses(draft, Session(draft, target=source), source.hidden)
        named, size = draft.head_tokens.tolist(), draft.vocab_size
        if not (rows.min() >= -1 and rows.max() < (len(named) or size) and all(0 <= token < size for token in named)):
            raise AssertionError(f"rows {rows} of a head for tokens {named}, with a vocabulary of {size}")


class Assistants(Drafts):
    """Gemma 4's, whose rows read the target's keys and values."""

    def _files(self) -> Files:
        drafts = [Assistant(GEMMA4), Assistant(GEMMA4, quantization="Q8_0", centroids=True)]
        return {each.quantization: (GEMMA4, partial(write_draft, draft=each)) for each in drafts}

    def _guesses(self, draft: Model, session: Session, hidden: HiddenRows) -> Any:
        last = draft.vocab_size - 1
        run([Work.propose(session, [0, last], [-1, -1], 2, 3, GREEDY, hidden=hidden + hidden)])
        run([Work.propose(session, [1, 2], [0, 1], 2, 3, GREEDY, hidden=session.hidden_of([0, 1]))])
        return rank(session, [0, 3], 5, GREEDY)[0]


class Eagles(Drafts):
    """EAGLE-3, whose rows read hidden states of the target or what the row before hands on."""

    def _files(self) -> Files:
        drafts = {
            "plain": Eagle3(),
            "cut": Eagle3(draft_vocab=120, own_head=True, quantization="Q8_0", norm_before_residual=True),
            "3.1": Eagle3(separate_fc_norm=True, norm_output=True, own_embedding=True, rope_factors=True),
            "deep": Eagle3(head_norms=True, taps=[1, 2, 3], layers=2, norm_before_fc=True, quantization="Q4_0"),
        }
        return {name: (LLAMA, partial(write_draft, draft=draft)) for name, draft in drafts.items()}

    def _guesses(self, draft: Model, session: Session, hidden: HiddenRows) -> Any:
        last = draft.vocab_size - 1
        run([Work.read(session, range(1, 101), hidden[:100])])
        run([Work.propose(session, [101, last], [-1, 0], 2, 3, GREEDY, hidden=hidden[100:102])])
        own = session.hidden_of([0, 1])
        session.commit([0])
        run([Work.propose(session, [0, last], [-1, -1], 2, 3, GREEDY, hidden=own)])
        return rank(session, [0, 1], 5, GREEDY)[0]


class Ahead(Eagles):
    """The target's file again, for its MTP layer, which is read as EAGLE-3 is; or a file of that layer alone."""

    def _files(self) -> Files:
        more = {"layers": 3, "ahead": 1, "context": 1024, "tie": False}
        hybrid = RandomModel("qwen35", recurrent=(0, 2), rotary=8, **more)
        models = {
            "qwen3": RandomModel("qwen3", head_dim=32, quantization="Q8_0", **more),
            "hybrid": hybrid,
            "latent": replace(CASES["deepseek2"], ahead=1, context=1024, tie=False),
        }
        files: Files = {name: (model, partial(write, model=model)) for name, model in models.items()}
        return files | {"alone": (hybrid, partial(write_without, model=hybrid, parts=["blk.0.", "blk.1.", "blk.2."]))}


class Blocks(Drafts):
    """DFlash and DSpark: hidden states become the context of blocks."""

    def _files(self) -> Files:
        drafts = {
            "dflash": Block(rope_factors=True),
            "causal": Block(causal=True, layers=1, markov_rank=16, taps=[1, 2, 3], block=6),
            "dspark": dspark(draft_vocab=120, own_head=True, markov_rank=32, quantization="Q8_0"),
            "own": dspark(own_embedding=True, markov_rank=32, quantization="Q4_0"),
        }
        return {name: (LLAMA, partial(write_draft, draft=draft)) for name, draft in drafts.items()}

    def _guesses(self, draft: Model, session: Session, hidden: HiddenRows) -> Any:
        size, last = draft.block_size, draft.vocab_size - 1
        run([Work.read(session, range(100), hidden[:100])])
        block = [last, *[draft.mask_token] * (size - 1)]
        run([Work.propose(session, block, range(-1, size - 1), size, 1, GREEDY)])
        return session.likeliest([0, size - 1], [0, last] if draft.has_markov else [], 5)[0]
