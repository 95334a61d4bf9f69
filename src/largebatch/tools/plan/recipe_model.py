"""The model of a recipe, without memory, from its own script."""

import importlib.util
import sys
from contextlib import redirect_stdout
from functools import partial
from pathlib import Path

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from largebatch.config import RecipeConfig
from largebatch.errors import UserError
from largebatch.initialization.building import build_shapes


def recipe_model(config: RecipeConfig, script: Path) -> nn.Module:
    """Return what `build_model(config)` of a script, the recipe's train.py, makes on the meta device.

    Raises:
        UserError: The script cannot be imported, has no `build_model`, or that fails or makes nothing to train.
    """
    if not script.is_file():
        raise UserError(f"there is no {script}; write --script PATH, the train.py that runs the recipe")
    spec = importlib.util.spec_from_file_location(f"{script.parent.name}_{script.stem}", script)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    # As where it is run: what is beside it can be imported.
    sys.path.insert(0, str(script.resolve().parent))
    # Where dataclasses look for the module of their fields' types.
    sys.modules[spec.name] = module
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64 if config.precision == "fp64" else torch.float32)
    try:
        # What it prints is no part of what is printed about it.
        with redirect_stdout(sys.stderr):
            spec.loader.exec_module(module)
            build = getattr(module, "build_model", None)
            if build is None:
                raise UserError(
                    f"{script} has no function build_model(config), whose model could be measured; give it one"
                )
            model: nn.Module = build_shapes(partial(build, config))
            _require_something_to_train(model, script)
    except UserError:
        raise
    except SystemExit as error:
        raise UserError(
            f"{script} ends the program instead of giving a model (SystemExit: {error.code}); write what only a run "
            'does below if __name__ == "__main__":'
        ) from error
    # It is the user's program.
    except Exception as error:
        raise UserError(f"{script}: its model cannot be built: {type(error).__name__}: {error}") from error
    finally:
        sys.path.pop(0)
        sys.modules.pop(spec.name, None)
        torch.set_default_dtype(before)
    return model


def _require_something_to_train(model: object, script: Path) -> None:
    if not isinstance(model, nn.Module):
        raise UserError(
            f"{script}: build_model(config) returned {type(model).__name__}, no torch.nn.Module; return one"
        )
    lazy = next((name for name, each in model.named_parameters() if is_lazy(each)), None)
    if lazy is not None:
        raise UserError(f"{script}: the shape of {lazy} is not known before data come; give its layer all sizes")
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise UserError(f"{script}: the model of build_model(config) has no parameter to train; give it one")
