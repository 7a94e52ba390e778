"""What is evaluated: a causal model of Hugging Face, ours or another, with its tokenizer."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bayesattn.compute.device import device_memory
from bayesattn.data.contexts import Tokens, encode_stream
from bayesattn.data.text import BUNDLED, documents
from bayesattn.data.tokenizer import load_tokenizer
from bayesattn.errors import UserError, first_line, is_whole, shown
from bayesattn.models.decoder import DecoderForCausalLM
from bayesattn.models.loading import checked_outputs, load_config, load_weights
from bayesattn.priors import Prior
from bayesattn.priors.sinks import without_sinks

# Share of the machine's memory that an evaluation may use.
SHARE_OF_MEMORY = 0.8
# What reading takes at its peak, as a multiple of the keys and values that are kept, because the cache grows by copying
# itself to larger memory; and what it takes besides. Measured peaks of bam-tiny are 0.6 to 1.3 times this.
CACHE_ROOM, READING_BYTES = 2.5, 50_000_000
# A head with a span beyond this counts as one that sees everything.
LONGEST_SPAN = 2**20


@dataclass(frozen=True)
class Reader:
    """A model and its tokenizer, as evaluations use them.

    Args:
        name: what it is called in results.
        model: a causal language model of transformers, in evaluation mode.
        tokenizer: its tokenizer.
        train_length: tokens of its training contexts; lengths are given as multiples of it.
        fingerprint: hash of its weights and vocabulary, so that results of two models are never mixed.
    """

    name: str
    model: Any
    tokenizer: Any
    train_length: int
    fingerprint: str = ""

    def ids(self, text: str) -> list[int]:
        """Tokens of a text, without special tokens."""
        return list(self.tokenizer.encode(text, add_special_tokens=False))

    def stream(self, source: str) -> Tokens:
        """A text file, a folder of them, or the held-out part of the bundled text, as tokens in a row."""
        return encode_stream(documents(source, "held-out" if source == BUNDLED else "train"), self.tokenizer)

    @property
    def start(self) -> list[int]:
        """The tokens before a text: the start token, if the tokenizer has one."""
        first = self.tokenizer.bos_token_id
        return [] if first is None else [int(first)]

    @property
    def most_positions(self) -> int | None:
        """The longest text that the model has position embeddings for, as in GPT-2; None without a limit."""
        named = ("wpe", "position_embed", "embed_positions")
        learned = any(name in parameter for parameter, _ in self.model.named_parameters() for name in named)
        return getattr(self.model.config, "max_position_embeddings", None) if learned else None

    @contextmanager
    def checked_model(self) -> Iterator[Any]:
        """The model, for a measurement: what is not finite in its outputs or its attention raises an error."""
        with checked_outputs(self.model, self.name):
            yield self.model

    def last_logits(self, ids: Tensor, number: int) -> Tensor:
        """Logits of the last `number` positions of ids `[B, N]`. Our models read in chunks, with the cache."""
        past = self.model.make_cache() if isinstance(self.model, DecoderForCausalLM) else None
        with self.checked_model() as model, torch.inference_mode():
            return model(input_ids=ids, past_key_values=past, logits_to_keep=number).logits[:, -number:]

    def bounded_cache(self) -> dict[str, Any]:
        """Arguments of `generate` for a model that is extended and has heads that look only near.

        A sliding window of the model is bounded by transformers' own cache.
        """
        extension = _extension(self.model)
        if not extension or not extension.get("near") or getattr(self.model.config, "sliding_window", None):
            return {}
        return {"past_key_values": self.model.make_cache()}

    def bytes_needed(self, length: int) -> int:
        """Estimated memory for reading this many tokens: the cache, and activations."""
        config = self.model.config.get_text_config()
        heads = config.num_attention_heads
        kv_heads = getattr(config, "num_key_value_heads", None) or heads
        size = getattr(config, "head_dim", None) or config.hidden_size // heads
        element = next(self.model.parameters()).element_size()
        if isinstance(self.model, DecoderForCausalLM):  # a chunk passes through the layers; local heads keep little
            kept, seen = 0.0, min(length, LONGEST_SPAN)
            for spans in self._longest_spans if seen == LONGEST_SPAN else self._spans(seen):
                kept += sum(length if 4 * span >= seen else 4 * span + 4096 for span in spans) * kv_heads / heads
            return int(kept * size * 2 * element * CACHE_ROOM) + READING_BYTES
        return int(length * element * (2 * config.num_hidden_layers * kv_heads * size + 10 * config.hidden_size))

    @cached_property
    def _longest_spans(self) -> list[list[int]]:
        return self._spans(LONGEST_SPAN)

    def _spans(self, seen: int) -> list[list[int]]:
        """How far the heads of each layer look back in a text of `seen` tokens."""
        config = self.model.config
        caches = self.model.make_cache().caches
        everything = [seen] * config.num_attention_heads
        priors = [without_sinks(cache.prior) for cache in caches]
        layers = [prior.span(1e-6, seen).tolist() if isinstance(prior, Prior) else everything for prior in priors]
        for number in range(max(0, len(caches) - getattr(config, "cross_layers", 1)), len(caches)):
            if caches[number].content_spread is None:  # too few queries for a bound, so its cache keeps all keys
                layers[number] = everything
        return layers

    def check_length(self, length: int) -> None:
        """A length that does not fit into memory raises an error."""
        room, needed = int(device_memory(self.model.device) * SHARE_OF_MEMORY), self.bytes_needed(length)
        if needed > room:
            fits = length
            while fits > 1 and self.bytes_needed(fits) > room:
                fits //= 2
            raise UserError(
                f"{length:,} tokens need about {needed / 1e9:.1f} GB and {room / 1e9:.1f} GB may be used; "
                f"{fits:,} tokens would fit"
            )


def load_reader(name: str, tokenizer: str | None = None) -> Reader:
    """A model and its tokenizer; `name` as for `load_model`, `tokenizer` for a model without one of its own."""
    config, place, settings = load_config(name)
    model = load_weights(name, config, place, settings)
    try:
        words = load_tokenizer(tokenizer or place)
        if not words.encode("key", add_special_tokens=False):  # transformers makes an empty one where there is none
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
        raise UserError(f"the configuration of {name} has no training length; set max_position_embeddings")
    if not is_whole(length, 1, 2**40):
        raise UserError(f"the training length of {name} is {shown(length)}; a whole number of tokens is needed")
    return Reader(name, model, words, int(length), _fingerprint(Path(place), config, words, _extension(model)))


def _extension(model: Any) -> dict[str, Any] | None:
    """The settings of a model that is extended."""
    described = getattr(getattr(model, "config", None), "prior", None)
    return described.get("extension") if isinstance(described, dict) else None


def _fingerprint(folder: Path, config: Any, tokenizer: Any, extension: dict[str, Any] | None = None) -> str:
    """Hash of the vocabulary, the commit, and both ends of each weight file, which are quick to read."""
    digest = hashlib.sha256(str(sorted(tokenizer.get_vocab().items())).encode())
    digest.update(str(getattr(config, "_commit_hash", None)).encode())
    digest.update(str(getattr(config, "rope_parameters", None)).encode())  # `NAME+yarn:16` changes them
    digest.update(("" if extension is None else str(extension)).encode())
    for file in sorted(path for kind in ("*.safetensors", "*.bin", "config.json") for path in folder.glob(kind)):
        with file.open("rb") as content:
            digest.update(content.read(2**20))
            content.seek(-min(2**20, file.stat().st_size), os.SEEK_END)
            digest.update(content.read())
        digest.update(f"{file.name} {file.stat().st_size}".encode())
    return digest.hexdigest()[:16]
