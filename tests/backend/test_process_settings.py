"""What joining a job sets in its process: limits, timeouts, and which kernels may be used."""

import os
import resource
from datetime import timedelta

import pytest

from jobs import run_job, train_in_job
from largebatch.backend import start as module
from largebatch.errors import LaunchError
from paths import DIGITS, PYDOC


@pytest.mark.parametrize(("current", "after"), [(256, 774), (800, 800)])
def test_the_limit_on_open_files_is_raised_to_what_is_needed(current, after):
    """3 connections with each of 2 processes, and 768 others."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (current, before[1]))
        module._allow_open_files(2)
        assert resource.getrlimit(resource.RLIMIT_NOFILE) == (after, before[1])
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


@pytest.mark.parametrize(("world_size", "fits"), [(426, True), (427, False)])
def test_too_low_a_limit_is_refused_before_processes_connect(world_size, fits, monkeypatch):
    """2,048 files are 3 connections with each of 426 processes, 768 others, and 2 to spare."""
    monkeypatch.setattr(resource, "getrlimit", lambda _: (4, 2048))
    monkeypatch.setattr(resource, "setrlimit", lambda *_: None)
    if fits:
        module._allow_open_files(world_size)
        return
    with pytest.raises(
        LaunchError, match=r"may open 2048 files here \(ulimit -Hn\), but each of 427 .* needs about 2049"
    ):
        module._allow_open_files(world_size)


def settings_of_a_run(folder, hang_seconds, deterministic, samples):
    """The timeouts of the process groups, and the settings of the process."""
    import torch
    from torch import distributed

    from largebatch.config import load_config
    from largebatch.run import Run, RunOptions

    words = [f"--faults.hang_seconds={hang_seconds}", f"--compute.deterministic={deterministic}", *samples]
    run = Run(load_config(PYDOC, words), RunOptions(folder))
    groups = [distributed.group.WORLD, run.backend.processes._host_group]
    names = (
        "TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC",
        "TORCH_FR_BUFFER_SIZE",
        "CUBLAS_WORKSPACE_CONFIG",
        "NCCL_ALGO",
        "NCCL_PROTO",
    )
    return (
        [group._get_backend(torch.device("cpu")).options._timeout for group in groups],
        [os.environ.get(name) for name in names],
        torch.are_deterministic_algorithms_enabled(),
        torch.backends.cuda.cudnn_sdp_enabled(),
    )


# Samples of different lengths, for which cuDNN's attention may not be used.
DOCUMENTS = ("--data.samples=documents", "--data.num_train_samples=2000")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("strategy", "hang_seconds", "deterministic", "timeout", "settings"),
    [
        ("ddp", "30", "false", timedelta(seconds=120), ["120", "2000", None, None, None]),
        ("zero1", "null", "true", timedelta(days=2), ["172800", "2000", ":4096:8", "Ring", "Simple"]),
    ],
)
def test_settings(strategy, hang_seconds, deterministic, timeout, settings, tmp_path):
    """Without a limit NCCL's own would be 10 minutes."""
    samples = DOCUMENTS if deterministic == "true" else ()
    for timeouts, environment, is_deterministic, uses_cudnn in run_job(
        settings_of_a_run, tmp_path / "run", hang_seconds, deterministic, samples, strategy=strategy
    ):
        assert uses_cudnn == (not samples)
        assert timeouts == [timeout, timedelta(days=2)]
        assert environment == settings
        assert is_deterministic == (deterministic == "true")


@pytest.mark.slow
@pytest.mark.parametrize("recipe", [DIGITS, PYDOC], ids=lambda path: path.stem)
def test_recipes_use_no_operation_without_a_deterministic_kernel(recipe, tmp_path):
    words = ("--compute.deterministic=true", "--train.stop_after_steps=2")
    train_in_job(recipe, tmp_path / "run", *words, strategy="single")
