"""Priors as a table and as a picture."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from rich.table import Table

from bayesattn.drawing.figures import make_figure, save_figure
from bayesattn.drawing.palette import line_style
from bayesattn.drawing.tables import make_table
from bayesattn.priors import Prior


def prior_table(priors: Mapping[str, Prior], n: int) -> Table:
    """Every head of every prior: its kind, its parameters and its span."""
    table = make_table(
        title=f"The prior of each head over {n:,} tokens",
        caption="span: 99.9% of the prior lies within this distance; effective: 1/Σp² tokens",
    )
    table.add_column("prior", no_wrap=True)
    table.add_column("head", justify="right", no_wrap=True)
    table.add_column("kind", no_wrap=True)
    table.add_column("parameters")
    table.add_column("span", justify="right", no_wrap=True)
    table.add_column("effective", justify="right", no_wrap=True)
    for name, prior in priors.items():
        for summary in prior.describe(n):
            table.add_row(
                name if summary.head == 0 else "",
                str(summary.head),
                summary.kind,
                summary.parameters_text(),
                f"{summary.span:,}",
                f"{summary.effective_tokens:,.1f}",
            )
        table.add_section()
    return table


def gallery(priors: Mapping[str, Prior], n: int, path: Path) -> list[Path]:
    """The prior of every head, relative to its peak, against distance on a logarithmic axis."""
    columns = 3
    rows = -(-len(priors) // columns)
    figure = make_figure(width=4.6 * columns, height=3.6 * rows)
    distance = torch.unique(torch.logspace(0, torch.tensor(float(n)).log10(), 400).round().long()) - 1
    for index, (name, prior) in enumerate(priors.items()):
        axes = figure.add_subplot(rows, columns, index + 1)
        log_p = prior.log_probability(n)
        relative = (log_p - log_p.amax(-1, keepdim=True)).exp()[:, distance]
        for head, summary in enumerate(prior.describe(n)):
            axes.plot(
                distance + 1,
                relative[head],
                **line_style(head),
                label=f"{summary.kind}: 99.9% within {summary.span:,}, {summary.effective_tokens:,.0f} effective",
            )
        family = type(prior).__name__
        title = name if name == family else f"{name} ({family})"
        axes.set(title=title, xscale="log", ylim=(-0.03, 1.08), xlim=(1, n))
        axes.set_xlabel("distance + 1 (tokens)")
        axes.set_ylabel("prior, relative to its peak")
        axes.legend(fontsize=6.5, loc="upper center", bbox_to_anchor=(0.5, -0.2), frameon=False)
    figure.suptitle(f"The prior of each head over {n:,} tokens")
    return save_figure(figure, path)
