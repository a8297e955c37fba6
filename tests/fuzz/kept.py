"""What is kept in the user's cache folder. Damage there costs time and nothing else: results stay the same."""

from __future__ import annotations

import os
import random
from abc import abstractmethod
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import numpy as np
from support.families import CASES
from support.random_models import write

from fuzz.mutate import damage
from fuzz.target import Case, Target, short
from pystaged import _core
from pystaged._core import RecycledCandidates
from pystaged.decoding.cost import PassCost
from pystaged.loading.costs import CostStore
from pystaged.loading.kept import PACKED, RECYCLED
from pystaged.loading.packed import load_packed
from pystaged.loading.prompt_cache import KeptPrompts
from pystaged.loading.recycled import KeptCandidates

KEPT = RecycledCandidates.num_candidates

VOCAB = 300
TOKENS = [7 * i % 250 for i in range(200)]


class _Kept(Target):
    """One file, its bytes when it is whole, and what reads it."""

    refusals = ()

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self._path = self.write()
        self._base = self._path.read_bytes()

    @abstractmethod
    def write(self) -> Path:
        """Write the file."""

    def damaged(self, r: random.Random, data: bytes) -> bytes:
        return damage(r, data)

    @abstractmethod
    def read(self) -> None:
        """Read it, whatever was done to it."""

    def sound(self) -> Iterator[Case]:
        yield Case("as it was", len(self._base), partial(self._use, self._base))

    def case(self, r: random.Random) -> Case:
        data = self.damaged(r, self._base)
        return Case(short(data), len(data), partial(self._use, data))

    def _use(self, data: bytes) -> None:
        self._path.write_bytes(data)
        self.read()


class Costs(_Kept):
    """Costs are the measured ones, or are measured again."""

    def write(self) -> Path:
        self._store = CostStore(self.folder)
        self._store.save("key", PassCost({n: 0.01 + 0.001 * n for n in (1, 2, 4, 8, 16)}, None))
        self._expected = self._store.load("key")
        return next(self.folder.glob("*.json"))

    def read(self) -> None:
        cost = self._store.load("key")
        if cost and self._expected and (cost.seconds, cost.slopes) != (self._expected.seconds, self._expected.slopes):
            raise AssertionError(f"passes take {cost.seconds}")


def named_model(folder: Path, name: str) -> Path:
    """A random model. What is kept for it says its path and its time: both are of one length wherever it lies, so that
    a case is the same in each folder."""
    path = folder.absolute() / "model.gguf"
    path = path.with_stem("m" * max(200 - len(os.fsencode(path.parent)), 1))
    write(path, CASES[name])
    os.utime(path, ns=(10**18, 10**18))
    return path


class Memory(_Kept):
    """Recycled candidates are those that were learnt, or none."""

    def write(self) -> Path:
        self._model = named_model(self.folder, "llama")
        memory = KeptCandidates(self._model, "v")
        r = np.random.default_rng(0)
        tokens = r.integers(0, VOCAB, (200, KEPT), dtype=np.int32)
        before, last = (r.integers(0, VOCAB, 200, dtype=np.int32) for _ in range(2))
        memory.candidates.learn(before, last, tokens, -np.sort(r.random((200, KEPT), np.float32), axis=1))
        memory.save()
        self._expected = self._entries()
        return RECYCLED.path(self._model)

    def read(self) -> None:
        RECYCLED.all()
        if self._entries() not in (self._expected, (b"", b"", b"")):
            raise AssertionError("other candidates than those that were learnt")

    def _entries(self) -> tuple[bytes, ...]:
        return tuple(each.tobytes() for each in KeptCandidates(self._model, "v").candidates.entries())


class Packed(_Kept):
    """Whatever lies in the cache, the logits are those of the file."""

    def write(self) -> Path:
        self._model = named_model(self.folder, "qwen3")
        self._expected = logits(_core.Model(str(self._model), "", 1))
        load_packed(self._model, "", 1, lambda _: None)
        return PACKED.path(self._model)

    def damaged(self, r: random.Random, data: bytes) -> bytes:
        head = data[: 16 << 10]
        return damage(r, head) + data[len(head) :] if r.random() < 0.5 else damage(r, data)

    def read(self) -> None:
        PACKED.all()
        model = load_packed(self._model, "", 1, lambda _: None)
        if logits(model) != self._expected:
            raise AssertionError("other logits than those of the file")


class Prompts(_Kept):
    """A text that goes on from a file has the logits of one that was read, whatever is in the file."""

    def write(self) -> Path:
        self._model = _core.Model(str(named_model(self.folder, "lfm2-window")), "", 1)
        session = _core.Session(self._model, 256)
        session.keep_states([100, 180], 2)
        session.prefill(TOKENS)
        session.verify(TOKENS[:3], [-1, 0, 1], _core.Sampling())
        kept = self._prompts()
        kept.keep([session])
        kept.close()
        self._tokens, self._expected = session.tokens, self._next(session)
        return next((self.folder / "prompts").glob("*.prompt"))

    def damaged(self, r: random.Random, data: bytes) -> bytes:
        head = data[:2000]  # tokens and shapes
        return damage(r, head) + data[len(head) :] if r.random() < 0.6 else damage(r, data)

    def read(self) -> None:
        kept, session = self._prompts(), _core.Session(self._model, 256)
        if (found := kept.find(self._tokens, 256)) and kept.load(found[0], [session]):
            if not np.array_equal(session.tokens, self._tokens) or self._next(session) != self._expected:
                raise AssertionError("other logits than those of the text")
        elif len(session.tokens):
            raise AssertionError("a refused file has left tokens")

    def _prompts(self) -> KeptPrompts:
        return KeptPrompts(self.folder / "prompts", "content", 1 << 20, lambda _: None)

    def _next(self, session: _core.Session) -> bytes:
        session.evaluate([1], [-1])
        found = bytes(session.logits(0).tobytes())
        session.discard()
        return found


def logits(model: _core.Model) -> bytes:
    session = _core.Session(model, 16)
    session.evaluate([1, 2, 3], [-1, 0, 1])
    return bytes(session.logits(2).tobytes())
