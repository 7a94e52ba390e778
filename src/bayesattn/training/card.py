"""The model card that training leaves with a model."""

from __future__ import annotations

from bayesattn.data.text import BUNDLED
from bayesattn.models.bam.modeling import BamForCausalLM
from bayesattn.training.recipe import Recipe


def card(recipe: Recipe, model: BamForCausalLM, minutes: float, folder: str) -> str:
    """What it is, what it was made of, and by which command; `folder` is where it is."""
    config, data, training = model.config, recipe.data, recipe.training
    text = "the Jargon File 4.4.7, which is in the public domain" if data.source == BUNDLED else data.source
    share = "all" if data.retrieval_share == 1 else f"{data.retrieval_share:.0%}"
    retrieval = (
        f"; {share} of the documents with room for them have facts and questions" if data.retrieval_share else ""
    )
    tokens = training.last_step * training.batch * data.context
    others = recipe.augmentation.in_batch_negatives
    negatives = f", with keys of up to {others} other contexts of the batch as negatives" if others else ""
    delay = f", keys delayed by {config.key_delay} tokens" if getattr(config, "key_delay", 0) else ""
    start = f" from `{recipe.start}`" if recipe.start else ""
    return f"""# {recipe.name}

A decoder of {sum(p.numel() for p in model.parameters()):,} parameters: {config.num_hidden_layers} layers of \
{config.num_attention_heads} heads, hidden size {config.hidden_size}, position `{config.position}`{delay}.

Trained{start} on {tokens:,} tokens in contexts of {data.context}{negatives}. Text: {text}{retrieval}.

Made by `bayesattn train recipe.yaml` with the file beside this one, seed {recipe.seed}, in {minutes:.0f} minutes,
evaluations included. `log.jsonl` is the log of that run.

    import bayesattn

    folder = "{folder}"
    model = bayesattn.load_model(folder)
    tokenizer = bayesattn.load_tokenizer(folder)
"""
