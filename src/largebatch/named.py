"""Objects named as "module:name", so that declarations need not import torch."""

import importlib
from typing import Any

from largebatch.errors import UserError
from largebatch.task_folders import folder_of, owner_of


def load_named(name: str) -> Any:
    """The function or class that "module:name" names.

    Raises:
        UserError: There is no such module, or it has no such name.
    """
    module, _, attribute = name.partition(":")
    try:
        return getattr(importlib.import_module(module), attribute)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module}.".startswith(f"{error.name}."):
            raise
        owner = owner_of(module)
        # The package of a task's folder has a generated name.
        what = f"{module.removeprefix(owner)[1:]}.py in {folder_of(owner)}" if owner else f"the module {error.name}"
        raise UserError(f'"{name.removeprefix(f"{owner}.")}" names {what}, which cannot be imported') from error
    except AttributeError as error:
        raise UserError(f'"{name}": the module {module} has no {attribute}; write "module:function"') from error
