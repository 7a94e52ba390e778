"""The demo: pass keys in up to 64,000 tokens, for models trained on 128 tokens with five positional encodings."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from rich.console import Console
from rich.live import Live
from rich.table import Table

import bayesattn as ba
from bayesattn.drawing.priors import gallery, prior_table
from bayesattn.evaluation import passkey
from bayesattn.evaluation.cells import Cell
from bayesattn.evaluation.reader import Reader, load_reader
from bayesattn.evaluation.trials import evaluate
from bayesattn.interrupts import keeps
from bayesattn.models.bam.modeling import BamLayer
from bayesattn.models.shipped import resolve
from bayesattn.priors import Prior
from bayesattn.studies.passkey.show import FOUND, models_table
from bayesattn.studies.retrieval_show import accuracy_figure
from bayesattn.training.recipe import load_recipe

MODELS = ("bam-tiny", "alibi-tiny", "nope-tiny", "rope-tiny", "sinusoidal-tiny")
# The first model for a text of the user's, because such a text has numbers of its own.
MODEL_FOR_TEXTS = "bam-small"
# Number of trials at each multiple of the training length.
TRIALS: Mapping[int, int] = {1: 40, 4: 40, 16: 20, 64: 10, 500: 10}


def demo(
    out: Path,
    console: Console,
    *,
    haystack: str = "",
    train: bool = False,
    seed: int = 0,
    trials: Mapping[int, int] = TRIALS,
    recipe_changes: Sequence[str] = (),
) -> None:
    """Measure retrieval live, then draw it and the learned priors into `out`.

    Args:
        haystack: a text file to hide the keys in, instead of bland sentences; bam-small then comes first.
        train: whether to train bam-tiny from scratch first.
        trials: number of trials at each multiple of the training length.
        recipe_changes: changes of the recipe of `train`, such as `training.steps=500`.
    """
    first = MODEL_FOR_TEXTS if haystack else MODELS[0]
    names = {name: name for name in (first, *MODELS)}
    task = passkey.Task(haystack=haystack)
    task.prompts(load_reader(first))  # raises an error for a bad haystack before training
    if train:
        names = {"bam-tiny, new": str(_train(out / "train", console, recipe_changes)), **names}
        first = "bam-tiny, new"
    results: dict[str, list[Cell]] = {}
    readers: dict[str, Reader] = {}
    where = f"the text of {haystack}" if haystack else "bland sentences"
    with Live(console=console, refresh_per_second=4) as live:
        for name, place in names.items():
            readers[name] = reader = load_reader(place)
            by_length = {times * reader.train_length: number for times, number in trials.items()}
            cells: dict[int, Cell] = {}
            for cell in evaluate(reader, task, list(by_length), by_length, seed=seed):
                cells[cell.length] = cell
                results[name] = list(cells.values())
                live.update(_table(results, list(by_length), reader.train_length, where, seed))
    console.print()
    curve, _ = accuracy_figure(results, readers[first].train_length, out / "passkey", FOUND)
    priors = _priors(readers[first])
    console.print(prior_table(priors, 64_000))
    learned, _ = gallery(priors, 64_000, out / "priors")
    console.print(
        f"Pictures: {curve} (accuracy against length), {learned} (what each head of {first} learned)\n"
        "Next:\n"
        "  bayesattn demo --haystack FILE           hide the keys in your own text\n"
        "  bayesattn eval passkey bam-tiny --lengths 1x,500x,1048576 --trials 20\n"
        "  bayesattn demo --train                   train bam-tiny from scratch first, in nine minutes or more\n"
        "  docs/models.md                           the model in your own code, and recipes of your own",
        highlight=False,
    )


def families(out: Path, console: Console, tokens: int) -> None:
    """One prior of each family as a table, and as a picture in `out`."""
    priors: dict[str, Prior] = {
        "NoPE": ba.Uniform(1),
        "ALiBi": ba.Laplace(4),
        "BAM": ba.GeneralizedGaussian(5, "spread"),
        "KERPLE": ba.KerpleLog(3),
        "Window": ba.Window(3, [16, 64, 256]),
    }
    console.print(prior_table(priors, tokens))
    both = ba.Window(5, 256) * ba.GeneralizedGaussian(5, "spread")
    console.print(gallery({**priors, "Window × BAM": both}, tokens, out / "priors")[0])


def _train(out: Path, console: Console, recipe_changes: Sequence[str]) -> Path:
    from bayesattn.training.run import CARD, train

    folder = out / "model"
    if (folder / CARD).exists():
        console.print(f"{folder} is already trained; remove {out} to train it again")
        return folder
    recipe = load_recipe(Path(resolve(MODELS[0])) / "recipe.yaml", recipe_changes)
    console.print(
        f"Training {recipe.name} from scratch on {recipe.data.context} tokens, {recipe.training.steps:,} steps"
    )
    with keeps(lambda: f"what it has written is in {out}, and the same command goes on"):
        return train(recipe, out, resume=out.exists())


def _table(results: dict[str, list[Cell]], lengths: list[int], train_length: int, where: str, seed: int) -> Table:
    return models_table(
        results,
        lengths,
        train_length,
        title=f"Keys found in {where}, all five digits right, by models trained on {train_length} tokens",
        caption="greedy generation, random depth, keys never an answer in training; 95% Wilson intervals; –: not "
        f"tried, since none was found at a shorter length; seed {seed}",
    )


def _priors(reader: Reader) -> dict[str, Prior]:
    layers = [layer for layer in reader.model.model.layers if isinstance(layer, BamLayer)]
    priors = {f"layer {number}": layer.self_attn.distance_prior for number, layer in enumerate(layers, 1)}
    return {name: prior for name, prior in priors.items() if isinstance(prior, Prior)}
