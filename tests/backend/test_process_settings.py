"""What joining a job sets in its process: limits, timeouts, and which kernels may be used."""

import os
import resource
from datetime import timedelta

import pytest

from jobs import run_job, train_in_job
from largebatch.backend import start as module
from largebatch.errors import LaunchError
from paths import ADDITION, DIGITS, PYDOC


def test_the_limit_on_open_files_is_raised():
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (256, before[1]))
        module._allow_open_files()
        assert resource.getrlimit(resource.RLIMIT_NOFILE) == (before[1], before[1])
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


def settings_of_a_run(folder, recipe, hang_seconds, deterministic):
    """The timeouts of the process groups, and the settings of the process."""
    import torch
    from torch import distributed

    from largebatch.config import load_config
    from largebatch.run import Run, RunOptions

    words = [f"--faults.hang_seconds={hang_seconds}", f"--compute.deterministic={deterministic}"]
    run = Run(load_config(recipe, words), RunOptions(folder))
    groups = [distributed.group.WORLD, run.backend._host_group]
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


@pytest.mark.slow
@pytest.mark.parametrize(
    ("strategy", "hang_seconds", "deterministic", "timeout", "settings"),
    [
        ("ddp", "30", "false", timedelta(seconds=120), ["120", "2000", None, None, None]),
        ("zero1", "null", "true", timedelta(days=2), ["172800", "2000", ":4096:8", "Ring", "Simple"]),
    ],
)
def test_settings(strategy, hang_seconds, deterministic, timeout, settings, run_dir):
    """Without a limit NCCL's own would be 10 minutes. For sums, which have different lengths, cuDNN's attention may not
    be used."""
    recipe = ADDITION if deterministic == "true" else PYDOC
    for timeouts, environment, is_deterministic, uses_cudnn in run_job(
        settings_of_a_run, run_dir, recipe, hang_seconds, deterministic, strategy=strategy
    ):
        assert uses_cudnn == (recipe == PYDOC)
        assert timeouts == [timeout, timedelta(days=2)]
        assert environment == settings
        assert is_deterministic == (deterministic == "true")


def where_others_are_not_found(folder, name, value):
    from largebatch import run
    from largebatch.config import load_config

    os.environ[name] = value
    with pytest.raises(LaunchError) as caught:
        run.Run(load_config(DIGITS), run.RunOptions(folder))
    return str(caught.value)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "value", "problem"),
    [
        ("MASTER_ADDR", "", "WORLD_SIZE or LOCAL_RANK is set, but not both MASTER_ADDR and MASTER_PORT"),
        ("MASTER_PORT", "abc", "MASTER_PORT is 'abc', not a whole number"),
    ],
)
def test_a_place_to_meet_that_is_none(name, value, problem, run_dir):
    for told in run_job(where_others_are_not_found, run_dir, name, value):
        assert told.startswith(problem)


@pytest.mark.slow
def test_recipes_use_no_operation_without_a_deterministic_kernel(run_dir):
    words = ("--compute.deterministic=true", "--train.stop_after_steps=2")
    train_in_job(DIGITS, run_dir, *words, strategy="single")
