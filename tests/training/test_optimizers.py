from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from torch import nn

import bayesattn as ba
from bayesattn.training.optimizers import Muon, make_optimizer, make_schedule, orthogonal, parameter_groups
from bayesattn.training.recipe import Training


def small() -> ba.BamForCausalLM:
    torch.manual_seed(0)
    return ba.BamForCausalLM(ba.BamConfig(vocab_size=20, hidden_size=16, num_hidden_layers=2, num_attention_heads=2))


def test_every_parameter_is_in_one_group() -> None:
    model = small()
    groups = parameter_groups(model)
    together = [id(p) for group in groups.values() for p in group]
    assert sorted(together) == sorted(id(p) for p in model.parameters())
    assert {p.shape[0] for p in groups["prior"]} == {2}
    assert len(groups["prior"]) == 2 * 2 + 1  # alpha and beta; s in the last layer
    assert len(groups["matrix"]) == 2 * 7


@pytest.mark.parametrize("name", ["muon", "adamw", "radam"])
def test_priors_have_their_own_rate_and_no_decay(name: str) -> None:
    model = small()
    optimizer = make_optimizer(model, Training(optimizer=name, prior_lr=0.5, lr=0.1, matrix_lr=0.3, warmup=0))
    prior = {id(p) for p in parameter_groups(model)["prior"]}
    seen = 0
    for group in optimizer.param_groups:
        inside = {id(p) for p in group["params"]}
        seen += len(inside)
        if inside & prior:
            assert inside == prior
            assert (group["lr"], group["weight_decay"]) == (0.5, 0.0)
        if inside == {id(p) for p in parameter_groups(model)["matrix"]}:
            assert group["lr"] == (0.3 if name == "muon" else 0.1)
            assert group["weight_decay"] == 0.01
    assert seen == len(list(model.parameters()))


@pytest.mark.parametrize("name", ["muon", "adamw", "radam"])
def test_a_restored_optimizer_goes_on_as_if_nothing_had_happened(name: str) -> None:
    ids = torch.randint(20, (2, 12), generator=torch.Generator().manual_seed(0))
    settings = Training(optimizer=name, steps=6, warmup=2)

    def steps(model: ba.BamForCausalLM, parts: tuple, number: int) -> None:
        optimizer, schedule = parts
        for _ in range(number):
            model(ids, labels=ids).loss.backward()
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()

    def make(model: ba.BamForCausalLM) -> tuple:
        optimizer = make_optimizer(model, settings)
        return optimizer, make_schedule(optimizer, settings)

    whole = small()
    steps(whole, make(whole), 6)
    first, second = small(), small()
    before = make(first)
    steps(first, before, 3)
    second.load_state_dict(first.state_dict())
    after = make(second)
    for old, new in zip(before, after, strict=True):
        new.load_state_dict(old.state_dict())
    steps(second, after, 3)
    for a, b in zip(whole.parameters(), second.parameters(), strict=True):
        torch.testing.assert_close(a, b, atol=1e-7, rtol=1e-6)


def test_the_schedule_rises_and_falls() -> None:
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=1.0)
    schedule = make_schedule(optimizer, Training(steps=100, warmup=10, final=0.1))
    rates = []
    for _ in range(101):
        rates.append(schedule.get_last_lr()[0])
        optimizer.step()
        schedule.step()
    assert rates[0] < rates[5] < rates[10] == 1.0
    assert rates[100] == pytest.approx(0.1)
    assert all(a >= b for a, b in pairwise(rates[10:]))


def test_muon_makes_updates_nearly_orthogonal_as_torchs_does() -> None:
    torch.manual_seed(0)
    for shape in ((3, 8, 16), (2, 16, 8)):
        values = torch.linalg.svdvals(orthogonal(torch.randn(shape)))
        assert values.min() > 0.5
        assert values.max() < 1.3
    weight = torch.randn(24, 16)
    ours, theirs = nn.Parameter(weight.clone()), nn.Parameter(weight.clone())
    optimizers = [Muon([ours], lr=0.1, weight_decay=0.1), torch.optim.Muon([theirs], lr=0.1, weight_decay=0.1)]
    for step in range(3):
        gradient = torch.randn(24, 16, generator=torch.Generator().manual_seed(step))
        for parameter, optimizer in zip((ours, theirs), optimizers, strict=True):
            parameter.grad = gradient.clone()
            optimizer.step()
    torch.testing.assert_close(ours, theirs, atol=0.02, rtol=0.05)  # theirs iterates in bfloat16
