"""FSDP2's gathers in bf16, with the bits of gathers in fp32.

Under autocast, the weights of linear and convolutional layers are only ever cast to bf16, and a cast commutes with a
gather: rows that are cast first need half the bytes. A gathered weight still is fp32 to autograd, so gradients are
accumulated and reduced in fp32, as autocast's are.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch.nn.modules.conv import _ConvNd

from largebatch.backend.fsdp_units import sharded_units
from largebatch.errors import BackendMismatch
from largebatch.model.parts import embedding_layer
from largebatch.plan import RunPlan


def weights_in_bf16(model: nn.Module, plan: RunPlan) -> set[nn.Parameter]:
    """The weights that FSDP2 gathers in bf16: those of layers whose forward pass is an operation that autocast casts.

    Weights of the output layer are not, because losses in chunks use them by themselves, nor are those that several
    modules share, as an embedding and its output layer do.
    """
    if plan.precision != "bf16" or not plan.gather_in_bf16:
        return set()
    users = Counter(parameter for module in model.modules() for parameter in module.parameters(recurse=False))
    output = embedding_layer(model, "get_output_embeddings")
    layers = [module for module in model.modules() if _is_cast_by_autocast(module) and module is not output]
    # None of a layer that computes its weight, by weight normalization for example: what it computes with is not cast.
    weights = [layer._parameters.get("weight") for layer in layers]
    return {weight for weight in weights if weight is not None and users[weight] == 1 and weight.dtype == torch.float32}


def _is_cast_by_autocast(module: nn.Module) -> bool:
    # GPT-2's linear layer, by its name, because the import takes seconds.
    return isinstance(module, nn.Linear | _ConvNd) or type(module).__module__ == "transformers.pytorch_utils"


def gather_in_bf16(model: nn.Module, names: set[str]) -> None:
    """Have FSDP2 gather these parameters of a sharded model in bf16.

    Through the two methods that FSDP2 calls on a shard that has them (torch/distributed/fsdp/_fully_shard, "all-gather
    extensions"); it looks for them when a module is sharded, at whole tensors, so it has to look again.
    """
    for name, shard in _shards(model):
        if name in names:
            local = shard.sharded_param._local_tensor
            local.fsdp_pre_all_gather = _cast_before(shard)
            local.fsdp_post_all_gather = _wrap_after(name)
            shard._init_extensions()


def _shards(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """FSDP2's own record of each parameter, with the parameter's name in the model."""
    names = {parameter: name for name, parameter in model.named_parameters()}
    for unit in sharded_units(model):
        for shard in unit.fsdp_params:
            yield names[shard.sharded_param], shard


def _cast_before(shard: Any) -> Callable[..., tuple[tuple[torch.Tensor], None]]:
    def fsdp_pre_all_gather(
        _mesh: object, _size: object, _stride: object, _module: object, _policy: object
    ) -> tuple[tuple[torch.Tensor], None]:
        # With the rows that pad it to the size of the other processes' shards.
        rows = shard._sharded_param_data.view(shard.padded_sharded_param_size)
        return (rows.to(torch.bfloat16),), None

    return fsdp_pre_all_gather


def _wrap_after(name: str) -> Callable[..., tuple[torch.Tensor, tuple[()]] | None]:
    def fsdp_post_all_gather(
        gathered: tuple[torch.Tensor], _metadata: None, _dtype: torch.dtype, out: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, tuple[()]] | None:
        # Later gathers write into the memory of the first.
        return (GatheredWeight(gathered[0], name), ()) if out is None else None

    return fsdp_post_all_gather


class GatheredWeight(torch.Tensor):
    """A weight in fp32 as autograd sees it, of which only the bf16 numbers exist, for casts to bf16.

    Raises:
        BackendMismatch: It is used without being cast to bf16.
    """

    numbers: torch.Tensor
    parameter: str  # its name in the model

    def __new__(cls, numbers: torch.Tensor, parameter: str) -> "GatheredWeight":
        weight: GatheredWeight = cls._make_wrapper_subclass(
            cls, numbers.shape, strides=numbers.stride(), dtype=torch.float32, device=numbers.device
        )
        weight.numbers, weight.parameter = numbers, parameter
        return weight

    # torch.compile traces a tensor with these as the tensors inside of it.

    def __tensor_flatten__(self) -> tuple[list[str], str]:
        return ["numbers"], self.parameter

    @classmethod
    def __tensor_unflatten__(
        cls, inner: Mapping[str, torch.Tensor], parameter: str, size: torch.Size, stride: tuple[int, ...]
    ) -> "GatheredWeight":
        return cls(inner["numbers"], parameter)

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, function: Any, _types: Any, arguments: tuple[Any, ...] = (), options: Mapping[str, Any] | None = None
    ) -> torch.Tensor:
        weight: GatheredWeight = next(each for each in arguments if isinstance(each, cls))
        if function is torch.ops.aten._to_copy.default and (options or {}).get("dtype") == torch.bfloat16:
            return weight.numbers.detach()
        if function in (torch.ops.aten.detach.default, torch.ops.aten.alias.default):
            return cls(weight.numbers.detach(), weight.parameter)
        if function is torch.ops.aten.as_strided.default:
            # Without the rows that pad it.
            return cls(weight.numbers.as_strided(*arguments[1:]), weight.parameter)
        raise BackendMismatch(
            f"{weight.parameter} is gathered in bf16, but {function} uses it before autocast has cast it; write "
            "gather_in_bf16: false in the recipe's section \"compute\", or use it in its layer's forward pass only"
        )
