from __future__ import annotations

import pytest
import torch

from bayesattn import BamConfig, BamForCausalLM, DelayedKeysConfig, DelayedKeysForCausalLM
from bayesattn.errors import UserError
from bayesattn.studies.advise.measure import advise, usable_context

LOCAL_AND_FAR = [[[1.0, 2.0], [1.0, 2.0], [1.0, 4.0], [-1.0, 1.0]]] * 2


def model(**settings: object) -> BamForCausalLM:
    settings |= {"position": "bam", "prior_init": LOCAL_AND_FAR, "prior_epsilon": 1.0, "qk_norm": True}
    config = BamConfig.preset("tiny", num_hidden_layers=2, **settings)
    return BamForCausalLM(config).eval()


def test_local_heads_need_little_and_others_all() -> None:
    advice = advise(model(), torch.randint(2, 1000, (1, 1024)))
    assert len(advice.heads) == 8
    for head in advice.heads:
        if head.kind == "local":
            assert head.prior_growth == pytest.approx(1.0)
            assert head.reach <= 64
        else:
            assert head.prior_growth == pytest.approx(2.0, abs=0.05)
            assert head.reach > 512
            assert head.certain is None
    assert advice.usable == 1024
    assert "use all 1,024, and try more" in str(advice)


def test_the_proven_reach_is_never_less_than_the_measured_one() -> None:
    """The proof holds for every text, so for this one: beyond it outputs change by no more than δ."""
    advice = advise(model(), torch.randint(2, 1000, (1, 2048)), delta=0.05)
    spans = [(head.reach, head.certain) for head in advice.heads if head.certain is not None]
    assert spans
    for reach, certain in spans:
        assert reach <= 2 * max(certain, 16)  # reaches are powers of two


def test_a_model_of_local_heads_has_a_usable_context() -> None:
    local = BamForCausalLM(BamConfig.preset("tiny", position="window", window=32)).eval()
    advice = advise(local, torch.randint(2, 1000, (1, 1024)))
    layers = local.config.num_hidden_layers
    assert {head.reach for head in advice.heads} == {32}
    assert advice.to_dict()["usable"] == advice.usable == 32 * layers
    assert f"Through all layers that is {32 * layers}: more tokens change almost nothing" in str(advice)


@pytest.mark.parametrize("cross_layers", [1, 2, 3])
@torch.no_grad()
def test_beyond_the_usable_context_nothing_changes(cross_layers: int) -> None:
    settings = {"position": "window", "window": 16, "scalable_softmax": False, "cross_layers": cross_layers}
    local = DelayedKeysForCausalLM(DelayedKeysConfig.preset("tiny", **settings)).eval()
    ids = torch.randint(2, 1000, (1, 512))
    usable = advise(local, ids).usable
    assert usable == 16 * (4 - cross_layers)  # layers that read the same states reach as far as one
    whole, part = (local(input_ids=x, logits_to_keep=1).logits for x in (ids, ids[:, -usable:]))
    assert torch.allclose(whole, part, atol=1e-4)
    too_short = local(input_ids=ids[:, -usable // 2 :], logits_to_keep=1).logits
    assert not torch.allclose(whole, too_short, atol=1e-4)


def test_a_key_delay_extends_the_usable_context_by_as_much() -> None:
    near = [[[2.0, 3.0]] * 4] * 3
    settings = {"prior_init": near, "scalable_softmax": False, "qk_norm": True}
    ids = torch.randint(2, 1000, (1, 512))
    without, delayed = (
        advise(DelayedKeysForCausalLM(DelayedKeysConfig.preset("tiny", key_delay=delay, **settings)).eval(), ids)
        for delay in (0, 20)
    )
    assert without.usable == usable_context(without.heads, 512)
    assert delayed.usable == usable_context(delayed.heads, 512) + 20 < 512
    assert len(delayed.heads) == len(without.heads) == 12


SIZES = {"vocab_size": 1024, "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4}


def test_windows_of_other_models_are_seen() -> None:
    from transformers import MistralConfig, MistralModel

    mistral = MistralModel(MistralConfig(**SIZES, num_key_value_heads=2, sliding_window=32)).eval()
    assert {head.reach for head in advise(mistral, torch.randint(2, 1000, (1, 512))).heads} == {32}


def test_encoders_are_refused() -> None:
    from transformers import BertConfig, BertModel

    with pytest.raises(UserError, match="this model attends to later tokens too; advice is only for causal models"):
        advise(BertModel(BertConfig(**SIZES)).eval(), torch.randint(2, 1000, (1, 256)))


def test_models_without_priors_are_measured() -> None:
    from transformers import LlamaConfig, LlamaModel

    advice = advise(LlamaModel(LlamaConfig(**SIZES)).eval(), torch.randint(2, 1000, (1, 256)))
    assert [head.prior_effective for head in advice.heads] == [None] * 4
    assert all(head.effective > 100 for head in advice.heads)


@pytest.mark.parametrize(
    ("length", "delta", "sentence"),
    [
        (256, 3.0, "delta is 3.0; it must be at least 1e-6 and less than 2"),
        (256, 0.0, "delta is 0.0; it must be at least 1e-6 and less than 2"),
        (100, 0.01, "the length is 100 tokens; at least 128 are needed"),
    ],
)
def test_bad_input_gets_one_sentence(length: int, delta: float, sentence: str) -> None:
    with pytest.raises(UserError, match=sentence):
        advise(model(), torch.randint(2, 1000, (1, length)), delta)
