"""Models of `transformers` by their own configuration: their weights, adapters, and whether they can read packs."""

from largebatch.pretrained.causal_lm import configuration, load_causal_lm
from largebatch.pretrained.packing import check_packing

__all__ = ["check_packing", "configuration", "load_causal_lm"]
