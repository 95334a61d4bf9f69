"""What tests of submissions share."""

import os

import pytest

from played import write_commands
from submitting import RECORDER


@pytest.fixture
def sbatch(project, monkeypatch):
    """Put an sbatch, and a controller with an empty queue, on PATH, and return what makes sbatch answer otherwise than
    `123`.
    """
    file = project / "bin" / "sbatch"
    file.parent.mkdir()
    write_commands(file.parent, {"squeue": "", "scontrol": ""})

    def answers(code):
        file.write_text(RECORDER + code)
        file.chmod(0o755)

    answers("print(123)")
    monkeypatch.setenv("PATH", str(file.parent), prepend=os.pathsep)
    for name in [name for name in os.environ if name.startswith(("LARGEBATCH_", "SBATCH_", "RUN_DIR"))]:
        monkeypatch.delenv(name)
    (project / ".venv/bin").mkdir(parents=True)
    (project / ".venv/bin/activate").touch()
    return answers
