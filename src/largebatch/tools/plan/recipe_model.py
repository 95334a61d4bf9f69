"""The model of a recipe, without memory, from its task's model.py."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from functools import partial
from pathlib import Path
from types import ModuleType

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from largebatch.config import RecipeConfig
from largebatch.errors import UserError
from largebatch.model.initialization.building import build_shapes
from largebatch.task_folders import import_from
from largebatch.tools.plan.activations import ExampleBatch


def recipe_model(config: RecipeConfig, recipe: Path) -> tuple[nn.Module, ExampleBatch | None]:
    """What `build_model(config)` of the model.py beside a recipe makes on the meta device, and its `example_batch`.

    Raises:
        UserError: There is no model.py, it cannot be imported, has no `build_model`, or that fails or makes nothing to
            train.
    """
    file = recipe.with_name("model.py")
    if not file.is_file():
        raise UserError(f"there is no {file}, whose build_model(config) makes the model; write one")
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64 if config.precision == "fp64" else torch.float32)
    try:
        with _users_program(file):
            module = import_from(recipe.parent, "model")
            model = _build(module, config, file)
    finally:
        torch.set_default_dtype(before)
    return model, getattr(module, "example_batch", None)


@contextmanager
def _users_program(file: Path) -> Iterator[None]:
    """What it prints is no part of what is printed about it, and what it raises is told in one line."""
    try:
        with redirect_stdout(sys.stderr):
            yield
    except UserError:
        raise
    except SystemExit as error:
        raise UserError(
            f"{file} ends the program instead of giving a model (SystemExit: {error.code}); write what only a run "
            'does below if __name__ == "__main__":'
        ) from error
    except Exception as error:
        raise UserError(f"{file}: its model cannot be built: {type(error).__name__}: {error}") from error


def _build(module: ModuleType, config: RecipeConfig, file: Path) -> nn.Module:
    build = getattr(module, "build_model", None)
    if build is None:
        raise UserError(f"{file} has no function build_model(config), whose model could be measured; give it one")
    model: object = build_shapes(partial(build, config))
    if not isinstance(model, nn.Module):
        raise UserError(
            f"{file}: build_model(config) returned {type(model).__name__}, which is not a torch.nn.Module; return one"
        )
    lazy = next((name for name, each in model.named_parameters() if is_lazy(each)), None)
    if lazy is not None:
        raise UserError(f"{file}: the shape of {lazy} is not known before data come; give its layer all sizes")
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise UserError(f"{file}: the model of build_model(config) has no parameter to train; give it one")
    return model
