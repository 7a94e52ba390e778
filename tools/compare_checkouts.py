"""Run two checkouts of bayesattn side by side and compare what they compute.

    python tools/compare_checkouts.py OLD NEW [--work DIR] [--parts logits,training,evaluations] [--renamed OLD=NEW …]

OLD and NEW are folders with a checkout each; both run with this interpreter, on one thread. Compared are

- logits of every shipped model, read at once, with a cache, and in packed documents;
- weights after 50 training steps of several recipes;
- the numbers of one small run of every evaluation.

`--renamed` maps a name of the old checkout to that of the new one, in commands, results and weights. For a checkout of
45f6cf2 these are held-out=validation, .lengthwise=.grows_with_length and model.hindsight.=model.delay_encoder.
Results stay in the working folder, and a command whose result is there already is not run again.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

TOLERANCE = 1e-6
STEPS = 50
MODELS = ("bam-tiny", "bam-small", "alibi-tiny", "rope-tiny", "nope-tiny", "sinusoidal-tiny")

# Recipes, and settings that differ. bam-small's second part has in-batch negatives, its last one delayed keys too.
RECIPES = {
    "bam-tiny": (),
    "alibi-tiny": (),
    "sinusoidal-plain": (),
    "bam-small-first": (),
    "bam-small-second": ('start=""',),
    "bam-small": ('start=""',),
}

# What a result file has beside its numbers: times, the command, and hashes of files that were renamed inside.
IGNORED = {"command", "fingerprint", "seconds", "version", "seconds_per_trial", "elapsed"}

EVALUATIONS = {
    "passkey": "eval passkey bam-tiny --lengths 1x,16x --trials 20",
    "passkey-worded": "eval passkey bam-small --lengths 1x,4x --trials 10 --wording validation",
    "passkey-fresh": "eval passkey bam-small --lengths 2x --trials 10 --wording fresh --haystack hard",
    "passkey-forced": "eval passkey rope-tiny --lengths 1x,2x --trials 10 --teacher-forced --depths 5",
    "needle": "eval needle bam-small --task multikey,variables --lengths 1024 --trials 3 --no-stop",
    "perplexity": "eval perplexity bam-tiny rope-tiny --lengths 0,4x --windows 8",
    "perplexity-small": "eval perplexity bam-small --by position --lengths 1024 --windows 4",
    "inspect": "inspect bam-tiny --tokens 256",
    "inspect-small": "inspect bam-small --tokens 256",
    "advise": "advise bam-tiny --length 1024",
    "advise-small": "advise bam-small --length 1024",
    "savings": "savings --schedule 15T@8K,100B@128K",
    "gaussian": "convergence gaussian --dimension 8 --lengths 256-1024 --points 3 --replicates 8 --number 3",
    "sphere": "convergence sphere --dimension 8 --lengths 256-1024 --points 3 --replicates 8 --number 3",
    "mixture": "convergence mixture --dimension 8 --lengths 256-1024 --points 3 --replicates 8 --number 3",
    "uniform": "convergence uniform --lengths 100-400 --points 3 --replicates 8",
    "hardmax": "convergence hardmax --lengths 100-400 --points 3 --replicates 8",
    "model": "convergence model bam-small --tokens 256 --lengths 64-128 --points 3 --replicates 8",
    "prior": "convergence prior --lengths 100-400 --points 3 --replicates 8",
    "dry-run": "train recipes/bam-small.yaml --dry-run",
}

# Runs in either checkout; what it calls has the same name in both.
LOGITS = """
import sys, torch
from bayesattn.evaluation.reader import load_reader
logits = {}
ids = torch.randint(2, 1024, (2, 700), generator=torch.Generator().manual_seed(0))
documents = torch.arange(700).div(250, rounding_mode="floor").expand(2, -1)
for name in sys.argv[2:]:
    model = load_reader(name).model
    with torch.no_grad():
        logits[f"{name}, at once"] = model(ids).logits
        logits[f"{name}, with a cache"] = model(ids, past_key_values=model.make_cache()).logits
        logits[f"{name}, packed documents"] = model(ids, document_ids=documents).logits
torch.save(logits, sys.argv[1])
"""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("old", type=Path)
    parser.add_argument("new", type=Path)
    parser.add_argument("--work", type=Path, help="folder for results; a temporary one by default")
    parser.add_argument("--parts", default="logits,training,evaluations")
    parser.add_argument("--renamed", action="append", default=[], metavar="OLD=NEW", help="may be repeated")
    options = parser.parse_args()
    names = dict(pair.split("=", 1) for pair in options.renamed)
    work = options.work or Path(tempfile.mkdtemp())
    checkouts = (Checkout(options.old, work / "old", names), Checkout(options.new, work / "new"))
    compare = {"logits": compare_logits, "training": compare_training, "evaluations": compare_evaluations}
    differing = sum(compare[part](*checkouts) for part in options.parts.split(","))
    print(f"{differing} differences" if differing else "no difference")
    return 1 if differing else 0


class Checkout:
    """A folder with the source, the folder its results go to, and new names of what it calls otherwise."""

    def __init__(self, folder: Path, results: Path, names: dict[str, str] | None = None) -> None:
        self.folder, self.results, self.names = folder.resolve(), results.resolve(), names or {}
        self.results.mkdir(parents=True, exist_ok=True)

    def renamed(self, text: str) -> str:
        """The text with the new names."""
        for before, after in self.names.items():
            text = text.replace(before, after)
        return text

    def own_words(self, text: str) -> str:
        """The text with the names that this checkout has."""
        for before, after in self.names.items():
            text = text.replace(after, before)
        return text

    def run(self, *arguments: str, result: Path) -> bool:
        """Run Python in the checkout, unless the result is there; whether it is then."""
        if not result.exists():
            environment = {**os.environ, "PYTHONPATH": str(self.folder / "src"), "HF_HUB_OFFLINE": "1"}
            environment["OMP_NUM_THREADS"] = "1"
            done = subprocess.run(
                [sys.executable, *arguments], cwd=self.folder, env=environment, capture_output=True, text=True
            )
            if done.returncode or not result.exists():
                print(f"{self.folder}: {' '.join(arguments)[:200]} failed\n{(done.stderr or done.stdout)[-1500:]}")
        return result.exists()


def compare_logits(old: Checkout, new: Checkout) -> int:
    files = [checkout.results / "logits.pt" for checkout in (old, new)]
    for checkout, file in zip((old, new), files, strict=True):
        if not checkout.run("-c", LOGITS, str(file), *MODELS, result=file):
            return 1
    before, after = (torch.load(file) for file in files)
    return sum(report(f"logits of {name}", (before[name] - after[name]).abs().max().item()) for name in before)


def compare_training(old: Checkout, new: Checkout) -> int:
    differing = 0
    for recipe, changes in RECIPES.items():
        settings = [f"training.stop={STEPS}", "training.save_every=0", "training.evaluate_every=0", *changes]
        files = []
        for checkout in (old, new):
            out = checkout.results / recipe
            files.append(out / "model" / "model.safetensors")
            command = ["-m", "bayesattn.cli", "train", f"recipes/{recipe}.yaml", "--out", str(out)]
            command += [word for setting in settings for word in ("--set", setting)]
            checkout.run(*command, result=files[-1])
        if not all(file.exists() for file in files):
            differing += 1
            continue
        before, after = load_file(files[0]), load_file(files[1])
        before = {old.renamed(name): value for name, value in before.items()}
        if before.keys() != after.keys():
            print(f"weights of {recipe}: {sorted(before.keys() ^ after.keys())} are in one checkout only")
            differing += 1
            continue
        largest = max((before[name].float() - after[name].float()).abs().max().item() for name in before)
        differing += report(f"weights of {recipe} after {STEPS} steps", largest)
    return differing


def compare_evaluations(old: Checkout, new: Checkout) -> int:
    differing = 0
    for name, command in EVALUATIONS.items():
        contents = []
        for checkout in (old, new):
            words = checkout.own_words(command).split()
            file, out = checkout.results / f"{name}.json", checkout.results / f"{name}-files"
            extra = ["--json", str(file)] + ([] if "--dry-run" in words else ["--out", str(out)])
            if checkout.run("-m", "bayesattn.cli", *words, *extra, result=file):
                contents.append(dict(leaves(json.loads(file.read_text()))))
        if len(contents) < 2:
            differing += 1
            continue
        before = {
            old.renamed(key): old.renamed(value) if isinstance(value, str) else value
            for key, value in contents[0].items()
        }
        after = contents[1]
        wrong = [key for key in before.keys() | after.keys() if not equal(before.get(key), after.get(key))]
        differing += bool(wrong)
        print(f"{name}: {len(before)} values" + (f", {len(wrong)} differ:" if wrong else ", all equal"))
        for key in sorted(wrong)[:6]:
            print(f"    {key}: {before.get(key)!r} → {after.get(key)!r}")
    return differing


def report(what: str, difference: float) -> bool:
    wrong = not difference <= TOLERANCE
    print(f"{what}: {difference:.1e}" + (f", more than {TOLERANCE}" if wrong else ""))
    return wrong


def leaves(content: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Every value of nested lists and dictionaries, by its path, without what is ignored."""
    parts = content.items() if isinstance(content, dict) else enumerate(content)
    for key, value in parts:
        if key in IGNORED:
            continue
        here = f"{path}.{key}" if path else str(key)
        if isinstance(value, (dict, list)):
            yield from leaves(value, here)
        else:
            yield here, value


def equal(before: Any, after: Any) -> bool:
    """Numbers up to a millionth of their size: a sum in another order is the same number."""
    if isinstance(before, float) and isinstance(after, (float, int)):
        return abs(before - after) <= TOLERANCE * max(1.0, abs(before)) or before != before
    return bool(before == after)


if __name__ == "__main__":
    sys.exit(main())
