"""Recipes on a few rows of data, written by the test; and what random changes of samples depend on."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from largebatch.config import load_config
from largebatch.config.data import HubText


def rows_in(file: Path, rows: list[dict[str, Any]]) -> dict[str, Any]:
    """The section of data that trains and evaluates on these rows, which are written to the file."""
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return of_file(file)


def of_file(file: Path | str, path: str = "json", num_samples: int = 1) -> dict[str, Any]:
    """The section of data that trains and evaluates on so many samples of a file."""
    files = {"train": str(file), "eval": str(file)}
    sizes = {"num_train_samples": num_samples, "num_eval_samples": num_samples}
    return {"source": "datasets", "path": path, "data_files": files} | sizes


def hub_text(path: object, **fields: Any) -> HubText:
    """The section that trains on a sample of some text."""
    shape = {"tokenizer": "bytes", "block_size": 1, "num_train_samples": 1, "num_eval_samples": 1}
    return HubText(source="datasets", path=str(path), **(shape | fields))


def load_with(recipe: Path, data: dict[str, Any], *words: str):
    """The recipe with another section of data, and with batches and a run that any few samples are enough for."""
    batch = {"global_batch_size": min(4, data["num_train_samples"]), "micro_batch_size": 1}
    rate = ("--learning_rate.warmup=null", '--learning_rate.decay={"name": "constant"}')
    rest = ('--train.duration={"steps": 60}', *rate, "--evaluation.every=null", "--checkpoint.every=null")
    return load_config(recipe, ["--data", json.dumps(data), "--batch", json.dumps(batch), *rest, *words])


def assert_drawn_by_seed_epoch_and_sample(fetch: Callable, fetch_of_another_seed: Callable) -> None:
    """What `fetch(indices, epoch)` returns depends on these alone, and on each of them."""
    found = fetch([3, 1, 2], 5)
    assert torch.equal(fetch([2, 3], 5), found[[2, 0]])
    for other in (fetch([3, 1, 2], 6), fetch_of_another_seed([3, 1, 2], 5), found[[1, 2, 0]]):
        assert not torch.equal(found, other)
