"""Parameters of attention that cannot be learned."""

from torch import nn

KEY_BIASES = ("k_proj.bias", "key.bias")


def freeze_key_biases(model: nn.Module) -> None:
    """Freeze the biases of attention's keys in a model of `transformers`; call it before building the optimizer.

    A key's bias adds the same number to all scores of a query, which softmax cancels, so the loss does not depend on it
    and its gradient is only rounding. Adam would divide that noise by its own size and take full steps, different ones
    on each strategy and number of processes.

    Raises:
        ValueError: The model has no separate projection of keys with a bias.
    """
    biases = [parameter for name, parameter in model.named_parameters() if name.endswith(KEY_BIASES)]
    if not biases:
        raise ValueError(f"{type(model).__name__} has no parameters named *{' or *'.join(KEY_BIASES)}")
    for bias in biases:
        bias.requires_grad_(False)
