"""Launches that would silently train something else are refused before anything starts."""

import os
import select
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from accelerate.utils.environment import str_to_bool

from jobs import launch_environment
from largebatch.backend.launch import notes_on_stopping, read_launch
from largebatch.config import load_config
from largebatch.errors import LaunchError
from paths import DIGITS, ROOT, STRATEGIES
from processes import children_of

ZERO2 = str(ROOT / "ds_configs/zero2.json")
HSDP = {
    "ACCELERATE_USE_FSDP": "true",
    "FSDP_VERSION": "2",
    "ACCELERATE_USE_PARALLELISM_CONFIG": "true",
    "WORLD_SIZE": "12",
    "LOCAL_WORLD_SIZE": "4",
}


@pytest.fixture(autouse=True)
def _repository_root(monkeypatch):
    monkeypatch.chdir(ROOT)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_shipped_accelerate_configs(strategy):
    launch = read_launch(launch_environment(strategy, world_size=4) | {"RANK": "3"})
    assert (launch.strategy, launch.rank, launch.world_size, launch.local_world_size) == (strategy, 3, 4, 4)


def test_states_that_are_offloaded_are_on_the_host():
    offloaded = read_launch(launch_environment("zero3_offload", world_size=2))
    assert offloaded.strategy == "zero3"
    zero = offloaded.deepspeed_config["zero_optimization"]
    assert [zero[f"offload_{what}"]["device"] for what in ("param", "optimizer")] == ["cpu", "cpu"]


@pytest.mark.parametrize(
    ("environment", "words"),
    [
        # `distributed_type: MULTI_CPU` starts one process; `use_cpu: true` with FSDP lets each think it is alone.
        ({"ACCELERATE_USE_CPU": "True", "MASTER_ADDR": "127.0.0.1"}, "use_cpu: true"),
        (
            {"ACCELERATE_USE_CPU": "False", "MASTER_ADDR": "127.0.0.1"},
            "a distributed_type that is none of MULTI_GPU, FSDP, DEEPSPEED, so each process would train alone",
        ),
        # Tasks of srun or mpirun, without a launcher in between.
        ({"SLURM_STEP_NUM_TASKS": "8"}, "8 tasks were started"),
        ({"OMPI_COMM_WORLD_SIZE": "2"}, "2 tasks were started"),
        # With it, dropout masks of the recomputation and BatchNorm's statistics were seen to differ.
        ({"FSDP_ACTIVATION_CHECKPOINTING": "true"}, "set compute.activation_checkpointing in the recipe"),
        ({"FSDP_OFFLOAD_PARAMS": "True"}, "fsdp_offload_params"),
        (
            {"FSDP_AUTO_WRAP_POLICY": "SIZE_BASED_WRAP"},
            "fsdp_auto_wrap_policy: SIZE_BASED_WRAP; remove it; the model's",
        ),
        ({"FSDP_TRANSFORMER_CLS_TO_WRAP": "GPT2Block"}, "name the blocks in the model's _no_split_modules"),
        ({"ACCELERATE_DYNAMO_BACKEND": "INDUCTOR"}, "dynamo_backend"),
        ({"ACCELERATE_USE_PARALLELISM_CONFIG": "true"}, "parallelism_config"),
        ({**HSDP, "PARALLELISM_CONFIG_TP_SIZE": "2"}, "parallelism_config_tp_size: 2; remove it; largebatch supports"),
        ({**HSDP, "PARALLELISM_CONFIG_DP_REPLICATE_SIZE": "2"}, "parallelism_config_dp_replicate_size: 2; remove it"),
        ({**HSDP, "LARGEBATCH_SHARD_SIZE": "eight"}, "LARGEBATCH_SHARD_SIZE is 'eight', not a whole number"),
        # No divisor of 12, partly on another node, and not a group.
        *(({**HSDP, "LARGEBATCH_SHARD_SIZE": size}, "LARGEBATCH_SHARD_SIZE to one of 2, 4, 12, or") for size in "861"),
        *(({**HSDP, name: "x"}, f"{name} is 'x', not a whole number") for name in ("RANK", "WORLD_SIZE")),
        *(({**HSDP, name: "0"}, f"{name} 0.* contradict each other") for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE")),
        ({**HSDP, "RANK": "12"}, "RANK 12, WORLD_SIZE 12 and LOCAL_WORLD_SIZE 4 contradict each other; unset"),
        ({"ACCELERATE_MIXED_PRECISION": "bf16"}, "mixed_precision: bf16; remove it; set precision in the recipe"),
        ({"ACCELERATE_GRADIENT_ACCUMULATION_STEPS": "4"}, "gradient_accumulation_steps: 4; remove it"),
        ({"ACCELERATE_GRADIENT_CLIPPING": "1.0"}, "set optimizer.clip_norm in the recipe"),
        ({"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "1"}, "write fsdp_version: 2"),
        ({"ACCELERATE_USE_DEEPSPEED": "true"}, "without a deepspeed_config_file"),
        (
            {"ACCELERATE_USE_DEEPSPEED": "true", "ACCELERATE_DEEPSPEED_CONFIG_FILE": "ds_configs/none.json"},
            r"DeepSpeed config 'ds_configs/none\.json' \(relative to .* cannot be read: .*No such file",
        ),
    ],
)
def test_refused(environment, words):
    with pytest.raises(LaunchError, match=words):
        read_launch(environment)


@pytest.mark.parametrize(
    ("environment", "shard_size"),
    [
        ({}, 4),
        ({"PARALLELISM_CONFIG_DP_SHARD_SIZE": "1"}, 4),
        ({"PARALLELISM_CONFIG_DP_SHARD_SIZE": "2"}, 2),
        ({"PARALLELISM_CONFIG_DP_SHARD_SIZE": "2", "LARGEBATCH_SHARD_SIZE": "12"}, 12),
        ({"WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"}, 1),
    ],
)
def test_processes_that_hsdp_shards_over(environment, shard_size):
    launch = read_launch(HSDP | environment)
    assert (launch.strategy, launch.shard_size) == ("hsdp", shard_size)


@pytest.mark.parametrize("value", ["True", "1", "yes", "on", "False", "0", "off"])
def test_forms_of_true_are_accelerates(value):
    launch = read_launch({"ACCELERATE_USE_FSDP": "1", "FSDP_VERSION": "2", "FSDP_RESHARD_AFTER_FORWARD": value})
    assert (launch.strategy, launch.reshards) == ("fsdp", str_to_bool(value, to_bool=True))


def test_when_a_strategy_can_reduce_gradients():
    ddp = {"WORLD_SIZE": "2"}
    last, each = (load_config(DIGITS, [f"--compute.reduce_gradients={when}_micro_batch"]) for when in ("last", "each"))
    assert read_launch(ddp, last).strategy == "ddp"
    assert read_launch({}, each).strategy == "single"
    with pytest.raises(LaunchError, match='but ddp has "last_micro_batch"; launch with fsdp, hsdp, zero2 or zero3, or'):
        read_launch(ddp, each)


def test_precision_that_agrees_is_accepted():
    config = load_config(DIGITS, ["--precision=bf16"])
    assert read_launch({"ACCELERATE_MIXED_PRECISION": "bf16"}, config).strategy == "single"


def test_workers_end_with_their_launcher():
    """Killed so that it can do nothing for them."""
    worker = (
        "from largebatch.backend.launch import end_with_the_launcher\n"
        "import time\n"
        "end_with_the_launcher()\n"
        "print('ready', flush=True)\n"
        "time.sleep(3600)\n"
    )
    launcher = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {worker!r}])"
    environment = os.environ | {"TORCHELASTIC_RUN_ID": "1"}
    process = subprocess.Popen([sys.executable, "-c", launcher], env=environment, stdout=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "ready\n"
    child = children_of(process.pid)[0]
    process.kill()
    process.wait()
    # At its end the worker closes its output, which it has from its launcher.
    ended = bool(select.select([process.stdout], [], [], 300)[0])
    if not ended:
        os.kill(child, signal.SIGKILL)
    process.stdout.close()
    assert ended


@pytest.mark.parametrize(
    ("environment", "is_noted"),
    [
        ({}, False),
        ({"TORCHELASTIC_RUN_ID": "1"}, True),
        ({"TORCHELASTIC_RUN_ID": "1", "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "60"}, True),
        ({"TORCHELASTIC_RUN_ID": "1", "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "1800"}, False),
    ],
)
def test_a_launcher_that_kills_processes_while_they_save(environment, is_noted, monkeypatch):
    for name in ("TORCHELASTIC_RUN_ID", "TORCH_ELASTIC_SHUTDOWN_TIMEOUT"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert ("touch 'my runs/x/stop'" in " ".join(notes_on_stopping(Path("my runs/x/stop")))) == is_noted
