"""FSDP2's gathers in bf16, with results that are bit-identical to gathers in fp32.

Autocast casts the weights of linear and convolutional layers to bf16 before every use, and a cast commutes with a
gather: casting the rows first halves the bytes. To autograd, a gathered weight is still fp32, so gradients are
accumulated and reduced in fp32, as they are with autocast alone.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from largebatch.backend.torch_internals import (
    PostAllGather,
    PreAllGather,
    padded_rows,
    set_all_gather,
    sharded_parameters,
)
from largebatch.errors import BackendMismatch
from largebatch.model.parts import cast_weights, embedding_layer
from largebatch.model.token_losses import returns_losses
from largebatch.plan import RunPlan


def weights_in_bf16(model: nn.Module, plan: RunPlan) -> set[nn.Parameter]:
    """Return the weights that FSDP2 gathers in bf16: those of layers whose inputs and weights autocast casts to bf16.

    The output layer's weight is left out unless the layer returns losses: other code that computes losses may use it in
    fp32. So are weights that several modules share, such as those of an embedding and its output layer.
    """
    if plan.precision != "bf16" or not plan.compute.gather_in_bf16:
        return set()
    output = embedding_layer(model, "get_output_embeddings")
    used_elsewhere = output if output is not None and not returns_losses(output) else None
    weights = (weight for layer, weight in cast_weights(model) if layer is not used_elsewhere)
    return {weight for weight in weights if weight.dtype == torch.float32}


def gather_in_bf16(model: nn.Module, names: set[str]) -> None:
    """Have FSDP2 gather these parameters of a sharded model in bf16."""
    for name, shard in sharded_parameters(model):
        if name in names:
            set_all_gather(shard, _cast_before(shard), _wrap_after(name))


def _cast_before(shard: Any) -> PreAllGather:
    def fsdp_pre_all_gather(
        _mesh: object, _size: object, _stride: object, _module: object, _policy: object
    ) -> tuple[tuple[torch.Tensor], None]:
        return (padded_rows(shard).to(torch.bfloat16),), None

    return fsdp_pre_all_gather


def _wrap_after(name: str) -> PostAllGather:
    def fsdp_post_all_gather(
        gathered: tuple[torch.Tensor], _metadata: None, _dtype: torch.dtype, out: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, tuple[()]] | None:
        # Later gathers write into the memory of the first.
        return (GatheredWeight(gathered[0], name), ()) if out is None else None

    return fsdp_post_all_gather


class GatheredWeight(torch.Tensor):
    """A weight that autograd sees as fp32, but which holds only bf16 numbers and can only be cast to bf16.

    Raises:
        BackendMismatch: The weight is used without being cast to bf16.
    """

    numbers: torch.Tensor
    parameter: str  # its name in the model

    def __new__(cls, numbers: torch.Tensor, parameter: str) -> "GatheredWeight":
        weight: GatheredWeight = cls._make_wrapper_subclass(
            cls, numbers.shape, strides=numbers.stride(), dtype=torch.float32, device=numbers.device
        )
        weight.numbers = numbers
        weight.parameter = parameter
        return weight

    def __repr__(self, *, tensor_contents: object = None) -> str:  # type: ignore[override]
        # torch.compile prints what it traces, and torch's own text would index the tensor.
        return f"GatheredWeight({self.parameter}, {tuple(self.shape)})"

    # These three methods let torch.compile trace the tensor inside this one.

    def __tensor_flatten__(self) -> tuple[list[str], str]:
        return ["numbers"], self.parameter

    @classmethod
    def __tensor_unflatten__(
        cls, inner: Mapping[str, torch.Tensor], parameter: str, size: torch.Size, stride: tuple[int, ...]
    ) -> "GatheredWeight":
        return cls(inner["numbers"], parameter)

    @classmethod
    def __metadata_guard__(cls, _traced: str, _given: str) -> bool:
        # Code that was compiled for the weight of one block is also that of the others, whatever their names.
        return True

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, function: Any, _types: Any, arguments: tuple[Any, ...] = (), options: Mapping[str, Any] | None = None
    ) -> torch.Tensor:
        aten = torch.ops.aten
        weight: GatheredWeight = next(each for each in arguments if isinstance(each, cls))
        if function is aten._to_copy.default and (options or {}).get("dtype") == torch.bfloat16:
            return weight.numbers.detach()
        if function in (aten.detach.default, aten.alias.default):
            return cls(weight.numbers.detach(), weight.parameter)
        if function is aten.as_strided.default:
            # Drops the rows that pad it.
            return cls(weight.numbers.as_strided(*arguments[1:]), weight.parameter)
        raise BackendMismatch(
            f"{weight.parameter} is gathered in bf16, but {function} uses it before autocast has cast it; set "
            "compute.gather_in_bf16 to false in the recipe, or use the weight only in its layer's forward pass"
        )
