"""Prices of windows as rows of a file. Without torch, so that commands can name them in their help."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from bayesattn.errors import UserError
from bayesattn.files import quoted, read_json, to_json, write_whole
from bayesattn.schemas import Amount, Row, Share, Tokens, Whole, Wrong, at_least, check_of


@dataclass(frozen=True)
class HeadPrices(Row):
    """A key/value head in one context.

    Args:
        text: prices of the windows, over queries in the text.
        recall: prices over queries whose next token must be looked up in an earlier passage.
        on_sinks: share of the attention of its query heads on the sinks, over queries in the text.
        reach: distance within which 90% of the attention on other keys is.
    """

    layer: Whole
    head: Whole
    text: list[Amount]
    recall: list[Amount]
    on_sinks: Share
    reach: Amount


@dataclass(frozen=True, kw_only=True)
class Prices(Row):
    """Prices of the windows `widths` for each head, by context.

    `texts` is a hash of the contexts. Until a measurement is `finished`, some heads are missing.
    """

    fingerprint: str
    texts: str
    length: Tokens
    sinks: Tokens
    widths: Annotated[list[Tokens], at_least(1)]
    contexts: Annotated[list[list[HeadPrices]], at_least(1)]
    finished: bool = False
    seconds: Amount = 0.0

    @staticmethod
    def fits(content: Mapping[str, Any]) -> Wrong | None:
        """Each head has a price for each window."""
        for place, heads in enumerate(content["contexts"]):
            for number, head in enumerate(heads):
                for name in ("text", "recall"):
                    if len(head[name]) != len(content["widths"]):
                        where = f".contexts[{place}][{number}].{name}"
                        return where, f"has {len(head[name])} prices for {len(content['widths'])} windows"
        return None

    def of_heads(self, recall_share: float) -> dict[tuple[int, int], list[float]]:
        """The price of each window by layer and head, a mean over contexts.

        `recall_share` is how much queries that look something up count, and the others the rest.
        """
        rows: dict[tuple[int, int], list[list[float]]] = {}
        for head in (head for context in self.contexts for head in context):
            pairs = zip(head.text, head.recall, strict=True)
            both = [(1 - recall_share) * text + recall_share * recall for text, recall in pairs]
            rows.setdefault((head.layer, head.head), []).append(both)
        return {head: [sum(each) / len(each) for each in zip(*row, strict=True)] for head, row in rows.items()}

    def save(self, path: Path | str) -> None:
        """Write them as JSON."""
        write_whole(Path(path), to_json(self.to_dict()))


def load_prices(path: Path | str) -> Prices:
    """Prices of a file that `Prices.save` or `bayesattn fit` wrote.

    Raises:
        UserError: the file has none.
    """
    content = read_json(Path(path), "a file of prices")
    if isinstance(content, dict) and isinstance(content.get("prices"), dict):
        content = content["prices"]
    if wrong := check_of(Prices)(content):
        raise UserError(
            f"{quoted(Path(path))} has no prices of windows: {wrong[0].removeprefix('.') or 'it'} {wrong[1]}"
        )
    return Prices.from_dict(content)
