"""The DeepSpeed JSON may decide memory and speed, and nothing of the optimization."""

import pytest

from largebatch.backend.deepspeed_config import deepspeed_config_problems, fill_from_plan, read_deepspeed_config
from largebatch.config import load_config
from largebatch.errors import LaunchError
from largebatch.plan import resolve
from paths import PYDOC


def offload(device, what):
    return {"zero_optimization": {"stage": 3, f"offload_{what}": {"device": device}}}


@pytest.mark.parametrize(
    ("addition", "words"),
    [
        ({"scheduler": {"type": "WarmupLR"}}, "scheduler: remove it; the recipe's learning_rate section decides it"),
        ({"gradient_clipping": 1.0}, "gradient_clipping: remove it; it is the recipe's optimizer.clip_norm"),
        ({"gradient_allreduce_op": "sum"}, "gradient_allreduce_op: remove it; it is not known to affect only"),
        ({"zero_optimization": {"stage": 2, "compute_grad_norm": False}}, "compute_grad_norm: remove"),
        (offload("nvme", "optimizer"), "zero_optimization.offload_optimizer.device: nvme is not supported"),
        (offload("nvme", "param"), "zero_optimization.offload_param.device: nvme is not supported"),
        ({"zero_optimization": {"stage": 0}}, "zero_optimization.stage: given 0; write 1, 2 or 3"),
        ({"zero_optimization": None}, "zero_optimization.stage: given null"),
    ],
)
def test_settings_of_the_recipe_are_refused(addition, words):
    (problem,) = deepspeed_config_problems({"zero_optimization": {"stage": 2}} | addition)
    assert words in problem


def test_what_is_allowed():
    settings = offload("cpu", "optimizer")["zero_optimization"] | offload("cpu", "param")["zero_optimization"]
    assert deepspeed_config_problems({"zero_optimization": settings, "train_batch_size": "auto"}) == []


def test_several_problems_come_at_once(tmp_path):
    file = tmp_path / "ds.json"
    file.write_text('{"zero_optimization": {"stage": 2}, "scheduler": {}, "optimizer": {}}')
    with pytest.raises(LaunchError, match=r"ds.json cannot be used:\n  - optimizer: .*\n  - scheduler: "):
        read_deepspeed_config({"ACCELERATE_DEEPSPEED_CONFIG_FILE": str(file)})


@pytest.mark.parametrize("text", ["{", "[]"])
def test_unreadable(tmp_path, text):
    file = tmp_path / "ds.json"
    file.write_text(text)
    with pytest.raises(LaunchError, match=r"ds\.json"):
        read_deepspeed_config({"ACCELERATE_DEEPSPEED_CONFIG_FILE": str(file)})


def test_filled_from_the_plan():
    """The engine compares itself with the plan at every start; see test_check.py."""
    user = {"zero_optimization": {"stage": 3}, "gradient_clipping": "auto", "wall_clock_breakdown": True}
    filled = fill_from_plan(user, resolve(load_config(PYDOC), world_size=2))
    assert (filled["gradient_clipping"], filled["wall_clock_breakdown"]) == (1.0, True)
    assert user["zero_optimization"] == {"stage": 3}
    assert user["zero_optimization"] is not filled["zero_optimization"]
