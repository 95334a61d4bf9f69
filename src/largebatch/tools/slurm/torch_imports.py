"""Imports of torch by a task's config.py, also through modules of its folder and of largebatch."""

import ast
from collections.abc import Iterator
from pathlib import Path

import largebatch

SLOW = ("torch", "torchvision")
_PACKAGE = Path(largebatch.__file__).parent


def imports_of_torch(file: Path, seen: set[Path]) -> Iterator[str]:
    """Yield where importing a file imports torch: "config.py:3 imports torch"; files that are `seen` are left out."""
    if file in seen or not file.is_file():
        return
    seen.add(file)
    for node in _executed(ast.parse(file.read_bytes())):
        level = node.level if isinstance(node, ast.ImportFrom) else 0
        within = [node.module] if isinstance(node, ast.ImportFrom) and node.module else []
        for name in (*within, *(".".join([*within, alias.name]) for alias in node.names)):
            top, *rest = name.split(".")
            if level == 0 and top in SLOW:
                yield f"{file}:{node.lineno} imports {top}"
            elif level or top == largebatch.__name__:
                place = file.parents[level - 1].joinpath(top, *rest) if level else _PACKAGE.joinpath(*rest)
                for found in (place.with_suffix(".py"), place / "__init__.py"):
                    yield from imports_of_torch(found, seen)


def _executed(node: ast.AST) -> Iterator[ast.Import | ast.ImportFrom]:
    """The imports that run with the module, at any depth."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Import | ast.ImportFrom):
            yield child
        elif not isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef) and not (
            isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test)
        ):
            yield from _executed(child)
