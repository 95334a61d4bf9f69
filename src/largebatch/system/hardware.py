"""GPUs and networks by name, with the figures of their data sheets."""

from dataclasses import dataclass
from typing import NamedTuple

GIB = 2**30


@dataclass(frozen=True)
class Gpu:
    """A kind of GPU; None where a data sheet has no such figure."""

    name: str  # as given to `largebatch plan --gpu`
    device_words: tuple[str, ...]  # words of the name that torch reports for it
    memory_gib: float  # GiB that torch reports as `total_memory`, the smallest over several drivers
    bf16_tflops: float | None  # dense 10^12 operations per second with tensor cores
    fp32_tflops: float  # the same without tensor cores: training does not use TF32
    fp64_tflops: float | None  # the same, with tensor cores if they support it
    memory_gb_per_s: float  # 10^9 bytes per second to its own memory
    link_gb_per_s: float  # 10^9 bytes per second and direction to the other GPUs of its node

    @property
    def memory_bytes(self) -> int:
        """The memory that torch reports."""
        return round(self.memory_gib * GIB)

    def peak_tflops(self, precision: str) -> float | None:
        """The peak of a recipe's precision."""
        return {"bf16": self.bf16_tflops, "fp32": self.fp32_tflops, "fp64": self.fp64_tflops}[precision]


class Network(NamedTuple):
    """What connects the nodes."""

    bandwidth: float  # bytes per second and direction
    owner: str  # what has this bandwidth: a "gpu", or a "node" whose GPUs share it

    def per_gpu(self, gpus_per_node: int) -> float:
        """The bandwidth of each GPU."""
        return self.bandwidth if self.owner == "gpu" else self.bandwidth / gpus_per_node


# A device is the first whose words are all in its name.
GPUS = (
    Gpu("v100-32gb", ("V100", "SXM"), 31.7, None, 15.7, 7.8, 900, 150),
    Gpu("v100-pcie", ("V100", "PCIE"), 31.7, None, 14.0, 7.0, 900, 16),
    Gpu("a100-80gb", ("A100", "80GB"), 79.1, 312, 19.5, 19.5, 2039, 300),
    Gpu("a100-40gb", ("A100",), 39.4, 312, 19.5, 19.5, 1555, 300),
    # PCI Express 4.0 x16.
    Gpu("l40s", ("L40S",), 44.4, 362, 91.6, None, 864, 32),
    Gpu("h100-80gb", ("H100", "HBM3"), 79.1, 989, 67, 67, 3350, 450),
    # PCI Express 5.0 x16 here and below: NVLink joins pairs only.
    Gpu("h100-pcie", ("H100", "PCIe"), 79.1, 756, 51, 51, 2000, 64),
    Gpu("h100-nvl", ("H100", "NVL"), 93.0, 835, 60, 60, 3900, 64),
    Gpu("h200-nvl", ("NVIDIA H200", "NVL"), 139.7, 835, 60, 60, 4800, 64),
    Gpu("h200", ("NVIDIA H200",), 139.7, 989, 67, 67, 4800, 450),
    Gpu("b200", ("NVIDIA B200",), 178.3, 2250, 75, None, 8000, 900),
)
SHORT_NAMES = {"v100": "v100-32gb", "a100": "a100-80gb", "h100": "h100-80gb"}


def find_gpu(name: str) -> Gpu | None:
    """The GPU of a name in `GPUS`, of a short one, or of one that torch reports; a slice of a GPU (MIG) has none."""
    given = name.strip().lower()
    for gpu in GPUS:
        if gpu.name == SHORT_NAMES.get(given, given):
            return gpu
    if "MIG" in name.split():
        return None
    return next((gpu for gpu in GPUS if all(word in name for word in gpu.device_words)), None)


def kept_back(memory_bytes: int) -> int:
    """Bytes that a plan leaves free: for CUDA's context, NCCL, work space and the allocator's fragmentation."""
    return max(4 * GIB, memory_bytes * 8 // 100)
