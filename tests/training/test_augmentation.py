"""Temperature jitter and in-batch negatives: what they compute, and that they are gone after training."""

from __future__ import annotations

import math

import pytest
import torch

import bayesattn as ba
from bayesattn.models.bam.configuration import POSITIONS
from bayesattn.training.augmentation import BatchPart, augmented
from bayesattn.training.recipe import Augmentation
from tests.models.cases import make, make_delayed, tokens

positions = pytest.mark.parametrize("position", POSITIONS)


def test_temperatures_change_in_training_only_and_only_inside_of_the_block() -> None:
    model, ids = make(), tokens()
    plain = model(ids).logits
    with augmented(model, Augmentation(temperature_jitter=[0.5, 1.5])):
        assert torch.equal(model(ids).logits, plain)
        model.train()
        assert not torch.equal(model(ids).logits, model(ids).logits)
    assert torch.equal(model(ids).logits, model(ids).logits)
    torch.testing.assert_close(model(ids).logits, plain, atol=1e-4, rtol=1e-4)


def test_a_part_of_a_batch_gets_the_numbers_that_it_gets_in_the_whole() -> None:
    model, ids = make(scalable_softmax=True).train(), tokens(batch=8)
    settings, part = Augmentation(temperature_jitter=[0.3, 3.0], in_batch_negatives=1), BatchPart()
    logits = {}
    with torch.no_grad(), augmented(model, settings, part):
        for size in (8, 4, 2):
            part.batch = 8
            for part.first in range(0, 8, size):
                torch.manual_seed(1)
                logits[size, part.first] = model(ids[part.first : part.first + size]).logits
    for (size, first), rows in logits.items():
        torch.testing.assert_close(rows, logits[8, 0][first : first + size])


def test_nothing_is_left_behind_when_training_fails() -> None:
    model, ids = make().train(), tokens()
    with pytest.raises(KeyboardInterrupt), augmented(model, Augmentation(temperature_jitter=[0.5, 1.5])):
        raise KeyboardInterrupt
    assert torch.equal(model(ids).logits, model(ids).logits)


def test_half_of_the_sequences_keep_their_temperature() -> None:
    model, ids = make(num_hidden_layers=1, scalable_softmax=True).train(), tokens(batch=1).expand(64, -1)
    plain = model(ids).logits[0]
    with torch.no_grad(), augmented(model, Augmentation(temperature_jitter=[2.0, 2.5])):
        different = (model(ids).logits - plain).abs().amax((1, 2)) > 1e-3
    assert 16 < different.sum() < 48


@positions
@pytest.mark.parametrize("scale_prior", [True, False])
@torch.no_grad()
def test_the_last_quarter_sees_other_sequences_at_the_same_distances(
    position: str, scale_prior: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = make(position, scale_prior=scale_prior)
    attention, x = model.model.layers[1].self_attn, torch.randn(3, 10, 32)
    rotary = None if position != "rope" else model.model.rotary_emb(x, torch.arange(10)[None].expand(3, -1))
    two = torch.tensor([0] * 8 + [1] * 2).expand(3, -1)
    monkeypatch.setattr(torch, "randint", lambda most, _: torch.tensor(most - 1))
    q = attention.project_queries(x, rotary)
    k, v = (y.repeat_interleave(2, 1) for y in attention.project_keys(x, rotary))
    for documents in (None, two):
        alone = attention.eval()(x, x, rotary, documents)
        with augmented(model.train(), Augmentation(in_batch_negatives=2)):
            out = attention(x, x, rotary, documents)
        at_hand = attention.prior_of(x, 10, documents, None)
        expected = torch.zeros(3, 4, 10, 8)
        for sequence in range(3):
            for row in range(10):
                first = 8 if documents is not None and row >= 8 else 0
                distance = row - torch.arange(first, row + 1)
                if isinstance(at_hand, ba.GivenPrior):
                    of_rows = at_hand.log_prior(distance)
                    prior = of_rows[min(sequence, len(of_rows) - 1), :, row]
                else:
                    prior = at_hand(distance)
                for head in range(4):
                    # The first two sequences are a group, and the third is alone.
                    group = range(2) if sequence < 2 and row >= 7 and head % 2 == 0 else [sequence]
                    logits = torch.stack([k[c, head, first : row + 1] @ q[sequence, head, row] for c in group]) / 8**0.5
                    r = attention.temperature.s[head] * (math.log(logits.numel()) if head % 2 == 0 else 1.0)
                    logits = r * (logits + prior[head]) if scale_prior else r * logits + prior[head]
                    values = torch.cat([v[c, head, first : row + 1] for c in group])
                    expected[sequence, head, row] = logits.flatten().softmax(0) @ values
        expected = attention.o_proj(expected.transpose(1, 2).flatten(2))
        torch.testing.assert_close(out, expected, atol=1e-4, rtol=1e-4)
        torch.testing.assert_close(out[:, :7], alone[:, :7], atol=1e-5, rtol=1e-5)
    with augmented(model, Augmentation(in_batch_negatives=2)):
        last = attention(x[:, 6:], x, rotary)  # a quarter of four rows is the last
    torch.testing.assert_close(last[:, :3], attention.eval()(x, x, rotary)[:, 6:9], atol=1e-5, rtol=1e-5)


@positions
def test_all_gradients_are_finite(position: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, ids = make(position).train(), tokens(4)
    monkeypatch.setattr(torch, "randint", lambda most, *_: torch.tensor(most - 1))
    with augmented(model, Augmentation(in_batch_negatives=3)):
        model(ids, labels=ids).loss.backward()
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    assert gradients
    assert all(gradient.isfinite().all() for gradient in gradients)


def test_no_query_sees_what_comes_after() -> None:
    model, ids = make(num_hidden_layers=3, scalable_softmax=True).train(), tokens(batch=4)
    changed = ids.clone()
    changed[0, -1] = 3 + (ids[0, -1] - 2) % 37
    with augmented(model, Augmentation(in_batch_negatives=3)):
        for seed in range(5):
            torch.manual_seed(seed)
            before = model(ids).logits[:, :-1]
            torch.manual_seed(seed)
            torch.testing.assert_close(model(changed).logits[:, :-1], before)
        with pytest.raises(ValueError, match="in-batch negatives and padding do not go together"):
            model(ids, attention_mask=(torch.arange(30) < 29).long().expand(4, -1))


@pytest.mark.parametrize("checkpointing", [False, True])
def test_delayed_keys_train_with_negatives(checkpointing: bool) -> None:
    """The recipe of bam-small; checkpointing draws the same factors and groups again."""
    model, ids = make_delayed(key_delay=4, cross_layers=2).train(), tokens(4)
    settings = Augmentation(in_batch_negatives=3, temperature_jitter=[0.5, 2.0])
    gradients = []
    for enabled in (False, checkpointing):
        if enabled:
            model.gradient_checkpointing_enable()
        model.zero_grad()
        torch.manual_seed(3)
        with augmented(model, settings):
            model(ids, labels=ids).loss.backward()
        gradients.append([p.grad.clone() for p in model.parameters() if p.grad is not None])
    for a, b in zip(*gradients, strict=True):
        torch.testing.assert_close(a, b)


def test_a_model_in_float64_trains_with_negatives() -> None:
    model, ids = make().double().train(), tokens(4)
    with augmented(model, Augmentation(in_batch_negatives=3)):
        for seed in range(4):
            torch.manual_seed(seed)
            assert model(ids, labels=ids).loss.isfinite()
