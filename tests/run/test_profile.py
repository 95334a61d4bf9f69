"""A trace has the steps that the recipe names, on every process, a table says where their time went, and a run does not
depend on it."""

import gzip
import json
import os
import signal
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch.autograd import DeviceType

from jobs import JobFailed, run_job, train
from largebatch.config import load_config
from largebatch.errors import ConfigError
from largebatch.run.record.profile import time_of_steps
from largebatch.storage.files import read_json_lines
from paths import PYDOC
from resuming import EXACT, TINY_GPT

STEPS = ("--train.stop_after_steps=8", "--batch.global_batch_size=48")
PROFILE = '--logging.profile={"first_step": 3, "last_step": 5}'


def train_here(run_dir: Path, *words: str) -> None:
    train(PYDOC, *TINY_GPT, *STEPS, *words, run_dir=run_dir)


def train_until(run_dir: Path, last: int, *words: str) -> None:
    """Train, and be asked to stop in the midst of a step."""
    from largebatch.run import Run

    update = Run.update

    def update_and_stop(run, step):
        if step.index + 1 == last:
            os.kill(os.getpid(), signal.SIGUSR1)
        update(run, step)

    Run.update = update_and_stop
    train_here(run_dir, *words)


def trace(file: Path) -> list[dict]:
    return json.loads(gzip.decompress(file.read_bytes()))["traceEvents"]


def traced_steps(file: Path) -> list[int]:
    names = [event["name"] for event in trace(file) if event.get("cat") == "user_annotation"]
    return sorted(int(name.removeprefix("step ")) for name in names if name.startswith("step "))


def logged(run_dir: Path) -> list[dict]:
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return [{name: line[name] for name in EXACT} for line in lines]


@pytest.fixture(scope="module")
def traced(tmp_path_factory):
    """The folder of a run of two processes."""
    run_dir = tmp_path_factory.mktemp("traced") / "run"
    run_job(train_here, run_dir, PROFILE)
    return run_dir


@pytest.mark.slow
def test_every_process_traces_the_steps(traced):
    (attempt,) = (traced / "profile").iterdir()
    names = [f"rank_0000{rank}" for rank in (0, 1)]
    files = [f"{name}.{kind}" for name in names for kind in ("json.gz", "jsonl")]
    assert sorted(file.name for file in attempt.iterdir()) == files
    for name in names:
        assert traced_steps(attempt / f"{name}.json.gz") == [3, 4, 5]
        assert [row["step"] for row in read_json_lines(attempt / f"{name}.jsonl")] == [3, 4, 5]


@pytest.mark.slow
def test_a_step_holds_its_passes_and_its_update(traced):
    events = trace(next((traced / "profile").rglob("rank_00001.json.gz")))
    (step,) = [event for event in events if event["name"] == "step 4" and event.get("cat") == "user_annotation"]
    begin, end = float(step["ts"]), float(step["ts"]) + float(step["dur"])
    inside = {event["name"] for event in events if "ts" in event and begin <= float(event["ts"]) <= end}
    assert {"aten::embedding", "autograd::engine::evaluate_function: EmbeddingBackward0"} <= inside
    assert any(name.startswith("Optimizer.step#AdamW") for name in inside)


@pytest.mark.slow
def test_training_does_not_depend_on_it(traced, tmp_path):
    run_job(train_here, tmp_path / "run")
    assert not (tmp_path / "run/profile").exists()
    assert logged(tmp_path / "run") == logged(traced)


@pytest.mark.slow
def test_a_run_that_is_stopped_and_goes_on(tmp_path):
    """Each start traces its own steps of the window, and writes over nothing."""
    run_dir, profile = tmp_path / "run", '--logging.profile={"first_step": 2, "last_step": 8}'
    with pytest.raises(JobFailed, match="75"):
        run_job(train_until, run_dir, 3, profile)
    run_job(train_here, run_dir, profile)
    first, second = sorted((run_dir / "profile").iterdir())
    steps = [traced_steps(attempt / "rank_00000.json.gz") for attempt in (first, second)]
    assert steps[0][0] == 2
    assert steps[0] + steps[1] == [2, 3, 4, 5, 6, 7, 8]
    tables = [read_json_lines(attempt / "rank_00000.jsonl") for attempt in (first, second)]
    assert [[row["step"] for row in rows] for rows in tables] == steps


@pytest.mark.slow
def test_a_disk_that_takes_no_trace(tmp_path):
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    run_job(train_without_room, run_dir, PROFILE)
    assert json.loads((run_dir / "status.json").read_text())["outcome"] == "finished"
    assert not (run_dir / "profile").is_dir()


def train_without_room(run_dir: Path, *words: str) -> None:
    """Train, with a file where the folder of traces would be."""
    from largebatch.run import Run

    prepare = Run.prepare

    def prepare_and_block(run, *arguments):
        prepared = prepare(run, *arguments)
        (run_dir / "profile").touch()
        return prepared

    Run.prepare = prepare_and_block
    train_here(run_dir, *words)


@pytest.mark.parametrize(
    ("profile", "problem"),
    [
        ('{"first_step": 5, "last_step": 4}', "last_step 4 is before first_step; write 5 or more"),
        ('{"first_step": 1, "last_step": 9}', "9 is after the run's last step; write at most 8"),
        ('{"first_step": 0, "last_step": 9}', "logging.profile.first_step"),
    ],
)
def test_steps_that_are_none(profile, problem):
    with pytest.raises(ConfigError, match=problem):
        load_config(PYDOC, ["--train.stop_after_steps=8", f"--logging.profile={profile}"])


# --- the table --------------------------------------------------------------------------------------------------------

COLUMNS = ("compute", "exposed_communication", "data_wait", "host")


def event(name: str, start: float, end: float, device=DeviceType.CPU, is_range=False) -> SimpleNamespace:
    """As the profiler gives it, but in seconds."""
    span = SimpleNamespace(start=start * 1e6, end=end * 1e6)
    return SimpleNamespace(name=name, time_range=span, device_type=device, is_user_annotation=is_range)


RANGES = [
    event("step 7", 0, 10),
    event("step 8", 10, 16),
    event("data_wait", 0, 2),
    # An evaluation, with samples of its own.
    event("training is paused", 13, 15),
    event("step up", 1, 2),
]


def test_communication_that_kernels_hide_is_not_exposed():
    on_gpu = [
        event("step 7", 0, 10, DeviceType.CUDA, is_range=True),
        event("aten::mm", 9, 10),
        event("nccl:all_reduce", 3, 4, is_range=True),
        event("Memcpy HtoD (Pinned -> Device)", 0, 10, DeviceType.CUDA),
        event("sm90_gemm", 1, 5, DeviceType.CUDA),
        event("elementwise", 4, 6, DeviceType.CUDA),
        event("ncclDevKernel_AllReduce_Sum_f32_RING_LL", 4, 8, DeviceType.CUDA),
        event("ncclDevKernel_AllReduce_Sum_f32_RING_LL", 7, 9, DeviceType.CUDA),
        event("sm90_gemm", 11, 14, DeviceType.CUDA),
    ]
    first, second = time_of_steps([*RANGES, *on_gpu], on_gpu=True)
    assert first == {
        "step": 7,
        "seconds": 10,
        "compute": 5,
        "exposed_communication": 3,
        "data_wait": 1,
        "host": 1,
    }
    assert second == {"step": 8, "seconds": 4, "compute": 2, "exposed_communication": 0, "data_wait": 0, "host": 2}


def test_on_the_cpu_samples_are_made_by_operations_too():
    on_cpu = [
        event("aten::stack", 0.5, 1),
        event("autograd::engine::evaluate_function: AddmmBackward0", 0, 10),
        event("aten::linear", 3, 5),
        event("aten::addmm", 3.5, 4.5),
        event("gloo:all_reduce", 4, 8, is_range=True),
        event("aten::add", 15, 15.5),
    ]
    first, second = time_of_steps([*RANGES, *on_cpu], on_gpu=False)
    assert first == {"step": 7, "seconds": 10, "data_wait": 2, "compute": 2, "exposed_communication": 3, "host": 3}
    assert second == {"step": 8, "seconds": 4, "data_wait": 0, "compute": 0.5, "exposed_communication": 0, "host": 3.5}


def train_with_waits(run_dir: Path) -> float:
    """Rank 1 waits for samples in step 3 and comes late to a collective in step 4; rank 0's host sleeps in step 5.

    Returns the process's peak of memory in GiB, before the last step is logged.
    """
    from largebatch.data.text import TokenBlocks
    from largebatch.run import Run
    from largebatch.run.step import Step

    fetch, backward, update = TokenBlocks.fetch, Step.backward, Run.update
    rank, current, peak = int(os.environ["RANK"]), [0], [0.0]

    def slow_fetch(source, indices, epoch):
        if rank == 1 and current[0] == 3 and epoch is not None:
            time.sleep(0.1)
        return fetch(source, indices, epoch)

    def slow_backward(step, loss_sum):
        current[0] = step.index + 1
        if rank == 0 and current[0] == 5:
            time.sleep(0.1)
        backward(step, loss_sum)

    def late_update(run, step):
        if current[0] == 4:
            wait_for_the_late(run_dir / "rank 0 waits", rank)
        lines = Path("/proc/self/status").read_text().splitlines()
        peak[0] = next(int(line.split()[1]) / 2**20 for line in lines if line.startswith("VmHWM:"))
        update(run, step)

    TokenBlocks.fetch, Step.backward, Run.update = slow_fetch, slow_backward, late_update
    train_here(run_dir, PROFILE, "--data.samples=blocks", "--logging.peak_tflops=1e-6")
    return peak[0]


def wait_for_the_late(file: Path, rank: int) -> None:
    """A collective to which rank 1 comes 0.5 s after rank 0."""
    if rank == 1:
        while not file.exists():
            time.sleep(0.01)
        time.sleep(0.5)
    work = torch.distributed.all_reduce(torch.ones(1), async_op=True)
    if rank == 0:
        file.touch()
    work.wait()


@pytest.mark.slow
def test_planted_waits_are_in_their_columns(tmp_path):
    """Only from below, because other programs may make everything slower."""
    run_dir = tmp_path / "run"
    peaks = run_job(train_with_waits, run_dir)
    lines = {line["step"]: line for line in read_json_lines(run_dir / "metrics.jsonl")}
    (attempt,) = (run_dir / "profile").iterdir()
    ranks = [{row["step"]: row for row in read_json_lines(attempt / f"rank_0000{rank}.jsonl")} for rank in (0, 1)]
    # The sixth micro-batch of a step is fetched in it before the step is known.
    assert ranks[1][3]["data_wait"] >= 0.49
    assert lines[3]["data_wait_seconds"] >= 0.49
    assert ranks[0][4]["exposed_communication"] >= 0.4
    assert ranks[1][4]["host"] >= 0.49
    assert ranks[0][5]["host"] >= 0.59
    for rows in ranks:
        for step, row in rows.items():
            assert sum(row[column] for column in COLUMNS) == pytest.approx(row["seconds"], abs=1e-5)
            assert min(row[column] for column in COLUMNS) >= 0
            # The same operations per sample as in a logged line, of 48 samples.
            per_sample = lines[step]["mfu"] / lines[step]["samples_per_second"]
            assert row["mfu"] == pytest.approx(per_sample * 48 / row["seconds"], rel=1e-3)
    assert 0.8 * max(peaks) < lines[8]["peak_memory_gib"] <= max(peaks) * 1.05
