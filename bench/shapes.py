"""Count the shapes of the micro-batches of supervised fine-tuning, for each of which cuDNN's attention builds a plan.

    .venv/bin/python bench/shapes.py

An epoch of each recipe in its own order, without a model. GSM8K is that of LARGEBATCH_TEST_DATA; its tokenizer is
trained on it, because Qwen's is not there. Takes half a minute.
"""

import argparse
import json
import os
import tempfile
from collections.abc import Iterator
from itertools import takewhile
from pathlib import Path
from typing import Any

os.environ |= {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}

import datasets

from largebatch.config import load_config
from largebatch.data.order import TrainingOrder
from largebatch.data.source import SampleSource
from largebatch.plan import resolve
from largebatch.task_folders import import_from
from record import ROOT, Figure, Record, add_output_options, take_facts, write_record
from trained_tokenizer import train_tokenizer

TASK = ROOT / "recipes/sft"
DATA = Path(os.environ.get("LARGEBATCH_TEST_DATA", ROOT.parent / "shared/data")) / "gsm8k"
VOCABULARY = 16_384
PROCESSES = (1, 4)
MULTIPLE = 64
ABOUT = f"""Different shapes (samples, tokens) of the micro-batches that a process computes in one epoch, by recipe and
number of processes. cuDNN's attention, torch's first choice on H100 and H200, builds a plan for each new shape, forward
and backward. "padded" are the shapes if each micro-batch were padded to a multiple of {MULTIPLE} tokens, and the tokens
that this adds. Recipes whose samples have different lengths, like these, do without cuDNN's attention, so no plan is
built. Nothing here was measured on a GPU; `make gpu PARTS=ablations ARGS="--only 'unequal lengths'"` times the three
ways. GSM8K is tokenized with a vocabulary of {VOCABULARY:,}, trained on its training split, instead of Qwen's."""


def gsm8k_words(folder: Path) -> list[str]:
    """Overrides that read GSM8K from files, with a tokenizer that is trained on it."""
    lines = [json.loads(line) for line in (DATA / "train.jsonl").read_text(encoding="utf-8").splitlines()]
    train_tokenizer([text for line in lines for text in line.values()], VOCABULARY, folder)
    files = json.dumps({"train": str(DATA / "train.jsonl"), "eval": str(DATA / "test.jsonl")})
    model = json.loads((TASK / "sft_qwen_gsm8k.json").read_text(encoding="utf-8"))["debug_model"]
    return [
        "--data.path=json",
        "--data.name=null",
        "--data.eval_split=validation",
        f"--data.data_files={files}",
        f"--data.tokenizer={folder}",
        "--model.path=null",
        f"--model.config={json.dumps(model['config'])}",
    ]


def shapes_of_an_epoch(config: Any, train_set: SampleSource, world_size: int) -> Iterator[tuple[int, int]]:
    """Those of the micro-batches of the first process."""
    plan = resolve(config, world_size)
    order = TrainingOrder(plan.timeline, plan.micro_batch_size, world_size, plan.seed, plan.mixture)
    steps = takewhile(lambda step: plan.batch_at(step).epoch == 0, range(plan.total_steps))
    slots = ((step, number) for step in steps for number in range(plan.micro_steps_of(plan.batch_at(step))))
    for micro_batch in order.micro_batches(slots, rank=0):
        samples, tokens = train_set.fetch(micro_batch.indices, micro_batch.epoch)["input_ids"].shape
        yield samples, tokens


def count(name: str, words: list[str]) -> list[Figure]:
    """The figures of a recipe."""
    config, figures = load_config(TASK / f"{name}.json", words), []
    train_set, _ = import_from(TASK, "data").sources(config)
    for world_size in PROCESSES:
        shapes = list(shapes_of_an_epoch(config, train_set, world_size))
        padded = [(samples, -(-tokens // MULTIPLE) * MULTIPLE) for samples, tokens in shapes]
        before, after = (sum(samples * tokens for samples, tokens in each) for each in (shapes, padded))
        title = f"`{name}`, {world_size} process{'es' if world_size > 1 else ''}"
        figures += [
            Figure(f"{title}: micro-batches of a process", "", [len(shapes)]),
            Figure(f"{title}: shapes", "", [len(set(shapes))]),
            Figure(f"{title}: shapes, padded", "", [len(set(padded))]),
            Figure(f"{title}: tokens that padding adds", "%", [round(100 * (after / before - 1), 1)]),
        ]
    return figures


def main() -> None:
    """Count and write."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    add_output_options(parser, "shapes")
    options = parser.parse_args()
    facts = take_facts(("datasets", "tokenizers"))
    with tempfile.TemporaryDirectory() as folder:
        # Its cache would outlive the files that it is made of.
        datasets.config.HF_DATASETS_CACHE = Path(folder, "cache")
        datasets.disable_progress_bars()
        figures, remarks = count("sft_addition", []), []
        if DATA.is_dir():
            figures += count("sft_qwen_gsm8k", gsm8k_words(Path(folder, "tokenizer")))
        else:
            remarks = [f"`sft_qwen_gsm8k`: not counted: there is no {DATA}."]
    settings = {"vocabulary": VOCABULARY, "processes": PROCESSES, "multiple": MULTIPLE}
    title = "Shapes of micro-batches in supervised fine-tuning"
    write_record(Record("shapes", title, ABOUT, settings, facts, figures=figures, remarks=remarks), options)


if __name__ == "__main__":
    main()
