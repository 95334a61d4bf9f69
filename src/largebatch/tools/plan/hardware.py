"""GPUs and networks by name, as given to `--gpu` and `--network`; data sheets' figures in bytes and seconds."""

import argparse
import re
from dataclasses import dataclass
from typing import NamedTuple


@dataclass(frozen=True)
class Gpu:
    """A kind of GPU."""

    memory_gib: float  # GiB that torch reports as `total_memory`, the smallest over several drivers
    bf16: float  # dense floating-point operations per second in bf16
    fp32: float  # the same in fp32, without TF32, which training does not use
    link: float  # bytes per second and direction to the other GPUs of its node


GPUS = {
    # It has no bf16 units, and computes bf16 as fp32.
    "v100-32gb": Gpu(31.7, 15.7e12, 15.7e12, 150e9),
    "a100-40gb": Gpu(39.4, 312e12, 19.5e12, 300e9),
    "a100-80gb": Gpu(79.1, 312e12, 19.5e12, 300e9),
    # PCI Express 4.0 x16.
    "l40s": Gpu(44.4, 362e12, 91.6e12, 32e9),
    "h100-80gb": Gpu(79.1, 989e12, 67e12, 450e9),
    # PCI Express 5.0 x16: NVLink joins pairs only.
    "h100-nvl": Gpu(93.0, 835e12, 60e12, 64e9),
    "h200": Gpu(139.7, 989e12, 67e12, 450e9),
    "b200": Gpu(178.3, 2250e12, 75e12, 900e9),
}
SHORT = {"v100": "v100-32gb", "a100": "a100-80gb", "h100": "h100-80gb"}


class Network(NamedTuple):
    """The bandwidth of a GPU or of a node, in bytes per second and direction."""

    bandwidth: float
    per: str

    def of_a_gpu(self, gpus_per_node: int) -> float:
        """The bandwidth per GPU."""
        return self.bandwidth if self.per == "gpu" else self.bandwidth / gpus_per_node


NETWORKS = {
    "ib-hdr": "200G/gpu",  # DGX A100: a port of HDR InfiniBand for each GPU
    "ib-ndr": "400G/gpu",  # DGX H100, DGX B200: NDR
    "efa-p4d": "400G/node",  # Amazon EC2 P4d and P4de
    "efa-p5": "3200G/node",  # Amazon EC2 P5 and P5en
    "roce-400g": "400G/gpu",  # Google Cloud A3 Ultra: a port of RDMA over Ethernet for each GPU
    "ethernet-25g": "25G/node",
    "ethernet-100g": "100G/node",
}


def gpu(text: str) -> Gpu:
    """Return the GPU of this name."""
    name = text.strip().lower()
    if found := GPUS.get(SHORT.get(name, name)):
        return found
    raise argparse.ArgumentTypeError(f"{text!r} is not a known GPU; choose one of {', '.join([*GPUS, *SHORT])}")


def network(text: str) -> Network:
    """Return the network of this name, or of this many Gbit/s per GPU or node."""
    name = text.strip().lower()
    form = re.fullmatch(r"(\d+(?:\.\d+)?)g/(gpu|node)", NETWORKS.get(name, name).lower())
    if form and float(form[1]):
        return Network(float(form[1]) * 1e9 / 8, form[2])
    raise argparse.ArgumentTypeError(
        f"{text!r} is not a network bandwidth: write Gbit/s per GPU or per node, such as 400G/gpu or "
        f"3200G/node, or one of {', '.join(NETWORKS)}"
    )
