"""GPUs and networks by name, with the figures of their data sheets."""

from dataclasses import dataclass

GIB = 2**30


@dataclass(frozen=True)
class Gpu:
    """A kind of GPU."""

    name: str  # as given to `largebatch plan --gpu`
    device_words: tuple[str, ...]  # words of the name that torch reports for it
    memory_gib: float  # GiB that torch reports as `total_memory`, the smallest over several drivers
    bf16_tflops: float  # dense 10^12 operations per second with tensor cores
    fp32_tflops: float  # the same without tensor cores: training does not use TF32
    memory_gb_per_s: float  # 10^9 bytes per second to its own memory
    link_gb_per_s: float  # 10^9 bytes per second and direction to the other GPUs of its node

    def peak_tflops(self, precision: str) -> float | None:
        """The peak of a recipe's precision; None for fp64."""
        return {"bf16": self.bf16_tflops, "fp32": self.fp32_tflops}.get(precision)


# A device is the first whose words are all in its name.
GPUS = (
    Gpu("a100", ("A100", "80GB"), 79.1, 312, 19.5, 2039, 300),
    Gpu("a100-40gb", ("A100",), 39.4, 312, 19.5, 1555, 300),
    # PCI Express 4.0 x16.
    Gpu("l40s", ("L40S",), 44.4, 362, 91.6, 864, 32),
    Gpu("h100", ("H100", "HBM3"), 79.1, 989, 67, 3350, 450),
    # PCI Express 5.0 x16 here and below: NVLink joins pairs only.
    Gpu("h100-pcie", ("H100", "PCIe"), 79.1, 756, 51, 2000, 64),
    Gpu("h100-nvl", ("H100", "NVL"), 93.0, 835, 60, 3900, 64),
    Gpu("h200-nvl", ("NVIDIA H200", "NVL"), 139.7, 835, 60, 4800, 64),
    Gpu("h200", ("NVIDIA H200",), 139.7, 989, 67, 4800, 450),
    Gpu("b200", ("NVIDIA B200",), 178.3, 2250, 75, 8000, 900),
)


def find_gpu(name: str) -> Gpu | None:
    """The GPU of a name that torch reports; a slice of a GPU (MIG) has none."""
    if "MIG" in name.split():
        return None
    return next((gpu for gpu in GPUS if all(word in name for word in gpu.device_words)), None)


def kept_back(memory_bytes: int) -> int:
    """Bytes that a plan leaves free: for CUDA's context, NCCL, work space and the allocator's fragmentation."""
    return max(4 * GIB, memory_bytes * 8 // 100)
