"""Models of `transformers` by their own configuration: weights, adapters, and what their tokens see."""

from largebatch.pretrained.attention import check_causal, check_packing
from largebatch.pretrained.causal_lm import configuration, load_causal_lm

__all__ = ["check_causal", "check_packing", "configuration", "load_causal_lm"]
