"""Measures the parts that are named, one after the other, from one warm process tree.

make gpu                          # all parts, under 25 minutes
make gpu PARTS=correctness        # one of them, under 8 minutes
make gpu DEVICE=cpu               # the same program at small sizes on the CPU: only to see that it works
"""

import argparse
import os
import time
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path

from gpu.machine import find_gpus
from performance import GPU_PARTS
from record import RESULTS, ROOT, Record, take_facts

# Minutes of all parts, at most, and of one.
TOTAL_MINUTES = {"cuda": 25, "cpu": 15}
PART_MINUTES = 8
PACKAGES = ("torch", "triton", "accelerate", "deepspeed", "transformers", "numpy")

# How the parts share the time. Without a GPU, compilation takes most of it.
SHARES = {
    "cuda": dict(zip(GPU_PARTS, (5, 4, 2, 5, 2), strict=True)),
    "cpu": dict(zip(GPU_PARTS, (10, 4, 1, 3, 1), strict=True)),
}


def chosen_parts(words: str | None, gpus: int) -> list[str]:
    """The parts that are asked for by name, or all of those that the machine can measure.

    Raises:
        ValueError: There is no part of a name.
    """
    if words is None:
        # A rehearsal has no GPU, and rehearses all parts.
        return [name for name in GPU_PARTS if name != "scaling" or gpus != 1]
    names = list(dict.fromkeys(words.replace(",", " ").split()))
    unknown = [name for name in names if name not in GPU_PARTS]
    if unknown or not names:
        raise ValueError(f"there is no part {' '.join(unknown)!r}; PARTS is one or several of {','.join(GPU_PARTS)}")
    return names


def seconds_of_the_next(parts: Sequence[str], device: str, seconds_left: float) -> float:
    """How long the first of the parts that are left may start rows: its share, without what last rows may take."""
    from gpu.rows import GRACE

    shares = SHARES[device]
    share = shares[parts[0]] / sum(shares[name] for name in parts)
    return max(0.0, min(60 * PART_MINUTES - GRACE, share * (seconds_left - GRACE * len(parts))))


def main() -> None:
    """Measure the parts."""
    parser = argparse.ArgumentParser(prog="make gpu", description="Measure on GPUs what only a GPU can show.")
    parser.add_argument("--parts", help=f"names with commas between them, of {', '.join(GPU_PARTS)}; default: all")
    parser.add_argument("--device", choices=TOTAL_MINUTES, default="cuda", help="cpu rehearses; default: cuda")
    parser.add_argument("--out", type=Path, help="folder of the JSON files; default: bench/results/gpu, cpu: build/gpu")
    options = parser.parse_args()
    end = time.monotonic() + 60 * TOTAL_MINUTES[options.device]
    os.environ |= {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    # The server that jobs are forked from must not initialize CUDA; with this, torch counts GPUs through NVML.
    os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    if options.device == "cpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    gpus = find_gpus()
    if options.device == "cuda" and gpus.count == 0:
        parser.error("torch finds no GPU here; rehearse with DEVICE=cpu")
    try:
        parts = chosen_parts(options.parts, gpus.count)
    except ValueError as error:
        parser.error(str(error))
    out = (options.out or (ROOT / "build/gpu" if options.device == "cpu" else RESULTS / "gpu")).resolve()
    if options.device == "cpu" and out.is_relative_to(RESULTS):
        parser.error("a rehearsal measures nothing that belongs in bench/results; give --out another folder")

    # torch and Accelerate are imported only now that the environment is set.
    from gpu.rows import Part
    from largebatch.tools.verify import jobs

    tasks = sorted(path.parent for path in (ROOT / "recipes").glob("*/config.py"))
    jobs.preload_tasks(tasks, "sklearn.datasets", "pydoc_data.topics")
    for number, name in enumerate(parts):
        seconds = seconds_of_the_next(parts[number:], options.device, end - time.monotonic())
        module = import_module(f"gpu.{name}")
        title = module.TITLE if gpus.count else f"{module.TITLE}: a rehearsal on the CPU, whose numbers mean nothing"
        settings = {"part": name, "device": options.device, "seconds": round(seconds)}
        facts = take_facts(PACKAGES, gpus.description or None) | {"command": f"make gpu PARTS={name}"}
        record = Record("gpu", title, module.ABOUT, settings, facts)
        started = time.monotonic()
        module.measure(Part(record, out / f"{name}.json", seconds), gpus)
        print(f"{name}: {time.monotonic() - started:.0f} s\n", flush=True)
    print(f"written to {out}")


if __name__ == "__main__":
    main()
