"""Muon: against torch's own, the polynomial of singular values, a model with its matrices apart, and one process."""

from concurrent.futures import ThreadPoolExecutor
from functools import partial
from math import prod
from threading import Barrier
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode
from transformers.pytorch_utils import Conv1D

from jobs import train_in_job
from largebatch.config import load_config
from largebatch.config.optimizers.muon import COEFFICIENTS, muon_products
from largebatch.config.optimizers.muon import Muon as MuonSection
from largebatch.errors import ConfigError
from largebatch.estimate.comparison import Workload, compare_strategies
from largebatch.estimate.memory import model_states
from largebatch.estimate.model_shape import ModelShape, ParameterShape, Strategy, ZeroSettings
from largebatch.estimate.step_time import Fabric, Hardware, collective_seconds
from largebatch.estimate.traffic import TrafficCase, traffic_of_a_step
from largebatch.optim import planned_groups
from largebatch.optim.muon import Muon, orthogonalized
from largebatch.optim.whole_layers import LayerPart, LayerProcesses, WholeLayers
from largebatch.plan import resolve
from paths import PYDOC
from resuming import assert_close_weights
from test_strategies import SMALL_GPT

MUON = '--optimizer={"name": "muon", "split": {"*.c_attn.weight": 3}, "clip_norm": 1.0}'


def muon(params, **options):
    return Muon(params, **{"lr": 0.0, "weight_decay": 0.1, **MuonSection(name="muon").options, **options})


def parameters(*shapes):
    torch.manual_seed(0)
    return [nn.Parameter(torch.randn(shape, dtype=torch.float64)) for shape in shapes]


def step(optimizer, gradients, rate):
    for group in optimizer.param_groups:
        group["lr"] = rate
    each = (parameter for group in optimizer.param_groups for parameter in group["params"])
    for parameter, gradient in zip(each, gradients, strict=True):
        parameter.grad = gradient.clone()
    optimizer.step()


def assert_steps_alike(make_mine, make_theirs, *shapes):
    """With the same gradients, and other rates each time."""
    mine = parameters(*shapes)
    theirs = parameters(*shapes)
    optimizers = (make_mine(mine), make_theirs(theirs))
    for number in range(20):
        gradients = [torch.randn_like(parameter) for parameter in mine]
        for optimizer in optimizers:
            step(optimizer, gradients, 0.01 * (1 + number % 3))
    torch.testing.assert_close(mine, theirs, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("nesterov", [True, False])
@pytest.mark.parametrize(("scale", "theirs"), [("original", "original"), ("adamw_rms", "match_rms_adamw")])
def test_as_in_torch(nesterov, scale, theirs, monkeypatch):
    """Torch computes in bf16, which is made fp64 here; since 2.15 by its dtype, before by its method."""
    monkeypatch.setattr(torch, "bfloat16", torch.float64)
    monkeypatch.setattr(torch.Tensor, "bfloat16", torch.Tensor.clone)
    options = {"lr": 0.0, "weight_decay": 0.1, "nesterov": nesterov}
    mine = partial(muon, scale=scale, **options)
    assert_steps_alike(mine, partial(torch.optim.Muon, adjust_lr_fn=theirs, **options), (5, 7), (8, 3), (6, 6))


def test_others_as_torch_s_adamw():
    options = {"lr": 0.0, "weight_decay": 0.1, "betas": (0.9, 0.95)}

    def mine(params):
        return muon([{"params": params, "layerwise": False}], **options)

    assert_steps_alike(mine, partial(torch.optim.AdamW, **options), (5, 7), (6,))


@pytest.mark.parametrize("name", COEFFICIENTS)
def test_singular_vectors_stay_and_singular_values_follow_the_polynomial(name):
    torch.manual_seed(0)
    matrices = torch.randn(2, 5, 9, dtype=torch.float64)
    left, values, right = torch.linalg.svd(matrices, full_matrices=False)
    values = values / values.norm(dim=1, keepdim=True)
    a, b, c = COEFFICIENTS[name]
    for _ in range(5):
        values = a * values + b * values**3 + c * values**5
    expected = left @ torch.diag_embed(values) @ right
    for given, result in ((matrices, expected), (matrices.mT, expected.mT)):
        torch.testing.assert_close(orthogonalized(given, COEFFICIENTS[name], 5), result, rtol=0, atol=1e-12)


def test_the_classical_coefficients_converge():
    torch.manual_seed(0)
    result = orthogonalized(torch.randn(1, 5, 9, dtype=torch.float64), COEFFICIENTS["classical"], 30)
    torch.testing.assert_close(result @ result.mT, torch.eye(5, dtype=torch.float64).unsqueeze(0))


def test_gradients_of_any_size_make_the_same_step_and_zero_makes_none():
    torch.manual_seed(0)
    matrices = torch.randn(1, 4, 6)
    expected = orthogonalized(matrices, COEFFICIENTS["jordan"], 5)
    for norm, share in ((1e-30, 1), (1e30, 1), (0, 0)):
        result = orthogonalized(norm * matrices, COEFFICIENTS["jordan"], 5)
        torch.testing.assert_close(result, share * expected, rtol=1e-5, atol=1e-5 * share)


@pytest.mark.parametrize("scale", ["adamw_rms", "original", "spectral"])
@pytest.mark.parametrize("inputs_first", [False, True])
@pytest.mark.parametrize(("matrices", "sizes"), [(3, (8, 8, 8)), ((8, 2, 4), (8, 2, 4))])
def test_matrices_in_one_weight_are_stepped_as_if_apart(scale, inputs_first, matrices, sizes):
    """GPT-2's fused weight has the inputs first, others' have the outputs first, as those of convolutions."""
    apart = parameters(*((outputs, 6) for outputs in sizes))

    def fused(tensors):
        together = torch.cat([each.detach() for each in tensors])
        return together.T.clone() if inputs_first else together.unflatten(1, (3, 2))

    weight = nn.Parameter(fused(apart))
    optimizer = muon(apart, scale=scale)
    of_fused = muon([{"params": [weight], "matrices": matrices, "inputs_first": inputs_first}], scale=scale)
    for _ in range(3):
        gradients = [torch.randn_like(each) for each in apart]
        step(optimizer, gradients, 0.01)
        step(of_fused, [fused(gradients)], 0.01)
    torch.testing.assert_close(weight.detach(), fused(apart), rtol=0, atol=1e-12)


LAYERS = {"a": (5, 7), "b": (3, 2, 2), "c": (4, 4), "d": (1, 3)}
# By process: the bounds of parts cut through layers, and one process has only padding.
SHARDED = [
    [LayerPart("a", 0, 0, 17)],
    [LayerPart("a", 17, 0, 17)],
    [LayerPart("a", 34, 0, 1), LayerPart("b", 0, 1, 12), LayerPart("c", 0, 13, 4)],
    [LayerPart("c", 4, 0, 12), LayerPart("d", 0, 12, 3)],
    [],
]
WHOLE = [[LayerPart(name, 0, 0, prod(shape)) for name, shape in LAYERS.items()]] * 3


@pytest.mark.parametrize("held", [SHARDED, WHOLE, WHOLE[:1]], ids=["parts", "whole", "alone"])
def test_layers_are_put_together_on_one_process_each(held):
    """By a thread for each process; who has whole layers needs nothing of others."""
    layers = {name: torch.arange(prod(shape)) + 100 * number for number, (name, shape) in enumerate(LAYERS.items())}
    posted = {}
    barrier = Barrier(len(held), timeout=60)

    def exchange(rank, vectors, lengths, empty):
        posted[rank] = vectors
        barrier.wait()
        received = [torch.cat([empty, *posted[other][rank]]) for other in range(len(held))]
        assert [len(each) for each in received] == lengths
        barrier.wait()
        return received

    def put_together(rank):
        # A second tensor is stepped at another time.
        tensors = [[each, [LayerPart("e", 0, 0, 1)]] for each in held]
        processes = LayerProcesses(rank, tensors, None, partial(exchange, rank))
        process = WholeLayers([0], LAYERS | {"e": (1, 1)}, processes, torch.empty(0, dtype=torch.int64))
        mine = {each.name: layers[each.name].narrow(0, each.start, each.length) for each in held[rank]}
        owned = process.gather(mine)
        assert held is SHARDED or not any(posted[rank][:rank] + posted[rank][rank + 1 :])
        back = process.scatter(owned)
        assert back.keys() == mine.keys()
        assert all(torch.equal(back[name], part) for name, part in mine.items())
        return owned.items()

    with ThreadPoolExecutor(len(held)) as pool:
        owned = [layer for some in pool.map(put_together, range(len(held))) for layer in some]
    assert sorted(name for name, _ in owned) == sorted(LAYERS)
    assert all(torch.equal(layer, layers[name].view(LAYERS[name])) for name, layer in owned)


def groups_of(model, optimizer):
    """The options of each parameter's group, by name."""
    plan = resolve(load_config(PYDOC, [f"--optimizer={optimizer}"]), 1)
    names = {parameter: name for name, parameter in model.named_parameters()}
    return {names[each]: group for group in planned_groups(model, plan) for each in group["params"]}


class Model(nn.Module):
    """With a tied output layer, GPT-2's kind of linear layer, and an image model's names."""

    def __init__(self):
        super().__init__()
        # The tied one is registered before.
        self.tied = nn.Linear(6, 10, bias=False)
        self.wte = nn.Embedding(10, 6)
        self.wte.weight = self.tied.weight
        self.bag = nn.EmbeddingBag(10, 6)
        self.c_attn = Conv1D(18, 6)
        self.linear = nn.Linear(6, 4)
        self.conv = nn.Conv2d(3, 5, 2)
        self.norm = nn.LayerNorm(6)
        self.class_token = nn.Parameter(torch.zeros(1, 1, 6))
        # No module of its own, as in timm.
        self.pos_embed = nn.Parameter(torch.zeros(1, 5, 6))
        self.head = nn.Sequential(nn.Linear(4, 6), nn.LogSoftmax(dim=1))
        # Named as output layers are, but inside a block.
        self.blocks = nn.ModuleList([nn.ModuleDict({"fc": nn.Linear(6, 6)})])


def test_parameters_are_stepped_by_their_roles():
    model = Model()
    groups = groups_of(model, '{"name": "muon", "split": {"c_attn.weight": 3, "linear.weight": [3, 1]}}')
    matrices = {name: (each["inputs_first"], each["matrices"]) for name, each in groups.items() if each["layerwise"]}
    assert matrices == {
        "c_attn.weight": (True, 3),
        "linear.weight": (False, (3, 1)),
        "conv.weight": (False, 1),
        "blocks.0.fc.weight": (False, 1),
    }
    model.lm_head = nn.Linear(6, 10)
    assert not groups_of(model, '{"name": "muon"}')["lm_head.weight"]["layerwise"]


@pytest.mark.parametrize("option", ["adamw_names", "no_decay_names"])
def test_adamw_steps_what_is_named(option):
    groups = groups_of(Model(), f'{{"name": "muon", "{option}": ["conv.*"]}}')
    assert not groups["conv.weight"]["layerwise"]
    assert groups["linear.weight"]["layerwise"]


@pytest.mark.parametrize(
    ("optimizer", "message"),
    [
        ('{"name": "muon", "split": {"linear.weight": 3}}', "has 4 outputs, which are not 3 matrices of equal size"),
        ('{"name": "muon", "split": {"linear.weight": [2, 1]}}', r"has 4 outputs, .* a list of the outputs of each"),
        ('{"name": "muon", "split": {"c_attn.bias": 3}}', r"shape \(18,\) that AdamW steps"),
        ('{"name": "muon", "split": {"tied.weight": 2}}', r"shape \(10, 6\) that AdamW steps"),
        ('{"name": "muon", "split": {"attn.weight": 3}}', 'optimizer.split: "attn.weight" matches no trainable'),
        ('{"name": "muon", "adamw_names": ["pos"]}', 'optimizer.adamw_names: "pos" matches no trainable'),
    ],
)
def test_names_that_have_no_effect_are_refused(optimizer, message):
    with pytest.raises(ConfigError, match=message):
        groups_of(Model(), optimizer)


@pytest.mark.parametrize(
    ("module", "message"),
    [
        (nn.ParameterDict({"weight": torch.zeros(4, 5, 6)}), r"which matrices a parameter of shape \(4, 5, 6\) holds"),
        (nn.ConvTranspose2d(4, 12, 2, bias=False), "holds: it belongs to no convolution, or to a transp"),
    ],
)
def test_matrices_that_cannot_be_told_are_refused_unless_named(module, message):
    model = nn.Sequential(nn.Linear(6, 4), module)
    with pytest.raises(ConfigError, match=message):
        groups_of(model, '{"name": "muon"}')
    assert not groups_of(model, '{"name": "muon", "adamw_names": ["1.*"]}')["1.weight"]["layerwise"]


@pytest.mark.parametrize(("rule", "momentum", "betas"), [("half_life", 0.81, (0.9, 0.9025)), ("sde", 0.8, (0.8, 0.9))])
def test_momentum_follows_the_batch_as_betas_do(rule, momentum, betas):
    """By hand, at twice the batch that they were tuned at: 0.9 ** 2, and 1 - 2 x (1 - 0.9)."""
    words = [f'--optimizer={{"name": "muon", "momentum": 0.9, "beta_scaling": "{rule}"}}']
    words += ["--learning_rate.scaling=sqrt", "--learning_rate.reference_batch_size=16"]
    config = load_config(PYDOC, [*words, "--batch.global_batch_size=32"])
    options = resolve(config, 1).optimizer_options
    assert options["momentum"] == pytest.approx(momentum)
    assert options["betas"] == pytest.approx(betas)


def test_a_group_without_gradients_is_left_alone():
    """As with blocks that a step leaves out."""
    left_out, stepped = parameters((4, 3), (4, 3))
    optimizer = muon([{"params": [left_out]}, {"params": [stepped]}], lr=0.1)
    before = left_out.detach().clone()
    stepped.grad = torch.ones_like(stepped)
    optimizer.step()
    assert torch.equal(left_out.detach(), before)
    assert left_out not in optimizer.state
    assert stepped in optimizer.state


MODEL = ModelShape(
    (
        ParameterShape("small", (16, 32), 0, 0),
        ParameterShape("large", (64, 32), 0, 0),
        ParameterShape("head", (32, 100), 1, 0),
    ),
    frozenset(),
    0,
    element_bytes=4,
    group_options=({"layerwise": True, "inputs_first": False, "matrices": 1}, {"layerwise": False}),
    exchanged_groups=frozenset({0}),
)
MATRICES = 16 * 32 + 64 * 32  # elements


def exchange_of(strategy, world_size):
    """The one exchange of a step."""
    counted = traffic_of_a_step(TrafficCase(MODEL, strategy, world_size, 1))
    (found,) = (each for each in counted if each.operation == "exchange")
    return found


def test_the_plan_has_what_is_exchanged():
    """Of four processes, each sends three quarters of what it has: its quarter and back, or its results, to all."""
    sharded = exchange_of(Strategy("zero1", ZeroSettings(1)), 4)
    assert sharded.sent == 2 * 4 * MATRICES // 4 * 3 // 4
    assert exchange_of(Strategy("ddp"), 4).sent == 4 * MATRICES * 3 // 4
    # Two of its three messages leave a node of two.
    assert sharded.sent_between_nodes(2) == sharded.sent * 2 // 3
    assert sharded.sent_between_nodes(4) == 0
    within = exchange_of(Strategy("hsdp", shard_size=2), 4)
    assert (within.group.size, within.sent) == (2, 2 * 4 * MATRICES // 2 // 2)
    fabric = Fabric(2, node_bandwidth=1e6, net_bandwidth=1e4, call_latency=1, node_latency=0, net_latency=10)
    assert collective_seconds(sharded, fabric) == pytest.approx(1 + 10 + MATRICES / 2 / 1e4)


def test_the_plan_has_the_matrix_products_of_the_busiest_process():
    """Five times 4 m^2 n + 2 m^3: 204,800 for the small layer, 1,638,400 for the large one."""
    config = load_config(PYDOC, [MUON])
    hardware = Hardware(1e12, 2e12, Fabric(8, 1e30, 1e30, 0, 0, 0))
    strategies = [Strategy("ddp"), Strategy("hsdp", shard_size=1)]
    compared = compare_strategies("x", config, Workload(MODEL, flops=(1, 1)), strategies, [1, 2], 2**40, hardware)
    found = [list(column["strategies"].values()) for column in compared["world_sizes"]]
    assert [[each["update_flops"] for each in options] for options in found] == [
        [1_843_200, 1_843_200],
        [1_638_400, 1_843_200],
    ]
    # At half of the peak in bf16.
    assert found[1][0]["step_seconds"]["least"] == pytest.approx(1_638_400 / 1e12, rel=1e-3)


@pytest.mark.parametrize("options", [{}, {"matrices": (3, 1, 2)}, {"inputs_first": True, "matrices": 3}])
def test_matrix_products_are_those_that_are_computed(options):
    group = {"layerwise": True, "inputs_first": False, "matrices": 1} | options
    parameter = nn.Parameter(torch.ones(6, 3, 2) if options == {} else torch.ones(6, 12))
    parameter.grad = torch.ones_like(parameter)
    optimizer = muon([{"params": [parameter], **group}], lr=0.1)
    with FlopCounterMode(display=False) as counter:
        optimizer.step()
    assert counter.get_total_flops() == muon_products({"iterations": 5} | group, tuple(parameter.shape))


def test_the_plan_has_the_copies_of_layers():
    def copies(strategy, world_size):
        plan = SimpleNamespace(world_size=world_size, max_gradient_accumulation_steps=1, states_of=lambda *_: {})
        phases = model_states(MODEL, strategy, plan).phases
        return max(phase.transient.get("exchanged layers", 0) for phase in phases)

    assert copies(Strategy("ddp"), 1) == 4 * 6 * MATRICES
    # A process owns at least the largest layer.
    assert copies(Strategy("fsdp"), 4) == 4 * 6 * 64 * 32
    assert copies(Strategy("ddp"), 1000) == 4 * 6 * 64 * 32


SPLIT = MUON.replace("3}", '3, "*.c_fc.weight": [32, 96]}')
WORDS = (*SMALL_GPT, SPLIT, "--batch.global_batch_size=24", "--batch.micro_batch_size=2")
CHAIN = [("zero3", 2), ("ddp", 2), ("zero1", 3), ("hsdp", 4), ("fsdp", 2)]


@pytest.mark.slow
def test_a_run_under_all_strategies_is_that_of_one_process(tmp_path):
    """Up to rounding, which is enlarged in small singular values. Where layers meet, there is none (see above)."""
    words = (*WORDS, "--logging.trackers=[]")
    train_in_job(PYDOC, tmp_path / "whole", *words, f"--train.stop_after_steps={2 * len(CHAIN)}", strategy="single")
    for number, (strategy, world_size) in enumerate(CHAIN, 1):
        place = {"strategy": strategy, "world_size": world_size, "environment": {"LARGEBATCH_SHARD_SIZE": "2"}}
        train_in_job(PYDOC, tmp_path / "chain", *words, f"--train.stop_after_steps={2 * number}", **place)
    assert_close_weights(tmp_path / "chain", tmp_path / "whole", tolerance=1e-4)
