"""Which keys a query sees: what transformers says in a mask function, as documents, padding and a window.

A mask of n × n would take the memory that linear attention saves. This module asks the mask function about O(n) pairs
instead: a document starts at i where key i − 1 is hidden from query i. Further pairs must agree with what that gives.

Shape letters: B batch, N keys.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad
from transformers import PreTrainedConfig
from transformers.masking_utils import bidirectional_mask_function, causal_mask_function

from bayesattn.attention.problem import document_ranges
from bayesattn.errors import UserError

# Whether query i of sequence b sees key j, for indices (b, head, i, j) that broadcast.
MaskFunction = Callable[..., Any]

NAME = "bayesattn"
INSTEAD = "use attn_implementation='sdpa' for this model"
OTHER_MASK = (
    f"the attention mask is not made of documents, padding and a window, which is what {NAME!r} can do; {INSTEAD}"
)


class Layout(NamedTuple):
    """Which of `num_keys` keys are seen by the queries, which stand at the last positions of the keys.

    This is what the model gets as its attention mask and hands on to its attention function. As a tuple it passes
    through checkpointing, compilation, and what moves inputs between devices.
    """

    num_keys: int
    document_ids: Tensor | None = None  # [B, N], −1 for padding; None if each sequence is one document
    window: int | None = None  # keys that a query sees at most, itself included
    causal: bool = True
    is_other: bool = False  # a mask that is none of this; some models make masks that no layer uses

    @property
    def dtype(self) -> torch.dtype:
        """An error, for models that compute with the values of their attention mask: this one has none."""
        raise UserError(OTHER_MASK)

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, tuple):  # rows and columns
            raise UserError(OTHER_MASK)
        return tuple.__getitem__(self, index)


def make_layout(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | Tensor = 0,
    kv_offset: int = 0,
    mask_function: MaskFunction = causal_mask_function,
    attention_mask: Tensor | None = None,
    local_size: int | None = None,
    use_vmap: bool = False,
    config: PreTrainedConfig | None = None,
    device: torch.device | str = "cpu",
    **_: Any,
) -> Layout:
    """The mask function of the attention implementation `bayesattn`. transformers calls it for each forward pass.

    The arguments are those of `transformers.masking_utils.sdpa_mask`.

    Raises:
        UserError: for a static cache, and for zeros between the ones of an attention mask.
    """
    causal = mask_function is not bidirectional_mask_function
    if isinstance(q_offset, Tensor) or (causal and q_offset + q_length != kv_offset + kv_length):
        raise UserError(f"{NAME!r} cannot read a static cache; use a DynamicCache, the default of generate()")
    ids, window = None, None
    if causal and mask_function is not causal_mask_function:
        if use_vmap:
            return Layout(kv_length, is_other=True)
        # Chunks pass their size as local_size too. They are documents.
        window = local_size if local_size == getattr(config, "sliding_window", None) else None
        can_pack = q_length == kv_length or window is None
        if can_pack:
            ids, agrees = _find_documents(mask_function, batch_size, kv_length, kv_offset, window, device)
            if not agrees:
                return Layout(kv_length, is_other=True)
    if attention_mask is not None:
        ids = _with_padding(ids, attention_mask[:, kv_offset : kv_offset + kv_length], kv_length)
    return Layout(kv_length, ids, window, causal)


def _find_documents(
    mask_function: MaskFunction, batch: int, length: int, first: int, window: int | None, device: torch.device | str
) -> tuple[Tensor | None, bool]:
    """Ids of the documents, None for one, and whether the mask is made of them and the window."""
    sequence = torch.arange(batch, device=device).unsqueeze(1)
    head = torch.zeros((), dtype=torch.long, device=device)
    position = torch.arange(length, device=device).expand(batch, length)

    def sees(query: Tensor, key: Tensor) -> Tensor:
        return mask_function(sequence, head, query + first, key + first).expand(batch, query.shape[1])

    starts = ~sees(position[:, 1:], position[:, :-1])
    ids = pad(starts, (1, 0)).cumsum(1)
    if torch.compiler.is_compiling():  # values cannot be looked at
        return ids, True
    farthest = document_ranges(ids)[..., 0]
    if window is not None:
        farthest = torch.maximum(farthest, position - window + 1)
    between = farthest + (position - farthest) * (position % 7) // 7
    after = position + 1 + (length - 1 - position) * (position % 5) // 5
    hidden = [(farthest - 1, farthest > 0), (farthest // 2, farthest > 0), (position + 1, True), (after, True)]
    agree = torch.stack([sees(position, key).all() for key in (position, farthest, between)]).all()
    for key, applies in hidden:
        inside = (key >= 0) & (key < length) & torch.as_tensor(applies, device=device)
        agree = agree & ~(sees(position, key.clamp(0, max(0, length - 1))) & inside).any()
    return ids if starts.any() else None, bool(agree)


def _with_padding(ids: Tensor | None, attention_mask: Tensor, length: int) -> Tensor | None:
    """The ids with −1 at the zeros of `attention_mask`, which counts as zero where it is too short."""
    real = pad(attention_mask != 0, (0, length - attention_mask.shape[1]))
    if not torch.compiler.is_compiling():
        if real.all():
            return ids
        if (real[:, :1].sum(1) + (real[:, 1:] & ~real[:, :-1]).sum(1) > 1).any():
            raise UserError("attention_mask has zeros between ones; padding must be before or after the tokens")
    documents = torch.zeros(real.shape, dtype=torch.long, device=real.device) if ids is None else ids
    return documents.masked_fill(~real, -1)
