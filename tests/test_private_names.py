"""Tests look at behavior: they use none of the package's private names but these, whose numbers may only fall."""

import ast

from paths import ROOT

# By file, how often.
USES = {
    "backend/test_exchange.py": 1,
    "backend/test_own_folder.py": 1,
    "backend/test_process_settings.py": 2,
    "backend/test_state.py": 1,
    "estimate/test_comparison.py": 1,
    "model/test_starting_weights.py": 2,
    "optim/test_registry.py": 1,
    "run/test_bad_input.py": 1,
    "run/test_hang.py": 1,
    "run/test_leaving_out.py": 1,
    "run/test_resume.py": 2,
    "tools/preflight/test_phases.py": 2,
    "tools/verify/test_rows.py": 2,
}


def private(name):
    return name.startswith("_") and not name.startswith("__") and len(name) > 1


def names_of_the_package():
    """What its modules define under a private name: functions, methods, variables and attributes."""
    for path in (ROOT / "src/largebatch").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef | ast.ClassDef):
                yield node.name
            elif isinstance(node, ast.Name | ast.Attribute) and isinstance(node.ctx, ast.Store):
                yield node.id if isinstance(node, ast.Name) else node.attr


def uses_of(names, path):
    """Its own objects' attributes are not counted; names that are given to `monkeypatch.setattr` are."""
    for node in ast.walk(ast.parse(path.read_text())):
        match node:
            case ast.Attribute(value=ast.Name(id="self" | "cls")):
                continue
            case ast.Attribute(attr=name) | ast.alias(name=name) if name in names:
                yield name
            case ast.Call(args=[_, ast.Constant(value=str(name)), *_]) if name in names:
                yield name


def test_no_test_uses_more_private_names_of_the_package():
    names = {name for name in names_of_the_package() if private(name)}
    tests = ROOT / "tests"
    found = {path.relative_to(tests).as_posix(): len([*uses_of(names, path)]) for path in tests.rglob("*.py")}
    assert {file: count for file, count in found.items() if count > USES.get(file, 0)} == {}
