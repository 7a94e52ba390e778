"""Record the logits of all shipped models, which a test compares with: run it when a shipped model is new.

python tools/record_logits.py
"""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import save_file

import bayesattn as ba
from bayesattn.models.shipped import shipped_names

FILE = Path(__file__).parents[1] / "tests" / "models" / "shipped_logits.safetensors"

with torch.no_grad():
    ids = torch.arange(2, 42)[None]
    save_file({name: ba.load_model(name)(ids).logits[0, -1].clone() for name in shipped_names()}, FILE)
