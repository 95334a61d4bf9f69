"""Published throughput of one configuration on several numbers of GPUs, with its source, and the share fitted to it.

Within a series only the number of GPUs differs: model, micro-batch, accumulation and checkpointing of activations are
the same. Its smallest number of GPUs says how long a micro-batch takes to compute; the model predicts the others.

Every figure was read in its source except Goyal et al.'s, as noted there. Networks are from data sheets, latencies from
NCCL's source; no source says what its network really delivered.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from model import Fabric, Job, computing_seconds, step_seconds

# NCCL, src/graph/tuning.cc: `baseLatencies` and `hwLatencies` of Ring with the protocol Simple, in microseconds: 8.4 a
# call, 3.4 a hop by NVLink, 14 by network. Its tree has 4.0 within a node, for which 3.4 stands here, too.
CALL, NODE_HOP, NET_HOP = 8.4e-6, 3.4e-6, 14e-6

H100 = Fabric(8, CALL, NODE_HOP, NET_HOP, node_bandwidth=450e9, net_bandwidth=50e9)
"""DGX H100's data sheet: NVLink 900 GB/s both ways, 400 Gb/s of network for each GPU. torchtitan's and WhiteFiber's
machines are described so; llm-foundry does not say what connects its H100s."""
A100 = Fabric(8, CALL, NODE_HOP, NET_HOP, node_bandwidth=300e9, net_bandwidth=25e9)
"""NVLink 600 GB/s both ways (A100's data sheet); 1,600 Gb/s for each node (llm-foundry)."""
BIG_BASIN = Fabric(8, CALL, NODE_HOP, NET_HOP, node_bandwidth=80e9, net_bandwidth=50e9 / 8 / 8)
"""P100: NVLink 160 GB/s both ways (data sheet); 50 Gb/s for each server, as the issue tracker quotes the paper."""

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


@dataclass(frozen=True)
class Series:
    """One configuration on several numbers of GPUs."""

    name: str
    source: str
    fabric: Fabric
    job: Job
    work: float
    """Of a GPU in an optimizer step, in the unit of the throughput: tokens or images."""
    throughput: dict[int, float]
    """A second and GPU, by the number of GPUs."""
    is_fitted: bool = False
    """Whether the exposed share is fitted to it; predicted from the others if not."""

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
        computing = computing_seconds(step, self.job, self.reference, self.fabric, exposed_share)
        return step / step_seconds(computing, self.job, gpus, self.fabric, exposed_share)


def _mpt(
    name: str,
    fabric: Fabric,
    params: int,
    layers: int,
    sequences: int,
    throughput: dict[int, float],
    strategy: str = "full_shard",
    micro_batches: int = 1,
) -> Series:
    """llm-foundry's MPT, with micro-batches of so many sequences of 2,048 tokens.

    Layers are those that `NumParams` and the model's width leave room for (tests/scale). Weights are gathered and
    gradients reduced in bf16: "PURE" says so, and "DEFAULT" leaves the reduction to PyTorch, which takes the weights'
    precision (2.13, `FlatParamHandle._init_param_reduce_dtypes`).
    """
    job = Job(strategy, params, layers + 1, micro_batches, gather_bytes=2, reduce_bytes=2)
    return Series(name, FOUNDRY, fabric, job, 2048 * sequences * micro_batches, throughput)


_LLAMA_8B = Job("fsdp2", 8_030_261_248, 33, gather_bytes=2, reduce_bytes=4)
# Epochs x ImageNet's images, in 29 hours on 8 GPUs.
_GOYAL_8 = 90 * 1_281_167 / (29 * 3600) / 8

SERIES = [
    # The two smallest models of the table to 512 GPUs: they spend the largest share of a step on communication, and
    # gather once, unlike all that is held out.
    replace(
        _mpt("MPT-1B, H100", H100, 1315950592, 24, 12, {128: 44123, 256: 42555, 512: 39837}, "shard_grad_op"),
        is_fitted=True,
    ),
    replace(
        _mpt("MPT-3B, H100", H100, 2651837440, 32, 8, {128: 23422, 256: 22772, 512: 21664}, "shard_grad_op"),
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
        replace(_LLAMA_8B, gather_bytes=1),
        2 * 8192,
        {32: 10938, 64: 10753},
    ),
    # Of the paper only the abstract was read, whose "~90%" it is. 29 hours on 8 GPUs are NVIDIA's
    # (https://developer.nvidia.com/facebook-trains-imagenet-1-hour), network and algorithm as the issue tracker quotes
    # them. A call for each of ResNet-50's 161 parameters is an assumption; with one for all the model gives 0.04 more.
    Series(
        "ResNet-50, P100, Goyal et al.",
        GOYAL,
        BIG_BASIN,
        Job("goyal", 25_557_032, 161),
        32,
        {8: _GOYAL_8, 256: 0.90 * _GOYAL_8},
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

    low, high = 0.0, 1.0
    for _ in range(40):
        third = (high - low) / 3
        if squares(low + third) < squares(high - third):
            high -= third
        else:
            low += third
    return (low + high) / 2
