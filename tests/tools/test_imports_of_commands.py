"""Commands import only what they need: most answer in half a second, and run where torch is not installed."""

import json
import subprocess
import sys

import pytest

from paths import RECIPES
from run_folders import write_run

PROGRAM = """
import json, sys
from largebatch.__main__ import build_parser, main
build_parser("").format_help()
commands, heavy = json.load(sys.stdin)
sys.exit(any(main(words) for words in commands) or [*sys.modules.keys() & heavy] or 0)
"""
TORCH = ("torch", "transformers", "accelerate", "deepspeed")
TO_COMPUTE = (*TORCH, "numpy", "scipy", "datasets", "plotly")


@pytest.mark.parametrize(
    ("commands", "heavy"),
    [
        ([], (*TO_COMPUTE, "pydantic", "yaml")),
        ([f"plan {recipe} --world-size=1" for recipe in RECIPES], TO_COMPUTE),
        (["lint", "effective-batch --from=ddp --batch-size=8", "new job --recipe=llama_8b", "report run"], TORCH),
    ],
)
def test_commands_import_only_what_they_need(commands, heavy, project):
    write_run(project / "run", steps=range(1, 3))
    given = json.dumps([[command.split() for command in commands], heavy])
    result = subprocess.run([sys.executable, "-c", PROGRAM], input=given, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout + result.stderr
