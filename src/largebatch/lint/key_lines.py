"""Which line of a JSON or YAML file a key is on."""

from collections.abc import Iterator
from functools import cached_property

import yaml


class KeyLines:
    """The lines of the keys of a JSON or YAML text; JSON is read as YAML, which knows its lines."""

    def __init__(self, text: str):
        self._text = text

    @cached_property
    def _lines(self) -> dict[str, int]:
        # Read when first asked for: most files have nothing to be told of.
        try:
            # YAML allows no tabs between words, JSON does.
            return dict(_walk(yaml.compose(self._text.replace("\t", " "), Loader=yaml.SafeLoader), ""))
        # What is no YAML, or is nested without end, is found elsewhere; its lines are not known.
        except (yaml.YAMLError, RecursionError):
            return {}

    def of(self, path: str) -> int:
        """The line of a key such as `learning_rate.decay.at[0]`, or of what is nearest above it; 1 where nothing is."""
        while path:
            if path in self._lines:
                return self._lines[path]
            anywhere = [line for name, line in self._lines.items() if name.endswith(f".{path}")]
            if anywhere:
                return anywhere[-1]
            path = path[: max(path.rfind("."), path.rfind("["), 0)]
        return 1


def _walk(node: yaml.Node | None, path: str) -> Iterator[tuple[str, int]]:
    if isinstance(node, yaml.MappingNode):
        for key, value in node.value:
            inner = f"{path}.{key.value}" if path else str(key.value)
            yield inner, key.start_mark.line + 1
            yield from _walk(value, inner)
    elif isinstance(node, yaml.SequenceNode):
        for number, value in enumerate(node.value):
            yield f"{path}[{number}]", value.start_mark.line + 1
            yield from _walk(value, f"{path}[{number}]")
