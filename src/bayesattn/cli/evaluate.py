"""`bayesattn eval`: how far a model reads."""

from __future__ import annotations

from typing import Annotated, Optional

import typer
from rich.console import Console
from rich.live import Live

from bayesattn.cli.options import (
    Budget,
    Json,
    Lengths,
    Model,
    RunOut,
    Seed,
    Tokenizer,
    parse_count,
    parse_multiples,
    parse_needles,
    parse_seconds,
    quiet,
    run_folder,
    typed_command,
)
from bayesattn.files import short_name

evaluation = typer.Typer(
    help="How far a model really reads: ours, or any causal model of Hugging Face.",
    no_args_is_help=True,
    rich_markup_mode=None,
)


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
        typer.Option(help="standard: the usual pass-key prompt; train, held-out or fresh: competing facts so worded."),
    ] = "standard",
    keys: Annotated[
        str, typer.Option(metavar="N|N-N", help="How many facts compete; the standard wording has one.")
    ] = "3-5",
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
    quiet()
    from bayesattn.evaluation import passkey
    from bayesattn.evaluation.dense import check as check_dense
    from bayesattn.evaluation.dense import compare as compare_dense
    from bayesattn.evaluation.reader import load_reader
    from bayesattn.evaluation.trials import Cell
    from bayesattn.evaluation.trials import run as run_trials
    from bayesattn.files import read_results, write_results
    from bayesattn.report import plots, tables

    task = passkey.Task(
        wording=wording,  # type: ignore[arg-type]
        haystack=haystack,
        needles=parse_needles(keys),
        digits=digits,
        teacher_forced=teacher_forced,
    )
    levels = None if depths == "random" else parse_count(depths, "--depths")
    seconds = None if budget is None else parse_seconds(budget)
    reader = load_reader(model, tokenizer)
    if dense:
        check_dense(reader)
    sizes = parse_multiples(lengths, reader.train_length)
    chosen = {
        "wording": (wording, "standard"),
        "haystack": (haystack, ""),
        "keys": (keys, "3-5"),
        "digits": (digits, 5),
    }
    chosen |= {"depths": (depths, "random"), "teacher-forced": (teacher_forced, False), "seed": (seed, 0)}
    out = out or run_folder("passkey", model, chosen)
    json = json or out / "passkey.json"
    console = Console()
    cells: list[Cell] = []
    how = "teacher-forced" if teacher_forced else "greedy generation"
    title = f"{short_name(model)}: {wording} wording, {task.haystack} haystack, {how}, seed {seed}"
    with Live(console=console, refresh_per_second=2) as live:
        for cells in run_trials(
            reader,
            task,
            sizes,
            trials,
            json,
            seed=seed,
            depths=levels,
            budget=seconds,
            stop=stop,
            command=typed_command(),
        ):
            live.update(tables.cells_table(cells, reader.train_length, title))
    curve, _ = plots.passkey({short_name(model): cells}, reader.train_length, out / "passkey")
    heat, _ = plots.passkey_depths(cells, short_name(model), out / "depths")
    console.print()
    if dense:
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
    json: Json = None,
    out: RunOut = None,
) -> None:
    """Needles among needles, chains of variables and common words, worded and judged as in RULER.

    The score is the mean share of the answers found. Results are kept after every batch, one file a task in the folder;
    the same command goes on where it was stopped. --json has those of all tasks in one.

    Example: bayesattn eval needle bam-small --task multikey --lengths 1024,4096 --trials 50
    """
    quiet()
    from bayesattn.evaluation import needle
    from bayesattn.evaluation.reader import load_reader
    from bayesattn.evaluation.trials import run as run_trials
    from bayesattn.files import read_results, write_results
    from bayesattn.report import tables

    chosen = [needle.Task(name) for name in (needle.KINDS if task == "all" else task.split(","))]
    seconds = None if budget is None else parse_seconds(budget) / len(chosen)
    reader = load_reader(model, tokenizer)
    sizes = parse_multiples(lengths, reader.train_length)
    out = out or run_folder("needle", model, {"seed": (seed, 0)})
    console = Console()
    files = [out / f"needle-{one.name}.json" for one in chosen]
    for one, file in zip(chosen, files, strict=True):
        title = f"{short_name(model)}: {one.name}, mean share of answers found, greedy generation, seed {seed}"
        with Live(console=console, refresh_per_second=2) as live:
            for cells in run_trials(
                reader, one, sizes, trials, file, seed=seed, budget=seconds, stop=stop, command=typed_command()
            ):
                live.update(tables.cells_table(cells, reader.train_length, title))
        console.print()
        console.print(file)
    if json is not None:
        write_results(json, "needle", needle.together([read_results(file, "needle") for file in files]))
        console.print(json)


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
    quiet()
    from bayesattn.evaluation.harness import run
    from bayesattn.evaluation.reader import load_reader
    from bayesattn.files import write_results

    results = run(load_reader(model, tokenizer), tasks.split(","), length=length, limit=limit, shots=shots)
    json = json or (out or run_folder("harness", model, {})) / "harness.json"
    write_results(json, "harness", {"model": model, "length": length, "command": typed_command(), "results": results})
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
        str, typer.Option(help="context: the same windows after more and more text; position: whole texts, read once.")
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
    the lengths is read once: of each document, if several have it, or of all joined. Several models go into one picture
    if they have the same tokenizer. Results are kept as they come; the same command goes on where it was stopped.

    Example: bayesattn eval perplexity bam-tiny rope-tiny --lengths 0,4x,16x,64x --json perplexity.json
    """
    quiet()
    from bayesattn.evaluation import perplexity
    from bayesattn.evaluation.reader import load_reader
    from bayesattn.files import read_results
    from bayesattn.report import plots, tables

    if by not in ("context", "position"):
        raise typer.BadParameter(f"{by!r}; context or position is needed", param_hint="--by")
    chosen = {"by": (by, "context"), "text": (text, "bundled"), "windows": (windows, 64)}
    out = out or run_folder("perplexity", models[0], chosen)
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
            lambda reader: parse_multiples(lengths, reader.train_length, least=0),
            json,
            by=by,
            windows=windows,
            command=typed_command(),
        ):
            live.update(tables.perplexity_table(results, f"Perplexity of {source}, by {by}", by))
    console.print()
    for entry in read_results(json)["models"]:
        if by == "position" and entry["model"] in results:
            told = f"{entry['model']}: {entry['length']:,} tokens of {entry['texts']} were read"
            console.print(told, highlight=False)
    for name, rows in results.items():
        used = perplexity.effective_context(rows)
        console.print(f"{name}: no use of more than {used:,} tokens before can be seen", highlight=False)
    console.print(plots.perplexity(results, at, out / "perplexity")[0], json, sep="\n")
