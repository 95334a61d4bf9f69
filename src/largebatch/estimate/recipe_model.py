"""The model of a recipe, without memory, from its task's model.py, and an estimate of the activations that it keeps.

For the estimate, the model runs on fake tensors, which have shapes and no memory, under the recipe's precision and
activation checkpointing. The storages that autograd and "selective" save for the backward pass are counted, without
parameters but with the copies of weights that autocast casts. They are those that operations on an NVIDIA GPU would
save, as far as `cuda_kernels` says. Gradients of activations and work space come on top.
"""

import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd.graph import saved_tensors_hooks
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only
from torch.utils.flop_counter import FlopCounterMode

from largebatch.config import RecipeConfig
from largebatch.config.task_config import task_code_errors
from largebatch.errors import UserError, reason_of
from largebatch.estimate.cuda_kernels import cuda_kernels
from largebatch.model.activation_checkpointing import KEPT_RESULTS, blocks_to_recompute, checkpoint_activations
from largebatch.model.attention import keep_documents_apart, set_attention
from largebatch.model.building import build_shapes, storage_of
from largebatch.model.parts import differentiable
from largebatch.task_folders import import_from


def recipe_model(config: RecipeConfig) -> nn.Module:
    """The model that `build_model(config)` of the task's model.py builds, on the meta device.

    Raises:
        UserError: There is no model.py, it cannot be imported, it has no `build_model`, or that fails or does not
            return a model.
    """
    folder = config.task_folder()
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64 if config.precision == "fp64" else torch.float32)
    try:
        with task_code_errors(folder, "model.py"):
            model: object = build_shapes(partial(import_from(folder, "model").build_model, config))
    finally:
        torch.set_default_dtype(before)
    if not isinstance(model, nn.Module):
        raise UserError(
            f"{folder / 'model.py'}: build_model(config) returned {type(model).__name__}; return a torch.nn.Module"
        )
    return model


class NotEstimated(Exception):
    """Why activations cannot be estimated."""


def activation_bytes(model: nn.Module, config: RecipeConfig) -> int:
    """Bytes that a process needs for a micro-batch.

    These are what it keeps, and the logits of a chunk (`linear_token_losses`) with their gradient. With activation
    checkpointing, the inputs of the blocks are kept and, if it is "selective", the results of some operations; when the
    rest of the largest block is recomputed, there are no logits.

    Args:
        model: The recipe's model on the meta device; it gets tensors without memory.
        config: The recipe, which has the precision, the micro-batch and activation checkpointing.

    Raises:
        NotEstimated: The task's model.py has no `example_batch`, or the model does not run on shapes alone.
    """
    with _on_shapes(model, config) as batch:
        attention = config.compute.attention
        if attention == "eager":
            set_attention(model, attention)
        keep_documents_apart(model, attention)
        if attention == "flex_attention":
            # It makes no mask of numbers, so it keeps what attention without documents keeps.
            batch.pop("position_ids", None)
        what = config.compute.activation_checkpointing
        blocks: list[nn.Module] = []
        largest = 0
        forward = partial(_saved_bytes_by_block, model, batch, config.precision == "bf16", what)
        if what != "none":
            blocks = blocks_to_recompute(model)
            kept, _ = forward(blocks)
            largest = max(kept[block] for block in blocks)
            checkpoint_activations(model, what)
        kept, of_loss = forward(blocks)
        return sum(kept.values()) + max(largest, of_loss)


def micro_batch_flops(model: nn.Module, config: RecipeConfig) -> tuple[int, int]:
    """Floating-point operations of a micro-batch's forward and backward pass.

    Those of matrix products, convolutions and attention, whose masked scores are counted, too.

    Args:
        model: The recipe's model as `activation_bytes` leaves it, with activation checkpointing if the recipe has it.
        config: The recipe.

    Raises:
        NotEstimated: As of `activation_bytes`.
    """
    with _on_shapes(model, config) as batch, sdpa_kernel(SDPBackend.MATH):
        batch.pop("position_ids", None)
        # The output layer adds to the gradient of its weight in place, which the counter does not know.
        in_place = {torch.ops.aten.addmm_: _addmm_flops}
        forward = FlopCounterMode(display=False, custom_mapping=in_place)
        backward = FlopCounterMode(display=False, custom_mapping=in_place)
        with forward:
            outputs = differentiable(model(**batch))
        with backward:
            torch.autograd.backward([each.sum() for each in outputs])
    return forward.get_total_flops(), backward.get_total_flops()


def _addmm_flops(_: object, left: Sequence[int], right: Sequence[int], **__: object) -> int:
    """Operations of a matrix product, from the shapes of its factors."""
    return 2 * left[0] * left[1] * right[1]


@contextmanager
def _on_shapes(model: nn.Module, config: RecipeConfig) -> Iterator[dict[str, torch.Tensor]]:
    """Give a model tensors without memory, and yield arguments to call it with: the task's `example_batch`."""
    folder = config.task_folder()
    example_batch = getattr(import_from(folder, "model"), "example_batch", None)
    if example_batch is None:
        raise NotEstimated("model.py has no example_batch")
    dtype = torch.float64 if config.precision == "fp64" else torch.float32
    with FakeTensorMode(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        _give_fake_memory(model)
        model.train()
        with task_code_errors(folder, "model.py"):
            example = example_batch(config)
            batch = {name: value.to(dtype) if value.is_floating_point() else value for name, value in example.items()}
        try:
            yield batch
        except UserError:
            raise
        # A model may read numbers, which fake tensors do not have, and may then raise anything.
        except Exception as error:
            raise NotEstimated(f"the model does not run on shapes alone: {reason_of(error)}") from error


def _give_fake_memory(model: nn.Module) -> None:
    """Replace the model's tensors with tensors of the current mode; what modules share stays shared."""
    twins: dict[torch.Tensor, torch.Tensor] = {}
    for module in model.modules():
        for name, tensor in (module._parameters | module._buffers).items():
            if tensor is None:
                continue
            if tensor not in twins:
                twins[tensor] = torch.empty(tensor.shape, dtype=tensor.dtype)
                if isinstance(tensor, nn.Parameter):
                    twins[tensor] = nn.Parameter(twins[tensor], requires_grad=tensor.requires_grad)
            setattr(module, name, twins[tensor])


def _saved_bytes_by_block(
    model: nn.Module,
    micro_batch: Mapping[str, torch.Tensor],
    in_bf16: bool,
    what: str,
    blocks: Sequence[nn.Module],
) -> tuple[dict[nn.Module | None, int], int]:
    """Bytes that a forward pass keeps in each of the blocks and, under None, elsewhere; and those of the loss alone.

    What "selective" activation checkpointing keeps is counted under None. `what` is the kind of checkpointing.
    """
    weights_and_buffers = {storage_of(tensor) for tensor in (*model.parameters(), *model.buffers())}
    # The storages themselves are kept, so that a later one cannot get the address of a freed one.
    kept: dict[int, tuple[nn.Module | None, torch.UntypedStorage]] = {}
    inside: list[nn.Module] = []

    def keep(tensor: torch.Tensor, is_result: bool = False) -> torch.Tensor:
        if storage_of(tensor) not in weights_and_buffers:
            place = inside[-1] if inside and not is_result else None
            kept.setdefault(storage_of(tensor), (place, tensor.untyped_storage()))
        return tensor

    class KeepResults(TorchDispatchMode):  # type: ignore[no-untyped-call]
        def __torch_dispatch__(self, function: Any, types: Any, arguments: Any = (), options: Any = None) -> Any:
            returned = function(*arguments, **(options or {}))
            if inside and what == "selective" and function in KEPT_RESULTS:
                tree_map_only(torch.Tensor, partial(keep, is_result=True), returned)
            return returned

    with ExitStack() as hooks:
        for block in blocks:
            hooks.enter_context(block.register_forward_pre_hook(lambda block, _: inside.append(block)))
            hooks.enter_context(block.register_forward_hook(lambda *_: inside.pop() and None))
        hooks.enter_context(saved_tensors_hooks(keep, lambda tensor: tensor))
        hooks.enter_context(cuda_kernels(in_bf16))
        hooks.enter_context(KeepResults())  # type: ignore[no-untyped-call]
        outputs = model(**micro_batch)
        # The output layer has computed its gradients together with its losses (`linear_token_losses`).
        losses = getattr(outputs, "grad_fn", None)
        for gradient in getattr(losses, "gradients", None) or ():
            if gradient is not None:
                keep(gradient)
    sizes = dict.fromkeys([*blocks, None], 0)
    for place, storage in kept.values():
        sizes[place] += storage.nbytes()
    return sizes, getattr(losses, "work_space", 0)
