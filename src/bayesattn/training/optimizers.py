"""Optimizers for models with priors: priors and temperatures in groups of their own, Muon for matrices."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer, RAdam
from torch.optim.lr_scheduler import LambdaLR

from bayesattn.attention import ScalableSoftmax, SinkLogit
from bayesattn.priors import ConditionedPrior, Prior, Sinks
from bayesattn.training.recipe import Training

Groups = dict[str, list[nn.Parameter]]

# Modules whose parameters are trained as priors are.
PRIOR_MODULES = (Prior, ConditionedPrior, Sinks, ScalableSoftmax, SinkLogit)


def parameter_groups(model: nn.Module) -> Groups:
    """`prior` (sinks and temperatures too), `matrix` (inside of layers), `other` (embeddings, output head, norms)."""
    prior_ids = {id(p) for m in model.modules() if isinstance(m, PRIOR_MODULES) for p in m.parameters()}
    outside = {
        id(m.weight)
        for name, m in model.named_modules()
        if isinstance(m, nn.Embedding) or (isinstance(m, nn.Linear) and name.endswith("lm_head"))
    }
    groups: Groups = {"prior": [], "matrix": [], "other": []}
    for parameter in model.parameters():
        if not parameter.requires_grad:
            continue
        if id(parameter) in prior_ids:
            groups["prior"].append(parameter)
        elif parameter.dim() == 2 and id(parameter) not in outside:
            groups["matrix"].append(parameter)
        else:
            groups["other"].append(parameter)
    return groups


class Muon(Optimizer):
    """Momentum made orthogonal, for matrices (Jordan et al., 2024).

    Like `torch.optim.Muon`, but in float32 and batched by shape. On CPUs, bfloat16 is five times slower.
    """

    # A quintic whose iterates drive singular values towards 1.
    COEFFICIENTS = (3.4445, -4.7750, 2.0315)
    ITERATIONS = 5

    def __init__(self, params: Iterable[nn.Parameter], lr: float, momentum: float = 0.95, weight_decay: float = 0.0):
        super().__init__(params, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        loss = None if closure is None else closure()
        for group in self.param_groups:
            alike: dict[torch.Size, list[nn.Parameter]] = {}
            for parameter in group["params"]:
                if parameter.grad is not None:
                    alike.setdefault(parameter.shape, []).append(parameter)
            for shape, parameters in alike.items():
                updates = []
                for parameter in parameters:
                    gradient = parameter.grad
                    assert gradient is not None
                    momentum = self.state[parameter].setdefault("momentum_buffer", torch.zeros_like(parameter))
                    momentum.lerp_(gradient, 1 - group["momentum"])
                    updates.append(gradient.lerp(momentum, group["momentum"]))  # Nesterov's
                rate = group["lr"] * max(1.0, shape[0] / shape[1]) ** 0.5
                for parameter, update in zip(parameters, orthogonal(torch.stack(updates)), strict=True):
                    parameter.mul_(1 - group["lr"] * group["weight_decay"]).sub_(rate * update)
        return loss


def orthogonal(matrices: Tensor) -> Tensor:
    """Approximate orthogonalisation of matrices `[k, rows, columns]` by Newton–Schulz iterations."""
    wide = matrices if matrices.shape[1] <= matrices.shape[2] else matrices.mT
    x = wide.float() / wide.float().norm(dim=(1, 2), keepdim=True).clamp(min=1e-7)
    a, b, c = Muon.COEFFICIENTS
    for _ in range(Muon.ITERATIONS):
        square = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(square, square, square, beta=b, alpha=c), x, beta=a)
    return (x if wide is matrices else x.mT).to(matrices.dtype)


class CombinedOptimizer(Optimizer):
    """Several optimizers as one: each has its own parameters; schedules and checkpoints see all groups."""

    def __init__(self, parts: list[Optimizer]) -> None:
        self.parts = parts
        super().__init__([parameter for part in parts for g in part.param_groups for parameter in g["params"]], {})
        self.param_groups = [group for part in parts for group in part.param_groups]

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        loss = None if closure is None else closure()
        for part in self.parts:
            part.step()
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        for part in self.parts:
            part.zero_grad(set_to_none)

    def state_dict(self) -> dict[str, Any]:
        return {"parts": [part.state_dict() for part in self.parts]}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        for part, state in zip(self.parts, state_dict["parts"], strict=True):
            part.load_state_dict(state)
        self.param_groups = [group for part in self.parts for group in part.param_groups]


def make_optimizer(model: nn.Module, settings: Training) -> Optimizer:
    groups = parameter_groups(model)
    prior = {"params": groups["prior"], "lr": settings.prior_lr, "weight_decay": 0.0}
    vectors = {"params": [p for p in groups["other"] if p.dim() < 2], "weight_decay": 0.0}
    tables = {"params": [p for p in groups["other"] if p.dim() >= 2]}
    matrices = {"params": groups["matrix"]}
    common: dict[str, Any] = {"lr": settings.lr, "betas": settings.betas, "weight_decay": settings.weight_decay}
    if settings.optimizer == "muon":
        muon = Muon(groups["matrix"], lr=settings.matrix_lr, weight_decay=settings.weight_decay)
        return CombinedOptimizer([muon, AdamW(_non_empty(prior, vectors, tables), **common)])
    kind: Any = AdamW
    if settings.optimizer == "radam":
        kind, common["decoupled_weight_decay"] = RAdam, True
    return kind(_non_empty(prior, vectors, tables, matrices), **common)


def _non_empty(*groups: dict[str, Any]) -> list[dict[str, Any]]:
    return [group for group in groups if group["params"]]


def make_schedule(optimizer: Optimizer, settings: Training) -> LambdaLR:
    """Linear warm-up, then cosine decay to `final` times the rate."""

    def factor(step: int) -> float:
        if step < settings.warmup:
            return (step + 1) / (settings.warmup + 1)
        done = (step - settings.warmup) / max(1, settings.steps - settings.warmup)
        return settings.final + (1 - settings.final) * 0.5 * (1 + math.cos(math.pi * min(1.0, done)))

    return LambdaLR(optimizer, factor)
