"""The Trainer of a recipe: contexts in order, the objective, and a stop at a loss that is not finite."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.random import fork_rng
from torch.utils.data import SequentialSampler
from transformers.trainer_pt_utils import safe_globals

from bayesattn.data.contexts import StreamedContexts
from bayesattn.errors import UserError
from bayesattn.training.augmentation import BatchPart
from bayesattn.training.callbacks import checkpoint_hint
from bayesattn.training.processes import share_generators
from bayesattn.training.resumption import ResumableTrainer

# The state of the generators in a checkpoint, under the name that the Trainer has for it in one process.
GENERATORS = "rng_state.pth"


class TrainingStoppedError(UserError):
    """Training stopped before its end; the sentence says why."""


class ContextTrainer(ResumableTrainer):
    """Takes contexts in the order of their numbers, and stops at the first loss or gradient that is not finite.

    The objective is the mean loss over the tokens of the whole batch, also where devices take it in parts. All parts
    draw the same random numbers: the processes take over the state of the main one's generators before each step.
    """

    batch_part: BatchPart  # of the next forward pass
    parts_done = 0  # of the current batch, in this process
    mean_weight = 1.0  # mean loss weight of the parts of the current batch
    resumed: str | None = None  # the checkpoint, while it is loaded

    def get_batch_samples(self, *args: Any, **kwargs: Any) -> Any:
        resumed, self.resumed = self.resumed, None  # a text that cannot be read is no fault of the checkpoint
        parts, number = super().get_batch_samples(*args, **kwargs)
        if resumed is not None:  # creating the loader's iterator used the generator
            self.resumed = resumed
            self._load_rng_state(resumed)
            self.resumed = None
        if parts:
            weights = torch.stack([_weight(part) for part in parts]).to(self.args.device)
            weights = self.accelerator.gather(weights)
            self.mean_weight = max(1e-6, float(weights.mean()))  # the sum can be 0
            self.batch_part.batch, self.parts_done = len(weights) * len(parts[0]["input_ids"]), 0
        return parts, number

    def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        loss: Any = super().compute_loss(model, inputs, *args, **kwargs)
        return loss * (float(_weight(inputs)) / self.mean_weight)

    def _get_train_sampler(self, train_dataset: Any = None) -> Any:
        return None if isinstance(self.train_dataset, StreamedContexts) else SequentialSampler(self.train_dataset)  # type: ignore[arg-type]

    def training_step(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        """Returns the loss of this part of the batch, averaged over all processes."""
        devices = [self.args.device] if self.args.device.type == "cuda" else []
        if not self.parts_done:
            share_generators(*devices)
        number = self.parts_done * self.args.world_size + self.args.process_index
        self.batch_part.first = number * len(inputs["input_ids"])
        self.parts_done += 1
        # The generators go on after the last part of a batch, as after a batch in one part.
        with nullcontext() if self.accelerator.sync_gradients else fork_rng(devices):
            loss = self.accelerator.gather(super().training_step(model, inputs, *args, **kwargs)).mean()
        self._need_finite("loss", loss)
        return loss

    def _save_rng_state(self, output_dir: str) -> None:
        if self.is_world_process_zero():
            states = {"cpu": torch.get_rng_state()}
            if self.args.device.type == "cuda":
                states["cuda"] = torch.cuda.get_rng_state()
            torch.save(states, Path(output_dir) / GENERATORS)

    def _load_rng_state(self, checkpoint: str | None) -> None:
        if checkpoint is None:
            return
        with safe_globals():  # the Trainer's own file has a state of NumPy's generator
            states = torch.load(Path(checkpoint) / GENERATORS, weights_only=True)
        torch.set_rng_state(states["cpu"])
        if "cuda" in states and self.args.device.type == "cuda":
            torch.cuda.set_rng_state(states["cuda"])

    def _get_grad_norm(self, *args: Any, **kwargs: Any) -> Any:  # before the optimizer's step
        norm = super()._get_grad_norm(*args, **kwargs)
        self._need_finite("gradient", torch.as_tensor(norm))
        return norm

    def _need_finite(self, what: str, value: Tensor) -> None:
        if not torch.isfinite(value):
            last = checkpoint_hint(Path(self.args.output_dir))  # type: ignore[arg-type]
            raise TrainingStoppedError(f"the {what} became {value.item()} at step {self.state.global_step + 1}; {last}")


def _weight(part: dict[str, Tensor]) -> Tensor:
    """Sum of the loss weights of the tokens that a part of a batch predicts."""
    return ((part["labels"][:, 1:] != -100) * part["loss_weights"][:, 1:]).sum()


def stack_contexts(items: list[dict[str, Any]]) -> dict[str, Any]:
    """A batch of contexts, which all have the same length."""
    return {key: torch.stack([item[key] for item in items]) for key in items[0]}
