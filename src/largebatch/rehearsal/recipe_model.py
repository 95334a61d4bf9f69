"""The model of a recipe, without memory, from its own script."""

import importlib.util
import sys
from functools import partial
from pathlib import Path

import torch
from torch import nn

from largebatch.config import RecipeConfig
from largebatch.errors import UserError
from largebatch.initialization.building import build_shapes


def recipe_model(config: RecipeConfig, script: Path) -> nn.Module:
    """What `build_model(config)` of a script makes, on the meta device.

    Args:
        config: The recipe's.
        script: Its train.py.

    Raises:
        UserError: The script cannot be imported, has no `build_model`, or that fails.
    """
    if not script.is_file():
        raise UserError(f"there is no {script}; write --script PATH, the train.py that runs the recipe")
    spec = importlib.util.spec_from_file_location(f"{script.parent.name}_{script.stem}", script)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    # As where it is run: what is beside it can be imported.
    sys.path.insert(0, str(script.resolve().parent))
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64 if config.precision == "fp64" else torch.float32)
    try:
        spec.loader.exec_module(module)
        build = getattr(module, "build_model", None)
        if build is None:
            raise UserError(f"{script} has no function build_model(config), whose model could be measured; give it one")
        model: nn.Module = build_shapes(partial(build, config))
    except UserError:
        raise
    # It is the user's program.
    except Exception as error:
        raise UserError(f"{script}: its model cannot be built: {type(error).__name__}: {error}") from error
    finally:
        sys.path.pop(0)
        torch.set_default_dtype(before)
    return model
