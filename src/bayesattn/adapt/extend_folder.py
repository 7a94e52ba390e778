"""A folder with an extended model, made of a model by name."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from rich.table import Table
from transformers.utils.logging import disable_progress_bar

from bayesattn.adapt.convert import copy_tokenizer, new_folder
from bayesattn.adapt.extend import extend, extensible
from bayesattn.adapt.extension import Head
from bayesattn.adapt.structure import FAMILY
from bayesattn.drawing.tables import make_table
from bayesattn.errors import UserError, shown
from bayesattn.models.loading import load_config, load_weights

# Tokens of the random prompt on which source and result are compared, at most.
PROMPT_TOKENS = 256
TEMPERATURES = ("log", "none")
# Chooses near heads, for a model and the place of its files.
Choose = Callable[[Any, str], Iterable[Head]]


@dataclass(frozen=True)
class ExtendedFolder:
    """What was extended.

    Args:
        source: the model.
        out: the folder of the result, which `from_pretrained` loads after `import bayesattn`.
        model: the class of the result.
        train_length: tokens that the source was trained to.
        window: distances below it are as they were.
        temperature: the law of the temperature beyond the training length; None for none.
        group, sinks: how far keys are treated, if not at the distance `window`.
        near: heads that look only near, by layer and key/value head; None for all if there are sinks.
        layers: numbers of the extended layers; others have no rotary positions.
        largest_difference: between logits of the source and of the result as loaded from `out`, on a prompt that is no
            longer than the window.
        largest_logit: of the source, without its sign.
        tokens: length of that prompt, of random tokens.
        tokenizer: whether the source had one, which is in `out` too.
    """

    source: str
    out: str
    model: str
    train_length: int
    window: int
    temperature: str | None
    group: int | None
    sinks: int | None
    near: tuple[Head, ...] | None
    layers: tuple[int, ...]
    largest_difference: float
    largest_logit: float
    tokens: int
    tokenizer: bool

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)


def extend_folder(
    source: str,
    out: str | Path,
    window: int = 2048,
    temperature: str = "log",
    *,
    group: int | None = None,
    sinks: int | None = None,
    choose: Choose | None = None,
) -> ExtendedFolder:
    """Extend a model into a new folder, and compare the logits of both on a short prompt.

    Args:
        source: a shipped model with rotary positions, a folder, or an id of the Hugging Face hub.
        out: a new folder. It is written completely or not at all.
        window, group, sinks: as for `extend`.
        choose: called with the model and where its tokenizer is, for the heads that look only near.
        temperature: `log` or `none`.

    Raises:
        UserError: what `extend` raises, and a folder that is not empty.
    """
    if temperature not in TEMPERATURES:
        raise UserError(f"the temperature is {shown(temperature)}; allowed are {', '.join(TEMPERATURES)}")
    disable_progress_bar()  # of files, which would stand in the middle of the table
    folder = Path(out)
    with new_folder(folder) as partial:
        config, place, settings = load_config(source)
        model = load_weights(source, config, place, settings)
        ids = torch.randint(config.get_text_config().vocab_size, (1, PROMPT_TOKENS), generator=torch.manual_seed(0))
        with torch.inference_mode():
            wanted = model(ids).logits.float()
        law: Any = None if temperature == "none" else temperature
        model = extensible(model)
        near = None if choose is None else choose(model, place)
        extend(model, window, temperature=law, group=group, sinks=sinks, near=near).save_pretrained(partial)
        copy_tokenizer(place, partial)
        loaded = load_weights(partial, *load_config(partial))
        tokens = min(PROMPT_TOKENS, window)
        with torch.inference_mode():
            given = loaded(ids[:, :tokens]).logits.float()
        described = loaded.config.prior["extension"]
        law = described["temperature"]
        return ExtendedFolder(
            source=source,
            out=str(folder),
            model=type(loaded).__name__,
            train_length=described["length"],
            window=described["window"],
            temperature=law and "{} from {:,} tokens on, strength {:.3g}".format(
                law[FAMILY], law["length"], law["strength"]
            ),
            group=described["group"],
            sinks=described["sinks"],
            near=tuple(map(tuple, described["near"])) if "near" in described else None,
            layers=tuple(described["layers"]),
            largest_difference=float((given - wanted[:, :tokens]).abs().max()),
            largest_logit=float(wanted.abs().max()),
            tokens=tokens,
            tokenizer=any(partial.glob("tokenizer*")),
        )  # fmt: skip


def extension_table(made: ExtendedFolder) -> Table:
    """The result for people."""
    table = make_table("Extended", None)
    table.show_header = False
    table.add_column("", no_wrap=True)
    table.add_column("", overflow="fold")
    far = f"at the distance {made.window:,}"
    if made.group is not None:
        far = f"in steps of {made.group:,} tokens"
    if made.near is not None:
        far = f"{far}; {len(made.near):,} heads see the first {made.sinks:,} alone"
    elif made.sinks is not None:
        far = f"the first {made.sinks:,} alone, {far}"
    for name, value in (
        ("source", made.source),
        ("result", made.out),
        ("model", made.model),
        ("trained to", f"{made.train_length:,} tokens"),
        ("near keys", f"nearer than {made.window:,} tokens, as they were"),
        ("far keys", far),
        ("temperature", made.temperature or "none"),
        ("layers", f"{len(made.layers)} extended"),
        ("tokenizer", "that of the source" if made.tokenizer else "none in the source"),
        (
            "logits",
            f"up to {made.largest_logit:.3g}; they differ by at most {made.largest_difference:.1e} on {made.tokens} "
            "random tokens",
        ),
    ):
        table.add_row(name, value)
    return table
