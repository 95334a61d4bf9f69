"""The model of a recipe, without memory, from its task's model.py."""

from functools import partial
from pathlib import Path

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from largebatch.config import RecipeConfig
from largebatch.config.task_config import authors_program
from largebatch.errors import UserError
from largebatch.model.initialization.building import build_shapes
from largebatch.task_folders import import_from
from largebatch.tools.plan.activations import ExampleBatch


def recipe_model(config: RecipeConfig, recipe: Path) -> tuple[nn.Module, ExampleBatch | None]:
    """The model that `build_model(config)` of the model.py beside a recipe makes, on the meta device, and the file's
    `example_batch`.

    Raises:
        UserError: There is no model.py, it cannot be imported, it has no `build_model`, or that fails or makes nothing
            to train.
    """
    file = recipe.with_name("model.py")
    if not file.is_file():
        raise UserError(f"there is no {file}, whose build_model(config) makes the model; write one")
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64 if config.precision == "fp64" else torch.float32)
    try:
        with authors_program(recipe.parent, file.name):
            module = import_from(recipe.parent, "model")
            if not hasattr(module, "build_model"):
                raise UserError(f"{file} has no function build_model(config), which makes the model; write one")
            model: object = build_shapes(partial(module.build_model, config))
    finally:
        torch.set_default_dtype(before)
    if not isinstance(model, nn.Module):
        raise UserError(
            f"{file}: build_model(config) returned {type(model).__name__}, which is not a torch.nn.Module; return one"
        )
    lazy = next((name for name, each in model.named_parameters() if is_lazy(each)), None)
    if lazy is not None:
        raise UserError(f"{file}: the shape of {lazy} is unknown until data comes; give its layer all sizes")
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise UserError(f"{file}: the model of build_model(config) has no parameter to train; give it one")
    return model, getattr(module, "example_batch", None)
