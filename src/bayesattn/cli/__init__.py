"""The command line: a command for every study, made from its settings, and those that are no measurement."""

from __future__ import annotations

import os
import shlex
import sys
from dataclasses import MISSING, fields
from inspect import Parameter, Signature, cleandoc
from json import loads as from_json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_type_hints

import typer

import bayesattn
from bayesattn.cli.errors import run
from bayesattn.errors import UserError
from bayesattn.files import check_writable, is_main_process, to_json, whole_lines, write_whole
from bayesattn.studies.options import Json, Out, Seed, not_empty
from bayesattn.studies.study import Settings, Study, all_studies

if TYPE_CHECKING:
    from collections.abc import Callable

    from rich.console import Console

GROUPS = {
    "eval": "Measure how far a causal model reads: ours, or any other.",
    "convergence": "Measure how fast attention converges with more tokens.",
    "bench": "Measure speed and memory against other implementations.",
}
# So few that two trainings side by side keep about half of their speed each; `bayesattn bench load` shows it.
SPIN_COUNT = "1000"


def make_app() -> typer.Typer:
    """All commands."""
    app = typer.Typer(
        name="bayesattn",
        help="Attention with a prior over distance: models, measurements, and training.",
        epilog="Start with: bayesattn demo. The help of a command has an example.",
        no_args_is_help=True,
        pretty_exceptions_enable=False,
        rich_markup_mode=None,
        add_completion=False,
    )
    app.callback(invoke_without_command=True)(_version)
    for command in (demo, priors, train, convert, extend, report):
        app.command()(command)
    groups: dict[str, typer.Typer] = {"": app}
    for study in all_studies():
        for path, settings in study.commands.items():
            group, _, name = path.rpartition(" ")
            if group not in groups:
                groups[group] = typer.Typer(help=GROUPS.get(group), no_args_is_help=True, rich_markup_mode=None)
                app.add_typer(groups[group], name=group)
            groups[group].command(name)(_command(study, settings))
    return app


def _command(study: Study[Any, Any], settings: type[Settings]) -> Callable[..., None]:
    """A command whose options are the settings of a study: their names, types, defaults and help."""

    def command(**options: Any) -> None:
        quiet()
        from bayesattn.studies.runner import run_study

        run_study(study, settings(**options), make_console(), shlex.join(["bayesattn", *sys.argv[1:]]))

    hints = get_type_hints(settings, include_extras=True)
    own = [field for field in fields(settings) if field not in fields(Settings)]
    command.__annotations__ = {field.name: hints[field.name] for field in (*own, *fields(Settings))}
    command.__signature__ = Signature(  # type: ignore[attr-defined]
        [
            Parameter(
                name,
                Parameter.KEYWORD_ONLY,
                default=Parameter.empty if default is MISSING else default,
                annotation=hints[name],
            )
            for name, default in ((field.name, field.default) for field in (*own, *fields(Settings)))
        ]
    )
    command.__doc__ = cleandoc(settings.__doc__ or "")
    return command


def main() -> None:
    """Entry point: an error that the user can correct is one sentence and exit code 2; Ctrl-C is 130, SIGTERM 143."""
    wait_briefly()
    run(app)


def wait_briefly() -> None:
    """Let torch's threads spin briefly when they wait for each other, unless the user has said how they wait.

    By default they spin for milliseconds. Beside another program the scheduler takes that from the thread they wait
    for. The variable is read once, when torch is loaded.
    """
    if not os.environ.keys() & {"OMP_WAIT_POLICY", "GOMP_SPINCOUNT"}:
        os.environ["GOMP_SPINCOUNT"] = SPIN_COUNT


def quiet() -> None:
    """Switch off the messages of transformers that do not concern the user."""
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")


def make_console() -> Console:
    """The terminal. Names of models and files are printed as they are, brackets and colons included."""
    from rich.console import Console

    return Console(markup=False, emoji=False)


def _version(
    version: Annotated[bool, typer.Option("--version", help="Print the version and exit.", is_eager=True)] = False,
) -> None:
    if version:
        print(bayesattn.__version__)
        raise typer.Exit


def demo(
    haystack: Annotated[str, typer.Option(metavar="FILE", help="Hide the keys in this text file.")] = "",
    train: Annotated[bool, typer.Option("--train", help="Train bam-tiny from scratch first.")] = False,
    seed: Seed = 0,
    out: Out = Path("runs/demo"),
) -> None:
    """Find keys in 64,000 tokens with models trained on 128.

    One model for each encoding reads prompts of growing length. It takes about 90 seconds on two cores.

    Example: bayesattn demo --haystack README.md
    """
    quiet()
    check_writable(*(out / f"{name}.png" for name in ("passkey", "priors")))
    from bayesattn.demo import demo as run_demo

    run_demo(out, make_console(), haystack=haystack, train=train, seed=seed)


def priors(
    tokens: Annotated[int, typer.Option(min=2, max=2**24, help="Number of distances.")] = 1024,
    out: Out = Path("runs/priors"),
) -> None:
    """Show one prior of each family as a table and a picture.

    Example: bayesattn priors --tokens 8192
    """
    check_writable(out / "priors.png")
    from bayesattn.demo import families

    families(out, make_console(), tokens)


def train(
    recipe: Annotated[
        Path, typer.Argument(metavar="RECIPE.yaml", help="The recipe: model, data and training settings.")
    ],
    changes: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="SECTION.KEY=VALUE", help="Change a setting of the recipe; may be repeated."),
    ] = None,
    resume: Annotated[bool, typer.Option(help="Continue from the newest checkpoint in the folder.")] = False,
    report_to: Annotated[str, typer.Option(help="Where the Trainer reports: none, tensorboard, wandb, …")] = "none",
    out: Annotated[Path | None, typer.Option(metavar="DIR", help="Folder of the run; runs/NAME by default.")] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Only build the model and estimate the cost of training.")
    ] = False,
    hardware: Annotated[str, typer.Option(help="Hardware of the estimate: h100, a100, rtx4090, …")] = "h100",
    devices: Annotated[int, typer.Option(min=1, help="Number of devices of the estimate.")] = 1,
    mfu: Annotated[float, typer.Option(help="Share of the peak FLOPs that training reaches.")] = 0.4,
    json: Json = None,
) -> None:
    """Train a model with a recipe.

    The folder of the run has the trained model in model/, its log and its checkpoints.

    Example: bayesattn train recipes/bam-tiny.yaml --set training.steps=500 --out runs/short
    """
    quiet()
    if json is not None:
        check_writable(json)
    if dry_run:
        from bayesattn.training.estimate import estimate, estimate_table
        from bayesattn.training.recipe import load_recipe

        cost = estimate(load_recipe(recipe, changes or []), hardware=hardware, devices=devices, mfu=mfu)
        make_console().print(estimate_table(cost))
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


def convert(
    source: Annotated[
        str,
        typer.Argument(
            callback=not_empty,
            metavar="SOURCE",
            help="A run of the BAM authors' code (a folder with model.pt and args.json); or a BLOOM, MPT or Falcon "
            "with ALiBi, a folder or a Hugging Face id.",
        ),
    ],
    out: Annotated[Path, typer.Argument(metavar="OUT", help="A new folder for the model.")],
    prior: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="For BLOOM, MPT and Falcon: laplace, learned slopes (the default); or bam, generalized Gaussians that "
            "start as them.",
        ),
    ] = None,
    json: Json = None,
) -> None:
    """Convert a checkpoint into a model of ours with priors.

    The result has the same logits, and its priors can be trained.

    Example: bayesattn convert bigscience/bloom-560m runs/bloom-560m
    """
    quiet()
    if json is not None:
        check_writable(json)
    from bayesattn.adapt.convert import conversion_table
    from bayesattn.adapt.convert import convert as run_conversion

    console = make_console()
    with console.status(f"Converting {source}"):
        conversion = run_conversion(source, out, prior=prior)
    console.print(conversion_table(conversion))
    if json is not None:
        write_whole(json, to_json(conversion.to_dict(), indent=1))


def extend(
    model: Annotated[
        str,
        typer.Argument(
            callback=not_empty,
            metavar="MODEL",
            help="A model with rotary positions: a shipped name, a folder, or a Hugging Face id.",
        ),
    ],
    out: Annotated[Path, typer.Option(metavar="DIR", help="A new folder for the extended model.")],
    window: Annotated[
        int, typer.Option(help="Distances below it are as they were; it must be below the training length.")
    ] = 2048,
    temperature: Annotated[
        str, typer.Option(metavar="log|none", help="Whether queries grow with log n beyond the training length.")
    ] = "log",
    group: Annotated[
        int | None, typer.Option(metavar="N", help="Far keys at rotary positions in steps of N tokens (SelfExtend).")
    ] = None,
    sinks: Annotated[
        int | None, typer.Option(metavar="N", help="Of the far keys, only the first N tokens: a window and sinks.")
    ] = None,
    keep: Annotated[
        str | None,
        typer.Option(
            metavar="SHARE",
            help="Share of the key/value heads that see far keys, chosen on short text: 50% or 0.5. "
            "The others see the window and the first --sinks tokens, 4 by default.",
        ),
    ] = None,
    fit: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Results of `bayesattn fit`, whose prices choose these heads; without it they are "
            "measured on the bundled text.",
        ),
    ] = None,
    json: Json = None,
) -> None:
    """Let a rotary model read past its training length.

    It takes no training. Far keys are scored at one distance that the model knows. A prompt no longer than the window
    has the logits that it had.

    Example: bayesattn extend rope-tiny --window 64 --keep 50% --out runs/rope-tiny-long
    """  # fmt: skip
    quiet()
    if json is not None:
        check_writable(json)
    if fit is not None and keep is None:
        raise UserError("--fit has prices by which heads are chosen, and --keep says how many; give --keep 50%")
    from bayesattn.adapt.extend_folder import extend_folder, extension_table

    choose: Callable[[Any, str], Any] | None = None
    if keep is not None:
        from bayesattn.data.tokenizer import load_tokenizer
        from bayesattn.fit.near_heads import choose_near
        from bayesattn.studies.fit.run import parse_share

        share = parse_share(keep)

        def choose(made: Any, place: str) -> Any:
            return choose_near(made, fit, share, window=window, tokenizer=load_tokenizer(place))

    console = make_console()
    with console.status(f"Extending {model}"):
        made = extend_folder(model, out, window, temperature, group=group, sinks=sinks, choose=choose)
    console.print(extension_table(made))
    if json is not None:
        write_whole(json, to_json(made.to_dict(), indent=1))


def report(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN…", help="Result files, or folders with result files.")],
    title: Annotated[str, typer.Option(help="Title of the page.")] = "How far it reads",
    out: Annotated[Path, typer.Option(metavar="FILE", help="Where to write the page.")] = Path("runs/report.html"),
) -> None:
    """Make one HTML page of results.

    It has curves, heat maps, heads, costs, and the commands to reproduce them. It needs no network.

    Example: bayesattn report runs/passkey-bam-tiny runs/passkey-rope-tiny runs/inspect-bam-tiny
    """
    from bayesattn.report.page import make_page

    check_writable(out)
    write_whole(out, make_page(runs, title))
    print(out)


app = make_app()
