"""The cost of a schedule as tables, a picture, and a section of the page with sliders."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path

from markupsafe import Markup
from rich.table import Table

from bayesattn.compute.costs import BlogShare, Gradual, Inference
from bayesattn.drawing import html
from bayesattn.drawing.figures import make_figure, save_figure, share_map
from bayesattn.drawing.tables import amount, make_table
from bayesattn.studies.savings.run import MAP_LENGTHS, MAP_SHORT, Savings

EXPLANATION = (
    "That estimate takes tokens · length² for the cost. But T tokens are T/n sequences of cost n², so attention grows "
    "with T · n. The matrix products, 6 FLOPs a weight and token, do not depend on the length."
)


def tables(result: Savings) -> list[Table | str]:
    parts: list[Table | str] = [_stages_table(result)]
    if result.flops is not None and result.hours is not None:
        parts.append(
            f"{result.flops:.3e} FLOPs, {result.hours:,.0f} hours of {result.hardware} at {result.mfu:.0%} "
            f"utilisation, which cost {result.cost:,.0f} at {result.price:g} an hour. "
            f"Without the long stages it is {result.dropped:.2%} less; "
            f"with their tokens at the shortest length {result.short:.2%} less. "
            f"The popular estimate says {result.blog:.3%}.\n{EXPLANATION}"
        )
    if result.memory_bytes is not None:
        longest = max(stage.length for stage in result.stages)
        sizes = ", ".join(f"{name} {size / 1e9:,.1f}" for name, size in result.memory_bytes.items())
        parts.append(f"Memory to train on one sequence of {longest:,} tokens, in GB: {sizes}.")
    if result.inference and result.local is not None and result.span is not None:
        parts.append(_inference_table(result.inference, result.local, result.span))
    if result.blog_shares:
        parts.append(_blog_table(result.blog_shares, result.model))
    if result.blog_gradual:
        parts.append(_gradual_table(result.blog_gradual, result.model))
    return parts


def _blog_table(rows: Sequence[BlogShare], model: str) -> Table:
    """Schedules down: the share of the long stage, and the factor that it makes of the cost, counted in two ways."""
    table = make_table(
        title=f"{model}: the long stage of the blog's schedules",
        caption="popular: tokens · length², K a thousand; factor: the whole cost over that without the long stage",
    )
    table.add_column("schedule")
    for heading in ("share\npopular", "\nexact", "factor\npopular", "\nexact"):
        table.add_column(heading, justify="right", no_wrap=True)
    for row in rows:
        factors = ("–" if factor is None else f"{_factor(factor)}×" for factor in (row.factor_blog, row.factor))
        table.add_row(row.schedule, f"{row.share_blog:.3%}", f"{row.share:.2%}", *factors)
    return table


def _factor(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}" if value >= 2 else f"{value:.3f}"


def _gradual_table(rows: Sequence[Gradual], model: str) -> Table:
    """Trainings down: the context with the same popular cost, the mean context, and their share after 15T at 8K."""
    table = make_table(
        title=f"{model}: contexts that get shorter from batch to batch, after 15T tokens at 8K",
        caption="same cost: context at which 100B tokens cost as much by tokens · length²; mean: that of all tokens, "
        "with which attention really grows",
    )
    for heading in ("tokens", "contexts", "same cost", "mean", "share\npopular", "\nexact"):
        table.add_column(heading, justify="right", no_wrap=True)
    for row in rows:
        table.add_row(
            amount(row.tokens),
            f"{row.longest:,} … {row.shortest:,}",
            f"{row.same_cost:,.0f}",
            f"{row.mean:,.0f}",
            f"{row.share_blog:.3%}",
            f"{row.share:.2%}",
        )
    return table


def _stages_table(result: Savings) -> Table:
    """Stages down: tokens, length, FLOPs, and the share of the whole, counted in three ways."""
    headings = ("tokens", "length", "FLOPs\ncausal", "attention\nin them", "share\nfull", "\ncausal", "\npopular")
    table = make_table(
        title=f"{result.model}, {result.parameters / 1e9:,.2f}B parameters: training FLOPs by stage",
        caption="full, causal: 6 FLOPs a weight and token, and attention over full squares or over what a causal query "
        "sees; popular: tokens · length², K a thousand",
        columns=headings,
    )
    for row in result.stages:
        table.add_row(
            amount(row.tokens),
            f"{row.length:,}",
            f"{row.flops_causal:.3e}",
            f"{row.attention_share_causal:.1%}",
            f"{row.share_full:.2%}",
            f"{row.share_causal:.2%}",
            f"{row.share_blog:.3%}",
        )
    return table


def _inference_table(rows: Sequence[Inference], local: float, span: int) -> Table:
    """Lengths down: FLOPs of the prompt, bytes of the cache and bytes read per token, for all keys and pruned."""
    table = make_table(
        title=f"Inference with {local:.0%} of the heads local within {span:,} tokens",
        caption="pruned: with the pruning cache, instead of all keys; numbers of two bytes",
        columns=("tokens",),
    )
    for heading in ("prefill\nTFLOPs", "keys, values\nGB", "read a token\nGB"):
        table.add_column(heading, justify="right", no_wrap=True)
        table.add_column("\npruned", justify="right", no_wrap=True)
    for row in rows:
        numbers = [(row.prefill_full, row.prefill_kept, 1e12), (row.kv_full, row.kv_kept, 1e9)]
        numbers.append((row.decode_bytes_full, row.decode_bytes_kept, 1e9))
        table.add_row(f"{row.length:,}", *(_digits(x / unit) for full, kept, unit in numbers for x in (full, kept)))
    return table


def _digits(value: float) -> str:
    return f"{value:,.0f}" if value >= 1000 else f"{value:.3g}"


def figures(result: Savings, folder: Path) -> list[Path]:
    """The share of FLOPs saved by training at 512 tokens instead of a longer context, by model and context."""
    from bayesattn.compute import cards
    from bayesattn.compute.savings import short_saving

    names = [name for name, _ in sorted(cards.CARDS.items(), key=lambda card: card[1].parameters)]
    names = names if result.model in names else [result.model, *names]
    shares = [[short_saving(cards.find(name), n, MAP_SHORT) for n in MAP_LENGTHS] for name in names]
    figure = make_figure(width=2.5 + 0.85 * len(MAP_LENGTHS), height=1.6 + 0.38 * len(names))
    axes = figure.add_subplot(1, 1, 1)
    share_map(axes, shares, [[f"{share:.0%}" for share in row] for row in shares], size=8)
    axes.set_xticks(range(len(MAP_LENGTHS)), [f"{length:,}" for length in MAP_LENGTHS], rotation=45)
    axes.set_yticks(range(len(names)), names)
    axes.set(title=f"FLOPs saved by training at {MAP_SHORT:,} tokens instead", xlabel="context (tokens)")
    return save_figure(figure, folder / "savings")


def sections(results: Sequence[Savings]) -> list[html.Section]:
    """Stages as a table, and sliders that compute the cost of another training."""
    heads = ["tokens", "length", "FLOPs, causal", "attention in them", "share, full", "share, causal"]
    caption = "Share of the training FLOPs by stage: attention over full squares, causal, and the popular estimate"
    parts = []
    for result in results:
        rows = [
            [
                html.Cell(amount(row.tokens), row.tokens),
                html.count(row.length),
                html.Cell(f"{row.flops_causal:.3e}", row.flops_causal),
                html.share(row.attention_share_causal),
                html.Cell(f"{row.share_full:.2%}", row.share_full),
                html.Cell(f"{row.share_causal:.2%}", row.share_causal),
                html.Cell(f"{row.share_blog:.3%}", row.share_blog),
            ]
            for row in result.stages
        ]
        parts += [html.heading(result.model), html.table(caption, [*heads, "share, by tokens · length²"], rows)]
        if result.blog_shares and result.blog_gradual:
            blog = [_blog_table(result.blog_shares, result.model), _gradual_table(result.blog_gradual, result.model)]
            parts.append(html.from_terminal(blog))
        parts.append(_sliders(result))
    script = Path(__file__).with_name("sliders.js").read_text(encoding="utf-8")
    parts.append(Markup("<script>\n{}</script>").format(Markup(script)))
    return [html.Section("savings", "Training costs", html.joined(parts))]


def _sliders(result: Savings) -> Markup:
    longest = max(result.stages, key=lambda row: row.length)
    model = {
        "parameters": result.parameters,
        "matmul": result.matmul_parameters,
        "attention": result.attention_per_token,
        "peak": result.peak,
    }
    form = Markup(Path(__file__).with_name("sliders.html").read_text(encoding="utf-8"))
    return form.format(
        model=json.dumps(model),
        hardware=result.hardware,
        parameters=math.log10(result.parameters),
        context=math.log10(longest.length),
        tokens=math.log10(longest.tokens),
        mfu=result.mfu,
        price=result.price,
    )
