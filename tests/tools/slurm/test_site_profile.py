"""slurm/site.sh, which counts for `largebatch submit` as for a job."""

from pathlib import Path

import pytest

from submitting import called, layout

pytestmark = pytest.mark.usefixtures("sbatch")


def test_the_sites_profile(monkeypatch, output_of):
    Path("slurm/site.sh").write_text(
        "export SBATCH_GPUS_PER_NODE=${SBATCH_GPUS_PER_NODE:-4} LARGEBATCH_ENV=site_env\nexport OTHER=1\n"
        "echo welcome; LARGEBATCH_WRAP=(a b)\n[[ -d /none ]] && export LARGEBATCH_CONTAINER=x\n"
    )
    Path("site_env").touch()
    monkeypatch.delenv("OTHER", raising=False)
    printed = output_of("submit", "gpt_pydoc", "--nodes=1")
    assert layout(printed) == "ddp, nodes x GPUs per node = 1 x 4"
    assert "LARGEBATCH_ENV=site_env LARGEBATCH_SNAPSHOT=" in printed
    assert "SBATCH_GPUS_PER_NODE=4 sbatch" in printed
    environment = called()["environment"]
    assert environment["SBATCH_GPUS_PER_NODE"] == "4"
    assert environment.keys().isdisjoint({"OTHER", "LARGEBATCH_WRAP", "LARGEBATCH_CONTAINER"})
    monkeypatch.setenv("SBATCH_GPUS_PER_NODE", "2")
    assert "1 x 2" in layout(output_of("submit", "gpt_pydoc", "--nodes=1"))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("exit 3", "it ended with exit code 3"),
        ("if then", "syntax error"),
        ("source /none/file", "/none/file: No such file"),
    ],
)
def test_a_profile_that_fails(text, message, refusal_of):
    Path("slurm/site.sh").write_text(text)
    error = refusal_of("submit", "gpt_pydoc", "--nodes=2")
    assert error.startswith(f"error: {Path.cwd()}/slurm/site.sh fails: ")
    assert message in error
    assert not Path("called.json").exists()
