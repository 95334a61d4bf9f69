"""The layers that a model of `transformers` names as its embeddings."""

from typing import Literal

from torch import nn

EmbeddingGetter = Literal["get_input_embeddings", "get_output_embeddings"]


def embedding_layer(model: nn.Module, getter: EmbeddingGetter) -> nn.Module | None:
    """What a model's method `getter` returns: None where it has no such layer, or no such method."""
    try:
        layer: nn.Module | None = getattr(model, getter, lambda: None)()
    except NotImplementedError:
        # Some architectures say so instead of None.
        return None
    return layer
