"""Heads as tables, pictures, and two sections of the page."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path

from markupsafe import Markup
from rich.table import Table

from bayesattn.drawing import html, svg
from bayesattn.drawing.figures import make_figure, save_figure
from bayesattn.drawing.palette import LIGHT, colour
from bayesattn.drawing.tables import make_table, parameters_text
from bayesattn.files import short_name
from bayesattn.studies.heads.run import CacheSize, Head, Heads, Posterior

# Scales, in tokens, beyond which a fit only says that attention is on one token, or the same on all.
SMALLEST_SCALE, LARGEST_SCALE = 1e-3, 1e7


def bands(distances: int) -> dict[str, slice]:
    """Distances that attention is summed over."""
    near = {"last 16": slice(16)}
    return near if distances <= 128 else {**near, f"128 to {distances - 1:,} back": slice(128, distances)}


def tables(result: Heads) -> list[Table | str]:
    name = short_name(result.model)
    priors = [_priors_table(result.heads, result.lengths, name)] if result.heads else []
    return [*priors, posterior_table(result.posteriors, name), cache_table(result.cache, name)]


def _priors_table(rows: Sequence[Head], lengths: Sequence[int], name: str) -> Table:
    """Every head: its kind, its parameters, how far it looks, and its effective tokens."""
    longest = f"{max(lengths):,}"
    table = make_table(
        title=f"{name}: the prior of every head, with its temperature",
        caption=f"beyond: distance beyond which 1e-3 and 1e-6 of the prior lie, at {longest} tokens; effective: 1/Σp² "
        "tokens",
        columns=("layer", "head"),
    )
    table.add_column("kind", min_width=10)
    table.add_column("parameters", min_width=12)
    for heading in ("beyond\n1e-3", "\n1e-6", f"effective\nat {min(lengths):,}", f"\nat {longest}"):
        table.add_column(heading, justify="right", no_wrap=True)
    for row in rows:
        if row.head == 0 and row.layer:
            table.add_section()
        table.add_row(
            str(row.layer + 1) if row.head == 0 else "",
            str(row.head),
            row.kind,
            parameters_text(row.parameters),
            f"{row.span_3:,}",
            f"{row.span_6:,}",
            *(f"{value:,.1f}" for value in (row.effective[0], row.effective[-1])),
        )
    return table


def posterior_table(rows: Sequence[Posterior], name: str) -> Table:
    """The measured attention of each head, and the generalized Gaussian nearest to it."""
    n = len(rows[0].profile[0])
    far = n > 128
    table = make_table(
        title=f"{name}: mean attention by distance on a text, and the nearest generalized Gaussian",
        caption="shares of all attention, near: on the last 16 tokens, "
        + (f"far: 128 to {n - 1:,} tokens back, " if far else "")
        + f"beyond: {n:,} and more; beta, scale: of the fit to what is below {n:,}; off: how far the fit is "
        "from that, Kullback–Leibler divergence in nats; –: attention falls too steeply or too little for a shape",
    )
    for heading in ("layer", "head", "near", *(["far"] if far else []), "beyond", "beta", "scale", "off"):
        table.add_column(heading, justify="right")
    for row in rows:
        if row.layer:
            table.add_section()
        for head, profile in enumerate(row.profile):
            shares = [*(sum(profile[band]) for band in bands(n).values()), row.beyond[head]]
            scale = row.scale[head]
            has_shape = scale is not None and SMALLEST_SCALE <= scale <= LARGEST_SCALE
            fit = (
                _number(row.beta[head] if has_shape else None, ".2f"),
                _number(scale if has_shape else None, ".3g"),
                _number(row.divergence[head], ".2f"),
            )
            layer = str(row.layer + 1) if head == 0 else ""
            table.add_row(layer, str(head), *(f"{share:.0%}" for share in shares), *fit)
    return table


def _number(value: float | None, form: str) -> str:
    return "–" if value is None or value != value else format(value, form)


def cache_table(rows: Sequence[CacheSize], name: str) -> Table:
    """Bytes of keys and values by length, in all and per token."""
    table = make_table(title=f"{name}: keys and values to keep", caption="kept: in the pruning cache", min_width=44)
    for heading in ("tokens", "all", "bytes\na token", "kept", "bytes\na token", "share"):
        table.add_column(heading, justify="right")
    for row in rows:
        sizes = [row.full, *([] if row.kept is None else [row.kept])]
        texts = [text for size in sizes for text in (f"{size / 1e6:,.1f} MB", f"{size / row.length:,.0f}")]
        texts += ["–"] * 3 if row.kept is None else [f"{row.kept / row.full:.1%}"]
        table.add_row(f"{row.length:,}", *texts)
    return table


def figures(result: Heads, folder: Path) -> list[Path]:
    from bayesattn.drawing.priors import gallery
    from bayesattn.models.loading import load_model
    from bayesattn.studies.heads.measure import ScaledPrior, static_priors

    pictures = []
    if result.heads:
        longest = max(result.lengths)
        layers = {
            f"layer {number + 1}, {type(layer.distance_prior).__name__}": ScaledPrior(layer, longest)
            for number, layer in static_priors(load_model(result.model)).items()
        }
        pictures += gallery(layers, longest, folder / "priors")
    return pictures + _posteriors_figure(result.posteriors, folder / "posteriors")


def _posteriors_figure(rows: Sequence[Posterior], path: Path) -> list[Path]:
    """Measured attention of each head by distance, and its prior if there is one, one panel per layer; both axes
    logarithmic."""
    columns = min(3, len(rows))
    figure = make_figure(width=4.6 * columns, height=4.0 * -(-len(rows) // columns))
    # Bins that widen with the distance keep the lines readable.
    last = len(rows[0].profile[0]) + 1
    edges = sorted({int(last ** (i / 59)) for i in range(59)} | {last})
    bins = list(pairwise(edges))
    distance = [math.sqrt(start * (stop - 1)) for start, stop in bins]

    def binned(values: Sequence[float]) -> list[float]:
        return [max(1e-9, math.fsum(values[a - 1 : b - 1]) / (b - a)) for a, b in bins]

    for index, row in enumerate(rows):
        axes = figure.add_subplot(-(-len(rows) // columns), columns, index + 1)
        for head, profile in enumerate(row.profile):
            axes.plot(distance, binned(profile), color=colour(head), linewidth=1.2, label=f"head {head}")
            if row.prior is not None:
                axes.plot(distance, binned(row.prior[head]), color=colour(head), linewidth=1.2, linestyle="--")
        axes.set(title=f"layer {row.layer + 1}", xscale="log", yscale="log", ylim=(1e-6, 1.5))
        axes.set_xlabel("distance + 1 (tokens)")
        axes.set_ylabel("mean attention" + ("" if row.prior is None else " (dashed: prior)"))
        axes.grid(alpha=0.25)
        if len(row.profile) <= len(LIGHT):
            axes.legend(fontsize=6.5, frameon=False)
    return save_figure(figure, path)


def sections(results: Sequence[Heads]) -> list[html.Section]:
    heads = ["model", "tokens", "all, MB", "all, bytes a token", "kept, MB", "kept, bytes a token", "share kept"]
    caption = "Keys and values to keep, with and without the pruning cache"
    rows = [_cost_fields(short_name(result.model), row) for result in results for row in result.cache]
    return [
        html.Section("heads", "Heads", html.joined(map(_charts_and_tables, results))),
        html.Section("costs", "Costs", html.table(caption, heads, rows)),
    ]


def _charts_and_tables(result: Heads) -> Markup:
    """A chart per head with its attention and prior; without priors, a chart per layer with all its heads."""
    layers, lengths = result.posteriors, result.lengths
    charts = [chart for layer in layers for chart in (_by_head(layer) if layer.prior else [_by_layer(layer)])]
    most = max(len(layer.profile) for layer in layers)
    lines = ["on the text", "prior"] if layers[0].prior else [f"head {head}" for head in range(most)]
    n = len(layers[0].profile[0])
    figure = Markup('<figure class="small"><figcaption>{}</figcaption>{}</figure>')
    parts = [
        html.heading(short_name(result.model)),
        svg.key(lines, marked=False),
        Markup('<div class="gallery">{}</div>').format(html.joined(figure.format(*chart) for chart in charts)),
    ]
    if result.heads:
        caption = "Priors with their temperature: the distances beyond which 1e-3 and 1e-6 of them lie at "
        caption += f"{max(lengths):,} tokens, and their effective tokens (1/Σp²) at several lengths"
        heads = ["layer", "head", "kind", "prior", "beyond 1e-3", "beyond 1e-6"]
        heads += [f"effective, of {length:,}" for length in lengths]
        parts.append(html.table(caption, heads, [_prior_fields(head) for head in result.heads]))
    caption = f"Shares of all attention on the text, and the generalized Gaussian nearest to what is less than {n:,} "
    heads = ["layer", "head", *bands(n), f"{n:,} and more", "nearest beta", "nearest scale", "divergence, nats"]
    rows = [_attention_fields(layer, head) for layer in layers for head in range(len(layer.profile))]
    return html.joined([*parts, html.table(f"{caption}tokens back", heads, rows)])


def _by_head(layer: Posterior) -> list[tuple[str, Markup]]:
    """Captions and charts."""
    charts = []
    for head, (profile, prior) in enumerate(zip(layer.profile, layer.prior or [], strict=True)):
        title = f"layer {layer.layer + 1}, head {head}"
        charts.append((title, _profiles_chart(title, {"on the text": profile, "prior": prior})))
    return charts


def _by_layer(layer: Posterior) -> tuple[str, Markup]:
    title = f"layer {layer.layer + 1}"
    return title, _profiles_chart(title, {f"head {head}": profile for head, profile in enumerate(layer.profile)})


def _profiles_chart(title: str, profiles: Mapping[str, Sequence[float]]) -> Markup:
    """A chart of mean attention against distance."""
    n = len(next(iter(profiles.values())))
    distances = sorted({round(n ** (i / 48)) for i in range(49)})
    series = [
        (name, [svg.Point(d, profile[d - 1], 0, 0, "") for d in distances if profile[d - 1] >= 1e-6])
        for name, profile in profiles.items()
    ]
    x = svg.log_axis([1, n], "distance + 1", powers=True)
    y = svg.Axis(1e-6, 1, [(10.0**-e, f"1e-{e}" if e else "1") for e in (0, 2, 4, 6)], "mean attention", True)
    return svg.lines(title, series, x, y, marked=False)


def _prior_fields(head: Head) -> list[html.Cell]:
    return [
        html.Cell(str(head.layer + 1), head.layer),
        html.Cell(str(head.head), head.head),
        html.words(head.kind),
        html.words(parameters_text(head.parameters)),
        html.count(head.span_3),
        html.count(head.span_6),
        *(html.Cell(f"{value:,.1f}", value) for value in head.effective),
    ]


def _attention_fields(layer: Posterior, head: int) -> list[html.Cell]:
    profile = layer.profile[head]
    return [
        html.Cell(str(layer.layer + 1), layer.layer),
        html.Cell(str(head), head),
        *(html.share(sum(profile[band])) for band in bands(len(profile)).values()),
        html.share(layer.beyond[head]),
        *(html.number(values[head]) for values in (layer.beta, layer.scale, layer.divergence)),
    ]


def _cost_fields(name: str, row: CacheSize) -> list[html.Cell]:
    def sizes(size: int) -> list[html.Cell]:
        return [html.Cell(f"{size / 1e6:,.1f}", size), html.Cell(f"{size / row.length:,.0f}", size / row.length)]

    missing = [html.Cell("–", -1), html.Cell("–", -1), html.Cell("–", 2)]
    kept = missing if row.kept is None else [*sizes(row.kept), html.share(row.kept / row.full)]
    return [html.words(name), html.count(row.length), *sizes(row.full), *kept]
