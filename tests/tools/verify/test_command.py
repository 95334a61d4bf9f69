"""The command `largebatch verify`: its table and exit code, and what it refuses."""

import pytest

from largebatch.backend.launch import read_launch
from largebatch.tools.plan.accelerate_configs import is_rehearsed, rehearsal_environment
from paths import ACCELERATE_CONFIGS, IMAGENET, PYDOC
from tasks import TINY
from verifying import verify


@pytest.mark.slow
def test_the_command(capfd):
    words = ["--strategies=ddp", "--world-sizes=2", "--micro-batch-sizes=2", "--steps=3"]
    code, output, errors = verify(capfd, str(PYDOC), *words, *TINY)
    assert code == 0, errors
    # A warmup and a decay need more steps than these.
    assert output.startswith("gpt_pydoc: 3 steps of ")
    assert ", 1 combination and a resumed run, each against one process\n" in output
    assert output.count("--train.duration=") == output.count(""" '--train.duration={"steps": 4}' """) == 1
    assert "2 of 2 combinations agree with one process" in output
    rows = [line.split() for line in output.split("verdict\n")[1].partition("\n\n")[0].splitlines()]
    assert [" ".join(row[10:]) for row in rows] == [
        "reference",
        "agrees",
        "agrees, resumed halfway from a checkpoint of one process",
    ]
    assert "Allowed are 1e-05, 0.0001 for the gradient norm, 0.01 for the update" in output
    assert float(rows[1][3]) <= 1e-5
    assert errors == ""


def test_hsdp_is_verified_on_two_groups_of_two_or_more(monkeypatch):
    assert [size for size in range(1, 9) if is_rehearsed("hsdp", size)] == [4, 6, 8]
    assert all(is_rehearsed("fsdp", size) for size in range(1, 9))
    config = ACCELERATE_CONFIGS["hsdp"]
    sizes = [read_launch(rehearsal_environment(config, size)).shard_size for size in (1, 2, 3, 4, 8)]
    assert sizes == [1, 2, 3, 2, 2]
    monkeypatch.setenv("LARGEBATCH_SHARD_SIZE", "4")
    assert "LARGEBATCH_SHARD_SIZE" not in rehearsal_environment(config, 8)


@pytest.mark.slow
def test_the_command_with_tiny_data_instead_of_a_hubs(capfd):
    words = ["--tiny-data", "--strategies=ddp", "--world-sizes=2", "--steps=2", "--no-resume"]
    gpt2 = str(PYDOC.with_name("gpt2_124m.json"))
    code, output, errors = verify(capfd, gpt2, *words, "--batch.global_batch_size=16")
    assert code == 0, errors
    # What is given on the command line counts more.
    changes = output.split("the recipe is changed by ")[1]
    assert changes.index('--batch={"global_batch_size": 32') < changes.index("--batch.global_batch_size=16")
    assert "--model.vocab_size=" in changes
    assert ", 2 combinations, each against one process\n" in output
    assert "2 of 2 combinations agree" in output


def test_a_small_batch_of_tiny_data_is_not_held_against_the_warmup_of_the_recipes_own(refusal_of):
    batch = '--batch={"global_batch_size": 16, "micro_batch_size": 8}'
    error = refusal_of("verify", IMAGENET.with_stem("resnet50_imagenet_32k"), "--tiny-data", "--world-sizes=3", batch)
    assert "16 is not a multiple of micro_batch_size x world_size = 8 x 3 = 24" in error


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            "--world-sizes=1,3",
            "global_batch_size 32 is not a multiple of micro_batch_size x world_size = 8 x 3 = 24",
        ),
        ("--strategies=,", "the list is empty"),
        ('--debug_model={"hidden_sise":8}', "model.hidden_sise: unknown key, did you mean hidden_size?"),
        ("--world-sizes=0", "'0' is not a positive whole number"),
        ("--strategies=ddp,zero4", "zero4.yaml; known: ddp, fsdp, hsdp, zero1, zero2, zero3"),
        ("--batch.micro_batch_size=5", "32 is not a multiple of batch.micro_batch_size 5; nearest: 30, 35"),
    ],
)
def test_the_command_refuses_before_anything_starts(words, message, refusal_of):
    assert message in refusal_of("verify", PYDOC, *words.split())
