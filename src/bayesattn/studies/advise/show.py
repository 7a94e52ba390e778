"""Advice as a table and a sentence."""

from __future__ import annotations

from rich.table import Table

from bayesattn.drawing.tables import make_table
from bayesattn.files import short_name
from bayesattn.studies.advise.run import Advice


def tables(result: Advice) -> list[Table | str]:
    parts: list[Table | str] = [_table(result, short_name(result.model)), str(result)]
    if result.training_length is not None and result.training_length < result.usable:
        parts.append(
            f"It was trained on {result.training_length:,} tokens. Heads that look further need not find anything "
            f"there. To measure that: bayesattn eval passkey {result.model} --lengths {result.length}"
        )
    if result.sinks and all(head.certain is None for head in result.heads):
        parts.append(
            f"No prior bounds these heads. `bayesattn fit {result.model} --keep 30%` gives each a window by what it "
            "costs, and a cache that keeps no more."
        )
    return parts


def _table(advice: Advice, name: str) -> Table:
    table = make_table(
        f"{name}: how many of {advice.length:,} tokens each head uses",
        "tokens: effective ones, 1/Σp², of the prior and of the attention on this text; growth: of those of the prior "
        "by the second half of the context; reach: tokens that are enough for 95% of queries, up to a change by "
        f"{advice.delta:g} of the largest value; certain: the same, proved from the prior",
    )
    for column in ("layer", "head"):
        table.add_column(column, justify="right", no_wrap=True)
    table.add_column("kind", no_wrap=True)
    for column in ("prior\ntokens", "\ngrowth", "attn\ntokens", "\nreach", "\ncertain"):
        table.add_column(column, justify="right", no_wrap=True)
    for head in advice.heads:
        table.add_row(
            str(head.layer + 1),
            str(head.head),
            head.kind or "–",
            "–" if head.prior_effective is None else f"{head.prior_effective:,.1f}",
            "–" if head.prior_growth is None else f"{head.prior_growth:.2f}×",
            f"{head.effective:,.1f}",
            "all" if head.reach == advice.length else f"{head.reach:,}",
            "–" if head.certain is None else f"{head.certain:,}",
        )
    return table
