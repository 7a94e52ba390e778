"""The page, as text and in a real browser."""

from __future__ import annotations

import re
import shutil
import subprocess
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from bayesattn.cli import app
from bayesattn.compute import cards
from bayesattn.compute.flops import attention_flops, matmul_flops, training_flops
from bayesattn.compute.savings import short_saving
from bayesattn.errors import UserError
from bayesattn.evaluation.cells import Cell
from bayesattn.report.page import make_page
from bayesattn.studies.results import find_results, read_results, write_results

BROWSER = shutil.which("chromium") or shutil.which("google-chrome")
OFFLINE = (
    "--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking",
    "--disable-sync", "--disable-component-update", "--enable-logging=stderr", "--virtual-time-budget=2000",
)  # fmt: skip


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    task = {
        "wording": "standard", "haystack": "bland", "digits": 5, "teacher_forced": False, "seed": 0, "depths": None,
    }  # fmt: skip
    for name, shares in {"bam": {128: 20, 512: 19, 8192: 18}, "<rope>": {128: 20, 512: 3, 8192: 0}}.items():
        cells = [
            Cell(n, tuple((t / 20, t < right) for t in range(20)), 4.0, 20).to_dict() for n, right in shares.items()
        ] + [Cell(64_000, note="not tried: none right at 8,192").to_dict()]
        content = {
            "model": name,
            "train_length": 128,
            "settings": task,
            "command": "bayesattn eval passkey",
            "cells": cells,
        }
        write_results(tmp_path / name.strip("<>") / "passkey.json", "passkey", content)
    row = {
        "windows": 8, "low": 20.0, "high": 30.0, "change": -0.1, "change_low": -0.2, "change_high": 0.0, "seconds": 1.0,
        "losses": [3.2] * 8,
    }  # fmt: skip
    rows = [row | {"context": context, "perplexity": 25.0} for context in (0, 512)]
    models = [{"model": "bam", "train_length": 128, "effective_context": 512, "rows": rows}]
    write_results(
        tmp_path / "perplexity.json", "perplexity", {"by": "context", "text": "bundled", "windows": 8, "models": models}
    )
    profile = [[0.5 / (d + 1) ** 2 for d in range(200)], [0.001] * 200]
    layer = {"layer": 0, "beta": [1.0, 0.1], "scale": [2.0, 9.0], "divergence": [0.1, 0.0], "profile": profile}
    head = {
        "layer": 0, "kind": "local", "parameters": {"beta": 1.0}, "span_3": 77, "span_6": 99, "effective": [1.0, 2.5],
    }  # fmt: skip
    content = {
        "model": "bam", "lengths": [1024, 4096], "heads": [head | {"head": n} for n in range(2)],
        "posteriors": [layer | {"prior": [[0.01] * 200, [0.002] * 200]}],
        "cache": [{"length": 1024, "full": 10**7, "kept": 10**6}, {"length": 4096, "full": 4 * 10**7}],
    }  # fmt: skip
    write_results(tmp_path / "inspect.json", "inspect", content)
    return tmp_path


def in_browser(file: Path, folder: Path, width: str = "1000,800") -> str:
    """The opening tag of the body after all scripts ran; anything on the console is an error."""
    command = [BROWSER or "", *OFFLINE, f"--window-size={width}", f"--user-data-dir={folder / 'profile'}"]
    done = subprocess.run([*command, "--dump-dom", file.as_uri()], capture_output=True, text=True, timeout=120)
    body = re.search(r"<body[^>]*>", done.stdout)
    assert body is not None, done.stderr
    assert "CONSOLE" not in done.stderr, done.stderr
    return body[0]


class Outline(HTMLParser):
    """Checks that elements close in order, and collects what matters."""

    void = frozenset({"meta", "line", "path", "circle", "polygon", "rect", "input", "br"})

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.images: list[dict[str, Any]] = []
        self.addresses: list[str] = []

    def handle_starttag(self, tag: str, attributes: Any) -> None:
        given = dict(attributes)
        if tag not in self.void:
            self.open.append(tag)
        if tag == "svg" and "aria-hidden" not in given:
            self.images.append(given)
        self.addresses += [given[key] for key in ("href", "src") if key in given]

    def handle_endtag(self, tag: str) -> None:
        if tag not in self.void:
            assert self.open.pop() == tag


def test_a_page_is_whole_self_contained_and_has_text_for_every_picture(runs: Path) -> None:
    page = make_page([runs], title="Mine & yours")
    outline = Outline()
    outline.feed(page)
    assert outline.open == []
    assert len(outline.images) == 6  # two curves, two heat maps, two heads
    assert all(image["role"] == "img" and image["aria-label"] for image in outline.images)
    assert all(address.startswith("#") for address in outline.addresses)
    assert "Mine &amp; yours" in page
    assert "&lt;rope&gt;" in page
    assert "<rope>" not in page
    for text in ("18 of 20", "not tried: none right at 8,192", "bayesattn eval passkey", "10.0%", "25.00"):
        assert text in page


def needle_file(file: Path, tasks: dict[str, dict[int, list[float]]], model: str = "bam") -> dict[str, Any]:
    """Scores by task and length; several tasks in one file tell theirs cell by cell."""
    cells = [
        Cell(n, tuple((0.0, score) for score in scores), 1.0, len(scores)).to_dict() | {"task": task}
        for task, lengths in tasks.items()
        for n, scores in lengths.items()
    ]
    settings = {"name": ",".join(tasks), "seed": 0, "depths": None}
    if len(tasks) == 1:
        cells = [{key: value for key, value in cell.items() if key != "task"} for cell in cells]
    content = {"model": model, "train_length": 128, "settings": settings, "cells": cells}
    write_results(file, "needle", content)
    return content


def test_needles_have_a_chart_for_each_task(tmp_path: Path) -> None:
    single, several = {"single": {512: [1.0, 0.0]}}, {"multivalue": {1024: [0.75, 1.0, 0.0]}}
    needle_file(tmp_path / "needle-single.json", single)
    needle_file(tmp_path / "needle-all.json", single | several)  # the first again, and another
    needle_file(tmp_path / "needle-rope.json", single, model="rope")
    page = make_page([tmp_path])
    assert re.findall(r"<h3>(\w+)</h3>", page) == ["single", "multivalue"]
    assert page.count("Mean share of answers found</span>") == 2
    assert "bam, 1,024 tokens: 1.75 of 3" in page
    assert page.count("bam, 512 tokens: 1 of 2</title>") == page.count("rope, 512 tokens: 1 of 2</title>") == 1
    outline = Outline()
    outline.feed(page)
    assert (outline.open, len(outline.images)) == ([], 2)


def test_heads_are_shown_with_their_priors(runs: Path) -> None:
    page = make_page([runs])
    assert 'aria-label="layer 1, head 1: on the text, prior. The table beside it has the numbers."' in page
    for text in (">77<", ">99<", "effective, of 4,096", ">2.5<", "128 to 199 back", "200 and more", ">80.0%<"):
        assert text in page
    for text in ("kept, bytes a token", ">9,766<", ">977<"):
        assert text in page
    content = read_results(runs / "inspect.json")
    for layer in content["posteriors"]:
        del layer["prior"]  # as files had none, and other models have none
    write_results(runs / "inspect.json", "inspect", content)
    page = make_page([runs])
    assert 'aria-label="layer 1: head 0, head 1. The table beside it has the numbers."' in page
    write_results(runs / "inspect.json", "inspect", {**content, "heads": []})
    assert "effective, of" not in make_page([runs])


def test_results_of_other_settings_are_distinguished(runs: Path) -> None:
    content = read_results(runs / "bam" / "passkey.json")
    common = {key: content[key] for key in ("model", "train_length", "cells", "command")}
    for number, changes in enumerate(
        ({"seed": 1}, {"wording": "train", "needles": [1, 1]}, {"wording": "train", "needles": [3, 5]}, {"depths": 5})
    ):
        settings = {**content["settings"], **changes}
        write_results(runs / f"passkey-{number}.json", "passkey", {**common, "settings": settings})
    page = make_page([runs])
    for text in ("bam, seed 0", "bam, seed 1", "1 to 1 keys", "3 to 5 keys", "greedy generation, 5 depths"):
        assert text in page
    for number in (2, 3):  # of another folder with a model of the same name, say
        write_results(runs / f"passkey-{number + 2}.json", "passkey", {**common, "settings": content["settings"]})
    captions = re.findall(r"<figcaption>([^<]+)</figcaption>", make_page([runs]))
    maps = [caption for caption in captions if "wording" in caption]
    assert len(set(maps)) == len(maps) == 8
    assert "bam, seed 0 (2), standard wording, bland haystack, 5 digits, greedy generation" in maps


def test_a_file_in_a_folder_is_taken_once(runs: Path) -> None:
    assert len(find_results([runs, runs / "inspect.json"])) == 4


@pytest.mark.parametrize(
    ("name", "text", "sentence"),
    [
        ("none", None, "there is no file or folder .*none"),
        (".", None, "has no results; a file or folder that a study has written is needed"),
        ("other.json", '{"version": 1, "kind": "bench"}', "has results of bench; no study writes these"),
        ("cut.json", '{"version": 1, "kind": "passkey"}', "cut.json is not a whole file of results: it has no model"),
        ("old.json", '{"version": 0, "kind": "passkey"}', "version 0; this is version 1, measure again"),
        ("list.json", "[]", "list.json is not a file of results"),
        ("text.json", "{", "text.json is not a file of results: it is not JSON"),
    ],
)
def test_what_is_no_result_gets_one_sentence(name: str, text: str | None, sentence: str, tmp_path: Path) -> None:
    if text is not None:
        (tmp_path / name).write_text(text)
    with pytest.raises(UserError, match=sentence):
        make_page([tmp_path / name])


@pytest.mark.skipif(BROWSER is None, reason="no Chromium")
def test_in_a_browser_it_renders_sorts_and_shows_labels(runs: Path, tmp_path: Path) -> None:
    act = """<script>{
      const head = [...document.querySelectorAll("th button")].find(b => b.textContent === "tokens");
      const column = () => [...head.closest("table").tBodies[0].rows].map(r => r.cells[1].textContent).join(" ");
      head.click(); const up = column(); head.click(); const down = column();
      const point = document.querySelector(".point[data-label]");
      point.dispatchEvent(new MouseEvent("mouseover", {bubbles: true}));
      const tip = document.getElementById("tip");
      document.body.dataset.up = up; document.body.dataset.down = down;
      document.body.dataset.tip = tip.hidden ? "hidden" : tip.textContent;
      document.body.dataset.wide = document.documentElement.scrollWidth <= innerWidth ? "fits" : "too wide";
    }</script></body>"""
    file = tmp_path / "page.html"
    file.write_text(make_page([runs]).replace("</body>", act))
    for width in ("1000,800", "400,800"):
        body = in_browser(file, tmp_path, width)
        assert 'data-up="128 128 512 512 8,192 8,192 64,000 64,000"' in body
        assert 'data-down="64,000 64,000 8,192 8,192 512 512 128 128"' in body
        assert "128 tokens: 20 of 20" in body
        assert 'data-wide="fits"' in body


@pytest.mark.skipif(BROWSER is None, reason="no Chromium")
def test_the_sliders_compute_what_python_does(tmp_path: Path) -> None:
    out = tmp_path / "savings"
    done = CliRunner().invoke(app, ["savings", "--schedule", "15T@8K,100B@128K", "--mfu", "0.5", "--out", str(out)])
    assert done.exit_code == 0, done.output
    act = """<script>{
      const form = document.querySelector("form.sliders");
      const read = () => [...form.querySelectorAll("[data-result]")].map(e => e.textContent).join(" ");
      document.body.dataset.first = read();
      form.elements.context.value = Math.log10(8192); form.elements.price.value = 4;
      form.dispatchEvent(new Event("input")); document.body.dataset.second = read();
    }</script></body>"""
    file = tmp_path / "page.html"
    file.write_text(make_page([out]).replace("</body>", act))
    shown = in_browser(file, tmp_path)
    llama = cards.find("llama-3.1-405b")
    for name, length, price in (("first", 131_072, 2.0), ("second", 8192, 4.0)):
        flops = training_flops(llama, 100e9, length)
        hours = flops / (989e12 * 0.5) / 3600
        attention = attention_flops(llama, length) / (attention_flops(llama, length) + matmul_flops(llama))
        saved = short_saving(llama, length, 512)
        attribute = re.search(rf'data-{name}="([^"]*)"', shown)
        assert attribute is not None, shown
        results = attribute[1].split()
        assert results[0] == f"{flops:.3e}"
        assert results[1:3] == [f"{round(hours):,}", f"{round(hours * price):,}"]
        assert results[3:] == [f"{attention:.1%}", f"{saved:.1%}"]
