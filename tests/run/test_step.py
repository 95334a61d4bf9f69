"""The recipe's side of the contract: mistakes in a loop are errors, not other mathematics."""

import pytest
import torch
from torch.nn.functional import cross_entropy

import tasks
from jobs import run_job
from paths import PYDOC
from stepping import take
from tasks import SMALL

pytestmark = pytest.mark.slow

CORRECT = {
    "start": lambda _run, _train_set: None,
    "model": lambda _: None,
    "optimizer": lambda optimizer: optimizer,
    "prepare": lambda run, model, optimizer: run.prepare(model, optimizer),
    # Whether the loop leaves the micro-batches after this one.
    "backward": lambda step, losses: step.backward(losses.sum()),
    "before_update": lambda _model, _optimizer: None,
    "update": lambda run, step: run.update(step),
    "after_update": lambda _model, _optimizer: None,
}


def with_option(group, **options):
    def change(optimizer):
        optimizer.param_groups[group].update(options)
        return optimizer

    return {"optimizer": change}


def forget_a_parameter(optimizer):
    optimizer.param_groups[0]["params"].pop()
    return optimizer


def two_backwards(step, losses):
    step.backward(losses.sum())
    step.backward(losses.sum().detach().requires_grad_())


def two_updates(run, step):
    run.update(step)
    run.update(step)


def clip(model, _optimizer):
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1e-3)


def step_a_scheduler(_model, optimizer):
    torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5**step).step()


def replace_weights(model, _optimizer):
    weights = {name: weight.detach() for name, weight in model.named_parameters()}
    torch.func.functional_call(model, weights, (), {"input_ids": torch.zeros(1, 16, dtype=torch.int64)})


# What each has in place of a part of `CORRECT`.
MISTAKES = {
    "none": {},
    "other weights": {"start": lambda run, _: torch.manual_seed(run.backend.rank)},
    "another weight": {"start": lambda _, train_set: setattr(train_set, "weight", lambda _: 7)},
    "unused parameter": {"model": lambda model: model.add_module("extra", torch.nn.Linear(3, 3, bias=False))},
    "another optimizer": {"optimizer": lambda optimizer: torch.optim.SGD(optimizer.param_groups, lr=0.0)},
    "other betas": with_option(1, betas=(0.5, 0.5)),
    "another weight decay": with_option(0, weight_decay=0.2),
    "forgotten parameter": {"optimizer": forget_a_parameter},
    "not prepared": {"prepare": lambda _, model, optimizer: (model, optimizer)},
    "not a scalar": {"backward": lambda step, losses: step.backward(losses)},
    "no backward": {"backward": lambda _step, _losses: None},
    "two backwards": {"backward": two_backwards},
    "left early": {"backward": lambda step, losses: [step.backward(losses.sum())]},
    "own clipping": {"before_update": clip},
    "own zero_grad": {"before_update": lambda _, optimizer: optimizer.zero_grad()},
    "own step": {"before_update": lambda _, optimizer: optimizer.step()},
    "own scheduler": {"after_update": step_a_scheduler},
    "evaluation mode": {"before_update": lambda model, _: model.eval()},
    "replaced weights": {"before_update": replace_weights},
    "no update": {"update": lambda _run, _step: None},
    "finished first": {"update": lambda run, _: run.finish()},
    "two updates": {"update": two_updates},
}


def small_run(run_dir, *words):
    from largebatch.config import load_config
    from largebatch.run import Run, RunOptions

    config = load_config(PYDOC, [*SMALL, *words])
    run = Run(config, RunOptions(run_dir))
    return run, run.load(tasks.module("causal_lm", "data").sources)


def loop_with(mistake, run_dir):
    """Train with a mistake in the loop, and return the error."""
    from largebatch.optim import build_optimizer

    parts = CORRECT | MISTAKES[mistake]
    run, (train_set, _) = small_run(run_dir)
    parts["start"](run, train_set)
    model = tasks.build_model(PYDOC)(run.config)
    parts["model"](model)
    optimizer = own = parts["optimizer"](build_optimizer(model, run.plan))
    try:
        model, optimizer = parts["prepare"](run, model, optimizer)
        for step in run.steps(train_set):
            for batch in step.micro_batches():
                logits = model(input_ids=batch["input_ids"]).logits.transpose(1, 2)
                if parts["backward"](step, cross_entropy(logits, batch["labels"], reduction="none")):
                    break
                parts["before_update"](model, own)
            parts["update"](run, step)
            parts["after_update"](model, own)
            if step.index == 2:
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
        ("finished first", "run.finish was called before run.update; call it after the loop"),
        ("not prepared", "call run.prepare(model, optimizer) first"),
        ("another optimizer", "the optimizer is SGD, the plan says AdamW"),
        ("other betas", "is (0.5, 0.5), the plan says (0.9, 0.99) (10 parameters differ)"),
        # Whatever the fields of the task's data section are called.
        (
            "another weight",
            "`weight` returned 7 for a batch of 8 samples, but the plan says 128 tokens, 16 each; correct",
        ),
        (
            "forgotten parameter",
            "the optimizer does not contain each trainable parameter of the model exactly once; missing: ",
        ),
        ("another weight decay", "the optimizer's weight_decay of transformer.wte.weight is 0.2, the plan says 0.1 ("),
    ],
)
def test_mistakes_of_a_loop(mistake, words, run_dir):
    (report,) = run_job(loop_with, mistake, run_dir, strategy="single")
    assert words in report


@pytest.mark.parametrize("strategy", ["hsdp", "zero3"])
def test_a_parameter_without_gradient_is_refused_alike(strategy, run_dir):
    """Left alone, some strategies would skip it, some decay it, and one fail in the second step."""
    for report in run_job(loop_with, "unused parameter", run_dir, strategy=strategy):
        assert "1 trainable parameters got no gradient, such as extra.weight" in report


def test_processes_that_start_from_different_weights(run_dir):
    """DDP and ZeRO would take rank 0's, FSDP2 a piece of each."""
    for report in run_job(loop_with, "other weights", run_dir):
        assert "the starting weights differ from rank 0's on rank 1;" in report


def modes_of(run_dir):
    """Whether the model and one frozen part of it are in training mode, before and after an evaluation."""
    from largebatch.optim import build_optimizer

    run, (train_set, eval_set) = small_run(run_dir, "--data.num_eval_samples=8")
    model = tasks.build_model(PYDOC)(run.config).eval()  # as `from_pretrained` returns it
    model, _ = run.prepare(model, build_optimizer(model, run.plan))
    frozen = run.backend.unwrapped_model.transformer.drop
    frozen.eval()
    modes = []
    for step in run.steps(train_set):
        take(step, run, model)
        modes.append((model.training, frozen.training))
        run.evaluate(eval_set, lambda batch: {"size": batch["labels"][:, 0].float()})
        if step.index == 1:
            return modes
    return modes


def test_training_mode_holds_from_the_first_step_and_through_evaluation(run_dir):
    assert run_job(modes_of, run_dir, strategy="zero2")[0] == [(True, False), (True, False)]


@pytest.mark.parametrize(
    ("strategy", "mistake"),
    [
        ("ddp", "own clipping"),
        ("fsdp", "own zero_grad"),
        ("zero1", "own clipping"),
        ("fsdp", "own step"),
        ("zero3", "own step"),
        ("zero1", "own scheduler"),
        ("zero3", "replaced weights"),
        ("zero1", "evaluation mode"),
    ],
)
def test_what_update_does_is_not_done_beside_it(strategy, mistake, run_dir):
    """Some strategies would train something else, and others the same."""
    said = {
        "own step": "the optimizer was stepped after step.backward; run.update clips, steps",
        "evaluation mode": "the model is in evaluation mode in a training step",
        "replaced weights": "zero3 cannot gather",
        "own scheduler": "is 0, but run.update has set 5e-05; it follows the recipe's learning_rate",
    }
    for report in run_job(loop_with, mistake, run_dir, strategy=strategy):
        assert said.get(mistake, "gradients or weights were changed after step.backward; run.update clips") in report
