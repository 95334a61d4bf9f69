"""What is reduced over the processes, and when: counted at the collectives, not timed."""

import pytest

import tasks
from jobs import run_job
from paths import PYDOC
from tasks import SMALL


def reductions_of_a_step(run_dir, *words: str) -> list[int]:
    """How often this process reduces with others in each micro-batch of the second step."""
    import torch
    from torch import distributed
    from torch.nn.functional import cross_entropy

    from largebatch.config import load_config

    CausalLMConfig = tasks.module("causal_lm", "config").Config
    text_sources = tasks.module("causal_lm", "data").sources
    from largebatch.optim import build_optimizer
    from largebatch.run import Run, RunOptions

    config = load_config(PYDOC, [*SMALL, *words], CausalLMConfig)
    run = Run(config, RunOptions(run_dir))
    train_set, _ = run.load(text_sources)
    model = tasks.build_model(PYDOC)(config)
    model, _ = run.prepare(model, build_optimizer(model, run.plan))
    counts = []
    for step in run.steps(train_set):
        for batch in step.micro_batches():
            activities = [torch.profiler.ProfilerActivity.CPU]
            with torch.profiler.profile(activities=activities, record_shapes=True) as profile:
                logits = model(input_ids=batch["input_ids"]).logits
                step.backward(cross_entropy(logits.transpose(1, 2), batch["labels"], reduction="sum"))
                distributed.barrier()
            events = [event for event in profile.events() if event.name.startswith("gloo:") and "reduce" in event.name]
            counts.append(len(events))
        run.update(step)
        if step.index == 1:
            return counts[len(counts) // 2 :]
    return counts


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["ddp", "fsdp", "zero1"])
def test_gradients_are_reduced_with_the_last_micro_batch_only(strategy, tmp_path):
    words = ("--batch.global_batch_size=32", "--batch.micro_batch_size=4")
    for counts in run_job(reductions_of_a_step, tmp_path / "run", *words, strategy=strategy):
        assert counts[:3] == [0, 0, 0], counts
        assert counts[3] > 0, counts


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["zero2", "zero3"])
def test_partitioned_gradients_are_reduced_with_every_micro_batch(strategy, tmp_path):
    """No process may keep whole gradients, so there is no way around it."""
    words = ("--batch.global_batch_size=32", "--batch.micro_batch_size=4")
    for counts in run_job(reductions_of_a_step, tmp_path / "run", *words, strategy=strategy):
        assert len(counts) == 4
        assert min(counts) > 0, counts


@pytest.mark.parametrize(
    ("words", "sums"), [((), 0), (("--data.samples=documents", "--data.num_train_samples=2000"), 3)]
)
def test_equal_samples_need_no_communication_of_weights(words, sums):
    from types import SimpleNamespace

    import torch

    from largebatch.config import load_config

    text_sources = tasks.module("causal_lm", "data").sources
    from largebatch.plan import resolve
    from largebatch.run.feed import training_feed

    counts = []
    config = load_config(PYDOC, (*words, "--train.stop_after_steps=3"))
    backend = SimpleNamespace(
        rank=1, device=torch.device("cpu"), sum_over_processes=lambda count: counts.append(count) or (lambda: count)
    )
    feed = training_feed(resolve(config, 2), backend, text_sources(config)[0], 0, 0, iter)
    for number, step in enumerate(feed, 1):
        assert step.total_weight() > 0
        micro_steps = [next(step.micro_steps), next(step.micro_steps)]
        assert len(micro_steps) == 2
        # The next step's data are loaded when this step's passes have been launched, and not before.
        assert len(counts) == min(number, sums)
        assert list(step.micro_steps) == []
        assert len(counts) == min(number + 1, sums)
    assert len(counts) == sums
