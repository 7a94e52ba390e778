"""Checkpoints of the BAM authors become our models: the same logits, or one sentence."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import bayesattn as ba
from bayesattn.adapt.bam_checkpoint import POSITIONS, build_model, read_checkpoint
from bayesattn.adapt.published import published_logits
from bayesattn.errors import UserError
from tests.adapt.published_models import forward, random_weights, save, with_old_names
from tests.bad_inputs.rows import check_sentence

NAMES = ("nope", "sinusoidal", "rotary", "alibi", "bam", "cabam")
ENCODINGS = [name + scaled for name in NAMES for scaled in ("", "_ssmax")]
IDS = [7, 3, 49, 0, 7, 21, 14, 3, 8, 8, 30]


def logits(model: ba.BamForCausalLM) -> Tensor:
    with torch.no_grad():
        return model(torch.tensor([IDS])).logits[0]


def assert_same(folder: Path, expected: Tensor) -> None:
    checkpoint = read_checkpoint(folder)
    model = build_model(checkpoint)
    torch.testing.assert_close(logits(model).double(), expected, atol=1e-4, rtol=0)
    torch.testing.assert_close(logits(model.double()), expected, atol=1e-10, rtol=0)
    torch.testing.assert_close(published_logits(checkpoint, torch.tensor([IDS]))[0], expected, atol=1e-10, rtol=0)


@pytest.mark.parametrize("encoding", ENCODINGS)
def test_a_converted_model_has_the_published_forward_pass(encoding: str, tmp_path: Path) -> None:
    weights = random_weights(encoding)
    assert_same(save(tmp_path, encoding, weights, "_orig_mod.module."), forward(encoding, weights, IDS))


@pytest.mark.parametrize(
    ("encoding", "changes"),
    [
        *((name, {}) for name in ENCODINGS),
        *(("bam" + scaled, {"learn_centre": True}) for scaled in ("", "_ssmax")),
        *(("bam" + scaled, {"share_prior": True}) for scaled in ("", "_ssmax")),
    ],
)
def test_a_published_preset_has_the_published_forward_pass(
    encoding: str, changes: dict[str, bool], tmp_path: Path
) -> None:
    """Its settings say the same as the args.json of a run: epsilons, frequencies, sinusoids, what is scaled."""
    weights = random_weights(encoding, changes.get("share_prior", False), multiple_of=1)
    run = read_checkpoint(save(tmp_path, encoding, weights, multiple_of=1))
    name, _, scaled = encoding.partition("_")
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 50, "prior_hidden": 8}
    kind = {"position": POSITIONS[name], "scalable_softmax": bool(scaled), "scale_prior": name != "alibi"}
    model = build_model(replace(run, config=ba.BamConfig.preset("l12", **sizes, **kind, **changes))).double()
    expected = forward(encoding, weights, IDS, multiple_of=1)
    torch.testing.assert_close(logits(model), expected, atol=1e-10, rtol=0)
    packed = model(torch.tensor([IDS[:4] + IDS]), document_ids=torch.tensor([[0] * 4 + [1] * len(IDS)])).logits[0]
    torch.testing.assert_close(packed[4:], expected, atol=1e-10, rtol=0)


def test_a_prior_with_a_network_is_content_aware_whatever_the_run_calls_it(tmp_path: Path) -> None:
    weights = random_weights("cabam_ssmax")
    assert_same(save(tmp_path, "bam_ssmax", weights), forward("cabam_ssmax", weights, IDS))


@pytest.mark.parametrize("encoding", ["bam", "bam_ssmax", "rotary_ssmax"])
def test_fewer_key_heads_and_a_shared_prior_are_kept(encoding: str, tmp_path: Path) -> None:
    weights = random_weights(encoding, shared=True, n_kv_heads=2)
    save(tmp_path, encoding, weights, n_kv_heads=2)
    assert_same(tmp_path, forward(encoding, weights, IDS, n_kv_heads=2))
    model = build_model(read_checkpoint(tmp_path))
    assert (model.model.shared_prior is not None) == encoding.startswith("bam")


@pytest.mark.parametrize("shared", [False, True])
def test_earlier_names_and_shapes_are_read(shared: bool, tmp_path: Path) -> None:
    weights = random_weights("bam_ssmax", shared)
    older = {k: v[:, :, None] if "seq_scale" in k else v for k, v in with_old_names(weights).items()}
    newer = {k: v[0, :, 0] if "theta" in k else v for k, v in weights.items()}
    for number, given in enumerate((older, newer)):
        assert_same(save(tmp_path / str(number), "bam_ssmax", given), forward("bam_ssmax", weights, IDS))


def test_a_checkpoint_without_centres_has_them_at_zero(tmp_path: Path) -> None:
    weights = {name: 0 * value if "theta_mu" in name else value for name, value in random_weights("bam").items()}
    save(tmp_path, "bam", {name: value for name, value in weights.items() if "theta_mu" not in name})
    assert_same(tmp_path, forward("bam", weights, IDS))


def test_only_what_was_trained_is_trained_on(tmp_path: Path) -> None:
    weights = random_weights("bam")
    for name, learned in (("train_theta_mu", True), ("train_theta_mu", False), ("train_loc", True)):
        model = build_model(read_checkpoint(save(tmp_path, "bam", weights, **{name: learned})))
        assert ("theta_mu" in dict(model.model.layers[0].self_attn.own_prior.named_parameters())) == learned


class RunsCode:
    def __reduce__(self) -> tuple[Callable[..., Any], tuple[str]]:
        return (exec, ("raise SystemExit('executed')",))


def refused(source: Path, says: str) -> None:
    with pytest.raises(UserError) as caught:
        build_model(read_checkpoint(source))
    check_sentence(str(caught.value), says)


def test_a_pickle_that_wants_to_run_code_is_not_run(tmp_path: Path) -> None:
    save(tmp_path, "bam", random_weights("bam"))
    torch.save({"tok_embeddings.weight": RunsCode()}, tmp_path / "model.pt")
    refused(tmp_path, "has more than tensors")


def test_missing_and_unexpected_weights_are_listed(tmp_path: Path) -> None:
    weights = random_weights("bam")
    weights["layers.0.attention.prior.theta_gamma"] = weights.pop("layers.0.attention.prior.theta_beta")
    weights.pop("norm.weight")
    save(tmp_path, "bam", weights)
    refused(tmp_path, "missing are model.layers.0.self_attn.own_prior.theta_beta, model.norm.weight; unexpected are "
                      "model.layers.0.self_attn.own_prior.theta_gamma")  # fmt: skip
    save(tmp_path, "bam", {})
    refused(tmp_path, "has {}; names with tensors are needed")
    save(tmp_path, "bam_ssmax", random_weights("nope"))
    refused(tmp_path, "and 3 more")


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"dim": "32"}, "dim in "),
        ({"dim": 0}, "a whole number of at least 1 is needed"),
        ({"n_heads": 5}, "hidden_size 32 does not divide by 5 heads"),
        ({"n_layers": 3}, "missing are model.layers.2"),
        ({"ffn_dim_multiplier": 3}, "has shape [72, 32] in the checkpoint and [96, 32] by its args.json"),
        ({"norm_eps": float("nan")}, "a positive number is needed"),
        ({"n_kv_heads": -1}, "n_kv_heads in "),
        ({"vocab_size": 2**30}, "vocab_size is 1073741824"),
    ],
)
def test_an_args_json_that_does_not_fit_gets_one_sentence(change: dict[str, Any], says: str, tmp_path: Path) -> None:
    save(tmp_path, "bam", random_weights("bam"), **change)
    refused(tmp_path, says)


def test_other_encodings_and_files_get_one_sentence(tmp_path: Path) -> None:
    weights = random_weights("bam")
    for encoding in ("rotary_local", "laplace", "", None, "bam_ssmax_2"):
        save(tmp_path, encoding, weights)  # type: ignore[arg-type]
        refused(tmp_path, "nope, sinusoidal, rotary, alibi, bam, cabam can be converted")
    save(tmp_path, "sinusoidal", weights, sinusoidal_theta=500.0)
    refused(tmp_path, "sinusoidal_theta in ")
    (tmp_path / "args.json").write_text(json.dumps({"args": {}}))
    refused(tmp_path, "has no args and model_args")
    (tmp_path / "args.json").write_text("[")
    refused(tmp_path, "is not JSON")
    save(tmp_path, "bam", weights)
    (tmp_path / "model.pt").write_bytes(b"PK\3\4 cut short")
    refused(tmp_path, "model.pt")
    (tmp_path / "model.pt").unlink()
    refused(tmp_path, "cannot be read")
    weights["norm.weight"] = weights["norm.weight"] / 0
    refused(save(tmp_path, "bam", weights), "not finite, those of model.norm.weight among them")
