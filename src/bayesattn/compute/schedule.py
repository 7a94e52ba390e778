"""Training schedules: stages of so many tokens at a context length, such as `15T@8K,100B@128K`."""

from __future__ import annotations

import re
from dataclasses import dataclass

from bayesattn.errors import UserError, is_number, shown

TOKENS = {"": 1.0, "K": 1e3, "M": 1e6, "B": 1e9, "T": 1e12}
LENGTHS = {"": 1, "K": 1024, "M": 1024**2}
MOST_TOKENS, MOST_LENGTH = 1e18, 2**40
# The stages of Llama 3.1 405B: 15.6T tokens, about 800B of them in six stages from 8K to 128K. The split of the 800B is
# not published; we assume equal parts.
LLAMA_TOKENS, LLAMA_STAGES = 15.6e12, 6
PRESETS = {
    "blog": "15T@8K,100B@128K",
    "blog-1m": "15T@8K,100B@1M",
}


@dataclass(frozen=True)
class Stage:
    """Tokens trained at one context length; `decimal_length` is the length with K = 1000."""

    tokens: float
    length: int
    decimal_length: float


def parse(text: str) -> list[Stage]:
    """Parse stages with commas between them.

    In a number of tokens, K, M, B and T are decimal. In a length, K is 1,024 and M is 1,024².
    """
    if not isinstance(text, str):
        raise UserError(f"the schedule is {shown(text)}; a text such as 15T@8K,100B@128K is needed")
    stages: list[Stage] = []
    place = 0
    for part in text.split(","):
        stages.append(_stage(text, part, place))
        place += len(part) + 1
    return stages


def _stage(text: str, part: str, place: int) -> Stage:
    whole = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([KMBTkmbt]?)\s*@\s*(\d+(?:\.\d+)?)\s*([KMkm]?)\s*", part)
    if whole is None:
        good = re.match(r"\s*(?:\d+(?:\.\d+)?\s*[KMBTkmbt]?\s*(?:@\s*(?:\d+(?:\.\d+)?\s*[KMkm]?\s*)?)?)?", part)
        at = place + (good.end() if good else 0)
        raise UserError(
            f"the schedule cannot be read from character {at + 1} on, at {shown(text[at:])}; write 15T@8K,100B@128K"
        )
    number, unit, size, size_unit = whole.groups()
    tokens = float(number) * TOKENS[unit.upper()]
    length = float(size) * LENGTHS[size_unit.upper()]
    decimal = float(size) * {"": 1.0, "K": 1e3, "M": 1e6}[size_unit.upper()]
    if not 1 <= tokens <= MOST_TOKENS or not 1 <= length <= MOST_LENGTH:
        raise UserError(
            f"the stage {shown(part.strip())} has {tokens:g} tokens in contexts of {length:g}; 1 to {MOST_TOKENS:g} "
            f"tokens in contexts of 1 to {MOST_LENGTH:g} are allowed"
        )
    return Stage(tokens, round(length), decimal)


def parse_tokens(text: str) -> float:
    """A number of tokens such as `800B`."""
    parts = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([KMBTkmbt]?)\s*", text)
    tokens = float(parts[1]) * TOKENS[parts[2].upper()] if parts else 0.0
    if not 1 <= tokens <= MOST_TOKENS:
        raise UserError(f"the number of tokens is {shown(text)}; 1 to {MOST_TOKENS:g}, written as 800B, is needed")
    return tokens


def llama(long_tokens: float = 800e9) -> list[Stage]:
    """The stages of Llama 3.1 405B; `long_tokens` are split evenly over long stages in a geometric series."""
    if not is_number(long_tokens) or not 0 < long_tokens < LLAMA_TOKENS:
        raise UserError(
            f"the schedule has {shown(long_tokens)} long tokens; more than 0 and less than {LLAMA_TOKENS:g} are allowed"
        )
    stages = [Stage(LLAMA_TOKENS - long_tokens, 8192, 8000.0)]
    for number in range(1, LLAMA_STAGES + 1):
        times = 16 ** (number / LLAMA_STAGES)
        stages.append(Stage(long_tokens / LLAMA_STAGES, round(8192 * times), 8000 * times))
    return stages


def find(name: str, long_tokens: float = 800e9) -> list[Stage]:
    """A preset by name (`blog`, `blog-1m`, `llama3`), or the stages that a text describes."""
    return llama(long_tokens) if name == "llama3" else parse(PRESETS.get(name, name))
