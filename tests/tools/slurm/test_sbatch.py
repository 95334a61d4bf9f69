"""A batch script, and options and their values, as Slurm reads them."""

import math

import pytest

from largebatch.tools.slurm.batch_script import log_path, read_script
from largebatch.tools.slurm.sbatch import gpus, gpus_of_gres, node_counts, read_environment, read_options, seconds


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["--nodes=4"], [("nodes", "4")]),
        (["--nodes", "4"], [("nodes", "4")]),
        (["-N", "4"], [("nodes", "4")]),
        (["-N4"], [("nodes", "4")]),
        (["-H", "-N4"], [("H", ""), ("nodes", "4")]),
        (["-p", "gpu", "-N4"], [("p", "gpu"), ("nodes", "4")]),
        (["--requeue", "--time", "5"], [("requeue", ""), ("time", "5")]),
        (["--no-requeue", "--time", "5"], [("requeue", "no"), ("time", "5")]),
        (["--exclusive", "-t5"], [("exclusive", ""), ("time", "5")]),
        (["--exclusive=user", "-t5"], [("exclusive", "user"), ("time", "5")]),
        (["--comment=a=b --nodes=4"], [("comment", "a=b --nodes=4")]),
        (["--comment=", "-t5"], [("comment", ""), ("time", "5")]),
        (["--nodes"], [("nodes", "")]),
        (["script", "--nodes=4"], [("", "script"), ("nodes", "4")]),
    ],
)
def test_options(words, expected):
    assert list(read_options(words)) == expected


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({"SBATCH_PARTITION": "gpu", "SBATCH_GRES": "gpu:8"}, [("gres", "gpu:8")]),
        ({"SBATCH_TIMELIMIT": "5", "SBATCH_MEM_PER_NODE": "0"}, [("mem", "0"), ("time", "5")]),
        ({"SBATCH_NO_REQUEUE": ""}, [("requeue", "no")]),
        ({"SBATCH_NO_REQUEUE": "0", "SBATCH_EXCLUSIVE": "0"}, []),
        ({"SBATCH_EXCLUSIVE": "yes"}, [("exclusive", "")]),
        ({"SBATCH_EXCLUSIVE": "user", "SBATCH_REQUEUE": "1"}, [("exclusive", "user"), ("requeue", "")]),
        # Which sbatch does not read.
        ({"SBATCH_NODES": "4", "SBATCH_CPUS_PER_TASK": "8", "SBATCH_TIME": "5", "SLURM_GRES": "gpu:8"}, []),
    ],
)
def test_variables_of_sbatch(variables, expected):
    found = list(read_environment(variables))
    assert [(name, value) for _, name, value in found] == expected
    assert {variable for variable, _, _ in found} <= variables.keys()


@pytest.fixture
def script(tmp_path):
    def write(text, *sbatch_options):
        path = tmp_path / "job.sbatch"
        path.write_text(text)
        return read_script(path, sbatch_options)

    return write


def test_lines(script):
    job = script(
        "#!/bin/bash\n"
        "#SBATCH --nodes=4 -t 5 # a comment --time=6\n"
        "##SBATCH --nodes=5\n"
        "# SBATCH --nodes=6\n"
        " #SBATCH --nodes=7\n"
        "\n"
        '#SBATCH --comment="two words # not a comment"\n'
        "#SBATCH --job-name='a name'\n"
        "true\n"
        "#SBATCH --nodes=8\n"
    )
    assert [(option.name, option.value, option.line) for option in job.options.values()] == [
        ("nodes", "4", 2),
        ("time", "5", 2),
        ("comment", "two words # not a comment", 7),
        ("job-name", "a name", 8),
    ]


def test_the_command_line_wins(script):
    job = script("#SBATCH --nodes=4 --time=5\n", "-N", "2")
    assert (job.options["nodes"].value, job.options["nodes"].line) == ("2", 0)
    assert job.options["time"].value == "5"


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("X=a", "a"),
        ("export X='a b'", "a b"),
        ("X=${X:-a}", "a"),
        ("X=${X-a}", "a"),
        ('X="${X:-a}"', "a"),
        ("X=a\nX=b", "b"),
        ("X=a # of many", "a"),
        ("X=a#b", "a#b"),
        ("X=a; export X", "a"),
        ("Y=a", ""),
    ],
)
def test_variables(script, text, value):
    assert script(f"#SBATCH --nodes=1\n{text}\n").variable("X") == (value, 1 if not value else text.count("\n") + 2)


@pytest.mark.parametrize(
    ("options", "job_id", "path"),
    [
        ("--output=slurm-%x-%j.log --job-name=gpt", "7", "slurm-gpt-7.log"),
        ("--output=slurm-%x-%j.log --job-name=gpt", "%j", "slurm-gpt-%j.log"),
        ("--output=%N/%t.log", "7", "%N/%t.log"),
        ("--output=%x.log", "7", "job.sbatch.log"),
        ("--output=/a/b.log --chdir=/c", "7", "/a/b.log"),
        ("--output=b.log --chdir=/c", "7", "/c/b.log"),
        ("--nodes=1", "7", "slurm-7.out"),
    ],
)
def test_log_path(script, options, job_id, path):
    job = script(f"#SBATCH {options}\n")
    assert log_path(job, job.options.get("output"), job_id) == path


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("90", 90 * 60),
        ("90:30", 90 * 60 + 30),
        ("1:30:15", 5415),
        ("24:00:00", 86400),
        ("2-12", 60 * 3600),
        ("2-12:30", 60 * 3600 + 1800),
        ("2-12:30:15", 60 * 3600 + 1815),
        ("UNLIMITED", math.inf),
        ("infinite", math.inf),
        ("0", math.inf),
    ],
)
def test_times(text, expected):
    assert seconds(text) == expected


@pytest.mark.parametrize("text", ["", "half", "1:2:3:4", "2-", "-5", "1.5", "12h", "1:", "1-2-3"])
def test_no_times(text):
    assert seconds(text) is None


@pytest.mark.parametrize(("text", "expected"), [("4", range(4, 5)), ("2-4", range(2, 5)), ("4-4", range(4, 5))])
def test_node_counts(text, expected):
    assert node_counts(text) == expected


@pytest.mark.parametrize("text", ["", "0", "=4", "4-2", "-4", "2-", "0-2", "four", "4,2", "4 "])
def test_no_node_counts(text):
    assert node_counts(text) is None


@pytest.mark.parametrize(
    ("text", "expected"), [("8", 8), ("h100:8", 8), ("nvidia_a100-sxm4-40gb:4", 4), ("a:2,b:3", 5)]
)
def test_gpus(text, expected):
    assert gpus(text) == expected


@pytest.mark.parametrize("text", ["", "h100", "h100:", ":8", "8.0", "-8", "8,"])
def test_no_gpus(text):
    assert gpus(text) is None


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("gpu:8", 8),
        ("gpu", 1),
        ("gpu:h100:8", 8),
        ("gpu:h100", 1),
        ("gres:gpu:2", 2),
        ("gpu:a:2,nvme:7,gpu:b:3", 5),
        ("nvme:100", 0),
        ("none", 0),
    ],
)
def test_gpus_of_gres(text, expected):
    assert gpus_of_gres(text) == expected


@pytest.mark.parametrize("text", ["gpu=8", "gpu:8:h100", "gpu:", "gpu:2x"])
def test_no_gpus_of_gres(text):
    assert gpus_of_gres(text) is None
