"""Files of DeepSpeed and of the HF Trainer are read as these read them."""

import json

import pytest
from deepspeed.runtime.config import DeepSpeedConfig
from transformers import TrainingArguments

from largebatch.errors import UserError
from largebatch.tools.effective_batch.other_configs import read_config
from largebatch.tools.effective_batch.other_frameworks import OtherBatch


@pytest.fixture
def write(tmp_path):
    def write(content):
        path = tmp_path / "config.json"
        path.write_text(content if isinstance(content, str) else json.dumps(content))
        return path

    return write


@pytest.fixture
def complete(monkeypatch):
    """DeepSpeed's own reading of a config, told that there are so many processes."""

    def complete(content, processes):
        monkeypatch.setattr("deepspeed.comm.get_rank", lambda: 0)
        monkeypatch.setattr("deepspeed.comm.get_world_size", lambda: processes)
        return DeepSpeedConfig(dict(content))

    return complete


TRAIN, MICRO, ACCUMULATION = "train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"


@pytest.mark.parametrize(
    ("content", "processes"),
    [
        ({TRAIN: 64, MICRO: 4, ACCUMULATION: 2}, 8),
        ({TRAIN: 64, MICRO: 4}, 8),
        ({TRAIN: 64, ACCUMULATION: 4}, 8),
        ({MICRO: 4, ACCUMULATION: 2}, 8),
        ({TRAIN: 64}, 8),
        ({MICRO: 4}, 8),
        ({MICRO: 4, TRAIN: 12}, 3),
    ],
)
def test_deepspeed_completes_the_same(write, complete, content, processes):
    truth = complete(content, processes)
    said = read_config(write(content), processes)
    assert said.framework == "deepspeed"
    assert said.batch_size == truth.train_micro_batch_size_per_gpu
    assert said.accumulation == truth.gradient_accumulation_steps
    there = OtherBatch("deepspeed", said.batch_size, processes, accumulation=said.accumulation)
    assert there.global_batch_size == truth.train_batch_size


@pytest.mark.parametrize(
    ("content", "processes", "words"),
    [
        (
            {TRAIN: 64, MICRO: 4, ACCUMULATION: 2},
            1,
            "is not .* = 4 x 2 x 1 = 8; write 8, or other --devices and --nodes",
        ),
        ({TRAIN: 60, MICRO: 8, ACCUMULATION: 1}, 4, rf"{TRAIN} 60 is not .* = 8 x 1 x 4 = 32; write 32, or other"),
        ({TRAIN: 60, MICRO: 4}, 8, "nearest: 32, 64, or other"),
        ({TRAIN: 5}, 8, "nearest: 8, or other"),
        ({TRAIN: 60, ACCUMULATION: 4}, 8, f"is not a multiple of {ACCUMULATION} x nodes"),
    ],
)
def test_deepspeed_refuses_the_same(write, complete, content, processes, words):
    with pytest.raises(AssertionError):
        complete(content, processes)
    with pytest.raises(UserError, match=words):
        read_config(write(content), processes)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ({TRAIN: "auto", MICRO: 4}, 'train_batch_size is "auto".* give the TrainingArguments JSON instead'),
        ({MICRO: 4, ACCUMULATION: "auto"}, f'{ACCUMULATION} is "auto"'),
        ({MICRO: 0}, "is 0; write a positive whole number"),
        ({MICRO: True}, "is True; write a positive whole number"),
        ({"zero_optimization": {"stage": 2}}, f"has neither {TRAIN} nor {MICRO}; write one"),
        ({TRAIN: 64, "elasticity": {"enabled": True}}, "elasticity"),
        ({"per_device_train_batch_size": 8, "auto_find_batch_size": True}, "--batch-size with the size that it found"),
        ({"per_device_train_batch_size": None}, "use --from and --batch-size instead"),
        ({"per_device_train_batch_size": 8, "accelerator_config": "a.json"}, "accelerator_config is the file a.json"),
        ({"batch_size": 8}, "use --from and --batch-size instead"),
        ([1], "use --from and --batch-size instead"),
        ("{", "cannot be read"),
    ],
)
def test_refused_with_what_to_write(write, content, words):
    with pytest.raises(UserError, match=words):
        read_config(write(content), 1)


def test_a_file_that_is_not_there(tmp_path):
    with pytest.raises(UserError, match=r"none\.json: cannot be read"):
        read_config(tmp_path / "none.json", 1)


def test_deepspeed_learning_rate_and_sum(write):
    optimizer = {"type": "AdamW", "params": {"lr": 1e-3}}
    said = read_config(write({MICRO: 4, "optimizer": optimizer, "gradient_allreduce_op": "sum"}), 8)
    assert (said.learning_rate, said.gradients) == (1e-3, "sum")
    auto = {MICRO: 4, "optimizer": {"params": {"lr": "auto"}}}
    said = read_config(write(auto), 8)
    assert (said.learning_rate, said.gradients) == (None, "average")


@pytest.mark.parametrize("split_batches", [False, True])
def test_training_arguments_as_they_write_themselves(write, tmp_path, split_batches):
    arguments = TrainingArguments(
        output_dir=str(tmp_path),
        per_device_train_batch_size=16,
        gradient_accumulation_steps=4,
        learning_rate=3e-4,
        accelerator_config={"split_batches": split_batches},
        use_cpu=True,
    )
    said = read_config(write(arguments.to_json_string()), 8)
    assert (said.framework, said.batch_size, said.accumulation) == ("hf-trainer", 16, 4)
    assert (said.split_batches, said.learning_rate) == (split_batches, 3e-4)
