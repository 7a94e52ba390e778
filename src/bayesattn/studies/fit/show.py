"""Windows and prices of heads as a table, a sentence and a picture."""

from __future__ import annotations

import math
from pathlib import Path

from rich.table import Table

from bayesattn.drawing.figures import make_figure, save_figure
from bayesattn.drawing.tables import make_table
from bayesattn.files import short_name
from bayesattn.fit.price_files import HeadPrices
from bayesattn.studies.fit.run import Fitted

# Heads of the sentence about retrieval.
NAMED = 8


def tables(result: Fitted) -> list[Table | str]:
    parts: list[Table | str] = [_table(result)]
    return [*parts, *sentences(result)] if result.heads else parts


def _means(result: Fitted) -> dict[tuple[int, int], list[HeadPrices]]:
    rows: dict[tuple[int, int], list[HeadPrices]] = {}
    for head in (head for context in result.prices.contexts for head in context):
        rows.setdefault((head.layer, head.head), []).append(head)
    return rows


def _mean(values: list[float]) -> float:
    return sum(values) / len(values)


def _table(result: Fitted) -> Table:
    prices = result.prices
    narrowest = prices.widths[0]
    table = make_table(
        f"{short_name(result.model)}: windows for {result.keep:.0%} of the cache at {prices.length:,} tokens",
        f"keeps: last tokens; sinks: share of attention on the first {prices.sinks} tokens; reach: distance within "
        "which 90% of the other attention is; prices: change of the layer's output squared, relative to the hidden "
        f"state, with a window of {narrowest}, on text and where something is looked up; chosen: of the window chosen",
        columns=("layer", "head", "keeps", "sinks", "reach", "price\non text", "\nlook-up", "\nchosen"),
    )
    chosen = {(head.layer, head.head): head for head in result.heads}
    for (layer, head), rows in sorted(_means(result).items()):
        if head == 0 and layer:
            table.add_section()
        got = chosen.get((layer, head))
        table.add_row(
            str(layer + 1) if head == 0 else "",
            str(head),
            "–" if got is None else "all" if got.width is None else f"{got.width:,}",
            f"{_mean([row.on_sinks for row in rows]):.0%}",
            f"{_mean([row.reach for row in rows]):,.0f}",
            f"{_mean([row.text[0] for row in rows]):.5f}",
            f"{_mean([row.recall[0] for row in rows]):.5f}",
            "–" if got is None else f"{got.price:.5f}",
        )
    return table


def sentences(result: Fitted) -> list[str]:
    """What a person does next with the model, and how far to trust the prices."""
    whole = sum(head.width is None for head in result.heads)
    widest = max((head.width for head in result.heads if head.width is not None), default=0)
    lines = [
        f"The cache keeps {result.share:.1%} of its bytes at {result.prices.length:,} tokens: {whole} of "
        f"{len(result.heads)} key heads keep everything, the others at most the last {widest:,} tokens and the first "
        f"{result.prices.sinks}. The prices sum to {result.expected:.4f}, a rough estimate of the divergence from the "
        "model as it was in nats a token; `bayesattn eval cache` measures it."
    ]
    looking = sorted(_means(result).items(), key=lambda item: -_mean([row.recall[-1] for row in item[1]]))
    names = ", ".join(f"{layer + 1}.{head}" for (layer, head), _ in looking[:NAMED])
    lines.append(f"Heads that look things up far away, by layer and head, the most important first: {names}.")
    if result.stability is not None:
        lines.append(
            f"Prices of heads on two halves of the contexts have a rank correlation of {result.stability:.2f}."
        )
    return lines


def figures(result: Fitted, folder: Path) -> list[Path]:
    """Heat maps by layer and head: what each keeps, its sinks, and its price."""
    rows = _means(result)
    layers = sorted({layer for layer, _ in rows})
    heads = sorted({head for _, head in rows})
    narrowest = result.prices.widths[0]
    chosen = {(head.layer, head.head): head.width for head in result.heads}
    maps = {
        "tokens kept, log2": lambda key: math.log2(chosen[key] or result.prices.length),
        f"attention on the first {result.prices.sinks} tokens": lambda key: _mean([r.on_sinks for r in rows[key]]),
        f"price of a window of {narrowest} on text, log10": lambda key: _log([r.text[0] for r in rows[key]]),
        f"price of a window of {narrowest} at look-ups, log10": lambda key: _log([r.recall[0] for r in rows[key]]),
    }
    figure = make_figure(width=max(6.0, 1.2 + 0.28 * len(layers)), height=0.9 + 4 * (0.6 + 0.25 * len(heads)))
    for number, (title, value) in enumerate(maps.items(), 1):
        axes = figure.add_subplot(len(maps), 1, number)
        cells = [[value((layer, head)) if (layer, head) in rows else math.nan for layer in layers] for head in heads]
        picture = axes.imshow(cells, aspect="auto", cmap="viridis")
        axes.set_title(title, fontsize=9, loc="left")
        axes.set_yticks(range(len(heads)), [str(head) for head in heads])
        axes.set_xticks(range(len(layers)), [str(layer + 1) for layer in layers], fontsize=7)
        axes.set_ylabel("head")
        figure.colorbar(picture, ax=axes)
    axes.set_xlabel("layer")
    return save_figure(figure, folder / "spans")


def _log(values: list[float]) -> float:
    return math.log10(max(_mean(values), 1e-9))
