"""Metrics of lm-eval as a table."""

from __future__ import annotations

from rich.table import Table

from bayesattn.drawing.tables import make_table
from bayesattn.files import short_name
from bayesattn.studies.harness.run import Harness


def tables(result: Harness) -> list[Table | str]:
    """Metrics of all tasks; lm-eval reports a metric that a task does not have as a negative number."""
    table = make_table(f"{short_name(result.model)}: lm-eval, contexts of up to {result.length:,} tokens", None)
    table.add_column("task", no_wrap=True)
    table.add_column("metric", no_wrap=True)
    table.add_column("value", justify="right", no_wrap=True)
    for task, metrics in result.results.items():
        for metric, value in metrics.items():
            if isinstance(value, float) and value >= 0:
                table.add_row(task, metric, f"{value:.4g}")
    return [table]
