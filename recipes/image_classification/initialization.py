"""Initialization and BatchNorm momentum of a residual network, after Goyal et al. 2017 (arXiv 1706.02677)."""

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from transformers.models.resnet.modeling_resnet import ResNetBasicLayer, ResNetBottleNeckLayer

CLASSIFIER_STD = 0.01
# torch's momentum is the weight of the new value; the paper's 0.9 is the weight of the old one.
BATCH_NORM_MOMENTUM = 0.1


def zero_last_norm_of_blocks(model: nn.Module) -> None:
    """Start each residual block as its shortcut, mostly the identity: the scale of its last BatchNorm is zero.

    Goyal et al. 2017, section 5.1; the scales of all other BatchNorms start at one, as in torch. This helps training
    start at large learning rates. No random number is drawn.

    Raises:
        ValueError: The model has no residual blocks of `transformers`' ResNet.
    """
    blocks = [module for module in model.modules() if isinstance(module, ResNetBasicLayer | ResNetBottleNeckLayer)]
    if not blocks:
        raise ValueError(f"{type(model).__name__} has no residual blocks of transformers' ResNet")
    for block in blocks:
        nn.init.zeros_(block.layer[-1].normalization.weight)


def small_classifier(model: nn.Module) -> None:
    """Draw the weights of the last layer from a Gaussian of standard deviation 0.01; its bias is zero.

    Goyal et al. 2017, section 5.1: all classes are about equally probable at first. Numbers are drawn from torch's
    generator, which a run seeds equally in every process.

    Raises:
        ValueError: The model has no linear layer, or several.
    """
    layers = [module for module in model.modules() if isinstance(module, nn.Linear)]
    if len(layers) != 1:
        raise ValueError(f"{type(model).__name__} has {len(layers)} linear layers; give the classifier itself")
    nn.init.normal_(layers[0].weight, std=CLASSIFIER_STD)
    if layers[0].bias is not None:
        nn.init.zeros_(layers[0].bias)


def set_batch_norm_momentum(model: nn.Module) -> None:
    """Make BatchNorm's running statistics keep 0.9 of their old value at each step, and take 0.1 of the new one.

    Goyal et al. 2017, section 5.1, call this a momentum of 0.9; torch calls the other weight, 0.1, the momentum. The
    new value comes from micro-batches (the paper's n = 32 images per worker), not from the global batch (section 2.3):
    here it is the mean over all micro-batches of a step (`backend/batch_norm.py`).
    """
    for module in model.modules():
        if isinstance(module, _BatchNorm):
            module.momentum = BATCH_NORM_MOMENTUM
