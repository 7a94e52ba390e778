"""Variants as tables, in the terminal and in Markdown: variants down, seeds side by side."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import groupby
from pathlib import Path
from statistics import fmean

from rich.table import Table

from bayesattn.drawing.tables import duration, make_table, multiple
from bayesattn.evaluation.intervals import wilson
from bayesattn.files import write_whole
from bayesattn.studies.variants.run import LearnedHead, Loss, Run, Trials, Variants

# Heads, title, and rows of a table.
Plain = tuple[str, list[str], list[list[str]]]
ABSENT = "–"


def tables(result: Variants) -> list[Table | str]:
    return [_for_terminal(*plain) for plain in plain_tables(result)]


def _for_terminal(title: str, heads: Sequence[str], rows: Sequence[Sequence[str]]) -> Table:
    table = make_table(title, None)
    table.add_column(heads[0], no_wrap=True)
    for head in heads[1:]:
        table.add_column(head, justify="right", overflow="fold")
    for row in rows:
        table.add_row(*row)
    return table


def figures(result: Variants, folder: Path) -> list[Path]:
    """The tables in Markdown."""
    file = folder / "variants.md"
    write_whole(file, markdown(result))
    return [file]


def markdown(result: Variants) -> str:
    """All tables, each under its title."""
    return "\n".join(f"**{title}**\n\n{markdown_table(heads, rows)}" for title, heads, rows in plain_tables(result))


def markdown_table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Words in the first column, numbers in the others."""
    lines = [heads, ["---", *["---:"] * (len(heads) - 1)], *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def plain_tables(result: Variants) -> list[Plain]:
    """Right answers of each task, seconds a prompt, perplexity of each text, and heads at the end of training."""
    by_variant = [(name, list(runs)) for name, runs in groupby(result.runs, lambda run: run.variant)]
    tasks = dict.fromkeys(cell.task for run in result.runs for cell in run.cells)
    texts = dict.fromkeys(loss.text for run in result.runs for loss in run.losses)
    parts = [_retrieval(task, by_variant) for task in tasks]
    parts += [_perplexity(text, by_variant) for text in texts]
    parts += [_seconds(task, by_variant) for task in tasks]
    return [*parts, _heads(result.runs)] if any(run.heads for run in result.runs) else parts


def _by_length(
    title: str, first: str, task: str, variants: Sequence[tuple[str, list[Run]]], text: Callable[[list[Trials]], str]
) -> Plain:
    """Variants down, lengths across; `text` makes a field of the cells of a variant's seeds."""
    lengths = sorted({cell.length for _, runs in variants for run in runs for cell in run.cells if cell.task == task})
    train_length = variants[0][1][0].train_length
    rows = []
    for variant, runs in variants:
        fields = []
        for length in lengths:
            cells = [cell for run in runs for cell in run.cells if (cell.task, cell.length) == (task, length)]
            fields.append(text(cells) if cells else ABSENT)
        rows.append([f"{variant} ({_seeds(runs)})", *fields])
    return title, [first, *(f"{length:,} ({multiple(length, train_length)})" for length in lengths)], rows


def _retrieval(task: str, variants: Sequence[tuple[str, list[Run]]]) -> Plain:
    title = f"Pass keys: {task}. Right answers of each seed, of the trials of one, with the 95% interval of all in %"
    return _by_length(title, "variant (seeds)", task, variants, _right)


def _right(cells: list[Trials]) -> str:
    """`20, 19, 20 of 20 (91–100)`; where seeds had different numbers of trials, `20 of 20, 0 of 5 (…)`."""
    low, high = wilson(sum(cell.right for cell in cells), sum(cell.trials for cell in cells))
    interval = f"({100 * low:.0f}–{100 * high:.0f})"
    if len({cell.trials for cell in cells}) == 1:
        return f"{', '.join(f'{cell.right:g}' for cell in cells)} of {cells[0].trials} {interval}"
    return f"{', '.join(f'{cell.right:g} of {cell.trials}' for cell in cells)} {interval}"


def _seconds(task: str, variants: Sequence[tuple[str, list[Run]]]) -> Plain:
    def text(cells: list[Trials]) -> str:
        return duration(fmean(cell.seconds for cell in cells))

    return _by_length(f"Seconds a prompt: {task}. Mean of the seeds", "variant (seeds)", task, variants, text)


def _perplexity(text: str, variants: Sequence[tuple[str, list[Run]]]) -> Plain:
    """Variants down, contexts across: each seed, with the 95% interval over windows if there is one seed."""
    contexts = sorted(
        {loss.context for _, runs in variants for run in runs for loss in run.losses if loss.text == text}
    )
    rows = []
    for variant, runs in variants:
        fields = []
        for context in contexts:
            found = [loss for run in runs for loss in run.losses if (loss.text, loss.context) == (text, context)]
            fields.append(_losses(found) if found else ABSENT)
        rows.append([f"{variant} ({_seeds(runs)})", *fields])
    title = f"Perplexity on {text} after so many tokens, of each seed; with the 95% interval over windows if it is one"
    return title, ["variant (seeds)", *(f"{context:,}" for context in contexts)], rows


def _losses(losses: Sequence[Loss]) -> str:
    values = ", ".join(f"{loss.perplexity:.1f}" for loss in losses)
    return values if len(losses) > 1 else f"{values} ({losses[0].low:.1f}–{losses[0].high:.1f})"


def _heads(runs: Sequence[Run]) -> Plain:
    """Runs down, layers across: β of each head, with the number of retrieval heads of all layers."""
    layers = sorted({head.layer for run in runs for head in run.heads})
    rows = []
    for run in runs:
        by_layer = [[head for head in run.heads if head.layer == layer] for layer in layers]
        retrieval = sum("retrieval" in (head.cluster or "") for head in run.heads)
        count = f"{retrieval}" if any(head.cluster for head in run.heads) else ABSENT
        name = run.variant if run.seed is None else f"{run.variant}, seed {run.seed}"
        rows.append([name, *map(_betas, by_layer), count])
    heads = ["variant", *(f"β in layer {layer + 1}" for layer in layers), "retrieval heads"]
    return "Heads at the end of training", heads, rows


def _betas(heads: Sequence[LearnedHead]) -> str:
    betas = [head.parameters.get("beta") for head in heads if "beta" in head.parameters]
    known = sorted((beta for beta in betas if beta is not None), reverse=True)
    return ", ".join(f"{beta:.2f}".replace("-", "−") for beta in known) or ABSENT


def _seeds(runs: Sequence[Run]) -> str:
    return ", ".join("–" if run.seed is None else str(run.seed) for run in runs)
