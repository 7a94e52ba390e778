"""The command line; each command is a thin call of one function elsewhere."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated, Optional

import typer
from rich.console import Console

import bayesattn
from bayesattn.errors import UserError

app = typer.Typer(
    name="bayesattn",
    help="Bayesian attention: positional encoding as a prior. Train short, read long.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    add_completion=False,
)
bench = typer.Typer(
    help="Speed and memory, side by side with peers in one process.", no_args_is_help=True, rich_markup_mode=None
)
app.add_typer(bench, name="bench")

Json = Annotated[Optional[Path], typer.Option("--json", metavar="FILE", help="Write the results as JSON to FILE.")]  # noqa: UP045
Out = Annotated[Path, typer.Option(metavar="DIR", help="Folder for results and pictures.")]


def main() -> None:
    """Entry point: what a user can mend is one sentence and exit code 2."""
    try:
        app()
    except (ModuleNotFoundError, OSError, UserError) as problem:
        missing = problem.name if isinstance(problem, ModuleNotFoundError) else None
        hint = f"; this command needs {missing}: pip install 'bayesattn[train]'" if missing else ""
        print(f"bayesattn: {problem}{hint}", file=sys.stderr)
        sys.exit(2)


@app.callback(invoke_without_command=True)
def _version(
    version: Annotated[bool, typer.Option("--version", help="Print the version and leave.", is_eager=True)] = False,
) -> None:
    if version:
        print(bayesattn.__version__)
        raise typer.Exit


@app.command()
def demo(out: Out = Path("runs/demo")) -> None:
    """See the priors, and that attention with them is exact and fast; about half a minute.

    Example: bayesattn demo --out runs/demo
    """
    from bayesattn.demo import demo as run_demo

    run_demo(out, Console())


@app.command()
def train(
    recipe: Annotated[Path, typer.Argument(metavar="RECIPE.yaml", help="What to train, on what, and how.")],
    changes: Annotated[
        Optional[list[str]],  # noqa: UP045
        typer.Option("--set", metavar="SECTION.KEY=VALUE", help="Change a setting of the recipe; may be repeated."),
    ] = None,
    resume: Annotated[bool, typer.Option(help="Go on from the newest checkpoint in the folder.")] = False,
    report_to: Annotated[str, typer.Option(help="Where the Trainer reports: none, tensorboard, wandb, …")] = "none",
    out: Annotated[Optional[Path], typer.Option(metavar="DIR", help="Folder of the run; runs/NAME by default.")] = None,  # noqa: UP045
) -> None:
    """Train a model by a recipe; the result is in the folder's model/.

    Example: bayesattn train recipes/bam-tiny.yaml --set training.steps=500 --out runs/short
    """
    _quiet()
    from bayesattn.training.recipe import load_recipe
    from bayesattn.training.train import train as run

    loaded = load_recipe(recipe, changes or [])
    print(run(loaded, out or Path("runs") / loaded.name, resume=resume, report_to=report_to))


@bench.command("attention")
def bench_attention(
    lengths: Annotated[str, typer.Option(metavar="N,N,…", help="Numbers of tokens.")] = "512,1024,2048,4096,8192,16384",
    memory: Annotated[bool, typer.Option(help="Measure peak memory, each method in a process of its own.")] = True,
    flex: Annotated[bool, typer.Option(help="Include compiled FlexAttention, which takes long to compile.")] = True,
    seed: Annotated[int, typer.Option(min=0, max=2**32, help="Seed of the random inputs.")] = 0,
    json: Json = None,
    out: Out = Path("runs/bench-attention"),
) -> None:
    """Attention with a learned prior against SDPA, a bias matrix, FlexAttention and dense autograd.

    Results that differ from the float64 reference are not timed. Takes about ten minutes on two cores; the JSON file is
    rewritten after every length.

    Example: bayesattn bench attention --lengths 512,2048 --no-flex --json bench.json
    """
    from rich.progress import Progress, SpinnerColumn, TimeElapsedColumn

    from bayesattn.benchmarks.attention import FORWARD, TRAINING, Row, most_tokens, run, to_json
    from bayesattn.report import plots, tables

    sizes = _lengths(lengths, most=most_tokens())
    json = json or out / "attention.json"
    json.parent.mkdir(parents=True, exist_ok=True)
    console = Console()
    rows: list[Row] = []
    with Progress(SpinnerColumn(), *Progress.get_default_columns(), TimeElapsedColumn(), console=console) as progress:
        task = progress.add_task("measuring", total=2 * len(sizes))
        for part in run(sizes, seed=seed, memory=memory, flex=flex):
            rows += part
            _write(json, to_json(rows, seed))
            progress.update(task, advance=1, description=f"{part[0].phase}, {part[0].tokens:,} tokens")
    for phase in (FORWARD, TRAINING):
        console.print(tables.attention_table(rows, phase))
    console.print(*plots.attention(rows, out / "attention"), json, sep="\n")


@bench.command("long")
def bench_long(
    lengths: Annotated[
        str, typer.Option(metavar="N,N,…", help="Numbers of tokens to read at once.")
    ] = "1024,4096,16384,65536,131072,262144",
    decode: Annotated[
        str, typer.Option(metavar="N,N,…", help="Numbers of tokens to decode after.")
    ] = "1024,16384,65536",
    longest: Annotated[float, typer.Option(min=0.1, help="Leave out what would take more seconds than this.")] = 120.0,
    memory: Annotated[bool, typer.Option(help="Measure peak memory, each mix in a process of its own.")] = True,
    seed: Annotated[int, typer.Option(min=0, max=2**32, help="Seed of the random inputs.")] = 0,
    json: Json = None,
    out: Out = Path("runs/bench-long"),
) -> None:
    """Pruned attention and the cache that forgets against plain attention, for layers of local and other heads.

    Results that differ from the float64 reference are not timed. Takes about twenty minutes on two cores; the JSON file
    is rewritten after every length.

    Example: bayesattn bench long --lengths 1024,16384 --decode 1024 --json long.json
    """
    from rich.progress import Progress, SpinnerColumn, TimeElapsedColumn

    from bayesattn.benchmarks import long
    from bayesattn.report import plots, tables

    sizes = _lengths(lengths, most=long.most_tokens())
    decoded_after = _lengths(decode, most=long.most_tokens(), option="--decode")
    json = json or out / "long.json"
    json.parent.mkdir(parents=True, exist_ok=True)
    console = Console()
    rows: list[long.Prefill] = []
    decoded: list[long.Decode] = []
    with Progress(SpinnerColumn(), *Progress.get_default_columns(), TimeElapsedColumn(), console=console) as progress:
        task = progress.add_task("decoding", total=len(sizes) + len(decoded_after))
        for tokens_per_second in long.run_decode(decoded_after, seed=seed):
            decoded += tokens_per_second
            _write(json, long.to_json(rows, decoded, seed))
            progress.update(task, advance=1, description=f"decoding after {decoded[-1].tokens:,} tokens")
        for part in long.run_prefill(sizes, seed=seed, memory=memory, longest=longest):
            rows += part
            _write(json, long.to_json(rows, decoded, seed))
            progress.update(task, advance=1, description=f"prefill of {part[0].tokens:,} tokens")
    console.print(tables.prefill_table(rows, long.exponents(rows)))
    console.print(tables.decode_table(decoded))
    console.print(*plots.long(rows, decoded, out / "long"), json, sep="\n")


def _quiet() -> None:
    """Keep transformers from talking about what is of no concern here."""
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")


def _lengths(text: str, most: int, option: str = "--lengths") -> list[int]:
    try:
        sizes = sorted({int(part) for part in text.split(",")})
    except ValueError:
        sizes = []
    if not sizes or sizes[0] < 64 or sizes[-1] > most:
        raise typer.BadParameter(
            f"{text!r}; give whole numbers of tokens, at least 64 and at most {most:,} in this machine's memory, with "
            "commas between them",
            param_hint=option,
        )
    return sizes


def _write(path: Path, text: str) -> None:
    """Replace the file in one step, so that a reader or a kill never meets half of it."""
    partial = path.with_name(path.name + ".partial")
    partial.write_text(text)
    partial.replace(path)


if __name__ == "__main__":
    main()
