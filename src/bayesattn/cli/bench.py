"""`bayesattn bench`: speed and memory compared with other implementations."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from bayesattn.cli.options import Json, Out, finite, make_console, parse_lengths
from bayesattn.files import check_writable, write_whole

bench = typer.Typer(
    help="Speed and memory, compared with other implementations in one process.",
    no_args_is_help=True,
    rich_markup_mode=None,
)


@bench.command("attention")
def bench_attention(
    lengths: Annotated[str, typer.Option(metavar="N,N,…", help="Numbers of tokens.")] = "512,1024,2048,4096,8192,16384",
    memory: Annotated[bool, typer.Option(help="Measure peak memory, each method in its own process.")] = True,
    flex: Annotated[bool, typer.Option(help="Include compiled FlexAttention, which takes long to compile.")] = True,
    seed: Annotated[int, typer.Option(min=0, max=2**32, help="Seed of the random inputs.")] = 0,
    json: Json = None,
    out: Out = Path("runs/bench-attention"),
) -> None:
    """Attention with a learned prior against SDPA, a bias matrix, FlexAttention and dense autograd.

    A method whose results differ from the float64 reference is not timed. It takes about ten minutes on two cores and
    saves the JSON file after every length.

    Example: bayesattn bench attention --lengths 512,2048 --no-flex --json bench.json
    """
    from rich.progress import Progress, SpinnerColumn, TimeElapsedColumn

    from bayesattn.benchmarks.attention import FORWARD, TRAINING, Row, most_tokens, run, to_json
    from bayesattn.report import plots, tables

    sizes = parse_lengths(lengths, most=most_tokens())
    json = json or out / "attention.json"
    check_writable(out / "attention.png", results=json)
    console = make_console()
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
    seed: Annotated[int, typer.Option(min=0, max=2**32, help="Seed of the random inputs.")] = 0,
    json: Json = None,
    out: Out = Path("runs/bench-long"),
) -> None:
    """Pruned attention and the pruning cache against plain attention, for layers of local and other heads.

    Results that differ from the float64 reference are not timed. It takes about twenty minutes on two cores and saves
    the JSON file after every length.

    Example: bayesattn bench long --lengths 1024,16384 --decode 1024 --json long.json
    """
    from rich.progress import Progress, SpinnerColumn, TimeElapsedColumn

    from bayesattn.benchmarks import long
    from bayesattn.report import plots, tables

    sizes = parse_lengths(lengths, most=long.most_tokens())
    decode_lengths = parse_lengths(decode, most=long.most_tokens(), option="--decode")
    json = json or out / "long.json"
    check_writable(out / "long.png", results=json)
    console = make_console()
    rows: list[long.Prefill] = []
    decoded: list[long.Decode] = []
    with Progress(SpinnerColumn(), *Progress.get_default_columns(), TimeElapsedColumn(), console=console) as progress:
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
