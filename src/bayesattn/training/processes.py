"""The processes of a run: they connect at its start, draw the same random numbers, and notice that one is lost."""

from __future__ import annotations

import os
from datetime import timedelta
from typing import Any

import torch
from torch.distributed import DistError

from bayesattn.errors import UserError

# How long processes wait for the main one, which evaluates and saves alone. A process that died is noticed at once.
LONGEST_WAIT = timedelta(days=1)
# Parts of the messages of gloo about a connection whose other end is gone.
CONNECTION_LOST = ("closed by peer", "reset by peer", "Broken pipe")


def connect() -> Any:
    """Connect this process with those that the same launcher started; returns Accelerate's `PartialState` of them.

    Raises:
        UserError: Accelerate was told to start several processes, and started one.
    """
    from accelerate import PartialState  # type: ignore[import-untyped]  # which a dry run does not need

    state = PartialState(cpu=not torch.cuda.is_available(), timeout=LONGEST_WAIT)
    # Accelerate sets the first variable always, and the second for several processes. Every real launcher sets a rank.
    alone = state.num_processes == 1 and "RANK" not in os.environ
    if alone and {"ACCELERATE_MIXED_PRECISION", "MASTER_ADDR"} <= os.environ.keys():
        raise UserError(
            "accelerate launch was asked for several processes and started one, as it does on CPUs; type "
            "`torchrun --nproc_per_node 2 -m bayesattn.cli train …`"
        )
    return state


def share_generators(*devices: torch.device) -> None:
    """Give the generators of this process, on the CPU and the devices, the state of those of the main process."""
    from accelerate.utils import synchronize_rng_states  # type: ignore[import-untyped]

    synchronize_rng_states(["torch", *(device.type for device in devices)])


def is_lost_process(problem: Exception) -> bool:
    """Whether an error of this process says that another one is gone."""
    return isinstance(problem, (RuntimeError, DistError)) and any(sign in str(problem) for sign in CONNECTION_LOST)
