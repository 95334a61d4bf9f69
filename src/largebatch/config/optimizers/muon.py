"""Muon; `optim/muon.py` computes it."""

from collections.abc import Mapping
from math import prod
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, NonNegativeFloat

from largebatch.batch.scaling import scaled_average
from largebatch.config.optimizers import (
    GroupOptions,
    OptimizerEntry,
    Options,
    ParameterRole,
    Shape,
    Tolerance,
    adam_moments,
)
from largebatch.config.optimizers.sections import WithScaledMoments
from largebatch.config.sections import BelowOne, NonEmpty, Size
from largebatch.errors import ConfigError

COEFFICIENTS = {
    # Jordan et al. 2024 (https://kellerjordan.github.io/posts/muon): the steepest start; singular values end between
    # 0.68 and 1.13.
    "jordan": (3.4445, -4.7750, 2.0315),
    # The iteration of fifth order that converges to 1 (Higham 2008, Functions of Matrices, section 8.3).
    "classical": (1.875, -1.25, 0.375),
}


class Muon(WithScaledMoments):
    """Muon (Jordan et al. 2024, https://kellerjordan.github.io/posts/muon): the momentum of each weight matrix, made
    orthogonal, is its step. Other parameters, embeddings and the output layer are stepped by AdamW with the same
    learning rate. Weight decay is decoupled from the gradient."""

    name: Literal["muon"]
    weight_decay: NonNegativeFloat = 0.1
    """Weight decay, decoupled from the gradient."""
    momentum: BelowOne = 0.95
    """Decay rate of the running average of a matrix's gradient. `beta_scaling` applies to it as to the betas: it is
    raised to the power k by "half_life", and becomes 1 - k (1 - momentum) by "sde"."""
    nesterov: bool = True
    """Whether to use Nesterov momentum."""
    scale: Literal["adamw_rms", "original", "spectral"] = "adamw_rms"
    """Factor of the step of a matrix with `out` outputs and `in` inputs. "adamw_rms": 0.2 sqrt(max(out, in)), which
    makes a step about as large as one of AdamW, so that AdamW's learning rate and weight decay can be used (Liu et al.
    2025, arXiv 2502.16982). "original": sqrt(max(1, out / in)), as in Jordan et al. "spectral": sqrt(out / in)
    (Bernstein 2025, https://jeremybernste.in/writing/deriving-muon)."""
    coefficients: Literal["jordan", "classical"] = "jordan"
    """Coefficients of the Newton-Schulz iteration. "jordan": 3.4445, -4.7750, 2.0315, which bring singular values near
    1 in few iterations. "classical": 15/8, -10/8, 3/8, which converge to 1, and need more of them."""
    iterations: Annotated[int, Field(ge=1, le=30)] = 5
    """Newton-Schulz iterations, in bf16 on GPUs and in the weights' precision on CPUs."""
    split: dict[NonEmpty, Annotated[int, Field(ge=2)] | tuple[Size, ...]] = Field(default={})
    """Weights that hold several matrices with the same inputs, one after the other in the outputs: patterns of names,
    where * is any text, and the number of matrices, such as {"*.c_attn.weight": 3} for GPT-2's queries, keys and
    values, or the outputs of each. Each is made orthogonal by itself; a weight that is not named is one matrix."""
    adamw_names: list[NonEmpty] = Field(default=[])
    """Patterns of names of further parameters that are stepped by AdamW, where * is any text. AdamW also steps all that
    have no weight decay by `no_decay`, by `no_decay_names` or because the model declares it."""
    betas: tuple[BelowOne, BelowOne] = (0.9, 0.95)
    """AdamW's decay rates of the running averages of the gradient and of its square."""

    names: ClassVar[tuple[str, ...]] = (*WithScaledMoments.names, "split", "adamw_names")

    def options_for(self, k: float) -> dict[str, Any]:
        return super().options_for(k) | {"momentum": scaled_average(self.beta_scaling, k, self.momentum)}


def muon_states(options: Options, shape: Shape) -> Mapping[str, Shape]:
    """Momentum for matrices, AdamW's moments for the others."""
    return {"momentum_buffer": shape} if options["layerwise"] else adam_moments(options, shape)


def muon_group(role: ParameterRole) -> GroupOptions:
    """Whether a parameter is a matrix, or several, that Muon steps."""
    matrices = role.named.get("split", 1)
    is_matrix = role.kind is None and role.decays and len(role.shape) > 1
    if not is_matrix or "adamw_names" in role.named:
        if matrices != 1:
            raise ConfigError(
                f"optimizer.split: it names a parameter of shape {role.shape} that AdamW steps; name weights in blocks"
            )
        return {"layerwise": False}
    if len(role.shape) > 2 and not role.convolves:
        raise ConfigError(
            f"optimizer: Muon does not know which matrices a parameter of shape {role.shape} holds: it belongs to no "
            'convolution, or to a transposed one; write a pattern of its name, such as "*.experts.*", into '
            "optimizer.adamw_names"
        )
    outputs = role.shape[role.inputs_first]
    if sum(output_sizes(matrices, outputs)) != outputs:
        raise ConfigError(
            f"optimizer.split: a weight of shape {role.shape} has {outputs} outputs, which are not {matrices} matrices "
            f"of equal size; write a divisor of {outputs}, or a list of the outputs of each"
        )
    return {"layerwise": True, "inputs_first": role.inputs_first, "matrices": matrices}


def output_sizes(matrices: int | tuple[int, ...], outputs: int) -> list[int]:
    """The outputs of each matrix in a weight, given these or how many matrices there are."""
    return matrices * [outputs // matrices] if isinstance(matrices, int) else [*matrices]


def muon_products(options: Options, shape: Shape) -> int:
    """Operations of the Newton-Schulz iterations on a weight.

    For a matrix X of m rows and n >= m columns, X X^T takes 2 m^2 n, its square 2 m^3, and their product with X again
    2 m^2 n.
    """
    outputs = shape[options["inputs_first"]]
    inputs = prod(shape) // outputs
    products = 0
    for size in output_sizes(options["matrices"], outputs):
        m, n = sorted((inputs, size))
        products += options["iterations"] * (4 * m * m * n + 2 * m**3)
    return products


MUON = OptimizerEntry(
    Muon,
    "largebatch.optim.muon:Muon",
    muon_states,
    # The iteration enlarges differences in small singular values.
    tolerance=Tolerance(fp64=1e-10, fp32=1e-4, bf16=1e-3),
    needs="whole layers",
    group_of=muon_group,
    products=muon_products,
)
