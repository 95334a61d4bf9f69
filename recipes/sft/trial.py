"""Running a model before it is trained, to see what it does with tokens."""

import copy
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn
from transformers import PreTrainedModel

from largebatch.errors import UserError, reason_of
from largebatch.system.failures import Kind, kind_of


@contextmanager
def trial(model: PreTrainedModel) -> Iterator[PreTrainedModel]:
    """The model, or its small twin if it has no weights, to be run without gradients and dropout.

    Raises:
        UserError: It cannot be run.
    """
    was_training = model.training
    model.eval()
    try:
        with torch.no_grad():
            yield small_twin(model) or model
    except Exception as error:
        # torch has many exceptions for sizes that do not match; others, such as of memory, are not the model's.
        if isinstance(error, MemoryError) or kind_of(error) != Kind.ERROR:
            raise
        raise UserError(
            f"model: {type(model).__name__} can be built but not run: {reason_of(error)}; correct model.config, or the "
            "configuration in the folder of model.path"
        ) from error
    model.train(was_training)


def small_twin(model: PreTrainedModel) -> PreTrainedModel | None:
    """For a model without weights or with some in bf16, one of its class and configuration with few layers, words and
    hidden units, and with random weights in fp32: it treats tokens and logits in the same way. None in a plan, and for
    a model that has its weights, which can be asked itself.

    It has as many layers as it takes to have each value of each setting that the configuration lists layer by layer.
    """
    if torch.get_default_device().type == "meta" or all(
        each.dtype != torch.bfloat16 and not each.is_meta for each in model.parameters()
    ):
        return None
    config = copy.deepcopy(model.config)
    text = config.get_text_config()
    lists = {
        name: value
        for name, value in text.to_dict().items()
        if isinstance(value, list) and len(value) == text.num_hidden_layers
    }
    layers = max([2, *(1 + value.index(each) for value in lists.values() for each in value)])
    text.num_hidden_layers = min(layers, text.num_hidden_layers)
    text.vocab_size = min(text.vocab_size, 512)
    text.pad_token_id = None
    if isinstance(getattr(text, "intermediate_size", None), int):
        text.intermediate_size = min(text.intermediate_size, 64)
    for name, value in lists.items():
        setattr(text, name, value[: text.num_hidden_layers])
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        twin = type(model)(config)
        # Here, too, they may be without memory.
        for parameter in twin.parameters():
            drawn = torch.randn(parameter.shape) * 0.02 + (parameter.dim() == 1)
            torch.utils.swap_tensors(parameter, nn.Parameter(drawn))  # type: ignore[no-untyped-call]
    return twin.eval()
