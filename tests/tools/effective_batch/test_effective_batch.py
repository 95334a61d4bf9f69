"""`largebatch effective-batch`: what is printed, refused, and shown in the README."""

import json
import shlex

import pytest

from largebatch.tools.command_line import main


@pytest.fixture
def ask(capsys):
    """The words after the subcommand; gives exit code, output and errors."""

    def ask(words):
        code = main(["effective-batch", *shlex.split(words)])
        printed = capsys.readouterr()
        return code, printed.out, printed.err

    return ask


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (
            "--from ddp --batch-size 64 --split-batches --nodes 2 --devices 4",
            "effective batch 8 per process x 2 nodes x 4 devices x accumulation 1 = 64",
        ),
        (
            "--from lightning --batch-size 7 --devices 8 --nodes 10",
            "effective batch 7 per process x 10 nodes x 8 devices x accumulation 1 = 560",
        ),
        (
            "--from dp --batch-size 7 --devices 8",
            "effective batch 7 in one process, shared by its 8 devices, x accumulation 1 = 7",
        ),
        ("--from parameter-server --batch-size 7 --devices 8", "effective batch 7 per worker x accumulation 1 = 7"),
        (
            "--from ddp --batch-size 8 --devices 4 --loss sum",
            "loss            a sum over the samples of a backward pass: gradients are 4 times smaller than in one "
            "process on the same samples",
        ),
        (
            "--from ddp --batch-size 8 --accumulation 4",
            "loss            a mean over the samples of a backward pass; divided by the accumulation, 4 (assumed; "
            "the script must do it itself)",
        ),
        (
            "--from ddp --batch-size 8 --devices 4",
            "gradients       are summed over 4 processes and divided by 4: averaged",
        ),
        (
            "--from horovod --batch-size 8 --devices 4 --gradients sum",
            "gradients       are summed over 4 processes and not divided",
        ),
        (
            "--from dp --batch-size 10 --devices 4",
            "each process    loads 10 samples per backward pass and hands them to its devices: 3 + 3 + 3 + 1",
        ),
        (
            "--from ddp --batch-size 256 --nodes 2 --to-global-batch-size 1024 --scaling linear --lr 0.1",
            "learning rate   0.1 x 1024 / 512 = 0.2, by the linear rule",
        ),
        (
            "--from ddp --batch-size 256 --nodes 2 --to-global-batch-size 1024 --scaling linear --lr 0.1",
            "                in the recipe, write the rate before scaling: learning_rate.base_lr 0.1, "
            'learning_rate.reference_batch_size 512, learning_rate.scaling "linear"',
        ),
        (
            "--from ddp --batch-size 256 --nodes 2 --to-global-batch-size 1024 --scaling sqrt",
            "learning rate   the script's x sqrt(1024 / 512) = x 1.41421, by the square-root rule",
        ),
        (
            "--from ddp --batch-size 256 --nodes 2 --to-global-batch-size 1024 --scaling none --lr 0.1",
            "learning rate   0.1, because it is not scaled",
        ),
        ("--from ddp --batch-size 256 --lr 0.1", "learning rate   0.1, because the batch is the same"),
        (
            "--from ddp --batch-size 256 --nodes 2 --to-global-batch-size 1024 --scaling none --micro-batch-size 64",
            "recipe          batch.global_batch_size 1024, batch.micro_batch_size 64; accumulation is 8 on 2 processes",
        ),
    ],
)
def test_lines(ask, words, line):
    code, output, errors = ask(words)
    assert (code, errors) == (0, "")
    assert line in output.splitlines()


def test_a_sum_needs_another_learning_rate_of_sgd(ask):
    """One step of SGD on the sum / processes there, and on the mean here, by hand: lr x 24 / 3 = lr x 8."""
    _, output, _ = ask("--from ddp --batch-size 8 --devices 3 --loss sum --lr 0.01")
    assert (
        "8 times as large as the recipe's, which are means: for SGD, the rate x 8 = 0.08 and the weight decay / 8"
        in output
    )


def test_json(ask):
    words = "--from hf-trainer --batch-size 4 --devices 8 --nodes 2 --accumulation 2 --lr 3e-4 --json"
    code, output, _ = ask(words + " --to-global-batch-size 512 --scaling sqrt --loss sum")
    assert code == 0
    answer = json.loads(output)
    assert answer["script"]["effective_batch_size"] == 128
    assert answer["script"]["gradients"] == "average"
    assert answer["recipe"]["global_batch_size"] == 512
    assert answer["recipe"]["accumulation"] == 8
    assert answer["recipe"]["learning_rate"] == pytest.approx(6e-4)
    assert answer["recipe"]["learning_rate_of_sgd"] == pytest.approx(24e-4)


def test_files(ask, tmp_path):
    deepspeed = tmp_path / "ds.json"
    deepspeed.write_text(json.dumps({"train_batch_size": 64, "gradient_accumulation_steps": 2}))
    _, output, _ = ask(f"{deepspeed} --devices 8")
    assert output.startswith("effective batch 4 per process x 1 node x 8 devices x accumulation 2 = 64\n")

    trainer = tmp_path / "training_args.json"
    content = {"per_device_train_batch_size": 16, "learning_rate": 1e-4, "accelerator_config": {"split_batches": True}}
    trainer.write_text(json.dumps(content))
    _, output, _ = ask(f"{trainer} --from hf-trainer --devices 8")
    assert output.startswith("effective batch 2 per process x 1 node x 8 devices x accumulation 1 = 16\n")
    assert "learning rate   0.0001, because" in output
    _, output, _ = ask(f"{trainer} --devices 8 --lr 0.5")
    assert "learning rate   0.5, because" in output

    for words in ("--batch-size 4", "--accumulation 2", "--split-batches", "--gradients average"):
        code, output, errors = ask(f"{trainer} {words}")
        assert (code, output) == (2, "")
        assert errors == f"error: {words.split()[0]}: {trainer} already says that; remove one of them\n"
    code, _, errors = ask(f"{trainer} --from deepspeed")
    assert (code, errors) == (2, f"error: --from deepspeed: {trainer} is for hf-trainer; remove --from\n")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--batch-size 8", "--from is missing; add it, or give a DeepSpeed JSON"),
        ("--from ddp", "--batch-size is missing; add it, or"),
        ("--from ddp --batch-size 8 --to-global-batch-size 16", "add --scaling linear (SGD), sqrt (Adam) or none"),
        ("--from ddp --batch-size 8 --world-size 3", "global_batch_size 8 is not a multiple of micro_batch_size"),
        ("--from ddp --batch-size 9 --devices 2 --split-batches", "nearest: 8, 10; or remove --split-batches"),
    ],
)
def test_refused_with_what_to_write(ask, words, message):
    code, output, errors = ask(words)
    assert (code, output) == (2, "")
    assert message in errors


@pytest.mark.parametrize("words", ["--lr 0", "--lr x", "--batch-size 0", "--from mpi"])
def test_options_of_no_sense_are_refused(ask, words):
    with pytest.raises(SystemExit) as caught:
        ask(words)
    assert caught.value.code == 2
