"""What is kept in the user's cache folder. Damage there costs time and nothing else: results stay the same."""

from __future__ import annotations

import random
from abc import abstractmethod
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import numpy as np
from support.families import CASES
from support.random_models import write

from fuzz.mutate import damage, damage_json
from fuzz.target import Case, Target, short
from pystaged import _core
from pystaged.decoding.cost import PassCost
from pystaged.drafting.recycled import KEPT
from pystaged.loading import cache
from pystaged.loading.costs import CostStore
from pystaged.loading.kept import MEMORIES, PACKED
from pystaged.loading.memories import KeptMemory, _digest
from pystaged.loading.packed import load_packed

VOCAB = 300


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
    """Costs that are read are believable, and serve to reckon with."""

    def write(self) -> Path:
        self._store = CostStore(self.folder)
        self._store.save("key", PassCost({n: 0.01 + 0.001 * n for n in (1, 2, 4, 8, 16)}, None))
        return next(self.folder.glob("*.json"))

    def damaged(self, r: random.Random, data: bytes) -> bytes:
        return damage_json(r, data)

    def read(self) -> None:
        cost = self._store.load("key")
        if cost:
            times = [cost(n, 5000) for n in range(1, 70)]
            if not all(0 < one < 1e9 for one in times):
                raise AssertionError(f"passes take {times}")


class Memory(_Kept):
    """Recycled candidates are tokens with chances."""

    def write(self) -> Path:
        self._model = write(self.folder / "model.gguf", CASES["llama"])
        memory = KeptMemory(self._model, "v", VOCAB)
        r = np.random.default_rng(0)
        tokens = r.integers(0, VOCAB, (200, KEPT), dtype=np.int32)
        before, last = (r.integers(0, VOCAB, 200, dtype=np.int32) for _ in range(2))
        memory.candidates.learn(before, last, tokens, -np.sort(r.random((200, KEPT), np.float32), axis=1))
        memory.save()
        return MEMORIES.path(self._model)

    def damaged(self, r: random.Random, data: bytes) -> bytes:
        """With a digest that fits, or not."""
        payload = data[data.rindex(b"\n", 0, data.index(b"whose content") + 200) + 1 :] if r.random() < 0.7 else b""
        if not payload:
            return damage(r, data)
        head = data[: len(data) - len(payload)]
        payload = damage(r, payload)
        payload = payload[: len(payload) - len(payload) % (8 + 6 * KEPT)]
        return head[: -len(_digest(b"")) - 1] + _digest(payload) + b"\n" + payload

    def read(self) -> None:
        MEMORIES.all()
        candidates = KeptMemory(self._model, "v", VOCAB).candidates
        for token in range(0, VOCAB, 5):
            chances, _ = candidates.chances(token, token)
            if not all(0 <= each < VOCAB and 0 <= chance <= 1 for each, chance in chances.items()):
                raise AssertionError(f"after {token}: {chances}")


class Packed(_Kept):
    """Whatever lies in the cache, the logits are those of the file."""

    def write(self) -> Path:
        self._model = write(self.folder / "model.gguf", CASES["qwen3"])
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


class Cache(_Kept):
    """Where models came from, and how they are listed."""

    def write(self) -> Path:
        path = cache.repository_folder("some/one") / "model.Q8_0.gguf"
        path.parent.mkdir(parents=True)
        write(path, CASES["llama"])
        cache.save_source(path, "0" * 40, "mit", downloaded=True)
        self._model = path
        return path.with_name("source.json")

    def damaged(self, r: random.Random, data: bytes) -> bytes:
        return damage_json(r, data)

    def read(self) -> None:
        (model,) = cache.models()
        if not model.license.isprintable():
            raise AssertionError(f"a license of {model.license!r}")
        cache.find("one")
        cache.is_current(self._model, "0" * 40)
        cache.save_source(self._model, "1" * 40, "mit")
        if not cache.is_current(self._model, "1" * 40):
            raise AssertionError("what was saved is not there")


def logits(model: _core.Model) -> bytes:
    session = _core.Session(model, 16)
    session.evaluate([1, 2, 3], [-1, 0, 1])
    return bytes(session.logits(2).tobytes())
