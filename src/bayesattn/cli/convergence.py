"""`bayesattn convergence`: does attention still change with more tokens?"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Optional

import typer
from rich.console import Console

from bayesattn.cli.options import Json, Out, RunOut, Seed, quiet, run_folder, typed_command
from bayesattn.errors import UserError
from bayesattn.files import short_name

if TYPE_CHECKING:
    from torch import Tensor

convergence = typer.Typer(
    help="How fast attention over n tokens comes near to attention over all there could be.",
    no_args_is_help=True,
    rich_markup_mode=None,
)

# The sharpest attention for which a million tokens have a standard error to go by.
SOFT = 0.5
# Replicates between two writings of the results so far.
KEEP_EVERY = 20

Lengths = Annotated[
    Optional[str],  # noqa: UP045
    typer.Option(metavar="N-N", help="Shortest and longest number of tokens."),
]
Points = Annotated[Optional[int], typer.Option(min=3, help="Lengths between them, geometric.")]  # noqa: UP045
Replicates = Annotated[Optional[int], typer.Option(help="Draws of tokens.")]  # noqa: UP045
Quick = Annotated[bool, typer.Option("--quick", help="Fewer and shorter draws: under a minute.")]


def _moments(name: str) -> Callable[..., None]:
    def command(
        quick: Quick = False,
        lengths: Lengths = None,
        points: Points = None,
        replicates: Replicates = None,
        scales: Annotated[str, typer.Option(metavar="S-S", help="Least and greatest scale of the logits.")] = "0.05-50",
        number: Annotated[int, typer.Option(min=1, max=100, help="Scales between them, geometric.")] = 12,
        dimension: Annotated[int, typer.Option(help="Of tokens.")] = 50,
        variance: Annotated[float, typer.Option(min=1e-6, help="Of tokens, in each direction.")] = 0.1,
        share: Annotated[
            int, typer.Option(min=1, help="One in so many tokens asks; what that adds to errors is taken off.")
        ] = 8,
        dense: Annotated[
            bool, typer.Option("--dense", help="Compare with a loop over dense attention on one replicate.")
        ] = False,
        seed: Seed = 0,
        json: Json = None,
        out: Annotated[Path, typer.Option(metavar="DIR", help="Folder for results and pictures.")] = Path(
            f"runs/convergence-{name}"
        ),
    ) -> None:
        from bayesattn.convergence import moments
        from bayesattn.convergence.fits import grid as make_grid
        from bayesattn.convergence.laws import LAWS
        from bayesattn.files import write_results
        from bayesattn.report import convergence as show

        law = LAWS[name](dimension, variance)
        grid = make_grid(*_range(lengths or ("500-8000" if quick else "1000-30000")), points or (8 if quick else 12))
        least, most = _floats(scales)
        strengths = moments.scales(least, most, number)
        total = replicates if replicates is not None else (40 if quick else 200)
        json = json or out / f"convergence-{name}.json"

        def keep(errors: Tensor) -> list[moments.Row]:
            rows = moments.rows(law, strengths, grid, errors, seed)
            content = {"law": name, "dimension": dimension, "variance": variance, "lengths": grid, "share": share}
            content |= {"replicates": len(errors), "seed": seed, "rows": [row.to_dict() for row in rows]}
            write_results(json, "convergence", {**content, "command": typed_command()})
            return rows

        console = Console()
        errors = _gather(moments.sweep(law, strengths, grid, total, share=share, seed=seed), total, console, keep)
        rows = keep(errors)
        console.print(
            show.moments_table(rows, grid, f"Tokens of a {name}, {dimension} dimensions, {total} draws, seed {seed}")
        )
        soft = [row.scale for row in rows if row.horizon < SOFT]
        if soft:
            off = moments.check_limit(law, soft[-1], seed=seed)
            console.print(
                f"Attention over 1,000,000 tokens is {off:.2f} of its own standard errors from the closed form (scale "
                f"{soft[-1]:.3g}, 64 queries).",
                highlight=False,
            )
        if dense:
            told = moments.compare_dense(law, strengths, grid, share, seed)
            console.print(
                f"One replicate: {told.seconds:.1f} s for {len(strengths)} scales; a loop over dense attention, all "
                f"tokens asking, {told.dense_seconds:.1f} s for one of them: {told.ratio:.0f} times that. With all "
                f"tokens asking both agree to {told.error:.0e}.",
                highlight=False,
            )
        console.print(show.moments_plot(rows, grid, name, out / f"convergence-{name}")[0], json, sep="\n")

    command.__doc__ = f"""Moments of attention's outputs over tokens of a {name}, by the horizon of the attention.

    The errors of mean (2-norm) and covariance (Frobenius norm) against the limit are fitted to powers of n.

    Example: bayesattn convergence {name} --quick --json {name}.json
    """
    return command


for _name in ("gaussian", "sphere", "mixture"):
    convergence.command(_name)(_moments(_name))


@convergence.command("uniform")
def uniform(
    law: Annotated[str, typer.Option(help="gaussian, sphere or mixture.")] = "gaussian",
    radii: Annotated[str, typer.Option(metavar="R,R,…", help="Radii of the ball of queries.")] = "0.5,1,1.5,2,2.5,3",
    dimension: Annotated[int, typer.Option(help="Of tokens and queries.")] = 8,
    quick: Quick = False,
    lengths: Lengths = None,
    points: Points = None,
    replicates: Replicates = None,
    seed: Seed = 0,
    json: Json = None,
    out: Out = Path("runs/convergence-uniform"),
) -> None:
    """The largest error of attention over a ball of queries: its rate in n, and how its constant grows with the radius.

    The largest error is searched for, from many places uphill: a lower bound, and a close one in few dimensions.

    Example: bayesattn convergence uniform --law sphere --radii 2,4,8,16
    """
    from bayesattn.convergence import pointwise
    from bayesattn.convergence.fits import grid as make_grid
    from bayesattn.files import write_results
    from bayesattn.report import convergence as show

    tokens = _law(law)(dimension)
    grid = make_grid(*_range(lengths or ("500-4000" if quick else "2000-32000")), points or 5)
    sizes = _list(radii, "--radii")
    total = replicates if replicates is not None else (8 if quick else 24)
    json = json or out / "convergence-uniform.json"

    def keep(squared: Tensor) -> tuple[list[pointwise.Radius], pointwise.Growth | None]:
        rows = pointwise.radius_rows(sizes, grid, squared)
        grown = pointwise.growth(rows)
        content = {"law": law, "dimension": dimension, "lengths": grid, "replicates": len(squared), "seed": seed}
        content |= {"rows": [row.to_dict() for row in rows], "growth": None if grown is None else grown.to_dict()}
        write_results(json, "convergence-uniform", {**content, "command": typed_command()})
        return rows, grown

    console = Console()
    rows, grown = keep(_gather(pointwise.uniform(tokens, sizes, grid, total, seed), total, console, keep))
    title = f"Largest error over a ball, {law} in {dimension} dimensions, {total} draws, seed {seed}"
    console.print(show.radius_table(rows, title))
    if grown is None:
        console.print("Too few radii have errors that fall as 1/√n yet to say how C grows.", highlight=False)
    else:
        left = ", ".join(f"{shape} leaves {share:.1%}" for shape, share in grown.unexplained.items())
        console.print(
            f"C grows as {' or '.join(grown.likely)}: {left} of its variation unexplained, over {grown.radii} radii "
            "whose errors fall as 1/√n.",
            highlight=False,
        )
    console.print(show.radius_plot(rows, grid, law, out / "convergence-uniform")[0], json, sep="\n")


@convergence.command("hardmax")
def hardmax(
    law: Annotated[str, typer.Option(help="gaussian or sphere.")] = "gaussian",
    sharpness: Annotated[
        str, typer.Option(metavar="S,S,…", help="Standard deviations of the logits; inf is hardmax.")
    ] = "1,2,4,8,inf",
    dimension: Annotated[int, typer.Option(help="Of tokens and queries.")] = 8,
    quick: Quick = False,
    lengths: Lengths = None,
    points: Points = None,
    replicates: Replicates = None,
    seed: Seed = 0,
    json: Json = None,
    out: Out = Path("runs/convergence-hardmax"),
) -> None:
    """What becomes of the rate as the temperature goes to zero: a power of n, or of its logarithm?

    Example: bayesattn convergence hardmax --law sphere
    """
    from bayesattn.convergence import pointwise
    from bayesattn.convergence.fits import grid as make_grid
    from bayesattn.files import write_results
    from bayesattn.report import convergence as show

    if law not in ("gaussian", "sphere"):
        raise typer.BadParameter(f"{law!r}; gaussian or sphere is needed", param_hint="--law")
    tokens = _law(law)(dimension)
    grid = make_grid(*_range(lengths or ("100-30000" if quick else "100-300000")), points or 10)
    values = _list(sharpness, "--sharpness", infinite=True)
    total = replicates if replicates is not None else (60 if quick else 200)
    json = json or out / "convergence-hardmax.json"

    def keep(squared: Tensor) -> list[pointwise.Temperature]:
        rows = pointwise.temperature_rows(values, grid, squared)
        content = {"law": law, "dimension": dimension, "lengths": grid, "replicates": len(squared), "seed": seed}
        content |= {"rows": [row.to_dict() for row in rows], "command": typed_command()}
        write_results(json, "convergence-hardmax", content)
        return rows

    console = Console()
    rows = keep(_gather(pointwise.hardmax(tokens, values, grid, total, seed), total, console, keep))
    title = f"Relative error of a query, {law} in {dimension} dimensions, {total} draws, seed {seed}"
    console.print(show.temperature_table(rows, title))
    console.print(show.temperature_plot(rows, grid, law, out / "convergence-hardmax")[0], json, sep="\n")


@convergence.command("model")
def model(
    name: Annotated[
        str, typer.Argument(metavar="[NAME]", help="minilm, a shipped name, a folder, or a Hugging Face id.")
    ] = "minilm",
    tokens: Annotated[int, typer.Option(min=32, help="Tokens of the text, the law that samples are drawn from.")] = 512,
    text: Annotated[
        str, typer.Option(metavar="FILE", help="A text, a folder of them, or the held-out part of the bundled one.")
    ] = "bundled",
    sampling: Annotated[
        str, typer.Option(help="iid: tokens from anywhere; window: every other one from a window of neighbours.")
    ] = "iid",
    quick: Quick = False,
    lengths: Lengths = None,
    points: Points = None,
    replicates: Replicates = None,
    seed: Seed = 0,
    json: Json = None,
    out: RunOut = None,
) -> None:
    """The same in a real transformer, by layer and head: tokens are drawn from a text as its layers see it.

    Samples attend to each other by content alone, without mask and prior; the limit is all tokens of the text.

    Example: bayesattn convergence model bam-tiny --tokens 2048 --lengths 64-1024
    """
    quiet()
    from bayesattn.convergence import layers as real
    from bayesattn.convergence.fits import grid as make_grid
    from bayesattn.convergence.fits import rank_correlation
    from bayesattn.files import write_results
    from bayesattn.report import convergence as show

    loaded, tokenizer = real.load(name)
    found = real.read_layers(loaded, real.read_text(loaded, tokenizer, text, tokens))
    grid = make_grid(*_range(lengths or f"{tokens // 8}-{tokens * 3 // 4}"), points or 6)
    total = replicates if replicates is not None else (50 if quick else 500)
    out = out or run_folder("convergence", name, {"sampling": (sampling, "iid")})
    json = json or out / "convergence-model.json"

    def keep(errors: Tensor) -> tuple[list[real.Row], dict[str, tuple[float, float]]]:
        rows = real.rows(found, grid, errors)
        heads = [row for row in rows if row.head is not None]
        horizons = [row.horizon for row in heads]
        ranks = {
            "mean": rank_correlation(horizons, [row.slope_mean for row in heads]),
            "covariance": rank_correlation(horizons, [row.slope_cov for row in heads]),
        }
        content: dict[str, Any] = {"model": name, "tokens": tokens, "sampling": sampling, "lengths": grid}
        content |= {"replicates": len(errors), "seed": seed, "rows": [row.to_dict() for row in rows]}
        content |= {"rank_correlation": ranks, "command": typed_command()}
        write_results(json, "convergence-model", content)
        return rows, ranks

    console = Console()
    errors = _gather(real.sweep(found, grid, total, sampling, seed), total, console, keep)  # type: ignore[arg-type]
    rows, ranks = keep(errors)
    title = f"{short_name(name)}: {tokens:,} tokens of text, {sampling} samples of {grid[0]:,} to {grid[-1]:,}, "
    console.print(show.layers_table(rows, title + f"{total} draws, seed {seed}"))
    for moment, (rho, chance) in ranks.items():
        console.print(
            f"{moment}: rank correlation of slope with horizon over heads {rho:+.2f}; {chance:.2g} of random orders "
            "are as far from zero",
            highlight=False,
        )
    console.print(show.layers_plot(rows, short_name(name), out / "convergence-model")[0], json, sep="\n")


@convergence.command("prior")
def prior(
    scale: Annotated[float, typer.Option(min=0, max=1000, help="Of the logits; their horizon is printed.")] = 5.0,
    quick: Quick = False,
    lengths: Lengths = None,
    points: Points = None,
    replicates: Replicates = None,
    seed: Seed = 0,
    json: Json = None,
    out: Out = Path("runs/convergence-prior"),
) -> None:
    """Where a prior over distance stops the error from falling: predicted from effective tokens, and measured.

    Example: bayesattn convergence prior --scale 2
    """
    from bayesattn.convergence import bridge
    from bayesattn.convergence.fits import grid as make_grid
    from bayesattn.convergence.laws import Head, gaussian
    from bayesattn.files import write_results
    from bayesattn.report import convergence as show

    law, priors = gaussian(), bridge.families()
    bridge.typical_constant(law, Head.random(law.dimension, seed), scale)  # refuses what cannot be predicted
    grid = make_grid(*_range(lengths or ("10-5000" if quick else "10-20000")), points or 12)
    total = replicates if replicates is not None else (40 if quick else 200)
    json = json or out / "convergence-prior.json"

    def keep(squared: Tensor) -> list[bridge.Row]:
        rows = bridge.rows(law, priors, scale, grid, squared, seed)
        content = {"scale": scale, "replicates": len(squared), "seed": seed, "rows": [row.to_dict() for row in rows]}
        write_results(json, "convergence-prior", {**content, "command": typed_command()})
        return rows

    console = Console()
    rows = keep(_gather(bridge.measure(law, priors, scale, grid, total, seed), total, console, keep))
    horizon = Head.random(law.dimension, seed).horizon(law, scale)
    console.print(
        show.prior_table(rows, f"Gaussian tokens, 50 dimensions, horizon {horizon:.3f}, {total} draws, seed {seed}")
    )
    worst = max(abs(row.ratio - 1) for row in rows)
    console.print(f"Largest deviation from the prediction at {grid[-1]:,} tokens: {worst:.1%}.", highlight=False)
    console.print(show.prior_plot(rows, out / "convergence-prior")[0], json, sep="\n")


def _gather(found: Iterable[Tensor], total: int, console: Console, keep: Callable[[Tensor], object]) -> Tensor:
    """All replicates in a row with a progress bar; what is there is kept now and then."""
    import torch
    from rich.progress import Progress, TimeElapsedColumn

    errors: list[Tensor] = []
    with Progress(*Progress.get_default_columns(), TimeElapsedColumn(), console=console, transient=True) as progress:
        task = progress.add_task("drawing tokens", total=total)
        for one in found:
            errors.append(one)
            progress.update(task, advance=1)
            if len(errors) % KEEP_EVERY == 0 and len(errors) < total:
                with suppress(UserError):  # more replicates may be needed for a fit
                    keep(torch.stack(errors))
    return torch.stack(errors)


def _law(name: str) -> Callable[..., Any]:
    from bayesattn.convergence.laws import LAWS

    if name not in LAWS:
        raise typer.BadParameter(f"{name!r}; {', '.join(LAWS)} are allowed", param_hint="--law")
    return LAWS[name]


def _range(text: str) -> tuple[int, int]:
    """`1000-30000` as two numbers."""
    least, _, most = text.partition("-")
    if not (least.isdecimal() and most.isdecimal() and int(most) < 2**31):
        raise typer.BadParameter(f"{text!r}; give two numbers of tokens such as 1000-30000", param_hint="--lengths")
    return int(least), int(most)


def _floats(text: str) -> tuple[float, float]:
    """`0.05-50` as two numbers."""
    least, _, most = text.partition("-")
    try:
        found = float(least), float(most)
    except ValueError:
        found = (0.0, 0.0)
    if not 0 < found[0] < found[1] < 1e6:
        raise typer.BadParameter(f"{text!r}; give two positive numbers such as 0.05-50", param_hint="--scales")
    return found


def _list(text: str, option: str, infinite: bool = False) -> list[float]:
    try:
        found = sorted({float(part) for part in text.split(",")})
    except ValueError:
        found = []
    if not found or not found[0] > 0 or (math.isinf(found[-1]) and not infinite):
        raise typer.BadParameter(f"{text!r}; give positive numbers with commas between them", param_hint=option)
    return found
