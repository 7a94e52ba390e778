"""Attention and training while another process computes.

`python -m bayesattn.studies.bench.load.measure WORK SECONDS SEED` is the other process; WORK is a key of `WORKS`.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

from bayesattn.studies.bench.companion import Companion, companion, repeat
from bayesattn.studies.bench.inputs import LARGEST_ERROR, Inputs, Shape, error, training
from bayesattn.studies.bench.load.run import Beside, Trainings
from bayesattn.studies.bench.measure import environment

SHAPE = Shape(16, 4, 4, 128, 32)
OURS, PLAIN = "bayesattn", "plain SDPA"
BAM, LLAMA = "bam-tiny", "Llama of its shape"
NEIGHBOUR = "neighbour"
# Another process may take this many times as long as it should, and a minute to start; then it ends.
PATIENCE, START = 5, 60


def sizes(tries: int, seconds: float, seed: int) -> dict[str, object]:
    """How often and how long everything is measured, seed, software and hardware."""
    return {
        "tries": tries,
        "seconds": seconds,
        "seed": seed,
        "shape": str(SHAPE),
        **environment(),
        "timing": "means of calls in the time of a measurement",
    }


def run_beside(tries: Sequence[int], seconds: float, seed: int = 0) -> Iterator[list[Beside]]:
    """Measure attention; yields the rows of one try at a time. One measurement takes so many seconds."""
    inputs = Inputs.make(SHAPE, seed)
    wrong_by = error(inputs.attend, inputs, scaled=True, gradients=True)
    correct, note = wrong_by <= LARGEST_ERROR, f"wrong by {wrong_by:.1e}, not timed"

    def plain() -> Tensor:
        return scaled_dot_product_attention(inputs.q, inputs.k, inputs.v, is_causal=True)

    work = {OURS: training(inputs.attend, inputs)} if correct else {}
    work[PLAIN] = training(plain, inputs)
    with _other(NEIGHBOUR, len(tries) * seconds * 5, seed) as neighbour:
        for number in tries:
            speed = _speeds([neighbour], seconds)[0]
            alone = {name: _call(function, seconds) for name, function in work.items()}
            rows = [] if correct else [Beside(number, OURS, None, None, None, None, wrong_by, note)]
            for name, function in work.items():
                neighbour.start()
                mean, longest = _call(function, seconds)
                share = neighbour.stop() / speed
                own = wrong_by if name == OURS else None
                rows.append(Beside(number, name, alone[name][0], mean, longest, share, own))
            yield rows


def run_trainings(model: str, tries: Sequence[int], seconds: float, seed: int = 0) -> Iterator[list[Trainings]]:
    """Measure two trainings of `BAM` or `LLAMA` side by side; yields the row of one try at a time."""
    with ExitStack() as stack:
        most = len(tries) * seconds * 3
        first, second = (stack.enter_context(_other(model, most, seed + number)) for number in range(2))
        for number in tries:
            alone = (_speeds([first], seconds)[0], _speeds([second], seconds)[0])
            both = _speeds([first, second], seconds)
            shares = (both[0] / alone[0], both[1] / alone[1])
            yield [Trainings(number, model, alone, shares)]


def _other(work: str, seconds: float, seed: int) -> Any:
    return companion("bayesattn.studies.bench.load.measure", work, str(round(START + PATIENCE * seconds)), str(seed))


def _speeds(companions: Sequence[Companion], seconds: float) -> list[float]:
    """Calls a second of each, while all of them work."""
    for each in companions:
        each.start()
    time.sleep(seconds)
    return [each.stop() for each in companions]


def _call(work: Callable[[], object], seconds: float) -> tuple[float, float]:
    """Mean and longest seconds of calls in this time, after one to warm up."""
    work()
    times: list[float] = []
    while sum(times) < seconds:
        begin = time.perf_counter()
        work()
        times.append(time.perf_counter() - begin)
    return sum(times) / len(times), max(times)


def _neighbour(seed: int) -> Callable[[], object]:
    """A training of other people: a plain layer of attention and a feed-forward layer, with Adam."""
    torch.manual_seed(seed)
    batch, heads, tokens, size = SHAPE.batch, SHAPE.heads, SHAPE.tokens, SHAPE.head_size
    width = heads * size
    to_heads, feed_forward = nn.Linear(width, 3 * width), nn.Sequential(nn.Linear(width, width), nn.ReLU())
    x = torch.randn(batch, tokens, width)
    optimizer = torch.optim.Adam([*to_heads.parameters(), *feed_forward.parameters()])

    def step() -> None:
        q, k, v = to_heads(x).view(batch, tokens, 3, heads, size).permute(2, 0, 3, 1, 4)
        attended = scaled_dot_product_attention(q, k, v, is_causal=True)
        loss = (feed_forward(attended.transpose(1, 2).reshape(x.shape)) - x).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    return step


def _training(name: str, seed: int) -> Callable[[], object]:
    """A step of the recipe of bam-tiny, of its model or of a Llama of the same sizes."""
    # Not above: the other processes would all wait for these imports.
    from bayesattn.data.contexts import Contexts, encode_stream
    from bayesattn.data.text import documents
    from bayesattn.data.tokenizer import load_tokenizer
    from bayesattn.models.shipped import resolve
    from bayesattn.studies.bench.peers import llama_like
    from bayesattn.training.augmentation import augmented
    from bayesattn.training.optimizers import make_optimizer
    from bayesattn.training.recipe import load_recipe
    from bayesattn.training.run import build_model, configuration
    from bayesattn.training.trainer import stack_contexts

    recipe = load_recipe(Path(resolve(BAM)) / "recipe.yaml", [])
    settings, tokenizer = recipe.training, load_tokenizer(recipe.data.tokenizer)
    config = configuration(recipe, tokenizer)
    torch.manual_seed(seed)
    model: Any = (build_model(config) if name == BAM else llama_like(config)).train()
    optimizer = make_optimizer(model, settings)
    stream = encode_stream(documents(recipe.data.source), tokenizer)
    contexts = Contexts(stream, tokenizer, recipe.data, number=2**40, seed=seed)
    steps = iter(range(2**30))

    def step() -> None:
        first = next(steps) * settings.batch
        batch = stack_contexts([contexts[first + number] for number in range(settings.batch)])
        if name == BAM:
            with augmented(model, recipe.augmentation):
                loss = model(**batch).loss
        else:
            loss = model(input_ids=batch["input_ids"], labels=batch["labels"]).loss
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), settings.clip)
        optimizer.step()
        optimizer.zero_grad()

    return step


WORKS: dict[str, Callable[[int], Callable[[], object]]] = {
    NEIGHBOUR: _neighbour,
    BAM: partial(_training, BAM),
    LLAMA: partial(_training, LLAMA),
}


if __name__ == "__main__":
    name, seconds, seed = sys.argv[1:]
    repeat(lambda: WORKS[name](int(seed)), int(seconds))
