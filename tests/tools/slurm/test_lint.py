"""`largebatch lint`: what is printed, and the exit code."""

import subprocess
import sys

import pytest

from largebatch.tools.command_line import main
from paths import RECIPES, ROOT
from planting import line_of, plant

SMOKE = "slurm/gpt_pydoc.sbatch"


def test_nothing_found_in_the_repository_itself(monkeypatch, capsys):
    monkeypatch.chdir(ROOT)
    assert main(["lint"]) == 0
    files = [
        *RECIPES,
        *set(ROOT.glob("slurm/*.sbatch")) - {ROOT / "slurm/prepare.sbatch"},
        *ROOT.glob("recipes/accelerate_configs/*.yaml"),
        *ROOT.glob("ds_configs/*"),
    ]
    assert capsys.readouterr().out == f"{len(files)} files, nothing found\n"


@pytest.mark.usefixtures("project")
def test_findings_one_a_line(capsys):
    plant(SMOKE, "STRATEGY:-ddp", "STRATEGY:-dpd")
    plant(SMOKE, "#SBATCH --nodes=2", "#SBATCH --nodes=3")
    assert main(["lint", SMOKE]) == 1
    first, second, count = capsys.readouterr().out.splitlines()
    assert first.startswith(f"{SMOKE}: nodes x processes per node = 3 x 2: ")
    assert first.endswith("[no-plan]")
    assert second.startswith(f"{SMOKE}:{line_of(SMOKE, 'STRATEGY:-dpd')}: STRATEGY dpd: there is no ")
    assert second.endswith("[strategy]")
    assert count == "1 file, 2 found"


@pytest.mark.usefixtures("project")
@pytest.mark.parametrize(
    ("file", "words"),
    [
        ("none.sbatch", "none.sbatch: cannot be read: [Errno 2] No such file or directory"),
        ("slurm", "slurm: not a file that can be checked"),
        ("folder.json", "folder.json: cannot be read"),
        ("binary.yaml", "binary.yaml: cannot be read"),
        ("recipes/causal_lm/train.py", "train.py: not a file that can be checked; give recipes"),
    ],
)
def test_files_that_cannot_be_checked(project, file, words, capsys):
    (project / "folder.json").mkdir()
    (project / "binary.yaml").write_bytes(b"\xff\xfe\x00")
    assert main(["lint", SMOKE, file]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.startswith(f"error: {file}")
    assert words in printed.err


def test_outside_of_a_repository(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["lint"]) == 2
    assert "go to the top of the repository, or name FILES" in capsys.readouterr().err


@pytest.mark.parametrize(
    "words",
    [
        ["lint"],
        ["submit", "gpt_pydoc", "--nodes=2", "--dry-run"],
        ["effective-batch", "--from=ddp", "--batch-size=8"],
    ],
)
def test_without_torch(words):
    program = (
        "import sys; from largebatch.tools.command_line import main; "
        f"code = main({words}); "
        "sys.exit(code or {'torch', 'accelerate', 'deepspeed', 'transformers'} & sys.modules.keys() or 0)"
    )
    result = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout + result.stderr
