"""The command line; each command is a thin call of one function elsewhere."""

from __future__ import annotations

from json import loads as from_json
from pathlib import Path
from typing import Annotated, Optional

import typer

import bayesattn
from bayesattn.cli.bench import bench
from bayesattn.cli.convergence import convergence
from bayesattn.cli.errors import run
from bayesattn.cli.evaluate import evaluation
from bayesattn.cli.options import (
    Json,
    Model,
    Out,
    RunOut,
    Seed,
    Tokenizer,
    finite,
    make_console,
    quiet,
    run_folder,
    typed_command,
)
from bayesattn.files import check_writable, is_main_process, short_name, to_json, whole_lines, write_whole

app = typer.Typer(
    name="bayesattn",
    help="Bayesian attention: positional encoding as a prior. Train short, read long.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    add_completion=False,
)
app.add_typer(evaluation, name="eval")
app.add_typer(convergence, name="convergence")
app.add_typer(bench, name="bench")


def main() -> None:
    """Entry point: an error that the user can correct is one sentence and exit code 2; Ctrl-C is 130, SIGTERM 143."""
    run(app)


@app.callback(invoke_without_command=True)
def _version(
    version: Annotated[bool, typer.Option("--version", help="Print the version and exit.", is_eager=True)] = False,
) -> None:
    if version:
        print(bayesattn.__version__)
        raise typer.Exit


@app.command()
def demo(
    haystack: Annotated[str, typer.Option(metavar="FILE", help="Hide the keys in this text file.")] = "",
    train: Annotated[bool, typer.Option("--train", help="Train bam-tiny from scratch first.")] = False,
    seed: Seed = 0,
    out: Out = Path("runs/demo"),
) -> None:
    """A model trained on 128 tokens reads 64,000, next to the encodings you know; about a minute.

    Example: bayesattn demo --haystack README.md
    """
    quiet()
    check_writable(*(out / f"{name}.png" for name in ("passkey", "priors")))
    from bayesattn.demo import demo as run_demo

    run_demo(out, make_console(), haystack=haystack, train=train, seed=seed)


@app.command()
def priors(
    tokens: Annotated[int, typer.Option(min=2, max=2**24, help="Number of distances.")] = 1024,
    out: Out = Path("runs/priors"),
) -> None:
    """What each family of priors believes about distance, as a table and a picture.

    Example: bayesattn priors --tokens 8192
    """
    check_writable(out / "priors.png")
    from bayesattn.demo import families

    families(out, make_console(), tokens)


@app.command()
def train(
    recipe: Annotated[
        Path, typer.Argument(metavar="RECIPE.yaml", help="The recipe: model, data and training settings.")
    ],
    changes: Annotated[
        Optional[list[str]],  # noqa: UP045
        typer.Option("--set", metavar="SECTION.KEY=VALUE", help="Change a setting of the recipe; may be repeated."),
    ] = None,
    resume: Annotated[bool, typer.Option(help="Continue from the newest checkpoint in the folder.")] = False,
    report_to: Annotated[str, typer.Option(help="Where the Trainer reports: none, tensorboard, wandb, …")] = "none",
    out: Annotated[Optional[Path], typer.Option(metavar="DIR", help="Folder of the run; runs/NAME by default.")] = None,  # noqa: UP045
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Only build the model and estimate the cost of training.")
    ] = False,
    hardware: Annotated[str, typer.Option(help="Hardware of the estimate: h100, a100, rtx4090, …")] = "h100",
    devices: Annotated[int, typer.Option(min=1, help="Number of devices of the estimate.")] = 1,
    mfu: Annotated[float, typer.Option(help="Share of the peak FLOPs that training reaches.")] = 0.4,
    json: Json = None,
) -> None:
    """Train a model with a recipe; the trained model is in the subfolder model/.

    Example: bayesattn train recipes/bam-tiny.yaml --set training.steps=500 --out runs/short
    """
    quiet()
    if json is not None:
        check_writable(json)
    if dry_run:
        from bayesattn.report import tables
        from bayesattn.training.estimate import estimate
        from bayesattn.training.recipe import load_recipe

        cost = estimate(load_recipe(recipe, changes or []), hardware=hardware, devices=devices, mfu=mfu)
        make_console().print(tables.estimate_table(cost))
        if json is not None:
            write_whole(json, to_json(cost.to_dict(), indent=1))
        return
    from bayesattn.training.recipe import load_recipe
    from bayesattn.training.run import train as run_training

    loaded = load_recipe(recipe, changes or [])
    folder = run_training(loaded, out or Path("runs") / loaded.name, resume=resume, report_to=report_to)
    if not is_main_process():
        return
    if json is not None:
        log = [from_json(line) for line in whole_lines(folder / "log.jsonl")]
        write_whole(json, to_json({"model": str(folder), "recipe": loaded.to_dict(), "log": log}, indent=1))
    print(folder)


@app.command()
def inspect(
    model: Model,
    text: Annotated[
        str,
        typer.Option(
            metavar="FILE", help="A text file to measure on; by default the held-out part of the bundled text."
        ),
    ] = "bundled",
    tokens: Annotated[int, typer.Option(min=64, max=8192, help="Number of tokens to measure attention on.")] = 1024,
    tokenizer: Tokenizer = None,
    json: Json = None,
    out: RunOut = None,
) -> None:
    """What each head does: its prior, its attention on a text, and the cache that a long text needs.

    For each head of any model, also without priors, it fits the nearest generalized Gaussian to the attention.

    Example: bayesattn inspect bam-tiny
    """
    quiet()
    from bayesattn.evaluation import heads
    from bayesattn.evaluation.reader import load_reader
    from bayesattn.files import write_results
    from bayesattn.report import plots, tables

    name, out, console = short_name(model), out or run_folder("inspect", model, {}), make_console()
    json = json or out / "inspect.json"
    check_writable(out / "priors.png", out / "posteriors.png", results=json)
    reader = load_reader(model, tokenizer)
    stream = reader.stream(text)
    rows = heads.heads(reader)
    posteriors = heads.posteriors(reader, stream, min(tokens, reader.most_positions or tokens))
    cache_sizes = heads.cache_bytes(reader, stream, [1024, 16_384, 131_072, 1_048_576])
    pictures = []
    if rows:
        console.print(tables.heads_table(rows, heads.LENGTHS, name))
        longest = max(heads.LENGTHS)
        layers = {
            f"layer {number}, {type(layer.prior).__name__}": heads.ScaledPrior(layer, longest)
            for number, layer in enumerate(heads.attentions(reader), 1)
        }
        pictures += plots.gallery(layers, longest, out / "priors")[:1]
    console.print(tables.posterior_table(posteriors, name))
    console.print(tables.cache_table(cache_sizes, name))
    pictures += plots.posteriors(posteriors, out / "posteriors")[:1]
    content = {
        "model": model,
        "fingerprint": reader.fingerprint,
        "train_length": reader.train_length,
        "lengths": list(heads.LENGTHS),
        "heads": [row.to_dict() for row in rows],
        "posteriors": [row.to_dict() for row in posteriors],
        "cache": cache_sizes,
        "command": typed_command(),
    }
    write_results(json, "inspect", content)
    console.print(*pictures, json, sep="\n")


@app.command()
def advise(
    model: Model,
    length: Annotated[int, typer.Option(min=128, max=2**24, help="Number of tokens of context.")] = 8192,
    delta: Annotated[
        float,
        typer.Option(
            callback=finite, help="Largest change of an output that you accept, in units of the largest value."
        ),
    ] = 0.01,
    text: Annotated[
        str,
        typer.Option(
            metavar="FILE", help="A text file to measure on; by default the held-out part of the bundled text."
        ),
    ] = "bundled",
    tokenizer: Tokenizer = None,
    json: Json = None,
    out: RunOut = None,
) -> None:
    """How many tokens of context each head uses, and the length beyond which more context changes nothing.

    Example: bayesattn advise bam-tiny --length 16384
    """
    quiet()
    from bayesattn.convergence.advise import advise as measure
    from bayesattn.convergence.layers import load, read_text
    from bayesattn.files import write_results
    from bayesattn.report import convergence as show

    json = json or (out or run_folder("advise", model, {})) / "advise.json"
    check_writable(results=json)
    loaded, text_tokenizer = load(model, tokenizer)
    advice = measure(loaded, read_text(loaded, text_tokenizer, text, length), delta, model)
    console = make_console()
    console.print(show.advice_table(advice, short_name(model)))
    console.print(str(advice), highlight=False)
    training_length = getattr(loaded.config, "training_length", None)
    if training_length and training_length < advice.usable:
        console.print(
            f"It was trained on {training_length:,} tokens: that heads look further does not say what they find. "
            f"bayesattn eval passkey {model} --lengths {length} does.",
            highlight=False,
        )
    write_results(json, "advise", {"model": model, **advice.to_dict(), "command": typed_command()})
    console.print(json)


@app.command()
def report(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN…", help="Result files, or folders with result files.")],
    title: Annotated[str, typer.Option(help="Title of the page.")] = "How far it reads",
    out: Annotated[Path, typer.Option(metavar="FILE", help="Where to write the page.")] = Path("runs/report.html"),
) -> None:
    """One HTML page of results: curves, heat maps, heads, costs, and the commands to reproduce them.

    Example: bayesattn report runs/passkey-bam-tiny runs/passkey-rope-tiny runs/inspect-bam-tiny
    """
    from bayesattn.report.page import make_page

    check_writable(out)
    write_whole(out, make_page(runs, title))
    print(out)


@app.command()
def compare(
    files: Annotated[
        list[Path],
        typer.Argument(metavar="RESULT.json…", help="Two or more result files of eval passkey or eval needle."),
    ],
    json: Json = None,
) -> None:
    """Which model retrieves better, by how much, and whether there are enough trials to tell.

    Example: bayesattn compare runs/passkey-rope-tiny/passkey.json runs/passkey-bam-tiny/passkey.json
    """
    from bayesattn.evaluation.compare import compare as compare_files
    from bayesattn.report import tables

    if json is not None:
        check_writable(results=json)
    rows = compare_files(files)
    for task in dict.fromkeys(row.task for row in rows):
        make_console().print(tables.comparison_table([row for row in rows if row.task == task]))
    if json is not None:
        write_whole(json, to_json([row.to_dict() for row in rows], indent=1))


@app.command()
def savings(
    model: Annotated[
        str, typer.Option(metavar="NAME", help="A public model, one of our presets (l12), or a config.json.")
    ] = ("llama-3.1-405b"),
    schedule: Annotated[
        str, typer.Option(metavar="T@N,…", help="Stages as tokens@length, or a preset: blog, blog-1m, llama3.")
    ] = "15T@8K,100B@128K",
    long_tokens: Annotated[
        str, typer.Option(metavar="T", help="Tokens of the long stages of llama3, split evenly.")
    ] = "800B",
    recompute: Annotated[bool, typer.Option("--recompute", help="Count activation checkpointing.")] = False,
    document: Annotated[
        Optional[int],  # noqa: UP045
        typer.Option(min=1, max=2**40, metavar="N", help="Mask attention to documents of N tokens."),
    ] = None,
    hardware: Annotated[str, typer.Option(help="Hardware: h100, a100, rtx4090, …")] = "h100",
    mfu: Annotated[float, typer.Option(callback=finite, help="Share of the peak FLOPs that training reaches.")] = 0.4,
    price: Annotated[
        float, typer.Option(min=0, max=1e6, callback=finite, help="Price of one device for an hour.")
    ] = 2.0,
    local: Annotated[
        float, typer.Option(callback=finite, help="Share of local heads, for the costs of inference.")
    ] = 0.75,
    span: Annotated[int, typer.Option(min=1, max=2**40, help="Number of tokens that local heads look back.")] = 1024,
    json: Json = None,
    out: Out = Path("runs/savings"),
) -> None:
    """What long contexts cost in training, exactly and by a popular estimate, and what short contexts save.

    Example: bayesattn savings --model llama-3.1-405b --schedule 15T@8K,100B@128K
    """
    from bayesattn.compute import cards
    from bayesattn.compute.flops import find_hardware, training_memory
    from bayesattn.compute.savings import inference, short_saving
    from bayesattn.compute.savings import savings as count
    from bayesattn.compute.schedule import find, parse_tokens
    from bayesattn.files import write_results
    from bayesattn.report import plots, tables

    json = json or out / "savings.json"
    check_writable(out / "savings.png", results=json)
    architecture = cards.find(model)
    stages = find(schedule, parse_tokens(long_tokens))
    result = count(architecture, stages, recompute=recompute, document=document)
    device = find_hardware(hardware)
    hours = result.hours(device, mfu)
    console = make_console()
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
    sizes = ", ".join(f"{name} {size / 1e9:,.1f}" for name, size in bytes_needed.items())
    console.print(f"Memory to train on one sequence of {longest:,} tokens, in GB: {sizes}.", highlight=False)
    lengths = sorted({8192, 131_072, 1_048_576, longest})
    costs = [inference(architecture, n, local=local, span=span) for n in lengths]
    console.print(tables.inference_table(costs, local, span))
    names = [name for name, _ in sorted(cards.CARDS.items(), key=lambda card: card[1].parameters)]
    if model not in names:
        names.insert(0, model)
    grid = [2**power for power in range(11, 21)]
    shares = [[short_saving(cards.find(name), n, 512) for n in grid] for name in names]
    picture, _ = plots.savings_map(shares, names, grid, 512, out / "savings")
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
        "inference": [row.to_dict() for row in costs],
        "hardware": device.name,
        "peak": device.flops,
        "mfu": mfu,
        "price": price,
        "command": typed_command(),
    }
    write_results(json, "savings", content)
    console.print(picture, json, sep="\n")
