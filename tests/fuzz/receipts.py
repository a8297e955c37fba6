"""Receipts: what is read is written again as it was."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

from support.paths import DATA

from fuzz.mutate import damage_json
from fuzz.target import Case, Target, short
from pystaged.receipts.receipt import Receipt


class Receipts(Target):
    """Files of others, which name options, tokens and hashes."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self._bases = [path.read_bytes() for path in sorted(DATA.glob("*.receipt"))]

    def sound(self) -> Iterator[Case]:
        for data in self._bases:
            yield self.of(short(data), data)

    def case(self, r: random.Random) -> Case:
        data = damage_json(r, r.choice(self._bases))
        return self.of(short(data), data)

    def use(self, data: bytes) -> None:
        self.path.write_bytes(data)
        receipt = Receipt.load(self.path)
        try:
            receipt.save(self.path)
            again = Receipt.load(self.path)
        except (ValueError, OSError) as error:  # which is no refusal of what was damaged
            raise AssertionError(f"a receipt that was read cannot be written and read again: {error}") from error
        if again != receipt:
            raise AssertionError("a receipt is another one when it was saved")
