"""`bayesattn eval`: how long a context a model can use."""

from __future__ import annotations

from typing import Annotated, Optional

import typer
from rich.live import Live

from bayesattn.cli.options import (
    Budget,
    Json,
    Lengths,
    Model,
    RunOut,
    Seed,
    Tokenizer,
    make_console,
    parse_count,
    parse_multiples,
    parse_needles,
    parse_seconds,
    quiet,
    run_folder,
    typed_command,
)
from bayesattn.cli.saving import saving_to
from bayesattn.errors import shown
from bayesattn.files import check_writable, short_name

evaluation = typer.Typer(
    help="How long a context a model really uses: ours, or any causal model of Hugging Face.",
    no_args_is_help=True,
    rich_markup_mode=None,
)


@evaluation.command("passkey")
def eval_passkey(
    model: Model,
    lengths: Lengths = "1x,4x,16x,64x,500x",
    trials: Annotated[int, typer.Option(min=1, max=10**6, help="Number of trials at each length.")] = 100,
    depths: Annotated[
        str, typer.Option(metavar="random|N", help="Depths of the keys: random, or N evenly spaced depths in turn.")
    ] = "random",
    wording: Annotated[
        str,
        typer.Option(
            help="standard: the usual pass-key prompt; train, validation or fresh: competing facts in these wordings."
        ),
    ] = "standard",
    keys: Annotated[
        str, typer.Option(metavar="N|N-N", help="Number of competing facts; the standard wording has one.")
    ] = "3-5",
    digits: Annotated[int, typer.Option(help="Number of digits of each key.")] = 5,
    haystack: Annotated[
        str,
        typer.Option(metavar="bland|hard|text|FILE", help="Text around the keys; the default depends on the wording."),
    ] = "",
    teacher_forced: Annotated[
        bool, typer.Option("--teacher-forced", help="Predict each digit after the true ones; easier than generation.")
    ] = False,
    budget: Budget = None,
    stop: Annotated[bool, typer.Option(help="Stop at a length where none of the first trials is right.")] = True,
    dense: Annotated[
        bool, typer.Option("--dense", help="Compare with dense attention on one prompt of the longest length.")
    ] = False,
    tokenizer: Tokenizer = None,
    seed: Seed = 0,
    json: Json = None,
    out: RunOut = None,
) -> None:
    """Retrieval of keys hidden at any depth of prompts of any length, with 95% Wilson intervals.

    The model answers by greedy generation. Results are saved after every batch; the same command resumes a stopped run.

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
    options = {
        "wording": (wording, "standard"),
        "haystack": (haystack, ""),
        "keys": (keys, "3-5"),
        "digits": (digits, 5),
    }
    options |= {"depths": (depths, "random"), "teacher-forced": (teacher_forced, False), "seed": (seed, 0)}
    out = out or run_folder("passkey", model, options)
    json = json or out / "passkey.json"
    check_writable(out / "passkey.png", out / "depths.png", results=json)
    reader = load_reader(model, tokenizer)
    if dense:
        check_dense(reader)
    sizes = parse_multiples(lengths, reader.train_length)
    console = make_console()
    cells: list[Cell] = []
    how = "teacher-forced" if teacher_forced else "greedy generation"
    title = f"{short_name(model)}: {wording} wording, {task.haystack} haystack, {how}, seed {seed}"
    with saving_to(json), Live(console=console, refresh_per_second=2) as live:
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
        comparison = compare_dense(reader, task, sizes[-1], seed)
        console.print(
            f"One prompt of {comparison.length:,} tokens: {comparison.seconds:.2f} s to the first token; with dense "
            f"attention {comparison.dense_seconds:.1f} s, {comparison.ratio:.0f} times that; logits differ by "
            f"{comparison.error:.0e}.",
            highlight=False,
        )
        content = read_results(json)
        write_results(json, content["kind"], {**content, "dense": comparison.to_dict()})
    console.print(curve, heat, json, sep="\n")


@evaluation.command("needle")
def eval_needle(
    model: Model,
    task: Annotated[
        str, typer.Option(metavar="NAME", help="single, multikey, multivalue, variables, … or all.")
    ] = "all",
    lengths: Lengths = "4096,8192,16384",
    trials: Annotated[int, typer.Option(min=1, max=10**6, help="Number of trials at each length.")] = 20,
    budget: Budget = None,
    stop: Annotated[bool, typer.Option(help="Stop at a length where none of the first trials is right.")] = True,
    tokenizer: Tokenizer = None,
    seed: Seed = 0,
    json: Json = None,
    out: RunOut = None,
) -> None:
    """Needles among needles, chains of variables and common words, with the prompts and scores of RULER.

    The score is the mean share of the answers found. Results are saved after every batch, one file per task; the same
    command resumes a stopped run. --json writes the results of all tasks to one file.

    Example: bayesattn eval needle bam-small --task multikey --lengths 1024,4096 --trials 50
    """
    quiet()
    from bayesattn.evaluation import needle
    from bayesattn.evaluation.reader import load_reader
    from bayesattn.evaluation.trials import run as run_trials
    from bayesattn.files import read_results, write_results
    from bayesattn.report import tables

    tasks = [needle.Task(name) for name in (needle.KINDS if task == "all" else task.split(","))]
    seconds = None if budget is None else parse_seconds(budget) / len(tasks)
    out = out or run_folder("needle", model, {"seed": (seed, 0)})
    files = [out / f"needle-{one.name}.json" for one in tasks]
    check_writable(*files, results=json)
    reader = load_reader(model, tokenizer)
    sizes = parse_multiples(lengths, reader.train_length)
    console = make_console()
    for one, file in zip(tasks, files, strict=True):
        title = f"{short_name(model)}: {one.name}, mean share of answers found, greedy generation, seed {seed}"
        with saving_to(*files), Live(console=console, refresh_per_second=2) as live:
            for cells in run_trials(
                reader, one, sizes, trials, file, seed=seed, budget=seconds, stop=stop, command=typed_command()
            ):
                live.update(tables.cells_table(cells, reader.train_length, title))
        console.print()
        console.print(file)
    if json is not None:
        write_results(json, "needle", needle.merge_results([read_results(file, "needle") for file in files]))
        console.print(json)


@evaluation.command("harness")
def eval_harness(
    model: Model,
    tasks: Annotated[str, typer.Option(metavar="NAME,…", help="Names of tasks of lm-eval.")] = "niah_single_1,ruler_vt",
    length: Annotated[
        int, typer.Option(min=64, max=2**40, help="Longest context, and the length of RULER's tasks.")
    ] = 4096,
    limit: Annotated[
        int | None, typer.Option(min=1, max=10**9, help="Number of documents of each task; all by default.")
    ] = None,
    shots: Annotated[Optional[int], typer.Option(min=0, max=1000, help="Number of examples in the prompt.")] = None,  # noqa: UP045
    tokenizer: Tokenizer = None,
    json: Json = None,
    out: RunOut = None,
) -> None:
    """Tasks of lm-eval on any model; some tasks of RULER need no network.

    Example: bayesattn eval harness bam-tiny --tasks niah_single_1 --length 4096 --limit 20
    """
    quiet()
    from bayesattn.evaluation.harness import run
    from bayesattn.evaluation.reader import load_reader
    from bayesattn.files import write_results

    json = json or (out or run_folder("harness", model, {})) / "harness.json"
    check_writable(results=json)
    results = run(load_reader(model, tokenizer), tasks.split(","), length=length, limit=limit, shots=shots)
    write_results(json, "harness", {"model": model, "length": length, "command": typed_command(), "results": results})
    console = make_console()
    for task, metrics in results.items():
        numbers = {key: value for key, value in metrics.items() if isinstance(value, float) and value >= 0}
        console.print(f"{task}: " + ", ".join(f"{key} {value:.4g}" for key, value in numbers.items()), highlight=False)
    console.print(json)


@evaluation.command("perplexity")
def eval_perplexity(
    models: Annotated[list[str], typer.Argument(metavar="MODEL…", help="Shipped names, folders, or Hugging Face ids.")],
    lengths: Annotated[
        str,
        typer.Option(
            metavar="N,Nx,…", help="Numbers of tokens before the windows, or multiples of the training length."
        ),
    ] = "0,4x,16x,64x",
    by: Annotated[
        str,
        typer.Option(help="context: the same windows after contexts of each length; position: whole texts, read once."),
    ] = "context",
    text: Annotated[
        str,
        typer.Option(
            metavar="FILE",
            help="A text file or a folder of text files; by default the held-out part of the bundled text.",
        ),
    ] = "bundled",
    windows: Annotated[
        int, typer.Option(min=2, max=2**20, help="Number of windows of the text, or of parts by position.")
    ] = 64,
    tokenizer: Tokenizer = None,
    json: Json = None,
    out: RunOut = None,
) -> None:
    """Perplexity with growing context, with 95% intervals.

    By context, the model predicts the same tokens after contexts of each length. By position, it reads the longest of
    the lengths once, in each document that is long enough, or in all documents joined. Models with the same tokenizer
    share one picture. Results are saved as they come; the same command resumes a stopped run.

    Example: bayesattn eval perplexity bam-tiny rope-tiny --lengths 0,4x,16x,64x --json perplexity.json
    """
    quiet()
    from bayesattn.evaluation import perplexity
    from bayesattn.evaluation.reader import load_reader
    from bayesattn.files import read_results
    from bayesattn.report import plots, tables

    if by not in ("context", "position"):
        raise typer.BadParameter(f"{shown(by)}; context or position is needed", param_hint="--by")
    options = {"by": (by, "context"), "text": (text, "bundled"), "windows": (windows, 64)}
    out = out or run_folder("perplexity", models[0], options)
    json = json or out / "perplexity.json"
    check_writable(out / "perplexity.png", results=json)
    console = make_console()
    at = "tokens before" if by == "context" else "position"
    source = "the held-out part of the bundled text" if text == "bundled" else text
    readers = (load_reader(model, tokenizer) for model in models)
    results: dict[str, list[perplexity.Row]] = {}
    with saving_to(json), Live(console=console, refresh_per_second=2) as live:
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
            amount = f"{entry['length']:,} tokens of {entry['texts']}"
            console.print(f"{entry['model']}: {amount} were read", highlight=False)
    for name, rows in results.items():
        used = perplexity.effective_context(rows)
        console.print(f"{name}: no use of more than {used:,} tokens before can be seen", highlight=False)
    console.print(plots.perplexity(results, at, out / "perplexity")[0], json, sep="\n")
