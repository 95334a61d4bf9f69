"""Muon's best learning rate against the batch, with momentum that is the same per step or per sample.

    python bench/muon_rates.py data/tiny_shakespeare.txt

Trains a small byte-level GPT on Shakespeare and on Python's reference, on equally many samples at each batch, rate and
seed. It is a sweep, one seed of all settings after the other, which the same command continues.
"""

import argparse
import itertools
import math
import os
import statistics
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
from scipy.stats import t

from largebatch.config import override_words, task_of
from largebatch.storage.files import replace_json_file
from largebatch.storage.layout import read_object
from largebatch.tools.sweep.points import BATCH, RATE, Point, Sweep
from largebatch.tools.sweep.results import Group, Results
from largebatch.tools.sweep.start import start
from record import RESULTS, ROOT, take_facts

RECIPE = ROOT / "recipes/causal_lm/gpt_shakespeare_muon.json"
RULE = "optimizer.beta_scaling"
TEXT = "text"
MOMENTUM = {"fixed": "same per step", "half_life": "same half-life in samples"}
REFERENCE = 4  # where both rules are one
BATCHES = (REFERENCE, 16, 64)
# At the reference; the square-root rule makes the others of them. The first seed has the first ones everywhere.
FIRST_RATES = (0.008, 0.016, 0.032)
RATES = {
    ("fixed", 4): (0.004, 0.008, 0.016, 0.032),
    ("fixed", 16): (0.008, 0.016, 0.032),
    ("fixed", 64): (0.004, 0.008, 0.016, 0.032),
    ("half_life", 16): (0.008, 0.016, 0.032, 0.064),
    ("half_life", 64): (0.008, 0.016, 0.032, 0.064, 0.128),
}
SAMPLES = {"block_size": 32, "num_train_samples": 8192, "num_eval_samples": 1024}
SETTINGS = {
    "model.hidden_size": 48,
    "model.num_layers": 2,
    "model.num_heads": 2,
    "learning_rate.reference_batch_size": REFERENCE,
    "learning_rate.warmup.duration": {"samples": 512},
    "train.duration": {"samples": SAMPLES["num_train_samples"]},
    "evaluation.every": None,
    "logging": {"every": 100, "trackers": []},
}
CONFIDENCE = 0.95


def points(texts: dict[str, dict[str, object]], seeds: int) -> Iterator[Point]:
    """The runs."""
    for text, seed, (rule, batch) in itertools.product(texts, range(seeds), RATES):
        for rate in sorted({*RATES[rule, batch], *(() if seed else FIRST_RATES)}):
            swept = {BATCH: batch, RULE: rule, RATE: rate}
            # The micro-batch does not change the training.
            fields = {**SETTINGS, "data": {**texts[text], **SAMPLES}, "batch.micro_batch_size": batch, "seed": seed}
            name = f"{text}_{rule}_batch={batch}_base_lr={rate}_seed={seed}"
            yield Point(name, {TEXT: text, **swept}, seed, override_words({**fields, **swept}))


def best(groups: Sequence[Group]) -> tuple[Group, dict[int, float]]:
    """The best of the rates at one batch, and each seed's estimate of the binary logarithm of the best peak rate.

    It is the vertex of the parabola through the best rate and its neighbors, with the curvature of the means and the
    slope of the seed; nothing if the best rate is the first or the last.
    """
    means = [group.cell.mean if not group.cell.diverged else math.inf for group in groups]
    place = means.index(min(means))
    if not 0 < place < len(groups) - 1:
        return groups[place], {}
    lower, middle, upper = (group.losses for group in groups[place - 1 : place + 2])
    seeds = sorted(lower.keys() & middle.keys() & upper.keys())
    curvature = statistics.fmean(lower[seed] - 2 * middle[seed] + upper[seed] for seed in seeds)
    settings = groups[place].settings
    peak = settings[RATE] * math.sqrt(settings[BATCH] / REFERENCE)
    return groups[place], {seed: math.log2(peak) + (lower[seed] - upper[seed]) / (2 * curvature) for seed in seeds}


def interval(samples: Sequence[float]) -> tuple[float, float]:
    """The mean, and half the width of its interval of Student's t."""
    count = len(samples)
    margin = t.ppf((1 + CONFIDENCE) / 2, count - 1) * statistics.stdev(samples) / math.sqrt(count)
    return statistics.fmean(samples), float(margin)


def findings(groups: Sequence[Group]) -> Iterator[str]:
    """Tables in Markdown: best rates and losses, and the exponents of the batch."""
    exponents = []
    yield "| momentum | batch | best peak rate (95 %) | loss at the best listed rate | less that of the same per step |"
    yield "| --- | --- | --- | --- | --- |"
    chosen: dict[tuple[str, int], Group] = {}
    for rule, said in MOMENTUM.items():
        optima = []
        for batch in BATCHES:
            shared = {BATCH: batch, RULE: rule if batch != REFERENCE else "fixed"}
            rivals = [group for group in groups if shared.items() <= group.settings.items()]
            group, rates = best(sorted(rivals, key=lambda each: each.settings[RATE]))
            chosen[rule, batch] = group
            rate = "at an end of the list"
            if rates:
                optima.append(rates)
                middle, margin = interval(list(rates.values()))
                rate = f"{2**middle:.3g} ({2 ** (middle - margin):.2g} to {2 ** (middle + margin):.2g})"
            other = chosen["fixed", batch]
            difference = ""
            if other is not group:
                pairs = [loss - other.losses[seed] for seed, loss in group.losses.items() if seed in other.losses]
                difference = "{:+.3f} ± {:.3f}".format(*interval(pairs))
            yield f"| {said} | {batch} | {rate} | {group.cell.mean:.3f} ± {group.cell.std:.3f} | {difference} |"
        if len(optima) == len(BATCHES):
            for sizes in (BATCHES, BATCHES[:2], BATCHES[1:]):
                chosen_optima = [optima[BATCHES.index(size)] for size in sizes]
                seeds = set.intersection(*map(set, chosen_optima))
                slopes = [np.polyfit(np.log2(sizes), [each[seed] for each in chosen_optima], 1)[0] for seed in seeds]
                middle, margin = interval(slopes)
                exponents.append(f"| {said} | {sizes[0]} to {sizes[-1]} | {len(seeds)} | {middle:.2f} ± {margin:.2f} |")
    yield from ("", "| momentum | batches | seeds | exponent of the batch in the best rate (95 %) |")
    yield from ("| --- | --- | --- | --- |", *exponents)


def main() -> None:
    """Train and write."""
    parser = argparse.ArgumentParser(description="Muon's best learning rate against the batch and momentum.")
    parser.add_argument("shakespeare", type=Path, help="the text of Tiny Shakespeare")
    parser.add_argument("documents", type=Path, help="a folder with train.parquet and valid.parquet")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--folder", type=Path, default=ROOT / "runs/sweeps/muon_rates", help="of the runs")
    parser.add_argument("--results", type=Path, default=RESULTS / "muon_rates")
    parser.add_argument("--report", action="store_true", help="train nothing more")
    parser.set_defaults(num_processes=1, max_parallel=1, strategy=None, slurm=False, dry_run=False)
    options = parser.parse_args()
    facts = take_facts(("torch", "transformers"))
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    recipe = read_object(RECIPE)
    files = {"train": "train.parquet", "eval": "valid.parquet"}
    places = {split: str(options.documents.absolute() / name) for split, name in files.items()}
    text = str(options.shakespeare.absolute())
    texts = {}
    texts["shakespeare"] = {**recipe["data"], "data_files": {"train": text, "eval": text}}
    texts |= {"documents": {"source": "datasets", "path": "parquet", "data_files": places, "tokenizer": "bytes"}}
    if not options.report:
        sweep = Sweep(str(RECIPE), recipe, list(points(texts, options.seeds)))
        start(sweep, options.folder, task_of(RECIPE), options, ())
    results = Results.read(options.folder)
    # Of rates that only the first seed had, the table has all there is to say.
    groups = [group for group in results.groups if len(group.losses) > 1]
    lines = [f"`{facts['command']}`, {facts['date'][:10]}; {facts['machine']}; {facts['versions']}"]
    for text in dict.fromkeys(group.settings[TEXT] for group in groups):
        lines += ["", f"## {text}", "", *findings([group for group in groups if group.settings[TEXT] == text])]
    lines += ["", "```text", results.table(), "```"]
    runs = [{**group.settings, "losses": group.losses} for group in groups]
    record = {"facts": facts, "settings": {**SETTINGS, "data": SAMPLES}, "runs": runs}
    options.results.mkdir(parents=True, exist_ok=True)
    replace_json_file(options.results / "results.json", record)
    (options.results / "README.md").write_text("\n".join(lines) + "\n", encoding="utf-8")
    print("\n".join(lines))


if __name__ == "__main__":
    main()
