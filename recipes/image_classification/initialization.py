"""How a residual network starts, and what its BatchNorm remembers, in Goyal et al. 2017 (arXiv 1706.02677)."""

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from transformers.models.resnet.modeling_resnet import ResNetBasicLayer, ResNetBottleNeckLayer

CLASSIFIER_STD = 0.01
# torch's momentum is the weight of the new value; the paper's 0.9 is that of the old one.
BATCH_NORM_MOMENTUM = 0.1


def zero_last_norm_of_blocks(model: nn.Module) -> None:
    """Start each residual block as its shortcut alone, mostly the identity: the scale of its last BatchNorm is zero.

    Goyal et al. 2017, section 5.1; the scales of all other BatchNorms start at one, as torch's do. It eases the start
    at large learning rates. Draws no random number.

    Args:
        model: A model with residual blocks of `transformers`' ResNet.

    Raises:
        ValueError: It has none.
    """
    blocks = [module for module in model.modules() if isinstance(module, ResNetBasicLayer | ResNetBottleNeckLayer)]
    if not blocks:
        raise ValueError(f"{type(model).__name__} has no residual blocks of transformers' ResNet")
    for block in blocks:
        nn.init.zeros_(block.layer[-1].normalization.weight)


def small_classifier(model: nn.Module) -> None:
    """Draw the weights of the last layer from a Gaussian of standard deviation 0.01; its bias is zero.

    Goyal et al. 2017, section 5.1: all classes are about equally probable at first. Draws from torch's generator, which
    a run seeds alike in every process.

    Args:
        model: A model with one linear layer, or that layer itself.

    Raises:
        ValueError: It has none, or several.
    """
    layers = [module for module in model.modules() if isinstance(module, nn.Linear)]
    if len(layers) != 1:
        raise ValueError(f"{type(model).__name__} has {len(layers)} linear layers; give the classifier itself")
    nn.init.normal_(layers[0].weight, std=CLASSIFIER_STD)
    if layers[0].bias is not None:
        nn.init.zeros_(layers[0].bias)


def set_batch_norm_momentum(model: nn.Module) -> None:
    """Let BatchNorm's running statistics keep 0.9 of their old value at each step, and take 0.1 of the new one.

    Goyal et al. 2017, section 5.1, where it is called a momentum of 0.9; torch calls the other part momentum, 0.1. The
    new value is the statistics of micro-batches, the paper's n = 32 images of a worker, not of the global batch
    (section 2.3): here their mean over all micro-batches of a step (`backend/batch_norm.py`).
    """
    for module in model.modules():
        if isinstance(module, _BatchNorm):
            module.momentum = BATCH_NORM_MOMENTUM
