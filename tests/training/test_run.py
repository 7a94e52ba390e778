"""Training on transformers' Trainer: whole, interrupted, and going wrong."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

import bayesattn as ba
from bayesattn.data.tokenizer import load_tokenizer, train_tokenizer
from bayesattn.errors import UserError
from bayesattn.models.bam.modeling import BamForCausalLM
from bayesattn.models.shipped import shipped
from bayesattn.training import run as training
from bayesattn.training.callbacks import RetrievalCallback, RunLogCallback, head_parameters, newest_checkpoint
from bayesattn.training.recipe import Recipe, RecipeError, parse_recipe
from bayesattn.training.trainer import ContextTrainer, TrainingStoppedError


def recipe(**changes: Any) -> Recipe:
    content: dict[str, Any] = {
        "name": "test",
        "model": {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2},
        "data": {"context": 72},
        "augmentation": {"temperature_jitter": [0.5, 1.5]},
        "training": {"steps": 6, "batch": 2, "warmup": 2, "save_every": 2},
    }
    for key, value in changes.items():
        section, _, name = key.partition("__")
        content[section][name] = value
    return parse_recipe(content)


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "model.safetensors")


def test_a_run_leaves_a_model_its_tokenizer_recipe_and_log(tmp_path: Path) -> None:
    folder = training.train(recipe(training__evaluate_every=6), tmp_path / "run", eval_trials={1: 1, 2: 2})
    model, tokenizer = ba.BamForCausalLM.from_pretrained(folder), load_tokenizer(str(folder))
    assert model.config.training_length == 72
    assert model.config.vocab_size == len(tokenizer)
    assert "2 layers of 2 heads" in (folder / "README.md").read_text()
    assert f'folder = "{folder}"' in (folder / "README.md").read_text()
    assert "steps: 6" in (folder / "recipe.yaml").read_text()
    log = [json.loads(line) for line in (folder / "log.jsonl").open()]
    assert any("train_loss" in entry for entry in log)
    assert any({"passkey, 2×", "seen wording, 2×", "validation wording, 2×"} <= entry.keys() for entry in log)


def test_frozen_parameters_keep_their_values_and_the_others_are_trained(tmp_path: Path) -> None:
    frozen = recipe(model__prior_init="spread", training__freeze=["*.own_prior.*", "lm_head.weight"])
    trained = weights(training.train(frozen, tmp_path / "run"))
    torch.manual_seed(0)
    before = training.build_model(training.configuration(frozen, load_tokenizer("tokenizer"))).state_dict()
    same = {name for name, value in trained.items() if torch.equal(value, before[name])}
    assert same >= {name for name in before if "own_prior" in name or name == "lm_head.weight"}
    assert "model.layers.0.self_attn.q_proj.weight" not in same
    assert "model.layers.0.self_attn.temperature.s" not in same


@pytest.mark.parametrize(
    ("freeze", "sentence"),
    [
        (["*.prior.*"], r"training.freeze has '\*.prior.\*', which no parameter matches; there are model.embed_tokens"),
        (["*"], r"training.freeze is \['\*'\]; no parameter is left to train"),
    ],
)
def test_what_cannot_be_frozen_is_refused(freeze: list[str], sentence: str, tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match=sentence):
        training.train(recipe(training__freeze=freeze), tmp_path / "run")


def test_a_log_has_the_heads_from_the_start_to_the_end(tmp_path: Path) -> None:
    model = {"model__prior_init": "spread", "model__scalable_softmax": [True, False]}
    folder = training.train(recipe(training__steps=26, training__save_every=0, **model), tmp_path / "run")
    log = [json.loads(line) for line in (folder / "log.jsonl").open()]
    heads = {entry["step"]: entry["heads"] for entry in log if "heads" in entry}
    assert list(heads) == [0, 25, 26]
    assert [layer["beta"] for layer in heads[0]] == [[1, -1], [1, -1]]
    assert heads[0][0]["temperature"] == [1, 1]
    assert "temperature" not in heads[0][1]
    layers = ba.BamForCausalLM.from_pretrained(folder).model.layers
    for layer, entry in zip(layers, heads[26], strict=True):
        prior = layer.self_attn.prior
        assert entry["beta"] == pytest.approx(prior.theta_beta.tolist(), rel=1e-4)
        assert entry["alpha"] == pytest.approx(prior.theta_alpha.exp().tolist(), rel=1e-4)
    assert heads[25] != heads[0]


@pytest.mark.parametrize(
    ("position", "names"),
    [("bam", {"beta", "alpha"}), ("t5", {"nearest", "farthest"}), ("alibi", set()), ("cabam", set())],
)
def test_heads_are_described_by_what_they_learn(position: str, names: set[str]) -> None:
    model = BamForCausalLM(ba.BamConfig(position=position, scalable_softmax=False))
    assert [layer.keys() for layer in head_parameters(model)] == [names] * 3
    assert not head_parameters(torch.nn.Linear(1, 1))


def test_a_value_that_is_no_number_is_none_in_the_log() -> None:
    model = BamForCausalLM(ba.BamConfig(num_hidden_layers=1))
    torch.nn.init.constant_(model.model.layers[0].self_attn.prior.theta_alpha, 1000.0)
    assert head_parameters(model)[0]["alpha"] == [None] * 4


@pytest.mark.parametrize("tied", [False, True])
def test_a_model_trained_in_bfloat16_keeps_matrices_so_and_is_loaded_in_full(tied: bool, tmp_path: Path) -> None:
    changes = {"training__precision": "bf16", "training__steps": 2, "model__tie_word_embeddings": tied}
    folder = training.train(recipe(**changes, model__position="t5"), tmp_path / "run")
    kept, loaded = weights(folder), BamForCausalLM.from_pretrained(folder)
    assert ("lm_head.weight" in kept) != tied
    for name, parameter in loaded.named_parameters():
        multiplied = "proj" in name or name == "lm_head.weight"
        assert kept[name].dtype == (torch.bfloat16 if multiplied else torch.float32), name
        assert parameter.dtype == torch.float32
        assert torch.equal(parameter, kept[name].float())


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"data__stream": True, "data__retrieval_share": 0, "training__device_batch": 1},
    ],
)
def test_interrupted_and_resumed_it_is_the_same_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any]
) -> None:
    whole = weights(training.train(recipe(**changes), tmp_path / "whole"))
    step = ContextTrainer.training_step

    def stop(self: Any, *args: Any, **kwargs: Any) -> Any:
        if self.state.global_step == 5:
            raise KeyboardInterrupt
        return step(self, *args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(ContextTrainer, "training_step", stop)
        with pytest.raises(KeyboardInterrupt):
            training.train(recipe(**changes), tmp_path / "run")
    # A checkpoint that was being written when the run died is not taken for a whole one.
    (tmp_path / "run" / "checkpoint-5").mkdir()
    resumed = weights(training.train(recipe(**changes), tmp_path / "run", resume=True))
    assert whole.keys() == resumed.keys()
    for name, value in whole.items():
        assert torch.equal(value, resumed[name]), name


def test_a_run_told_to_stop_is_the_first_part_of_the_whole(tmp_path: Path) -> None:
    changes: dict[str, Any] = {
        "augmentation__in_batch_negatives": 1, "model__type": "delayed_keys", "model__cross_layers": 2,
    }  # fmt: skip
    folder = training.train(recipe(training__stop=4, **changes), tmp_path / "part")
    training.train(recipe(**changes), tmp_path / "whole")
    part, whole = weights(folder), weights(tmp_path / "whole" / "checkpoint-4")
    assert all(torch.equal(part[name], whole[name]) for name in whole)
    negatives = f"on {4 * 2 * 72} tokens in contexts of 72, with keys of up to 1 other contexts of the batch"
    assert negatives in (folder / "README.md").read_text()
    shutil.rmtree(folder)
    resumed = weights(training.train(recipe(training__stop=4, **changes), tmp_path / "part", resume=True))
    assert all(torch.equal(resumed[name], whole[name]) for name in whole)
    with pytest.raises(RecipeError, match=r"in_batch_negatives is 2 and a device takes 2 contexts .* at most 1 are"):
        training.train(recipe(augmentation__in_batch_negatives=2), tmp_path / "negatives")
    with pytest.raises(RecipeError, match="stop is 7; 0 or a number of steps up to 6 is needed"):
        recipe(training__stop=7)


def test_a_streamed_run_that_was_done_is_not_trained_further(tmp_path: Path) -> None:
    source = tmp_path / "texts.txt"
    source.write_text("The hills are far away. " * 400)
    streamed = recipe(data__stream=True, data__retrieval_share=0, data__source=str(source))
    folder = training.train(streamed, tmp_path / "run")
    whole = weights(folder)
    shutil.rmtree(folder)
    resumed = weights(training.train(streamed, tmp_path / "run", resume=True))
    assert not (tmp_path / "run" / "checkpoint-7").exists()
    assert all(torch.equal(resumed[name], whole[name]) for name in whole)
    # Nothing is said against a checkpoint when it is the source that is missing.
    shutil.rmtree(tmp_path / "run" / "checkpoint-6")
    source.unlink()
    with pytest.raises(UserError, match="there is no file or folder") as caught:
        training.train(streamed, tmp_path / "run", resume=True)
    assert "checkpoint" not in str(caught.value)


def test_time_goes_on_where_a_run_was_interrupted(tmp_path: Path) -> None:
    (tmp_path / "log.jsonl").write_text('{"step": 2, "seconds": 100.0}\n{"step": 6, "seconds": 300.0}\n{"st')
    log = RunLogCallback(tmp_path, clock=lambda: 7.0)
    log.on_train_begin(None, SimpleNamespace(global_step=4, is_world_process_zero=True), None)
    assert log.seconds == 100
    assert len((tmp_path / "log.jsonl").read_text().splitlines()) == 1


def test_a_finished_model_is_not_trained_over(tmp_path: Path) -> None:
    short = recipe(training__steps=1, training__save_every=0)
    training.train(short, tmp_path)
    assert newest_checkpoint(tmp_path) is None
    with pytest.raises(RecipeError, match="has a run already"):
        training.train(short, tmp_path)


def test_places_of_a_run_that_never_saved_are_forgotten(tmp_path: Path) -> None:
    (tmp_path / training.STREAM_PLACES).write_text("[0, 5, 7]\n")
    training.train(recipe(data__stream=True, data__retrieval_share=0, training__steps=1), tmp_path)
    assert not (tmp_path / training.STREAM_PLACES).exists()


def test_progress_is_reported_to_what_is_installed(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"report_to is 'nowhere'; none, all.* are available here"):
        training.train(recipe(), tmp_path, report_to="nowhere")


def test_training_goes_on_from_a_trained_model(tmp_path: Path) -> None:
    first = training.train(recipe(), tmp_path / "first")
    content = recipe(training__steps=1, training__warmup=0, training__lr=0.0, training__matrix_lr=0.0).to_dict()
    still = {**content, "start": str(first)} | {"training": {**content["training"], "prior_lr": 0.0}}
    second = weights(training.train(parse_recipe(still), tmp_path / "second"))
    assert all(torch.equal(value, second[name]) for name, value in weights(first).items())
    more = still | {"model": {**still["model"], "type": "delayed_keys", "key_delay": 3}}
    folder = training.train(parse_recipe(more), tmp_path / "delayed")
    third = weights(folder)
    assert third.keys() > second.keys()
    assert {name.split(".")[1] for name in third.keys() - second.keys()} == {"delay_encoder"}
    assert all(torch.equal(value, third[name]) for name, value in second.items())
    assert "keys delayed by 3 tokens" in (folder / "README.md").read_text()
    with pytest.raises(RecipeError, match="the recipe's model cannot start from"):
        training.train(parse_recipe(still | {"start": str(folder)}), tmp_path / "third")
    with pytest.raises(RecipeError, match="the recipe's model cannot start from"):
        training.train(parse_recipe(still | {"start": "bam-tiny"}), tmp_path / "third")
    with pytest.raises(RecipeError, match="start is 'nowhere'; there is no such model"):
        training.train(parse_recipe(still | {"start": "nowhere"}), tmp_path / "fourth")


def test_a_trained_model_goes_on_with_another_position(tmp_path: Path) -> None:
    """Its weights are kept, its priors are new; a run with rates of 0 is the model with the position exchanged."""
    content = recipe(training__steps=1, training__warmup=0, training__lr=0.0, training__matrix_lr=0.0).to_dict()
    still = {**content, "start": "rope-tiny"} | {"training": {**content["training"], "prior_lr": 0.0}}
    still["model"] = {"preset": "tiny", "position": "bam", "learned_temperature": True, "qk_norm": True}
    rope, bam = weights(Path(shipped("rope-tiny"))), weights(training.train(parse_recipe(still), tmp_path / "bam"))
    assert all(torch.equal(value, bam[name]) for name, value in rope.items() if "grows_with_length" not in name)
    assert {name.split(".")[4] for name in bam.keys() - rope.keys()} == {"own_prior"}
    still |= {"start": str(tmp_path / "bam" / "model"), "model": {**still["model"], "position": "nope"}}
    nope = weights(training.train(parse_recipe(still), tmp_path / "nope"))
    assert nope.keys() == rope.keys()
    with pytest.raises(RecipeError, match="the recipe's model cannot start from"):
        training.train(parse_recipe(still | {"model": {**still["model"], "preset": "l12"}}), tmp_path / "wide")


def test_an_interrupted_run_goes_on_without_what_it_started_from(tmp_path: Path) -> None:
    start = training.train(recipe(), tmp_path / "first")
    content = parse_recipe({**recipe().to_dict(), "start": str(start)})
    whole = weights(training.train(content, tmp_path / "second"))
    shutil.rmtree(tmp_path / "second" / "model")
    shutil.rmtree(tmp_path / "second" / "checkpoint-6")
    shutil.rmtree(start)
    again = weights(training.train(content, tmp_path / "second", resume=True))
    assert all(torch.equal(value, again[name]) for name, value in whole.items())


def test_a_killed_run_keeps_its_checkpoints(tmp_path: Path) -> None:
    script = """
import os, signal, sys
from pathlib import Path
from bayesattn.training.run import train
from bayesattn.training.trainer import ContextTrainer
from tests.training.test_run import recipe

step = ContextTrainer.training_step

def killed(self, *args, **kwargs):
    if self.state.global_step == 3:
        os.kill(os.getpid(), signal.SIGKILL)
    return step(self, *args, **kwargs)

ContextTrainer.training_step = killed
train(recipe(), Path(sys.argv[1]))
"""
    done = subprocess.run([sys.executable, "-c", script, str(tmp_path)], stderr=subprocess.DEVNULL)
    assert done.returncode == -signal.SIGKILL
    newest = newest_checkpoint(tmp_path)
    assert newest == tmp_path / "checkpoint-2"
    assert weights(newest)


def test_a_loss_that_is_no_number_stops_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    forward = ba.BamForCausalLM.forward

    def broken(self: Any, *args: Any, **kwargs: Any) -> Any:
        out = forward(self, *args, **kwargs)
        calls.append(1)
        out.loss = out.loss * (float("nan") if len(calls) == 4 else 1.0)
        return out

    calls: list[int] = []
    monkeypatch.setattr(ba.BamForCausalLM, "forward", broken)
    with pytest.raises(TrainingStoppedError, match=r"the loss became nan at step 4; the last good checkpoint is .*-2"):
        training.train(recipe(), tmp_path)
    assert capsys.readouterr().err.endswith("\n")  # the progress bar has ended its line


def test_a_gradient_that_is_no_number_stops_the_run_before_it_does_harm(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    step = ContextTrainer.training_step

    def broken(self: Any, model: Any, *args: Any, **kwargs: Any) -> Any:
        loss = step(self, model, *args, **kwargs)
        if self.state.global_step == 3:
            next(model.parameters()).grad[0, 0] = float("nan")
        return loss

    monkeypatch.setattr(ContextTrainer, "training_step", broken)
    with pytest.raises(
        TrainingStoppedError, match=r"the gradient became nan at step 4; the last good checkpoint is .*-2"
    ):
        training.train(recipe(), tmp_path)
    assert all(value.isfinite().all() for value in weights(tmp_path / "checkpoint-2").values())


def test_a_damaged_checkpoint_is_named(tmp_path: Path) -> None:
    training.train(recipe(), tmp_path)
    (tmp_path / "model" / "config.json").unlink()
    damaged = tmp_path / "checkpoint-6" / "model.safetensors"
    damaged.write_bytes(damaged.read_bytes()[:1000])
    with pytest.raises(TrainingStoppedError, match=r"training cannot resume from .*checkpoint-6 \(.*; remove it"):
        training.train(recipe(training__steps=6), tmp_path, resume=True)


def test_a_run_begun_before_a_setting_was_there_goes_on(tmp_path: Path) -> None:
    training.train(recipe(), tmp_path)
    kept = tmp_path / "recipe.yaml"
    kept.write_text("".join(line for line in kept.open() if not line.startswith(("start:", "  spaced:"))))
    training._check_recipe(recipe(), tmp_path, resume=True, start=tmp_path / "checkpoint-6")
    kept.write_text("")
    with pytest.raises(RecipeError, match="was begun with another recipe"):
        training._check_recipe(recipe(), tmp_path, resume=True, start=tmp_path / "checkpoint-6")


def test_what_cannot_be_measured_does_not_stop_a_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    # Two contexts have no room for the question in the words of a tokenizer that has a token for every byte only.
    train_tokenizer(["a"], vocab_size=258).save_pretrained(tmp_path / "bytes")
    long = recipe(training__evaluate_every=6, data__tokenizer=str(tmp_path / "bytes"), data__retrieval_share=0)
    assert weights(training.train(long, tmp_path / "run", eval_trials={2: 1}))
    assert "step 6, passkey, 2×: not measured, a prompt of 144 tokens has no room" in capsys.readouterr().out


def test_logits_that_are_not_finite_are_not_measured_in_training(capsys: pytest.CaptureFixture[str]) -> None:
    settings, logged = recipe(training__evaluate_every=6), []
    model = ba.BamForCausalLM(ba.BamConfig.preset("tiny", vocab_size=1024))
    with torch.no_grad():
        model.lm_head.weight.fill_(torch.nan)
    callback = RetrievalCallback(settings, load_tokenizer("tokenizer"), {2: 1})
    callback.trainer = SimpleNamespace(log=logged.append)
    callback.on_step_end(None, SimpleNamespace(global_step=6, is_world_process_zero=True), None, model.train())
    assert "step 6, passkey, 2×: not measured, test gives" in capsys.readouterr().out
    assert logged == []
    assert model.training


@pytest.mark.parametrize(
    "problem", [OSError(28, "No space left on device"), SafetensorError("I/O error: No space left on device")]
)
def test_a_full_disk_stops_the_run_and_names_the_last_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, problem: Exception
) -> None:
    save = BamForCausalLM.save_pretrained

    def full(self: Any, folder: Any, *args: Any, **kwargs: Any) -> None:
        if str(folder).endswith("checkpoint-4"):
            raise problem
        save(self, folder, *args, **kwargs)

    monkeypatch.setattr(BamForCausalLM, "save_pretrained", full)
    with pytest.raises(
        TrainingStoppedError,
        match=r"there is no room left on the disk of .*; the last good checkpoint is .*-2",
    ):
        training.train(recipe(), tmp_path)


def test_devices_share_a_batch() -> None:
    split_batch = training.split_batch
    assert split_batch(recipe(training__batch=16), 1) == (16, 1)
    assert split_batch(recipe(training__batch=16), 4) == (4, 1)
    assert split_batch(recipe(training__batch=16, training__device_batch=2), 4) == (2, 2)
    with pytest.raises(RecipeError, match="a batch of 16 contexts does not divide among 3 devices with 5 at a time"):
        split_batch(recipe(training__batch=16), 3)


def test_a_batch_in_parts_is_learned_from_as_a_whole(tmp_path: Path) -> None:
    # The first steps of RAdam are linear in the gradient, so that what is compared is the gradient itself.
    changes = {"training__batch": 4, "training__steps": 2, "training__optimizer": "radam", "training__lr": 1.0}
    changes |= {"model__scalable_softmax": True, "data__retrieval_share": 0.5}
    whole = weights(training.train(recipe(**changes), tmp_path / "whole"))
    parts = weights(training.train(recipe(training__device_batch=1, **changes), tmp_path / "parts"))
    for name, value in whole.items():
        torch.testing.assert_close(parts[name], value, atol=1e-5, rtol=1e-4)


def test_a_run_does_not_go_on_with_other_text(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = tmp_path / "text.txt"
    source.write_text("A river runs by a stone, 12 times. " * 100)
    mine = recipe(data__source=str(source), training__steps=2)
    training.train(mine, tmp_path / "run", resume=True)
    assert "has no checkpoint to resume from; training starts from step 0" in capsys.readouterr().out
    source.write_text("A stone lies by a river, 12 times. " * 100)
    with pytest.raises(RecipeError, match=r"text\.txt has changed since .*run was begun"):
        training.train(mine, tmp_path / "run", resume=True)


def test_mistakes_get_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    training.train(recipe(), tmp_path / "run")
    with pytest.raises(RecipeError, match="has a run already; resume it, or choose another folder"):
        training.train(recipe(), tmp_path / "run")
    with pytest.raises(RecipeError, match=r"begun with another recipe; what differs: training\.lr"):
        training.train(recipe(training__lr=0.5), tmp_path / "run", resume=True)
    with pytest.raises(RecipeError, match=r"model\.vocab_size is 100; the tokenizer needs at least 1024"):
        training.train(recipe(model__vocab_size=100), tmp_path / "other")
    with pytest.raises(UserError, match="there is no file or folder"):
        training.train(recipe(data__source=str(tmp_path / "nothing")), tmp_path / "third")
    monkeypatch.setattr("bayesattn.data.tokenizer.hub_answers", lambda: False)
    with pytest.raises(UserError, match="the tokenizer nobody/none is neither a shipped one nor a folder, and the hub"):
        training.train(recipe(data__tokenizer="nobody/none"), tmp_path / "fourth")
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match="empty has no tokenizer that can be loaded"):
        training.train(recipe(data__tokenizer=str(tmp_path / "empty")), tmp_path / "damaged")
    endless = load_tokenizer("tokenizer")
    endless.eos_token = None
    endless.save_pretrained(tmp_path / "endless")
    with pytest.raises(RecipeError, match="endless has no end token; documents need one between them"):
        training.train(recipe(data__tokenizer=str(tmp_path / "endless")), tmp_path / "fifth")
