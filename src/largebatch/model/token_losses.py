"""Language models that return each token's loss, without ever holding the logits of all tokens.

For a vocabulary of 128,256 tokens, each token's logits take 0.5 MB in fp32, and their gradient as much again. Here
tokens are processed in chunks. The forward pass computes each chunk's losses and its part of the gradient of the sum of
all losses (softmax - one-hot). If the backward pass needs the gradient of anything but a multiple of that sum, the
chunks are computed again. On NVIDIA GPUs, what happens to a chunk's logits is one compiled function, which reads them
from memory and writes their gradient, and nothing of their size between.

The arithmetic is that of `cross_entropy(linear(...).float())`: under bfloat16 autocast the matrix products are in
bfloat16, softmax and losses in fp32; the weight's gradient is summed over the chunks in the weight's own precision,
on GPUs inside the matrix products.
`torch.nn.functional.linear_cross_entropy` (since torch 2.13) ignores autocast, and returns the losses of bfloat16
inputs, and the gradients of their weights, in bfloat16.
"""

import warnings
from collections.abc import Callable, Sequence
from functools import cache, wraps
from typing import Any

import torch
from torch import nn
from torch.nn.functional import cross_entropy, linear, nll_loss

from largebatch.data.text import IGNORE_INDEX
from largebatch.errors import UserError, reason_of
from largebatch.model.parts import embedding_layer

# Logits per chunk. Smaller chunks make matrix products slower, and add to the weight's gradient more often. In bf16,
# the compiled function needs 1 GiB for a chunk, and the other one, with fp32 tensors between, 640 MiB.
MAX_LOGITS = 2**26
MAX_COMPILED_LOGITS = 2**28
# GPUs compute matrix products in tiles, of at most this many tokens; a part of one takes as long as all of it.
TILE = 256


def example_tokens(config: Any, *more: str) -> dict[str, torch.Tensor]:
    """A micro-batch of what such a model is called with in training: "input_ids", "targets" and `more`.

    The recipe's data section has a `block_size`.
    """
    shape = (config.batch.micro_batch_size, config.data.block_size)
    return {name: torch.zeros(shape, dtype=torch.int64) for name in ("input_ids", "targets", *more)}


def return_token_losses(model: nn.Module, twin: nn.Module | None = None) -> None:
    """Make a language model of `transformers`, called with `targets`, return each token's loss, in fp32 or fp64.

    Targets, of shape (batch, tokens), are the tokens to predict at each place, or `IGNORE_INDEX`, whose loss is zero.
    (The `labels` of `transformers` are different: the inputs, which the model itself shifts by one.) Without targets
    the model returns logits as before. Its parameters and their names remain the same.

    The loss is computed inside the output layer's own `forward`, where FSDP2 and ZeRO-3 have gathered its weight. A
    model that changes its logits (scales, caps), or whose output layer is not linear (an adapter), computes losses from
    logits. One forward pass determines which; a model without weights is checked in each forward pass.

    Args:
        model: The model.
        twin: A small model of the same class with weights, for that one forward pass; None runs the model itself.
    """
    layer = embedding_layer(model, "get_output_embeddings")
    # Exactly linear: an adapter's layer is a subclass or a different class.
    output = OutputWithTargets(layer) if type(layer) is nn.Linear and _gives_plain_logits(twin or model) else None
    forward = model.forward

    @wraps(forward)
    def forward_with_targets(*arguments: Any, targets: torch.Tensor | None = None, **options: Any) -> Any:
        if targets is None:
            return forward(*arguments, **options)
        if output is None:
            logits = forward(*arguments, **options).logits
            logits = logits.to(precision_of_losses(logits.dtype))
            return cross_entropy(logits.transpose(1, 2), targets, ignore_index=IGNORE_INDEX, reduction="none")
        output.targets = targets
        try:
            outputs = forward(*arguments, **options)
            if output.returned is None or not output.returned.is_still(outputs.logits):
                raise UserError(
                    f"{type(model).__name__} changes the logits that its output layer returns, so the layer cannot "
                    "return losses instead; remove return_token_losses, and compute the loss from logits"
                )
            return outputs.logits
        finally:
            output.targets = output.returned = None

    model.forward = forward_with_targets


class OutputWithTargets:
    """Makes a linear output layer return each token's loss instead of logits while there are targets."""

    def __init__(self, layer: nn.Linear):
        self.targets: torch.Tensor | None = None
        self.returned: _Output | None = None
        self._layer = layer
        self._logits = layer.forward
        layer.forward = self._forward  # type: ignore[method-assign]

    # A model that repeats no blocks is compiled whole, and inside it tensors have no address to compare.
    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _forward(self, input: torch.Tensor) -> torch.Tensor:
        if self.targets is None:
            return self._logits(input)
        if input.shape[:-1] != self.targets.shape:
            raise ValueError(
                f"the output layer has inputs of shape {tuple(input.shape)} and targets of shape "
                f"{tuple(self.targets.shape)}; give a target, or IGNORE_INDEX, for each token"
            )
        losses = linear_token_losses(input, self._layer.weight, self._layer.bias, self.targets)
        self.returned = _Output(losses)
        return losses


def returns_losses(layer: nn.Module) -> bool:
    """Whether a layer returns losses while there are targets, for which its weight is cast as for its logits."""
    return isinstance(getattr(layer.forward, "__self__", None), OutputWithTargets)


class _Output:
    """What the output layer returned, to tell whether a model returns this or something computed from it."""

    def __init__(self, tensor: torch.Tensor):
        self._tensor = tensor
        self._version = tensor._version

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def is_still(self, other: torch.Tensor) -> bool:
        """Whether `other` is the same tensor, or a view of it as engines return, not changed in place since."""
        same_place = (other.data_ptr(), other.shape) == (self._tensor.data_ptr(), self._tensor.shape)
        return same_place and self._tensor._version == self._version


@torch.no_grad()
def _gives_plain_logits(model: nn.Module) -> bool:
    """Whether the model's logits are its output layer's; assumed for a model that has no weights yet."""
    if any(parameter.is_meta for parameter in model.parameters()):
        return True
    layer = embedding_layer(model, "get_output_embeddings")
    assert layer is not None
    returned: list[_Output] = []
    watch = layer.register_forward_hook(lambda _module, _inputs, outputs: returned.append(_Output(outputs)))
    logits = model(input_ids=torch.zeros(1, 2, dtype=torch.int64)).logits
    watch.remove()
    return len(returned) == 1 and returned[0].is_still(logits)


# --- the losses of a linear layer ------------------------------------------------------------------------------------


def linear_token_losses(
    inputs: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, targets: torch.Tensor
) -> torch.Tensor:
    """The cross-entropy of `linear(inputs, weight, bias)` for each target, zero where the target is `IGNORE_INDEX`.

    Shapes are (..., features), (classes, features), (classes,), and (...) for targets and losses. Losses are in fp32,
    or in fp64 for inputs in fp64.
    """
    kind = inputs.device.type
    dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else inputs.dtype
    losses: torch.Tensor = _LinearTokenLosses.apply(  # type: ignore[no-untyped-call]
        inputs.flatten(0, -2), weight, bias, targets, dtype, torch.is_grad_enabled()
    )
    return losses


def precision_of_losses(dtype: torch.dtype) -> torch.dtype:
    """The precision in which the softmax of logits of this precision is computed."""
    return torch.promote_types(dtype, torch.float32)


Gradients = tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]


class _LinearTokenLosses(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        inputs: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        targets: torch.Tensor,
        dtype: torch.dtype,
        with_gradients: bool,
    ) -> torch.Tensor:
        ctx.dtype = dtype
        ctx.needed = [with_gradients and needed for needed in ctx.needs_input_grad[:3]]
        ctx.save_for_backward(inputs, weight, bias, targets)
        # For estimates: bytes of a chunk's logits and of their gradient on a GPU.
        tokens = min(len(inputs), _tokens_per_chunk(len(weight), MAX_COMPILED_LOGITS))
        ctx.work_space = 2 * tokens * len(weight) * dtype.itemsize
        losses, ctx.gradients = _through_chunks(inputs, weight, bias, targets, None, dtype, ctx.needed)
        return losses

    @staticmethod
    def backward(ctx: Any, *upstream: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (factors,) = upstream
        gradients: Gradients | None = ctx.gradients
        # They are changed in place, so another backward pass must compute them again.
        ctx.gradients = None
        # The gradient of a sum is one number, expanded.
        if gradients is not None and factors.numel() and not any(factors.stride()):
            for gradient in gradients:
                if gradient is not None:
                    gradient.mul_(factors.flatten()[0])
        else:
            inputs, weight, bias, targets = ctx.saved_tensors
            _, gradients = _through_chunks(inputs, weight, bias, targets, factors, ctx.dtype, ctx.needed)
        return *gradients, None, None, None


def _tokens_per_chunk(classes: int, max_logits: int) -> int:
    size = max(1, max_logits // classes)
    return size - size % TILE if size > TILE else size


def _through_chunks(
    inputs: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    targets: torch.Tensor,
    factors: torch.Tensor | None,
    dtype: torch.dtype,
    needed: Sequence[bool],
) -> tuple[torch.Tensor, Gradients]:
    """Losses in the shape of the targets, and the gradient of their sum, weighted by `factors` of the same shape.

    Inputs are of shape (tokens, features), matrix products of `dtype`; `needed` says which of inputs, weight and bias
    need a gradient.
    """
    parameters = weight.to(dtype), None if bias is None else bias.to(dtype)
    # Not a view of another tensor, because engines register hooks on a module's outputs.
    losses = inputs.new_empty(targets.shape, dtype=precision_of_losses(dtype))
    flat_losses = losses.view(-1)
    targets = targets.flatten()
    factors = None if factors is None else factors.flatten()
    grad_inputs = torch.empty_like(inputs) if needed[0] else None
    # A weight that FSDP2 has gathered in bf16 has no `zeros_like`.
    grad_weight = inputs.new_zeros(weight.shape, dtype=weight.dtype) if needed[1] else None
    grad_bias = torch.zeros_like(bias) if bias is not None and needed[2] else None
    compute: Callable[..., Any] = compiled(inputs.device) if inputs.is_cuda else losses_and_gradients
    size = _tokens_per_chunk(len(weight), MAX_COMPILED_LOGITS if inputs.is_cuda else MAX_LOGITS)
    for start in range(0, len(inputs), size):
        chunk = slice(start, start + size)
        chunk_inputs = inputs[chunk].to(dtype)
        chunk_factors = None if factors is None else factors[chunk]
        flat_losses[chunk], gradient, sums = compute(
            linear(chunk_inputs, *parameters), targets[chunk], chunk_factors, any(needed), grad_bias is not None
        )
        if grad_bias is not None:
            grad_bias += sums
        if grad_inputs is not None:
            grad_inputs[chunk] = gradient @ parameters[0]
        if grad_weight is not None:
            _add_product(grad_weight, gradient.T, chunk_inputs)
        # Otherwise it would live until the next one exists.
        del gradient
    return losses, (grad_inputs, grad_weight, grad_bias)


def _add_product(total: torch.Tensor, left: torch.Tensor, right: torch.Tensor) -> None:
    """Add a matrix product to a sum, whose precision may be higher."""
    if total.dtype == left.dtype:
        total.addmm_(left, right)
    elif total.is_cuda:
        # Without rounding the product to the precision of its factors.
        torch.addmm(total, left, right, out_dtype=total.dtype, out=total)
    else:
        total += left @ right


def losses_and_gradients(
    logits: torch.Tensor, targets: torch.Tensor, factors: torch.Tensor | None, with_gradients: bool, with_bias: bool
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
    """Each token's loss and, for the sum of losses that `factors` weight, the gradients of logits and of a bias.

    Shapes are (tokens, classes) for logits and their gradient, which is in their precision; (tokens,) for targets,
    factors and losses, and (classes,) for the bias.
    """
    log_probabilities = logits.log_softmax(-1, dtype=precision_of_losses(logits.dtype))
    losses = nll_loss(log_probabilities, targets, ignore_index=IGNORE_INDEX, reduction="none")
    if not with_gradients:
        return losses, None, None
    is_target = targets != IGNORE_INDEX
    gradient = log_probabilities.exp_()
    if torch.compiler.is_compiling():
        # Assigning to some elements would store the others first, in fp32.
        places = torch.arange(gradient.shape[1], device=gradient.device)
        gradient.add_(places == targets.unsqueeze(1), alpha=-1)
    else:
        gradient[torch.arange(len(gradient), device=gradient.device), targets.where(is_target, 0)] -= 1
    gradient *= (is_target if factors is None else is_target * factors).unsqueeze(1)
    return losses, gradient.to(logits.dtype), gradient.sum(0) if with_bias else None


@cache
def compiled(device: torch.device) -> Callable[..., Any]:
    """`losses_and_gradients`, compiled for chunks of any number of tokens, or as it is if that does not work."""
    function = torch.compile(losses_and_gradients, dynamic=True)

    def of_any_size(logits: torch.Tensor, *others: Any) -> Any:
        # Rows of a known length are read in vectors.
        torch._dynamo.mark_static(logits, 1)
        return function(logits, *others)

    logits = torch.zeros(2, 2, device=device)
    targets = torch.zeros(2, dtype=torch.int64, device=device)
    try:
        of_any_size(logits, targets, None, True, False)
    # Each compiler raises its own exceptions.
    except Exception as error:
        warnings.warn(
            "the losses of the output layer are computed without torch.compile, which is slower and takes more memory: "
            f"torch.compile does not work here: {reason_of(error)}",
            stacklevel=2,
        )
        return losses_and_gradients
    return of_any_size
