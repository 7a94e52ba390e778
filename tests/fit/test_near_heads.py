"""`near_heads`: chosen by prices of windows on short text, or by prices measured there."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import bayesattn as ba
from bayesattn.adapt.extend import extensible
from bayesattn.fit.contexts import make_contexts
from bayesattn.fit.fitting import RECALL_SHARE
from bayesattn.fit.prices import measure_prices
from tests.adapt.cases import make_model
from tests.bad_inputs.rows import check_refused

WIDTHS = [16, 64]


def text(length: int = 2000) -> Tensor:
    return torch.randint(3, 64, (length,), generator=torch.Generator().manual_seed(5))


def prices_of(model: Any) -> ba.Prices:
    return measure_prices(model, make_contexts([text()], 192, 2), WIDTHS, 4)


def test_heads_with_a_far_part_are_those_that_the_widest_window_changes_most(tmp_path: Path) -> None:
    model = make_model("Llama")
    prices = prices_of(model)
    prices.save(tmp_path / "prices.json")
    by_head = prices.of_heads(RECALL_SHARE)
    for window, place in ((16, 0), (63, 0), (64, 1), (200, 1)):
        wanted = sorted(sorted(by_head, key=lambda head: by_head[head][place])[:3])
        for given in (prices, tmp_path / "prices.json", str(tmp_path / "prices.json")):
            assert ba.near_heads(model, given, keep=0.3, window=window) == wanted
    assert len(ba.near_heads(model, prices, keep=0.5, window=64)) == 2


def test_without_prices_a_window_of_a_quarter_of_the_text_is_measured() -> None:
    model = make_model("Llama")
    near = ba.near_heads(model, keep=0.5, window=200, texts=[text()], length=128)
    prices = measure_prices(model, make_contexts([text()], 128, 15), [32], 4)
    assert near == ba.near_heads(model, prices, keep=0.5, window=32)
    ba.extend(model, 200, near=near)
    check_refused(lambda: ba.near_heads(model, texts=[text()]), "has a prior already")


def test_heads_of_a_layer_with_temperatures_are_measured_with_them() -> None:
    """A temperature of c is a factor of c on the queries, which the prices must show."""
    scaled, plain = make_model("Llama"), make_model("Llama")
    with torch.no_grad():
        for layer in plain.model.layers:
            layer.self_attn.q_proj.weight.mul_(2.5)
    ba.add_prior(scaled, ba.Uniform(4), ba.ScalableSoftmax(4, init=2.5, grows_with_length=[False] * 4))
    one, other = (prices_of(model).of_heads(RECALL_SHARE) for model in (scaled, plain))
    for head, row in one.items():
        assert row == pytest.approx(other[head], rel=1e-3)


def test_our_rotary_models_are_measured_as_what_extend_makes_of_them() -> None:
    model = extensible(ba.load_model("rope-tiny"))
    tokens = torch.randint(1024, (3000,), generator=torch.Generator().manual_seed(1))
    near = ba.near_heads(model, keep=0.5, window=64, texts=tokens)
    assert len(near) == 6
    assert ba.extend(model, 64, near=near).config.prior["extension"]["near"] == [list(head) for head in near]


def test_what_cannot_be_chosen_is_refused() -> None:
    model = make_model("Llama")
    prices = prices_of(model)
    stopped = replace(prices, finished=False)
    for run, words in (
        (lambda: ba.near_heads(model), "by prices of bayesattn fit, or by texts"),
        (lambda: ba.near_heads(model, prices, texts=[text()]), "give one"),
        (lambda: ba.near_heads(model, prices, keep=1.0), "keep is 1.0"),
        (lambda: ba.near_heads(model, prices, keep=0.1), "keep is 10.00% of 4 key/value heads, which is none"),
        (lambda: ba.near_heads(model, prices, window=8), "window is 8, and prices are of windows from 16 tokens on"),
        (lambda: ba.near_heads(model, 3), "prices is 3; prices of fit_priors, or a file with them"),  # type: ignore[arg-type]
        (lambda: ba.near_heads(model, stopped), "the measurement of the prices was stopped"),
        (lambda: ba.near_heads(make_model("Llama", seed=1), prices), "of another model"),
        (lambda: ba.near_heads(model, texts=[text(50)], length=96), "has 50 tokens"),
        (lambda: ba.near_heads(model, texts=[text()], length=64), "a whole number of tokens from 96"),
    ):
        check_refused(run, words)  # type: ignore[arg-type]
