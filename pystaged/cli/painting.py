"""Generated text in a terminal: as it is generated, coloured by stage, with the verified trees."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from itertools import groupby

import typer
from rich.cells import cell_len
from rich.console import Console, Group
from rich.live import Live
from rich.style import Style
from rich.table import Column, Table
from rich.text import Text
from rich.tree import Tree

from pystaged.cli.console import errors, report
from pystaged.cli.options import Given
from pystaged.decoding.readers import Stream
from pystaged.decoding.text import Text as Written
from pystaged.decoding.tree import Stage
from pystaged.engine import Engine
from pystaged.options.recommended import LOOP_WORDS
from pystaged.platform.ctrl_c import Interrupts
from pystaged.result import GenerationResult, Piece
from pystaged.stats import STAGE_COLORS, STAGE_NAMES, GenerationStats, StageSpans, shown_stages

STAGE_STYLES = {stage: Style(color=color) for stage, color in STAGE_COLORS.items()}
_TEXT_LINES = 4  # of an unfinished text, below its trees
_TAB = 8
_MOST_NODES = 64  # of a tree; the rest is only counted
_NODE_STYLES = {True: Style(bold=True), False: Style(dim=True)}  # by whether the node is accepted


def show(
    stream: Stream, given: Given, *, keep: Callable[[Piece], object] = lambda _: None, wrap: bool = False
) -> GenerationResult:
    """Write a text while it is generated, and a newline after it, also when interrupted. `keep` is called with each
    piece that was written; with `wrap` lines break between words, in a terminal."""
    console, paint = Console(highlight=False), given.paints
    if given.get("show_tree"):
        view = _with_trees(console, stream.text, paint=paint)
    else:
        view = _flowing(console, stream.text, paint=paint, wrap=wrap and _is_screen(console))
    try:
        with stream, view as write:
            for piece in stream:
                # Otherwise half a drawing could stay on the screen.
                with Interrupts():
                    write(piece)
                    keep(piece)
    except KeyboardInterrupt:
        typer.echo()
        raise
    typer.echo()
    return stream.result


def summary(stats: GenerationStats, *, paint: bool) -> Text:
    """One line of statistics."""
    line = Text(str(stats), "dim")
    if paint:
        for stage in shown_stages(stats):
            line.append("; " if stage is Stage.TARGET else ", ")
            line.append(f"{STAGE_NAMES[stage]} {stats.stages[stage.name.lower()].emitted}", STAGE_STYLES[stage])
    return line


def fills_context(engine: Engine, result: GenerationResult) -> bool:
    """Whether a text ended because the context is full."""
    return result.finish_reason == "length" and result.stats.prompt_tokens + len(result.tokens) > engine.n_ctx


def of_context(engine: Engine, what: str) -> str:
    """A line that says something of the context, and how to get a longer one if there is one."""
    most = engine.model.max_context
    more = f"; --n-ctx allows more, up to {most}" if most > engine.n_ctx else ""
    return f"the context of {engine.n_ctx} tokens {what}{more}"


def tell_cut(engine: Engine, result: GenerationResult, allows_loops: str = "", allows_more: str = "") -> None:
    """Report what cut a text; of a loop and of a limit only where the words that avoid them are given."""
    if fills_context(engine, result):
        report(of_context(engine, "is full"))
    elif result.finish_reason == "loop" and allows_loops:
        report(LOOP_WORDS.format(allows_loops))
    elif result.finish_reason == "length" and allows_more:
        report(f"cut at {len(result.tokens)} tokens; {allows_more} allows more")


def stats_table(stats: GenerationStats) -> Group:
    """A table of what each stage did for a sequence, and further figures below it."""
    figures = (Column(each, justify="right") for each in ("drafted", "accepted", "emitted", "passes", "seconds"))
    table = Table("stage", *figures, box=None, pad_edge=False)
    for name in (stage.name.lower() for stage in shown_stages(stats)):
        stage, work = stats.stages[name], stats.drafters.get(name)
        passes = stats.steps if name == "target" else work.passes if work else 0
        seconds = stats.target_seconds if name == "target" else work.seconds if work else 0.0
        table.add_row(name, str(stage.drafted), str(stage.accepted), str(stage.emitted), str(passes), f"{seconds:.3f}")
    depths = " ".join(f"{rate:.2f}" for rate in stats.acceptance_at_depth)
    more = (
        f"acceptance at depth 1, 2, ...: {depths or '-'}; weight bytes per token relative to plain decoding: "
        f"{stats.relative_weight_bytes:.2f}; share of time in Python: {stats.python_share:.1%}; "
        f"rows per pass: {stats.rows_per_pass:.1f}; guesses among this text's rows: {stats.guess_share:.0%}"
    )
    return Group(table, Text(more, "dim"))


def write_wrapped(text: str) -> None:
    """Write a text and a newline; in a terminal lines break between words."""
    console = Console(highlight=False)
    if _is_screen(console):
        wrap = Wrap(lambda: console.width)
        text = "".join(part for part, _ in (*wrap.feed(text), *wrap.rest()))
    typer.echo(text)


def _is_screen(console: Console) -> bool:
    return sys.stdout.isatty() and not console.is_dumb_terminal


@contextmanager
def _flowing(console: Console, written: Written, *, paint: bool, wrap: bool) -> Iterator[Callable[[Piece], None]]:
    """A function that writes pieces of a text to standard output as they come. With `paint` each token has the colour
    of the stage that proposed it; with `wrap` lines break between words, and the last word is held until it ends."""
    spans, lines = StageSpans(), Wrap(lambda: console.width)

    def write(parts: Iterable[tuple[str, Style | None]]) -> None:
        for text, style in parts:
            if style is None:
                sys.stdout.write(text)
            else:
                console.out(text, style=style, end="", highlight=False)
        sys.stdout.flush()

    def show(piece: Piece) -> None:
        for text, stage in _spans(spans, piece, written) if paint else [(piece.text, None)]:
            style = STAGE_STYLES[stage] if stage is not None else None
            write(lines.feed(text, style) if wrap else [(text, style)])

    try:
        yield show
    finally:
        if wrap:
            write(lines.rest())


class Wrap:
    """Breaks lines of so many columns between words."""

    def __init__(self, width: Callable[[], int]) -> None:
        self._width = width
        self._column = 0
        self._word: list[tuple[str, Style | None]] = []  # the last word, which may continue

    def feed(self, text: str, style: Style | None = None) -> Iterator[tuple[str, Style | None]]:
        """Add text; yields what may be written now."""
        for character in text:
            if not character.isspace() and cell_len(character) < 2:
                self._word.append((character, style))
                if len(self._word) >= self._width():  # longer than a line, so it is broken anywhere
                    yield from self.rest()
                continue
            yield from self.rest()
            # Lines may break between wide characters, such as Chinese ones.
            cells = _TAB - self._column % _TAB if character == "\t" else cell_len(character)
            if character == "\n":
                self._column = 0
            elif self._column + cells > self._width():
                if character.isspace():
                    continue  # the line breaks here
                yield "\n", None
                self._column = cells
            else:
                self._column += cells
            yield character, style

    def rest(self) -> Iterator[tuple[str, Style | None]]:
        """The held word."""
        cells = sum(cell_len(character) for character, _ in self._word)
        if self._word and self._column and self._column + cells > self._width():
            yield "\n", None
            self._column = 0
        self._column += cells
        for style, found in groupby(self._word, key=lambda each: each[1]):
            yield "".join(character for character, _ in found), style
        self._word = []


@contextmanager
def _with_trees(console: Console, written: Written, *, paint: bool) -> Iterator[Callable[[Piece], None]]:
    """A function that writes pieces of a text, and each verified tree with its accepted path bright.

    In a terminal the end of the text stays below the trees, and the whole text follows the last one. Elsewhere trees go
    to standard error, so that standard output has only the text. Arguments as in _flowing.
    """
    spans, whole = StageSpans(), Text()

    def write(piece: Piece) -> None:
        sys.stdout.write(piece.text)
        sys.stdout.flush()
        errors.print(draw_tree(piece, written))

    def show(piece: Piece) -> None:
        for text, stage in _spans(spans, piece, written):
            whole.append(text, STAGE_STYLES[stage] if paint else None)
        lines = whole.split("\n", allow_blank=True)[-_TEXT_LINES:]
        live.update(Text("\n").join(lines)[-_TEXT_LINES * console.width :])
        console.print(draw_tree(piece, written))

    if not _is_screen(console):
        yield write
        return
    try:
        with Live(console=console, auto_refresh=False, transient=True) as live:
            yield show
    finally:  # also after Ctrl-C
        console.print(whole, end="", soft_wrap=True)
        console.file.flush()


def _spans(spans: StageSpans, piece: Piece, written: Written) -> Iterator[tuple[str, Stage]]:
    """The text of each token of a piece, and the stage that proposed it."""
    return spans.split(piece.text, map(written.token_bytes, piece.tokens), piece.stages)


def draw_tree(piece: Piece, written: Written) -> Tree:
    """Draw the tree that was verified for a piece of a text, with accepted nodes bright."""
    tree, path, accepted = piece.tree, piece.path, set(piece.path)
    drawn: dict[int, Tree] = {}
    # A tree's likeliest nodes come first, but all accepted ones must be shown.
    shown = [*path, *(node for node in range(len(tree)) if node not in accepted)][:_MOST_NODES]
    for node in sorted(shown):
        parent = int(tree.parents[node])
        text = written.token_bytes(int(tree.tokens[node])).decode("utf-8", "replace")
        label = Text(repr(text), no_wrap=True, overflow="ellipsis")
        label.stylize(STAGE_STYLES[Stage(tree.stages[node])] + _NODE_STYLES[node in accepted])
        if node == 0:
            drawn[node] = Tree(label, guide_style=_NODE_STYLES[False], highlight=False)
        elif parent in drawn:
            label.append(f" {tree.scores[node]:.2f}", _NODE_STYLES[False])
            drawn[node] = drawn[parent].add(label)
    if len(drawn) < len(tree):
        drawn[0].add(Text(f"and {len(tree) - len(drawn)} more", _NODE_STYLES[False]))
    return drawn[0]
