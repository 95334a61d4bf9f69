"""The image has the libraries that NCCL opens by name: no wheel brings them, and without them NCCL uses sockets."""

import re
from importlib.metadata import distributions

from paths import ROOT

# Read from nvidia-nccl-cu13 2.29.7, which this version of torch requires.
TORCH = "2.13.0"
PACKAGES = {"libibverbs": "libibverbs1", "libmlx5": "ibverbs-providers"}
NOT_INSTALLED = {
    *("libcuda", "libnvidia-ml"),  # of the driver: the runtime of containers mounts the host's
    *("libgdrapi", "libnccl-net", "libnccl-gin", "libnccl-rma"),  # GDRCopy, and plugins that a site may have
    *("libc", "libdl", "libgcc_s", "libm", "libnccl", "libpthread", "librt", "libstdc++"),  # linked
}


def libraries_named_in(content):
    """Names of libraries, without versions, that are whole strings or the end of one in a binary file."""
    return {name.decode() for name in re.findall(rb"(lib[a-z][\w+-]*)\.so(?:\.\d+)*\0", content)}


def test_what_nccl_opens_by_name():
    opened = set(PACKAGES)
    if nccl := next((each for each in distributions() if (each.name or "").startswith("nvidia-nccl")), None):
        (library,) = (file for file in nccl.files or () if file.name.startswith("libnccl.so"))
        opened = libraries_named_in(library.locate().read_bytes()) - NOT_INSTALLED
    else:
        pinned = f"torch=={TORCH}" in (ROOT / "requirements.txt").read_text().splitlines()
        assert pinned, "read the names again from the nvidia-nccl wheel of the new torch: install it, and run this test"
    (installed,) = re.findall(r"apt-get install (.*?)&&", (ROOT / "Dockerfile").read_text(), re.DOTALL)
    for name in opened:
        assert PACKAGES.get(name) in installed.split(), name
