"""Other people's checkpoints as models of ours: the same weights, the same logits, priors that can be trained."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from rich.table import Table
from torch import Tensor
from transformers.utils.logging import disable_progress_bar

from bayesattn.adapt.alibi_models import CONFIGURATIONS, convert_alibi, notes
from bayesattn.adapt.bam_checkpoint import build_model, is_bam_checkpoint, read_checkpoint
from bayesattn.adapt.published import published_logits
from bayesattn.attention import ScalableSoftmax
from bayesattn.data.tokenizer import load_tokenizer
from bayesattn.drawing.tables import make_table
from bayesattn.errors import UserError, cut, shown
from bayesattn.files import PARTIAL, check_writable, quoted
from bayesattn.models.alibi.configuration import PRIORS
from bayesattn.models.loading import load_config, load_weights
from bayesattn.priors import Prior

# Tokens of the random prompt on which source and result are compared.
PROMPT_TOKENS = 64
# Names of encodings for people.
ENCODINGS = {
    "laplace": "ALiBi, as learned Laplace priors",
    "bam": "ALiBi, as learned generalized Gaussian priors",
}


@dataclass(frozen=True)
class Conversion:
    """What was converted.

    Args:
        source: the checkpoint.
        out: the folder of the result, which `from_pretrained` loads.
        model: the class of the result.
        encoding: positional encoding of the source.
        parameters: all that can be trained.
        prior_parameters: those of priors and temperatures.
        largest_difference: between logits of the source and of the result as loaded from `out`, in float32.
        largest_logit: of the source, without its sign.
        tokens: length of the random prompt on which they were compared.
        tokenizer: whether the source had one, which is in `out` too.
        notes: where the source differs from its own formula.
    """

    source: str
    out: str
    model: str
    encoding: str
    parameters: int
    prior_parameters: int
    largest_difference: float
    largest_logit: float
    tokens: int
    tokenizer: bool
    notes: tuple[str, ...]

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)


def convert(source: str | Path, out: str | Path, *, prior: str | None = None) -> Conversion:
    """Convert a checkpoint into a folder that `from_pretrained` loads, and compare the logits of both.

    Args:
        source: a run of the BAM authors' code (a folder with model.pt and args.json, or the .pt file); or a BLOOM, MPT
            or Falcon with ALiBi: a folder or an id of the Hugging Face hub.
        out: a new folder. It is written completely or not at all.
        prior: for BLOOM, MPT and Falcon: `laplace` (the default), one learned slope for each head and layer; or `bam`,
            generalized Gaussians that start as these slopes and can become any shape.

    Raises:
        UserError: another kind of model, weights that are missing, unexpected or not finite, a file that would run
            code, or a folder that is not empty.
    """
    if prior is not None and prior not in PRIORS:
        raise UserError(f"prior is {shown(prior)}; allowed are {', '.join(PRIORS)}")
    disable_progress_bar()  # of files, which would stand in the middle of the table
    folder = Path(out)
    with new_folder(folder) as partial:
        if is_bam_checkpoint(source):
            if prior is not None:
                raise UserError(f"prior is {shown(prior)}; {cut(source)} has a prior of its own, so leave it out")
            return _convert_bam(str(source), folder, partial)
        return _convert_alibi(str(source), folder, partial, "laplace" if prior is None else prior)


def conversion_table(conversion: Conversion) -> Table:
    """The conversion for people."""
    table = make_table("Converted", "\n".join(conversion.notes) or None)
    table.show_header = False
    table.add_column("", no_wrap=True)
    table.add_column("", overflow="fold")
    for name, value in (
        ("source", conversion.source),
        ("result", conversion.out),
        ("model", conversion.model),
        ("encoding", conversion.encoding),
        ("parameters", f"{conversion.parameters:,}"),
        ("… of priors", f"{conversion.prior_parameters:,}, temperatures included"),
        ("tokenizer", "that of the source" if conversion.tokenizer else "none in the source"),
        (
            "logits",
            f"up to {conversion.largest_logit:.3g}; they differ by at most {conversion.largest_difference:.1e} on "
            f"{conversion.tokens} random tokens, in float32",
        ),
    ):
        table.add_row(name, value)
    return table


def _convert_bam(source: str, folder: Path, partial: Path) -> Conversion:
    checkpoint = read_checkpoint(source)
    build_model(checkpoint).save_pretrained(partial)
    return _finish(
        source, folder, partial, checkpoint.encoding, (), lambda ids: published_logits(checkpoint, ids), PROMPT_TOKENS
    )


def _convert_alibi(source: str, folder: Path, partial: Path, prior: str) -> Conversion:
    config, place, settings = load_config(source)
    if config.model_type not in CONFIGURATIONS:
        raise UserError(
            f"{cut(source)} is a {cut(config.model_type, 30)} model; runs of the BAM authors' code and models with "
            f"ALiBi ({', '.join(CONFIGURATIONS)}) can be converted, and others get a prior with ba.add_prior"
        )
    model = load_weights(source, config, place, settings)
    convert_alibi(model, prior).save_pretrained(partial)
    copy_tokenizer(place, partial)
    longest = config.max_seq_len if config.model_type == "mpt" else PROMPT_TOKENS
    model = model.float()
    return _finish(
        source, folder, partial, ENCODINGS[prior], tuple(notes(model)), lambda ids: model(ids).logits,
        min(PROMPT_TOKENS, longest),
    )  # fmt: skip


def _finish(
    source: str,
    folder: Path,
    partial: Path,
    encoding: str,
    remarks: tuple[str, ...],
    logits: Callable[[Tensor], Tensor],
    tokens: int,
) -> Conversion:
    """Load what was saved, compare it with the source, and count its parameters."""
    config, place, settings = load_config(partial)
    model = load_weights(partial, config, place, settings).float()
    draw = torch.Generator().manual_seed(0)
    ids = torch.randint(config.vocab_size, (1, tokens), generator=draw)
    with torch.inference_mode():
        of_source = logits(ids).float()
        difference = float((of_source - model(ids).logits).abs().max())
    parts = [part for part in model.modules() if isinstance(part, (Prior, ScalableSoftmax))]
    return Conversion(
        source=source,
        out=str(folder),
        model=type(model).__name__,
        encoding=encoding,
        parameters=sum(p.numel() for p in model.parameters()),
        prior_parameters=sum(p.numel() for part in parts for p in part.parameters()),
        largest_difference=difference,
        largest_logit=float(of_source.abs().max()),
        tokens=tokens,
        tokenizer=any(partial.glob("tokenizer*")),
        notes=remarks,
    )


def copy_tokenizer(place: str, folder: Path) -> None:
    """The source's tokenizer, if it has one that can be loaded."""
    try:
        tokenizer = load_tokenizer(place)
    except UserError:
        return
    if tokenizer.encode("key", add_special_tokens=False):  # transformers makes an empty one where there is none
        tokenizer.save_pretrained(folder)


@contextmanager
def new_folder(folder: Path) -> Iterator[Path]:
    """A folder to write to that becomes `folder` if the block ends without an error, and is removed otherwise."""
    if folder.is_file() or (folder.is_dir() and any(folder.iterdir())):
        raise UserError(f"{quoted(folder)} is not empty; the name of a new folder is needed")
    check_writable(folder / "config.json")
    partial = folder.absolute().with_name(folder.absolute().name + PARTIAL)
    shutil.rmtree(partial, ignore_errors=True)
    try:
        partial.mkdir(parents=True)
        yield partial
        if folder.is_dir():
            folder.rmdir()
        partial.rename(folder)
    except OSError as problem:
        raise UserError(f"{quoted(folder)} cannot be written: {problem.strerror or problem}") from problem
    finally:
        shutil.rmtree(partial, ignore_errors=True)
