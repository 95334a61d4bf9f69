"""ResNet for images of some 32 pixels, such as CIFAR's."""

from torch import nn
from transformers import ResNetConfig, ResNetForImageClassification
from transformers.models.resnet.modeling_resnet import ResNetConvLayer


class SmallImageResNet(ResNetForImageClassification):  # type: ignore[misc]  # transformers has no types here
    """`transformers`' ResNet with a 3 x 3 convolution of stride 1 in front, and no pooling after it.

    ImageNet's stem, a 7 x 7 convolution of stride 2 and max-pooling, would leave 8 x 8 of CIFAR's 32 x 32 pixels to the
    first stage. He et al. 2016 (arXiv 1512.03385), section 4.2, begin with a 3 x 3 convolution there; with four stages
    of two basic blocks it is what CIFAR papers call ResNet-18, such as DeVries & Taylor 2017 (arXiv 1708.04552).

    `SmallImageResNet.from_pretrained` reads what was saved; `ResNetForImageClassification` refuses it, because the
    convolution's shape is another one.
    """

    def __init__(self, config: ResNetConfig):
        super().__init__(config)
        stem = self.resnet.embedder
        stem.embedder = ResNetConvLayer(
            config.num_channels, config.embedding_size, kernel_size=3, activation=config.hidden_act
        )
        stem.pooler = nn.Identity()
        # Initial weights of the new layer.
        self.post_init()
