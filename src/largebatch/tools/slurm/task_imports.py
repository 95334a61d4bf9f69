"""What a task's files import from largebatch, which another version may not have."""

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from largebatch.tools.slurm.batch_script import read_text
from largebatch.words import did_you_mean


def missing_imports(file: Path) -> Iterator[str]:
    """Yield each import of a name that largebatch does not have; nothing is imported, and what is no Python is left
    out."""
    try:
        tree = ast.parse(read_text(file))
    except (SyntaxError, ValueError, RecursionError):
        return
    for statement in ast.walk(tree):
        module = getattr(statement, "module", None) or ""
        if not isinstance(statement, ast.ImportFrom) or statement.level or module.partition(".")[0] != "largebatch":
            continue
        known = _names_of(module)
        for name in (alias.name for alias in statement.names):
            if known is None or name not in (*known, "*"):
                close = did_you_mean(name, sorted(known or ()))
                yield (
                    f"line {statement.lineno}: largebatch has no {module}.{name}{close}; CHANGELOG.md says under "
                    '"Renamed" what to write instead'
                )


@cache
def _names_of(module: str) -> frozenset[str] | None:
    """The names that a module of largebatch defines or imports, and those of its parts; None if there is none."""
    path = Path(__file__).parents[3].joinpath(*module.split("."))
    file = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    if not file.is_file():
        return None
    names = {each.stem for each in path.glob("*")} if path.is_dir() else set()
    for statement in ast.parse(file.read_text(encoding="utf-8")).body:
        if isinstance(statement, ast.FunctionDef | ast.ClassDef):
            names.add(statement.name)
        elif isinstance(statement, ast.Import | ast.ImportFrom):
            names |= {alias.asname or alias.name for alias in statement.names}
        else:
            names |= {each.id for each in ast.walk(statement) if isinstance(each, ast.Name)}
    return frozenset(names)
