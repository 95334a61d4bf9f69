"""Refuses what a training script does to weights, gradients and the model's mode, which are the run's."""

from torch import nn
from torch.optim import Optimizer

from largebatch.errors import UserError

REFUSAL = (
    "{} after step.backward; run.update clips, steps and clears gradients: remove optimizer.step(), "
    "optimizer.zero_grad() and clipping (see optimizer.clip_norm) from train.py"
)
IN_EVALUATION_MODE = (
    "the model is in evaluation mode in a training step, without dropout: remove model.eval() from train.py "
    "(run.evaluate changes the mode and restores it), or call eval() only on the layers that must not train"
)


class Untouched:
    """Whether weights and gradients are as the run has left them, and the model is in training mode.

    It compares the numbers of changes that torch counts in each tensor, which takes microseconds. Clipping FSDP2's
    gradients, a list of DTensors, is not counted; one process and DDP show it. A script does not reach gradients that
    DeepSpeed's engine keeps.

    Args:
        model: The model as the recipe built it, after the strategy has taken it.
        optimizer: The optimizer that steps its parameters, or the engine's partitions of them.
    """

    def __init__(self, model: nn.Module, optimizer: Optimizer):
        self._model = model
        self._parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
        self._noted: list[int] | None = None
        optimizer.register_step_pre_hook(self._refuse_step)

    def note(self) -> None:
        """The run has changed gradients or weights: nothing else may do so, or step the optimizer, from here on."""
        self._noted = self._versions()

    def check(self) -> None:
        """Raise UserError if something has changed since."""
        if not self._model.training:
            raise UserError(IN_EVALUATION_MODE)
        if self._noted is not None and self._noted != self._versions():
            raise UserError(REFUSAL.format("gradients or weights were changed"))

    def forget(self) -> None:
        """From here to the next `note`, everything may change."""
        self._noted = None

    def _versions(self) -> list[int]:
        tensors = (tensor for parameter in self._parameters for tensor in (parameter, parameter.grad))
        return [-1 if tensor is None else tensor._version for tensor in tensors]

    def _refuse_step(self, *_: object) -> None:
        if self._noted is not None:
            raise UserError(REFUSAL.format("the optimizer was stepped"))
