"""Pairs of prompts and answers: their tokens are prepared once, and a job that may not make them says so."""

import json
from dataclasses import replace

import numpy as np
import pytest

import tasks
from largebatch.config import load_config
from largebatch.data.preparation import NotPrepared, Preparation
from paths import ROOT

BY_THE_COMMAND = Preparation("largebatch prepare x", allowed="everything", num_workers=2)


@pytest.fixture
def config(tmp_path):
    file = tmp_path / "pairs.jsonl"
    rows = [json.dumps({"q": f"{number}+1=", "a": f"{number + 1}"}) + "\n" for number in range(40)]
    file.write_text("".join(rows))
    files = {"train": str(file), "eval": str(file)}
    data = {"source": "datasets", "path": "json", "data_files": files, "prompt": "{q}", "answer": "{a}"}
    data |= {
        "tokenizer": "bytes",
        "block_size": 16,
        "num_train_samples": 40,
        "num_eval_samples": 8,
    }
    words = [
        "--data",
        json.dumps(data | {"prepare": "require"}),
        '--batch={"global_batch_size": 8, "micro_batch_size": 2}',
    ]
    return load_config(ROOT / "recipes/sft/sft_addition.json", [*words, '--train.duration={"steps": 90}'])


def open_with(config, how):
    return tasks.sources("sft")(config, how)


def test_tokens_that_are_not_there_are_not_made_where_that_is_not_allowed(config):
    import datasets

    job = Preparation("largebatch prepare x")
    dry = replace(BY_THE_COMMAND, allowed="nothing")
    # The rows are there, but not their tokens.
    files = {"train": config.data.data_files.train, "validation": config.data.data_files.eval}
    datasets.load_dataset("json", data_files=files)
    for how in (job, dry):
        with pytest.raises(NotPrepared, match="run `largebatch prepare x`"):
            open_with(config, how)
    prepared, _ = open_with(config, BY_THE_COMMAND)
    train, _ = open_with(config, job)
    indices = np.arange(40)
    batches = [source.fetch(indices, 0) for source in (prepared, train)]
    assert all(batches[0][name].equal(batches[1][name]) for name in ("input_ids", "labels"))
    predicted = batches[0]["labels"][7]
    assert bytes(predicted[predicted >= 0].tolist()) == b"8\0"
