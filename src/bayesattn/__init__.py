"""Attention for PyTorch whose positional encoding is a prior over distance, learned or fixed."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from bayesattn.register import register

if TYPE_CHECKING:
    from bayesattn.adapt.add_prior import add_prior, fade_position, remove_prior
    from bayesattn.adapt.convert import Conversion, convert
    from bayesattn.adapt.extend import extend
    from bayesattn.attention import (
        BayesianSelfAttention,
        InklingScaling,
        Kernel,
        LayerCache,
        Llama4Scaling,
        MistralScaling,
        Plan,
        Problem,
        ScalableSoftmax,
        SinkLogit,
        Solution,
        attention_plan,
        attention_with_lse,
        bayesian_attention,
        posterior,
        prefill,
        register_kernel,
        visible_counts,
    )
    from bayesattn.data.tokenizer import load_tokenizer
    from bayesattn.fit.fitting import Fit, fit_priors
    from bayesattn.fit.near_heads import near_heads
    from bayesattn.fit.price_files import Prices, load_prices
    from bayesattn.models.alibi.configuration import BayesBloomConfig, BayesFalconConfig, BayesMptConfig
    from bayesattn.models.alibi.modeling import (
        BayesBloomForCausalLM,
        BayesBloomModel,
        BayesFalconForCausalLM,
        BayesFalconModel,
        BayesMptForCausalLM,
        BayesMptModel,
    )
    from bayesattn.models.bam.configuration import BamConfig
    from bayesattn.models.bam.modeling import BamForCausalLM, BamForSequenceClassification, BamModel
    from bayesattn.models.cache import BayesCache
    from bayesattn.models.delayed_keys.configuration import DelayedKeysConfig
    from bayesattn.models.delayed_keys.modeling import DelayedKeysForCausalLM, DelayedKeysModel
    from bayesattn.models.loading import load_model
    from bayesattn.models.shipped import shipped
    from bayesattn.priors import (
        ConditionedGaussian,
        ConditionedPrior,
        Fire,
        GeneralizedGaussian,
        GivenPrior,
        GivenSinks,
        HeadSummary,
        KerpleLog,
        KerplePower,
        Laplace,
        Prior,
        Product,
        ProfileBank,
        Sinks,
        T5Buckets,
        Uniform,
        Window,
        alibi_slopes,
    )

__version__ = "0.1.0.dev0"

# Where the public names are. A name is imported when it is first used, so that the command line starts without torch.
_HOMES = {
    "bayesattn.adapt.add_prior": "add_prior fade_position remove_prior",
    "bayesattn.adapt.convert": "Conversion convert",
    "bayesattn.adapt.extend": "extend",
    "bayesattn.attention": (
        "BayesianSelfAttention InklingScaling Kernel LayerCache Llama4Scaling MistralScaling Plan Problem "
        "ScalableSoftmax SinkLogit Solution attention_plan attention_with_lse bayesian_attention posterior prefill "
        "register_kernel visible_counts"
    ),
    "bayesattn.data.tokenizer": "load_tokenizer",
    "bayesattn.fit.fitting": "Fit fit_priors",
    "bayesattn.fit.near_heads": "near_heads",
    "bayesattn.fit.price_files": "Prices load_prices",
    "bayesattn.models.alibi.configuration": "BayesBloomConfig BayesFalconConfig BayesMptConfig",
    "bayesattn.models.alibi.modeling": (
        "BayesBloomForCausalLM BayesBloomModel BayesFalconForCausalLM BayesFalconModel BayesMptForCausalLM "
        "BayesMptModel"
    ),
    "bayesattn.models.bam.configuration": "BamConfig",
    "bayesattn.models.bam.modeling": "BamForCausalLM BamForSequenceClassification BamModel",
    "bayesattn.models.cache": "BayesCache",
    "bayesattn.models.delayed_keys.configuration": "DelayedKeysConfig",
    "bayesattn.models.delayed_keys.modeling": "DelayedKeysForCausalLM DelayedKeysModel",
    "bayesattn.models.loading": "load_model",
    "bayesattn.models.shipped": "shipped",
    "bayesattn.priors": (
        "ConditionedGaussian ConditionedPrior Fire GeneralizedGaussian GivenPrior GivenSinks HeadSummary KerpleLog "
        "KerplePower Laplace Prior Product ProfileBank Sinks T5Buckets Uniform Window alibi_slopes"
    ),
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names.split()}

__all__ = [
    "BamConfig",
    "BamForCausalLM",
    "BamForSequenceClassification",
    "BamModel",
    "BayesBloomConfig",
    "BayesBloomForCausalLM",
    "BayesBloomModel",
    "BayesCache",
    "BayesFalconConfig",
    "BayesFalconForCausalLM",
    "BayesFalconModel",
    "BayesMptConfig",
    "BayesMptForCausalLM",
    "BayesMptModel",
    "BayesianSelfAttention",
    "ConditionedGaussian",
    "ConditionedPrior",
    "Conversion",
    "DelayedKeysConfig",
    "DelayedKeysForCausalLM",
    "DelayedKeysModel",
    "Fire",
    "Fit",
    "GeneralizedGaussian",
    "GivenPrior",
    "GivenSinks",
    "HeadSummary",
    "InklingScaling",
    "Kernel",
    "KerpleLog",
    "KerplePower",
    "Laplace",
    "LayerCache",
    "Llama4Scaling",
    "MistralScaling",
    "Plan",
    "Prices",
    "Prior",
    "Problem",
    "Product",
    "ProfileBank",
    "ScalableSoftmax",
    "SinkLogit",
    "Sinks",
    "Solution",
    "T5Buckets",
    "Uniform",
    "Window",
    "add_prior",
    "alibi_slopes",
    "attention_plan",
    "attention_with_lse",
    "bayesian_attention",
    "convert",
    "extend",
    "fade_position",
    "fit_priors",
    "load_model",
    "load_prices",
    "load_tokenizer",
    "near_heads",
    "posterior",
    "prefill",
    "register_kernel",
    "remove_prior",
    "shipped",
    "visible_counts",
]


def __getattr__(name: str) -> Any:
    if name in ("attention", "priors"):
        return import_module(f"bayesattn.{name}")
    if name not in _HOME_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(_HOME_OF[name]), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


register()
