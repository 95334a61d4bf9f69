"""Step time and efficiency on 8 to 4,096 GPUs for every strategy: on paper, and checked against published figures.

    python bench/scale/scale.py bench/results/scale

Prints the tables, and writes them to README.md and everything with its inputs to scale.json. Nothing is measured. The
model is `largebatch.estimate.step_time`; recipes are compared as by `largebatch plan --gpu h100 --network 400G/gpu`.
"""

import argparse
import json
import platform
from dataclasses import replace
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path

from largebatch.backend.fsdp_units import shape_of
from largebatch.config import load_config
from largebatch.estimate.comparison import Workload, compare_strategies
from largebatch.estimate.recipe_model import activation_bytes, micro_batch_flops, recipe_model
from largebatch.estimate.step_time import Hardware
from largebatch.system.hardware import find_gpu
from largebatch.tools.accelerate_configs import find_strategies
from largebatch.tools.plan import first_plan
from published import H100, SERIES, fit_exposed_share
from tables import readme

ROOT = Path(__file__).resolve().parents[2]
RECIPES = ("gpt2_124m", "llama_8b")
GPU = find_gpu("h100-80gb")
SIZES = tuple(2**power for power in range(3, 13))


def compare_published(share: float) -> list[dict]:
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


def project(recipe: Path) -> dict:
    """The step time of a recipe under each strategy on each number of GPUs: with its own batch, and one micro-batch."""
    config = load_config(recipe)
    model, example_batch = recipe_model(config)
    shape = shape_of(model, first_plan(config, SIZES))
    activations = activation_bytes(model, config, example_batch)
    flops = micro_batch_flops(model, config, example_batch)
    workload = Workload(shape, activations, flops)
    strategies, _ = find_strategies(None, config, H100.gpus_per_node)
    micro_batch = config.batch.micro_batch_size
    points: dict[str, list[dict]] = {"the recipe's global batch": [], "one micro-batch per GPU": []}
    for title, found in points.items():
        for gpus in SIZES:
            words = [] if title == "the recipe's global batch" else [f"--batch.global_batch_size={micro_batch * gpus}"]
            compared = compare_strategies(
                recipe.stem,
                load_config(recipe, words),
                workload,
                strategies,
                [gpus],
                GPU.memory_bytes,
                Hardware(GPU.bf16_tflops * 1e12, H100),
            )
            (column,) = compared["world_sizes"]
            if column["problem"]:
                continue
            found += [
                {
                    "strategy": name,
                    "gpus": gpus,
                    "global_batch_size": column["gradient_accumulation_steps"] * micro_batch * gpus,
                    "seconds": option["step_seconds"],
                    "efficiency": option["efficiency"],
                    "fits": option["fits"],
                }
                for name, option in column["strategies"].items()
            ]
    return {"parameters": shape.elements, "micro_batch_size": micro_batch, "micro_batch_flops": sum(flops)} | points


def main() -> None:
    parser = argparse.ArgumentParser(description="Efficiency of every strategy on many GPUs, on paper.")
    parser.add_argument("output", type=Path)
    options = parser.parse_args()

    share = fit_exposed_share(SERIES)
    about = {
        "when": datetime.now(UTC).strftime("%Y-%m-%d"),
        "versions": {"python": platform.python_version(), "largebatch": version("largebatch")},
        "exposed_share": share,
        "exposed_share_of_all": fit_exposed_share([replace(each, is_fitted=True) for each in SERIES]),
        "published": compare_published(share),
        "recipes": {name: project(ROOT / f"recipes/causal_lm/{name}.json") for name in RECIPES},
    }
    options.output.mkdir(parents=True, exist_ok=True)
    (options.output / "scale.json").write_text(json.dumps(about, indent=1) + "\n", encoding="utf-8")
    text = readme(about)
    (options.output / "README.md").write_text(text, encoding="utf-8")
    print(text, end="")


if __name__ == "__main__":
    main()
