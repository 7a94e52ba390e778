"""Packed documents and padding: document numbers, positions in documents, left padding."""

from __future__ import annotations

import torch
from torch import Tensor

from bayesattn.attention.inputs import can_check
from bayesattn.errors import shown


def document_numbers(
    tokens: Tensor, attention_mask: Tensor | None, position_ids: Tensor | None, document_ids: Tensor | None
) -> Tensor | None:
    """One id per document, −1 for padding; None if each sequence is one document."""
    if document_ids is None and position_ids is not None:
        starts = position_ids == 0
        starts[:, 0] = False
        document_ids = starts.cumsum(1).expand(tokens.shape[:2]) if starts.any() else None
    if attention_mask is not None:
        if attention_mask.shape != tokens.shape[:2]:
            raise ValueError(
                f"attention_mask has shape {list(attention_mask.shape)}; {list(tokens.shape[:2])}, a 1 for each token "
                "and a 0 for padding, is needed"
            )
        check_mask(attention_mask)
        real = attention_mask != 0
        if document_ids is None and (real[:, 0] + (real[:, 1:] & ~real[:, :-1]).sum(1) > 1).any():
            raise ValueError("attention_mask has zeros between ones; padding must be before or after the tokens")
        if not real.all():
            documents = torch.zeros(tokens.shape[:2], dtype=torch.long, device=tokens.device)
            documents = documents if document_ids is None else document_ids
            document_ids = documents.masked_fill(~real, -1)
    return document_ids


def check_tokens(name: str, tokens: object, vocab_size: int, ignored: int | None = None) -> None:
    """Raise an error unless these are tokens `[B, N]` of the vocabulary, or `ignored`."""
    if not isinstance(tokens, Tensor) or tokens.dim() != 2 or tokens.is_floating_point() or tokens.is_complex():
        given = f"{tokens.dtype} of shape {list(tokens.shape)}" if isinstance(tokens, Tensor) else shown(tokens)
        raise ValueError(f"{name} is {given}; a tensor of integers [batch, tokens] is needed")
    if not can_check(tokens) or not tokens.numel():
        return
    known = (tokens >= 0) & (tokens < vocab_size)
    if ignored is not None:
        known |= tokens == ignored
    if not known.all():
        wrong = int(tokens[~known][0])
        either = "" if ignored is None else f", or {ignored} where nothing is to be learned"
        raise ValueError(f"{name} has {wrong}; tokens from 0 to {vocab_size - 1:,} are known{either}")


def check_mask(attention_mask: Tensor) -> None:
    """Raise an error for a mask of other values than 0 and 1, such as one that is to be added."""
    if can_check(attention_mask) and not ((attention_mask == 0) | (attention_mask == 1)).all():
        raise ValueError(
            "attention_mask has values other than 0 and 1; a 1 for each token and a 0 for padding is needed"
        )


def starts_again(position_ids: Tensor | None, attention_mask: Tensor | None) -> bool:
    """Whether positions start at 0 again after the first token that is not padding, as in packed documents."""
    if position_ids is None or position_ids.shape[1] < 2:
        return False
    again = position_ids[:, 1:] == 0
    if attention_mask is not None:
        again = again & (attention_mask[:, -position_ids.shape[1] : -1] != 0)  # padding may come before a first 0
    return bool(again.any())


def positions_in_documents(tokens: Tensor, documents: Tensor | None) -> Tensor:
    """Position of each token in its document, `[1 or B, N]`."""
    positions = torch.arange(tokens.shape[1], device=tokens.device).unsqueeze(0)
    if documents is None:
        return positions
    changed = torch.ones_like(documents, dtype=torch.bool)
    changed[:, 1:] = documents[:, 1:] != documents[:, :-1]
    return positions - torch.where(changed, positions, 0).cummax(1).values


def left_padding(attention_mask: Tensor | None, tokens: Tensor) -> Tensor | None:
    """Number of padding positions before each sequence."""
    if attention_mask is None:
        return None
    check_mask(attention_mask)
    mask = attention_mask[:, -tokens.shape[1] :] != 0
    if (mask[:, :-1] & ~mask[:, 1:]).any() or not mask[:, -1].all():
        raise ValueError(
            "attention_mask has zeros after ones; with a cache, as in generate(), padding must be on the left "
            "(tokenizer.padding_side = 'left')"
        )
    return (~mask).sum(1)
