"""One HTML page with all results. It needs no network, and works on a phone, by keyboard and without colours."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any, NamedTuple

from markupsafe import Markup

import bayesattn
from bayesattn.errors import UserError
from bayesattn.files import read_results, short_name
from bayesattn.report import svg
from bayesattn.report.svg import Axis, Point

KINDS = ("passkey", "needle", "perplexity", "inspect", "savings")
DEPTHS = 10


class Cell(NamedTuple):
    """A cell of a table: its text, the value to sort by, and whether the text is words instead of a number."""

    text: str
    value: float | str
    words: bool = False


def find_results(paths: Sequence[Path]) -> list[Path]:
    """The given result files, and all result files in the given folders."""
    results: list[Path] = []
    for path in paths:
        if path.is_dir():
            inside = sorted(file for kind in KINDS for file in path.rglob(f"{kind}*.json"))
            if not inside:
                raise UserError(f"{path} has no results; a report shows {', '.join(KINDS)}")
            results += inside
        elif path.exists():
            results.append(path)
        else:
            raise UserError(f"there is no file or folder {path}")
    return list(dict.fromkeys(results))


def make_page(paths: Sequence[Path], title: str = "How far it reads") -> str:
    """The page as HTML."""
    from jinja2 import Environment

    results = [(path, read_results(path)) for path in find_results(paths)]
    for path, content in results:
        if content["kind"] not in KINDS:
            raise UserError(f"{path} has results of {content['kind']}; a report shows {', '.join(KINDS)}")
    by_kind = {kind: [content for _, content in results if content["kind"] == kind] for kind in KINDS}
    section_data: dict[str, Any] = {
        "passkey": _passkey(by_kind["passkey"]),
        "needles": _needles(by_kind["needle"]),
        "perplexity": [_perplexity(content) for content in by_kind["perplexity"]],
        "heads": [_heads(content) for content in by_kind["inspect"]],
        "costs": [row for content in by_kind["inspect"] for row in _costs(content)],
        "savings": [_savings(content) for content in by_kind["savings"]],
    }
    names = {"passkey": ("retrieval", "Retrieval"), "needles": ("needles", "Needles among needles")}
    names |= {"perplexity": ("perplexity", "Perplexity")}
    names |= {"heads": ("heads", "Heads"), "costs": ("costs", "Costs"), "savings": ("savings", "Training costs")}
    sections = [name for key, name in names.items() if section_data[key]]
    template = files("bayesattn").joinpath("assets/report.html.j2").read_text(encoding="utf-8")
    environment = Environment(autoescape=True, trim_blocks=True)
    environment.filters["log10"] = math.log10
    return environment.from_string(template).render(
        title=title,
        version=bayesattn.__version__,
        sections=[*sections, ("rerun", "How to measure this again")],
        runs=[_run(path, content) for path, content in results],
        **section_data,
    )


def _run(path: Path, content: Mapping[str, Any]) -> dict[str, str]:
    settings = ", ".join(f"{key} {value}" for key, value in content.get("settings", {}).items())
    return {"file": str(path), "command": content.get("command") or "(called from Python)", "settings": settings}


def _passkey(contents: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Models measured in the same way share a chart."""
    groups: dict[str, list[Mapping[str, Any]]] = {}
    for content in contents:
        groups.setdefault(_task(content["settings"]), []).append(content)
    return [
        {
            **_group(title, group, svg.shares("right")),
            "heat": [_heat(f"{name}, {title}", c) for name, c in zip(_names(group, seeds=True), group, strict=True)],
        }
        for title, group in groups.items()
    ]


def _task(settings: Mapping[str, Any]) -> str:
    how = "teacher-forced" if settings["teacher_forced"] else "greedy generation"
    title = f"{settings['wording']} wording, {settings['haystack']} haystack, {settings['digits']} digits, {how}"
    if settings["wording"] != "standard" and "needles" in settings:
        title += ", {} to {} keys".format(*settings["needles"])
    if settings["depths"] is not None:
        title += f", {settings['depths']} depths"
    return title


def _needles(contents: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """A chart for each task. A file has one task, or several: then each cell has the name of its task."""
    groups: dict[str, list[Mapping[str, Any]]] = {}
    for content in contents:
        settings = content["settings"]
        tasks: dict[str, list[Mapping[str, Any]]] = {}
        for cell in content["cells"]:
            tasks.setdefault(cell.get("task", settings["name"]), []).append({**cell, "task": ""})
        for task, cells in tasks.items():
            one = {"model": content["model"], "train_length": content["train_length"], "cells": cells}
            one |= {"settings": {"seed": settings["seed"]}}
            group = groups.setdefault(task, [])
            if one not in group:  # a task may be in a file of its own and in one of all tasks
                group.append(one)
    return [_group(task, group, svg.shares("mean share found")) for task, group in groups.items()]


def _names(group: Sequence[Mapping[str, Any]], *, seeds: bool = False) -> list[str]:
    """Unique names: the model, with its seed if `seeds` or if models repeat, and a number if that still repeats."""
    names = [short_name(content["model"]) for content in group]
    if seeds or len(set(names)) < len(names):
        names = [f"{name}, seed {content['settings']['seed']}" for name, content in zip(names, group, strict=True)]
    return [f"{name} ({names[:i].count(name) + 1})" if names.count(name) > 1 else name for i, name in enumerate(names)]


def _group(title: str, group: Sequence[Mapping[str, Any]], y: Axis) -> dict[str, Any]:
    series, rows = [], []
    for content, name in zip(group, _names(group), strict=True):
        points = []
        for cell in content["cells"]:
            share, trials = cell["accuracy"], cell["trials"]
            times = cell["length"] / content["train_length"]
            if trials:
                label = f"{name}, {cell['length']:,} tokens: {cell['correct']:g} of {trials}"
                points.append(Point(cell["length"], share, cell["low"], cell["high"], label))
            shares = [_share(x) for x in (share, cell["low"], cell["high"])] if trials else [Cell("–", -1)] * 3
            each = cell["seconds"] / trials if trials else 0
            rows.append(
                [
                    Cell(name, name, True),
                    Cell(f"{cell['length']:,}", cell["length"]),
                    Cell(f"{times:,.3g}×", times),
                    Cell(f"{cell['correct']:,g}", cell["correct"]),
                    Cell(f"{trials:,}", trials),
                    *shares,
                    Cell(f"{each:.2f}" if trials else "–", each),
                    Cell(cell["note"], cell["note"], True),
                ]
            )
        series.append((name, points))
    lengths = [point.x for _, points in series for point in points] or [1, 10]
    chart = svg.lines(f"{title}, by length", series, svg.log_axis(lengths, "tokens of the prompt"), y)
    return {"title": title, "chart": chart, "key": svg.key([name for name, _ in series]), "rows": rows}


def _share(value: float) -> Cell:
    return Cell(f"{value:.1%}", value)


def _number(value: float | None) -> Cell:
    return Cell("–", -math.inf) if value is None else Cell(f"{value:.3g}", value)


def _heat(title: str, content: Mapping[str, Any]) -> tuple[str, int, Markup]:
    """Title, width in pixels, and the heat map itself."""
    tried = [cell for cell in content["cells"] if cell["trials"]]
    fields: list[list[tuple[float, int] | None]] = []
    for row in range(DEPTHS):
        fields.append([])
        for cell in tried:
            scores = [right for depth, right in cell["outcomes"] if min(DEPTHS - 1, int(depth * DEPTHS)) == row]
            fields[-1].append((sum(scores), len(scores)) if scores else None)
    depths = [f"{row * 10}–{row * 10 + 10}%" for row in range(DEPTHS)]
    return title, svg.heat_width(len(tried)), svg.heat(title, [f"{cell['length']:,}" for cell in tried], depths, fields)


def _perplexity(content: Mapping[str, Any]) -> dict[str, Any]:
    series, rows, notes = [], [], []
    position = content["by"] == "position"
    for entry in content["models"]:
        name = short_name(entry["model"])
        points = []
        for row in entry["rows"]:
            where = f"from position {row['context']:,} on" if position else f"{row['context']:,} tokens before"
            label = f"{name}, {where}: {row['perplexity']:,.2f}"
            points.append(Point(row["context"] + 1, row["perplexity"], row["low"], row["high"], label))
            rows.append(
                [
                    Cell(name, name, True),
                    Cell(f"{row['context']:,}", row["context"]),
                    *(Cell(f"{row[key]:,.2f}", row[key]) for key in ("perplexity", "low", "high")),
                    Cell(f"{row['change']:+.3f} nats", row["change"]),
                    Cell(f"{row['windows']:,}", row["windows"]),
                    Cell(f"{row['seconds']:.1f}", row["seconds"]),
                ]
            )
        series.append((name, points))
        notes.append(f"{name}: no use of more than {entry['effective_context']:,} tokens before can be seen.")
        if position:
            notes.append(f"{name}: {entry['length']:,} tokens of {entry['texts']} were read.")
    across = sorted({point.x for _, points in series for point in points}) or [1, 10]
    ticks = [(x, f"{x - 1:,.0f}") for x in across[:: max(1, len(across) // 8)]]
    label, over = ("position", "samples") if position else ("tokens before", "windows")
    x = Axis(min(across), max(across), ticks, label, logarithmic=True)
    bounds = [bound for _, points in series for point in points for bound in (point.low, point.high)] or [1.0, 10.0]
    least, most = min(bounds), max(bounds)
    steps = [least * (most / least) ** (i / 4) for i in range(5)]
    y = Axis(least, most, [(step, f"{step:,.1f}") for step in steps], "perplexity", logarithmic=True)
    return {
        "title": f"by {content['by']}, {content['text']} text",
        "chart": svg.lines("Perplexity", series, x, y),
        "key": svg.key([name for name, _ in series]),
        "caption": "of other tokens" if position else "on the same windows",
        "heads": ["model", label, "perplexity", "low", "high", "change", over, "seconds"],
        "rows": rows,
        "lines": notes,
    }


def _heads(content: Mapping[str, Any]) -> dict[str, Any]:
    """A chart per head with its attention and prior; without priors, a chart per layer with all its heads."""
    layers = content["posteriors"]
    charts = [chart for layer in layers for chart in (_by_head(layer) if "prior" in layer else [_by_layer(layer)])]
    most = max(len(layer["profile"]) for layer in layers)
    lines = ["on the text", "prior"] if "prior" in layers[0] else [f"head {head}" for head in range(most)]
    n, lengths = len(layers[0]["profile"][0]), content["lengths"]
    bands = {"last 16": slice(16), f"128 to {n - 1:,} back": slice(128, n)} if n > 128 else {"last 16": slice(16)}
    return {
        "title": short_name(content["model"]),
        "charts": charts,
        "key": svg.key(lines, marked=False),
        "priors": {
            "caption": "Priors with their temperature: the distances beyond which 1e-3 and 1e-6 of them lie at "
            f"{max(lengths):,} tokens, and how many tokens they count on (1/Σp²) at several lengths",
            "heads": ["layer", "head", "kind", "prior", "beyond 1e-3", "beyond 1e-6"]
            + [f"counted on, of {length:,}" for length in lengths],
            "rows": [_prior_row(head) for head in content["heads"]],
        },
        "attention": {
            "caption": "Shares of all attention on the text, and the generalized Gaussian nearest to what is less than "
            f"{n:,} tokens back",
            "heads": ["layer", "head", *bands, f"{n:,} and more", "nearest beta", "nearest scale", "off by (nats)"],
            "rows": [
                _attention_row(layer, head, list(bands.values()))
                for layer in layers
                for head in range(len(layer["profile"]))
            ],
        },
    }


def _by_head(layer: Mapping[str, Any]) -> list[tuple[str, Markup]]:
    """Captions and charts."""
    charts = []
    for head, (profile, prior) in enumerate(zip(layer["profile"], layer["prior"], strict=True)):
        title = f"layer {layer['layer'] + 1}, head {head}"
        charts.append((title, _profiles(title, {"on the text": profile, "prior": prior})))
    return charts


def _by_layer(layer: Mapping[str, Any]) -> tuple[str, Markup]:
    title = f"layer {layer['layer'] + 1}"
    return title, _profiles(title, {f"head {head}": profile for head, profile in enumerate(layer["profile"])})


def _profiles(title: str, profiles: Mapping[str, Sequence[float]]) -> Markup:
    """A chart of mean attention against distance."""
    n = len(next(iter(profiles.values())))
    distances = sorted({round(n ** (i / 48)) for i in range(49)})
    series = [
        (name, [Point(d, profile[d - 1], 0, 0, "") for d in distances if profile[d - 1] >= 1e-6])
        for name, profile in profiles.items()
    ]
    x = svg.log_axis([1, n], "distance + 1", powers=True)
    y = Axis(1e-6, 1, [(10.0**-e, f"1e-{e}" if e else "1") for e in (0, 2, 4, 6)], "mean attention", True)
    return svg.lines(title, series, x, y, marked=False)


def _prior_row(head: Mapping[str, Any]) -> list[Cell]:
    known = {key: value for key, value in head["parameters"].items() if value is not None}
    parameters = ", ".join(f"{key} {value:.3g}" for key, value in known.items())
    return [
        Cell(str(head["layer"] + 1), head["layer"]),
        Cell(str(head["head"]), head["head"]),
        Cell(head["kind"], head["kind"], True),
        Cell(parameters, parameters, True),
        *(Cell(f"{head[key]:,}", head[key]) for key in ("span_3", "span_6")),
        *(Cell(f"{value:,.1f}", value) for value in head["effective"]),
    ]


def _attention_row(layer: Mapping[str, Any], head: int, bands: Sequence[slice]) -> list[Cell]:
    profile = layer["profile"][head]
    return [
        Cell(str(layer["layer"] + 1), layer["layer"]),
        Cell(str(head), head),
        *(_share(sum(profile[band])) for band in bands),
        _share(max(0.0, 1 - sum(profile))),
        *(_number(layer[key][head]) for key in ("beta", "scale", "divergence")),
    ]


def _costs(content: Mapping[str, Any]) -> list[list[Cell]]:
    name = short_name(content["model"])
    rows = []
    for row in content["cache"]:
        length, full, kept = row["length"], row["full"], row.get("kept")
        pruned = [Cell("–", -1), Cell("–", -1), Cell("–", 2)]
        if kept is not None:
            pruned = [
                Cell(f"{kept / 1e6:,.1f}", kept),
                Cell(f"{kept / length:,.0f}", kept / length),
                _share(kept / full),
            ]
        rows.append(
            [
                Cell(name, name, True),
                Cell(f"{length:,}", length),
                Cell(f"{full / 1e6:,.1f}", full),
                Cell(f"{full / length:,.0f}", full / length),
                *pruned,
            ]
        )
    return rows


def _savings(content: Mapping[str, Any]) -> dict[str, Any]:
    """Stages as a table, and the numbers that the sliders of the page start from."""
    rows = [
        [
            Cell(f"{row['tokens']:.4g}", row["tokens"]),
            Cell(f"{row['length']:,}", row["length"]),
            Cell(f"{row['flops_causal']:.3e}", row["flops_causal"]),
            _share(row["attention_share_causal"]),
            Cell(f"{row['share_full']:.2%}", row["share_full"]),
            Cell(f"{row['share_causal']:.2%}", row["share_causal"]),
            Cell(f"{row['share_blog']:.3%}", row["share_blog"]),
        ]
        for row in content["stages"]
    ]
    longest = max(content["stages"], key=lambda row: row["length"])
    settings = {
        "parameters": content["parameters"],
        "matmul": content["matmul_parameters"],
        "attention": content["attention_per_token"],
        "peak": content["peak"],
    }
    start = {
        "parameters": content["parameters"],
        "context": longest["length"],
        "tokens": longest["tokens"],
        "mfu": content["mfu"],
        "price": content["price"],
    }
    return {
        "title": content["model"],
        "rows": rows,
        "settings": settings,
        "start": start,
        "hardware": content["hardware"],
    }
