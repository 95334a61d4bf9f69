"""Who expands a Slurm variable: the batch script on the first node, or each task."""

import os
from pathlib import Path

import pytest

from largebatch.lint.shell import read_commands
from largebatch.lint.shell_rules import shell_findings

TOO_EARLY = {
    "double quotes": 'srun bash -c "echo $SLURM_NODEID"',
    "braces": 'srun bash -c "echo ${SLURM_PROCID:-0}"',
    "another shell": 'srun sh -lc "echo $SLURM_LOCALID"',
    "a path": '/usr/bin/srun bash -c "echo $SLURMD_NODENAME"',
    "no quotes": "srun accelerate launch --machine_rank $SLURM_NODEID",
    "no srun in sight": '"${start[@]}" bash -c "echo $SLURM_NODEID"',
    "double in double": 'srun bash -c "echo \\"$SLURM_NODEID\\""',
    "single inside double": "srun bash -c \"echo '$SLURM_NODEID'\"",
    "half a word": "srun bash -c 'echo '\"$SLURM_NODEID\"",
    "in a substitution": 'srun bash -c "echo $(echo $SLURM_NODEID)"',
    "backticks": "srun echo `echo $SLURM_NODEID`",
    "arithmetic": "srun echo $((4 + $SLURM_NODEID))",
    "in the output of a command": 'out=$(srun bash -c "echo $SLURM_NODEID")',
    "here-document": "srun bash <<EOF\necho $SLURM_NODEID\nEOF",
    "a variable that carries it": 'launcher="launch --machine_rank $SLURM_NODEID"\nsrun bash -c "$launcher"',
    "through two variables": 'a="$SLURM_NODEID"\nb="launch $a"\nsrun $b',
    "an array": 'args=(\n  --rank "$SLURM_NODEID" # of the node\n)\nsrun python "${args[@]}"',
    "in a function": 'start() {\n  srun bash -c "echo $SLURM_NODEID" &\n}',
    "an environment": "RANK=$SLURM_PROCID srun python train.py",
    "behind a here-string": 'read -r x <<<"$y"\nread -r x <<< "$y"\nsrun bash -c "echo $SLURM_NODEID"',
    "behind a here-document": "cat <<EOF\n$x\nEOF\ncat <<-'END'\n\tit's\n\tEND\nsrun echo $SLURM_NODEID",
    "behind a case": 'case $x in\n  a) srun bash -c "echo $SLURM_NODEID" ;;\nesac',
}
BY_EACH_TASK = {
    "single quotes": "srun bash -c 'echo $SLURM_NODEID'",
    "double in single": "srun bash -c 'echo \"$SLURM_NODEID\"'",
    "several lines": 'srun bash -c \'\n  set -e # it"s\n  echo "$SLURM_NODEID"\' bash "$RECIPE"',
    "escaped": 'srun bash -c "echo \\$SLURM_NODEID"',
    "quoted here-document": "srun bash <<'EOF'\necho \"$SLURM_NODEID\"\nEOF",
    "its own variable": 'echo "$SLURM_NODEID of $(hostname)"',
    "comment": '# srun bash -c "echo $SLURM_NODEID"\ntrue',
    "comment behind a command": 'srun hostname # "$SLURM_NODEID"',
    "another variable": 'srun bash -c "echo $SLURM_JOB_ID $SLURM_NODEIDS"',
    "apostrophe in a comment": "# it's\nsrun bash -c 'echo $SLURM_NODEID' # isn't",
    "count of arguments": "(( $# > 0 )) || exit\nsrun bash -c 'echo $SLURM_NODEID'",
    "shift in arithmetic": "x=$((1 << 2))\nsrun bash -c 'echo $SLURM_NODEID'",
    "here-string": "cat <<< \"it's\"\nsrun bash -c 'echo $SLURM_NODEID'",
    "redirections": "exec 2>&1 >|log\nsrun bash -c 'echo $SLURM_NODEID' &>log",
    "braces with quotes": "x=${y#\"it's\"}\nsrun bash -c 'echo $SLURM_NODEID'",
    "after srun": "srun true; echo $SLURM_NODEID",
    "ANSI quotes": "srun echo $'it\\'s $SLURM_NODEID'",
}


def findings(tmp_path, text: str):
    path = Path(os.path.relpath(tmp_path / "start.sh"))
    path.write_text(text + "\n")
    return [(finding.rule, finding.line) for finding in shell_findings(path, text, read_commands(text))]


@pytest.mark.parametrize("text", TOO_EARLY.values(), ids=TOO_EARLY)
def test_expanded_on_the_first_node(text, tmp_path):
    lines = [number for number, line in enumerate(text.split("\n"), 1) if "$SLURM" in line or "${SLURM" in line]
    assert findings(tmp_path, text) == [("expanded-too-early", line) for line in lines]


@pytest.mark.parametrize("text", BY_EACH_TASK.values(), ids=BY_EACH_TASK)
def test_expanded_by_each_task(text, tmp_path):
    assert findings(tmp_path, text) == []


def test_each_line_of_a_long_string_is_named(tmp_path):
    text = '# a launcher\nsrun bash -c "\n  export RANK=$SLURM_PROCID\n  launch \\\n    --machine_rank $SLURM_NODEID"'
    assert findings(tmp_path, text) == [("expanded-too-early", 3), ("expanded-too-early", 5)]


@pytest.mark.parametrize(
    ("text", "lines"),
    [
        ("launch --num_machines 4 --num_processes=32", [1, 1]),
        ("launch --num-processes 32", [1]),
        ("torchrun --nnodes=2:4", [1]),
        ("torchrun \\\n  --nnodes \\\n  4 --nproc_per_node 8", [2, 3]),
        ("srun bash -c '\n  launch --num_machines 4\n'", [2]),
        ("args=(--num_processes 4)", [1]),
        ('launch --num_machines "4"', [1]),
        ('launch --num_machines "$SLURM_NNODES" --num_processes $((2 * SLURM_NNODES))', []),
        ("launch --num_machines=$nodes --num_processes", []),
        ("# launch --num_machines 4", []),
        ("launch --num_processes_of_loader 4 --nodes 4", []),
    ],
)
def test_numbers_that_slurm_knows(text, lines, tmp_path):
    assert findings(tmp_path, text) == [("written-twice", line) for line in lines]


@pytest.mark.parametrize(
    "text", ["echo 'no end", 'echo "$(", `', "((", "${", "x=(", "cat <<EOF", "$", "\\", "<<", "a=$((1"]
)
def test_text_without_end(text):
    """bash says what is wrong with it; here it only has to come to an end."""
    read_commands(text)
