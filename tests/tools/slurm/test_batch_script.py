"""What is read of a batch script: its options as far as the plan needs them, and its variables."""

import pytest

from largebatch.tools.slurm.batch_script import BatchScript


@pytest.fixture
def script(tmp_path):
    def write(text, *given_options, **environment):
        path = tmp_path / "job.sbatch"
        path.write_text(text)
        return BatchScript(path, given_options, (), environment)

    return write


def test_options(script):
    text = "#!/bin/bash\n#SBATCH --nodes=4\n##SBATCH --gres=gpu:5\n#SBATCH --time=6 # of 24\n#SBATCH --requeue\n"
    read = script(text, "--time=5", "--comment=a=b", SBATCH_OUTPUT="x.log", SBATCH_TIMELIMIT="7")
    assert read.options == {"nodes": "4", "time": "5", "requeue": "", "comment": "a=b", "output": "x.log"}


@pytest.mark.parametrize(
    ("options", "environment", "layout"),
    [
        ("", {}, (range(1, 2), 1)),
        ("--nodes=4 --cpus-per-task=2", {}, (range(4, 5), 2)),
        ("--nodes=2-4 --gpus-per-node=8 --cpus-per-task=64", {}, (range(2, 5), 8)),
        ("--gpus-per-node=nvidia_a100-sxm4-40gb:4", {}, (range(1, 2), 4)),
        ("--gres=gpu:h100:8", {}, (range(1, 2), 8)),
        ("--gres=nvme:100 --cpus-per-task=2", {}, (range(1, 2), 2)),
        ("--nodes=3 --gpus=9", {"LARGEBATCH_NODES": "2", "LARGEBATCH_PROCESSES_PER_NODE": "4"}, (range(2, 3), 4)),
        # These leave it to Slurm how many processes a node gets.
        ("--gpus-per-node=h100:4,a100:4", {}, None),
        ("--nodes=0", {}, None),
        ("--cpus-per-task=x", {}, None),
        *((f"--{name}{'9' * 5000}", {}, None) for name in ("gres=gpu:", "nodes=", "cpus-per-task=")),
    ],
)
def test_layout(script, options, environment, layout):
    assert script("", *options.split(), **environment).layout == layout


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("X=a", "a"),
        ('X="${X:-a}"', "a"),
        ("X=a # of many", "a"),
        ("X=a; export X", "a"),
        ("Y=a", ""),
    ],
)
def test_variables(script, text, value):
    assert script(f"#SBATCH --nodes=1\n{text}\n").variable("X") == value


@pytest.mark.parametrize(
    ("options", "log"),
    [
        ("--output=slurm-%x-%j.log --job-name=gpt", "slurm-gpt-7.log"),
        ("--output=%x-%N.log", "job.sbatch-%N.log"),
        ("--output=/a/b.log --chdir=/c", "/a/b.log"),
        ("--output=b.log --chdir=/c", "/c/b.log"),
        ("", "slurm-7.out"),
        ("--array=3-9", "slurm-7_3.out"),
        ("--array=3-9 --output=%A-%a.log", "7-3.log"),
        ("--output=/50%%j/%a.log --array=3,4", "/50%j/3.log"),
    ],
)
def test_log(script, options, log):
    assert script("", *options.split()).log("7") == log
