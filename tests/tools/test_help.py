"""What `--help` says is true of the parser, and may be read through a pipe."""

import os
import re
import shlex
import signal
import subprocess
import sys

import pytest

from largebatch.__main__ import COMMANDS, build_parser, main
from paths import ROOT


@pytest.mark.parametrize("name", COMMANDS)
def test_help_has_exit_codes_and_examples_that_the_parser_takes_or_the_caller(name, capsys, monkeypatch):
    monkeypatch.chdir(ROOT)
    with pytest.raises(SystemExit) as left:
        main([name, "--help"])
    assert left.value.code == 0
    text = capsys.readouterr().out
    assert "Exit codes: 0 done, 1 a check failed, 2 the input cannot be used." in text
    examples = re.findall(r"largebatch ((?:.*\\\n)*.*?)(?: > .*|)$", text.partition("examples")[2], re.MULTILINE)
    assert examples or re.search(r"launch\.sh runs it|node\.sh runs it", text)
    for example in examples:
        options, overrides = build_parser(name).parse_known_args(shlex.split(example.replace("\\\n", "")))
        assert options.command == name
        assert name in ("submit", "sweep", "critical-batch") or not overrides, example


def test_without_a_command_it_lists_them(capsys):
    with pytest.raises(SystemExit) as left:
        main([])
    assert left.value.code == 0
    text = capsys.readouterr().out
    assert all(f"\n    {name}" in text for name in COMMANDS)


def test_a_reader_that_has_seen_enough():
    """Such as `head`: no traceback, and what a shell says of a command that SIGPIPE ended."""
    command = [sys.executable, "-m", "largebatch", "effective-batch", "--from=ddp", "--batch-size=8"]
    reader, writer = os.pipe()
    os.close(reader)
    try:
        result = subprocess.run(command, stdout=writer, stderr=subprocess.PIPE, text=True)
    finally:
        os.close(writer)
    assert (result.returncode, result.stderr) == (128 + signal.SIGPIPE, "")
