"""rope-tiny without its rotary positions: what training with a prior, or with nothing in their place, brings back.

    python tools/transplant.py runs/transplant                # train, evaluate, write docs/data/transplant.json
    python tools/transplant.py runs/transplant --print        # only print the commands that are left to run

Each is a command of bayesattn that resumes a run that was stopped. 400 steps are a fifth of the training of rope-tiny.
0 steps are one with learning rates of 0. The models are named after what is in the place of the rotations, the steps,
and the seed: prior-20-s1.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from bayesattn.models.shipped import shipped

ROOT = Path(__file__).parents[1]
RECIPE, RESULT = ROOT / "recipes" / "transplant-tiny.yaml", ROOT / "docs" / "data" / "transplant.json"
POSITIONS = {"prior": "bam", "nothing": "nope"}
STEPS = (0, 20, 100, 400)
LENGTHS, CONTEXTS = "1x,4x,16x,64x,500x", "0,1x,4x"
STILL = ("training.steps=1", "training.lr=0", "training.matrix_lr=0", "training.prior_lr=0", "training.warmup=0")


def commands(folder: Path, trials: int, seed: int) -> Iterator[list[str]]:
    """The commands that are not done, in their order."""
    models = {"rope-tiny": Path(shipped("rope-tiny"))}
    for place, position in POSITIONS.items():
        for steps in STEPS:
            name = f"{place}-{steps}-s{seed}"
            models[name] = folder / name / "model"
            if not (models[name] / "config.json").exists():
                rates = [f"training.steps={steps}"] if steps else STILL
                changes = [f"name={name}", f"seed={seed}", f"model.position={position}", *rates]
                options = [option for change in changes for option in ("--set", change)]
                yield ["train", str(RECIPE), *options, "--out", str(folder / name), "--resume"]
    for name, model in models.items():
        at = "rope-tiny" if name == "rope-tiny" else str(model)
        for kind, settings in {
            "passkey": ["--lengths", LENGTHS, "--trials", str(trials), "--seed", "1"],
            "perplexity": ["--lengths", CONTEXTS],
        }.items():
            out = folder / f"{kind}-{name}"
            if not is_whole(out / f"{kind}.json"):
                yield ["eval", kind, at, *settings, "--out", str(out)]
    yield ["variants", str(folder), "--out", str(folder / "variants"), "--json", os.path.relpath(RESULT)]


def is_whole(file: Path) -> bool:
    """Whether a result is there, and all of it."""
    return file.exists() and not json.loads(file.read_text(encoding="utf-8")).get("partial")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--trials", type=int, default=20)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--print", action="store_true", dest="only_print")
    given = parser.parse_args()
    for command in commands(given.folder, given.trials, given.seed):
        print("bayesattn", shlex.join(command), flush=True)
        if not given.only_print:
            subprocess.run([sys.executable, "-m", "bayesattn.cli", *command], check=True)


if __name__ == "__main__":
    main()
