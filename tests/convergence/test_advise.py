from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from bayesattn import BamConfig, BamForCausalLM
from bayesattn.convergence.advise import advise
from bayesattn.errors import UserError

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


def test_what_is_certain_is_never_less_than_what_is_measured() -> None:
    """The proof holds for every text, so for this one: beyond it outputs change by no more than δ."""
    found = advise(model(), torch.randint(2, 1000, (1, 2048)), delta=0.05)
    told = [head for head in found.heads if head.certain is not None]
    assert told
    for head in told:
        assert head.certain is not None
        assert head.reach <= 2 * max(head.certain, 16)  # reaches are told in factors of two


def test_a_model_of_local_heads_has_a_usable_context() -> None:
    local = BamForCausalLM(BamConfig.preset("tiny", position="window", window=32)).eval()
    advice = advise(local, torch.randint(2, 1000, (1, 1024)))
    layers = local.config.num_hidden_layers
    assert {head.reach for head in advice.heads} == {32}
    assert advice.to_dict()["usable"] == advice.usable == 32 * layers
    assert f"Through all layers that is {32 * layers}: more changes next to nothing" in str(advice)


@pytest.mark.parametrize("reading", [1, 2, 3])
@torch.no_grad()
def test_beyond_the_usable_context_nothing_changes(reading: int) -> None:
    settings = {"position": "window", "window": 16, "scalable_softmax": False, "reading_layers": reading}
    local = BamForCausalLM(BamConfig.preset("tiny", **settings)).eval()
    ids = torch.randint(2, 1000, (1, 512))
    usable = advise(local, ids).usable
    assert usable == 16 * (4 - reading)  # layers that look at the same states reach as far as one
    whole, part = (local(input_ids=x, logits_to_keep=1).logits for x in (ids, ids[:, -usable:]))
    assert torch.allclose(whole, part, atol=1e-4)


def test_hindsight_reaches_as_much_further() -> None:
    near = [[[2.0, 3.0]] * 4] * 3
    settings = {"prior_init": near, "scalable_softmax": False, "qk_norm": True}
    ids = torch.randint(2, 1000, (1, 512))
    with_none, with_some = (
        advise(BamForCausalLM(BamConfig.preset("tiny", hindsight=hindsight, **settings)).eval(), ids)
        for hindsight in (0, 20)
    )
    assert with_none.hindsight == 0
    assert with_some.usable == replace(with_some, hindsight=0).usable + 20
    assert len(with_some.heads) == len(with_none.heads) == 12


def test_windows_of_other_models_are_seen_and_encoders_refused() -> None:
    from transformers import BertConfig, BertModel, MistralConfig, MistralModel

    sizes = {"vocab_size": 1024, "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4}
    mistral = MistralModel(MistralConfig(**sizes, num_key_value_heads=2, sliding_window=32)).eval()
    assert {head.reach for head in advise(mistral, torch.randint(2, 1000, (1, 512))).heads} == {32}
    with pytest.raises(UserError, match="this model sees what comes after a token too"):
        advise(BertModel(BertConfig(**sizes)).eval(), torch.randint(2, 1000, (1, 256)))


def test_models_without_priors_are_measured() -> None:
    from transformers import LlamaConfig, LlamaModel

    config = LlamaConfig(vocab_size=1024, hidden_size=32, num_hidden_layers=1, num_attention_heads=4)
    advice = advise(LlamaModel(config).eval(), torch.randint(2, 1000, (1, 256)))
    assert [head.prior_effective for head in advice.heads] == [None] * 4
    assert all(head.effective > 100 for head in advice.heads)


def test_bad_input_gets_one_sentence() -> None:
    with pytest.raises(UserError, match=r"delta is 3; a change between 1e-6 and 2"):
        advise(model(), torch.randint(2, 1000, (1, 256)), delta=3)
    with pytest.raises(UserError, match="advice is asked for 100 tokens; at least 128 are needed"):
        advise(model(), torch.randint(2, 1000, (1, 100)))
