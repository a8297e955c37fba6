"""Statistics of one generation, the stages that its tokens came from, and the terms of this package.

The *target* is the model that decides; the *draft* is the smaller model that guesses; a *drafter* proposes tokens; a
*stage* is a kind of proposer (target, draft, ngram, grammar). In a *step* of a text, one pass of the target, which
a batch may share, verifies a *tree* of *nodes*. The *root* (depth 0) is the last emitted token, not yet in the KV
cache; the *budget* is the most nodes, root excluded. The accepted nodes are the *path*, which the *bonus token* of the
target follows. A *constraint* limits the tokens of a text; its *mask* has the tokens allowed after a node, and a
token is *forced* if no other is allowed. *Recycled candidates* are the target's likeliest next tokens in earlier
passes.
"""

from __future__ import annotations

import codecs
import operator
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, fields
from typing import TYPE_CHECKING, Any

from pystaged.decoding.tree import Stage

if TYPE_CHECKING:
    from typing_extensions import Self

    from pystaged.decoding.requests import Verify

_NAMES = tuple(stage.name.lower() for stage in Stage)  # by number
STAGE_NAMES = {
    Stage.TARGET: "target",
    Stage.DRAFT: "draft",
    Stage.NGRAM: "n-gram",
    Stage.CONFIRMED: "confirmed",
    Stage.GRAMMAR: "grammar",
}
STAGE_COLORS = {
    Stage.TARGET: None,
    Stage.DRAFT: "green",
    Stage.NGRAM: "yellow",
    Stage.CONFIRMED: "magenta",
    Stage.GRAMMAR: "cyan",
}


class _Counts:
    """Counts that can be added and subtracted."""

    __slots__ = ()

    def since(self, earlier: Self) -> Self:
        """What was counted since an earlier count."""
        return self._with(operator.sub, earlier)

    def plus(self, other: Self) -> Self:
        """The sum of both."""
        return self._with(operator.add, other)

    def _with(self, combined: Callable[[Any, Any], Any], other: Self) -> Self:
        names: tuple[str, ...] = tuple(type(self).__slots__)  # much faster than dataclasses.fields, once for each pass
        values: Callable[[Self], tuple[Any, ...]] = operator.attrgetter(*names)
        return type(self)(*map(combined, values(self), values(other)))


@dataclass(slots=True)
class DrafterStats(_Counts):
    """One drafter's work.

    passes: number of model passes or lookups; nodes: nodes that they judged; weight_bytes: bytes of weights read in
    them. seconds: time of drafting; native_seconds: its part in C++.
    """

    passes: int = 0
    nodes: int = 0
    weight_bytes: int = 0
    seconds: float = 0.0
    native_seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class PassStats(_Counts):
    """Passes of the target, for all texts.

    passes: number of passes; seconds: their time. rows: their rows; prompt_rows: rows of prefill; guesses: rows of
    trees' nodes, roots excluded. steps: steps that texts took in them.
    """

    passes: int = 0
    seconds: float = 0.0
    rows: int = 0
    prompt_rows: int = 0
    guesses: int = 0
    steps: int = 0

    @property
    def rows_per_pass(self) -> float:
        """Mean rows of a pass."""
        return self.rows / self.passes if self.passes else 0.0

    @property
    def texts_per_pass(self) -> float:
        """Mean number of texts that took a step in a pass."""
        return self.steps / self.passes if self.passes else 0.0

    @property
    def guess_share(self) -> float:
        """Share of guesses among all rows."""
        return self.guesses / self.rows if self.rows else 0.0

    def __str__(self) -> str:
        means = f"{self.texts_per_pass:.1f} texts and {self.rows_per_pass:.1f} rows each"
        guesses = f"{self.guess_share:.0%} of the rows were guesses"
        return f"{self.passes} passes of the target in {self.seconds:.2f} seconds; on average {means}; {guesses}"

    def to_dict(self) -> dict[str, float]:
        """All figures, for JSON."""
        means = {name: getattr(self, name) for name in ("rows_per_pass", "texts_per_pass", "guess_share")}
        return {each.name: getattr(self, each.name) for each in fields(PassStats)} | means


@dataclass(slots=True)
class StageStats:
    """One stage's part in one generation. drafted: verified nodes; accepted: accepted ones before the text's end;
    emitted: tokens, with one that ends the text."""

    drafted: int = 0
    accepted: int = 0
    emitted: int = 0


@dataclass(slots=True)
class GenerationStats:
    """Counts and times of one generation. The text's end may cut its last step: nodes after it are not accepted ones.

    prompt_tokens: tokens of the prompt; reused_tokens: those that the KV cache held already.
    new_tokens: emitted tokens. steps: passes of the target that emitted them; rows: this text's rows in them, roots
    included; pass_rows: all rows of these passes; pass_texts: sum of the texts that took steps in them.
    prefill_seconds: wall time of prefill; decode_seconds: wall time after it, without the consumer's between steps;
    target_seconds: its part in verify passes. A shared pass counts fully for each text.
    plain_seconds: estimated time of plain decoding of the same tokens in the same batch; 0 without measured costs.
    lengths: number of steps by accepted nodes. offered: by depth d, steps that accepted a node at depth d - 1 with
    children; taken: those of them that accepted one of these.
    stages: by name. drafters: work by stage name. relative_weight_bytes: bytes of weights that target and drafts read
    per token, relative to plain decoding (the measure of Spector & Ré's Table 1).
    """

    prompt_tokens: int = 0
    reused_tokens: int = 0
    new_tokens: int = 0
    steps: int = 0
    rows: int = 0
    pass_rows: int = 0
    pass_texts: int = 0
    prefill_seconds: float = 0.0
    decode_seconds: float = 0.0
    target_seconds: float = 0.0
    plain_seconds: float = 0.0
    relative_weight_bytes: float = 1.0
    lengths: Counter[int] = field(default_factory=Counter)
    offered: Counter[int] = field(default_factory=Counter)
    taken: Counter[int] = field(default_factory=Counter)
    stages: dict[str, StageStats] = field(default_factory=lambda: {name: StageStats() for name in _NAMES})
    drafters: dict[str, DrafterStats] = field(default_factory=dict)

    def record(
        self, verified: Verify, emitted: list[Stage], tokens: int, texts: int, speedup: float, seconds: float
    ) -> None:
        """Count one step.

        Args:
            verified: its request, with the result.
            emitted: the stage that proposed each of its tokens.
            tokens: number of the step's tokens up to the end of the text, an end token included.
            texts: number of texts that took a step in the pass.
            speedup: estimate over plain decoding of the same tokens in the same batch; 0 without measured costs.
            seconds: its wall time.
        """
        tree, whole = verified.tree, verified.result[0]
        path = whole[: max(1, tokens)]
        stages = tree.stages.tolist()
        by_number = tuple(self.stages.values())
        for stage in stages[1:]:
            by_number[stage].drafted += 1
        for node in path[1:]:
            by_number[stages[node]].accepted += 1
        for stage in emitted:
            by_number[stage].emitted += 1
        accepted = len(path) - 1
        self.new_tokens += len(emitted)
        self.steps += 1
        self.rows += verified.num_rows
        self.pass_rows += verified.pass_rows
        self.pass_texts += texts
        self.target_seconds += verified.seconds
        self.decode_seconds += seconds
        self.plain_seconds += speedup * seconds * len(path) / len(whole)
        self.lengths[accepted] += 1
        for depth in range(1, len(path)):
            self.offered[depth] += 1
            self.taken[depth] += 1
        if verified.num_rows > 1 and path == whole and path[-1] in tree.parents:
            self.offered[accepted + 1] += 1

    def cut(self, stages: Sequence[Stage]) -> None:
        """Subtract the last tokens of a step, given their stages, because the text ended before them."""
        self.new_tokens -= len(stages)
        for stage in stages:
            self.stages[_NAMES[stage]].emitted -= 1

    def finish(self, before: dict[str, DrafterStats], after: dict[str, DrafterStats], target_weight_bytes: int) -> None:
        """Complete the figures at the end, from the drafters' work before and after the text."""
        for name, work in after.items():
            self.drafters[name] = self.drafters.get(name, DrafterStats()).plus(work.since(before[name]))
        read = self.steps * target_weight_bytes + sum(work.weight_bytes for work in self.drafters.values())
        self.relative_weight_bytes = read / (max(1, self.new_tokens) * target_weight_bytes)

    @property
    def native_seconds(self) -> float:
        """Decoding time in C++, of target and drafts."""
        return self.target_seconds + sum(work.native_seconds for work in self.drafters.values())

    @property
    def drafted(self) -> int:
        """Number of verified nodes, roots excluded."""
        return sum(stage.drafted for stage in self.stages.values())

    @property
    def accepted(self) -> int:
        """Number of accepted nodes, bonus tokens excluded."""
        return sum(stage.accepted for stage in self.stages.values())

    @property
    def accepted_length(self) -> float:
        """Mean nodes accepted per step, the bonus token excluded."""
        return self.accepted / self.steps if self.steps else 0.0

    @property
    def rows_per_pass(self) -> float:
        """Mean rows of a pass with a step of this text."""
        return self.pass_rows / self.steps if self.steps else 0.0

    @property
    def texts_per_pass(self) -> float:
        """Mean number of texts that took a step in such a pass."""
        return self.pass_texts / self.steps if self.steps else 0.0

    @property
    def guess_share(self) -> float:
        """Share of guesses among this text's rows."""
        return 1 - self.steps / self.rows if self.rows else 0.0

    @property
    def tokens_per_step(self) -> float:
        """Mean accepted length plus the bonus token."""
        return self.accepted_length + 1 if self.steps else 0.0

    @property
    def acceptance_at_depth(self) -> list[float]:
        """P(depth d accepted | depth d - 1 accepted and the tree goes on there), for d = 1, 2, ..."""
        return [self.taken[depth] / self.offered[depth] for depth in range(1, max(self.offered, default=0) + 1)]

    @property
    def tokens_per_second(self) -> float:
        """New tokens per second of decoding."""
        return self.new_tokens / self.decode_seconds if self.decode_seconds > 0 else 0.0

    @property
    def speedup_estimate(self) -> float | None:
        """Estimated speedup over plain decoding; None without measured costs, or if it exceeds tokens_per_step, which
        shows that the costs are outdated."""
        found = self.plain_seconds / self.decode_seconds if self.decode_seconds > 0 else 0.0
        return found if 0 < found <= self.tokens_per_step else None

    def __str__(self) -> str:
        line = f"{self.new_tokens} token{'' if self.new_tokens == 1 else 's'}, {self.tokens_per_second:.1f} per second"
        tried = self.drafted or any(work.seconds for work in self.drafters.values())
        if tried and self.speedup_estimate:
            line += f" (about {self.speedup_estimate:.1f}x plain)"
        return f"{line}, {self.tokens_per_step:.2f} per step"

    @property
    def python_share(self) -> float:
        """Share of the decoding time outside C++."""
        return 1 - self.native_seconds / self.decode_seconds if self.decode_seconds > 0 else 0.0

    def to_dict(self) -> dict[str, Any]:
        """All figures, for JSON."""
        figures = {name: getattr(self, name) for name in _FIGURES}
        stages = {name: asdict(stage) for name, stage in self.stages.items()}
        shown = ("passes", "nodes", "seconds")
        drafters = {name: {each: getattr(work, each) for each in shown} for name, work in self.drafters.items()}
        return figures | {"stages": stages, "drafters": drafters}


# Of GenerationStats, for JSON.
_FIGURES = (
    *("prompt_tokens", "reused_tokens", "new_tokens", "steps", "tokens_per_step", "accepted_length"),
    *("acceptance_at_depth", "drafted", "accepted", "rows_per_pass", "texts_per_pass", "guess_share"),
    *("relative_weight_bytes", "python_share", "tokens_per_second", "speedup_estimate"),
    *("prefill_seconds", "decode_seconds", "target_seconds"),
)


def shown_stages(stats: GenerationStats) -> list[Stage]:
    """The stages to show: grammar only if it forced tokens, confirmed n-grams only if there were any."""
    usual = Stage.TARGET, Stage.DRAFT, Stage.NGRAM
    return [stage for stage in STAGE_NAMES if stage in usual or stats.stages[stage.name.lower()].drafted]


class StageSpans:
    """Assigns parts of a text to the tokens they came from, although text may lag behind tokens."""

    def __init__(self) -> None:
        # Decodes as the stream does; a character belongs to the token that completes it.
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._waiting: deque[tuple[str, Stage]] = deque()
        self._last = Stage.TARGET

    def split(self, text: str, words: Iterable[bytes], stages: Iterable[Stage]) -> Iterator[tuple[str, Stage]]:
        """Split the next part of a text by token; yields each token's text and stage.

        Args:
            words: the bytes of the tokens that came with it.
            stages: the stage that proposed each token.
        """
        for word, stage in zip(words, stages, strict=True):
            self._last = stage
            self._waiting.append((self._decoder.decode(word), stage))
        while text:
            if not self._waiting:
                # The replacement of bytes that never became a character.
                yield text, self._last
                return
            new, stage = self._waiting.popleft()
            if len(new) > len(text):
                self._waiting.appendleft((new[len(text) :], stage))
            if taken := text[: len(new)]:
                yield taken, stage
            text = text[len(taken) :]
