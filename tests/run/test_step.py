"""The recipe's side of the contract: mistakes in a loop are errors, not other mathematics."""

import pytest

import tasks
from jobs import run_job
from paths import PYDOC, STRATEGIES
from tasks import SMALL

pytestmark = pytest.mark.slow


def loop_with(mistake: str, run_dir) -> str:
    """Train with a mistake in the loop, and return the error."""
    import torch
    from torch.nn.functional import cross_entropy

    from largebatch.config import load_config

    CausalLMConfig = tasks.module("causal_lm", "config").Config
    text_sources = tasks.sources("causal_lm")
    from largebatch.optim import build_optimizer
    from largebatch.run import Run, RunOptions

    config = load_config(PYDOC, SMALL, CausalLMConfig)
    run = Run(config, RunOptions(run_dir))
    train_set, _ = run.load(text_sources)
    if mistake == "other weights":
        torch.manual_seed(run.backend.rank)
    model = tasks.build_model(PYDOC)(config)
    if mistake == "unused parameter":
        model.extra = torch.nn.Linear(3, 3, bias=False)
    optimizer = build_optimizer(model, run.plan)
    if mistake == "another optimizer":
        optimizer = torch.optim.SGD(optimizer.param_groups, lr=0.0)
    if mistake == "other betas":
        optimizer.param_groups[1]["betas"] = (0.5, 0.5)
    if mistake == "maximize":
        optimizer.param_groups[1]["maximize"] = True
    if mistake == "another weight":
        train_set.weight = lambda _: 7
    if mistake == "no weight decay":
        optimizer.param_groups[0]["weight_decay"] = 0.0
    if mistake == "forgotten parameter":
        optimizer.param_groups[0]["params"].pop()
    if mistake == "another weight decay":
        optimizer.param_groups[0]["weight_decay"] = 0.2
    try:
        if mistake != "not prepared":
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
                run.update(step)
            if mistake == "two updates":
                run.update(step)
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
        ("left early", "run.update was called after 1 of 4 micro-batches"),
        ("no update", "the loop asked for the next step without calling run.update(step)"),
        ("two updates", "run.update was called twice for one step"),
        ("not prepared", "call run.prepare(model, optimizer) first"),
        ("another optimizer", "the optimizer is SGD, the plan says AdamW"),
        ("other betas", "is (0.5, 0.5), the plan says (0.9, 0.99) (10 parameters differ)"),
        ("maximize", "is True, the plan says False (10 parameters differ)"),
        # Whatever the fields of the task's data section are called.
        ("another weight", "8 samples have 7 tokens in the loss, but the plan says 16 each; correct the source"),
        ("no weight decay", "weight_decay of transformer.wte.weight is 0.0, the plan says 0.1 ("),
        (
            "forgotten parameter",
            "the optimizer does not contain each trainable parameter of the model exactly once; missing: ",
        ),
        ("another weight decay", "the optimizer's weight_decay of transformer.wte.weight is 0.2, the plan says 0.1 ("),
    ],
)
def test_mistakes_of_a_loop(mistake, words, tmp_path):
    (report,) = run_job(loop_with, mistake, tmp_path / "run", strategy="single", world_size=1)
    assert words in report


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_parameter_without_gradient_is_refused_alike(strategy, tmp_path):
    """Left alone, some strategies would skip it, some decay it, and one fail in the second step."""
    for report in run_job(loop_with, "unused parameter", tmp_path / "run", strategy=strategy):
        assert "1 trainable parameters got no gradient, such as extra.weight" in report


@pytest.mark.parametrize("strategy", ["ddp", "fsdp", "zero3"])
def test_processes_that_start_from_different_weights(strategy, tmp_path):
    """DDP and ZeRO would take rank 0's, FSDP2 a piece of each."""
    for report in run_job(loop_with, "other weights", tmp_path / "run", strategy=strategy):
        assert "the starting weights differ from rank 0's on rank 1;" in report


def modes_of(run_dir) -> list[tuple[bool, bool]]:
    """Whether the model and one frozen part of it are in training mode, before and after an evaluation."""
    from largebatch.config import load_config

    CausalLMConfig = tasks.module("causal_lm", "config").Config
    text_sources = tasks.sources("causal_lm")
    from largebatch.optim import build_optimizer
    from largebatch.run import Run, RunOptions

    config = load_config(PYDOC, [*SMALL, "--data.num_eval_samples=8"], CausalLMConfig)
    run = Run(config, RunOptions(run_dir))
    train_set, eval_set = run.load(text_sources)
    model = tasks.build_model(PYDOC)(config).eval()  # as `from_pretrained` returns it
    model, _ = run.prepare(model, build_optimizer(model, run.plan))
    frozen = run.backend.unwrapped_model.transformer.drop
    frozen.eval()
    modes = []
    for step in run.steps(train_set):
        for batch in step.micro_batches():
            step.backward(model(input_ids=batch["input_ids"]).logits.float().sum() * 1e-3)
        run.update(step)
        modes.append((model.training, frozen.training))
        run.evaluate(eval_set, lambda batch: {"size": batch["labels"][:, 0].float()})
        if step.index == 1:
            return modes
    return modes


@pytest.mark.parametrize("strategy", ["single", "fsdp", "zero2"])
def test_training_mode_holds_from_the_first_step_and_through_evaluation(strategy, tmp_path):
    results = run_job(modes_of, tmp_path / "run", strategy=strategy, world_size=1 if strategy == "single" else 2)
    assert results[0] == [(True, False), (True, False)]
