"""Measures the parts that are named, one after the other, from one warm process tree.

make gpu                          # all parts, under 25 minutes
make gpu PARTS=correctness        # one of them, under 8 minutes
make gpu DEVICE=cpu               # the same program at small sizes on the CPU: only to see that it works
make gpu PARTS=throughput ARGS="--minutes 9 --only 'GPT-2 ddp' --only ResNet"    # only some rows, in 9 minutes
make gpu PARTS=throughput ARGS=--missing    # only what bench/results lacks of this kind of GPU
make gpu PARTS=training ARGS="--minutes 9"    # trainings to their end, on files in data/
"""

import argparse
import os
import re
import shlex
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
    "cuda": dict(zip(GPU_PARTS, (5, 2, 5, 2, 9), strict=True)),
    "cpu": dict(zip(GPU_PARTS, (10, 1, 3, 1, 3), strict=True)),
}


def chosen_parts(words: str | None, gpus: int) -> list[str]:
    """The parts that are asked for by name, or all of those that the machine can measure.

    Raises:
        ValueError: There is no part of a name.
    """
    if words is None:
        if gpus == 0:
            return [*GPU_PARTS]
        # Training takes as long as the others together.
        return [name for name in GPU_PARTS if name != "training" and (gpus > 1 or name != "scaling")]
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
    return max(0.0, share * (seconds_left - GRACE * len(parts)))


def file_name(part: str, only: Sequence[str], is_missing: bool) -> str:
    """The name of a part's JSON: that of some rows, so that they do not replace the whole part's."""
    words = re.findall(r"[a-z0-9]+", " ".join(only).lower())
    return "-".join([part, *words, *["missing"] * is_missing]) + ".json"


def read_options() -> argparse.Namespace:
    """Those of the command line; ends the program if there is nothing to measure with them."""
    parser = argparse.ArgumentParser(prog="make gpu", description="Measure on GPUs what only a GPU can show.")
    parser.add_argument("--parts", help=f"names with commas between them, of {', '.join(GPU_PARTS)}; default: all")
    parser.add_argument("--device", choices=TOTAL_MINUTES, default="cuda", help="cpu rehearses; default: cuda")
    parser.add_argument("--out", type=Path, help="folder of the results; default: bench/results/gpu, cpu: build/gpu")
    parser.add_argument("--minutes", type=float, metavar="N", help="end by then; default: 8 for a part, 25 for all")
    parser.add_argument(
        "--only",
        metavar="WORDS",
        action="append",
        default=[],
        help="measure only the rows whose names have all of these words; may be given several times",
    )
    parser.add_argument(
        "--missing", action="store_true", help="measure only the rows that bench/results/gpu lacks of this kind of GPU"
    )
    options = parser.parse_args()
    if options.device == "cpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    options.gpus = find_gpus()
    if options.device == "cuda" and options.gpus.count == 0:
        parser.error("torch finds no GPU here; rehearse with DEVICE=cpu")
    try:
        options.parts = chosen_parts(options.parts, options.gpus.count)
    except ValueError as error:
        parser.error(str(error))
    if options.minutes is None:
        options.minutes = min(PART_MINUTES * len(options.parts), TOTAL_MINUTES[options.device])
    if options.minutes <= len(options.parts) + 1:
        given = f"--minutes {options.minutes:g}"
        parser.error(f"{given} is too little for {len(options.parts)} parts; write more, or fewer PARTS")
    options.out = (options.out or (ROOT / "build/gpu" if options.device == "cpu" else RESULTS / "gpu")).resolve()
    if options.device == "cpu" and options.out.is_relative_to(RESULTS):
        parser.error("a rehearsal measures nothing that belongs in bench/results; give --out another folder")
    return options


def main() -> None:
    """Measure the parts."""
    started = time.monotonic()
    os.environ |= {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    # The server that jobs are forked from must not initialize CUDA; with this, torch counts GPUs through NVML.
    os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    options = read_options()
    parts = options.parts
    gpus = options.gpus

    # torch and Accelerate are imported only now that the environment is set.
    from gpu.rows import Part, measured_before
    from largebatch.tools.local_jobs import jobs

    tasks = sorted(path.parent for path in (ROOT / "recipes").glob("*/config.py"))
    jobs.preload_tasks(tasks, "sklearn.datasets", "pydoc_data.topics")
    (options.out / "failures.txt").unlink(missing_ok=True)
    for number, name in enumerate(parts):
        began = time.monotonic()
        seconds = seconds_of_the_next(parts[number:], options.device, 60 * options.minutes - (began - started))
        module = import_module(f"gpu.{name}")
        title = module.TITLE if gpus.count else f"{module.TITLE}: a rehearsal on the CPU, whose numbers mean nothing"
        title += f"; only {', '.join(options.only)}" if options.only else ""
        settings = {
            "part": name,
            "device": options.device,
            "seconds": round(seconds),
            "only": options.only,
            "missing": options.missing,
        }
        words = ["make", "gpu", f"PARTS={name}", f"ARGS=--minutes {options.minutes:g}"]
        words[-1] += " --missing" * options.missing
        words[-1] += "".join(f" --only {shlex.quote(each)}" for each in options.only)
        facts = take_facts(PACKAGES, gpus.description or None) | {"command": shlex.join(words)}
        record = Record("gpu", title, module.ABOUT, settings, facts)
        known = measured_before(name, gpus.name) if options.missing else ()
        file = options.out / file_name(name, options.only, options.missing)
        module.measure(Part(record, file, seconds, options.only, known), gpus)
        print(f"{name}: {time.monotonic() - began:.0f} s\n", flush=True)
    print(f"written to {options.out}")


if __name__ == "__main__":
    main()
