"""`pystaged tune`: measure how long passes take."""

from __future__ import annotations

from rich.table import Table

from pystaged.cli.console import draft_name, model_name, print_table, report
from pystaged.cli.options import ModelArgument, ModelToo, PairOptions, either, grouped
from pystaged.loading.bundle import Bundle
from pystaged.loading.factory import DecoderFactory


@grouped
def tune(model: ModelArgument = None, *, named: ModelToo = None, options: PairOptions) -> None:
    """Measure how long passes take on this machine, by their number of rows, and show it.

    Example: pystaged tune path/to/model.gguf --draft path/to/draft.gguf
    """
    bundle = Bundle(
        model_name(either(model, named)),
        report=report,
        **options.given | {"draft": draft_name(options.given["draft"])},
    )
    decoders = DecoderFactory(bundle)
    target, smaller = decoders.target_cost(again=True), decoders.draft_cost(again=True)
    table = Table(box=None, pad_edge=False)
    more = "per 1,000 tokens"
    head = decoders.head_cost.lookup if decoders.head_cost else None
    drafts = ("draft ms", more) if smaller else ("draft head, lookup ms",) if head else ()
    for heading in ("rows", "target ms", more, "T(n)/T(1)", *drafts):
        table.add_column(heading, justify="right")
    for n, seconds in target.seconds.items():
        row = [str(n), f"{1e3 * seconds:.2f}", f"+{1e3 * target.slopes[n]:.2f}", f"{seconds / target(1):.2f}"]
        if smaller:
            row += [f"{1e3 * smaller(n):.2f}", f"+{1e3 * (smaller(n, 1000) - smaller(n)):.2f}"]
        elif head:
            row.append(f"{1e3 * head(n):.2f}" if n in head.seconds else "-")
        table.add_row(*row)
    print_table(table)
