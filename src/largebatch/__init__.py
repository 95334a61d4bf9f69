"""Large-batch training recipes whose optimization is the same on every strategy and number of GPUs.

Importing this package, `largebatch.config` or `largebatch.plan` does not import torch, so that plans can be made and
configs checked in a fraction of a second on a login node.
"""

__version__ = "0.2.0"
