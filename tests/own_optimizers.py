"""Two optimizers as a task declares them outside of the package: what its `config.py` says, and what computes them."""

import shutil

from paths import PYDOC, ROOT

CONFIG = '''
from largebatch.config.optimizers import ENLARGED_ROUNDING, OptimizerEntry
from largebatch.config.optimizers.sections import OptimizerSection
from largebatch.config.optimizers.shipped import SHIPPED
from largebatch.config.sections import BelowOne


class Softsign(OptimizerSection):
    """Momentum whose elements are pressed between -1 and 1."""

    name: Literal["softsign"]
    beta: BelowOne = 0.9
    """Decay rate of the running average of the gradient."""
    softness: PositiveFloat = 1e-3
    """Size of an average that makes half a step."""


class RowScaled(OptimizerSection):
    """Momentum divided by the root mean square of each row's gradients."""

    name: Literal["row_scaled"]
    beta: BelowOne = 0.9
    """Decay rate of both averages."""


def states_of_softsign(options, shape):
    return {"step": (), "average": shape} if options["beta"] else {"step": ()}


def states_of_row_scaled(options, shape):
    return {"average": shape, "squares_of_rows": shape[:1]}


SOFTSIGN = OptimizerEntry(
    Softsign,
    f"{__package__}.own_torch:Softsign",
    states_of_softsign,
    ENLARGED_ROUNDING,
)
ROW_SCALED = OptimizerEntry(
    RowScaled,
    f"{__package__}.own_torch:row_scaled",
    states_of_row_scaled,
    ENLARGED_ROUNDING,
    needs="whole matrices",
)
'''

SOFTSIGN = (ROOT / "tests/outside_task/softsign.py").read_text()

ROW_SCALED = '''

class RowScaled(torch.optim.Optimizer):
    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state, beta = self.state[parameter], group["beta"]
                if not state:
                    state["average"] = torch.zeros_like(parameter)
                    state["squares_of_rows"] = parameter.new_zeros(parameter.shape[0])
                rows = parameter.grad.view(len(parameter), -1).square().mean(dim=1)
                state["average"].lerp_(parameter.grad, 1 - beta)
                scale = state["squares_of_rows"].lerp_(rows, 1 - beta).sqrt() + 1e-3
                step = state["average"] / scale.view(-1, *[1] * (parameter.dim() - 1))
                parameter.sub_(group["lr"] * (step + group["weight_decay"] * parameter))


def row_scaled(groups, lr, beta):
    """A function may name its options as it likes."""
    return RowScaled(groups, {"lr": lr, "beta": beta, "weight_decay": 0.0})
'''


def write_own_task(folder):
    """A copy of a shipped task's folder, with GPT's recipe, whose Config lists the two; returns the recipe."""
    folder.mkdir()
    for file in (*PYDOC.parent.glob("*.py"), PYDOC):
        shutil.copy(file, folder)
    config = folder / "config.py"
    before, class_line, rest = config.read_text().partition("class Config(RecipeConfig):\n")
    listed = "\n    optimizers = (*SHIPPED, SOFTSIGN, ROW_SCALED)\n\n    data:"
    config.write_text(before + CONFIG + class_line + rest.replace("\n    data:", listed, 1))
    (folder / "own_torch.py").write_text(SOFTSIGN + ROW_SCALED)
    return folder / PYDOC.name
