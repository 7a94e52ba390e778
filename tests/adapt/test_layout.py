"""Documents, padding and windows are read from mask functions, and nothing else is."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from transformers import LlamaConfig
from transformers.masking_utils import (
    and_masks,
    causal_mask_function,
    chunked_causal_mask_function,
    packed_sequence_mask_function,
    sdpa_mask,
    sliding_window_causal_mask_function,
)

from bayesattn.adapt.backend import attend
from bayesattn.adapt.layout import Layout, make_layout
from tests.bad_inputs.rows import check_refused


def written_out(layout: Layout, queries: int) -> Tensor:
    """The layout as a mask, `[B or 1, M, N]`."""
    key = torch.arange(layout.num_keys)
    query = key[-queries:, None]
    mask = (key <= query)[None]
    if layout.window is not None:
        mask = mask & (query - key < layout.window)
    if layout.document_ids is not None:
        ids = layout.document_ids
        mask = mask & (ids[:, -queries:, None] == ids[:, None]) & (ids[:, -queries:, None] >= 0)
    return mask


def agrees(length: int, function: Any, **settings: Any) -> None:
    """The layout is the mask, apart from the rows of padding."""
    wanted = sdpa_mask(2, length, length, mask_function=function, allow_is_causal_skip=False, **settings)[:, 0]
    got = written_out(make_layout(2, length, length, mask_function=function, **settings), length)
    mask = settings.get("attention_mask")
    real = torch.ones(2, length, dtype=torch.bool) if mask is None else mask
    assert torch.equal(got.expand(2, -1, -1)[real], wanted[real])


ENDS = st.lists(st.integers(1, 23), max_size=4)


@given(length=st.integers(1, 24), window=st.none() | st.integers(1, 30), ends=st.lists(ENDS, min_size=2, max_size=2))
def test_documents_and_windows_are_found(length: int, window: int | None, ends: list[list[int]]) -> None:
    position = torch.arange(length)
    ids = torch.stack([sum(((position >= end).long() for end in each), torch.zeros(length).long()) for each in ends])
    causal = causal_mask_function if window is None else sliding_window_causal_mask_function(window)
    config = LlamaConfig()
    config.sliding_window = window
    agrees(length, and_masks(causal, packed_sequence_mask_function(ids)), local_size=window, config=config)


@given(length=st.integers(1, 24), chunk=st.integers(1, 30), left=st.integers(0, 10), right=st.integers(0, 5))
def test_chunks_are_documents(length: int, chunk: int, left: int, right: int) -> None:
    position = torch.arange(length)
    mask = torch.stack([(position >= left) & (position < length - right), position >= 0])
    config = LlamaConfig()
    config.attention_chunk_size = chunk
    function = chunked_causal_mask_function(chunk, torch.tensor([left, 0]))
    agrees(length, function, attention_mask=mask, local_size=chunk, config=config)


def test_plain_causal_attention_needs_no_ids() -> None:
    assert make_layout(2, 9, 9, attention_mask=torch.ones(2, 9, dtype=torch.bool)) == Layout(9)
    assert make_layout(2, 1, 9, q_offset=8) == Layout(9)


def test_an_evicted_key_is_not_counted() -> None:
    """A sliding cache holds the last keys only, and the attention mask is of all tokens so far."""
    mask = torch.arange(12)[None] >= 7
    layout = make_layout(1, 1, 6, q_offset=11, kv_offset=6, attention_mask=mask)
    assert layout.document_ids is not None
    assert layout.document_ids.tolist() == [[-1, 0, 0, 0, 0, 0]]


def prefix(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
    return (j <= i) | (j < 5)


def strided(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
    return (j <= i) & ((j % 8 == 0) | (j > i - 3))


def dilated(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
    return (j <= i) & ((i - j) % 2 == 0)


def sinks(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
    return (j <= i) & ((j > i - 8) | (j < 2))


@pytest.mark.parametrize("function", [prefix, strided, dilated, sinks], ids=lambda function: function.__name__)
@pytest.mark.parametrize("local_size", [None, 8])
def test_another_mask_is_refused(function: Any, local_size: int | None) -> None:
    config = LlamaConfig()
    config.sliding_window = local_size
    layout = make_layout(1, 24, 24, mask_function=function, local_size=local_size, config=config)
    q = torch.randn(1, 4, 24, 8)
    check_refused(lambda: attend(torch.nn.Identity(), q, q, q, layout), "documents, padding and a window")


def test_a_model_that_reads_the_mask_itself_is_refused() -> None:
    layout = Layout(24)
    check_refused(lambda: layout.dtype, "documents, padding and a window")
    check_refused(lambda: layout[:, 0, :, :], "documents, padding and a window")


def test_a_mask_that_no_layer_uses_is_no_error() -> None:
    """Qwen2-MoE without sliding windows makes a mask for a window of 0."""
    layout = make_layout(1, 24, 24, mask_function=sliding_window_causal_mask_function(0), local_size=0)
    assert layout.is_other
