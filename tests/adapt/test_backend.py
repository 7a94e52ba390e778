"""`attn_implementation="bayesattn"` computes what eager attention computes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.adapt.cases import FAMILIES, difference, make_model, packed_positions, padding, tokens
from tests.bad_inputs.rows import check_refused

CLOSE = 1e-5


@pytest.mark.parametrize("family", FAMILIES)
def test_a_text_has_the_logits_of_eager_attention(family: str) -> None:
    x = tokens()
    assert difference(make_model(family), lambda model: model(x).logits) < CLOSE


@pytest.mark.parametrize("family", ["Llama", "Gemma2", "GPT2", "GptOss"])
@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_is_not_seen(family: str, side: str) -> None:
    x = tokens()
    mask = padding(x, side)
    assert difference(make_model(family), lambda model: model(x, attention_mask=mask).logits[mask.bool()]) < CLOSE


@pytest.mark.parametrize("family", ["Llama", "Mistral", "Gemma2", "GptOss"])
def test_packed_documents_are_separate(family: str) -> None:
    x, positions = tokens(), packed_positions(1, 9, 11).expand(2, -1)
    assert difference(make_model(family), lambda model: model(x, position_ids=positions).logits) < CLOSE


def test_sequences_of_a_batch_may_be_packed_differently() -> None:
    x = tokens()
    positions = torch.cat([packed_positions(8, 13), packed_positions(21)])
    assert difference(make_model("Mistral"), lambda model: model(x, position_ids=positions).logits) < CLOSE


@pytest.mark.parametrize("family", ["Llama", "Mistral", "Gemma3", "GptOss", "GPT2"])
def test_generation_is_that_of_eager_attention(family: str) -> None:
    x = tokens(length=9)
    mask = padding(x, "left", 3)

    def scores(model: Any) -> Tensor:
        settings = {"max_new_tokens": 8, "do_sample": False, "output_scores": True, "return_dict_in_generate": True}
        return torch.stack(model.generate(x, attention_mask=mask, **settings).scores)

    assert difference(make_model(family), scores) < CLOSE


def test_a_text_in_pieces_with_a_cache_is_the_text_at_once() -> None:
    x, model = tokens(), make_model("Gemma3")
    model.set_attn_implementation("bayesattn")
    cache, parts = None, []
    for piece in x.split([7, 1, 13], 1):
        output = model(piece, past_key_values=cache, use_cache=True)
        cache, parts = output.past_key_values, [*parts, output.logits]
    assert torch.allclose(torch.cat(parts, 1), model(x).logits, atol=CLOSE)


@pytest.mark.parametrize("family", ["Mistral", "Gemma2", "GptOss"])
@pytest.mark.parametrize("checkpointing", [False, True])
def test_gradients_are_those_of_eager_attention(family: str, checkpointing: bool) -> None:
    x, model = tokens(), make_model(family).train()
    gradients = []
    for implementation in ("eager", "bayesattn"):
        model.set_attn_implementation(implementation)
        if checkpointing and implementation == "bayesattn":
            model.gradient_checkpointing_enable()
        model.zero_grad()
        model(x, labels=x, position_ids=packed_positions(9, 12).expand(2, -1), use_cache=False).loss.backward()
        gradients.append({name: weights.grad for name, weights in model.named_parameters()})
    for name, wanted in gradients[0].items():
        assert torch.allclose(gradients[1][name], wanted, atol=1e-6), name


def test_half_precision_is_as_good_as_eager_attention() -> None:
    x, model = tokens(), make_model("Llama")
    model.set_attn_implementation("eager")
    wanted = model(x).logits
    model.bfloat16()
    plain = (model(x).logits - wanted).abs().max()
    model.set_attn_implementation("bayesattn")
    assert (model(x).logits - wanted).abs().max() <= 2 * plain


def test_a_compiled_model_has_the_same_logits() -> None:
    x, model = tokens(), make_model("Mistral", num_hidden_layers=1)
    model.set_attn_implementation("bayesattn")
    given = {"attention_mask": padding(x, "left"), "use_cache": False}
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    with torch.no_grad():
        assert torch.allclose(compiled(x, **given).logits, model(x, **given).logits, atol=CLOSE)


def test_an_encoder_sees_in_both_directions() -> None:
    from transformers import BertConfig, BertModel

    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 4}
    model, x = BertModel(BertConfig(vocab_size=64, **sizes)).eval(), tokens()
    mask = padding(x, "right")
    assert difference(model, lambda model: model(x, attention_mask=mask).last_hidden_state[mask.bool()]) < CLOSE


def test_what_cannot_be_is_refused_in_one_sentence() -> None:
    x, model = tokens(), make_model("Llama", attention_dropout=0.1)
    model.set_attn_implementation("bayesattn")
    square = torch.ones(2, 1, 21, 21, dtype=torch.bool)
    holes = padding(x, "left")
    holes[0, 0] = 1
    check_refused(lambda: model(x, attention_mask=square), "documents, padding and a window")
    check_refused(lambda: model(x, attention_mask=holes), "zeros between ones")
    check_refused(lambda: model(x, output_attentions=True), "attn_implementation='eager' to see them")
    check_refused(lambda: model.train()(x), "set attention_dropout to 0 to train")
    check_refused(
        lambda: model.eval().generate(x, max_new_tokens=2, cache_implementation="static"), "use a DynamicCache"
    )


def test_an_encoder_decoder_model_is_refused() -> None:
    from transformers import BartConfig, BartModel

    sizes = {"d_model": 32, "encoder_layers": 1, "decoder_layers": 1, "encoder_ffn_dim": 48, "decoder_ffn_dim": 48}
    heads = {"encoder_attention_heads": 4, "decoder_attention_heads": 4}
    model = BartModel(BartConfig(vocab_size=64, **sizes, **heads)).eval()
    model.set_attn_implementation("bayesattn")
    check_refused(lambda: model(tokens(), decoder_input_ids=tokens(length=5)), "of a text to itself")
