"""The optimizers that every task's recipes may name, unless its `Config` lists others."""

from largebatch.config.optimizers import OptimizerEntry
from largebatch.config.optimizers.adamw import ADAMW
from largebatch.config.optimizers.lamb import LAMB
from largebatch.config.optimizers.lars import LARS
from largebatch.config.optimizers.muon import MUON
from largebatch.config.optimizers.sgd import SGD

SHIPPED: tuple[OptimizerEntry, ...] = (ADAMW, LAMB, LARS, MUON, SGD)
