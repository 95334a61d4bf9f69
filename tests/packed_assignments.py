"""A rule that ruff does not have: `a, b = x, y` only swaps. `make lint` runs it over the repository's Python files."""

import ast
import sys
from collections.abc import Iterator
from pathlib import Path


def packed_assignments(source: str) -> Iterator[int]:
    """The lines of assignments that write several values into as many names, and do not only exchange them."""
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.Assign) or not isinstance(node.value, ast.Tuple):
            continue
        values = [ast.unparse(value) for value in node.value.elts]
        for target in node.targets:
            if isinstance(target, ast.Tuple) and sorted(map(ast.unparse, target.elts)) != sorted(values):
                yield node.lineno


def main(names: list[str]) -> int:
    found = 0
    for name in names:
        for line in packed_assignments(Path(name).read_text(encoding="utf-8")):
            print(f"{name}:{line}: several assignments in one statement; write one a line", file=sys.stderr)
            found += 1
    return int(found > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
