"""Objects that are named as "module:name", so that what names them need not import what they need, such as torch."""

import importlib
from typing import Any

from largebatch.errors import UserError
from largebatch.task_folders import folder_of, owner_of


def load_named(name: str) -> Any:
    """The function or class that "module:name" says.

    Raises:
        UserError: There is no such module, or nothing of that name in it.
    """
    module, _, attribute = name.partition(":")
    try:
        return getattr(importlib.import_module(module), attribute)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module}.".startswith(f"{error.name}."):
            raise
        owner = owner_of(module)
        # Not the folder's package, whose name nobody has written.
        what = (
            f"the module {error.name}"
            if owner is None
            else f"{module.removeprefix(owner)[1:]}.py in {folder_of(owner)}"
        )
        raise UserError(f'"{name.removeprefix(f"{owner}.")}" names {what}, which cannot be imported') from error
    except AttributeError as error:
        raise UserError(f'"{name}": the module {module} has no {attribute}; write "module:function"') from error
