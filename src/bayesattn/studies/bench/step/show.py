"""One token of a layer, and tokens a second of models, as tables."""

from __future__ import annotations

from collections.abc import Sequence

from rich.table import Table

from bayesattn.drawing.tables import duration, make_table
from bayesattn.files import short_name
from bayesattn.studies.bench.drawing import largest_error
from bayesattn.studies.bench.step.run import Decoding, Generation, Step, Steps

WRONG = "wrong, not timed"


def tables(result: Steps) -> list[Table | str]:
    parts = {_step_table: result.steps, _generation_table: result.generate, _decoding_table: result.decoding}
    return [table(rows) for table, rows in parts.items() if rows]  # type: ignore[operator]


def _step_table(rows: Sequence[Step]) -> Table:
    """Keys and mixes of heads down: the time of a token, as a multiple of the full cache's."""
    table = make_table(
        title="one token of one layer with Scalable Softmax: LayerCache.attend, and append + SDPA in a full cache",
        caption=largest_error(rows),
    )
    for name in ("keys", "heads", "full cache", "bayesattn", "cache kept"):
        table.add_column(name, justify="left" if name == "heads" else "right", no_wrap=True)
    for row in rows:
        ours = WRONG
        if row.seconds is not None and row.ratio is not None:
            ours = f"{row.ratio:.2f}× {duration(row.seconds)}"
        kept = f"{row.bytes / row.full_bytes:.1%} of {row.full_bytes / 1e6:,.0f} MB"
        table.add_row(f"{row.tokens:,}", row.mix, duration(row.full_seconds), ours, kept)
    return table


def _generation_table(rows: Sequence[Generation]) -> Table:
    """Models down: tokens a second of `generate`, next to a Llama of the same sizes with two caches."""
    caption = "Llama: of the same sizes, random weights; ours: as a share of DynamicCache"
    if gaps := [row.gap for row in rows if row.gap is not None]:
        caption += f"; without a cache, the logit of a token is at most {max(gaps):.1g} below the largest"
    table = make_table(
        title=f"generate, tokens a second: {rows[0].new_tokens:,} tokens after {rows[0].prompt:,}", caption=caption
    )
    table.add_column("model")
    for name in ("Llama\nDynamicCache", "\nStaticCache", "bayesattn"):
        table.add_column(name, justify="right", no_wrap=True)
    for row in rows:
        ours = WRONG
        if row.tokens_per_second is not None:
            ours = f"{row.tokens_per_second / row.dynamic_tokens_per_second:.2f}× {row.tokens_per_second:,.0f}"
        peers = (row.dynamic_tokens_per_second, row.static_tokens_per_second)
        table.add_row(row.model, *(f"{speed:,.0f}" for speed in peers), ours)
    return table


def _decoding_table(rows: Sequence[Decoding]) -> Table:
    """Prompts down: tokens a second of a model with windows, next to the same model without."""
    table = make_table(
        title=f"{short_name(rows[0].model)}: decoding, tokens a second",
        caption="peers: the same model without windows; ours: as a multiple of the faster peer; cache kept: after the "
        f"prompt; without a cache, the logit of a token is at most {max(row.gap for row in rows):.1g} below the "
        "largest",
    )
    for name in ("prompt", "DynamicCache", "StaticCache", "windows", "cache kept"):
        table.add_column(name, justify="right", no_wrap=True)
    for row in rows:
        ours = WRONG
        if row.tokens_per_second is not None and row.ratio is not None:
            ours = f"{row.ratio:.2f}× {row.tokens_per_second:,.1f}"
        peers = (row.dynamic_tokens_per_second, row.static_tokens_per_second)
        kept = f"{row.bytes / row.full_bytes:.1%} of {row.full_bytes / 1e6:,.0f} MB"
        table.add_row(f"{row.prompt:,}", *(f"{speed:,.1f}" for speed in peers), ours, kept)
    return table
