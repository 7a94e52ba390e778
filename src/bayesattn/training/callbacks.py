"""Callbacks of training: the run log, marks of complete checkpoints, retrieval evaluations."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from tqdm.auto import tqdm
from transformers import TrainerCallback

from bayesattn.errors import UserError
from bayesattn.evaluation import passkey
from bayesattn.evaluation.reader import Reader
from bayesattn.evaluation.trials import measure
from bayesattn.files import whole_lines, write_whole
from bayesattn.models.attention import DecoderAttention
from bayesattn.priors import GeneralizedGaussian, Prior
from bayesattn.training.recipe import Recipe

# Written into a checkpoint when all of it is there.
COMPLETE = "complete"
EVAL_TASKS = {
    "passkey": passkey.Task(),
    "seen wording": passkey.Task("train"),
    "validation wording": passkey.Task("validation"),
}
# Multiples of the training length, and trials of each.
EVAL_TRIALS = {1: 40, 16: 20}
# Tokens of the shortest prompt that has room for the question.
SHORTEST_PROMPT = 128


def newest_checkpoint(out: Path) -> Path | None:
    """The last checkpoint of a run that was written completely."""
    whole = [path.parent for path in out.glob(f"checkpoint-*/{COMPLETE}")]
    return max(whole, key=lambda path: int(path.name.rpartition("-")[2]), default=None)


def checkpoint_hint(out: Path) -> str:
    """The end of a sentence about a run that stopped: what is left of it, and how to go on."""
    newest = newest_checkpoint(out)
    if newest is None:
        return "there is no checkpoint to resume from"
    return f"the last good checkpoint is {newest}, and --resume goes on from it"


@torch.no_grad()
def head_parameters(model: nn.Module) -> list[dict[str, list[float | None]]]:
    """What the heads of each layer have learned: parameters of their prior and their temperature, by name.

    A generalized Gaussian has `beta`, `alpha` (θ_β and exp(θ_α)) and, if it is learned, `centre`; other priors have
    what they call human parameters. Priors that depend on the query, and those without parameters, have none. A layer
    whose parameters are spread over devices has none either: reading them would need all processes.
    """
    layers = []
    for attention in model.modules():
        if not isinstance(attention, DecoderAttention):
            continue
        prior = attention.distance_prior
        values: dict[str, Tensor] = {}
        if isinstance(prior, GeneralizedGaussian):
            values = {"beta": prior.theta_beta, "alpha": prior.theta_alpha.exp()}
            if isinstance(prior.theta_mu, nn.Parameter):
                values["centre"] = -2 * prior.theta_mu.sinh()
        elif isinstance(prior, Prior) and any(True for _ in prior.parameters()):
            values = prior.human_parameters()
        if attention.temperature is not None:
            values = {**values, "temperature": attention.temperature.s}
        whole = all(value.shape == (prior.num_heads,) and not hasattr(value, "to_local") for value in values.values())
        layers.append({name: _rounded(value) for name, value in values.items()} if whole else {})
    return layers


def _rounded(values: Tensor) -> list[float | None]:
    return [float(f"{value:.5g}") if math.isfinite(value) else None for value in values.tolist()]


class RunLogCallback(TrainerCallback):
    """Marks checkpoints that are complete, and writes `log.jsonl`, in the main process only.

    Entries with a loss have the parameters of the heads too, under `heads`, and so has the start of a run.
    """

    def __init__(self, out: Path, clock: Callable[[], float] = time.perf_counter) -> None:
        self.log, self.clock = out / "log.jsonl", clock
        self.begin = clock()

    @property
    def seconds(self) -> float:
        """Training time, including that before an interruption."""
        return self.clock() - self.begin

    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        if state.is_world_process_zero:
            self.resume(state.global_step)
            if not state.global_step:
                self._write({"step": 0, "seconds": 0.0, **_heads_entry(model)})

    def resume(self, step: int) -> bool:
        """Drop what was logged after the checkpoint of this step; whether the end of training is still in the log."""
        lines = whole_lines(self.log) if step else []
        kept = [line for line in lines if json.loads(line)["step"] <= step]
        write_whole(self.log, "".join(line + "\n" for line in kept))
        if kept:
            self.begin -= json.loads(kept[-1])["seconds"]
        return bool(kept) and "train_loss" in json.loads(kept[-1])

    def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.is_world_process_zero:
            (Path(args.output_dir) / f"checkpoint-{state.global_step}" / COMPLETE).touch()

    def on_log(
        self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, model: Any = None, **_: Any
    ) -> None:
        if state.is_world_process_zero:
            entry = {"step": state.global_step, "seconds": round(self.seconds, 1), **(logs or {})}
            self._write({**entry, **_heads_entry(model)} if {"loss", "train_loss"} & entry.keys() else entry)

    def _write(self, entry: dict[str, Any]) -> None:
        with self.log.open("a") as file:
            file.write(json.dumps(entry) + "\n")


def _heads_entry(model: nn.Module | None) -> dict[str, Any]:
    layers = [] if model is None else head_parameters(model)
    return {"heads": layers} if any(layers) else {}


class RetrievalCallback(TrainerCallback):
    """Measures retrieval at the training length and at 16 times that, every `evaluate_every` steps."""

    trainer: Any

    def __init__(
        self,
        recipe: Recipe,
        tokenizer: Any,
        trials: Mapping[int, int] = EVAL_TRIALS,
        shortest_prompt: int = SHORTEST_PROMPT,
    ) -> None:
        self.recipe, self.tokenizer = recipe, tokenizer
        self.trials, self.shortest_prompt = trials, shortest_prompt

    def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        every = self.recipe.training.evaluate_every
        if not every or state.global_step % every or not state.is_world_process_zero:
            return
        model.eval()
        reader = Reader(self.recipe.name, model, self.tokenizer, self.recipe.data.context)
        accuracies: dict[str, float] = {}
        for multiple, trials in self.trials.items():
            length = multiple * self.recipe.data.context
            if length < self.shortest_prompt:
                continue
            for name, task in EVAL_TASKS.items():
                try:
                    cell = measure(reader, task, length, trials)
                except UserError as problem:  # a tokenizer with longer prompts, for instance: no reason to stop
                    tqdm.write(f"step {state.global_step}, {name}, {multiple}×: not measured, {problem}")
                    continue
                tqdm.write(f"step {state.global_step}, {name}, {multiple}×: {cell}")
                accuracies[f"{name}, {multiple}×"] = cell.right / cell.trials
        if accuracies:
            self.trainer.log(accuracies)
        model.train()
