from __future__ import annotations

import dataclasses
import random
from pathlib import Path
from typing import Any, get_type_hints

import pytest
import torch
from rich.console import Console
from transformers import AutoModelForCausalLM

import bayesattn as ba
from bayesattn.adapt.classes import ModelWithPrior
from bayesattn.data.tokenizer import load_tokenizer
from bayesattn.drawing.tables import parameters_text
from bayesattn.evaluation.reader import load_reader
from bayesattn.fit.contexts import SHORTEST
from bayesattn.studies.advise.measure import advise
from bayesattn.studies.advise.run import default_sinks
from bayesattn.studies.advise.show import tables as advise_tables
from bayesattn.studies.cache_shares import run as cache_shares
from bayesattn.studies.cache_shares.measure import Kind, cut, make_trial, model_with, read_prompt, score, widest_window
from bayesattn.studies.cache_shares.run import CacheShares
from bayesattn.studies.cache_shares.show import change
from bayesattn.studies.convergence.layers import load as load_model_and_tokenizer
from bayesattn.studies.fit import run as fit
from bayesattn.studies.fit.run import Fitted
from bayesattn.studies.heads import measure as heads
from bayesattn.studies.heads.adapted import weights_with_priors
from bayesattn.studies.results import load_result
from bayesattn.studies.runner import run_study
from tests.adapt.cases import make_model
from tests.bad_inputs.rows import check_refused

CONSOLE = Console(quiet=True)
LENGTH = 1024


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model of transformers with a tokenizer, and the same with windows for half of its cache."""
    place = tmp_path_factory.mktemp("fit")
    model = make_model("Llama", vocab_size=1024, max_position_embeddings=8192, num_hidden_layers=3)
    model.set_attn_implementation("sdpa")
    model.save_pretrained(place / "llama")
    load_tokenizer("bam-tiny").save_pretrained(place / "llama")
    run_study(fit.STUDY, settings(place), CONSOLE)
    return place


def settings(place: Path, **changes: Any) -> fit.Settings:
    given = {"model": str(place / "llama"), "keep": "50%", "length": LENGTH, "out": place / "half", **changes}
    return fit.Settings(**given)


def fitted(place: Path, name: str = "half") -> Fitted:
    _, result = load_result(place / name / "fit.json")
    assert isinstance(result, Fitted)
    return result


def test_a_fit_is_a_model_that_every_program_loads(folder: Path) -> None:
    loaded = AutoModelForCausalLM.from_pretrained(folder / "half").eval()
    cache = loaded.make_cache()
    with torch.no_grad():
        loaded(torch.randint(3, 1000, (1, LENGTH)), past_key_values=cache)
    result = fitted(folder)
    assert cache.bytes / cache.full_bytes == pytest.approx(result.share)
    assert 0.4 < result.share <= 0.5
    assert len(result.heads) == 6
    assert (folder / "half" / "spans.png").exists()
    assert load_reader(str(folder / "half")).ids("a word")


def test_another_share_measures_nothing_and_gives_another_model(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bayesattn.fit.prices.price_head", lambda *_: pytest.fail("a price is measured"))
    run_study(
        fit.STUDY, settings(folder, keep="0.3", out=folder / "less", prices=folder / "half" / "fit.json"), CONSOLE
    )
    less, half = fitted(folder, "less"), fitted(folder)
    assert less.prices == half.prices
    assert less.share < 0.3 < half.share
    assert less.expected > half.expected
    run_study(fit.STUDY, settings(folder, keep="0.4", out=folder / "less"), CONSOLE)  # in the same folder
    assert 0.3 < fitted(folder, "less").share < 0.4


def test_the_tables_name_all_heads_and_say_how_stable_prices_are(folder: Path) -> None:
    table, *sentences = fit.STUDY.show.tables(fitted(folder))
    assert table.row_count == 6
    assert "rank correlation of " in sentences[-1]
    assert "6 key heads" in sentences[0]
    partial = dataclasses.replace(fitted(folder), heads=[])
    assert len(fit.STUDY.show.tables(partial)) == 1


def test_a_folder_with_a_model_is_not_overwritten(folder: Path) -> None:
    check_refused(
        lambda: run_study(fit.STUDY, settings(folder, out=folder / "llama"), CONSOLE), "has a model already; the name"
    )


@pytest.fixture(scope="module")
def shares(folder: Path) -> CacheShares:
    run_study(cache_shares.STUDY, of_cache(folder), CONSOLE)
    return read_shares(folder)


def of_cache(folder: Path, **changes: Any) -> cache_shares.Settings:
    given = {"keep": "50%,30%", "prompts": 2, "scored": 16, "out": folder / "cache", **changes}
    return cache_shares.Settings(model=str(folder / "llama"), fits=[folder / "half" / "fit.json"], **given)


def read_shares(folder: Path) -> CacheShares:
    _, result = load_result(folder / "cache" / "cache.json")
    assert isinstance(result, CacheShares)
    return result


def test_bytes_are_those_held_and_at_most_those_allowed(shares: CacheShares) -> None:
    full, *others = shares.ways
    assert [(way.method, way.keep) for way in others] == [
        (method, keep) for keep in (0.5, 0.3) for method in ("window", "fitted")
    ]
    assert full.bytes == 2 * 3 * 2 * LENGTH * 8 * 4  # keys and values, layers, heads, tokens, size, bytes
    for way in others:
        assert way.keep is not None
        assert 0.8 * way.keep < way.bytes / full.bytes <= way.keep
        assert len(way.losses) == len(way.found) == 2
        assert all(each >= -1e-6 for each in way.divergences)
    assert full.divergences == [0.0, 0.0]
    assert change(full.losses, full.losses)[0] == 0.0


def test_more_prompts_continue_and_another_share_starts_again(folder: Path, shares: CacheShares) -> None:
    run_study(cache_shares.STUDY, of_cache(folder, prompts=3), CONSOLE)
    more = read_shares(folder)
    assert [way.losses[:2] for way in more.ways] == [way.losses for way in shares.ways]
    assert all(len(way.losses) == 3 for way in more.ways)
    check_refused(lambda: run_study(cache_shares.STUDY, of_cache(folder, seed=1), CONSOLE), "with other seed")


def test_a_full_cache_gives_the_losses_of_one_pass(folder: Path) -> None:
    reader = load_reader(str(folder / "llama"))
    trial = make_trial(reader, reader.stream("bundled"), LENGTH, 16, random.Random(0))
    assert len(trial.prompt) == LENGTH
    _, logits, _ = score(reader.model, trial, *read_prompt(reader.model, trial))
    with torch.no_grad():
        whole = reader.model(torch.cat([trial.prompt, trial.following])[None]).logits[0, LENGTH - 1 : -1]
    assert torch.allclose(logits, whole, atol=1e-4)


def test_a_full_cache_that_is_cut_goes_on_as_one_pass_with_windows_from_there_on(folder: Path) -> None:
    """For one layer, whose keys do not depend on windows, that is the pass with windows."""
    model = make_model("Llama", vocab_size=1024, max_position_embeddings=8192, num_hidden_layers=1)
    prices = ba.fit_priors(model, torch.randint(3, 1000, (LENGTH,)), 0.4, length=LENGTH, contexts=1).prices
    ba.remove_prior(model)
    ids = torch.randint(3, 1000, (1, LENGTH + 20))
    with torch.no_grad():
        full = model(ids[:, :LENGTH]).past_key_values
        with model_with(model, Kind("fitted", 0.4), prices):
            cache = cut(model, full)
            assert 0.3 < cache.bytes / cache.full_bytes <= 0.4
            wanted = model(ids, logits_to_keep=20).logits
            got = model(ids[:, LENGTH:], past_key_values=cache).logits
    assert torch.allclose(got, wanted, atol=1e-4)


def test_a_full_cache_that_is_cut_is_one_that_has_read_a_full_prompt(folder: Path) -> None:
    reader, prices = load_reader(str(folder / "llama")), fitted(folder).prices
    trial = make_trial(reader, reader.stream("bundled"), LENGTH, 16, random.Random(0))
    full, _ = read_prompt(reader.model, trial)
    with model_with(reader.model, Kind("fitted", 0.4), prices) as model, torch.no_grad():
        cache = model.make_cache(full_prompt=True)
        last = model(trial.prompt[None], past_key_values=cache, logits_to_keep=1).logits[0]
        (size, wanted, _), (cut_size, got, _) = (score(model, trial, each, last) for each in (cache, cut(model, full)))
    assert size == cut_size
    assert torch.allclose(got, wanted, atol=1e-3)


def test_prompts_read_with_the_full_cache_are_measured_too(folder: Path) -> None:
    run_study(cache_shares.STUDY, of_cache(folder, prefill="full", out=folder / "cut"), CONSOLE)
    _, result = load_result(folder / "cut" / "cache.json")
    assert isinstance(result, CacheShares)
    full, *others = result.ways
    for way in others:
        assert way.keep is not None
        assert 0.8 * way.keep < way.bytes / full.bytes <= way.keep
        assert max(way.divergences) > 0


def test_a_model_has_windows_only_while_it_is_measured(folder: Path) -> None:
    reader, prices = load_reader(str(folder / "llama")), fitted(folder).prices
    for kind in (Kind("window", 0.4, widest_window(prices, 0.4)), Kind("fitted", 0.4), Kind("full")):
        with model_with(reader.model, kind, prices) as model:
            assert isinstance(model, ModelWithPrior) == (kind.method != "full")
        assert not isinstance(reader.model, ModelWithPrior)


def test_windows_are_not_measured_on_the_text_they_were_fitted_on(folder: Path) -> None:
    text = folder / "words.txt"
    text.write_text(" ".join(str(number) for number in range(3000)))
    run_study(fit.STUDY, settings(folder, text=str(text), contexts=1, out=folder / "words"), CONSOLE)
    given = {"text": str(text), "fits": [folder / "words" / "fit.json"], "out": folder / "same"}
    bad = dataclasses.replace(of_cache(folder), **given)
    check_refused(lambda: run_study(cache_shares.STUDY, bad, CONSOLE), "were fitted on")
    copied = folder / "copy.txt"
    copied.write_text(text.read_text())
    elsewhere = dataclasses.replace(bad, text=str(copied))
    check_refused(lambda: run_study(cache_shares.STUDY, elsewhere, CONSOLE), "were fitted on the tokens of")


def test_prices_of_another_model_are_refused(folder: Path) -> None:
    other = make_model("Llama", seed=1, vocab_size=1024, max_position_embeddings=8192, num_hidden_layers=3)
    check_refused(lambda: ba.fit_priors(other, None, prices=fitted(folder).prices), "of another model")


def test_inspect_shows_windows_attention_and_cache_of_a_fitted_model(folder: Path) -> None:
    reader, result = load_reader(str(folder / "half")), fitted(folder)
    stream = reader.stream("bundled")
    rows = heads.heads(reader)
    widths = {(head.layer, head.head): head.width for head in result.heads}
    for row in rows:  # of the query heads, two for each key head; layers that keep everything have no prior
        width = widths[row.layer, row.head // 2]
        assert parameters_text(row.parameters) in (f"width {width:,}" if width else "width all", "")
    assert len(rows) == 12
    for layer in heads.posteriors(reader, stream, 256):
        for head, profile in enumerate(layer.profile):
            width = widths[layer.layer, head // 2]
            assert width is None or width >= 128 or max(profile[width:]) <= 4 / 128  # on the sinks
    (size,) = heads.cache_sizes(reader, stream, [LENGTH])
    assert size.kept is not None
    assert 0.3 < size.kept / size.full < result.share


def test_attention_with_added_priors_is_what_the_model_mixes_values_with(folder: Path) -> None:
    model = load_reader(str(folder / "half")).model
    inputs, outputs = [], []
    for layer in model.model.layers:
        layer.self_attn.v_proj.register_forward_hook(lambda _, __, output: inputs.append(output))
        layer.self_attn.o_proj.register_forward_hook(lambda _, args, __: outputs.append(args[0]))
    weights = weights_with_priors(model, torch.randint(3, 1000, (1, 300)))
    for layer, values, mixed in zip(weights, inputs, outputs, strict=True):
        v = values[0].unflatten(-1, (-1, 8)).transpose(0, 1).repeat_interleave(2, 0)
        torch.testing.assert_close(mixed[0], (layer @ v).transpose(0, 1).flatten(1), atol=1e-4, rtol=1e-4)


def test_advice_for_a_fitted_model_is_proved_by_its_windows(folder: Path) -> None:
    model, _ = load_model_and_tokenizer(str(folder / "half"))
    assert default_sinks(model) == 4
    advice = advise(model, torch.randint(3, 1000, (1, LENGTH)), sinks=4)
    widths = {(head.layer, head.head): head.width for head in fitted(folder).heads}
    for head in advice.heads:
        width = widths[head.layer, head.head // 2]
        assert head.certain == width
        if width is not None:
            assert head.reach <= 2 * width


def test_advice_for_a_model_without_priors_names_fit(folder: Path) -> None:
    model, _ = load_model_and_tokenizer(str(folder / "llama"))
    assert default_sinks(model) == 4
    ids = torch.randint(3, 1000, (1, 256))
    advice = advise(model, ids, sinks=4, name="llama")
    assert "`bayesattn fit llama --keep 30%`" in advise_tables(advice)[-1]
    kept, dropped = (advise(model, ids, sinks=sinks).heads for sinks in (252, 0))
    assert sum(head.reach for head in kept) < sum(head.reach for head in dropped)


def test_the_help_of_fit_allows_what_can_be_measured() -> None:
    options = get_type_hints(fit.Settings, include_extras=True)
    assert options["length"].__metadata__[0].min == SHORTEST
    assert "shipped" not in options["model"].__metadata__[0].help


def test_one_window_for_all_needs_prices_of_the_same_model() -> None:
    text = torch.randint(3, 64, (LENGTH,))
    prices = ba.fit_priors(make_model("Llama"), text, 0.6, length=LENGTH, contexts=1).prices

    def enter() -> None:
        with model_with(make_model("Llama", seed=1), Kind(cache_shares.WINDOW, None, 64), prices):
            pass

    check_refused(enter, "of another model")
