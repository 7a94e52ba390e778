"""The tokenizer: byte-level BPE, which encodes any text; every digit is a token."""

from __future__ import annotations

from collections.abc import Iterable
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from shutil import copyfile
from tempfile import TemporaryDirectory
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoTokenizer, LlamaTokenizer, PreTrainedTokenizerFast

import bayesattn.models  # noqa: F401  registers our model types, which AutoTokenizer looks up
from bayesattn.errors import UserError, cut, first_line
from bayesattn.hub import hub_answers
from bayesattn.models.shipped import is_folder, resolve

MISTRAL = "mistral-v3"
END, PAD = "<|end|>", "<|pad|>"


def train_tokenizer(texts: Iterable[str], vocab_size: int = 1024) -> PreTrainedTokenizerFast:
    """Train a tokenizer on texts. `<|end|>` separates documents, and stands before the first."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END, PAD],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=END,
        eos_token=END,
        pad_token=PAD,
        padding_side="left",
        clean_up_tokenization_spaces=False,
    )


def load_tokenizer(name: str) -> Any:
    """The tokenizer of a shipped model, a folder or a Hugging Face id; or `mistral-v3`, from mistral-common.

    Raises:
        UserError: there is no such tokenizer, or it cannot be loaded.
    """
    if name == MISTRAL:
        return _mistral()
    place = resolve(name)
    if is_folder(place):
        try:
            return AutoTokenizer.from_pretrained(place, trust_remote_code=False)
        except Exception as problem:  # transformers raises many kinds of errors for bad files
            raise UserError(f"{cut(name)} has no tokenizer that can be loaded ({first_line(problem)})") from problem
    hub = "the hub cannot be reached"
    for local in (True, False):
        try:
            if local or hub_answers():
                return AutoTokenizer.from_pretrained(place, local_files_only=local, trust_remote_code=False)
        except Exception:  # of many kinds for bad files
            hub = hub if local else "the hub does not have it"
    raise UserError(f"the tokenizer {cut(name)} is neither a shipped one nor a folder, and {hub}")


def _mistral() -> Any:
    """Mistral's tokenizer of 32,768 tokens, with which the published models were trained."""
    try:
        package = distribution("mistral-common")
    except PackageNotFoundError as missing:
        raise ModuleNotFoundError(f"the tokenizer {MISTRAL} needs: pip install 'bayesattn[paper]'") from missing
    file = next(file for file in package.files or () if file.name.endswith(".model.v3"))
    with TemporaryDirectory() as folder:  # transformers converts a file of this name
        copyfile(str(package.locate_file(file)), Path(folder) / "tokenizer.model")
        tokenizer = LlamaTokenizer.from_pretrained(folder)
    tokenizer.pad_token = tokenizer.unk_token
    return tokenizer
