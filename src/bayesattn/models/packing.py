"""Packed documents and padding: document numbers, positions in documents, left padding."""

from __future__ import annotations

import torch
from torch import Tensor


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
        real = attention_mask != 0
        if document_ids is None and (real[:, 0] + (real[:, 1:] & ~real[:, :-1]).sum(1) > 1).any():
            raise ValueError("attention_mask has zeros between ones; padding must be before or after the tokens")
        if not real.all():
            documents = torch.zeros(tokens.shape[:2], dtype=torch.long, device=tokens.device)
            documents = documents if document_ids is None else document_ids
            document_ids = documents.masked_fill(~real, -1)
    return document_ids


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
    mask = attention_mask[:, -tokens.shape[1] :] != 0
    if (mask[:, :-1] & ~mask[:, 1:]).any() or not mask[:, -1].all():
        raise ValueError("attention_mask has zeros after ones; with a cache, padding must be on the left")
    return (~mask).sum(1)
