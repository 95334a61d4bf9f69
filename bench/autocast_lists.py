"""Whether `largebatch plan` counts activations by the autocast lists of the installed torch for CUDA.

    python bench/autocast_lists.py

Compares the tables of `largebatch.estimate.cuda_kernels` with the lists in torch's ATen/autocast_mode.h and with the
operations for which torch has registered autocast on CUDA. Both are in every build of torch; on a build for CUDA, they
are those that training uses. Needs no GPU. Ends with 1 and names the operations that differ.
"""

import re
import sys
from pathlib import Path

import torch

from largebatch.estimate import cuda_kernels

MACROS = {
    "BF16": "LOWER_PRECISION_FP",
    "FP32": "FP32",
    "FP32_RESULT": "FP32_SET_OPT_DTYPE",
    "WIDEST": "PROMOTE",
}
# Registered one by one, outside of the lists.
OUTSIDE_OF_LISTS = {"BF16": {"cudnn_convolution", "cudnn_convolution_transpose"}}
# Autocast raises an error for it, so it is in no table.
REFUSED = {"binary_cross_entropy"}
# cuDNN's recurrent layers, which CPU tensors never meet: the plan counts them as the CPU computes them.
ON_CUDA_ONLY = {"_cudnn_rnn"}


def lists_in(header: str) -> dict[str, set[str]]:
    """The operations, such as "pow.Scalar", of each list in the text of autocast_mode.h."""
    text = header.replace("\\\n", " ")
    lists = {}
    for table, macro in MACROS.items():
        (body,) = re.findall(rf"#define AT_FORALL_{macro}\(_\)(.*)", text)
        entries = re.findall(r"_\((\w+)(?:,\s*(\w+))?\)", body)
        lists[table] = {f"{name}.{overload}" if overload else name for name, overload in entries}
    return lists


def differences() -> list[str]:
    """What the tables have and torch does not, and the other way around, in words."""
    header = (Path(torch.__file__).parent / "include/ATen/autocast_mode.h").read_text()
    found = []
    for table, expected in lists_in(header).items():
        given = set(getattr(cuda_kernels, table)) - OUTSIDE_OF_LISTS.get(table, set())
        found += [f"{table}: {name} is only in the table" for name in sorted(given - expected)]
        found += [f"{table}: {name} is only in torch's list" for name in sorted(expected - given)]
    names = {name for table in MACROS for name in getattr(cuda_kernels, table)} | set(cuda_kernels.FP32_NORM) | REFUSED
    registered = {
        name.removeprefix("aten::")
        for name in torch._C._dispatch_get_registrations_for_dispatch_key("AutocastCUDA")
        if name.startswith("aten::")
    }
    found += [f"{name} has no autocast on CUDA" for name in sorted(names - registered)]
    found += [f"{name} has autocast on CUDA, and is in no table" for name in sorted(registered - names - ON_CUDA_ONLY)]
    return found


if __name__ == "__main__":
    problems = differences()
    print("\n".join(problems) or f"torch {torch.__version__}: no difference")
    sys.exit(bool(problems))
