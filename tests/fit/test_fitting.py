"""Fitting windows to tiny random models, whose attention `make_model` has made sharp."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

import bayesattn as ba
from bayesattn.fit.allotment import ALL
from bayesattn.fit.contexts import make_contexts
from bayesattn.fit.fitting import Fit
from bayesattn.fit.price_files import HeadPrices
from bayesattn.fit.prices import measure_prices, price_head, stability
from bayesattn.fit.reading import LayerInput, read
from tests.adapt.cases import make_model, tokens
from tests.bad_inputs.rows import check_refused

LENGTH = 1024
SETTINGS: dict[str, Any] = {"length": LENGTH, "contexts": 1}


def text(length: int = LENGTH, seed: int = 0) -> torch.Tensor:
    return torch.randint(3, 64, (length,), generator=torch.Generator().manual_seed(seed))


def llama(**settings: Any) -> Any:
    return make_model("Llama", num_hidden_layers=3, max_position_embeddings=4096, **settings)


def test_the_cache_keeps_the_share_that_is_asked_for() -> None:
    for keep in (0.3, 0.6):
        model = llama()
        fit = ba.fit_priors(model, text(), keep, **SETTINGS)
        cache = model.make_cache()
        with torch.no_grad():
            model(text(seed=1)[None], past_key_values=cache)
        assert cache.bytes / cache.full_bytes == pytest.approx(fit.share)
        assert 0.85 * keep < fit.share <= keep


def test_generation_and_reading_in_pieces_are_those_of_the_model_with_windows() -> None:
    model = llama()
    ba.fit_priors(model, text(), 0.4, **SETTINGS)
    x = text(seed=1)[None]
    with torch.no_grad():
        wanted = model(x).logits
        cache = model.make_cache()
        got = [model(part, past_key_values=cache).logits for part in x.split([700, 323, 1], 1)]
    assert torch.allclose(torch.cat(got, 1), wanted, atol=1e-3)
    settings = {"max_new_tokens": 8, "min_new_tokens": 8, "do_sample": False}
    assert torch.equal(model.generate(x, past_key_values=model.make_cache(), **settings), model.generate(x, **settings))


def test_the_result_is_a_normal_folder(tmp_path: Path) -> None:
    model = llama()
    ba.fit_priors(model, text(), 0.4, **SETTINGS)
    model.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    assert torch.equal(loaded(tokens()).logits, model(tokens()).logits)
    cache = loaded.make_cache()
    with torch.no_grad():
        loaded(text()[None], past_key_values=cache)
    assert cache.bytes < 0.4 * cache.full_bytes


def test_query_heads_that_share_keys_share_a_window_and_weights_stay() -> None:
    before, model = llama(), llama()
    fit = ba.fit_priors(model, text(), 0.4, **SETTINGS)
    for (layer, head), width in fit.widths.items():
        prior = getattr(model.model.layers[layer].self_attn, "prior", None)
        if prior is not None:
            widths = prior.prior.width.tolist()[2 * head : 2 * head + 2]
            assert widths == [width or ALL] * 2
    now = dict(model.named_parameters())
    assert all(torch.equal(weights, now[name]) for name, weights in before.named_parameters())


@pytest.mark.parametrize("family", ["Llama", "Qwen3", "GPTNeoX", "GPT2", "Phi"])
def test_a_price_is_the_change_of_the_hidden_state(family: str) -> None:
    """Against a model that gets the window, for the first layer, whose input the window does not change."""
    model = make_model(family, max_position_embeddings=512, num_hidden_layers=1, tie_word_embeddings=False)
    (context,) = make_contexts([text(400)], 400, 1)
    prices = measure_prices(model, [context], [32], 4)
    heads = 4 // len(prices.contexts[0])
    for head in prices.contexts[0]:
        states: dict[str, torch.Tensor] = {}

        def note(layer: LayerInput, states: dict[str, torch.Tensor] = states) -> None:
            states.update(before=layer.before, after=layer.after)

        plain = read(model, context.ids, note, last=400)
        assert plain.shape == (400, 64)
        windows = [32 if each // heads == head.head else ALL for each in range(4)]
        outputs = []
        for prior in (ba.Sinks(ba.Window(4, windows), 4), ba.Uniform(4)):
            changed = ba.add_prior(
                make_model(family, max_position_embeddings=512, num_hidden_layers=1, tie_word_embeddings=False), prior
            )
            block = next(module for name, module in changed.named_modules() if name.endswith(("layers.0", "h.0")))
            attention = next(module for module in block.modules() if hasattr(module, "prior"))
            kept: list[torch.Tensor] = []
            attention.register_forward_hook(lambda _, __, out, kept=kept: kept.append(out[0][0]))
            with torch.no_grad():
                changed(context.ids[None])
            outputs.append(kept[0])
        change = (outputs[0] - outputs[1]).square().sum(-1) / (
            states["before"].norm(dim=-1) * states["after"].norm(dim=-1)
        )
        assert head.text[0] == pytest.approx(change[context.text_rows].mean().item(), rel=1e-3)
        assert head.recall[0] == pytest.approx(change[context.recall_rows].mean().item(), rel=1e-3)


def test_tokens_without_a_state_have_no_price() -> None:
    model = llama()
    with torch.no_grad():
        model.get_input_embeddings().weight[text()[200]] = 0.0
    fit = ba.fit_priors(model, text(), keep=0.6, length=LENGTH, contexts=1)
    assert fit.share <= 0.6
    assert all(price < 100 for row in fit.prices.of_heads(0.3).values() for price in row)


def test_a_head_that_looks_passages_up_has_a_price_where_they_recur() -> None:
    """One head attends to the key of the token after an earlier occurrence, whose place it is given."""
    (context,) = make_contexts([text(1024)], 1024, 1)
    ids, n = context.ids, 1024
    place = {tuple(ids[i : i + 4].tolist()): i + 4 for i in reversed(range(n - 4))}
    found = torch.tensor([place.get(tuple(ids[max(0, i - 3) : i + 1].tolist()), 0) for i in range(n)])
    keys = torch.eye(n)
    far = torch.where(found < torch.arange(n), found, 0)
    q = torch.stack([50 * keys[far], 50 * keys[torch.arange(n)]])  # the other head sees the token itself
    layer = LayerInput(
        0,
        q,
        keys.expand(2, -1, -1),
        torch.randn(2, n, 8),
        1.0,
        torch.ones(n, 16),
        torch.ones(n, 16),
        torch.nn.Linear(16, 16),
    )
    looking, local = (price_head(layer, head, context, [64], 4) for head in (0, 1))
    assert looking.recall[0] > 20 * looking.text[0]
    assert local.recall[0] == pytest.approx(0, abs=1e-9)


def test_a_second_share_measures_nothing(tmp_path: Path) -> None:
    file = tmp_path / "prices.json"
    first = ba.fit_priors(llama(), text(), 0.6, prices=file, **SETTINGS)
    said: list[str] = []
    second = ba.fit_priors(llama(), None, 0.3, prices=file, step=lambda what, *_: said.append(what))
    assert said == []
    assert second.prices == first.prices == ba.load_prices(file)
    assert second.expected > first.expected


def test_a_stopped_measurement_goes_on_where_it_was(tmp_path: Path) -> None:
    file, stops = tmp_path / "prices.json", {"after": 2}

    def stop(*_: object) -> None:
        stops["after"] -= 1
        if stops["after"] < 0:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        ba.fit_priors(llama(), text(), prices=file, step=stop, **SETTINGS)
    part = ba.load_prices(file)
    assert {head.layer for head in part.contexts[0]} == {0, 1}
    check_refused(lambda: ba.fit_priors(llama(), None, prices=file), "was stopped")
    finished = ba.fit_priors(llama(), text(), prices=file, **SETTINGS).prices
    assert finished.contexts[0][: len(part.contexts[0])] == part.contexts[0]
    whole = ba.fit_priors(llama(), text(), **SETTINGS).prices
    assert dataclasses.replace(finished, seconds=0.0) == dataclasses.replace(whole, seconds=0.0)


def test_layers_with_a_window_of_their_own_are_left_as_they_are() -> None:
    model = make_model("Gemma3", max_position_embeddings=4096, num_hidden_layers=2)
    fit = ba.fit_priors(model, text(), 0.3, **SETTINGS)
    assert {layer for layer, _ in fit.widths} == {1}
    assert not hasattr(model.model.layers[0].self_attn, "prior")


def test_a_model_reads_as_before_after_prices_are_measured() -> None:
    model = llama().train()
    before = model.config._attn_implementation
    (context,) = make_contexts([text()], LENGTH, 1)
    measure_prices(model, [context], [64], 4)
    assert model.training
    assert model.config._attn_implementation == before
    assert not any(module._forward_pre_hooks for module in model.modules())


def test_stability_is_the_rank_correlation_of_two_halves() -> None:
    prices = ba.fit_priors(llama(), [text(2 * LENGTH)], 0.5, length=LENGTH, contexts=2).prices
    assert stability(prices, 0.5) is not None
    same = dataclasses.replace(prices, contexts=[prices.contexts[0]] * 2)
    assert stability(same, 0.5) == pytest.approx(1.0)
    assert stability(dataclasses.replace(prices, contexts=prices.contexts[:1]), 0.5) is None


def test_a_summary_says_what_is_kept() -> None:
    prices = ba.Prices(
        fingerprint="",
        texts="",
        length=LENGTH,
        sinks=4,
        widths=[32],
        contexts=[[HeadPrices(0, 0, [0.1], [0.1], 0.5, 9)]],
    )
    fit = Fit({(0, 0): 32, (0, 1): None}, 0.5, 0.45, 0.1, prices)
    assert str(fit) == (
        "45.0% of the cache at 1,024 tokens: 1 of 2 key heads keep everything; the others to the last 32 … 32 tokens "
        "and the first 4"
    )


def test_strings_need_a_tokenizer() -> None:
    words = " ".join(str(number) for number in range(800))
    check_refused(lambda: ba.fit_priors(llama(), words, **SETTINGS), "there is no tokenizer")
    model = llama(vocab_size=1024)
    assert ba.fit_priors(model, [words], 0.5, tokenizer=ba.load_tokenizer("bam-tiny"), **SETTINGS).prices.finished


@pytest.mark.parametrize("keep", [0, 1, -0.5, 30, float("nan"), "30%", None, True])
def test_a_share_outside_of_0_to_1_is_refused(keep: Any) -> None:
    check_refused(lambda: ba.fit_priors(llama(), text(), keep, **SETTINGS), "between 0 and 1")


def test_bad_input_is_one_sentence(tmp_path: Path) -> None:
    model, other = llama(), llama(seed=1)
    fit = ba.fit_priors(llama(), text(), 0.5, **SETTINGS)
    check_refused(lambda: ba.fit_priors(model, text(500), **SETTINGS), "the text has 500 tokens, which is shorter")
    check_refused(lambda: ba.fit_priors(model, text(), length=LENGTH, contexts=2), "shorter than the 2 × 1,024")
    check_refused(lambda: ba.fit_priors(model, text(), 0.01, **SETTINGS), "the smallest cache")
    check_refused(lambda: ba.fit_priors(other, None, prices=fit.prices), "the prices are of another model")
    check_refused(
        lambda: ba.fit_priors(model, text(seed=5), prices=fit.prices, **SETTINGS), "something of that is diff"
    )
    check_refused(lambda: ba.fit_priors(model, None), "neither texts nor prices")
    check_refused(lambda: ba.fit_priors(model, text(), prices=3, **SETTINGS), "prices is 3")
    check_refused(lambda: ba.fit_priors(model, [], **SETTINGS), "a text, or several")
    check_refused(lambda: ba.fit_priors(model, [[0.5] * LENGTH], **SETTINGS), "the numbers of its tokens")
    check_refused(lambda: ba.fit_priors(model, [[10**6] * LENGTH], **SETTINGS), "texts have the token 1,000,000; the")
    check_refused(lambda: ba.fit_priors(model, [[-1] * LENGTH], **SETTINGS), "texts have the token -1; the model's")
    check_refused(lambda: ba.fit_priors(model, text(), length=10), "a whole number of tokens from")
    check_refused(lambda: ba.fit_priors(model, text(), sinks=0, **SETTINGS), "sinks is 0")
    check_refused(lambda: ba.fit_priors(model, text(), length=LENGTH, contexts=0), "contexts is 0")
    check_refused(lambda: ba.fit_priors(model, text(), recall_share=2, **SETTINGS), "recall_share is 2")
    check_refused(lambda: ba.fit_priors(torch.nn.Linear(2, 2), text(), **SETTINGS), "a causal language model of trans")
    check_refused(lambda: ba.fit_priors(ba.load_model("bam-tiny"), text(), **SETTINGS), "no attention that a prior")
    check_refused(lambda: ba.fit_priors(make_model("Mistral"), text(), **SETTINGS), "has a sliding window already")
    check_refused(lambda: ba.fit_priors(make_model("GptOss"), text(), **SETTINGS), "the pruning cache does not work")
    ba.fit_priors(model, None, prices=fit.prices)
    check_refused(lambda: ba.fit_priors(model, None, prices=fit.prices), "has a prior already")
    file = tmp_path / "prices.json"
    for content in ("", "[]", "{}", json.dumps({**fit.prices.to_dict(), "widths": [32]})):
        file.write_text(content)
        check_refused(lambda: ba.load_prices(file), "prices")
