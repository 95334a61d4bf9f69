"""Patterns of parameters' names that a recipe gives."""

from collections.abc import Collection
from fnmatch import fnmatchcase

from largebatch.errors import ConfigError
from largebatch.words import did_you_mean


def names_matching(
    pattern: str, trainable: Collection[str], field: str, taken: Collection[str] = frozenset()
) -> list[str]:
    """The names of trainable parameters that a pattern of a field matches, without those that are taken.

    Raises:
        ConfigError: There are none.
    """
    matched = [name for name in trainable if fnmatchcase(name, pattern)]
    free = [name for name in matched if name not in taken]
    if not free:
        modules = [f"{name[:end]}.*" for name in trainable for end, letter in enumerate(name) if letter == "."]
        which = " that an earlier group does not have" if matched else ""
        meant = did_you_mean(pattern, [*trainable, *modules])
        examples = dict.fromkeys([*(name for name in modules if name.count(".") == 1), [*trainable][-1]])
        raise ConfigError(
            f'{field}: "{pattern}" matches no trainable parameter of the model{which}{meant}; write a pattern of '
            f"names, such as {', '.join(examples)}"
        )
    return free
