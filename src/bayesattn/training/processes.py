"""The processes of a run: they connect at its start, and when one of them is lost the others say so."""

from __future__ import annotations

import os
from datetime import timedelta

import torch
from accelerate import PartialState  # type: ignore[import-untyped]
from torch.distributed import DistError

from bayesattn.errors import UserError

# How long processes wait for the main one, which evaluates and saves alone. A process that died is noticed at once.
LONGEST_WAIT = timedelta(days=1)
# Parts of the messages of gloo about a connection whose other end is gone.
CONNECTION_LOST = ("closed by peer", "reset by peer", "Broken pipe")


def connect() -> PartialState:
    """Connect this process with those that the same launcher started; returns their number and its own.

    Raises:
        UserError: Accelerate was told to start several processes, and started one.
    """
    state = PartialState(cpu=not torch.cuda.is_available(), timeout=LONGEST_WAIT)
    # Accelerate sets the first variable always, and the second for several processes. Every real launcher sets a rank.
    alone = state.num_processes == 1 and "RANK" not in os.environ
    if alone and {"ACCELERATE_MIXED_PRECISION", "MASTER_ADDR"} <= os.environ.keys():
        raise UserError(
            "accelerate launch was asked for several processes and started one, as it does on CPUs; type "
            "`torchrun --nproc_per_node 2 -m bayesattn.cli train …`"
        )
    return state


def is_lost_process(problem: Exception) -> bool:
    """Whether an error of this process says that another one is gone."""
    return isinstance(problem, (RuntimeError, DistError)) and any(sign in str(problem) for sign in CONNECTION_LOST)
