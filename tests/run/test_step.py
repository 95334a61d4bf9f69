"""The recipe's side of the contract: mistakes in a loop are errors, not other mathematics."""

import pytest

from jobs import run_job
from paths import PYDOC

SMALL = ("--model.num_layers=1", "--model.hidden_size=16", "--model.num_heads=2", "--data.block_size=16")


def loop_with(mistake: str, run_dir) -> str:
    """Train with a mistake in the loop, and return the error."""
    import torch
    from torch.nn.functional import cross_entropy

    from largebatch.config import CausalLMConfig, load_config
    from largebatch.data.text import text_sources
    from largebatch.optim import build_optimizer
    from largebatch.run import Run
    from reference import load_recipe_module

    config = load_config(PYDOC, SMALL, CausalLMConfig)
    run = Run(config, run_dir)
    train_set, _ = run.load(text_sources)
    if mistake == "other weights":
        torch.manual_seed(run.backend.rank)
    model = load_recipe_module(PYDOC).build_model(config)
    if mistake == "unused parameter":
        model.extra = torch.nn.Linear(3, 3, bias=False)
    optimizer = build_optimizer(model, config.optimizer)
    if mistake == "another optimizer":
        optimizer = torch.optim.SGD(optimizer.param_groups, lr=0.0)
    if mistake == "other betas":
        optimizer.param_groups[1]["betas"] = (0.5, 0.5)
    if mistake == "no weight decay":
        optimizer.param_groups[0]["weight_decay"] = 0.0
    if mistake == "forgotten parameter":
        optimizer.param_groups[0]["params"].pop()
    if mistake == "another weight decay":
        optimizer.param_groups[0]["weight_decay"] = 0.2
    try:
        model, optimizer = run.prepare(model, optimizer)
        for step in run.steps(train_set):
            for batch in step.micro_batches():
                losses = cross_entropy(
                    model(input_ids=batch["input_ids"]).logits.transpose(1, 2), batch["labels"], reduction="none"
                )
                if mistake == "not a scalar":
                    step.backward(losses)
                if mistake == "no backward":
                    continue
                step.backward(losses.sum())
                if mistake == "two backwards":
                    step.backward(losses.sum().detach().requires_grad_())
                if mistake == "left early":
                    break
            if mistake != "no update":
                step.update()
            if step.index == 1:
                return "no error"
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


@pytest.mark.parametrize(
    ("mistake", "words"),
    [
        ("none", "no error"),
        (
            "not a scalar",
            "ValueError: step.backward needs a scalar, the sum of the micro-batch's losses; given shape (8, 16)",
        ),
        ("no backward", "step.backward was called 0 times for a micro-batch"),
        ("two backwards", "step.backward was called 2 times for a micro-batch"),
        ("left early", "step.update was called after 1 of 4 micro-batches"),
        ("no update", "the loop went on to the next step without step.update()"),
        (
            "forgotten parameter",
            "the optimizer does not have each trainable parameter of the model exactly once; missing: ",
        ),
        ("another weight decay", "the optimizer's weight decay of transformer.wte.weight is 0.2, the plan says 0.1 ("),
    ],
)
def test_mistakes_of_a_loop(mistake, words, tmp_path):
    (report,) = run_job(loop_with, mistake, tmp_path / "run", strategy="single", world_size=1)
    assert words in report
