"""Shells complete the command, by scripts that they themselves run."""

import signal
import subprocess
import sys

import pytest

from largebatch.cli import main


def completed(script: str, words: list[str]) -> list[str]:
    """What bash offers for the last word."""
    line = " ".join(f"'{word}'" for word in words)
    asked = f"COMP_WORDS=({line}); COMP_CWORD={len(words) - 1}\n_shtab_largebatch\n"
    program = f"{script}\n{asked}printf '%s\\n' ${{COMPREPLY[@]}}"
    result = subprocess.run(["bash", "-c", program], capture_output=True, text=True, check=True)
    return result.stdout.split()


def test_bash_completes_commands_options_values_and_files(tmp_path, capsys, monkeypatch):
    assert main(["completion", "bash"]) == 0
    script = capsys.readouterr().out
    assert completed(script, ["largebatch", "ver"]) == ["verify"]
    assert completed(script, ["largebatch", "plan", "--world-size"]) == ["--world-size", "--world-sizes"]
    assert completed(script, ["largebatch", "effective-batch", "--from", "dd"]) == ["ddp", "ddp_spawn", "ddp_sharded"]
    (tmp_path / "mine.json").touch()
    monkeypatch.chdir(tmp_path)
    assert completed(script, ["largebatch", "plan", "mi"]) == ["mine.json"]


@pytest.mark.parametrize("shell", ["zsh", "tcsh"])
def test_other_shells_get_a_script(shell, capsys):
    assert main(["completion", shell]) == 0
    assert "effective-batch" in capsys.readouterr().out


def test_every_command_has_help_with_an_example_or_its_caller_and_exit_codes(capsys):
    from largebatch.cli.parser import build_parser

    (subcommands,) = build_parser()._subparsers._group_actions
    assert len(subcommands.choices) > 12
    for name in subcommands.choices:
        with pytest.raises(SystemExit) as left:
            main([name, "--help"])
        assert left.value.code == 0
        text = " ".join(capsys.readouterr().out.split())
        assert "Exit codes: 0 done, 1 a check failed, 2 the input cannot be used." in text
        assert f"largebatch {name}" in text.partition("xample")[2] or "slurm/launch.sh runs it" in text, name


def test_a_reader_that_has_seen_enough():
    """Such as `head`: no traceback, and what a shell says of a command that SIGPIPE ended."""
    command = [sys.executable, "-m", "largebatch", "completion", "bash"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        process.stdout.close()
        assert process.stderr.read() == ""
    assert process.returncode == 128 + signal.SIGPIPE
