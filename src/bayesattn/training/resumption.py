"""A Trainer whose run logs the same whether it was interrupted or not, and that stops when a signal asks for it."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import Trainer, TrainerCallback
from transformers.trainer_callback import TrainerState
from transformers.trainer_utils import speed_metrics

# In a checkpoint: what the loss is averaged over.
LOSS = "loss.json"


class RunStopped(Exception):  # noqa: N818  nothing went wrong
    """A signal of this number asked for the end, and a checkpoint of the step is written."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


class ResumableTrainer(Trainer):
    """Keeps the losses since the last logged one in its checkpoints, and the training time.

    So the logged losses of a resumed run are means over the same steps, and its last entry is about the whole run.
    """

    began = 0.0  # when training would have begun without an interruption

    def _run_epoch(self, *args: Any, **kwargs: Any) -> None:
        self.began = kwargs["start_time"]
        if kwargs["resume_from_checkpoint"] is not None:
            self._restore_losses(Path(kwargs["resume_from_checkpoint"]))
        super()._run_epoch(*args, **kwargs)

    def _save_checkpoint(self, *args: Any, **kwargs: Any) -> None:
        super()._save_checkpoint(*args, **kwargs)
        if self.is_world_process_zero():
            losses = {
                "sum": self._tr_loss.item(),
                "logged": self._total_loss_scalar,
                "logged_step": self._globalstep_last_logged,
                "seconds": time.time() - self.began,
            }
            folder = Path(str(self.args.output_dir)) / f"checkpoint-{self.state.global_step}"
            (folder / LOSS).write_text(json.dumps(losses))

    def _restore_losses(self, checkpoint: Path) -> None:
        if not (checkpoint / LOSS).exists():  # of an earlier version
            return
        losses = json.loads((checkpoint / LOSS).read_text())
        self._tr_loss = torch.tensor(losses["sum"], device=self.args.device)
        self._total_loss_scalar, self._globalstep_last_logged = losses["logged"], losses["logged_step"]
        self._initial_global_step = 0
        self.began = time.time() - losses["seconds"]

    def log(self, *args: Any, **kwargs: Any) -> None:
        self.state.epoch = self.state.global_step / self.args.max_steps  # also where a stream goes on in its middle
        super().log(*args, **kwargs)

    def _finalize_training(self, trial: Any, num_train_samples: Any, start_time: float) -> Any:
        return super()._finalize_training(trial, num_train_samples, self.began)

    def load_end(self, checkpoint: Path) -> None:
        """Load the model and what `log_end` needs from the checkpoint of the last step."""
        self._load_from_checkpoint(str(checkpoint))
        self.state = TrainerState.load_from_json(str(checkpoint / "trainer_state.json"))
        self.state.is_world_process_zero = self.is_world_process_zero()
        self._restore_losses(checkpoint)

    def log_end(self) -> None:
        """Log what the end of training logs, after `load_end`."""
        steps = self.state.global_step
        contexts = steps * self.args.train_batch_size * self.args.gradient_accumulation_steps * self.args.world_size
        metrics = speed_metrics("train", self.began, num_samples=contexts, num_steps=steps)
        metrics["total_flos"] = self.state.total_flos
        metrics["train_loss"] = (self._total_loss_scalar + self._tr_loss.item()) / steps
        self.log(metrics)


class StopCallback(TrainerCallback):
    """Writes a checkpoint at the end of the step in which a signal came to any process, and raises RunStopped in all.

    It comes after the callback that marks checkpoints as complete.
    """

    def __init__(self, waiting: Callable[[], int]) -> None:
        self.waiting, self.number = waiting, 0

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.number = self.waiting()
        if torch.distributed.is_initialized():  # the signal may reach processes in different steps
            number = torch.tensor(self.number, device=args.device)
            torch.distributed.all_reduce(number, torch.distributed.ReduceOp.MAX)
            self.number = int(number.item())
        if self.number:
            control.should_save = True

    def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if self.number:
            if torch.distributed.is_initialized():  # a process that ends early would make a launcher end all others
                torch.distributed.barrier()
            raise RunStopped(self.number)
