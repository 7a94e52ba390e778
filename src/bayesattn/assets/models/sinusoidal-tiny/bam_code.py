"""The code of this model is in the package bayesattn."""

from bayesattn.models.configuration import BamConfig as _Config
from bayesattn.models.modeling import BamForCausalLM as _ForCausalLM
from bayesattn.models.modeling import BamModel as _Model

BamConfig, BamForCausalLM, BamModel = _Config, _ForCausalLM, _Model
