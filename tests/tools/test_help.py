"""What `--help` says is true of the parser, and may be read through a pipe."""

import os
import re
import shlex
import signal
import subprocess
import sys

import pytest

from largebatch.tools.command_line import build_parser, main
from paths import ROOT


def test_every_command_has_help_with_an_example_or_its_caller_and_exit_codes(capsys):
    (subcommands,) = build_parser()._subparsers._group_actions
    assert len(subcommands.choices) > 12
    for name in subcommands.choices:
        with pytest.raises(SystemExit) as left:
            main([name, "--help"])
        assert left.value.code == 0
        text = " ".join(capsys.readouterr().out.split())
        assert "Exit codes: 0 done, 1 a check failed, 2 the input cannot be used." in text
        callers = ("slurm/launch.sh runs it", "launch/node.sh runs it")
        assert f"largebatch {name}" in text.partition("examples")[2] or any(each in text for each in callers), name


def test_examples_of_help_are_taken_by_the_parser(monkeypatch):
    monkeypatch.chdir(ROOT)
    parser = build_parser()
    (subcommands,) = parser._subparsers._group_actions
    found = 0
    for name, command in subcommands.choices.items():
        for example in re.findall(r"largebatch ((?:.*\\\n)*.*?)(?: > .*|\)\"|)$", command.epilog, re.MULTILINE):
            options, overrides = parser.parse_known_args(shlex.split(example))
            assert options.command == name
            assert name == "submit" or not overrides, example
            found += 1
    assert found >= 17


def test_help_without_what_commands_need():
    program = (
        "import sys; from largebatch.tools.command_line import build_parser; "
        "print(build_parser().format_help()); "
        "sys.exit({'torch', 'pydantic', 'numpy', 'yaml', 'transformers'} & sys.modules.keys() or 0)"
    )
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr


def test_a_reader_that_has_seen_enough():
    """Such as `head`: no traceback, and what a shell says of a command that SIGPIPE ended."""
    command = [sys.executable, "-m", "largebatch", "effective-batch", "--from=ddp", "--batch-size=8"]
    reader, writer = os.pipe()
    os.close(reader)
    try:
        result = subprocess.run(command, stdout=writer, stderr=subprocess.PIPE, text=True, check=False)
    finally:
        os.close(writer)
    assert (result.returncode, result.stderr) == (128 + signal.SIGPIPE, "")
