"""A compiled model is the same training, on every strategy, and its checkpoints are the same files."""

import os
import shutil
from functools import partial

import pytest
import torch
from torch import nn
from torch._dynamo.backends.common import aot_autograd
from torch._functorch._aot_autograd.utils import make_boxed_func
from torch._inductor.exc import InvalidCxxCompiler

import tasks
from jobs import JobFailed, run_job, train, train_in_job
from largebatch.backend.compilation import CompiledRegions, compiles_whole
from largebatch.config import load_config
from largebatch.config.sections import Compute
from largebatch.errors import ConfigError
from largebatch.model.building import build_shapes
from largebatch.plan import RunPlan, explain, resolve
from largebatch.plan.strategies import find_strategy
from largebatch.run.loop import Loop
from largebatch.storage.files import read_json_lines
from paths import ADDITION, DIGITS, PYDOC, SIMCLR, VIT_DIGITS
from resuming import TINY_GPT, events
from test_strategies import SMALL_ADDITION

CPU = torch.device("cpu")
# Accumulation, two evaluations.
STEPS = (
    "--train.stop_after_steps=4",
    '--evaluation={"every": {"steps": 3}, "max_samples": 8}',
    "--logging.every=1",
    "--logging.trackers=[]",
)
# Unequal lengths; and dropout.
SUMS = (*SMALL_ADDITION, '--batch={"global_batch_size": 24, "micro_batch_size": 4}')
GPT = (*TINY_GPT, "--model.num_layers=2", "--batch.drop_last=true")
RESNET = (
    "--data.image_size=8",
    "--model.hidden_sizes=[8, 8]",
    "--model.depths=[1, 1]",
    "--model.embedding_size=8",
    "--batch.micro_batch_size=16",
)
MODELS = {ADDITION: SUMS, PYDOC: GPT, DIGITS: RESNET}
COMPILED = "--compute.compile=blocks"
CHECKPOINTING = "--compute.activation_checkpointing=full"
SYNCHRONIZED = "--model.sync_batch_norm=true"


def train_here(run_dir, *words, recipe=ADDITION, backend="inductor"):
    """Train; the logged steps, the evaluations, the names of the weights and the number of compiled graphs."""
    from torch._dynamo.utils import counters

    torch.compile = partial(torch.compile, backend=backend)
    train(recipe, *MODELS[recipe], *STEPS, *words, run_dir=run_dir)
    return written(run_dir) | {"graphs": counters["stats"]["unique_graphs"]}


# Graphs as they are traced, for whose kernels nothing is compiled, which takes a minute; one test compiles them.
trace_here = partial(train_here, backend="aot_eager")
trace_gpt = partial(trace_here, recipe=PYDOC)


def written(run_dir):
    return {name: read_json_lines(run_dir / f"{name}.jsonl") for name in ("metrics", "evaluations")}


def assert_same(mine, theirs):
    assert len(mine["metrics"]) > 1
    for file, key in (("metrics", "loss"), ("metrics", "grad_norm"), ("evaluations", "loss")):
        expected = [line[key] for line in theirs[file]]
        assert [line[key] for line in mine[file]] == pytest.approx(expected, rel=1e-5), (file, key)


@pytest.fixture(scope="module")
def eager(tmp_path_factory):
    """What a run of one process wrote that is not compiled."""
    (result,) = run_job(train_here, tmp_path_factory.mktemp("eager") / "run", strategy="single")
    assert result["graphs"] == 0
    return result


@pytest.mark.slow
def test_the_same_training(eager, run_dir):
    """Blocks share their code, whatever flags change from micro-batch to micro-batch: the trial's graph, those of
    training for the first length and for any, and one of evaluation."""
    result = run_job(trace_here, run_dir, COMPILED, strategy="zero3")[0]
    assert_same(result, eager)
    assert result["graphs"] == 4


@pytest.mark.slow
def test_blocks_whose_weights_are_gathered_in_bf16_share_their_graphs(run_dir):
    """The names of weights are not compiled: training and evaluation have a graph each, besides that of the trial."""
    words = ("--model.num_layers=3", "--train.stop_after_steps=2", COMPILED, "--precision=bf16")
    assert run_job(trace_gpt, run_dir, *words, strategy="fsdp")[0]["graphs"] == 3


def test_what_is_compiled(monkeypatch):
    """Blocks; stages, which each have blocks of their own; and a model without such, whole. Names stay."""
    monkeypatch.setattr(torch, "compile", lambda function: lambda *inputs: function(*inputs))
    vit = tasks.build_model(VIT_DIGITS)(load_config(VIT_DIGITS))
    resnet = tasks.build_model(DIGITS)(load_config(DIGITS))
    perceptron = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
    unlike = nn.ModuleList([nn.Linear(2, 2), nn.ReLU()])
    for model, kind, count in (
        (vit, "ViTLayer", 2),
        (resnet, "ResNetStage", 3),
        (perceptron, "Sequential", 1),
        (unlike, "ModuleList", 1),
    ):
        names = list(model.state_dict())
        regions = CompiledRegions(model, CPU, find_strategy("ddp"), Compute(compile="blocks")).regions
        assert [type(region).__name__ for region in regions] == [kind] * count
        assert list(model.state_dict()) == names
        # A model that is compiled whole is cut up for DDP's reductions; blocks are parts enough.
        assert torch._dynamo.config.optimize_ddp is (regions == [model])


def train_where_one_fails(run_dir, part):
    """Train; what is written, and how often graphs had been called before each update. Rank 1 has no compiler for the
    "forward" or "backward" graphs."""
    calls = []
    before_updates = []
    update = Loop.update

    def compile_graph(of, graph, _inputs):
        if of == part and os.environ["RANK"] == "1":
            raise InvalidCxxCompiler

        def call(*inputs):
            calls.append(of)
            return graph(*inputs)

        return make_boxed_func(call)

    def noted_update(loop, step):
        before_updates.append(len(calls))
        update(loop, step)

    Loop.update = noted_update
    forward, backward = (partial(compile_graph, of) for of in ("forward", "backward"))
    torch.compile = partial(torch.compile, backend=aot_autograd(fw_compiler=forward, bw_compiler=backward))
    train(ADDITION, *SUMS, *STEPS, COMPILED, run_dir=run_dir)
    return written(run_dir) | {"calls": before_updates}


@pytest.mark.slow
@pytest.mark.parametrize(("part", "strategy"), [("forward", "ddp"), ("backward", "zero3")])
def test_if_one_process_cannot_compile_none_does(part, strategy, eager, run_dir):
    """A compiler that is missing shows before the first step; a graph that cannot be built, in its passes."""
    results = run_job(train_where_one_fails, run_dir, part, strategy=strategy)
    assert_same(results[0], eager)
    first, *later = results[0]["calls"]
    assert later == [first] * 3
    # The trial of the compiler; and graphs of each block, forward and backward.
    assert (first == 1) if part == "forward" else (first > 4)
    (event,) = events(run_dir, "not_compiled")
    assert event["reason"].startswith("on rank 1: torch.compile does not work on ")
    assert "No working C++ compiler" in event["reason"]


TWO_STEPS = ("--batch.micro_batch_size=32", "--train.stop_after_steps=2", COMPILED)
LORA = '--model.lora={"rank": 2, "alpha": 4, "target_modules": ["q_proj"]}'


@pytest.mark.slow
@pytest.mark.parametrize(
    ("strategy", "recipe", "words", "region"),
    [
        ("fsdp", DIGITS, ("--compute.compile=model",), r"\w*ResNet\w*"),
        ("zero3", SIMCLR, (), "Encoder"),
    ],
)
def test_what_is_cut_up_inside(strategy, recipe, words, region, run_dir):
    """FSDP2 gathers each stage of a ResNet by itself, and ZeRO-3 each layer of a model."""
    remedy = f'compute.compile: {strategy} .* of {region} .*; write "auto", or launch with ddp'
    with pytest.raises(JobFailed, match=remedy):
        train_in_job(recipe, run_dir, *TWO_STEPS, *words, strategy=strategy)


def train_as_on_gpus(run_dir, recipe, *words):
    RunPlan.compiles_on = lambda plan, _kind: plan.compute.compile != "off"
    train(recipe, *TWO_STEPS, "--compute.compile=auto", *words, run_dir=run_dir)
    return read_json_lines(run_dir / "history.jsonl")


@pytest.mark.slow
def test_what_is_not_asked_for_runs_eagerly(run_dir):
    """Where compiling it would be refused: a compiled backward pass needs frozen weights whole, and ZeRO-3 has let them
    go again."""
    history = run_job(train_as_on_gpus, run_dir, ADDITION, *SMALL_ADDITION, LORA, strategy="zero3")[0]
    assert [line["event"] for line in history] == ["started", "not_compiled", "finished"]
    assert "zero3 does not gather all weights of" in history[1]["reason"]


@pytest.mark.slow
def test_stages_that_fsdp_gathers_and_a_whole_model_are_compiled(tmp_path):
    """Accelerate's own units would be the convolutions inside stages. Of each region, training and evaluation have a
    graph, besides that of the trial. BatchNorm's statistics move over two micro-batches, and once although blocks are
    recomputed, without any."""
    train_digits = partial(trace_here, recipe=DIGITS)
    two_steps = "--train.stop_after_steps=2"
    expected = run_job(train_digits, tmp_path / "eager", two_steps)[0]
    for strategy, words, graphs in (
        ("fsdp", (COMPILED, CHECKPOINTING), 5),
        ("ddp", ("--compute.compile=model",), 3),
    ):
        result = run_job(train_digits, tmp_path / strategy, two_steps, *words, strategy=strategy)[0]
        assert_same(result, expected)
        assert result["graphs"] == graphs
        assert events(tmp_path / strategy, "not_compiled") == []


@pytest.mark.parametrize(
    ("recipe", "words", "strategy", "is_whole"),
    [
        (DIGITS, (), "ddp", True),
        (DIGITS, (), "fsdp", False),
        (PYDOC, (), "ddp", True),
        (PYDOC, ("--compute.compile=model",), "fsdp", True),
        (PYDOC, ("--compute.activation_checkpointing=full",), "ddp", False),
        # 64 million parameters.
        (PYDOC, ("--model.hidden_size=1024", "--model.num_layers=5", "--model.num_heads=8"), "ddp", False),
    ],
)
def test_what_is_compiled_whole(recipe, words, strategy, is_whole):
    config = load_config(recipe, words)
    model = build_shapes(partial(tasks.build_model(recipe), config))
    assert compiles_whole(model, find_strategy(strategy), config.compute) == is_whole


def test_batch_norm_that_cannot_be_compiled():
    """For the reasons for which "auto" compiles nothing."""
    reason = r'BatchNorm communicates between processes, .*; write "auto" or "off"'
    with pytest.raises(ConfigError, match=reason):
        resolve(load_config(DIGITS, [COMPILED, SYNCHRONIZED]), 2)


@pytest.mark.parametrize(
    ("words", "world_size", "devices", "line"),
    [
        ((CHECKPOINTING,), 2, {"cuda"}, "the model is compiled on GPUs, and the first step takes longer"),
        ((COMPILED,), 4, {"cuda", "cpu"}, "the model is compiled, and the first step takes longer"),
        (("--compute.compile=off",), 4, set(), "the model is not compiled: compute.compile is off"),
        ((SYNCHRONIZED,), 4, set(), "not compiled: BatchNorm communicates between processes"),
    ],
)
def test_where_models_are_compiled(words, world_size, devices, line):
    plan = resolve(load_config(DIGITS, words), world_size)
    assert {kind for kind in ("cpu", "cuda") if plan.compiles_on(kind)} == devices
    assert line in explain(plan, "digits")


@pytest.fixture(scope="module")
def eager_gpt(tmp_path_factory):
    """What an eager run of one process wrote, and the folder of one that has stopped after two steps."""
    folder = tmp_path_factory.mktemp("gpt")
    (whole,) = run_job(trace_gpt, folder / "whole", strategy="single")
    run_job(trace_gpt, folder / "begun", "--train.stop_after_steps=2", strategy="single")
    return whole, folder / "begun"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "strategy", "train_gpt"),
    [
        ((COMPILED, "--compute.activation_checkpointing=selective"), "fsdp", trace_gpt),
        ((COMPILED, CHECKPOINTING), "single", partial(train_here, recipe=PYDOC)),
        (("--compute.compile=model",), "single", trace_gpt),
    ],
)
def test_blocks_that_are_computed_again_and_a_whole_model_are_compiled(words, strategy, train_gpt, eager_gpt, run_dir):
    """In one graph of training, which all blocks share, and one of evaluation, besides that of the first trial; what
    dropout has drawn is drawn again. For one of them, kernels are compiled. A run that began eagerly goes on."""
    expected, begun = eager_gpt
    shutil.copytree(begun, run_dir)
    result = run_job(train_gpt, run_dir, *words, strategy=strategy)[0]
    assert result["evaluations"].pop(0)["step"] == 2
    assert_same(result, expected)
    assert result["graphs"] == 3
