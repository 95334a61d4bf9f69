"""How well the step times of `largebatch plan --gpu` predict published throughput on several numbers of GPUs.

    python bench/scale.py

Prints each published efficiency beside that of `largebatch.estimate.step_time`. Nothing is measured: the figures are
below, each with its source, and one constant, the exposed share, is fitted to four of them.

Within a series only the number of GPUs differs: model, micro-batch, accumulation and checkpointing of activations are
the same. Its smallest number of GPUs says how long a micro-batch takes to compute; the model predicts the others.

Every figure was read in its source except Goyal et al.'s, as noted there. Networks are from data sheets; no source says
what its network really delivered.
"""

import argparse
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache

from largebatch.estimate.model_shape import ModelShape, ParameterShape, Strategy
from largebatch.estimate.step_time import Fabric, step_seconds
from largebatch.estimate.traffic import Collective, TrafficCase, traffic_of_a_step

H100 = Fabric(8, node_bandwidth=450e9, net_bandwidth=50e9)
"""DGX H100's data sheet: NVLink 900 GB/s both ways, 400 Gb/s of network for each GPU. torchtitan's and WhiteFiber's
machines are described so; llm-foundry does not say what connects its H100s."""
A100 = Fabric(8, node_bandwidth=300e9, net_bandwidth=25e9)
"""NVLink 600 GB/s both ways (A100's data sheet); 1,600 Gb/s for each node (llm-foundry)."""
BIG_BASIN = Fabric(8, node_bandwidth=80e9, net_bandwidth=50e9 / 8 / 8)
"""P100: NVLink 160 GB/s both ways (data sheet); 50 Gb/s for each server, as the issue tracker quotes the paper."""
DLPERF_V100 = Fabric(8, node_bandwidth=150e9, net_bandwidth=100e9 / 8 / 8)
"""V100-SXM2: NVLink 300 GB/s both ways (data sheet); one port of 100 Gb/s InfiniBand for each node of 8, as `ibstat` in
the source shows."""
PASCAL = Fabric(4, node_bandwidth=16e9, net_bandwidth=25e9 / 8 / 4)
"""25 Gb/s for each server of 4 GPUs (Horovod); PCI Express 3.0 x16 within it is an assumption that matters little."""
GOOGLE_A2 = Fabric(4, node_bandwidth=300e9, net_bandwidth=50e9 / 8 / 4)
"""a2-highgpu-4g: 4 A100s of 40 GB, at most 50 Gb/s for each virtual machine (Google Cloud's page on A2 machines)."""
KEMPNER = Fabric(1, node_bandwidth=450e9, net_bandwidth=50e9)
"""One GPU of each node: tensor parallelism has its node to itself. NDR InfiniBand of 400 Gb/s (config_validation.md of
the same repository); that each GPU has a port is an assumption."""

FOUNDRY = (
    "https://github.com/mosaicml/llm-foundry/blob/c90b9b312c644dbde5c9e6eef75c6f1c117d8782/"
    "scripts/train/benchmarking/README.md"
)
TORCHTITAN = (
    "https://github.com/pytorch/torchtitan/blob/31a17bfdb70bab6f62a13d21816a5339b911d6e3/"
    "benchmarks/llama3_h100_202412_torchtitan.md"
)
WHITEFIBER = (
    "https://github.com/pytorch/torchtitan/blob/1af29373a02c4beb237c2de02793931ce53b48d8/"
    "benchmarks/llama3-8b_h200_202506_trainy-whitefiber.md"
)
GOYAL = "https://arxiv.org/abs/1706.02677"
OUMI = "https://github.com/oumi-ai/oumi/pull/213"
KEMPNER_FORGE = (
    "https://github.com/KempnerInstitute/KempnerForge/blob/5666d0d161539998210f99f16f986b1ab76cbffe/"
    "benchmarks/mfu_scaling/mfu_scaling.md"
)
DLPERF = (
    "https://github.com/Oneflow-Inc/DLPerf/tree/c89430bac64f64caabb0445ff7eb80175641454c/NVIDIADeepLearningExamples"
)
HOROVOD = "https://github.com/horovod/horovod/blob/27743d08ca7a59290b52154c8cddc807006436d3/docs/benchmarks.rst"
HOROVOD_32 = "https://github.com/bobohuang/horovod"

Sent = Callable[[int], Sequence[Collective]]
"""The collectives of a step on a number of GPUs."""


def by_strategy(
    strategy: Strategy,
    params: int,
    units: int,
    micro_batches: int = 1,
    gather_bytes: int = 4,
    reduce_bytes: int = 4,
) -> Sent:
    """What a strategy of `largebatch plan` sends of a model of `units` equal parts.

    Args:
        strategy: The strategy.
        params: The model's parameters.
        units: Pieces that a sharded model is gathered in: its layers, and one for the rest.
        micro_batches: Micro-batches of each GPU per optimizer step.
        gather_bytes: Bytes per element of gathered weights.
        reduce_bytes: Bytes per element of reduced gradients.
    """
    sizes = [params // units + (unit < params % units) for unit in range(units)]
    shapes = (
        ParameterShape(str(unit), (size,), 0, unit, in_bf16=gather_bytes != reduce_bytes)
        for unit, size in enumerate(sizes)
    )
    model = ModelShape(tuple(shapes), frozenset(), 0, reduce_bytes)

    @cache
    def sent(gpus: int) -> Sequence[Collective]:
        found = traffic_of_a_step(TrafficCase(model, strategy, gpus, micro_batches))
        # The plan knows no gathers in 1 byte.
        halved = gather_bytes == 1
        return [replace(each, size=each.size // 2) if halved and each.operation == "gather" else each for each in found]

    return sent


@dataclass(frozen=True)
class Series:
    """One configuration on several numbers of GPUs.

    Args:
        name: The model and the hardware.
        source: Address of the figures.
        fabric: The network between the GPUs.
        sent: The bytes that a step sends.
        work: The work of a GPU per optimizer step, in the unit of the throughput: tokens, samples or images.
        throughput: Per second and GPU, by the number of GPUs.
        micro_batches: Micro-batches of each GPU per optimizer step.
        forward_share: The share of the forward pass: a backward pass costs two of them, or three with recomputation.
        is_fitted: Whether the exposed share is fitted to it; predicted from the others if not.
    """

    name: str
    source: str
    fabric: Fabric
    sent: Sent
    work: float
    throughput: dict[int, float]
    micro_batches: int = 1
    forward_share: float = 1 / 3
    is_fitted: bool = False

    @property
    def reference(self) -> int:
        """The smallest number of GPUs."""
        return min(self.throughput)

    @property
    def predicted(self) -> list[int]:
        """The numbers of GPUs above the reference."""
        return sorted(self.throughput)[1:]

    def efficiency(self, gpus: int) -> float:
        """Published throughput of a GPU over that at the reference."""
        return self.throughput[gpus] / self.throughput[self.reference]

    def model_efficiency(self, gpus: int, exposed_share: float) -> float:
        """The same from the model."""
        step = self.work / self.throughput[self.reference]
        return step / self.step_seconds(self.computing_seconds(step, exposed_share), gpus, exposed_share)

    def step_seconds(self, computing: float, gpus: int, exposed_share: float) -> float:
        """Time of a step, with the seconds that a micro-batch computes."""
        parts = (self.forward_share * computing, (1 - self.forward_share) * computing)
        return step_seconds(self.sent(gpus), parts, self.micro_batches, self.fabric, exposed_share)

    def computing_seconds(self, step: float, exposed_share: float) -> float:
        """Computing of a micro-batch, from the time of a step that was measured at the reference.

        Raises:
            ValueError: Communication alone would take longer than the step did.
        """
        if self.step_seconds(0.0, self.reference, exposed_share) > step:
            raise ValueError(f"{self.name} on {self.reference} GPUs communicates for longer than a step of {step:g} s")
        low = 0.0
        high = step
        for _ in range(60):
            middle = (low + high) / 2
            if self.step_seconds(middle, self.reference, exposed_share) < step:
                low = middle
            else:
                high = middle
        return high


FULL_SHARD = Strategy("fsdp", reshards=True, reduces_each=True)
SHARD_GRAD_OP = Strategy("fsdp", reshards=False, reduces_each=True)
DDP = Strategy("ddp")
FSDP2 = Strategy("fsdp")


def _mpt(
    name: str,
    fabric: Fabric,
    params: int,
    layers: int,
    sequences: int,
    throughput: dict[int, float],
    strategy: Strategy = FULL_SHARD,
    micro_batches: int = 1,
) -> Series:
    """llm-foundry's MPT, with micro-batches of so many sequences of 2,048 tokens.

    Layers are those that `NumParams` and the model's width leave room for. Weights are gathered and
    gradients reduced in bf16: "PURE" says so, and "DEFAULT" leaves the reduction to PyTorch, which takes the weights'
    precision (2.13, `FlatParamHandle._init_param_reduce_dtypes`).
    """
    sent = by_strategy(strategy, params, layers + 1, micro_batches, gather_bytes=2, reduce_bytes=2)
    return Series(name, FOUNDRY, fabric, sent, 2048 * sequences * micro_batches, throughput, micro_batches)


def _dlperf(name: str, params: int, samples: int, together: dict[int, float]) -> Series:
    """NVIDIA's examples in fp32, as DLPerf ran them, with the samples a second of all GPUs."""
    throughput = {gpus: all_gpus / gpus for gpus, all_gpus in together.items()}
    return Series(f"{name}, V100, DLPerf", DLPERF, DLPERF_V100, by_strategy(DDP, params, 1), samples, throughput)


def _oumi(name: str, shard_size: int | None, together: dict[int, float]) -> Series:
    """Llama 2B with 16 micro-batches of 16 samples, all gathered and reduced in bf16, recomputing every layer.

    configs/{accelerate/sample_fsdp_llama3,skypilot/sky_llama2b_fsdp,lema/llama2b.pt}.yaml at the pull request's commit
    b9c6cc8; nodes have 4 GPUs (pull requests 205, 236). The model is HuggingFaceFW/ablation-model-fineweb-v1's
    1.82 B parameters in 24 layers. Accelerate defers FSDP's reduction to the last micro-batch.
    """
    sent = by_strategy(Strategy("fsdp", shard_size=shard_size), 1_820_000_000, 25, 16, gather_bytes=2, reduce_bytes=2)
    throughput = {gpus: all_gpus / gpus for gpus, all_gpus in together.items()}
    return Series(f"Llama 2B, A100, oumi, {name}", OUMI, GOOGLE_A2, sent, 16 * 16, throughput, 16, forward_share=1 / 4)


def _kempner(name: str, params: int, layers: int, micro_batches: int, together: dict[int, float]) -> Series:
    """Tensor parallelism over the 4 GPUs of a node, FSDP2 between nodes: of each 4th GPU, with a 4th of the model.

    Sequences of 4,096 tokens, 4 in a micro-batch; every layer is recomputed, gradients are reduced in fp32 with the
    last micro-batch (`default_mp_policy`, `maybe_no_sync`).
    """
    sent = by_strategy(FSDP2, params // 4, layers + 1, micro_batches, gather_bytes=2, reduce_bytes=4)
    throughput = {nodes: tokens / nodes for nodes, tokens in together.items()}
    title = f"Llama {name}, H200, KempnerForge, nodes"
    work = 4 * 4096 * micro_batches
    return Series(title, KEMPNER_FORGE, KEMPNER, sent, work, throughput, micro_batches, forward_share=1 / 4)


_LLAMA_8B = by_strategy(FSDP2, 8_030_261_248, 33, gather_bytes=2, reduce_bytes=4)
# Epochs x ImageNet's images, in 29 hours on 8 GPUs.
_GOYAL_8 = 90 * 1_281_167 / (29 * 3600) / 8

SERIES = [
    # The two smallest models of the table to 512 GPUs: they spend the largest share of a step on communication, and
    # gather once, unlike all that is held out.
    replace(
        _mpt("MPT-1B, H100", H100, 1315950592, 24, 12, {128: 44123, 256: 42555, 512: 39837}, SHARD_GRAD_OP),
        is_fitted=True,
    ),
    replace(
        _mpt("MPT-3B, H100", H100, 2651837440, 32, 8, {128: 23422, 256: 22772, 512: 21664}, SHARD_GRAD_OP),
        is_fitted=True,
    ),
    _mpt("MPT-7B, H100", H100, 6658859008, 32, 6, {8: 10643, 128: 10475, 256: 10119, 512: 9670}),
    _mpt("MPT-13B, H100", H100, 12853954560, 40, 16, {128: 5080, 256: 4989, 512: 4952}),
    _mpt("MPT-30B, H100", H100, 29975214080, 48, 8, {128: 2199, 256: 2148, 512: 2115}),
    _mpt("MPT-70B, H100", H100, 64862437376, 80, 8, {128: 1058, 256: 1035, 512: 1007}),
    _mpt("MPT-760M, H100", H100, 760470528, 24, 24, {16: 68551, 32: 67971}),
    _mpt("MPT-1B, H100, micro-batch 20", H100, 1315950592, 24, 20, {16: 46037, 32: 45130, 64: 44402}),
    _mpt("MPT-3B, H100, 3 micro-batches", H100, 2651837440, 32, 6, {32: 23021, 64: 22525}, micro_batches=3),
    _mpt("MPT-13B, H100, micro-batch 2", H100, 12853954560, 40, 2, {8: 4792, 16: 4767, 32: 4811, 64: 4800}),
    _mpt("MPT-125M, A100", A100, 125311488, 12, 26, {16: 130535, 32: 127122, 64: 125234, 128: 123936}),
    _mpt("MPT-350M, A100", A100, 355985408, 24, 18, {16: 55413, 32: 53811, 64: 52689, 128: 51934}),
    _mpt("MPT-760M, A100", A100, 760470528, 24, 12, {16: 29607, 32: 29648, 64: 29344, 128: 28940}),
    # Without its 32 GPUs, which give 15,555: a fifth less than 16 and 64 GPUs give.
    _mpt("MPT-1B, A100", A100, 1315950592, 24, 10, {64: 19001, 128: 18647}),
    _mpt("MPT-3B, A100", A100, 2651837440, 32, 6, {32: 9914, 64: 9736, 128: 9538}),
    _mpt("MPT-7B, A100", A100, 6658859008, 32, 18, {32: 3725, 64: 3665, 128: 3623}),
    _mpt("MPT-13B, A100", A100, 12853954560, 40, 16, {64: 1976, 128: 1972}),
    Series("Llama 8B, H100, torchtitan", TORCHTITAN, H100, _LLAMA_8B, 2 * 8192, {8: 5762, 128: 5605}),
    Series("Llama 8B, H100, torchtitan, compiled", TORCHTITAN, H100, _LLAMA_8B, 2 * 8192, {8: 6667, 128: 6514}),
    # Linear weights are gathered in 8 bits.
    Series(
        "Llama 8B, H200, torchtitan, float8",
        WHITEFIBER,
        H100,
        by_strategy(FSDP2, 8_030_261_248, 33, gather_bytes=1, reduce_bytes=4),
        2 * 8192,
        {32: 10938, 64: 10753},
    ),
    # Of the paper only the abstract was read, whose "~90%" it is. 29 hours on 8 GPUs are NVIDIA's
    # (https://developer.nvidia.com/facebook-trains-imagenet-1-hour), network and algorithm as the issue tracker quotes
    # them: a reduction in each node, between nodes and back, which is not far from DDP's.
    Series(
        "ResNet-50, P100, Goyal et al.",
        GOYAL,
        BIG_BASIN,
        by_strategy(DDP, 25_557_032, 1),
        32,
        {8: _GOYAL_8, 256: 0.90 * _GOYAL_8},
    ),
    # Both are the same on one node.
    _oumi("FULL_SHARD", None, {4: 21.7, 16: 55.349}),
    _oumi("HYBRID_SHARD", 4, {4: 21.7, 8: 40.8, 16: 74.41}),
    _kempner("7B", 8_030_000_000, 32, 2, {1: 25135, 2: 44299, 4: 82988, 8: 155917}),
    _kempner("13B", 14_840_000_000, 40, 4, {2: 27345, 4: 53814, 8: 104309}),
    # BertForPreTraining; apex's and Horovod's all-reduce of fp32 gradients.
    _dlperf("BERT-base, PyTorch, 32 samples", 110_106_428, 32, {1: 119.6, 8: 921.32, 16: 1499.4, 32: 2885.81}),
    _dlperf("BERT-base, PyTorch, 48 samples", 110_106_428, 48, {1: 121.94, 8: 928.01, 16: 1584.32, 32: 3039.3}),
    _dlperf("BERT-base, TensorFlow, 32 samples", 110_106_428, 32, {1: 107.33, 8: 790.03, 16: 1404.04, 32: 2727.9}),
    _dlperf("BERT-base, TensorFlow, 48 samples", 110_106_428, 48, {1: 112.76, 8: 855.45, 16: 1576.88, 32: 3089.74}),
    _dlperf("ResNet-50, PyTorch, 128 images", 25_557_032, 128, {1: 367.29, 8: 2887.65, 16: 5716.79, 32: 10917.09}),
    # Horovod gives efficiencies; a P100's images per second are TensorFlow's (performance/benchmarks.md, 64 images).
    Series(
        "VGG-16, Pascal, Horovod, 512 GPUs",
        HOROVOD,
        PASCAL,
        by_strategy(DDP, 138_357_544, 1),
        64,
        {1: 154, 512: 0.68 * 154},
    ),
    Series(
        "VGG-16, Pascal, Horovod, 128 GPUs",
        HOROVOD_32,
        PASCAL,
        by_strategy(DDP, 138_357_544, 1),
        64,
        {1: 154, 128: 0.79 * 154},
    ),
    Series(
        "Inception V3, Pascal, Horovod",
        HOROVOD,
        PASCAL,
        by_strategy(DDP, 23_834_568, 1),
        64,
        {1: 142, 512: 0.90 * 142},
    ),
]


def fit_exposed_share(series: Sequence[Series]) -> float:
    """The share in [0, 1] with the least sum of squares of log(model / published) over the fitted series."""

    def squares(share: float) -> float:
        return sum(
            math.log(each.model_efficiency(gpus, share) / each.efficiency(gpus)) ** 2
            for each in series
            if each.is_fitted
            for gpus in each.predicted
        )

    low = 0.0
    high = 1.0
    for _ in range(40):
        third = (high - low) / 3
        if squares(low + third) < squares(high - third):
            high -= third
        else:
            low += third
    return (low + high) / 2


@dataclass(frozen=True)
class Prediction:
    """A published efficiency, and the model's."""

    series: Series
    gpus: int
    published: float
    model: float

    @property
    def error(self) -> float:
        """The model's error, relative to the published efficiency."""
        return self.model / self.published - 1


def predictions(share: float) -> list[Prediction]:
    """All figures above the references, with an exposed share."""
    return [
        Prediction(series, gpus, series.efficiency(gpus), series.model_efficiency(gpus, share))
        for series in SERIES
        for gpus in series.predicted
    ]


def main() -> None:
    """Print the figures, and how far the model is from those that it was not fitted to."""
    parser = argparse.ArgumentParser(description="Compare the step times of the plan with published figures.")
    parser.parse_args()
    share = fit_exposed_share(SERIES)
    found = predictions(share)
    for each in found:
        gpus = f"{each.series.reference} → {each.gpus}"
        use = "fitted" if each.series.is_fitted else "held out"
        print(f"{each.series.name:<48}{gpus:>10}{each.published:>7.3f}{each.model:>7.3f}{each.error:>+8.1%}  {use}")
    print(f"exposed share: {share:.2f}")
    held_out = [each for each in found if not each.series.is_fitted]
    for title, group in {
        "published under 0.9": [each for each in held_out if each.published < 0.9],
        "published from 0.9 on": [each for each in held_out if each.published >= 0.9],
    }.items():
        root_mean_square = math.sqrt(sum(each.error**2 for each in group) / len(group))
        print(f"{title}: {len(group)} held out, root-mean-square error {root_mean_square:.1%}")


if __name__ == "__main__":
    main()
