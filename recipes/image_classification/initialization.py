"""Initialization of a residual network, after Goyal et al. 2017 (arXiv 1706.02677), section 5.1."""

from torch import nn
from transformers import ResNetForImageClassification
from transformers.models.resnet.modeling_resnet import ResNetBasicLayer, ResNetBottleNeckLayer

CLASSIFIER_STD = 0.01


def initialize(model: ResNetForImageClassification) -> None:
    """Start each residual block as its shortcut, and all classes as about equally probable.

    The scale of the last BatchNorm of a block is zero, so that it is mostly the identity; the scales of all others
    start at one, as in torch. This helps training start at large learning rates. The weights of the classifier are
    drawn from a Gaussian of standard deviation 0.01, and its bias is zero.

    Numbers are drawn from torch's generator, which a run seeds equally in every process. BatchNorm keeps 0.9 of its
    running statistics at each step, which the paper calls a momentum of 0.9; that is torch's default, whose momentum
    of 0.1 is the weight of the new value. This comes from micro-batches (the paper's n = 32 images per worker), not
    from the global batch (section 2.3): here it is the mean over all micro-batches of a step
    (`backend/batch_norm.py`).
    """
    for module in model.modules():
        if isinstance(module, ResNetBasicLayer | ResNetBottleNeckLayer):
            nn.init.zeros_(module.layer[-1].normalization.weight)
        # The classifier: all other layers are convolutions.
        if isinstance(module, nn.Linear):
            nn.init.normal_(module.weight, std=CLASSIFIER_STD)
            nn.init.zeros_(module.bias)
