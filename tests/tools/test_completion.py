"""Shells complete the command, by scripts that they themselves run."""

import subprocess

import pytest

from largebatch.tools.command_line import main


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
