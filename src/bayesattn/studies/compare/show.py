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
    seconds = list(dict.fromkeys(row.second for row in rows))
    several = len(seconds) > 1
    table = make_table(
        title=f"{rows[0].task}: {'each model' if several else seconds[0]} against the first, {rows[0].first}",
        caption="difference: second less first, in percentage points, with a 95% interval (Newcombe's; Agresti and "
        "Caffo's where answers are right in part); verdict: on the second; needed: trials of each model that would "
        "show a difference of this size four times out of five",
    )
    for name in ("tokens", "first", "second", "difference", "needed"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("verdict", overflow="fold")
    for row in rows:
        shares = ((row.share_first, row.trials_first), (row.share_second, row.trials_second))
        result = ["–", "–", row.note]
        if row.difference is not None and row.low is not None and row.high is not None:
            result = [
                f"{100 * row.difference:+.1f} ({100 * row.low:+.1f}…{100 * row.high:+.1f})",
                "–" if row.needed is None else f"{row.needed:,}",
                f"{row.second}: {row.verdict}" if several else row.verdict,
            ]
        table.add_row(
            f"{row.length:,}",
            *("–" if share is None else f"{share:.0%} of {trials:,}" for share, trials in shares),
            *result,
        )
    return table
