"""One page with everything that was measured: no network, readable on a phone, by keyboard and without colours."""

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

KINDS = ("passkey", "perplexity", "inspect", "savings")
DEPTHS = 10


class Cell(NamedTuple):
    """What a table shows, and what it sorts by."""

    text: str
    value: float | str
    words: bool = False


def find_results(paths: Sequence[Path]) -> list[Path]:
    """Result files among files and folders."""
    found: list[Path] = []
    for path in paths:
        if path.is_dir():
            inside = sorted(file for kind in KINDS for file in path.rglob(f"{kind}*.json"))
            if not inside:
                raise UserError(f"{path} has no results; files of {', '.join(KINDS)} are looked for")
            found += inside
        elif path.exists():
            found.append(path)
        else:
            raise UserError(f"there is no file or folder {path}")
    return list(dict.fromkeys(found))


def make_page(paths: Sequence[Path], title: str = "How far it reads") -> str:
    """The page as HTML."""
    from jinja2 import Environment

    results = [(path, read_results(path)) for path in find_results(paths)]
    for path, content in results:
        if content["kind"] not in KINDS:
            raise UserError(f"{path} has results of {content['kind']}; a report shows {', '.join(KINDS)}")
    by_kind = {kind: [content for _, content in results if content["kind"] == kind] for kind in KINDS}
    told: dict[str, Any] = {
        "passkey": _passkey(by_kind["passkey"]),
        "heat": [_heat(content) for content in by_kind["passkey"]],
        "perplexity": [_perplexity(content) for content in by_kind["perplexity"]],
        "heads": [_heads(content) for content in by_kind["inspect"]],
        "costs": [row for content in by_kind["inspect"] for row in _costs(content)],
    }
    told["savings"] = [_savings(content) for content in by_kind["savings"]]
    names = {"passkey": ("retrieval", "Retrieval"), "perplexity": ("perplexity", "Perplexity")}
    names |= {"heads": ("heads", "Heads"), "costs": ("costs", "Costs"), "savings": ("savings", "Training costs")}
    sections = [name for key, name in names.items() if told[key]]
    template = files("bayesattn").joinpath("assets/report.html.j2").read_text(encoding="utf-8")
    environment = Environment(autoescape=True, trim_blocks=True)
    environment.filters["log10"] = math.log10
    return environment.from_string(template).render(
        title=title,
        version=bayesattn.__version__,
        sections=[*sections, ("rerun", "How to measure this again")],
        runs=[_run(path, content) for path, content in results],
        **told,
    )


def _run(path: Path, content: Mapping[str, Any]) -> dict[str, str]:
    settings = ", ".join(f"{key} {value}" for key, value in content.get("settings", {}).items())
    return {"file": str(path), "command": content.get("command") or "(called from Python)", "settings": settings}


def _passkey(contents: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Models measured in the same way share a chart."""
    groups: dict[str, list[Mapping[str, Any]]] = {}
    for content in contents:
        settings = content["settings"]
        how = "teacher-forced" if settings["teacher_forced"] else "greedy generation"
        title = f"{settings['wording']} wording, {settings['haystack']} haystack, {settings['digits']} digits, {how}"
        if settings["wording"] != "standard":
            title += ", {} to {} keys".format(*settings["needles"])
        if settings["depths"] is not None:
            title += f", {settings['depths']} depths"
        groups.setdefault(title, []).append(content)
    return [_passkey_group(title, group) for title, group in groups.items()]


def _passkey_group(title: str, group: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    series, rows = [], []
    names = [short_name(content["model"]) for content in group]
    for content, name in zip(group, names, strict=True):
        if names.count(name) > 1:
            name = f"{name}, seed {content['settings']['seed']}"
        points = []
        for cell in content["cells"]:
            share, trials = cell["accuracy"], cell["trials"]
            times = cell["length"] / content["train_length"]
            if trials:
                label = f"{name}, {cell['length']:,} tokens: {cell['correct']} of {trials}"
                points.append(Point(cell["length"], share, cell["low"], cell["high"], label))
            shares = [_share(x) for x in (share, cell["low"], cell["high"])] if trials else [Cell("–", -1)] * 3
            each = cell["seconds"] / trials if trials else 0
            rows.append(
                [
                    Cell(name, name, True),
                    Cell(f"{cell['length']:,}", cell["length"]),
                    Cell(f"{times:,.3g}×", times),
                    Cell(f"{cell['correct']:,}", cell["correct"]),
                    Cell(f"{trials:,}", trials),
                    *shares,
                    Cell(f"{each:.2f}" if trials else "–", each),
                    Cell(cell["note"], cell["note"], True),
                ]
            )
        series.append((name, points))
    lengths = [point.x for _, points in series for point in points] or [1, 10]
    chart = svg.lines("Accuracy against length", series, svg.log_axis(lengths, "tokens of the prompt"), svg.SHARES)
    return {"title": title, "chart": chart, "key": svg.key([name for name, _ in series]), "rows": rows}


def _share(value: float) -> Cell:
    return Cell(f"{value:.1%}", value)


def _heat(content: Mapping[str, Any]) -> tuple[str, int, Markup]:
    """Its title, its width in pixels, and the heat map."""
    tried = [cell for cell in content["cells"] if cell["trials"]]
    fields: list[list[tuple[float, int] | None]] = []
    for row in range(DEPTHS):
        fields.append([])
        for cell in tried:
            found = [right for depth, right in cell["outcomes"] if min(DEPTHS - 1, int(depth * DEPTHS)) == row]
            fields[-1].append((sum(found), len(found)) if found else None)
    depths = [f"{row * 10}–{row * 10 + 10}%" for row in range(DEPTHS)]
    title = f"{short_name(content['model'])}, {content['settings']['wording']} wording"
    return title, svg.heat_width(len(tried)), svg.heat(title, [f"{cell['length']:,}" for cell in tried], depths, fields)


def _perplexity(content: Mapping[str, Any]) -> dict[str, Any]:
    series, rows, told = [], [], []
    for entry in content["models"]:
        name = short_name(entry["model"])
        points = []
        for row in entry["rows"]:
            label = f"{name}, {row['context']:,} tokens before: {row['perplexity']:,.2f}"
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
        told.append(f"{name}: no use of more than {entry['effective_context']:,} tokens before can be seen.")
    across = sorted({point.x for _, points in series for point in points}) or [1, 10]
    ticks = [(x, f"{x - 1:,.0f}") for x in across[:: max(1, len(across) // 8)]]
    label = "tokens before" if content["by"] == "context" else "position"
    x = Axis(min(across), max(across), ticks, label, logarithmic=True)
    bounds = [bound for _, points in series for point in points for bound in (point.low, point.high)] or [1.0, 10.0]
    least, most = min(bounds), max(bounds)
    steps = [least * (most / least) ** (i / 4) for i in range(5)]
    y = Axis(least, most, [(step, f"{step:,.1f}") for step in steps], "perplexity", logarithmic=True)
    return {
        "title": f"by {content['by']}, {content['text']} text",
        "chart": svg.lines("Perplexity", series, x, y),
        "key": svg.key([name for name, _ in series]),
        "rows": rows,
        "lines": told,
    }


def _heads(content: Mapping[str, Any]) -> dict[str, Any]:
    charts, rows = [], []
    priors = {(head["layer"], head["head"]): head for head in content["heads"]}
    most = 0
    for layer in content["posteriors"]:
        profiles = layer["profile"]
        most = max(most, len(profiles))
        n = len(profiles[0])
        distances = sorted({round(n ** (i / 48)) for i in range(49)})
        series = [
            (f"head {head}", [Point(d, max(profile[d - 1], 1e-7), 0, 0, "") for d in distances])
            for head, profile in enumerate(profiles)
        ]
        x = svg.log_axis([1, n], "distance + 1", powers=True)
        y = Axis(1e-6, 1, [(10.0**-e, f"1e-{e}" if e else "1") for e in (0, 2, 4, 6)], "mean attention", True)
        charts.append(svg.lines(f"layer {layer['layer'] + 1}", series, x, y, marked=False))
        for head, profile in enumerate(profiles):
            prior = priors.get((layer["layer"], head))
            told = ", ".join(f"{key} {value:.3g}" for key, value in prior["parameters"].items()) if prior else "none"
            kind = prior["kind"] if prior else "–"
            total = sum(profile) or 1.0
            near, far = sum(profile[:16]) / total, sum(profile[128:]) / total
            rows.append(
                [
                    Cell(str(layer["layer"] + 1), layer["layer"]),
                    Cell(str(head), head),
                    Cell(kind, kind, True),
                    Cell(told, told, True),
                    _share(near),
                    _share(far),
                    *(Cell(f"{layer[key][head]:.3g}", layer[key][head]) for key in ("beta", "scale", "divergence")),
                ]
            )
    key = svg.key([f"head {head}" for head in range(most)])
    return {"title": short_name(content["model"]), "charts": charts, "key": key, "rows": rows}


def _costs(content: Mapping[str, Any]) -> list[list[Cell]]:
    name = short_name(content["model"])
    rows = []
    for row in content["cache"]:
        kept = row.get("kept")
        rows.append(
            [
                Cell(name, name, True),
                Cell(f"{row['length']:,}", row["length"]),
                Cell(f"{row['full'] / 1e6:,.1f}", row["full"]),
                Cell("–" if kept is None else f"{kept / 1e6:,.1f}", -1 if kept is None else kept),
                Cell("–", 2) if kept is None else _share(kept / row["full"]),
            ]
        )
    return rows


def _savings(content: Mapping[str, Any]) -> dict[str, Any]:
    """Stages as a table, and what the page computes with."""
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
