"""Self-attention with a prior as one module, for models in plain PyTorch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from bayesattn.attention.api import AnyPrior, bayesian_attention
from bayesattn.attention.cache.layer_cache import LayerCache
from bayesattn.errors import check_flags, is_whole, shown
from bayesattn.priors.base import Prior, check_heads
from bayesattn.priors.conditioned import ConditionedPrior
from bayesattn.priors.fire import Fire
from bayesattn.priors.generalized_gaussian import GeneralizedGaussian
from bayesattn.priors.sinks import Sinks, without_sinks

LARGEST_DIM = 2**20


class BayesianSelfAttention(nn.Module):
    """Queries, keys and values from hidden states, `bayesian_attention`, and a projection of the output.

    For hidden states x `[B, N, dim]`, with H heads of size D = dim / H,

        q, k, v = W_q x, W_k x, W_v x
        y_i = W_o · concat_h Σ_j softmax_j( r_hi · (q_i·k_j / √D + log prior_h(i − j)) ) · v_j

    It takes the place of `nn.MultiheadAttention` and of positional encodings: the prior is what knows about positions.

        attention = BayesianSelfAttention(256, 8, prior=ba.Laplace(8, learned=True))
        y = attention(x)

    Args:
        dim: size of the hidden states.
        num_heads: query heads; they divide `dim`.
        num_kv_heads: key/value heads; they divide `num_heads`, and are as many by default.
        prior: of `num_heads` heads, with `Sinks` or without; by default a learned `GeneralizedGaussian`, flat at first.
            A conditioned prior gets the hidden states. Its parameters are those of this module.
        causal: whether keys after the query are hidden. An encoder has `causal=False`.
        query_scale: a module such as `ScalableSoftmax`, called with the number of keys that each query sees, or None.
        scale_prior: False for a query scale that leaves the prior alone.
        bias: whether the projections have biases.

    Raises:
        TypeError, ValueError: sizes that do not fit together.
    """

    def __init__(
        self,
        dim: int,
        num_heads: int,
        num_kv_heads: int | None = None,
        *,
        prior: Prior | ConditionedPrior | Sinks | None = None,
        causal: bool = True,
        query_scale: Callable[[Tensor], Tensor] | None = None,
        scale_prior: bool = True,
        bias: bool = False,
    ) -> None:
        super().__init__()
        check_heads(num_heads)
        check_flags(causal=causal, scale_prior=scale_prior, bias=bias)
        kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        if not is_whole(dim, 1, LARGEST_DIM) or dim % num_heads:
            raise ValueError(f"dim is {shown(dim)}; a multiple of {num_heads} heads up to {LARGEST_DIM:,} is needed")
        if not is_whole(kv_heads, 1, num_heads) or num_heads % kv_heads:
            raise ValueError(f"num_kv_heads is {shown(kv_heads)}; a number that divides {num_heads} heads is needed")
        prior = GeneralizedGaussian(num_heads) if prior is None else prior
        if not isinstance(prior, Prior | ConditionedPrior | Sinks):
            raise TypeError(f"prior is a {type(prior).__name__}; a Prior, a ConditionedPrior or Sinks are needed")
        if any(isinstance(part, Fire) for part in prior.modules()):
            raise TypeError("prior is Fire, which depends on positions; this module gives a prior the hidden states")
        if prior.num_heads != num_heads:
            raise ValueError(f"prior has {prior.num_heads} heads and the attention {num_heads}; they must agree")
        if query_scale is not None and not callable(query_scale):
            raise TypeError(f"query_scale is a {type(query_scale).__name__}; a module, a function or None is allowed")
        self.head_dim = dim // num_heads
        self.q_proj = nn.Linear(dim, dim, bias=bias)
        self.k_proj = nn.Linear(dim, kv_heads * self.head_dim, bias=bias)
        self.v_proj = nn.Linear(dim, kv_heads * self.head_dim, bias=bias)
        self.o_proj = nn.Linear(dim, dim, bias=bias)
        self.prior, self.query_scale = prior, query_scale
        self.causal, self.scale_prior = causal, scale_prior

    def forward(self, x: Tensor, *, document_ids: Tensor | None = None, cache: LayerCache | None = None) -> Tensor:
        """The output `[B, N, dim]` for hidden states x `[B, N, dim]`.

        Args:
            x: of all positions; with a cache of the new ones alone.
            document_ids: `[B, N]` integers, the same within a packed document; negative ones are padding, which sees
                nothing and is not seen. Outputs of padding are constant.
            cache: of `make_cache`; it is filled. No gradients go through it, and padding is set with its `pad_left`.
        """
        q, k, v = (self._split_heads(project(x)) for project in (self.q_proj, self.k_proj, self.v_proj))
        if cache is not None:
            out = self._continue(q, k, v, x, document_ids, cache)
        else:
            out = bayesian_attention(
                q,
                k,
                v,
                self._prior_of(x),
                query_scale=self.query_scale,
                scale_prior=self.scale_prior,
                causal=self.causal,
                document_ids=document_ids,
            )
        y: Tensor = self.o_proj(out.transpose(1, 2).flatten(2))
        return y

    def _prior_of(self, x: Tensor) -> AnyPrior:
        """The prior of these queries: a conditioned one is given their states."""
        if isinstance(without_sinks(self.prior), ConditionedPrior):
            return self.prior.given(x)
        assert isinstance(self.prior, Prior | Sinks)
        return self.prior

    def _continue(
        self, q: Tensor, k: Tensor, v: Tensor, x: Tensor, document_ids: Tensor | None, cache: LayerCache
    ) -> Tensor:
        """Attention to what the cache has and to the new tokens."""
        if document_ids is not None:
            raise ValueError("document_ids and a cache do not go together; set padding with cache.pad_left")
        if self.training and torch.is_grad_enabled():
            raise ValueError("a cache carries no gradients; call eval(), or leave the cache out")
        prior = without_sinks(self.prior)
        return cache.attend(q, k, v, prior(x) if isinstance(prior, ConditionedPrior) else None)

    def make_cache(self, tolerance: float = 1e-6, **settings: Any) -> LayerCache:
        """An empty cache for this layer; settings are those of `LayerCache`.

        Raises:
            ValueError, TypeError: attention that is not causal, or a prior that the cache does not take.
        """
        if not self.causal:
            raise ValueError("causal is False; only causal attention can continue from a cache")
        return LayerCache(
            self.prior,
            query_scale=self.query_scale,
            scale_prior=self.scale_prior,
            tolerance=tolerance,
            **settings,
        )

    def _split_heads(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (-1, self.head_dim)).transpose(1, 2)

    def extra_repr(self) -> str:
        return f"head_dim={self.head_dim}, causal={self.causal}, scale_prior={self.scale_prior}"
