"""What processes of a job hold right after `prepare`, before any step."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from jobs import train
from paths import LLAMA
from whole_state import whole_state

# Sizes that none of 2 and 3 processes divides evenly: 47 rows, a norm of 12 elements over several pages of none.
TINY_LLAMA = (
    "--model.vocab_size=257",
    "--model.hidden_size=20",
    "--model.intermediate_size=47",
    "--model.num_layers=2",
    "--model.num_heads=5",
    "--model.num_kv_heads=5",
    "--data.block_size=16",
    "--logging.trackers=[]",
    "--batch.global_batch_size=24",
    "--batch.micro_batch_size=4",
    '--learning_rate.warmup.duration={"steps": 6}',
    '--learning_rate.decay={"name": "constant"}',
    '--train.duration={"steps": 12}',
    "--evaluation.every=null",
)


class Prepared(Exception):
    """The model has its weights; no more is wanted."""


def at_the_first_step(look: Callable[[Any], Any], recipe: Path, run_dir: Path, *words: str) -> Any:
    """What `look` returns of a run whose first step would begin."""
    from largebatch.run import Run

    def look_and_stop(run, _):
        raise Prepared(look(run))

    Run.steps = look_and_stop
    try:
        train(recipe, *words, run_dir=run_dir)
    except Prepared as stopped:
        return stopped.args[0]
    raise AssertionError


def starting_weights(recipe: Path, run_dir: Path, *words: str) -> dict[str, np.ndarray]:
    """What a run would train from; weights that are cut up are whole."""
    return at_the_first_step(lambda run: whole_state(run.backend), recipe, run_dir, *words)


def prepared(run_dir: Path, *words: str) -> dict[str, np.ndarray]:
    """Weights, buffers and logits of a tiny Llama.

    A weight is under its first name, buffers under "buffer/…" and the logits of the first tokens under "logits".
    """

    def look(run):
        import torch

        found = whole_state(run.backend)
        buffers = run.backend.unwrapped_model.named_buffers()
        found.update({f"buffer/{name}": tensor.numpy(force=True).copy() for name, tensor in buffers})
        with torch.no_grad():
            found["logits"] = run.backend.model(input_ids=torch.arange(32).view(2, 16)).logits.numpy(force=True)
        return found

    return at_the_first_step(look, LLAMA, run_dir, *TINY_LLAMA, *words)
