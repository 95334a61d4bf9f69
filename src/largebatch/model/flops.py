"""Model FLOPs utilization (MFU): the operations that a model needs, as a fraction of the devices' peak.

The convention is that of PaLM (Chowdhery et al. 2022, arXiv 2204.02311, appendix B). A token takes 6 N + 12 L d T
floating-point operations, forward and backward: 6 for each of the N parameters that it is multiplied by, and 12 L d T
for the attention of L layers of width d to T tokens, including those that a causal mask hides. Recomputed activations
count once. Operations of the optimizer, such as Muon's matrix products, do not count, so they lower the MFU.

N is all parameters except embeddings that are only looked up: learned positions, token types, and an input vocabulary
that the output layer does not share. For GPT-2 it is nanoGPT's number. (A ViT's positions, which are not a layer of
their own, are counted; they are 1 % at most.) A frozen parameter has no gradient and counts 4 instead of 6.
"""

from dataclasses import dataclass

import torch
from torch import nn

from largebatch.config import RecipeConfig
from largebatch.config.models import Transformer
from largebatch.system.hardware import find_gpu


@dataclass(frozen=True)
class Utilization:
    """Throughput as a fraction of the devices' peak."""

    sample_flops: int | None  # operations of a training sample, forward and backward; None if unknown
    peak_tflops: float | None  # peak of each process's device, in 10^12 operations per second; None if unknown
    world_size: int
    convention: str  # how both were obtained, in words

    def at(self, samples_per_second: float) -> float | None:
        """The MFU (1 is the peak) at a throughput over all processes; None if unknown."""
        if self.sample_flops is None or self.peak_tflops is None:
            return None
        return round(samples_per_second * self.sample_flops / (self.world_size * self.peak_tflops * 1e12), 5)


def utilization_of(config: RecipeConfig, model: nn.Module, device: torch.device, world_size: int) -> Utilization:
    """The MFU of training a whole model on devices like this process's."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "the CPU"
    section = config.model
    num_tokens = config.tokens_processed_per_sample
    if not isinstance(section, Transformer) or num_tokens is None:
        why = "not reported: there is a formula only for transformers, on samples of equal lengths"
        return Utilization(None, None, world_size, why)
    trained, frozen = multiplied_parameters(model)
    each = token_flops(trained, frozen, section.num_layers, section.hidden_size, num_tokens)
    count = (
        f"6 N + 12 L d T = {each / 1e9:.4g} GFLOP per token (N {trained + frozen:,}, L {section.num_layers}, "
        f"d {section.hidden_size}, T {num_tokens:,}, not halved for causal masks)"
    )
    gpu = find_gpu(name)
    peak = config.logging.peak_tflops
    if peak is None and gpu:
        peak = gpu.peak_tflops(config.precision)
    if peak is None:
        source = f"not reported: the peak of {name} in {config.precision} is unknown; set logging.peak_tflops"
    else:
        source = f"of {peak:g} TFLOP/s per process ({name}, {config.precision})"
    return Utilization(num_tokens * each, peak, world_size, f"{count}, {source}")


def token_flops(trained: int, frozen: int, num_layers: int, hidden_size: int, num_tokens: int) -> int:
    """Operations, forward and backward, of a token that attends to `num_tokens`.

    `trained` and `frozen` are the numbers of parameters of each kind that it is multiplied by.
    """
    return 6 * trained + 4 * frozen + 12 * num_layers * hidden_size * num_tokens


def multiplied_parameters(model: nn.Module) -> tuple[int, int]:
    """The numbers of trained and of frozen parameters that tokens are multiplied by."""
    used: set[nn.Parameter] = set()
    for module in model.modules():
        if not isinstance(module, nn.Embedding):
            used.update(module.parameters(recurse=False))
    trained = sum(parameter.numel() for parameter in used if parameter.requires_grad)
    return trained, sum(parameter.numel() for parameter in used) - trained
