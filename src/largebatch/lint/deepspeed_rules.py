"""Rules for a DeepSpeed JSON."""

from collections.abc import Iterator
from pathlib import Path

from largebatch.backend.deepspeed_config import deepspeed_config_problems
from largebatch.lint.files import read_json
from largebatch.lint.findings import Finding
from largebatch.lint.key_lines import KeyLines


def deepspeed_findings(path: Path) -> Iterator[Finding]:
    """What in a DeepSpeed JSON contradicts that the recipe alone decides the optimisation.

    Raises:
        UserError: It cannot be read.
    """
    read = read_json(path)
    if isinstance(read, Finding):
        yield read
        return
    text, config = read
    lines = KeyLines(text)
    for problem in deepspeed_config_problems(config):
        key = problem.partition(": ")[0]
        why, _, remedy = problem.partition("; ")
        if why == f"{key}: remove it":
            why, remedy = f"{key}: {remedy}", "remove it"
        yield Finding(str(path), lines.of(key), "deepspeed-setting", why, remedy or "correct it")
