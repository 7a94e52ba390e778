"""`bayesattn convergence`: does attention still change with more tokens?"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Optional

import typer
from rich.console import Console

from bayesattn.cli.options import (
    Json,
    Out,
    RunOut,
    Seed,
    finite,
    make_console,
    not_empty,
    parse_numbers,
    parse_range,
    quiet,
    run_folder,
    typed_command,
)
from bayesattn.errors import UserError, shown
from bayesattn.files import check_writable, short_name, write_results

if TYPE_CHECKING:
    from torch import Tensor

convergence = typer.Typer(
    help="How fast attention over n tokens converges as n grows.",
    no_args_is_help=True,
    rich_markup_mode=None,
)

# The closed form is checked with a million tokens at horizons below this; above it, few tokens carry all the weight.
LARGEST_CHECKED_HORIZON = 0.5
# The results so far are saved each time this many replicates are done.
SAVE_EVERY = 20

Lengths = Annotated[
    Optional[str],  # noqa: UP045
    typer.Option(callback=not_empty, metavar="N-N", help="Shortest and longest number of tokens."),
]
Points = Annotated[
    int | None,
    typer.Option(min=3, max=1000, help="Number of lengths from the shortest to the longest, in a geometric series."),
]
Replicates = Annotated[Optional[int], typer.Option(min=1, max=10**6, help="Number of independent draws of the tokens.")]  # noqa: UP045
Quick = Annotated[bool, typer.Option("--quick", help="Use fewer and shorter draws; takes less than a minute.")]


def _moments(name: str) -> Callable[..., None]:
    def command(
        quick: Quick = False,
        lengths: Lengths = None,
        points: Points = None,
        replicates: Replicates = None,
        scales: Annotated[
            str, typer.Option(metavar="S-S", help="Smallest and largest scale of the logits.")
        ] = "0.05-50",
        number: Annotated[int, typer.Option(min=1, max=100, help="Number of scales, in a geometric series.")] = 12,
        dimension: Annotated[int, typer.Option(help="Dimension of the tokens.")] = 50,
        variance: Annotated[
            float, typer.Option(min=1e-6, max=1e6, callback=finite, help="Variance of the tokens in each direction.")
        ] = 0.1,
        share: Annotated[
            int,
            typer.Option(
                min=1,
                max=2**20,
                metavar="N",
                help="Use every N-th token as a query; the errors are corrected for this.",
            ),
        ] = 8,
        dense: Annotated[
            bool, typer.Option("--dense", help="Compare one replicate with a loop over dense attention.")
        ] = False,
        seed: Seed = 0,
        json: Json = None,
        out: Out = Path(f"runs/convergence-{name}"),
    ) -> None:
        from bayesattn.convergence import moments
        from bayesattn.convergence.laws import LAWS
        from bayesattn.report import convergence as show

        law = LAWS[name](dimension, variance)
        grid = _grid(lengths or ("500-8000" if quick else "1000-30000"), points or (8 if quick else 12))
        logit_scales = moments.scales(*parse_range(scales, "--scales"), number)
        total = replicates if replicates is not None else (40 if quick else 200)
        json = json or out / f"convergence-{name}.json"
        check_writable(out / f"convergence-{name}.png", results=json)

        def save(errors: Tensor) -> list[moments.Row]:
            rows = moments.rows(law, logit_scales, grid, errors, seed)
            content = {"law": name, "dimension": dimension, "variance": variance, "lengths": grid, "share": share}
            _write(json, "convergence", rows, len(errors), seed, content)
            return rows

        console = make_console()
        replicate_errors = moments.sweep(law, logit_scales, grid, total, share=share, seed=seed)
        rows = save(_collect(replicate_errors, total, console, save))
        console.print(
            show.moments_table(rows, grid, f"Tokens of a {name}, {dimension} dimensions, {total} draws, seed {seed}")
        )
        checked_scales = [row.scale for row in rows if row.horizon < LARGEST_CHECKED_HORIZON]
        if checked_scales:
            deviation = moments.check_limit(law, checked_scales[-1], seed=seed)
            console.print(
                f"Attention over 1,000,000 tokens is {deviation:.2f} of its own standard errors from the closed form "
                f"(scale {checked_scales[-1]:.3g}, 64 queries).",
                highlight=False,
            )
        if dense:
            speed = moments.compare_dense(law, logit_scales, grid, share, seed)
            console.print(
                f"One replicate: {speed.seconds:.1f} s for {len(logit_scales)} scales; a loop over dense attention, "
                f"all tokens as queries, {speed.dense_seconds:.1f} s for one of them: {speed.ratio:.0f} times that. "
                f"With all tokens as queries both agree to {speed.error:.0e}.",
                highlight=False,
            )
        console.print(show.moments_plot(rows, grid, name, out / f"convergence-{name}")[0], json, sep="\n")

    command.__doc__ = f"""How fast the mean and covariance of attention outputs converge, for tokens of a {name}.

    Measures errors of the mean (2-norm) and of the covariance (Frobenius norm) against the limit, and fits powers of n.

    Example: bayesattn convergence {name} --quick --json {name}.json
    """
    return command


for _name in ("gaussian", "sphere", "mixture"):
    convergence.command(_name)(_moments(_name))


@convergence.command("uniform")
def uniform(
    law: Annotated[str, typer.Option(help="gaussian, sphere or mixture.")] = "gaussian",
    radii: Annotated[str, typer.Option(metavar="R,R,…", help="Radii of the ball of queries.")] = "0.5,1,1.5,2,2.5,3",
    dimension: Annotated[int, typer.Option(help="Dimension of the tokens and queries.")] = 8,
    quick: Quick = False,
    lengths: Lengths = None,
    points: Points = None,
    replicates: Replicates = None,
    seed: Seed = 0,
    json: Json = None,
    out: Out = Path("runs/convergence-uniform"),
) -> None:
    """The largest error of attention over a ball of queries: its rate in n, and how its constant grows with the radius.

    A gradient search from many starting points finds the largest error. It is a lower bound, close in few dimensions.

    Example: bayesattn convergence uniform --law sphere --radii 2,4,8,16
    """
    from bayesattn.convergence import uniform as study
    from bayesattn.report import convergence as show

    tokens = _law(law)(dimension)
    grid = _grid(lengths or ("500-4000" if quick else "2000-32000"), points or 5)
    sizes = parse_numbers(radii, "--radii")
    total = replicates if replicates is not None else (8 if quick else 24)
    json = json or out / "convergence-uniform.json"
    check_writable(out / "convergence-uniform.png", results=json)

    def save(squared: Tensor) -> tuple[list[study.Radius], study.Growth | None]:
        rows = study.rows(sizes, grid, squared)
        growth = study.growth(rows)
        content: dict[str, Any] = {"law": law, "dimension": dimension, "lengths": grid}
        content["growth"] = None if growth is None else growth.to_dict()
        _write(json, "convergence-uniform", rows, len(squared), seed, content)
        return rows, growth

    console = make_console()
    rows, growth = save(_collect(study.sweep(tokens, sizes, grid, total, seed), total, console, save))
    title = f"Largest error over a ball, {law} in {dimension} dimensions, {total} draws, seed {seed}"
    console.print(show.radius_table(rows, title))
    if growth is None:
        console.print("The growth of C is unknown: errors fall as 1/√n at fewer than 3 radii.", highlight=False)
    else:
        unexplained = ", ".join(f"{shape} leaves {share:.1%}" for shape, share in growth.unexplained.items())
        console.print(
            f"C grows as {' or '.join(growth.likely)}: {unexplained} of its variation unexplained, over "
            f"{growth.radii} radii whose errors fall as 1/√n.",
            highlight=False,
        )
    console.print(show.radius_plot(rows, grid, law, out / "convergence-uniform")[0], json, sep="\n")


@convergence.command("hardmax")
def hardmax(
    law: Annotated[str, typer.Option(help="gaussian or sphere.")] = "gaussian",
    sharpness: Annotated[
        str, typer.Option(metavar="S,S,…", help="Standard deviations of the logits; inf is hardmax.")
    ] = "1,2,4,8,inf",
    dimension: Annotated[int, typer.Option(help="Dimension of the tokens and queries.")] = 8,
    quick: Quick = False,
    lengths: Lengths = None,
    points: Points = None,
    replicates: Replicates = None,
    seed: Seed = 0,
    json: Json = None,
    out: Out = Path("runs/convergence-hardmax"),
) -> None:
    """The rate as the temperature goes to zero: does the error fall as a power of n, or of log n?

    Example: bayesattn convergence hardmax --law sphere
    """
    from bayesattn.convergence import hardmax as study
    from bayesattn.report import convergence as show

    if law not in ("gaussian", "sphere"):
        raise typer.BadParameter(f"{shown(law)}; gaussian or sphere is needed", param_hint="--law")
    tokens = _law(law)(dimension)
    grid = _grid(lengths or ("100-30000" if quick else "100-300000"), points or 10)
    values = parse_numbers(sharpness, "--sharpness", infinite=True)
    total = replicates if replicates is not None else (60 if quick else 200)
    json = json or out / "convergence-hardmax.json"
    check_writable(out / "convergence-hardmax.png", results=json)

    def save(squared: Tensor) -> list[study.Temperature]:
        rows = study.rows(values, grid, squared)
        content = {"law": law, "dimension": dimension, "lengths": grid}
        _write(json, "convergence-hardmax", rows, len(squared), seed, content)
        return rows

    console = make_console()
    rows = save(_collect(study.sweep(tokens, values, grid, total, seed), total, console, save))
    title = f"Relative error of a query, {law} in {dimension} dimensions, {total} draws, seed {seed}"
    console.print(show.temperature_table(rows, title))
    console.print(show.temperature_plot(rows, grid, law, out / "convergence-hardmax")[0], json, sep="\n")


@convergence.command("model")
def model(
    name: Annotated[
        str, typer.Argument(metavar="[NAME]", help="minilm, a shipped name, a folder, or a Hugging Face id.")
    ] = "minilm",
    tokens: Annotated[
        int, typer.Option(min=32, max=2**20, help="Number of tokens of the text to draw samples from.")
    ] = 512,
    text: Annotated[
        str,
        typer.Option(
            metavar="FILE",
            help="A text file or a folder of text files; by default the held-out part of the bundled text.",
        ),
    ] = "bundled",
    sampling: Annotated[
        str, typer.Option(help="iid: tokens from anywhere; window: every second token from a window of neighbours.")
    ] = "iid",
    quick: Quick = False,
    lengths: Lengths = None,
    points: Points = None,
    replicates: Replicates = None,
    seed: Seed = 0,
    json: Json = None,
    out: RunOut = None,
) -> None:
    """How fast attention converges in a real transformer, by layer and head.

    Draws the queries, keys and values of each layer on a text. The sampled tokens attend to each other by content
    alone, without mask and prior. The limit is attention over all tokens of the text.

    Example: bayesattn convergence model bam-tiny --tokens 2048 --lengths 64-1024
    """
    quiet()
    from bayesattn.convergence import layers as study
    from bayesattn.convergence.fits import rank_correlation
    from bayesattn.report import convergence as show

    grid = _grid(lengths or f"{tokens // 8}-{tokens * 3 // 4}", points or 6)
    total = replicates if replicates is not None else (50 if quick else 500)
    out = out or run_folder("convergence", name, {"sampling": (sampling, "iid")})
    json = json or out / "convergence-model.json"
    check_writable(out / "convergence-model.png", results=json)
    loaded, tokenizer = study.load(name)
    layers = study.read_layers(loaded, study.read_text(loaded, tokenizer, text, tokens), name)

    def save(errors: Tensor) -> tuple[list[study.Row], dict[str, tuple[float, float]]]:
        rows = study.rows(layers, grid, errors)
        heads = [row for row in rows if row.head is not None]
        horizons = [row.horizon for row in heads]
        ranks = {
            "mean": rank_correlation(horizons, [row.slope_mean for row in heads]),
            "covariance": rank_correlation(horizons, [row.slope_cov for row in heads]),
        }
        content: dict[str, Any] = {"model": name, "tokens": tokens, "sampling": sampling, "lengths": grid}
        _write(json, "convergence-model", rows, len(errors), seed, {**content, "rank_correlation": ranks})
        return rows, ranks

    console = make_console()
    errors = study.sweep(layers, grid, total, sampling, seed)  # type: ignore[arg-type]
    rows, ranks = save(_collect(errors, total, console, save))
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
    scale: Annotated[
        float,
        typer.Option(min=0, max=1000, callback=finite, help="Scale of the logits; the table shows their horizon."),
    ] = 5.0,
    quick: Quick = False,
    lengths: Lengths = None,
    points: Points = None,
    replicates: Replicates = None,
    seed: Seed = 0,
    json: Json = None,
    out: Out = Path("runs/convergence-prior"),
) -> None:
    """Where a prior over distance stops the error from falling: predicted from its effective tokens, and measured.

    Example: bayesattn convergence prior --scale 2
    """
    from bayesattn.convergence import effective_tokens as study
    from bayesattn.convergence.laws import Head, gaussian
    from bayesattn.report import convergence as show

    law, priors = gaussian(), study.families()
    study.typical_constant(law, Head.random(law.dimension, seed), scale)  # raises before the draws, not after them
    grid = _grid(lengths or ("10-5000" if quick else "10-20000"), points or 12)
    total = replicates if replicates is not None else (40 if quick else 200)
    json = json or out / "convergence-prior.json"
    check_writable(out / "convergence-prior.png", results=json)

    def save(squared: Tensor) -> list[study.Row]:
        rows = study.rows(law, priors, scale, grid, squared, seed)
        _write(json, "convergence-prior", rows, len(squared), seed, {"scale": scale})
        return rows

    console = make_console()
    rows = save(_collect(study.sweep(law, priors, scale, grid, total, seed), total, console, save))
    horizon = Head.random(law.dimension, seed).horizon(law, scale)
    console.print(
        show.prior_table(rows, f"Gaussian tokens, 50 dimensions, horizon {horizon:.3f}, {total} draws, seed {seed}")
    )
    worst = max(abs(row.ratio - 1) for row in rows)
    console.print(f"Largest deviation from the prediction at {grid[-1]:,} tokens: {worst:.1%}.", highlight=False)
    console.print(show.prior_plot(rows, out / "convergence-prior")[0], json, sep="\n")


def _collect(replicates: Iterable[Tensor], total: int, console: Console, save: Callable[[Tensor], object]) -> Tensor:
    """Stack all replicates, with a progress bar, and save the results so far now and then."""
    import torch
    from rich.progress import Progress, TimeElapsedColumn

    errors: list[Tensor] = []
    with Progress(*Progress.get_default_columns(), TimeElapsedColumn(), console=console, transient=True) as progress:
        task = progress.add_task("drawing tokens", total=total)
        for replicate in replicates:
            errors.append(replicate)
            progress.update(task, advance=1)
            if len(errors) % SAVE_EVERY == 0 and len(errors) < total:
                with suppress(UserError):  # a fit may need more replicates
                    save(torch.stack(errors))
    return torch.stack(errors)


def _write(json: Path, kind: str, rows: Sequence[Any], replicates: int, seed: int, content: dict[str, Any]) -> None:
    content = content | {"replicates": replicates, "seed": seed, "rows": [row.to_dict() for row in rows]}
    write_results(json, kind, {**content, "command": typed_command()})


def _grid(lengths: str, points: int) -> list[int]:
    """`1000-30000` as that many lengths in a geometric series."""
    from bayesattn.convergence.fits import grid

    least, _, most = lengths.partition("-")
    if not all(part.isdecimal() and len(part) <= 10 and int(part) < 2**31 for part in (least, most)):
        raise typer.BadParameter(
            f"{shown(lengths)}; give two numbers of tokens such as 1000-30000", param_hint="--lengths"
        )
    return grid(int(least), int(most), points)


def _law(name: str) -> Callable[..., Any]:
    from bayesattn.convergence.laws import LAWS

    if name not in LAWS:
        raise typer.BadParameter(f"{shown(name)}; {', '.join(LAWS)} are allowed", param_hint="--law")
    return LAWS[name]
