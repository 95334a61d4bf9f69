"""Correctness: the small recipes under every strategy on GPUs, beside the same training on the CPU.

A fixed sample of runs has every pair of recipe, strategy, precision, compiled or not, activation checkpointing or not,
resumed or not, that can be trained.
"""

import math
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from itertools import combinations, product
from pathlib import Path
from threading import Lock
from typing import Any

import numpy as np
from safetensors.numpy import load_file

from gpu import copies
from gpu.compiled import train_compiled
from gpu.machine import Gpus
from gpu.rows import ON_THE_CPU, ROOT, SINGLE, Deadline, Launcher, NotMeasured, Part, Result, Row
from gpu.waits import waits_of_a_recipe
from largebatch.plan.strategies import STRATEGIES
from largebatch.storage.files import read_json_lines
from largebatch.tools.local_jobs.training import train
from record import Figure

TITLE = "Small recipes on a GPU, beside the CPU"
ABOUT = """The first six steps of the small recipes, each run compared with a run of the same recipe in the same
precision in one process on the CPU, without `torch.compile` and activation checkpointing: the largest relative
difference of a step's loss. The sample has every pair of recipe, strategy and settings. A *rerun* is the largest
difference between two runs of the same settings; zero means equal losses. With `compute.deterministic`, it is counted
how many losses and weights differ in any bit. *Host waits* are the calls per step that make
the host wait for the GPU between two logged steps, as `torch.cuda.set_sync_debug_mode` reports them. *Behind a busy
GPU*, micro-batches and checkpoints are copied while kernels that only take time hold the streams up."""

STEPS = 6
TOLERANCE = {"fp32": 1e-4, "bf16": 2e-2}
RECIPES = {
    "gpt_pydoc": "causal_lm",
    "llama_pydoc": "causal_lm",
    "bert_pydoc": "masked_lm",
    "resnet_digits": "image_classification",
    "vit_digits": "image_classification",
    "simclr_digits": "contrastive",
}
# On the CPU, small enough for the rehearsal.
SMALL = {
    "gpt_pydoc": ("--model.num_layers=1", "--model.hidden_size=16", "--model.num_heads=2", "--data.block_size=16"),
    "llama_pydoc": ("--model.num_layers=1", "--model.hidden_size=32", "--data.block_size=16"),
    "bert_pydoc": ("--model.num_layers=1", "--model.hidden_size=32", "--data.block_size=16"),
    "simclr_digits": ("--batch.global_batch_size=64",),
}
# Their models are compiled where a process has whole weights and one micro-batch per step, and recomputes nothing.
COMPILED_WHOLE = ("resnet_digits", "simclr_digits")
# Its model has no blocks that can be recomputed.
NOT_RECOMPUTED = ("simclr_digits",)
# "single" is one of the strategies in the table, or beside it. HSDP is FSDP2 where there is one group of processes.
STRATEGIES_AND_SINGLE = (
    SINGLE,
    *(name for name, entry in STRATEGIES.items() if name != SINGLE and not entry.replicates_shards),
)
# Embeddings, and convolutions with BatchNorm: their backward passes have kernels that add in no fixed order.
DETERMINISTIC = ("gpt_pydoc", "resnet_digits")
WITHOUT_WAITS = ("ddp", "fsdp", "hsdp")
# Jobs of small models leave most of a GPU idle, and most of their time is the host's.
JOBS_AT_ONCE = {"cuda": 5, "cpu": 2}


@dataclass(frozen=True)
class Setting:
    """One run of the sample."""

    recipe: str
    strategy: str
    precision: str
    compiled: bool
    recomputed: str  # `compute.activation_checkpointing`
    resumed: bool

    @property
    def name(self) -> str:
        """For people."""
        flags = {
            "compiled": self.compiled,
            f"{self.recomputed} activation checkpointing": self.recomputed != "none",
            "resumed": self.resumed,
        }
        return ", ".join(
            [self.recipe, self.strategy, self.precision, *(name for name, is_on in flags.items() if is_on)]
        )

    @property
    def flags(self) -> tuple[Any, ...]:
        """What is set beside recipe and strategy."""
        return self.precision, self.compiled, self.recomputed, self.resumed

    @property
    def can_be_trained(self) -> bool:
        """Whether the recipe's model can be trained so."""
        shards_weights = self.strategy != SINGLE and STRATEGIES[self.strategy].shards.endswith("weights")
        recomputes = self.recomputed != "none"
        if self.recipe in NOT_RECOMPUTED and recomputes:
            return False
        refused = self.strategy == SINGLE or shards_weights or recomputes
        return not (refused and self.compiled and self.recipe in COMPILED_WHOLE)

    def pairs(self) -> set[tuple[tuple[str, Any], ...]]:
        """Every two of its values, with their names."""
        return set(combinations(vars(self).items(), 2))


def sample() -> list[Setting]:
    """At most 40 settings that have every pair that can be trained: each recipe once under each strategy, with the
    other settings chosen so that they add the most pairs. Settings that are not compiled come first."""
    flags = list(product(TOLERANCE, (False, True), ("none", "selective", "full"), (False, True)))
    missing = set().union(*(each.pairs() for each in _all_settings(flags)))
    chosen: list[Setting] = []
    used: Counter[tuple[Any, ...]] = Counter()

    def worth(each: Setting) -> tuple[int, bool, int]:
        """Its new pairs; then what is quick; then what was chosen least."""
        return len(each.pairs() & missing), not each.compiled, -used[each.flags]

    for recipe, strategy in product(RECIPES, STRATEGIES_AND_SINGLE):
        possible = [each for each in (Setting(recipe, strategy, *values) for values in flags) if each.can_be_trained]
        chosen.append(max(possible, key=worth))
        missing -= chosen[-1].pairs()
        used[chosen[-1].flags] += 1
    return sorted(chosen, key=lambda each: each.compiled)


def _all_settings(flags: Sequence[tuple[Any, ...]]) -> list[Setting]:
    every = (Setting(*names, *values) for names in product(RECIPES, STRATEGIES_AND_SINGLE) for values in flags)
    return [each for each in every if each.can_be_trained]


def recipe_file(name: str) -> Path:
    """The recipe's JSON file."""
    return ROOT / "recipes" / RECIPES[name] / f"{name}.json"


def words_of(setting: Setting, is_small: bool, processes: int) -> list[str]:
    """The overrides of a run, the same for any strategy; `processes` are those of a launched job."""
    return [
        *(SMALL.get(setting.recipe, ()) if is_small else ()),
        # One micro-batch for each process: BatchNorm's momentum would else differ between compiled passes.
        *([f"--batch.global_batch_size={16 * processes}"] if setting.recipe == "resnet_digits" else []),
        f"--precision={setting.precision}",
        f"--compute.compile={'on' if setting.compiled else 'off'}",
        f"--compute.activation_checkpointing={setting.recomputed}",
        "--logging.every=1",
        "--logging.trackers=[]",
        "--evaluation.every=null",
        "--evaluation.max_samples=32",
        "--data.num_workers=0",
    ]


def largest_difference(losses: Sequence[float], expected: Sequence[float]) -> float:
    """The largest relative difference of two runs' losses; infinite if a step is missing or not finite."""
    if len(losses) != len(expected) or not expected:
        return math.inf
    ratios = [abs(a - b) / abs(b) for a, b in zip(losses, expected, strict=True)]
    return max(ratios) if all(map(math.isfinite, ratios)) else math.inf


def exact_name(recipe: str) -> str:
    """The row of two runs whose bits should be equal."""
    return f"{recipe}, ddp, bf16, compute.deterministic: losses and weights that differ in two runs"


def number_of_differences(mine: dict[Any, Any], theirs: dict[Any, Any]) -> int:
    """How many losses and weights are not equal to the last bit."""
    assert mine.keys() == theirs.keys()
    return sum(np.asarray(mine[key]).tobytes() != np.asarray(theirs[key]).tobytes() for key in mine)


class Runs:
    """The runs of the sample, and the references they are compared with.

    Args:
        launcher: Starts the jobs.
        is_small: Whether the models are made smaller, for the CPU.
    """

    def __init__(self, launcher: Launcher, is_small: bool):
        self._launcher = launcher
        self._is_small = is_small
        self._references: dict[tuple[str, str], Future[list[float]]] = {}
        self._lock = Lock()
        self._trained: dict[Setting, list[float]] = {}

    def rows(self) -> Iterator[Row]:
        """The references, the sample, reruns and host waits; what is compiled takes longest, and comes last."""
        for recipe, precision in product(RECIPES, TOLERANCE):
            yield Row(f"{recipe}, {precision}, reference on the CPU", partial(self._refer, recipe, precision))
        settings = sample()
        eager = [each for each in settings if not each.compiled]
        first = {each.recipe: each for each in reversed(eager)}
        for setting in eager:
            yield Row(setting.name, partial(self._compare, setting))
        for recipe, strategy in [
            *product(RECIPES, WITHOUT_WAITS[:1]),
            *product(["gpt_pydoc"], [*WITHOUT_WAITS[1:], "zero1"]),
        ]:
            yield Row(f"host waits, {recipe}, {strategy}", partial(self._count_waits, recipe, strategy))
        late = Setting("gpt_pydoc", SINGLE, "fp32", compiled=False, recomputed="none", resumed=False)
        words = [*words_of(late, self._is_small, 1), f"--train.stop_after_steps={STEPS}"]
        yield from copies.rows(self._launcher, not self._is_small, recipe_file(late.recipe), words)
        for recipe in DETERMINISTIC:
            yield Row(exact_name(recipe), partial(self._train_exactly, recipe))
        for setting in first.values():
            yield Row(f"rerun of {setting.name}", partial(self._rerun, setting))
        for setting in settings[len(eager) :]:
            yield Row(setting.name, partial(self._compare, setting))

    def _refer(self, recipe: str, precision: str, deadline: Deadline) -> list[Result]:
        self._reference(recipe, precision, deadline)
        return []

    def _reference(self, recipe: str, precision: str, deadline: Deadline) -> list[float]:
        """The losses of a reference, which the first row that needs it trains."""
        with self._lock:
            is_first = (recipe, precision) not in self._references
            reference = self._references.setdefault((recipe, precision), Future())
        if is_first:
            setting = Setting(recipe, SINGLE, precision, compiled=False, recomputed="none", resumed=False)
            try:
                reference.set_result(self._train(setting, deadline, on_cpu=True))
            except Exception as error:
                reference.set_exception(NotMeasured("its reference on the CPU failed"))
                raise error
        return reference.result(timeout=deadline.seconds_left)

    def _compare(self, setting: Setting, deadline: Deadline) -> list[Result]:
        expected = self._reference(setting.recipe, setting.precision, deadline)
        self._trained[setting] = losses = self._train(setting, deadline)
        difference = largest_difference(losses, expected)
        return [Figure(setting.name, "", [difference], at_most=TOLERANCE[setting.precision])]

    def _rerun(self, setting: Setting, deadline: Deadline) -> list[Result]:
        first = self._trained.get(setting) or self._train(setting, deadline)
        difference = largest_difference(self._train(setting, deadline), first)
        return [Figure(f"rerun of {setting.name}", "", [difference])]

    def _train(self, setting: Setting, deadline: Deadline, on_cpu: bool = False) -> list[float]:
        recipe = recipe_file(setting.recipe)
        words = words_of(setting, self._is_small, self._launcher.world_size)
        if on_cpu:
            words.append(f"--batch.micro_batch_size={self._micro_batch_size(recipe, words)}")
        with tempfile.TemporaryDirectory() as folder:
            for stop in [STEPS // 2, STEPS] if setting.resumed else [STEPS]:
                stop_word = f"--train.stop_after_steps={stop}"
                job = partial(train_compiled, recipe, *words, stop_word, run_dir=Path(folder, "run"))
                self._launcher.run(deadline, setting.strategy, job, environment=ON_THE_CPU if on_cpu else {})
            return [line["loss"] for line in read_json_lines(Path(folder, "run/metrics.jsonl"))]

    def _train_exactly(self, recipe: str, deadline: Deadline) -> list[Result]:
        setting = Setting(recipe, "ddp", "bf16", compiled=False, recomputed="none", resumed=False)
        words = [*words_of(setting, self._is_small, self._launcher.world_size), "--compute.deterministic=true"]
        job = partial(train, recipe_file(recipe), *words, f"--train.stop_after_steps={STEPS}")
        found = []
        for _ in range(2):
            with tempfile.TemporaryDirectory() as folder:
                self._launcher.run(deadline, setting.strategy, partial(job, run_dir=Path(folder, "run")))
                losses = {line["step"]: line["loss"] for line in read_json_lines(Path(folder, "run/metrics.jsonl"))}
                found.append(losses | load_file(Path(folder, "run/model/model.safetensors")))
        return [Figure(exact_name(recipe), "", [number_of_differences(*found)], at_most=0)]

    def _micro_batch_size(self, recipe: Path, words: Sequence[str]) -> int:
        """That of the reference, over which synchronized BatchNorm normalizes as over all processes' micro-batches."""
        from largebatch.config import load_config

        config = load_config(recipe, words)
        processes = self._launcher.world_size if config.model.synchronizes_batch_norm else 1
        return int(config.batch.micro_batch_size) * processes

    def _count_waits(self, recipe: str, strategy: str, deadline: Deadline) -> list[Result]:
        if self._is_small:
            raise NotMeasured("this machine has no GPU")
        setting = Setting(recipe, strategy, "bf16", compiled=False, recomputed="none", resumed=False)
        words = [*words_of(setting, self._is_small, self._launcher.world_size), "--logging.every=100"]
        with tempfile.TemporaryDirectory() as folder:
            arguments = (recipe_file(recipe), words, Path(folder, "run"))
            steps, places = self._launcher.run(deadline, strategy, waits_of_a_recipe, *arguments)
        name = f"host waits, {recipe}, {strategy}"
        listed = [f"{name}: {count} in {steps} steps: {place}" for place, count in places.items()]
        # DeepSpeed itself reads its gradient's norm.
        aims = {"at_most": 0} if strategy in WITHOUT_WAITS else {}
        return [Figure(name, "a step", [sum(places.values()) / steps], **aims), *listed]


def measure(part: Part, gpus: Gpus) -> None:
    """Measure all rows."""
    is_small = gpus.count == 0
    launcher = Launcher(min(2, max(1, gpus.count)), STRATEGIES)
    part.measure(Runs(launcher, is_small).rows(), at_once=JOBS_AT_ONCE["cpu" if is_small else "cuda"])
