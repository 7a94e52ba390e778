"""Comparisons as tables."""

from __future__ import annotations

from collections.abc import Sequence

from rich.table import Table

from bayesattn.drawing.tables import make_table
from bayesattn.studies.compare.run import Comparison, Comparisons


def tables(result: Comparisons) -> list[Table | str]:
    tasks = dict.fromkeys(row.task for row in result.rows)
    return [comparison_table([row for row in result.rows if row.task == task]) for task in tasks]


def comparison_table(rows: Sequence[Comparison]) -> Table:
    """Lengths of a task down: the two shares, their difference and the verdict."""
    table = make_table(
        title=f"{rows[0].task}: each model against the first, {rows[0].first}",
        caption="difference: second less first, with a 95% interval (Newcombe's; Agresti and Caffo's where answers are "
        "found in part); needed: trials of each to see a difference of this size four times out of five",
    )
    several = len({row.second for row in rows}) > 1
    for name in ("tokens", "first", "second", "difference", "95% interval", "needed"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("verdict", overflow="fold")
    for row in rows:
        shares = ((row.share_first, row.trials_first), (row.share_second, row.trials_second))
        result = ["–", "–", "–", row.note]
        if row.difference is not None:
            unclear = f"{f'{row.second}: ' if several else ''}cannot tell with this many trials"
            result = [
                f"{row.difference:+.1%}",
                f"{row.low:+.1%} … {row.high:+.1%}",
                "–" if row.needed is None else f"{row.needed:,}",
                unclear if row.verdict == "cannot tell" else f"{row.second} is {row.verdict}",
            ]
        table.add_row(
            f"{row.length:,}",
            *("–" if share is None else f"{share:.0%} of {trials:,}" for share, trials in shares),
            *result,
        )
    return table
