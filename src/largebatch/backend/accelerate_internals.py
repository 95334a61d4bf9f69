"""Uses of private interfaces of Accelerate, as read in 1.15.0."""

import os

from accelerate.state import DistributedType, PartialState
from accelerate.utils.fsdp_utils import _find_final_norm as find_final_norm

__all__ = ["find_final_norm", "rehearse_fsdp_on_cpu"]


def rehearse_fsdp_on_cpu() -> None:
    """Make Accelerate treat the CPU as an accelerator (with gloo), because it uses FSDP only on accelerators."""
    os.environ["ACCELERATE_TORCH_DEVICE"] = "cpu"
    PartialState._prepare_backend = lambda *_, **__: ("gloo", DistributedType.MULTI_GPU)
