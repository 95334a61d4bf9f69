"""What of attention cannot be learned."""

from torch import nn

KEY_BIASES = ("k_proj.bias", "key.bias")


def freeze_key_biases(model: nn.Module) -> None:
    """Leave the biases of attention's keys as they are; call it before the optimizer is built.

    A key's bias adds the same number to all scores of a query, which softmax does not see: the loss does not depend on
    it, and its gradient is zero but for rounding. Adam would divide that noise by its own size and take full steps of
    it, other ones on each strategy and number of processes. The model is the same function without them.

    Args:
        model: A model of `transformers` with separate projections of queries, keys and values.

    Raises:
        ValueError: It has no such bias.
    """
    biases = [parameter for name, parameter in model.named_parameters() if name.endswith(KEY_BIASES)]
    if not biases:
        raise ValueError(f"{type(model).__name__} has no parameters named *{' or *'.join(KEY_BIASES)}")
    for bias in biases:
        bias.requires_grad_(False)
