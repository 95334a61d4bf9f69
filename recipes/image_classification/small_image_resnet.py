"""ResNet for images of about 32 pixels, such as CIFAR's."""

from torch import nn
from transformers import ResNetConfig, ResNetForImageClassification
from transformers.models.resnet.modeling_resnet import ResNetConvLayer


class SmallImageResNet(ResNetForImageClassification):  # type: ignore[misc]  # transformers has no types here
    """`transformers`' ResNet whose stem is a 3 x 3 convolution of stride 1, without pooling.

    ImageNet's stem, a 7 x 7 convolution of stride 2 and max-pooling, would reduce CIFAR's 32 x 32 pixels to 8 x 8
    before the first stage. He et al. 2016 (arXiv 1512.03385), section 4.2, begin with a 3 x 3 convolution for CIFAR.
    With four stages of two basic blocks this is the ResNet-18 of CIFAR papers, such as DeVries & Taylor 2017 (arXiv
    1708.04552).

    `SmallImageResNet.from_pretrained` reads saved weights; `ResNetForImageClassification` refuses them, because the
    convolution has a different shape.
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
