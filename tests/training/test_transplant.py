"""tools/transplant.py: the commands that are left to run."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path

from bayesattn.training.recipe import load_recipe
from tools.transplant import RECIPE, commands


def test_every_training_is_a_recipe_and_what_is_done_is_not_repeated(tmp_path: Path) -> None:
    left = list(commands(tmp_path, trials=3, seed=1))
    trainings = [command for command in left if command[0] == "train"]
    assert len(trainings) == 8
    for command in trainings:
        changes = [value for option, value in pairwise(command) if option == "--set"]
        recipe, folder = load_recipe(RECIPE, changes), Path(command[command.index("--out") + 1])
        assert recipe.name == folder.name
        assert recipe.start == "rope-tiny"
        assert recipe.config().position == {"prior": "bam", "nothing": "nope"}[recipe.name.partition("-")[0]]
        (folder / "model").mkdir(parents=True)
        (folder / "model" / "config.json").write_text("{}")
    evaluations = [command for command in left if command[0] == "eval"]
    assert len(evaluations) == 2 * (len(trainings) + 1)
    for command, partial in zip(evaluations, [True, *[False] * 17], strict=True):
        out = Path(command[command.index("--out") + 1])
        out.mkdir()
        (out / f"{command[1]}.json").write_text(json.dumps({"partial": partial}))
    assert list(commands(tmp_path, trials=3, seed=1)) == [evaluations[0], left[-1]]
