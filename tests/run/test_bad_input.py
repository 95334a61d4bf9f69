"""Jobs that cannot run: one message, exit code 2, no traceback, nothing left behind."""

import errno
import json
import os
from functools import partial

import pytest
import torch

import tasks
from jobs import JobFailed, failure_of, run_job, train
from largebatch.errors import DataError
from largebatch.storage.layout import MANIFEST, MARKER, folder_name
from paths import PYDOC
from tasks import SMALL

pytestmark = pytest.mark.slow


def test_tracker_that_is_not_installed(run_dir):
    words = (*SMALL, '--logging.trackers=["wandb"]')
    report = failure_of(partial(train, run_dir=run_dir), PYDOC, *words)
    assert "logging.trackers: wandb is not installed" in report
    assert "exit code 2" in report
    assert "Traceback" not in report
    assert report.count("error: ") == 1


def alone_in_a_job_of_two(run_dir):
    """What Accelerate does with `use_cpu` and FSDP: each process takes itself for the only one."""
    from accelerate.state import DistributedType, PartialState

    from largebatch.backend import fsdp

    alone = (None, DistributedType.NO)
    fsdp.rehearse_fsdp_on_cpu = lambda: setattr(PartialState, "_prepare_backend", lambda *_, **__: alone)
    train(PYDOC, *SMALL, run_dir=run_dir)


def test_processes_that_do_not_see_each_other(run_dir):
    with pytest.raises(JobFailed, match="2 processes were launched, but this one sees 1: each would train alone"):
        run_job(alone_in_a_job_of_two, run_dir, strategy="fsdp")
    assert not run_dir.exists()


def different_configs(run_dir):
    train(PYDOC, *SMALL, f"--seed={os.environ['RANK']}", run_dir=run_dir)


def test_machines_with_different_configs(run_dir):
    with pytest.raises(JobFailed, match="the config differs from rank 0's on rank 1; launch all ranks"):
        run_job(different_configs, run_dir)
    assert not run_dir.exists()


def one_sees_a_checkpoint_late(run_dir):
    own = run_dir / os.environ["RANK"]
    if own.name == "0":
        checkpoint = own / "checkpoints" / folder_name(2)
        checkpoint.mkdir(parents=True)
        (own / "config.json").write_text("{}")
        (checkpoint / MANIFEST).write_text("{}")
        (checkpoint / MARKER).write_text(
            json.dumps({"step": 2, "files": {MANIFEST: {"size": 2, "checksum": "not read"}}})
        )
    sizes = '--batch.global_batch_size=[{"from": {"steps": 0}, "size": 64}, {"from": {"steps": 2}, "size": 32}]'
    train(PYDOC, *SMALL, sizes, run_dir=own)


def test_machines_with_different_plans_are_tried_again(run_dir):
    """The most micro-batches of a step follow from the batches that are to come."""
    with pytest.raises(JobFailed, match=r"the plan differs from rank 0's on rank 1, .* the same command tries again"):
        run_job(one_sees_a_checkpoint_late, run_dir)


def different_shard_sizes(run_dir):
    os.environ["LARGEBATCH_SHARD_SIZE"] = "2" if os.environ["RANK"] in ("0", "1") else "4"
    train(PYDOC, *SMALL, run_dir=run_dir)


def test_nodes_with_different_numbers_of_shards(run_dir):
    with pytest.raises(JobFailed, match="it differs from rank 0's on rank 2, 3; by default,"):
        run_job(different_shard_sizes, run_dir, strategy="hsdp", world_size=4)


def block_left_out_of_the_last_micro_batch(run_dir):
    """In the second step, so that each weight has had a gradient in the first."""
    from transformers.models.gpt2.modeling_gpt2 import GPT2Block

    from largebatch.backend.fsdp import FsdpBackend

    are_last = []
    mark = FsdpBackend.mark_micro_step
    forward = GPT2Block.forward

    def mark_and_count(backend, is_last):
        are_last.append(is_last)
        mark(backend, is_last)

    def in_all_but_one(block, inputs, *arguments, **options):
        is_left_out = are_last == [False, True, False, True]
        return inputs.clone() if is_left_out else forward(block, inputs, *arguments, **options)

    FsdpBackend.mark_micro_step = mark_and_count
    GPT2Block.forward = in_all_but_one
    train(PYDOC, *SMALL, "--batch.micro_batch_size=4", "--train.stop_after_steps=2", run_dir=run_dir)


@pytest.mark.skipif(torch.__version__ >= (2, 15), reason="torch 2.15 reduces them")
def test_gradients_that_hsdp_would_sum_in_the_next_step(run_dir):
    with pytest.raises(JobFailed, match="a part of the model got gradients from an earlier micro-batch of this step"):
        run_job(block_left_out_of_the_last_micro_batch, run_dir, strategy="hsdp", world_size=4)


def data_missing_on_one_machine(run_dir, error):
    """Rank 1 stands for a second machine, whose copy of the data is not there."""
    from accelerate import Accelerator

    data = tasks.module("causal_lm", "data")
    blocks = data.tokenized_samples

    def missing(*given):
        if os.environ["RANK"] == "1":
            raise error
        return blocks(*given)

    data.tokenized_samples = missing
    Accelerator.is_local_main_process = True
    train(PYDOC, *SMALL, run_dir=run_dir)


@pytest.mark.parametrize(
    ("error", "message", "code"),
    [
        (DataError("the file is missing here"), "the file is missing here", 2),
        (OSError(errno.ESTALE, "Stale file handle"), "OSError: [Errno 116] Stale file handle; the same command", 74),
    ],
)
def test_an_error_of_one_process_ends_all_of_them(error, message, code, run_dir):
    """The others must not wait for it, nor fail with its absence."""
    report = failure_of(data_missing_on_one_machine, run_dir, error)
    assert report.count(f"error: on rank 1: {message}") == 1
    assert f": exit code {code}\n" in report
    assert "Traceback" not in report


def train_beside_secret_checkpoints(run_dir):
    """As for another user than the one who trained with umask 077."""
    from largebatch.run import resume

    def refuse(folder):
        raise PermissionError(errno.EACCES, "Permission denied", str(folder))

    resume.entries = refuse
    train(PYDOC, *SMALL, run_dir=run_dir)


def test_checkpoints_that_cannot_be_read(tmp_path):
    (tmp_path / "config.json").touch()
    report = failure_of(train_beside_secret_checkpoints, tmp_path)
    assert report.count("error: on rank 0: ") == 1
    assert "Permission denied" in report
    assert "choose another run folder" in report
    assert ": exit code 2\n" in report
