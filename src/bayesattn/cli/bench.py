"""`bayesattn bench`: speed and memory compared with other implementations."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TimeElapsedColumn

from bayesattn.benchmarks.short import SHAPES
from bayesattn.cli.options import Json, Out, finite, make_console, parse_lengths, parse_shapes, quiet
from bayesattn.files import check_writable, write_whole

bench = typer.Typer(
    help="Speed and memory, compared with other implementations in one process.",
    no_args_is_help=True,
    rich_markup_mode=None,
)

BenchSeed = Annotated[int, typer.Option("--seed", min=0, max=2**32, help="Seed of the random inputs.")]


def _progress(console: Console) -> Progress:
    return Progress(SpinnerColumn(), *Progress.get_default_columns(), TimeElapsedColumn(), console=console)


@bench.command("attention")
def bench_attention(
    lengths: Annotated[str, typer.Option(metavar="N,N,…", help="Numbers of tokens.")] = "512,1024,2048,4096,8192,16384",
    memory: Annotated[bool, typer.Option(help="Measure peak memory, each method in its own process.")] = True,
    flex: Annotated[bool, typer.Option(help="Include compiled FlexAttention, which takes long to compile.")] = True,
    seed: BenchSeed = 0,
    json: Json = None,
    out: Out = Path("runs/bench-attention"),
) -> None:
    """Attention with a learned prior against SDPA, a bias matrix, FlexAttention and dense autograd.

    A method whose results differ from the float64 reference is not timed. It takes about ten minutes on two cores and
    saves the JSON file after every length.

    Example: bayesattn bench attention --lengths 512,2048 --no-flex --json bench.json
    """
    from bayesattn.benchmarks.attention import FORWARD, TRAINING, Row, most_tokens, run, to_json
    from bayesattn.report import plots, tables

    sizes = parse_lengths(lengths, most=most_tokens())
    json = json or out / "attention.json"
    check_writable(out / "attention.png", results=json)
    console = make_console()
    rows: list[Row] = []
    with _progress(console) as progress:
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
        str, typer.Option(metavar="N,N,…", help="Lengths of the prefill.")
    ] = "1024,4096,16384,65536,131072,262144",
    decode: Annotated[
        str, typer.Option(metavar="N,N,…", help="Lengths of the context to decode after.")
    ] = "1024,16384,65536",
    longest: Annotated[
        float,
        typer.Option(
            min=0.1, max=1e6, callback=finite, help="Skip a measurement that would take more seconds than this."
        ),
    ] = 120.0,
    memory: Annotated[bool, typer.Option(help="Measure peak memory, each mix in its own process.")] = True,
    seed: BenchSeed = 0,
    json: Json = None,
    out: Out = Path("runs/bench-long"),
) -> None:
    """Pruned attention and the pruning cache against plain attention, for layers of local and other heads.

    Results that differ from the float64 reference are not timed. It takes about twenty minutes on two cores and saves
    the JSON file after every length.

    Example: bayesattn bench long --lengths 1024,16384 --decode 1024 --json long.json
    """
    from bayesattn.benchmarks import long
    from bayesattn.report import plots, tables

    sizes = parse_lengths(lengths, most=long.most_tokens())
    decode_lengths = parse_lengths(decode, most=long.most_tokens(), option="--decode")
    json = json or out / "long.json"
    check_writable(out / "long.png", results=json)
    console = make_console()
    rows: list[long.Prefill] = []
    decoded: list[long.Decode] = []
    with _progress(console) as progress:
        task = progress.add_task("decoding", total=len(sizes) + len(decode_lengths))
        for decode_rows in long.run_decode(decode_lengths, seed=seed):
            decoded += decode_rows
            write_whole(json, long.to_json(rows, decoded, seed))
            progress.update(task, advance=1, description=f"decoding after {decoded[-1].tokens:,} tokens")
        for part in long.run_prefill(sizes, seed=seed, memory=memory, longest=longest):
            rows += part
            write_whole(json, long.to_json(rows, decoded, seed))
            progress.update(task, advance=1, description=f"prefill of {part[0].tokens:,} tokens")
    console.print(tables.prefill_table(rows, long.exponents(rows)))
    console.print(tables.decode_table(decoded))
    console.print(*plots.long(rows, decoded, out / "long"), json, sep="\n")


@bench.command("short")
def bench_short(
    shapes: Annotated[
        str,
        typer.Option(
            metavar="SHAPE,…",
            help="Batch x heads x tokens x head size; 8:2 for 8 heads on two key heads, /4 for four packed documents.",
        ),
    ] = SHAPES,
    seed: BenchSeed = 0,
    json: Json = None,
    out: Out = Path("runs/bench-short"),
) -> None:
    """Attention of short contexts, forward and backward, against plain SDPA without a prior.

    Results that differ from the float64 reference are not timed. It takes about three minutes on two cores and saves
    the JSON file after every shape.

    Example: bayesattn bench short --shapes 16x4x128x32,16x8:2x128x64/4 --json short.json
    """
    from bayesattn.benchmarks import short
    from bayesattn.report import bench_tables

    settings = short.Settings(parse_shapes(shapes), seed)
    json = json or out / "short.json"
    check_writable(results=json)
    console = make_console()
    rows: list[short.Row] = []
    with _progress(console) as progress:
        task = progress.add_task("measuring", total=len(settings.shapes))
        for part in short.run(settings):
            rows += part
            write_whole(json, short.to_json(rows, settings))
            progress.update(task, advance=1, description=part[0].shape)
    for phase in (short.FORWARD, short.TRAINING):
        console.print(bench_tables.short_table(rows, phase))
    console.print(json)


@bench.command("step")
def bench_step(
    lengths: Annotated[
        str, typer.Option(metavar="N,N,…", help="Numbers of keys that the token sees.")
    ] = "256,1024,4096,65536",
    seed: BenchSeed = 0,
    json: Json = None,
    out: Out = Path("runs/bench-step"),
) -> None:
    """One token at a time: a layer's cache against a full one with plain SDPA, and generate against a Llama's.

    Results that differ from the float64 reference, or from generation without a cache, are not timed. It takes about
    three minutes on two cores and saves the JSON file after every length and model.

    Example: bayesattn bench step --lengths 256,4096 --json step.json
    """
    quiet()
    from bayesattn.benchmarks import long, step
    from bayesattn.report import bench_tables

    settings = step.Settings(tuple(parse_lengths(lengths, most=long.most_tokens())), seed=seed)
    json = json or out / "step.json"
    check_writable(results=json)
    console = make_console()
    steps: list[step.Step] = []
    generations: list[step.Generation] = []
    with _progress(console) as progress:
        task = progress.add_task("measuring", total=step.parts(settings))
        for part in step.run(settings):
            for row in part:
                if isinstance(row, step.Step):
                    steps.append(row)
                else:
                    generations.append(row)
            write_whole(json, step.to_json(steps, generations, settings))
            progress.update(task, advance=1)
    console.print(bench_tables.step_table(steps), bench_tables.generation_table(generations), json, sep="\n")


@bench.command("load")
def bench_load(
    tries: Annotated[int, typer.Option(min=1, max=1000, help="How often everything is measured.")] = 5,
    seconds: Annotated[
        float, typer.Option(min=0.1, max=600, callback=finite, help="Seconds of one measurement.")
    ] = 2.0,
    seed: BenchSeed = 0,
    json: Json = None,
    out: Out = Path("runs/bench-load"),
) -> None:
    """Attention beside another process that computes, and two trainings side by side.

    The other processes are started by the command and end with it. It takes about three minutes on two cores and saves
    the JSON file after every try.

    Example: bayesattn bench load --tries 3 --seconds 1 --json load.json
    """
    quiet()
    from bayesattn.benchmarks import load
    from bayesattn.report import bench_tables

    settings = load.Settings(tries, seconds, seed)
    json = json or out / "load.json"
    check_writable(results=json)
    console = make_console()
    beside: list[load.Beside] = []
    trainings: list[load.Trainings] = []
    with _progress(console) as progress:
        task = progress.add_task("measuring", total=load.parts(settings))
        for part in load.run(settings):
            for row in part:
                if isinstance(row, load.Beside):
                    beside.append(row)
                else:
                    trainings.append(row)
            write_whole(json, load.to_json(beside, trainings, settings))
            progress.update(task, advance=1)
    console.print(
        bench_tables.beside_table(beside, str(load.SHAPE)), bench_tables.trainings_table(trainings), json, sep="\n"
    )
