"""Generated text in a terminal: as it comes, in the colours of the stages, with the tree that is being verified."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from types import TracebackType

import typer
from rich.cells import cell_len
from rich.console import Console, Group
from rich.live import Live
from rich.style import Style
from rich.text import Text
from rich.tree import Tree

from pystaged._core import Tokenizer
from pystaged.cli.console import errors
from pystaged.cli.interrupts import uninterrupted
from pystaged.cli.options import Color
from pystaged.decoding.tree import Stage, TokenTree
from pystaged.result import GenerationResult, Piece
from pystaged.stages import STAGE_COLORS, STAGE_NAMES, StageSpans, shown_stages
from pystaged.stats import GenerationStats
from pystaged.streams import Stream

STAGE_STYLES = {stage: Style(color=color) for stage, color in STAGE_COLORS.items()}
_LEAST_TREE_LINES = 4
_NODE_STYLES = {True: Style(bold=True), False: Style(dim=True)}  # by whether the node is accepted


def show(
    stream: Stream,
    tokenizer: Tokenizer,
    color: Color,
    *,
    show_tree: bool,
    keep: Callable[[Piece], object] = lambda _: None,
) -> GenerationResult:
    """Write a text as it comes, and end its line, also when interrupted.

    Args:
        tokenizer: of the target.
        show_tree: draw each step's tree too.
        keep: called with each piece that was written.
    """
    console = Console(highlight=False)
    view: Plain | Painted | WithTree = Plain()
    if show_tree:
        view = WithTree(console, tokenizer, paint=color is Color.STAGES)
    elif color is Color.STAGES:
        view = Painted(console, tokenizer)
    try:
        with stream, view:
            for piece in stream:
                # Lest half a drawing stays on the screen.
                with uninterrupted():
                    view.show(piece)
                    keep(piece)
    except KeyboardInterrupt:
        typer.echo()
        raise
    typer.echo()
    return stream.result


def summary(stats: GenerationStats, color: Color) -> Text:
    """One line on how it went."""
    line = Text(str(stats), "dim")
    if color is Color.STAGES:
        for stage in shown_stages(stats):
            line.append("; " if stage is Stage.TARGET else ", ")
            line.append(f"{STAGE_NAMES[stage]} {stats.stages[stage.name.lower()].emitted}", STAGE_STYLES[stage])
    return line


class Plain:
    """Writes pieces as they are."""

    def __enter__(self) -> Plain:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def show(self, piece: Piece) -> None:
        """Write a piece."""
        sys.stdout.write(piece.text)
        sys.stdout.flush()


class Painted:
    """Writes each token in the colour of the stage that proposed it.

    Args:
        console: of standard output.
        tokenizer: of the target.
    """

    def __init__(self, console: Console, tokenizer: Tokenizer) -> None:
        self._console = console
        self._tokenizer = tokenizer
        self._spans = StageSpans()

    def __enter__(self) -> Painted:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def show(self, piece: Piece) -> None:
        """Write a piece."""
        for text, stage in _spans(self._spans, piece, self._tokenizer):
            self._console.out(text, style=STAGE_STYLES[stage], end="", highlight=False)
        self._console.file.flush()


class WithTree:
    """Writes pieces, and below them the tree that was verified last, with the accepted path bright.

    In a terminal the tree is redrawn in place and goes away at the end. Elsewhere each one is written to standard
    error, so that standard output holds the text alone.

    Args:
        console: of standard output.
        tokenizer: of the target.
        paint: whether the text is in the stages' colours too.
    """

    def __init__(self, console: Console, tokenizer: Tokenizer, *, paint: bool) -> None:
        self._console = console
        self._tokenizer = tokenizer
        self._paint = paint
        self._spans = StageSpans()
        self._line = Text()  # the last one, which is not complete
        self._live = (
            Live(console=console, auto_refresh=False, transient=True)
            if sys.stdout.isatty() and not console.is_dumb_terminal
            else None
        )

    def __enter__(self) -> WithTree:
        if self._live:
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._live:
            # Also on Ctrl-C: the cursor comes back, the tree goes and the text stays.
            self._live.stop()
            self._console.print(self._line, end="", soft_wrap=True)
            self._console.file.flush()

    def show(self, piece: Piece) -> None:
        """Write a piece and its tree."""
        if self._live is None:
            sys.stdout.write(piece.text)
            sys.stdout.flush()
            errors.print(draw_tree(piece.tree, piece.path, self._tokenizer))
            return
        for text, stage in _spans(self._spans, piece, self._tokenizer):
            self._line.append(text, STAGE_STYLES[stage] if self._paint else None)
        *complete, self._line = self._line.split("\n", allow_blank=True) or [Text()]
        if complete:
            # Lines are written above what is live, which would be drawn once more as it was.
            self._live.update(Text())
            self._console.print(*complete, sep="\n", soft_wrap=True)
        height, width = self._console.height, self._console.width
        text_lines = max(1, -(-cell_len(self._line.plain) // max(1, width)))
        room = max(_LEAST_TREE_LINES, height - text_lines - 1)
        tree = draw_tree(piece.tree, piece.path, self._tokenizer, most_nodes=room)
        self._live.update(Group(self._tail(height - _LEAST_TREE_LINES - 1), tree), refresh=True)

    def _tail(self, lines: int) -> Text:
        """As much of the incomplete line as fits above a tree."""
        room = max(1, lines) * self._console.width
        return self._line if len(self._line) <= room else self._line[-room:]


def _spans(spans: StageSpans, piece: Piece, tokenizer: Tokenizer) -> Iterator[tuple[str, Stage]]:
    """The text of a piece, token by token, and who proposed it."""
    return spans.split(piece.text, map(tokenizer.token_bytes, piece.tokens), piece.stages)


def draw_tree(tree: TokenTree, path: tuple[int, ...], tokenizer: Tokenizer, most_nodes: int = 64) -> Tree:
    """A verified tree, accepted nodes bright.

    Args:
        path: accepted nodes, root first.
        most_nodes: the rest is only counted.
    """
    accepted = set(path)
    drawn: dict[int, Tree] = {}
    # The likeliest nodes come first in a tree, but the accepted ones must be seen.
    shown = [*path, *(node for node in range(len(tree)) if node not in accepted)][:most_nodes]
    for node in sorted(shown):
        parent = int(tree.parents[node])
        text = tokenizer.token_bytes(int(tree.tokens[node])).decode("utf-8", "replace")
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
