""" "auto": what a start tries after those before it, and a run that processes without memory interrupt."""

import json
import os
from unittest.mock import Mock

import pytest
import torch

import tasks
from ending_files import write_ending
from jobs import failure_of, train
from largebatch.__main__ import main
from largebatch.backend.launch import Launch
from largebatch.config import load_config
from largebatch.errors import ConfigError
from largebatch.plan import explain, resolve
from largebatch.run.micro_batch_size import largest_to_try, rehearse_longest
from largebatch.storage.attempts import claim
from largebatch.storage.run_folder import RunFolder
from largebatch.task_folders import import_from
from paths import DIGITS, MAPS, PYDOC, VIT_DIGITS
from problems import problem_of
from resuming import TINY_MAPS, assert_close_weights, exact_log

AUTO = "--batch.micro_batch_size=auto"
BATCH = "--batch.global_batch_size=96"


def train_without_memory(run_dir, *words):
    """Train, where the third process has memory for 16 of the longest samples, and later for fewer."""
    from largebatch.run import Run

    model = import_from(MAPS.parent, "model")
    example_batch = model.example_batch
    update = Run.update

    def example(config):
        (run_dir / "rehearsed").touch()
        refuse_beyond(16, config.batch.micro_batch_size)
        return example_batch(config)

    def refused(run, step):
        if step.index == 4 and run.plan.micro_batch_size > 4:
            # It is written beside the steps that follow.
            run.loop.writer.wait()
            refuse_beyond(4, run.plan.micro_batch_size)
        update(run, step)

    def refuse_beyond(limit, size):
        if os.environ["RANK"] == "2" and size > limit:
            raise torch.OutOfMemoryError("CUDA out of memory")

    model.example_batch = example
    Run.update = refused
    train(MAPS, *TINY_MAPS, BATCH, *words, run_dir=run_dir)


@pytest.mark.slow
def test_a_job_halves_the_size_until_it_fits_and_again_in_the_middle_of_training(
    run_dir, tmp_path, monkeypatch, capsys
):
    run = RunFolder(run_dir)
    monkeypatch.setenv("LARGEBATCH_JOB_ID", "5")
    answers = []
    for start in range(4):
        # Only a start without any progress is too many.
        about = ["--run-dir", str(run_dir), "--start", str(start), "--max-restarts=0"]
        assert main(["job-begins", *about]) == 0
        environment = {
            "LARGEBATCH_JOB_ID": "5",
            "LARGEBATCH_RESTART": str(start),
            "LARGEBATCH_LOGS": str(run_dir / f"jobs/5/start_{start}"),
        }
        words = (AUTO, '--checkpoint.every={"steps": 3}')
        failure = failure_of(train_without_memory, run_dir, *words, world_size=3, environment=environment)
        assert main(["job-ended", *about, f"--exit-code={int(failure is not None)}"]) == 0
        answers.append(capsys.readouterr().out.splitlines()[-1])
    assert [attempt["micro_batch_size"] for attempt in run.attempts()] == [32, 16, 8, 4]
    assert [answer.rpartition(" ")[2] for answer in answers] == ["0", "3", "3", "finished"]
    assert run.config()["batch"]["micro_batch_size"] == 4
    fixed = tmp_path / "fixed"
    assert failure_of(train_without_memory, fixed, "--batch.micro_batch_size=4", world_size=3) is None
    assert not (fixed / "rehearsed").exists()
    assert_close_weights(run_dir, fixed)
    for found, expected in zip(exact_log(run_dir), exact_log(fixed), strict=True):
        assert found == pytest.approx(expected, rel=1e-5)


# What earlier starts tell a start of two processes under ddp: their sizes, on how many processes, and whether one of
# those was out of memory; what it tries of a share of 48, and what it says of the last that failed.
@pytest.mark.parametrize(
    ("earlier", "dropout", "size", "note"),
    [
        ([], 0, 48, None),
        ([(48, 2, True)], 0, 24, "48 did not fit (rank 1 was out of memory); trying at most 24"),
        ([(48, 2, True), (12, 2, True)], 0, 6, "12 did not fit (rank 1 was out of memory); trying at most 6"),
        ([(9, 2, True)], 0, 4, "9 did not fit (rank 1 was out of memory); trying at most 4"),
        ([(1, 2, True)], 0, 1, "1 did not fit (rank 1 was out of memory); trying it again"),
        # Other processes say nothing about memory, but masks of dropout stay.
        ([(24, 2, False), (8, 3, True)], 0, 24, None),
        ([(8, 3, True)], 0.1, 8, None),
        ([(8, 3, True), (8, 2, True)], 0.1, 4, "8 did not fit (rank 1 was out of memory); trying at most 4"),
    ],
)
def test_what_earlier_starts_tell(earlier, dropout, size, note, tmp_path):
    config = load_config(PYDOC, [AUTO, BATCH, f"--model.dropout={dropout}"])
    for micro_batch_size, world_size, is_out_of_memory in earlier:
        about = {"strategy": "ddp", "world_size": world_size, "micro_batch_size": micro_batch_size}
        attempt = claim(tmp_path / "attempts", about)
        write_ending(attempt.endings_dir, "communication", is_consequence=True)
        if is_out_of_memory:
            write_ending(attempt.endings_dir, "out_of_memory", rank=1)
    at_most, notes = largest_to_try(RunFolder(tmp_path), config, Launch("ddp", 0, 2, 2))
    assert resolve(config, 2, at_most).micro_batch_size == size
    assert notes == [f"micro_batch_size {note}"] * bool(note)


def test_the_size_divides_all_batches_that_are_to_come():
    sizes = '--batch.global_batch_size=[{"from": {"steps": 0}, "size": 36}, {"from": {"steps": 9}, "size": 96}]'
    config = load_config(PYDOC, [AUTO, sizes])
    # A checkpoint of a longer run has none to come.
    assert [resolve(config, 2, None, step).micro_batch_size for step in (0, 9, 10**9)] == [6, 48, 48]
    with pytest.raises(ConfigError, match="micro_batch_size x world_size = 1 x 5"):
        resolve(config, 5)
    assert "find the largest that fits into memory" in explain(resolve(config, 2), "p")


class Counting(torch.nn.Module):
    """Counts forward passes, in the same tensor and in a new one."""

    def __init__(self):
        super().__init__()
        for name in ("forwards", "again"):
            self.register_buffer(name, torch.zeros(()))

    def forward(self, **batch):
        self.forwards += 1
        self.again = self.again + 1
        return torch.ones(len(batch), requires_grad=True)


def test_the_rehearsal_leaves_buffers_as_they_were():
    backend = Mock(device=torch.device("cpu"), plan=Mock(max_gradient_accumulation_steps=3), model=Counting())
    rehearse_longest(load_config(PYDOC), backend)
    assert backend.backward.call_count == 2
    assert (backend.model.forwards, backend.model.again) == (0, 0)


def test_where_the_size_is_part_of_the_loss_or_must_be_known(capsys):
    assert "would choose the loss of a model with BatchNorm" in problem_of(AUTO, recipe=DIGITS)
    assert "auto may be odd" in problem_of(AUTO, "--loss.mixup_alpha=0.2", recipe=VIT_DIGITS)
    with pytest.raises(SystemExit):
        main(["verify", str(PYDOC), *tasks.SMALL, AUTO])
    assert "add --batch.micro_batch_size 8" in capsys.readouterr().err


def test_the_plan_estimates_the_largest_size_that_fits(capsys):
    def planned(size):
        words = ["--data.block_size=64", BATCH, f"--batch.micro_batch_size={size}", "--world-sizes=2"]
        assert main(["plan", str(PYDOC), *words, "--gpu-memory=4.05", "--json"]) == 0
        return capsys.readouterr().out

    estimated = json.loads(planned("auto"))
    size = estimated["micro_batch_size"]
    assert 1 < size < 48
    suggested = [json.loads(planned(each))["world_sizes"][0]["suggested"] for each in (size, 2 * size)]
    assert suggested == [estimated["world_sizes"][0]["suggested"], None]
