"""The command line; each command is a thin call of one function elsewhere."""

from __future__ import annotations

import math
import os
import shlex
import sys
from json import dumps as to_json
from pathlib import Path
from typing import Annotated, Optional

import typer
from rich.console import Console
from rich.live import Live

import bayesattn
from bayesattn.errors import UserError
from bayesattn.files import write_whole

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
evaluation = typer.Typer(
    help="How far a model really reads: ours, or any causal model of Hugging Face.",
    no_args_is_help=True,
    rich_markup_mode=None,
)
app.add_typer(bench, name="bench")
app.add_typer(evaluation, name="eval")

Json = Annotated[Optional[Path], typer.Option("--json", metavar="FILE", help="Write the results as JSON to FILE.")]  # noqa: UP045
Model = Annotated[str, typer.Argument(metavar="MODEL", help="A shipped name, a folder, or a Hugging Face id.")]
Lengths = Annotated[
    str, typer.Option(metavar="N,Nx,…", help="Tokens, or multiples of the training length: 1x,16x,65536.")
]
Tokenizer = Annotated[
    Optional[str],  # noqa: UP045
    typer.Option(metavar="NAME", help="Tokenizer of a model that has none: a shipped name, a folder or an id."),
]
Budget = Annotated[
    Optional[str],  # noqa: UP045
    typer.Option(metavar="TIME", help="Plan the trials to fit into this time: 90s, 10m, 2h."),
]
RunOut = Annotated[
    Optional[Path],  # noqa: UP045
    typer.Option(metavar="DIR", help="Folder for results and pictures; runs/COMMAND-MODEL by default."),
]
Seed = Annotated[int, typer.Option(min=0, max=2**32, help="Seed of everything random.")]
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
def demo(
    haystack: Annotated[str, typer.Option(metavar="FILE", help="Hide the keys in this text.")] = "",
    train: Annotated[bool, typer.Option("--train", help="Train bam-tiny from nothing first.")] = False,
    seed: Seed = 0,
    out: Out = Path("runs/demo"),
) -> None:
    """A model trained on 128 tokens reads 64,000, next to the encodings you know; about two minutes.

    Example: bayesattn demo --haystack README.md
    """
    _quiet()
    from bayesattn.demo import demo as run_demo

    run_demo(out, Console(), haystack=haystack, train=train, seed=seed)


@app.command()
def priors(
    tokens: Annotated[int, typer.Option(min=2, max=2**24, help="Distances to look at.")] = 1024,
    out: Out = Path("runs/priors"),
) -> None:
    """What each family of priors believes about distance, as a table and a picture.

    Example: bayesattn priors --tokens 8192
    """
    from bayesattn.demo import families

    families(out, Console(), tokens)


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
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only build the model and tell what it takes.")] = False,
    hardware: Annotated[str, typer.Option(help="What a dry run counts with: h100, a100, rtx4090, …")] = "h100",
    devices: Annotated[int, typer.Option(min=1, help="How many of them.")] = 1,
    mfu: Annotated[float, typer.Option(help="Share of the peak that is reached.")] = 0.4,
    json: Json = None,
) -> None:
    """Train a model by a recipe; the result is in the folder's model/.

    Example: bayesattn train recipes/bam-tiny.yaml --set training.steps=500 --out runs/short
    """
    _quiet()
    if dry_run:
        from bayesattn.report import tables
        from bayesattn.training.estimate import estimate
        from bayesattn.training.recipe import load_recipe

        told = estimate(load_recipe(recipe, changes or []), hardware=hardware, devices=devices, mfu=mfu)
        Console().print(tables.estimate_table(told))
        if json is not None:
            write_whole(json, to_json(told.to_dict(), indent=1))
        return
    from bayesattn.training.recipe import load_recipe
    from bayesattn.training.train import train as run

    loaded = load_recipe(recipe, changes or [])
    print(run(loaded, out or Path("runs") / loaded.name, resume=resume, report_to=report_to))


@evaluation.command("passkey")
def eval_passkey(
    model: Model,
    lengths: Lengths = "1x,4x,16x,64x,500x",
    trials: Annotated[int, typer.Option(min=1, help="Trials of each length.")] = 100,
    depths: Annotated[
        str, typer.Option(metavar="random|N", help="Where keys are hidden: anywhere, or N even depths in turn.")
    ] = "random",
    wording: Annotated[
        str,
        typer.Option(help="standard: the usual pass-key prompt; train or held-out: competing facts in those words."),
    ] = "standard",
    keys: Annotated[str, typer.Option(metavar="N|N-N", help="How many facts compete.")] = "3-5",
    digits: Annotated[int, typer.Option(help="Digits of each key.")] = 5,
    haystack: Annotated[
        str, typer.Option(metavar="bland|hard|text|FILE", help="What the keys are hidden in; by default what is usual.")
    ] = "",
    teacher_forced: Annotated[
        bool, typer.Option("--teacher-forced", help="Predict each digit after the true ones; easier than generation.")
    ] = False,
    budget: Budget = None,
    stop: Annotated[bool, typer.Option(help="Stop where none of the first trials is right.")] = True,
    dense: Annotated[
        bool, typer.Option("--dense", help="Read one prompt of the longest length the dense way too, and compare.")
    ] = False,
    tokenizer: Tokenizer = None,
    seed: Seed = 0,
    json: Json = None,
    out: RunOut = None,
) -> None:
    """Keys hidden at any depth of any length, answered by greedy generation, with 95% Wilson intervals.

    Results are kept after every batch; the same command goes on where it was stopped.

    Example: bayesattn eval passkey bam-tiny --lengths 1x,64x,500x --trials 100 --seed 1 --json passkey.json
    """
    _quiet()
    from bayesattn.evaluation import passkey
    from bayesattn.evaluation.reader import load_reader
    from bayesattn.evaluation.trials import Cell
    from bayesattn.evaluation.trials import run as run_trials
    from bayesattn.files import read_results, write_results
    from bayesattn.report import plots, tables

    task = passkey.Task(
        wording=wording,  # type: ignore[arg-type]
        haystack=haystack,
        needles=_needles(keys),
        digits=digits,
        teacher_forced=teacher_forced,
    )
    levels = None if depths == "random" else _count(depths, "--depths")
    seconds = None if budget is None else _seconds(budget)
    reader = load_reader(model, tokenizer)
    sizes = _multiples(lengths, reader.train_length)
    chosen = {
        "wording": (wording, "standard"),
        "haystack": (haystack, ""),
        "keys": (keys, "3-5"),
        "digits": (digits, 5),
    }
    chosen |= {"depths": (depths, "random"), "teacher-forced": (teacher_forced, False), "seed": (seed, 0)}
    out = out or _folder("passkey", model, chosen)
    json = json or out / "passkey.json"
    console = Console()
    cells: list[Cell] = []
    how = "teacher-forced" if teacher_forced else "greedy generation"
    title = f"{_short(model)}: {wording} wording, {task.haystack} haystack, {how}, seed {seed}"
    with Live(console=console, refresh_per_second=2) as live:
        for cells in run_trials(
            reader, task, sizes, trials, json, seed=seed, depths=levels, budget=seconds, stop=stop, command=_command()
        ):
            live.update(tables.cells_table(cells, reader.train_length, title))
    curve, _ = plots.passkey({_short(model): cells}, reader.train_length, out / "passkey")
    heat, _ = plots.passkey_depths(cells, _short(model), out / "depths")
    console.print()
    if dense:
        from bayesattn.evaluation.dense import compare as compare_dense

        told = compare_dense(reader, task, sizes[-1], seed)
        console.print(
            f"One prompt of {told.length:,} tokens: {told.seconds:.2f} s to the first token; with every logit and bias "
            f"written out {told.dense_seconds:.1f} s, {told.ratio:.0f} times that; logits differ by {told.error:.0e}.",
            highlight=False,
        )
        content = read_results(json)
        write_results(json, content["kind"], {**content, "dense": told.to_dict()})
    console.print(curve, heat, json, sep="\n")


@evaluation.command("needle")
def eval_needle(
    model: Model,
    task: Annotated[
        str, typer.Option(metavar="NAME", help="single, multikey, multivalue, variables, … or all.")
    ] = "all",
    lengths: Lengths = "4096,8192,16384",
    trials: Annotated[int, typer.Option(min=1, help="Trials of each length.")] = 20,
    budget: Budget = None,
    stop: Annotated[bool, typer.Option(help="Stop where none of the first trials is right.")] = True,
    tokenizer: Tokenizer = None,
    seed: Seed = 0,
    out: RunOut = None,
) -> None:
    """Needles among needles, chains of variables and common words, worded and judged as in RULER.

    The score is the mean share of the answers found. Results are kept after every batch, one file a task; the same
    command goes on where it was stopped.

    Example: bayesattn eval needle bam-small --task multikey --lengths 1024,4096 --trials 50
    """
    _quiet()
    from bayesattn.evaluation import needle
    from bayesattn.evaluation.reader import load_reader
    from bayesattn.evaluation.trials import run as run_trials
    from bayesattn.report import tables

    chosen = [needle.Task(name) for name in (needle.KINDS if task == "all" else task.split(","))]
    seconds = None if budget is None else _seconds(budget) / len(chosen)
    reader = load_reader(model, tokenizer)
    sizes = _multiples(lengths, reader.train_length)
    out = out or _folder("needle", model, {"seed": (seed, 0)})
    console = Console()
    for one in chosen:
        file = out / f"{one.name}.json"
        title = f"{_short(model)}: {one.name}, mean share of answers found, greedy generation, seed {seed}"
        with Live(console=console, refresh_per_second=2) as live:
            for cells in run_trials(
                reader, one, sizes, trials, file, seed=seed, budget=seconds, stop=stop, command=_command()
            ):
                live.update(tables.cells_table(cells, reader.train_length, title))
        console.print()
        console.print(file)


@evaluation.command("harness")
def eval_harness(
    model: Model,
    tasks: Annotated[str, typer.Option(metavar="NAME,…", help="Tasks of lm-eval.")] = "niah_single_1,ruler_vt",
    length: Annotated[int, typer.Option(min=64, help="The longest context, and that of RULER's tasks.")] = 4096,
    limit: Annotated[Optional[int], typer.Option(min=1, help="Documents of each task; all by default.")] = None,  # noqa: UP045
    shots: Annotated[Optional[int], typer.Option(min=0, help="Examples in the prompt.")] = None,  # noqa: UP045
    tokenizer: Tokenizer = None,
    json: Json = None,
    out: RunOut = None,
) -> None:
    """Tasks of lm-eval on any model here; some of RULER's need no network.

    Example: bayesattn eval harness bam-tiny --tasks niah_single_1 --length 4096 --limit 20
    """
    _quiet()
    from bayesattn.evaluation.harness import run
    from bayesattn.evaluation.reader import load_reader
    from bayesattn.files import write_results

    results = run(load_reader(model, tokenizer), tasks.split(","), length=length, limit=limit, shots=shots)
    json = json or (out or _folder("harness", model, {})) / "harness.json"
    write_results(json, "harness", {"model": model, "length": length, "command": _command(), "results": results})
    console = Console()
    for task, metrics in results.items():
        numbers = {key: value for key, value in metrics.items() if isinstance(value, float) and value >= 0}
        console.print(f"{task}: " + ", ".join(f"{key} {value:.4g}" for key, value in numbers.items()), highlight=False)
    console.print(json)


@evaluation.command("perplexity")
def eval_perplexity(
    models: Annotated[list[str], typer.Argument(metavar="MODEL…", help="Shipped names, folders, or Hugging Face ids.")],
    lengths: Annotated[
        str, typer.Option(metavar="N,Nx,…", help="Tokens before the windows, or multiples of the training length.")
    ] = "0,4x,16x,64x",
    by: Annotated[
        str, typer.Option(help="context: the same windows after more and more text; position: one text, read once.")
    ] = "context",
    text: Annotated[
        str, typer.Option(metavar="FILE", help="A text, a folder of them, or the held-out part of the bundled one.")
    ] = "bundled",
    windows: Annotated[int, typer.Option(min=2, help="Windows of the text, or parts by position.")] = 64,
    tokenizer: Tokenizer = None,
    json: Json = None,
    out: RunOut = None,
) -> None:
    """Perplexity with growing context, with 95% intervals: what a model makes of a long text.

    By context, the same tokens are predicted after more and more of the text before them. By position, the longest of
    the lengths is read once. Several models go into one picture if they have the same tokenizer.

    Example: bayesattn eval perplexity bam-tiny rope-tiny --lengths 0,4x,16x,64x --json perplexity.json
    """
    _quiet()
    from bayesattn.evaluation import perplexity
    from bayesattn.evaluation.reader import load_reader
    from bayesattn.report import plots, tables

    if by not in ("context", "position"):
        raise typer.BadParameter(f"{by!r}; context or position is needed", param_hint="--by")
    out = out or _folder("perplexity", models[0], {"by": (by, "context"), "text": (text, "bundled")})
    json = json or out / "perplexity.json"
    console = Console()
    at = "tokens before" if by == "context" else "position"
    source = "the held-out part of the bundled text" if text == "bundled" else text
    readers = (load_reader(model, tokenizer) for model in models)
    results: dict[str, list[perplexity.Row]] = {}
    with Live(console=console, refresh_per_second=2) as live:
        for results in perplexity.run(
            readers,
            text,
            lambda reader: _multiples(lengths, reader.train_length, least=0),
            json,
            by=by,
            windows=windows,
            command=_command(),
        ):
            live.update(tables.perplexity_table(results, f"Perplexity of {source}, by {by}", at))
    console.print()
    for name, rows in results.items():
        used = perplexity.effective_context(rows)
        console.print(f"{name}: no use of more than {used:,} tokens before can be seen", highlight=False)
    console.print(plots.perplexity(results, at, out / "perplexity")[0], json, sep="\n")


@app.command()
def inspect(
    model: Model,
    text: Annotated[
        str, typer.Option(metavar="FILE", help="A text to measure on, or the held-out part of the bundled one.")
    ] = "bundled",
    tokens: Annotated[int, typer.Option(min=64, max=8192, help="Tokens to measure attention on.")] = 1024,
    tokenizer: Tokenizer = None,
    json: Json = None,
    out: RunOut = None,
) -> None:
    """What each head does: its prior, what it attends to on a text, and how much of a long text must be kept.

    A model without priors is measured too, and told the prior nearest to what it does.

    Example: bayesattn inspect bam-tiny
    """
    _quiet()
    from bayesattn.evaluation import heads
    from bayesattn.evaluation.reader import load_reader
    from bayesattn.files import write_results
    from bayesattn.report import plots, tables

    reader = load_reader(model, tokenizer)
    name, out, console = _short(model), out or _folder("inspect", model, {}), Console()
    stream = reader.stream(text)
    rows = heads.heads(reader)
    measured = heads.posteriors(reader, stream, min(tokens, reader.most_positions or tokens))
    kept = heads.cache_bytes(reader, stream, [1024, 16_384, 131_072, 1_048_576])
    pictures = []
    if rows:
        console.print(tables.heads_table(rows, heads.LENGTHS, name))
        layers = {f"layer {number}": layer.prior for number, layer in enumerate(heads.attentions(reader), 1)}
        pictures += plots.gallery(layers, max(heads.LENGTHS), out / "priors")[:1]
    console.print(tables.posterior_table(measured, name))
    console.print(tables.cache_table(kept, name))
    measured_over = measured[0].profile.shape[1]
    priors = [layer.prior.log_probability(measured_over).exp() for layer in heads.attentions(reader)]
    pictures += plots.posteriors(measured, priors, out / "posteriors")[:1]
    json = json or out / "inspect.json"
    content = {
        "model": model,
        "fingerprint": reader.fingerprint,
        "train_length": reader.train_length,
        "lengths": list(heads.LENGTHS),
        "heads": [row.to_dict() for row in rows],
        "posteriors": [row.to_dict() for row in measured],
        "cache": kept,
        "command": _command(),
    }
    write_results(json, "inspect", content)
    console.print(*pictures, json, sep="\n")


@app.command()
def report(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN…", help="Result files, or folders that have some.")],
    title: Annotated[str, typer.Option(help="What stands above it all.")] = "How far it reads",
    out: Annotated[Path, typer.Option(metavar="FILE", help="The page.")] = Path("runs/report.html"),
) -> None:
    """One HTML page of results: curves, heat maps, heads, costs, and how to measure them again.

    Example: bayesattn report runs/passkey-bam-tiny runs/passkey-rope-tiny runs/inspect-bam-tiny
    """
    from bayesattn.report.page import make_page

    write_whole(out, make_page(runs, title))
    print(out)


@app.command()
def compare(
    files: Annotated[list[Path], typer.Argument(metavar="RESULT.json…", help="Results of eval passkey, two or more.")],
    json: Json = None,
) -> None:
    """Which model reads better, by how much, and whether there were enough trials to tell.

    Example: bayesattn compare runs/passkey-rope-tiny/passkey.json runs/passkey-bam-tiny/passkey.json
    """
    from bayesattn.evaluation.compare import compare as run
    from bayesattn.report import tables

    rows = run(files)
    Console().print(tables.comparison_table(rows))
    if json is not None:
        write_whole(json, to_json([row.to_dict() for row in rows], indent=1))


@app.command()
def savings(
    model: Annotated[str, typer.Option(metavar="NAME", help="A public model, one of ours (l12), or a config.json.")] = (
        "llama-3.1-405b"
    ),
    schedule: Annotated[
        str, typer.Option(metavar="T@N,…", help="Stages, tokens@length; or blog, blog-1m, llama3.")
    ] = "15T@8K,100B@128K",
    long_tokens: Annotated[
        str, typer.Option(metavar="T", help="Tokens of llama3's long stages, whose split is not published.")
    ] = "800B",
    recompute: Annotated[bool, typer.Option("--recompute", help="Count activation checkpointing.")] = False,
    document: Annotated[
        Optional[int],  # noqa: UP045
        typer.Option(min=1, metavar="N", help="Attention stays within documents of so many tokens."),
    ] = None,
    hardware: Annotated[str, typer.Option(help="h100, a100, rtx4090, …")] = "h100",
    mfu: Annotated[float, typer.Option(help="Share of the peak that is reached.")] = 0.4,
    price: Annotated[float, typer.Option(min=0, help="Of an hour of one device.")] = 2.0,
    local: Annotated[float, typer.Option(help="Share of heads that are local, for the costs of reading.")] = 0.75,
    span: Annotated[int, typer.Option(help="Tokens that local heads look back.")] = 1024,
    json: Json = None,
    out: Out = Path("runs/savings"),
) -> None:
    """What long contexts cost in training, exactly and by the popular estimate, and what short training saves.

    Example: bayesattn savings --model llama-3.1-405b --schedule 15T@8K,100B@128K
    """
    from bayesattn.compute import cards
    from bayesattn.compute.flops import find_hardware, training_memory
    from bayesattn.compute.savings import inference, short_saving
    from bayesattn.compute.savings import savings as count
    from bayesattn.compute.schedule import find, parse
    from bayesattn.files import write_results
    from bayesattn.report import plots, tables

    architecture = cards.find(model)
    stages = find(schedule, parse(f"{long_tokens}@1")[0].tokens)
    result = count(architecture, stages, recompute=recompute, document=document)
    device = find_hardware(hardware)
    hours = result.hours(device, mfu)
    console = Console()
    console.print(tables.savings_table(result))
    longest = max(stage.length for stage in stages)
    console.print(
        f"{result.flops:.3e} FLOPs, {hours:,.0f} hours of {device.name} at {mfu:.0%} utilisation, {hours * price:,.0f} "
        f"at {price:g} an hour. Without the long stages {result.dropped:.2%} less; with their tokens at the shortest "
        f"length {result.short:.2%} less. The popular estimate says {result.blog:.3%}.\n"
        "It takes tokens · length² for the cost. But T tokens are T/n sequences of n², so attention grows with T · n, "
        "and the matrix products, 6 FLOPs a weight and token, do not depend on the length at all.",
        highlight=False,
    )
    bytes_needed = training_memory(architecture, longest, recompute=recompute)
    told = ", ".join(f"{name} {size / 1e9:,.1f}" for name, size in bytes_needed.items())
    console.print(f"Memory to train on one sequence of {longest:,} tokens, in GB: {told}.", highlight=False)
    lengths = sorted({8192, 131_072, 1_048_576, longest})
    reading = [inference(architecture, n, local=local, span=span) for n in lengths]
    console.print(tables.inference_table(reading, local, span))
    names = [name for name, _ in sorted(cards.CARDS.items(), key=lambda card: card[1].parameters)]
    if model not in names:
        names.insert(0, model)
    grid = [2**power for power in range(11, 21)]
    shares = [[short_saving(cards.find(name), n, 512) for n in grid] for name in names]
    picture, _ = plots.savings_map(shares, names, grid, 512, out / "savings")
    json = json or out / "savings.json"
    content = {
        "model": model,
        "parameters": architecture.parameters,
        "matmul_parameters": architecture.matmul_parameters,
        "attention_per_token": 12 * architecture.layers * architecture.heads * architecture.head_size,
        "schedule": schedule,
        "stages": [row.to_dict() for row in result.rows],
        "flops": result.flops,
        "dropped": result.dropped,
        "short": result.short,
        "blog": result.blog,
        "hours": hours,
        "cost": hours * price,
        "memory_bytes": bytes_needed,
        "inference": [row.to_dict() for row in reading],
        "hardware": device.name,
        "peak": device.flops,
        "mfu": mfu,
        "price": price,
        "command": _command(),
    }
    write_results(json, "savings", content)
    console.print(picture, json, sep="\n")


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
    console = Console()
    rows: list[Row] = []
    with Progress(SpinnerColumn(), *Progress.get_default_columns(), TimeElapsedColumn(), console=console) as progress:
        task = progress.add_task("measuring", total=2 * len(sizes))
        for part in run(sizes, seed=seed, memory=memory, flex=flex):
            rows += part
            write_whole(json, to_json(rows, seed))
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
    console = Console()
    rows: list[long.Prefill] = []
    decoded: list[long.Decode] = []
    with Progress(SpinnerColumn(), *Progress.get_default_columns(), TimeElapsedColumn(), console=console) as progress:
        task = progress.add_task("decoding", total=len(sizes) + len(decoded_after))
        for tokens_per_second in long.run_decode(decoded_after, seed=seed):
            decoded += tokens_per_second
            write_whole(json, long.to_json(rows, decoded, seed))
            progress.update(task, advance=1, description=f"decoding after {decoded[-1].tokens:,} tokens")
        for part in long.run_prefill(sizes, seed=seed, memory=memory, longest=longest):
            rows += part
            write_whole(json, long.to_json(rows, decoded, seed))
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


def _multiples(text: str, train_length: int, least: int = 1) -> list[int]:
    """`1x,16x,65536` as tokens."""
    sizes: set[int] = set()
    for part in text.lower().replace("×", "x").split(","):
        try:
            number = float(part[:-1]) * train_length if part.endswith("x") else int(part)
        except ValueError:
            number = -1
        if not least <= number < 2**40:
            raise typer.BadParameter(
                f"{part!r}; give numbers of tokens, or multiples of the training length such as 16x, with commas "
                "between them",
                param_hint="--lengths",
            )
        sizes.add(round(number))
    return sorted(sizes)


def _needles(text: str) -> tuple[int, int]:
    least, _, most = text.partition("-")
    return _count(least, "--keys"), _count(most or least, "--keys")


def _count(text: str, option: str) -> int:
    if not text.isdecimal() or not 1 <= int(text) <= 1000:
        raise typer.BadParameter(f"{text!r}; a whole number from 1 to 1000 is needed", param_hint=option)
    return int(text)


def _seconds(text: str) -> float:
    """`90s`, `10m` or `2h`."""
    unit = {"s": 1.0, "m": 60.0, "h": 3600.0}.get(text[-1:])
    try:
        number = float(text[:-1]) * (unit or 0.0)
    except ValueError:
        number = 0.0
    if not 0 < number < math.inf:
        raise typer.BadParameter(f"{text!r}; give a time such as 90s, 10m or 2h", param_hint="--budget")
    return number


def _short(model: str) -> str:
    """The name of a model; training leaves it in a folder that is just called model."""
    path = Path(model)
    return path.resolve().parent.name if path.name == "model" else path.name


def _folder(command: str, model: str, chosen: dict[str, tuple[object, object]]) -> Path:
    """runs/COMMAND-MODEL and what was chosen differently from the default, so that evaluations do not share one."""
    parts = [f"{key}-{Path(str(value)).name}" for key, (value, default) in chosen.items() if value != default]
    return Path("runs") / "-".join([command, _short(model), *parts])


def _command() -> str:
    """The command as it was typed."""
    return shlex.join(["bayesattn", *sys.argv[1:]])


if __name__ == "__main__":
    main()
