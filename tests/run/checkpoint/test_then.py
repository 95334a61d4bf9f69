"""The command that follows kept checkpoints: what it gets, what becomes of its answer, and that it harms nothing."""

import errno
import json
import os
import shutil
import sys
import threading
import time
from unittest.mock import Mock

import pytest
from safetensors.numpy import load_file

from jobs import train_in_job
from largebatch.config.sections import Checkpoint
from largebatch.errors import UserError
from largebatch.run.checkpoint.then import Then, check_program
from largebatch.run.record import recorder
from largebatch.storage.files import read_json_lines
from largebatch.storage.run_folder import RunFolder
from largebatch.system.endings import OwnEnding
from paths import PYDOC
from processes import is_running
from recording import begin
from resuming import TINY_GPT, assert_same_weights, events

PYTHON = sys.executable


@pytest.fixture
def followed(tmp_path, monkeypatch):
    """The answers and the failures of a command, given as Python, that follows the checkpoints of some steps.

    A quick program is in the place of the Python that exports.
    """
    monkeypatch.setattr(sys, "executable", shutil.which("true"))
    (tmp_path / "step_4").mkdir()

    def follow(program, checkpoint="step_4", steps=(4,), seconds=30.0, is_stopped=False):
        answers = []
        failures = []
        then = Then(
            Checkpoint(then=[PYTHON, "-c", program, "{model}", "{step}"], then_seconds=seconds),
            tmp_path / "then",
            lambda *answer: answers.append(answer),
            lambda *failure: failures.append(failure),
        )
        for step in steps:
            then.follow(step, tmp_path / checkpoint)
        if is_stopped:
            # By then the command has ended.
            next(thread for thread in threading.enumerate() if thread.name == "then").join()
            then.end("the run was stopped")
        else:
            then.finish()
        assert not (tmp_path / "then").exists()
        return answers, failures

    return follow


@pytest.fixture
def _typed():
    """Four characters on the standard input of this process."""
    original = os.dup(0)
    reader, writer = os.pipe()
    os.write(writer, b"yes\n")
    os.close(writer)
    os.dup2(reader, 0)
    os.close(reader)
    yield
    os.dup2(original, 0)
    os.close(original)


def test_one_at_a_time_and_the_newest_waits(followed):
    program = (
        "import json, sys, time; time.sleep(1); print('words'); "
        "print(json.dumps({'n': int(sys.argv[2]), 'step': sys.argv[2]}))"
    )
    assert followed(program, steps=(1, 2, 3)) == ([(1, {"n": 1.0}), (3, {"n": 3.0})], [])


def test_what_fails_is_noted(followed):
    _, [(step, reason)] = followed("import sys; print('before'); sys.exit('no such task')")
    assert step == 4
    assert reason.endswith("has ended with code 1: no such task")


@pytest.mark.usefixtures("_typed")
@pytest.mark.parametrize(
    ("program", "answers"),
    [
        # Only finite numbers are answers, and words are none.
        ("""print('{"a": 1, "b": NaN, "c": true, "d": "2", "e": 0.5}')""", [(4, {"a": 1.0, "e": 0.5})]),
        ("print('uploaded')", []),
        # Others may write last, as bars of progress do, without a line of their own.
        (
            """import sys; print(' 50%\\r{"a": 1}'); sys.stdout.flush(); sys.stderr.write('bye')""",
            [(4, {"a": 1.0})],
        ),
        # What it leaves running does not hold up its answer.
        (
            "import subprocess; subprocess.Popen(['sleep', '40'], start_new_session=True); print('{\"a\": 1}')",
            [(4, {"a": 1.0})],
        ),
        # It does not read what is typed.
        (
            "import json, sys; print(json.dumps({'characters': len(sys.stdin.read())}))",
            [(4, {"characters": 0.0})],
        ),
    ],
)
def test_answers(program, answers, followed):
    assert followed(program) == (answers, [])


def test_a_hanging_command_is_ended_with_its_own_processes(followed, tmp_path):
    mark = tmp_path / "pid"
    program = (
        f"import os, pathlib, time; pid = os.fork(); pid and pathlib.Path({str(mark)!r}).write_text(str(pid)); "
        "time.sleep(600)"
    )
    began = time.monotonic()
    _, [(_, reason)] = followed(program, seconds=3.0)
    assert 3.0 <= time.monotonic() - began < 9.0
    assert reason == "it was still running 3 s after the end of training; raise checkpoint.then_seconds"
    assert not is_running(mark.read_text())


@pytest.mark.parametrize(
    ("checkpoint", "reason"),
    [("step_4", "its weights could not be exported: "), ("gone", "the checkpoint is gone before its turn")],
)
def test_an_export_that_fails(checkpoint, reason, followed, monkeypatch):
    monkeypatch.setattr(sys, "executable", shutil.which("false"))
    assert followed("print(1)", checkpoint)[1][0][1].startswith(reason)


def test_a_checkpoint_that_is_replaced_while_it_is_exported(followed, tmp_path, monkeypatch):
    """As with better evaluations that come faster than exports end; the exporter's fourth argument is the folder."""
    (tmp_path / "step_4/weights").touch()
    exporter = tmp_path / "export"
    exporter.write_text(f'#!/bin/sh\nrm -r "{tmp_path}/step_4" && test -e "$4/weights"\n')
    exporter.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(exporter))
    assert followed("print('{\"a\": 1}')") == ([(4, {"a": 1.0})], [])


def test_a_checkpoint_that_cannot_be_linked_is_read_where_it_is(followed, tmp_path, monkeypatch):
    """As on another file system, or on one without links."""
    (tmp_path / "step_4/weights").touch()
    monkeypatch.setattr(os, "link", Mock(side_effect=OSError(errno.EXDEV, "Invalid cross-device link")))
    assert followed("print('{\"a\": 1}')") == ([(4, {"a": 1.0})], [])


def test_a_command_that_failed_before_the_end_says_why_itself(followed):
    _, [(_, reason)] = followed("import sys; sys.exit('no such task')", is_stopped=True)
    assert reason.endswith("has ended with code 1: no such task")


def test_a_program_that_is_not_there_is_refused_before_training():
    with pytest.raises(UserError, match="there is no program 'pyhton' that may be run; write one on PATH"):
        check_program(Checkpoint(then=["pyhton", "evaluate.py"]))
    check_program(Checkpoint(then=[PYTHON]))
    check_program(Checkpoint())


def test_a_flood_of_output_is_refused(followed):
    _, [(_, reason)] = followed("while True: print('x' * 1000)")
    assert "prints more than" in reason


def test_it_does_not_take_itself_for_a_process_of_the_job(followed, monkeypatch):
    names = ("RANK", "LOCAL_RANK", "GROUP_WORLD_SIZE", "ACCELERATE_USE_FSDP", "LARGEBATCH_LOGS", "LOCAL_SCRATCH")
    for name in names:
        monkeypatch.setenv(name, "0")
    program = f"import json, os; print(json.dumps({{name: 1 for name in {names} if name in os.environ}}))"
    assert followed(program) == ([(4, {"LOCAL_SCRATCH": 1.0})], [])


def test_without_a_command_nothing_follows(tmp_path):
    then = Then(Checkpoint(), tmp_path, None, None)
    then.follow(4, tmp_path)
    then.finish()
    assert not list(tmp_path.iterdir())


def test_an_answer_is_no_result_of_the_run(tmp_path, monkeypatch):
    """The answer of the last checkpoint is not there yet when the summary is written. Trackers show all answers."""
    monkeypatch.setattr(recorder, "export_intact", lambda *_, **__: None)
    own = OwnEnding()
    recording = begin(tmp_path, own)
    recording.trackers = Mock()
    recording.evaluated({"loss": 2.0})
    recording.answered(0, {"loss": 9.0})
    shown = [each.args for each in recording.trackers.add.call_args_list]
    assert shown == [("evaluation", {"loss": 2.0}, 0), ("evaluation", {"then/loss": 9.0}, 0)]
    recording.finished(tmp_path, {"best": None}, lambda: None)
    assert RunFolder(tmp_path).summary()["evaluation"] == {"loss": 2.0}


WORDS = (*TINY_GPT, "--train.stop_after_steps=8", '--checkpoint.keep_every={"steps": 4}', "--checkpoint.keep_last=1")
PROGRAM = """
import json, sys
from safetensors.numpy import load_file
if sys.argv[2] == "4":
    sys.exit("no network")
weights = load_file(sys.argv[1] + "/model.safetensors")
print(json.dumps({"sum": sum(float(each.sum()) for each in weights.values())}))
"""


@pytest.mark.slow
def test_a_run_is_followed(run_dir, tmp_path):
    """Twice: after step 4, which is kept, where the command fails, and at the end; training is as without."""
    command = json.dumps([PYTHON, "-c", PROGRAM, "{model}", "{step}"])
    train_in_job(PYDOC, tmp_path / "plain", *WORDS)
    train_in_job(PYDOC, run_dir, *WORDS, f"--checkpoint.then={command}")
    (line,) = (line for line in read_json_lines(run_dir / "evaluations.jsonl") if "then/sum" in line)
    assert line["step"] == 8
    exported = load_file(run_dir / "model/model.safetensors")
    assert line["then/sum"] == sum(float(each.sum()) for each in exported.values())
    assert_same_weights(run_dir / "model", tmp_path / "plain/model")
    (failed,) = events(run_dir, "then_failed")
    assert failed["step"] == 4
    assert "no network" in failed["reason"]
    assert not (run_dir / "then").exists()
    assert events(run_dir, "finished")
