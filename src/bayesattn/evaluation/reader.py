"""What is evaluated: a causal model with its tokenizer, ours or any of Hugging Face."""

from __future__ import annotations

import hashlib
import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bayesattn.data.contexts import Tokens, encode_stream
from bayesattn.data.text import BUNDLED, documents
from bayesattn.data.tokenizer import load_tokenizer
from bayesattn.errors import UserError, first_line
from bayesattn.hub import hub_answers
from bayesattn.models.modeling import BamForCausalLM
from bayesattn.models.shipped import resolve, shipped

# What an evaluation may take of the machine's memory.
SHARE_OF_MEMORY = 0.8
# Ways to scale rotary positions at inference: interpolated, by the length at hand (NTK), and by frequency (YaRN).
SCALINGS = ("linear", "dynamic", "yarn")
# A head that still looks this far is taken to look everywhere.
LONGEST_SPAN = 2**20


@dataclass(frozen=True)
class Reader:
    """A model that reads and answers.

    Args:
        name: what it is called in results.
        model: a causal language model of transformers, in evaluation mode.
        tokenizer: its tokenizer.
        train_length: tokens of its training contexts; lengths are told as multiples of it.
        fingerprint: of its weights and vocabulary, so that results of one model are not continued with another.
    """

    name: str
    model: Any
    tokenizer: Any
    train_length: int
    fingerprint: str = ""

    def ids(self, text: str) -> list[int]:
        """Tokens of a text, and nothing around them."""
        return list(self.tokenizer.encode(text, add_special_tokens=False))

    def stream(self, source: str) -> Tokens:
        """A text file, a folder of them, or the held-out part of the bundled text, as tokens in a row."""
        return encode_stream(documents(source, "held-out" if source == BUNDLED else "train"), self.tokenizer)

    @property
    def start(self) -> list[int]:
        """What stands before a text."""
        first = self.tokenizer.bos_token_id
        return [] if first is None else [int(first)]

    @property
    def most_positions(self) -> int | None:
        """Tokens beyond which the model has no position to give, as GPT-2; None if it has for any number."""
        named = ("wpe", "position_embed", "embed_positions")
        learned = any(name in parameter for parameter, _ in self.model.named_parameters() for name in named)
        return getattr(self.model.config, "max_position_embeddings", None) if learned else None

    def last_logits(self, ids: Tensor, number: int) -> Tensor:
        """Of the last `number` positions of ids `[B, N]`; ours read in chunks, with the cache, whatever the length."""
        past = self.model.make_cache() if isinstance(self.model, BamForCausalLM) else None
        with torch.inference_mode():
            return self.model(input_ids=ids, past_key_values=past, logits_to_keep=number).logits[:, -number:]

    def bytes_needed(self, length: int) -> int:
        """Memory that reading so many tokens takes: the cache, and what passes through the layers."""
        config = self.model.config.get_text_config()
        heads = config.num_attention_heads
        kv_heads = getattr(config, "num_key_value_heads", None) or heads
        size = getattr(config, "head_dim", None) or config.hidden_size // heads
        element = next(self.model.parameters()).element_size()
        if isinstance(self.model, BamForCausalLM):  # a chunk passes through the layers; local heads keep little
            kept, seen = 0.0, min(length, LONGEST_SPAN)
            caches = self.model.make_cache().caches
            for number, cache in enumerate(caches):
                spans = cache.prior.span(1e-6, seen).tolist()
                if number >= len(caches) - config.reading_layers and cache.content_spread is None:
                    spans = [seen] * heads  # few queries pass by, and what these may need is known from the last
                kept += sum(length if 4 * span >= seen else 4 * span + 4096 for span in spans) * kv_heads / heads
            return int(kept * size * 2 * element * 1.25)
        return int(length * element * (2 * config.num_hidden_layers * kv_heads * size + 10 * config.hidden_size))

    def check_length(self, length: int) -> None:
        """One sentence for what does not fit into memory."""
        device = self.model.device
        total = (
            torch.cuda.mem_get_info(device)[1]
            if device.type == "cuda"
            else os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        )
        room, needed = int(total * SHARE_OF_MEMORY), self.bytes_needed(length)
        if needed > room:
            fits = length
            while fits > 1 and self.bytes_needed(fits) > room:
                fits //= 2
            raise UserError(
                f"{length:,} tokens need about {needed / 1e9:.1f} GB and {room / 1e9:.1f} GB may be used; "
                f"{fits:,} tokens would fit"
            )


def load_config(name: str) -> tuple[Any, str, dict[str, bool]]:
    """Configuration of a shipped model, a folder, or a Hugging Face id; where it is, and how to load the rest.

    `NAME+yarn:16` (or `linear`, `dynamic`) is the model with its rotary positions scaled for 16 times the length.
    """
    name, scaling, factor = _split(name)
    config, place, settings = _load_config(name)
    if scaling:
        _scale_rotary(config, name, scaling, factor)
    return config, place, settings


def _split(name: str) -> tuple[str, str, float]:
    """A model's name, and how its rotary positions are to be scaled, if they are."""
    scaled = re.fullmatch(rf"(.+)\+({'|'.join(SCALINGS)}):(\d+(?:\.\d+)?)", name)
    if scaled is None or Path(name).is_dir():
        return name, "", 1.0
    return scaled[1], scaled[2], float(scaled[3])


def _scale_rotary(config: Any, name: str, scaling: str, factor: float) -> None:
    known = getattr(config, "rope_parameters", None) or {}
    if "rope_theta" not in known or getattr(config, "position", "rope") != "rope":
        raise UserError(f"{name} has no rotary positions that could be scaled ({scaling}:{factor:g})")
    if factor < 1:
        raise UserError(f"rotary positions of {name} are to be scaled by {factor:g}; at least 1 is needed")
    trained = getattr(config, "training_length", None) or config.max_position_embeddings
    config.rope_parameters = {
        **known, "rope_type": scaling, "factor": factor, "original_max_position_embeddings": int(trained)
    }  # fmt: skip


def _load_config(name: str) -> tuple[Any, str, dict[str, bool]]:
    from transformers import AutoConfig
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()  # of loading, which is over before one can read it
    place = resolve(name)
    folder = Path(place)
    if folder.is_dir() and not (folder / "config.json").exists():
        raise UserError(f"{name} has no config.json; a model's folder or one of {', '.join(shipped())} is needed")
    online = folder.is_dir() or hub_answers()
    settings = {} if folder.is_dir() else {"local_files_only": not online}
    try:
        return AutoConfig.from_pretrained(place, **settings), place, settings
    except (OSError, ValueError) as problem:
        if folder.is_dir():
            raise UserError(f"{name} is not a model: {first_line(problem)}") from problem
        hub = "the hub does not give it" if online else "the hub cannot be reached"
        raise UserError(
            f"{name} is neither a shipped model ({', '.join(shipped())}) nor a folder, and {hub}"
        ) from problem


def load_reader(name: str, tokenizer: str | None = None) -> Reader:
    """A shipped model, a folder, or a Hugging Face id, as for `load_config`; `tokenizer` if it has none of its own."""
    from transformers import AutoModelForCausalLM

    config, place, settings = load_config(name)
    try:
        cls: Any = BamForCausalLM if config.model_type == "bam" else AutoModelForCausalLM
        model, info = cls.from_pretrained(place, config=config, output_loading_info=True, **settings)
    except UserError:
        raise
    except Exception as problem:  # whatever is wrong with the files, transformers says it in many ways
        raise UserError(f"{name} cannot be loaded: {first_line(problem)}") from problem
    if missing := sorted(info["missing_keys"]):  # random ones would stand in for them
        raise UserError(f"{name} lacks {len(missing)} of the model's weights, {missing[0]} among them")
    model.eval()
    try:
        words = load_tokenizer(tokenizer or place)
        if not words.encode("key", add_special_tokens=False):  # transformers makes one up where there is none
            raise ValueError("it has no vocabulary")
    except Exception as problem:
        if tokenizer is not None:
            raise UserError(f"the tokenizer {tokenizer} cannot be loaded: {first_line(problem)}") from problem
        raise UserError(f"{name} has no tokenizer that can be loaded; give one with --tokenizer") from problem
    if len(words) > model.get_input_embeddings().num_embeddings:
        raise UserError(
            f"the tokenizer has {len(words):,} tokens and {name} {model.get_input_embeddings().num_embeddings:,}; "
            "it belongs to another model"
        )
    length = getattr(config, "training_length", None) or getattr(config, "max_position_embeddings", None)
    if not length:
        raise UserError(f"the configuration of {name} does not tell its training length; set max_position_embeddings")
    return Reader(name, model, words, int(length), _fingerprint(Path(place), config, words))


def _fingerprint(folder: Path, config: Any, tokenizer: Any) -> str:
    """Of the ends of each weight file, which are quick to read, and of their sizes, or of a commit; and the words."""
    digest = hashlib.sha256(str(sorted(tokenizer.get_vocab().items())).encode())
    digest.update(str(getattr(config, "_commit_hash", None)).encode())
    digest.update(str(getattr(config, "rope_parameters", None)).encode())  # which may differ from those of the file
    for file in sorted(path for kind in ("*.safetensors", "*.bin", "config.json") for path in folder.glob(kind)):
        with file.open("rb") as content:
            digest.update(content.read(2**20))
            content.seek(-min(2**20, file.stat().st_size), os.SEEK_END)
            digest.update(content.read())
        digest.update(f"{file.name} {file.stat().st_size}".encode())
    return digest.hexdigest()[:16]
