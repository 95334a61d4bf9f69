"""DeepSpeed's own loop: `engine.backward` and `engine.step` for every micro-batch, which the engine accumulates."""

import json
from itertools import count
from pathlib import Path

import deepspeed

from peers.gpt.job import (
    ACCUMULATION,
    CLIP_NORM,
    MICRO_BATCH,
    build_model,
    build_optimizer,
    mean_loss,
    micro_batches,
    set_learning_rate,
)

DS_CONFIGS = Path(__file__).parents[3] / "ds_configs"


def engine_config(stage: int, world_size: int) -> dict:
    """The settings of memory and speed that this project ships, and the job's numbers."""
    return json.loads((DS_CONFIGS / f"zero{stage}.json").read_text()) | {
        "train_micro_batch_size_per_gpu": MICRO_BATCH,
        "gradient_accumulation_steps": ACCUMULATION,
        "train_batch_size": MICRO_BATCH * ACCUMULATION * world_size,
        "gradient_clipping": CLIP_NORM,
        "communication_data_type": "fp32",
        "zero_allow_untested_optimizer": True,
        "timers": {"throughput": {"enabled": False}},
    }


def train(clock, stage):
    # On a CPU it would otherwise compile a collective of its own first.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.init_distributed("gloo")
    rank = deepspeed.comm.get_rank()
    world_size = deepspeed.comm.get_world_size()
    model = build_model()
    engine, optimizer, _, _ = deepspeed.initialize(
        model=model, optimizer=build_optimizer(model), config=engine_config(stage, world_size)
    )
    batches = micro_batches(rank, world_size)
    for step in count():
        for _ in range(ACCUMULATION):
            engine.backward(mean_loss(engine, *next(batches)))
            set_learning_rate(optimizer, step)
            engine.step()
        clock.step()
