"""Recipes on a few rows of data, written by the test."""

import json
from pathlib import Path
from typing import Any

from largebatch.config import load_config


def rows_in(file: Path, rows: list[dict[str, Any]]) -> dict[str, Any]:
    """The section of data that trains and evaluates on these rows, which are written to the file."""
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return {"source": "datasets", "path": "json", "data_files": {"train": str(file), "eval": str(file)}}


def load_with(recipe: Path, data: dict[str, Any], *words: str):
    """The recipe with another section of data, and with batches and a run that any few samples are enough for."""
    batch = {"global_batch_size": min(4, data["num_train_samples"]), "micro_batch_size": 1}
    rate = ("--learning_rate.warmup=null", '--learning_rate.decay={"name": "constant"}')
    rest = ('--train.duration={"steps": 60}', *rate, "--evaluation.every=null", "--checkpoint.every=null")
    return load_config(recipe, ["--data", json.dumps(data), "--batch", json.dumps(batch), *rest, *words])
