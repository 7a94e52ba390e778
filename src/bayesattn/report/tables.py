"""Tables for the terminal."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from rich import box
from rich.table import Table

from bayesattn.benchmarks.attention import BASELINE, Row
from bayesattn.benchmarks.long import TOLERANCE, Decode, Exponent, Prefill
from bayesattn.evaluation.intervals import wilson
from bayesattn.files import short_name
from bayesattn.priors import Prior

if TYPE_CHECKING:  # some of these modules import transformers
    from bayesattn.compute.savings import Inference, Savings
    from bayesattn.evaluation.compare import Comparison
    from bayesattn.evaluation.heads import Head, Posterior
    from bayesattn.evaluation.perplexity import Row as PerplexityRow
    from bayesattn.evaluation.trials import Cell
    from bayesattn.training.estimate import Estimate


def prior_table(priors: Mapping[str, Prior], n: int) -> Table:
    """Every head of every prior: its kind, its parameters and its span."""
    table = make_table(
        title=f"What each head believes about distance, over {n:,} tokens",
        caption="span: the distance within which 99.9% of the prior lies; effective: tokens it counts on, 1/Σp²",
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


def passkey_table(
    results: Mapping[str, Sequence[Cell]],
    lengths: Sequence[int],
    train_length: int,
    title: str,
    caption: str | None = None,
) -> Table:
    """Models down, lengths across: how many of the trials were right, and the 95% interval of the share."""
    table = make_table(title=title, caption=caption)
    table.add_column("model", no_wrap=True)
    for length in lengths:
        table.add_column(f"{length:,}\n{multiple(length, train_length)}", justify="right", no_wrap=True)
    for name, cells in results.items():
        by_length = {cell.length: cell for cell in cells}
        table.add_row(name, *(_passkey_cell(by_length.get(length)) for length in lengths))
    return table


def perplexity_table(results: Mapping[str, Sequence[PerplexityRow]], title: str, by: str) -> Table:
    """Models and contexts down: perplexity, and its change against the model's first row."""
    at, of = ("tokens before", "on the same windows") if by == "context" else ("position", "of other tokens")
    table = make_table(title=title, caption=f"change: against the model's first row, {of}; 95% intervals")
    table.add_column("model", overflow="fold")
    for name in (at, "perplexity", "interval", "change", "interval"):
        table.add_column(name, justify="right", no_wrap=True)
    for number, (name, rows) in enumerate(results.items()):
        if number:
            table.add_section()
        for row in rows:
            change, low, high = (math.expm1(x) for x in (row.change, row.change_low, row.change_high))
            first = row is rows[0]
            table.add_row(
                short_name(name) if first else "",
                f"{row.context:,}",
                f"{row.perplexity:,.2f}",
                f"{row.low:,.2f} … {row.high:,.2f}",
                "" if first else f"{change:+.1%}",
                "" if first else f"{low:+.1%} … {high:+.1%}",
            )
    return table


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


def heads_table(rows: Sequence[Head], lengths: Sequence[int], name: str) -> Table:
    """Every head: its kind, its parameters, how far it looks, and its effective tokens."""
    longest = f"{max(lengths):,}"
    table = make_table(
        title=f"{name}: the prior of every head, with its temperature",
        caption=f"beyond: distance beyond which 1e-3 and 1e-6 of the prior lie, at {longest} tokens; effective: tokens "
        "counted on, 1/Σp²",
    )
    table.add_column("layer", justify="right", no_wrap=True)
    table.add_column("head", justify="right", no_wrap=True)
    table.add_column("kind", min_width=10)
    table.add_column("parameters", min_width=12)
    table.add_column("beyond\n1e-3", justify="right", no_wrap=True)
    table.add_column("\n1e-6", justify="right", no_wrap=True)
    table.add_column(f"effective\nat {min(lengths):,}", justify="right", no_wrap=True)
    table.add_column(f"\nat {longest}", justify="right", no_wrap=True)
    for row in rows:
        if row.head == 0 and row.layer:
            table.add_section()
        table.add_row(
            str(row.layer + 1) if row.head == 0 else "",
            str(row.head),
            row.kind,
            ", ".join(f"{key} {value:.3g}" for key, value in row.parameters.items() if not math.isnan(value)),
            f"{row.span_3:,}",
            f"{row.span_6:,}",
            *(f"{value:,.1f}" for value in (row.effective[0], row.effective[-1])),
        )
    return table


def posterior_table(rows: Sequence[Posterior], name: str) -> Table:
    """The measured attention of each head, and the generalized Gaussian nearest to it."""
    n = rows[0].profile.shape[1]
    table = make_table(
        title=f"{name}: mean attention by distance on a text, and the nearest generalized Gaussian",
        caption="shares of all attention, near: on the last 16 tokens, "
        + (f"far: 128 to {n - 1:,} tokens back, " if n > 128 else "")
        + f"beyond: {n:,} and more; beta, scale: of the fit to what is below {n:,}; off: by how much it misses that, "
        "Kullback–Leibler, in nats",
    )
    for heading in ("layer", "head", "near", *(["far"] if n > 128 else []), "beyond", "beta", "scale", "off"):
        table.add_column(heading, justify="right")
    for row in rows:
        if row.layer:
            table.add_section()
        for head, profile in enumerate(row.profile):
            shares = [profile[:16].sum().item(), profile[128:].sum().item(), row.beyond[head]]
            table.add_row(
                str(row.layer + 1) if head == 0 else "",
                str(head),
                *(f"{share:.0%}" for share in (shares if n > 128 else shares[::2])),
                f"{row.beta[head]:.2f}",
                f"{row.scale[head]:.3g}",
                f"{row.divergence[head]:.2f}",
            )
    return table


def cache_table(rows: Sequence[Mapping[str, int]], name: str) -> Table:
    """Bytes of keys and values by length, in all and per token."""
    table = make_table(title=f"{name}: keys and values to keep", caption="kept: in the pruning cache", min_width=44)
    for heading in ("tokens", "all", "bytes\na token", "kept", "bytes\na token", "share"):
        table.add_column(heading, justify="right")
    for row in rows:
        sizes = [row["full"], *([row["kept"]] if "kept" in row else [])]
        texts = [text for size in sizes for text in (f"{size / 1e6:,.1f} MB", f"{size / row['length']:,.0f}")]
        texts += [f"{row['kept'] / row['full']:.1%}"] if "kept" in row else ["–"] * 3
        table.add_row(f"{row['length']:,}", *texts)
    return table


def savings_table(result: Savings) -> Table:
    """Stages down: tokens, length, FLOPs, and the share of the whole, counted in three ways."""
    size = f"{result.architecture.parameters / 1e9:,.2f}B parameters"
    table = make_table(
        title=f"{result.architecture.name}, {size}: training FLOPs by stage",
        caption="exact: 6 FLOPs a weight and token, and attention, over full squares or what a causal query sees; "
        "blog: tokens · length², K a thousand",
    )
    headings = ("tokens", "length", "FLOPs\ncausal", "attention\nin them", "share\nfull", "\ncausal", "\nblog")
    for heading in headings:
        table.add_column(heading, justify="right", no_wrap=True)
    for row in result.rows:
        table.add_row(
            _amount(row.tokens),
            f"{row.length:,}",
            f"{row.flops_causal:.3e}",
            f"{row.attention_share_causal:.1%}",
            f"{row.share_full:.2%}",
            f"{row.share_causal:.2%}",
            f"{row.share_blog:.3%}",
        )
    return table


def inference_table(rows: Sequence[Inference], local: float, span: int) -> Table:
    """Lengths down: FLOPs of the prompt, bytes of the cache and bytes read per token, for all keys and pruned."""
    table = make_table(
        title=f"Inference with {local:.0%} of the heads local within {span:,} tokens",
        caption="each pair: all keys, then with the pruning cache; numbers of two bytes",
    )
    table.add_column("tokens", justify="right", no_wrap=True)
    for heading in ("prefill\nTFLOPs", "keys, values\nGB", "read a token\nGB"):
        table.add_column(heading, justify="right", no_wrap=True)
        table.add_column("\nwith prior", justify="right", no_wrap=True)
    for row in rows:
        numbers = [(row.prefill_full, row.prefill_kept, 1e12), (row.kv_full, row.kv_kept, 1e9)]
        numbers.append((row.decode_bytes_full, row.decode_bytes_kept, 1e9))
        table.add_row(f"{row.length:,}", *(f"{x / unit:,.3g}" for full, kept, unit in numbers for x in (full, kept)))
    return table


def estimate_table(estimate: Estimate) -> Table:
    """The cost of training with a recipe."""
    e = estimate
    table = make_table(title=f"{e.name}: what training takes", caption=None)
    table.add_column("", no_wrap=True)
    table.add_column("", justify="right", no_wrap=True)
    table.add_column("")
    table.add_row("parameters", f"{e.parameters / 1e6:,.1f}M", f"vocabulary {e.vocabulary:,}")
    table.add_row("… of priors", f"{e.prior_parameters:,}", f"and {e.temperature_parameters:,} of temperatures")
    table.add_row("tokens", f"{e.tokens / 1e9:,.2f}B", f"{e.tokens_per_step:,} a step")
    table.add_row(
        "FLOPs", f"{e.flops:.2e}", f"{e.attention_share:.0%} of them attention, contexts taken as one document"
    )
    room = "" if sum(e.memory.values()) <= e.hardware.memory else ": more than there is, take fewer contexts at a time"
    parts = ", ".join(f"{name} {size / 1e9:.1f}" for name, size in e.memory.items())
    table.add_row(
        "memory", f"{sum(e.memory.values()) / 1e9:,.1f} GB", f"{parts}; {e.device_batch} contexts at a time{room}"
    )
    where = (
        f"{e.devices} × {e.hardware.name} ({e.hardware.flops / 1e12:,.0f} TFLOP/s, {e.hardware.memory / 1e9:,.0f} GB)"
    )
    table.add_row("hours", f"{e.hours:,.1f}", f"on {where} at {e.mfu:.0%} utilisation")
    return table


def cells_table(cells: Sequence[Cell], train_length: int, title: str) -> Table:
    """Lengths down: right answers, trials, the share with its interval, and the time."""
    table = make_table(title=title, caption="low and high: 95% Wilson interval of the share right")
    for name in ("tokens", "length", "right", "trials", "share", "low", "high", "time"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("")
    for cell in cells:
        low, high = wilson(cell.right, cell.trials)
        counts = [f"{cell.right:,g}", f"{cell.trials:,}"]
        shares = ["–"] * 3 if cell.accuracy is None else [f"{share:.1%}" for share in (cell.accuracy, low, high)]
        short = f"{cell.planned:,} planned" if cell.trials < cell.planned and not cell.note else cell.note
        time = _time(cell.seconds) if cell.trials else "–"
        table.add_row(f"{cell.length:,}", multiple(cell.length, train_length), *counts, *shares, time, short)
    return table


def _passkey_cell(cell: Cell | None) -> str:
    if cell is None:
        return ""
    if cell.accuracy is None:
        return "–"
    low, high = wilson(cell.right, cell.trials)
    return f"{cell.right:g}/{cell.trials}\n{low:.0%}…{high:.0%}"


def multiple(length: int, train_length: int) -> str:
    """A length as a multiple of the training length, `16×` or `1.3×`."""
    ratio = length / train_length
    return f"{ratio:,.0f}×" if ratio >= 10 or ratio == int(ratio) else f"{ratio:.1f}×"


def attention_table(rows: Sequence[Row], phase: str) -> Table:
    """Lengths down, methods across: the ratio to the baseline's time, the time, and peak memory where measured."""
    rows = [row for row in rows if row.phase == phase]
    errors = [row.error for row in rows if row.error is not None]
    table = make_table(
        title=f"{phase}: time as a multiple of {BASELINE[phase]}",
        caption=f"largest error against the float64 reference in this run: {max(errors):.0e}" if errors else None,
        min_width=66,  # of the title and the caption
    )
    table.add_column("tokens", justify="right", no_wrap=True)
    for method in dict.fromkeys(row.method for row in rows):
        table.add_column(method.replace(", ", "\n").replace(" with ", "\nwith "), justify="right")
    for length in sorted({row.tokens for row in rows}):
        table.add_row(f"{length:,}", *(_cell(row) for row in rows if row.tokens == length))
    return table


def prefill_table(rows: Sequence[Prefill], exponents: Sequence[Exponent]) -> Table:
    """Lengths down: plain SDPA, and each mix of heads with its speed-up, the share it computes and its memory."""
    mixes = list(dict.fromkeys(row.mix for row in rows))
    errors = [row.error for row in rows if row.error is not None]
    growth = "; ".join(f"{e.mix} n^{e.pruned:.2f}" for e in exponents if e.pruned is not None)
    caption = f"largest error against the float64 reference in this run: {max(errors):.0e}" if errors else None
    table = make_table(
        title=f"prefill, tolerance {TOLERANCE:g}: speed-up over plain SDPA, time, share computed, memory",
        caption=f"{caption}\ngrowth from {exponents[0].lengths[0]:,} tokens on: {growth}" if growth else caption,
    )
    table.add_column("tokens", justify="right", no_wrap=True)
    table.add_column("plain SDPA\nno prior", justify="right")
    for mix in mixes:
        table.add_column(mix.replace(", ", "\n"), justify="right")
    for length in sorted({row.tokens for row in rows}):
        at_length = [row for row in rows if row.tokens == length]
        dense = at_length[0].dense_seconds
        cells = []
        for row in at_length:
            if row.pruned_seconds is None:
                cells.append(row.note)
                continue
            faster = f"{dense / row.pruned_seconds:.1f}× " if dense else ""
            memory = "" if row.peak_bytes is None else f", {row.peak_bytes / 1e6:,.0f} MB"
            cells.append(f"{faster}{_time(row.pruned_seconds)}\n{row.kept:.1%}{memory}")
        table.add_row(f"{length:,}", _time(dense) if dense else "too long", *cells)
    return table


def decode_table(rows: Sequence[Decode]) -> Table:
    """Tokens per second and bytes of the cache, next to those of a full one."""
    table = make_table(
        title=f"decoding, tolerance {TOLERANCE:g}: the pruning cache and a full one with plain SDPA",
        caption=f"largest error against the float64 reference in this run: {max(row.error for row in rows):.0e}",
    )
    for name in ("tokens", "heads", "full cache\ntokens/s", "bayesattn\ntokens/s", "cache kept\nof MB"):
        table.add_column(name, justify="left" if name == "heads" else "right", no_wrap=True)
    for row in rows:
        ours = "wrong, not timed"
        if row.cache_tokens_per_second is not None:
            ratio = row.cache_tokens_per_second / row.full_tokens_per_second
            ours = f"{ratio:.1f}× {row.cache_tokens_per_second:,.0f}"
        kept = f"{row.cache_bytes / row.full_bytes:.1%} of {row.full_bytes / 1e6:,.0f}"
        table.add_row(f"{row.tokens:,}", row.mix, f"{row.full_tokens_per_second:,.0f}", ours, kept)
    return table


def make_table(title: str, caption: str | None, min_width: int | None = None) -> Table:
    """An empty table in the common style."""
    return Table(
        title=title,
        caption=caption,
        title_justify="left",
        caption_justify="left",
        box=box.SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
        min_width=min_width,
    )


def _amount(number: float) -> str:
    """A number with a unit: `15T`, `100B`."""
    unit, size = next(((u, s) for u, s in (("T", 1e12), ("B", 1e9), ("M", 1e6), ("K", 1e3)) if number >= s), ("", 1.0))
    return f"{number / size:.4g}{unit}"


def _time(seconds: float) -> str:
    return f"{seconds * 1e3:.0f} ms" if seconds < 1 else f"{seconds:.1f} s"


def _cell(row: Row) -> str:
    if row.seconds is None:
        return row.note
    seconds = _time(row.seconds)
    time = f"{row.ratio:.2f}× {seconds}" if row.ratio is not None else seconds
    return time if row.peak_bytes is None else f"{time}\n{row.peak_bytes / 1e6:,.0f} MB"
