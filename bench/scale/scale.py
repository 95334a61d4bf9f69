"""Step time and efficiency on 8 to 4,096 GPUs for every strategy: on paper, and checked against published figures.

    python bench/scale/scale.py bench/results/scale

Prints the tables, and writes them to README.md and everything with its inputs to scale.json. Nothing is measured.
"""

import argparse
import json
import platform
from dataclasses import asdict, replace
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path

from model import Job, state_bytes, step_seconds
from published import H100, SERIES, fit_exposed_share
from tables import readme
from workload import Workload, read_workload

ROOT = Path(__file__).resolve().parents[2]
RECIPES = ("gpt2_124m", "llama_8b")
STRATEGIES = ("ddp", "fsdp2", "hsdp", "zero1", "zero2", "zero3")
GPUS = tuple(2**power for power in range(3, 13))


def compare(share: float) -> list[dict]:
    """Each published figure beside the model's."""
    return [
        {
            "series": series.name,
            "source": series.source,
            "from": series.reference,
            "to": gpus,
            "published": series.efficiency(gpus),
            "model": series.model_efficiency(gpus, share),
            "fitted": series.is_fitted,
        }
        for series in SERIES
        for gpus in series.predicted
    ]


def project(workload: Workload, computing: float, share: float, memory: float, *, grows: bool) -> list[dict]:
    """A recipe under each strategy on each number of GPUs, in this project's fp32 weights and gradients.

    Args:
        workload: The recipe.
        computing: Seconds of a micro-batch.
        share: The model's exposed share.
        memory: Bytes of a GPU.
        grows: Whether the global batch grows with the GPUs, to one micro-batch each, or is the recipe's.
    """
    points = []
    for strategy in STRATEGIES:
        for gpus in GPUS:
            micro_batches, rest = divmod(workload.global_batch_size, workload.micro_batch_size * gpus)
            if grows:
                micro_batches, rest = 1, 0
            if micro_batches == 0 or rest:
                continue
            job = Job(strategy, workload.params, workload.layers + 1, micro_batches)
            seconds = step_seconds(computing, job, gpus, H100, share)
            points.append(
                {
                    "strategy": strategy,
                    "gpus": gpus,
                    "global_batch_size": micro_batches * workload.micro_batch_size * gpus,
                    "seconds": seconds,
                    "efficiency": micro_batches * computing / seconds,
                    "fits": state_bytes(job, gpus, H100) < memory,
                }
            )
    return points


def main() -> None:
    parser = argparse.ArgumentParser(description="Efficiency of every strategy on many GPUs, on paper.")
    parser.add_argument("output", type=Path)
    parser.add_argument("--mfu", type=float, default=0.4, help="of a GPU that need not communicate; an assumption")
    parser.add_argument("--peak", type=float, default=989e12, help="bf16 operations a second; H100 SXM's data sheet")
    parser.add_argument("--memory", type=float, default=80e9, help="bytes of a GPU; H100's data sheet")
    options = parser.parse_args()

    share = fit_exposed_share(SERIES)
    share_of_all = fit_exposed_share([replace(each, is_fitted=True) for each in SERIES])
    compared = compare(share)
    projected = {}
    for name in RECIPES:
        workload = read_workload(ROOT / f"recipes/causal_lm/{name}.json")
        computing = workload.micro_batch_flop / (options.mfu * options.peak)
        projected[name] = {"workload": asdict(workload), "computing_seconds": computing} | {
            title: project(workload, computing, share, options.memory, grows=grows)
            for title, grows in (("the recipe's global batch", False), ("one micro-batch a GPU", True))
        }
    about = {
        "when": datetime.now(UTC).strftime("%Y-%m-%d"),
        "versions": {"python": platform.python_version(), "largebatch": version("largebatch")},
        "inputs": {"mfu": options.mfu, "peak": options.peak, "memory": options.memory, "fabric": asdict(H100)},
        "exposed_share": share,
        "exposed_share_of_all": share_of_all,
        "published": compared,
        "recipes": projected,
    }
    options.output.mkdir(parents=True, exist_ok=True)
    (options.output / "scale.json").write_text(json.dumps(about, indent=1) + "\n", encoding="utf-8")
    text = readme(about)
    (options.output / "README.md").write_text(text, encoding="utf-8")
    print(text, end="")


if __name__ == "__main__":
    main()
