"""Rules for a recipe's JSON."""

from collections.abc import Iterator, Sequence
from pathlib import Path

from largebatch.config import load_config
from largebatch.errors import ConfigError
from largebatch.lint.files import read_json
from largebatch.lint.findings import COMMAND_LINE, Finding
from largebatch.lint.key_lines import KeyLines


def recipe_findings(path: Path, overrides: Sequence[str] = ()) -> Iterator[Finding]:
    """What is wrong with a recipe, with the command line's overrides in force.

    Raises:
        UserError: It cannot be read.
    """
    read = read_json(path)
    if isinstance(read, Finding):
        yield read
        return
    text, raw = read
    lines = KeyLines(text)
    try:
        load_config(path, overrides)
    except ConfigError as error:
        for problem in error.problems:
            what, _, remedy = problem.partition("; ")
            line = lines.of(problem.partition(": ")[0])
            file, line = (COMMAND_LINE, 0) if error.source == COMMAND_LINE else (str(path), line)
            yield Finding(file, line, "recipe", what, remedy or "correct it")
    schema = raw.get("$schema") if isinstance(raw, dict) else None
    if isinstance(schema, str) and "://" not in schema and not (path.parent / schema).is_file():
        why = f"$schema: there is no file {schema} beside it, and editors check nothing"
        yield Finding(str(path), lines.of("$schema"), "schema-missing", why, 'write "../recipe.schema.json"')
