"""A script as Slurm reads it."""

import pytest

from largebatch.tools.lint.sbatch import log_path, read_options, read_script


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["--nodes=4"], [("nodes", "4")]),
        (["--nodes", "4"], [("nodes", "4")]),
        (["-N", "4"], [("nodes", "4")]),
        (["-N4"], [("nodes", "4")]),
        (["-HN4"], [("hold", ""), ("nodes", "4")]),
        (["--requeue", "--time", "5"], [("requeue", ""), ("time", "5")]),
        (["--exclusive", "-t5"], [("exclusive", ""), ("time", "5")]),
        (["--exclusive=user", "-t5"], [("exclusive", "user"), ("time", "5")]),
        (["--comment=a=b --nodes=4"], [("comment", "a=b --nodes=4")]),
        (["--tasks-per-node=1"], [("ntasks-per-node", "1")]),
        (["--nodes"], [("nodes", "")]),
        (["script", "--nodes=4"], [("", "script"), ("nodes", "4")]),
    ],
)
def test_options(words, expected):
    assert list(read_options(words)) == expected


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
    assert [(option.name, option.value, option.line) for option in job.options] == [
        ("nodes", "4", 2),
        ("time", "5", 2),
        ("comment", "two words # not a comment", 7),
        ("job-name", "a name", 8),
    ]
    assert job.late_lines == (10,)


def test_the_command_line_wins(script):
    job = script("#SBATCH --nodes=4 --time=5\n", "-N", "2")
    assert (job.option("nodes").value, job.option("nodes").line) == ("2", 0)
    assert job.option("time").value == "5"


@pytest.mark.parametrize(
    ("text", "value", "is_default"),
    [
        ("X=a", "a", False),
        ("export X='a b'", "a b", False),
        ("X=${X:-a}", "a", True),
        ('X="${X:-a}"', "a", True),
        ("X=a\nX=b", "b", False),
        ("X=a # of many", "a", False),
    ],
)
def test_variables(script, text, value, is_default):
    variable = script(f"#SBATCH --nodes=1\n{text}\n").variable("X")
    assert (variable.value, variable.is_default) == (value, is_default)


@pytest.mark.parametrize(
    ("options", "job_id", "path", "unknown"),
    [
        ("--output=slurm-%x-%j.log --job-name=gpt", "7", "slurm-gpt-7.log", []),
        ("--output=slurm-%x-%j.log --job-name=gpt", None, "slurm-gpt-%j.log", ["%j"]),
        ("--output=%4j-100%%.log", "7", "0007-100%.log", []),
        ("--output=%N/%t.log", "7", "%N/%t.log", ["%N", "%t"]),
        ("--output=%x.log", "7", "job.sbatch.log", []),
        ("--output=/a/b.log --chdir=/c", "7", "/a/b.log", []),
        ("--output=b.log --chdir=/c", "7", "/c/b.log", []),
        ("--nodes=1", "7", "slurm-7.out", []),
    ],
)
def test_log_path(script, options, job_id, path, unknown):
    job = script(f"#SBATCH {options}\n")
    assert log_path(job, job.option("output"), job_id) == (path, unknown)
