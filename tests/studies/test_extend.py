"""Ways to read past the training length: each is what it says, all get the same prompts, and runs go on."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from transformers import MistralConfig, MistralForCausalLM

import bayesattn as ba
from bayesattn.adapt.extend import extend_any, extensible
from bayesattn.data.contexts import encode_stream
from bayesattn.data.text import documents
from bayesattn.fit.contexts import make_contexts
from bayesattn.fit.prices import measure_prices
from bayesattn.studies.extend import measure, show
from bayesattn.studies.extend.methods import Sizes, load_method, make_sizes
from bayesattn.studies.extend.run import FITTED, METHODS, STUDY, Extend, Settings, run
from bayesattn.studies.runner import Saved
from bayesattn.studies.study import Progress
from tests.bad_inputs.rows import check_refused

SIZES = Sizes(window=64, sinks=4, factor=4.0, group=8)


@pytest.mark.parametrize(("window", "longest", "train"), [(64, 512, 128), (2048, 32768, 8192), (100, 64, 128)])
def test_a_group_is_the_smallest_whose_positions_were_trained(window: int, longest: int, train: int) -> None:
    sizes = make_sizes(window, 4, longest, train)
    farthest = [(longest - 1) // group + window - window // group for group in (sizes.group, sizes.group - 1)]
    assert farthest[0] < train
    assert sizes.group == 2 or farthest[1] >= train
    assert sizes.factor == max(1, longest / train)
    check_refused(lambda: make_sizes(train, 4, longest, train), f"a whole number from 1 to {train - 1:,} is needed")


@pytest.mark.parametrize(("method", "cached"), [("window+sinks", False), ("grouped", False), ("clip", True)])
def test_methods_that_count_from_the_first_token_read_sliding_windows_without_a_cache(
    method: str, cached: bool, tmp_path: Path
) -> None:
    sizes = {"vocab_size": 1024, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1}
    config = MistralConfig(
        num_attention_heads=2, num_key_value_heads=1, sliding_window=100, max_position_embeddings=128, **sizes
    )
    MistralForCausalLM(config).save_pretrained(tmp_path)
    reader = load_method(method, str(tmp_path), "tokenizer", SIZES)
    assert reader.model.generation_config.use_cache is cached
    written = reader.model.generate(torch.randint(2, 1024, (1, 200)), max_new_tokens=2, do_sample=False)
    assert written.shape == (1, 202)


@pytest.mark.parametrize(
    ("method", "settings"),
    [
        ("clip", {"temperature": None}),
        ("clip+log", {}),
        ("grouped", {"temperature": None, "group": 8}),
        ("grouped+log", {"group": 8}),
        ("window+sinks", {"temperature": None, "sinks": 4}),
        ("clip+log+fit", {"near": [[0, 1], [2, 3]]}),
    ],
)
def test_a_method_is_the_model_that_extend_makes(method: str, settings: dict[str, Any]) -> None:
    ids = torch.randint(1024, (1, 200))
    wanted = extend_any(ba.load_model("rope-tiny"), 64, **settings)
    made = load_method(method, "rope-tiny", None, SIZES, settings.get("near"))
    assert torch.equal(made.model(ids).logits, wanted(ids).logits)


def test_methods_of_transformers_have_the_factor() -> None:
    kinds = {"as-is": "default", "interpolation": "linear", "ntk": "dynamic", "yarn": "yarn"}
    for method, kind in kinds.items():
        rope = load_method(method, "rope-tiny", None, SIZES).model.config.rope_parameters
        assert (rope["rope_type"], rope.get("factor", 4.0)) == (kind, 4.0)
    assert {*METHODS} == {*kinds, "clip", "clip+log", FITTED, "grouped", "grouped+log", "window+sinks"}


def settings(**others: Any) -> Settings:
    return Settings(**{"model": "rope-tiny", "window": 64, "lengths": "1x,4x", "trials": 3, "parts": 4, **others})


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A result of two methods at two lengths."""
    file = tmp_path_factory.mktemp("extend") / "extend.json"
    progress: Saved[Extend] = Saved(STUDY, file)
    progress.finish(run(settings(methods="as-is,clip+log"), progress))
    return file


def test_all_methods_have_trials_and_perplexities_of_the_same_prompts_and_text(file: Path) -> None:
    as_is, clip = (method for method in STUDY.result.from_dict(read(file)).methods)
    assert [cell.length for cell in as_is.cells] == [cell.length for cell in clip.cells] == [128, 512]
    assert [cell.right for cell in clip.cells] == [3, 3]
    for one, other in zip(as_is.cells, clip.cells, strict=True):
        assert [depth for depth, _ in one.outcomes] == [depth for depth, _ in other.outcomes]
    assert [peak.length for peak in clip.peaks] == [128, 512]
    assert as_is.perplexity is not None
    assert clip.perplexity is not None
    assert [row.context for row in clip.perplexity.rows] == [0, 128, 256, 384]
    assert clip.perplexity.rows[0].perplexity == pytest.approx(as_is.perplexity.rows[0].perplexity, rel=0.2)


def read(file: Path) -> dict[str, Any]:
    import json

    content: dict[str, Any] = json.loads(file.read_text())
    return content


def test_a_run_goes_on_and_repeats_nothing(file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    copy = tmp_path / "extend.json"
    copy.write_text(file.read_text())
    loaded = []

    def load(method: str, *others: Any) -> Any:
        loaded.append(method)
        return load_method(method, *others)

    monkeypatch.setattr(measure, "load_method", load)
    run(settings(methods="as-is,clip+log"), Saved(STUDY, copy))
    assert loaded == []
    result = run(settings(methods="clip+log,clip", trials=4, perplexity=False), Saved(STUDY, copy))
    assert {*loaded} == {"clip", "clip+log"}
    trials = {method.method: [cell.trials for cell in method.cells] for method in result.methods}
    assert trials == {"as-is": [3, 3], "clip": [4, 4], "clip+log": [4, 4]}


def test_near_heads_are_chosen_once_and_by_a_file_if_there_is_one(
    file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A result of before there was this method gets it, too."""
    copy, model = tmp_path / "extend.json", extensible(ba.load_model("rope-tiny"))
    copy.write_text(file.read_text())
    wanted = {"methods": "clip+log+fit", "keep": "50%", "perplexity": False}
    result = run(settings(**wanted), progress := Saved(STUDY, copy))
    progress.finish(result)
    assert [method.method for method in result.methods] == ["as-is", "clip+log", FITTED]
    fitted = result.methods[-1]
    stream = encode_stream(documents("bundled", "train"), ba.load_tokenizer("rope-tiny"))
    near = ba.near_heads(model, keep=0.5, window=64, texts=[stream])
    assert (fitted.near, fitted.keep) == ([list(head) for head in near], 0.5)
    assert [cell.right for cell in fitted.cells] == [3, 3]
    text = " ".join(part for part in show.tables(result) if isinstance(part, str))
    assert "(6 heads, those but the costliest 50%)" in text
    prices = measure_prices(model, make_contexts([torch.arange(3000) % 1000], 128, 1), [32], 4)
    prices.save(tmp_path / "fit.json")
    with monkeypatch.context() as patched:
        patched.setattr("bayesattn.fit.near_heads.measure_prices", None)  # nothing is measured from here on
        again = run(settings(**wanted), Saved(STUDY, copy))
        assert again.methods[-1].near == fitted.near
        by_file = run(settings(**wanted, fit=tmp_path / "fit.json", trials=1), Saved(STUDY, tmp_path / "new.json"))
        assert by_file.methods[-1].near == [list(head) for head in ba.near_heads(model, prices, 0.5, window=64)]
        check_refused(
            lambda: run(settings(**{**wanted, "keep": "25%"}, fit=tmp_path / "fit.json"), Saved(STUDY, copy)),
            "holds clip+log+fit with other heads, of --keep 50%; choose another file",
        )
        missing = settings(**wanted, fit=tmp_path / "none.json")
        check_refused(lambda: run(missing, Saved(STUDY, tmp_path / "b.json")), "none.json cannot be read")


def test_without_time_nothing_is_tried_and_the_result_says_so() -> None:
    ticks: Iterator[float] = iter(range(10**6))
    progress: Progress[Extend] = Progress(budget=4.0, clock=lambda: float(next(ticks)))
    result = run(settings(methods="clip,clip+log"), progress)
    assert sum(cell.trials for method in result.methods for cell in method.cells) < 6
    assert all(method.perplexity is None for method in result.methods)
    assert any("not tried" in cell.note for method in result.methods for cell in method.cells)


def test_tables_and_pictures_show_all_methods(file: Path, tmp_path: Path) -> None:
    result = STUDY.result.from_dict(read(file))
    console = Console(record=True, width=100, file=(tmp_path / "out").open("w"))
    console.print(*show.tables(result), sep="\n")
    text = " ".join(console.export_text().split())
    assert "3/3" in text
    assert "Perplexity of the held-out part of the bundled text" in " ".join(text.split())
    assert {path.name for path in show.figures(result, tmp_path) if path.suffix == ".png"} == {
        "extend.png", "extend-perplexity.png",
    }  # fmt: skip
    empty = replace(result, methods=[replace(result.methods[0], cells=[], peaks=[], perplexity=None)])
    assert show.figures(empty, tmp_path) == []


def test_methods_that_are_not_there_are_refused() -> None:
    check_refused(lambda: settings(methods="clip,clap").chosen, "--methods has 'clap'; there are as-is")


def test_a_folder_is_named_without_colons() -> None:
    assert settings(model="rope-tiny+clip:64").folder == Path("runs/extend-rope-tiny+clip-64-window-64")
