"""The model card that training leaves with a model."""

from __future__ import annotations

from bayesattn.data.text import BUNDLED
from bayesattn.models.modeling import BamForCausalLM
from bayesattn.training.recipe import Recipe


def card(recipe: Recipe, model: BamForCausalLM, minutes: float, folder: str) -> str:
    """What it is, what it was made of, and by which command; `folder` is where it is."""
    config, data, training = model.config, recipe.data, recipe.training
    text = "the Jargon File 4.4.7, which is in the public domain" if data.source == BUNDLED else data.source
    share = "all" if data.retrieval == 1 else f"{data.retrieval:.0%}"
    retrieval = f"; {share} of the documents with room for them have facts and questions" if data.retrieval else ""
    tokens = training.last_step * training.batch * data.context
    crowd = f", retrieval heads seeing up to {config.crowd} more of the batch" if config.crowd else ""
    hindsight = f", keys made in hindsight of {config.hindsight} tokens" if config.hindsight else ""
    start = f" from `{recipe.start}`" if recipe.start else ""
    return f"""# {recipe.name}

A decoder of {sum(p.numel() for p in model.parameters()):,} parameters: {config.num_hidden_layers} layers of \
{config.num_attention_heads} heads, hidden size {config.hidden_size}, position `{config.position}`{hindsight}.

Trained{start} on {tokens:,} tokens in contexts of {data.context}{crowd}. Text: {text}{retrieval}.

Made by `bayesattn train recipe.yaml` with the file beside this one, seed {recipe.seed}, in {minutes:.0f} minutes of the
machine it ran on, evaluations included; `log.jsonl` is that of the run.

    folder = "{folder}"
    model = bayesattn.BamForCausalLM.from_pretrained(folder).eval()
    tokenizer = bayesattn.load_tokenizer(folder)
"""
