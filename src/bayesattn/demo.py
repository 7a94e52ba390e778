"""The first minutes with bayesattn: a model trained on 128 tokens reads 64,000, next to the encodings you know."""

from __future__ import annotations

from pathlib import Path

from rich.console import Console
from rich.live import Live
from rich.table import Table

import bayesattn as ba
from bayesattn.evaluation import passkey
from bayesattn.evaluation.reader import Reader, load_reader
from bayesattn.evaluation.trials import Cell, evaluate
from bayesattn.models.layers import BamLayer
from bayesattn.models.shipped import resolve
from bayesattn.priors import Prior
from bayesattn.report import plots, tables
from bayesattn.training.recipe import load_recipe

MODELS = ("bam-tiny", "alibi-tiny", "nope-tiny", "rope-tiny", "sinusoidal-tiny")
# For a text of the user's, which has numbers of its own in it.
BETTER = "bam-small"
RECIPE_CHANGES: tuple[str, ...] = ()  # of --train
# Multiples of the training length and trials of each.
TRIALS = {1: 40, 4: 40, 16: 20, 64: 10, 500: 10}


def demo(out: Path, console: Console, *, haystack: str = "", train: bool = False, seed: int = 0) -> None:
    """Measure retrieval live, then draw it and the learned priors into `out`.

    Args:
        haystack: a text file to hide the keys in, instead of the usual sentences; bam-small then comes first.
        train: whether to train bam-tiny from nothing first.
    """
    first = BETTER if haystack else MODELS[0]
    names = {name: name for name in (first, *MODELS)}
    task = passkey.Task(haystack=haystack)
    task.prompts(load_reader(first))  # a haystack that will not do is better known before training
    if train:
        names = {"bam-tiny, new": str(_train(out / "train", console)), **names}
        first = "bam-tiny, new"
    results: dict[str, list[Cell]] = {}
    readers: dict[str, Reader] = {}
    where = f"the text of {haystack}" if haystack else "bland sentences"
    with Live(console=console, refresh_per_second=4) as live:
        for name, place in names.items():
            readers[name] = reader = load_reader(place)
            trials = {times * reader.train_length: number for times, number in TRIALS.items()}
            cells: dict[int, Cell] = {}
            for cell in evaluate(reader, task, list(trials), trials, seed=seed):
                cells[cell.length] = cell
                results[name] = list(cells.values())
                live.update(_table(results, list(trials), reader.train_length, where, seed))
    console.print()
    curve, _ = plots.passkey(results, readers[first].train_length, out / "passkey")
    priors = _priors(readers[first])
    console.print(tables.prior_table(priors, 64_000))
    gallery, _ = plots.gallery(priors, 64_000, out / "priors")
    console.print(
        f"Pictures: {curve} (accuracy against length), {gallery} (what each head of {first} learned)\n"
        "Next:\n"
        "  bayesattn demo --haystack FILE           hide the keys in a text of yours\n"
        "  bayesattn eval passkey bam-tiny --lengths 1x,500x,1048576 --trials 20\n"
        "  bayesattn demo --train                   train bam-tiny from nothing first, in about ten minutes\n"
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
    console.print(tables.prior_table(priors, tokens))
    both = ba.Window(5, 256) * ba.GeneralizedGaussian(5, "spread")
    console.print(plots.gallery({**priors, "Window × BAM": both}, tokens, out / "priors")[0])


def _train(out: Path, console: Console) -> Path:
    from bayesattn.training.train import CARD, train

    folder = out / "model"
    if (folder / CARD).exists():
        console.print(f"{folder} is trained already; remove {out} to train it anew")
        return folder
    recipe = load_recipe(Path(resolve(MODELS[0])) / "recipe.yaml", RECIPE_CHANGES)
    console.print(
        f"Training {recipe.name} from nothing on {recipe.data.context} tokens, {recipe.training.steps:,} steps"
    )
    return train(recipe, out, resume=out.exists())


def _table(results: dict[str, list[Cell]], lengths: list[int], train_length: int, where: str, seed: int) -> Table:
    return tables.passkey_table(
        results,
        lengths,
        train_length,
        title=f"Five digits hidden in {where}: found, all of them, by models trained on {train_length} tokens",
        caption="greedy generation, random depth, keys never an answer in training; 95% Wilson intervals; –: not "
        f"tried, since none was found at a shorter length; seed {seed}",
    )


def _priors(reader: Reader) -> dict[str, Prior]:
    layers = [layer for layer in reader.model.model.layers if isinstance(layer, BamLayer)]
    return {f"layer {number}": layer.self_attn.prior for number, layer in enumerate(layers, 1)}
