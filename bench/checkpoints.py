"""What checkpoints cost on CPU, beside `torch.distributed.checkpoint`: saving, loading, stalling, memory.

    .venv/bin/python bench/checkpoints.py bench/results/checkpoints

Two forked processes hold a model under DDP with AdamW's states, by the real backend. Everything that is compared is
paired and interleaved in one job, whose pairs take turns in who comes first, and judged by the median of the pairs'
ratios. Writes <name>.txt and <name>.json into the folder; takes some three minutes on two quiet cores. Dropping the
page cache needs root; without it those rows are left out, and the output says so.
"""

import argparse
import contextlib
import ctypes
import json
import os
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

from largebatch.backend.base import Backend
from largebatch.backend.launch import read_launch
from largebatch.backend.start import start
from largebatch.checkpoint.load import load
from largebatch.checkpoint.save import CheckpointWriter, Retention
from largebatch.config import as_json, load_config
from largebatch.plan import resolve
from largebatch.rehearsal.jobs import run_job
from largebatch.rehearsal.launch import launch_environment
from largebatch.run.attempt import claim
from largebatch.storage.catalog import damage, entries
from largebatch.storage.layout import read_manifest

ROOT = Path(__file__).resolve().parents[1]
RECIPE = ROOT / "recipes/causal_lm/gpt_pydoc.json"
VOCABULARY = 4096
WORLD_SIZE = 2
# Weights, exp_avg and exp_avg_sq, in fp32.
BYTES_A_PARAMETER = 12
DROP_CACHES = Path("/proc/sys/vm/drop_caches")
MIB = 2**20

TARGETS = {"save": 1.10, "load": 1.10, "stall": 0.20}


# --- the job ----------------------------------------------------------------------------------------------------------


class Block(nn.Module):
    """Parameters in the shapes of a transformer's block, without its attention."""

    def __init__(self, width: int):
        super().__init__()
        self.norm_1, self.norm_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.mix, self.project = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first, second, third = self.mix(self.norm_1(x)).chunk(3, dim=-1)
        x = x + self.project(first * second.sigmoid() + third)
        return x + self.down(nn.functional.gelu(self.up(self.norm_2(x))))


class Model(nn.Module):
    """As many blocks as make up about so many bytes with AdamW's states."""

    def __init__(self, megabytes: int, width: int):
        super().__init__()
        wanted = megabytes * MIB / BYTES_A_PARAMETER - VOCABULARY * width
        size = sum(parameter.numel() for parameter in Block(width).parameters())
        self.embedding = nn.Embedding(VOCABULARY, width)
        self.blocks = nn.Sequential(*(Block(width) for _ in range(max(1, round(wanted / size)))))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.blocks(self.embedding(tokens)).square().mean()


class Job:
    """One process of the job: its backend, and checkpoints of ours and of torch's."""

    def __init__(self, settings: argparse.Namespace, folder: Path):
        config = load_config(RECIPE)
        plan = resolve(config, WORLD_SIZE)
        self.backend: Backend = start(read_launch(), plan, [], str(folder))
        torch.manual_seed(0)
        model = Model(settings.megabytes, settings.width)
        self.largest = max(parameter.numel() for parameter in model.parameters()) * 4
        self.backend.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-3))
        self.optimizer = self.backend.optimizer.optimizer  # type: ignore[attr-defined]  # Accelerate's wrapper
        self.folder = folder
        self.tokens = torch.randint(VOCABULARY, (settings.tokens // 32, 32))
        self._config, self._plan = as_json(config), json.loads(plan.to_json())
        self._fence = self.backend.gather_objects(
            claim(folder / "attempts", {}) if self.backend.is_main_process else None
        )[0]
        self._number = 0

    def step(self, writer: CheckpointWriter | None = None) -> float:
        """One optimizer step, as a run makes it; returns the seconds that it waited for a writer's copy."""
        self.backend.begin_micro_step(0, 1)
        self.backend.backward(self.backend.model(self.tokens), 1.0)
        began = time.perf_counter()
        if writer is not None:
            writer.wait_until_copied()
        waited = time.perf_counter() - began
        self.backend.update(1e-4, measure_norm=False)
        return waited

    def writer(self, name: str, asynchronous: bool) -> CheckpointWriter:
        """A writer into a folder of its own."""
        folder = self.folder / name
        retention = Retention(None, lambda _: True)
        return CheckpointWriter(
            self.backend, folder, self._fence, retention, self._config, self._plan, None, asynchronous, _fail
        )

    def tensors(self) -> list[torch.Tensor]:
        """Every tensor of the state that is trained."""
        states = [value for state in self.optimizer.state.values() for value in state.values()]
        return [*(parameter.data for parameter in self.backend.model.parameters()), *states]

    def num_bytes(self) -> int:
        """Of the state."""
        return sum(tensor.numel() * tensor.element_size() for tensor in self.tensors())

    # The whole state as torch's checkpoints take it.
    def state_dict(self) -> dict[str, Any]:
        weights, states = get_state_dict(self.backend.model, self.optimizer)
        return {"model": weights, "optimizer": states}

    def together(self, work: Callable[[], Any]) -> tuple[float, Any]:
        """Seconds from the first process's start of the work to the last one's end, and what this one's gave."""
        self.backend.gather_objects(None)
        began = time.perf_counter()
        result = work()
        times = self.backend.gather_objects((began, time.perf_counter()))
        return max(end for _, end in times) - min(begin for begin, _ in times), result

    def settle(self, *doomed: Path, drop_cache: bool = False) -> None:
        """Delete folders and let the disk come to rest; on request, forget what was read from it."""
        self.backend.gather_objects(None)
        if self.backend.is_main_process:
            for path in doomed:
                shutil.rmtree(path, ignore_errors=True)
            os.sync()
            if drop_cache:
                DROP_CACHES.write_text("3\n")
        self.backend.gather_objects(None)

    def next_number(self) -> int:
        """For a step that no checkpoint has yet."""
        self._number += 1
        return self._number

    # --- what is compared

    def load_ours(self) -> None:
        """As a run that resumes: find the newest, read its checksums with all processes, load."""
        found = entries(self.folder / "ours") if self.backend.is_main_process else []
        newest = self.backend.gather_objects(found)[0][0]
        problem = newest.problem or damage(newest.path, self.backend.rank, self.backend.world_size)
        assert self.backend.gather_objects(problem) == [None] * self.backend.world_size, problem
        load(self.backend, newest.path, read_manifest(newest.path))

    def load_theirs(self) -> float:
        """As torch documents it; the seconds of `torch.distributed.checkpoint.load` alone."""
        state = self.state_dict()
        began = time.perf_counter()
        dcp.load(state, checkpoint_id=self.folder / "theirs")
        seconds = time.perf_counter() - began
        set_state_dict(
            self.backend.model,
            self.optimizer,
            model_state_dict=state["model"],
            optim_state_dict=state["optimizer"],
        )
        return seconds


def _fail(text: str) -> None:
    raise RuntimeError(text)


def measure_saves(settings: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Synchronous saves of ours and torch's, and plain writes of the same bytes; the first round is not counted."""
    job = Job(settings, folder)
    job.step()
    writer = job.writer("ours", asynchronous=False)
    share = os.urandom(MIB)
    num_parts = job.num_bytes() // WORLD_SIZE // MIB

    def plain() -> None:
        (folder / "plain").mkdir(exist_ok=True)
        with (folder / f"plain/{job.backend.rank}").open("wb", buffering=0) as file:
            for _ in range(num_parts):
                file.write(share)
            os.fsync(file.fileno())

    def theirs() -> float:
        state = job.state_dict()
        began = time.perf_counter()
        dcp.save(state, storage_writer=dcp.FileSystemWriter(folder / "theirs"))
        return time.perf_counter() - began

    ways: dict[str, Callable[[], Any]] = {
        "ours": lambda: writer.save(job.next_number(), 0),
        "theirs": theirs,
        "plain": plain,
    }
    rounds, sizes = [], {}
    for number in range(settings.pairs + 1):
        seconds: dict[str, float] = {}
        for way in _in_turn(["ours", "theirs", "plain"], number):
            job.settle()
            seconds[way], inner = job.together(ways[way])
            if way == "theirs":
                seconds["theirs with get_state_dict"] = seconds[way]
                seconds[way] = max(job.backend.gather_objects(inner))
            sizes[way] = sum(file.stat().st_size for file in (folder / way).rglob("*") if file.is_file())
            job.settle(folder / way)
        rounds.append(seconds)
    return {"rounds": rounds[1:], "bytes": sizes, **_facts(job)}


def measure_loads(settings: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Loads of ours and torch's, into optimizers with states and without, from the page cache and from the disk."""
    job = Job(settings, folder)
    job.step()
    job.writer("ours", asynchronous=False).save(1, 0)
    dcp.save(job.state_dict(), storage_writer=dcp.FileSystemWriter(folder / "theirs"))
    right = [_fingerprint(tensor) for tensor in job.tensors()]
    caches = [False, True] if _may_drop_caches() else [False]
    result: dict[str, Any] = {}
    for fresh in (False, True):
        for cold in caches:
            rounds = []
            for number in range(settings.pairs + 1):
                seconds: dict[str, float] = {}
                for way in _in_turn(["ours", "theirs"], number):
                    if fresh:
                        job.optimizer.state.clear()
                    for tensor in job.tensors():
                        tensor.fill_(7)
                    job.settle(drop_cache=cold)
                    seconds[way], inner = job.together(job.load_ours if way == "ours" else job.load_theirs)
                    if way == "theirs":
                        seconds["theirs with its state dicts"] = seconds[way]
                        seconds[way] = max(job.backend.gather_objects(inner))
                    assert [_fingerprint(tensor) for tensor in job.tensors()] == right, way
                rounds.append(seconds)
            states = "states made anew" if fresh else "states there already"
            result[f"{states}, {'page cache dropped' if cold else 'in page cache'}"] = rounds[1:]
    return {"rounds": result, "page cache dropped": len(caches) == 2, **_facts(job)}


def measure_stalls(settings: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """How long a save holds training up, synchronous and asynchronous; and steps with and without a save in flight."""
    job = Job(settings, folder)
    job.step()
    synchronous, asynchronous = job.writer("sync", asynchronous=False), job.writer("async", asynchronous=True)
    first, _ = job.together(lambda: asynchronous.save(job.next_number(), 0))
    first += max(job.backend.gather_objects(job.step(asynchronous)))
    asynchronous.wait()
    rounds = []
    for number in range(settings.pairs + 1):
        seconds: dict[str, float] = {}
        for way in _in_turn(["sync", "async"], number):
            job.settle(folder / "sync", folder / "async")
            writer = synchronous if way == "sync" else asynchronous
            began = time.perf_counter()
            seconds[way], _ = job.together(lambda writer=writer: writer.save(job.next_number(), 0))
            if way == "async":
                # Training stands still in `save`, and where the next update waits for the copy.
                seconds[way] += max(job.backend.gather_objects(job.step(writer)))
            writer.wait()
            if way == "async":
                seconds["async until complete"] = max(job.backend.gather_objects(time.perf_counter() - began))
        rounds.append(seconds)
    steps = []
    for _ in range(settings.step_rounds + 1):
        job.settle(folder / "sync", folder / "async")
        quiet = [job.together(job.step)[0] for _ in range(settings.steps)]
        asynchronous.save(job.next_number(), 0)
        busy = []
        for _ in range(settings.steps):
            taken, _ = job.together(lambda: job.step(asynchronous))
            thread = asynchronous._thread
            in_flight = thread is not None and thread.is_alive()
            busy.append((taken, all(job.backend.gather_objects(in_flight))))
        asynchronous.wait()
        # The steps that a save was in flight during, from their beginning to their end; at least the first.
        covered = [taken for taken, in_flight in busy if in_flight] or [busy[0][0]]
        steps.append({"quiet": statistics.median(quiet), "busy": statistics.median(covered), "covered": len(covered)})
    return {"first stall": first, "rounds": rounds[1:], "steps": steps[1:], **_facts(job)}


def prepare_memory(settings: argparse.Namespace, folder: Path) -> None:
    """The checkpoints that the jobs of `measure_memory` load."""
    job = Job(settings, folder)
    job.step()
    job.writer("ours", asynchronous=False).save(1, 0)
    dcp.save(job.state_dict(), storage_writer=dcp.FileSystemWriter(folder / "theirs"))
    job.settle()


def measure_memory(settings: argparse.Namespace, folder: Path, case: str) -> dict[str, Any]:
    """Peak memory of this process during one thing that it has never done before."""
    job = Job(settings, folder)
    job.step()
    state_bytes = job.num_bytes()
    made = 0
    if case.startswith("load, states anew"):
        job.optimizer.state.clear()
        made = state_bytes - job.num_bytes()
    writer = job.writer("scratch", asynchronous=case.startswith("asynchronous"))

    def save_theirs() -> None:
        dcp.save(job.state_dict(), storage_writer=dcp.FileSystemWriter(folder / "scratch_theirs"))

    def save_ours() -> None:
        writer.save(1, 0)
        writer.wait()

    by_torch = case.endswith("torch's")
    work = (job.load_theirs if by_torch else job.load_ours) if "load" in case else None
    work = work or (save_theirs if by_torch else save_ours)
    job.settle(folder / "scratch", folder / "scratch_theirs")
    ctypes.CDLL("libc.so.6").malloc_trim(0)
    before = _memory()
    with _sampled() as peak:
        Path("/proc/self/clear_refs").write_text("5")
        job.together(work)
        highest = _memory()["VmHWM"]
    after = _memory()
    job.settle(folder / "scratch", folder / "scratch_theirs")
    return {
        "extra anonymous": peak["RssAnon"] - before["RssAnon"] - made,
        "extra resident": highest - before["VmRSS"] - made,
        "extra of files": peak["RssFile"] - before["RssFile"],
        "kept afterwards": after["RssAnon"] - before["RssAnon"] - made,
        "samples": peak["samples"],
        "states made": made,
        "shard": state_bytes // WORLD_SIZE,
        "largest parameter": job.largest,
    }


MEMORY_CASES = [
    f"{what}, {whose}"
    for what in ("save", "asynchronous save", "load, states there", "load, states anew")
    for whose in ("ours", "torch's")
    if (what, whose) != ("asynchronous save", "torch's")
]

# Another process looks, since this one's threads wait for each other.
SAMPLER = """
import select, sys
file = open(f"/proc/{sys.argv[1]}/status", "rb", buffering=0)
peak, samples = {"RssAnon": 0, "RssFile": 0}, 0
print("ready", flush=True)
while not select.select([sys.stdin], [], [], 0.001)[0]:
    file.seek(0)
    for line in file.read().decode().splitlines():
        name, _, value = line.partition(":")
        if name in peak:
            peak[name] = max(peak[name], int(value.split()[0]) * 1024)
    samples += 1
print(peak["RssAnon"], peak["RssFile"], samples)
"""


@contextlib.contextmanager
def _sampled() -> Any:
    """Look every millisecond at this process's resident memory; the peaks are there at the end of the block."""
    command = [sys.executable, "-S", "-c", SAMPLER, str(os.getpid())]
    peak: dict[str, int] = {}
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as sampler:
        assert sampler.stdin
        assert sampler.stdout
        sampler.stdout.readline()
        yield peak
        sampler.stdin.write("\n")
        sampler.stdin.close()
        numbers = sampler.stdout.readline().split()
        peak |= dict(zip(("RssAnon", "RssFile", "samples"), map(int, numbers), strict=True))


def _memory() -> dict[str, int]:
    lines = Path("/proc/self/status").read_text().splitlines()
    fields = (line.split() for line in lines if line.startswith(("VmHWM", "VmRSS", "RssAnon", "RssFile")))
    return {words[0].rstrip(":"): int(words[1]) * 1024 for words in fields}


def _fingerprint(tensor: torch.Tensor) -> float:
    return float(tensor.double().sum())


def _in_turn(ways: list[str], number: int) -> list[str]:
    """Another one comes first in every round."""
    first = number % len(ways)
    return ways[first:] + ways[:first]


def _facts(job: Job) -> dict[str, Any]:
    return {
        "state bytes": job.num_bytes(),
        "parameters": sum(parameter.numel() for parameter in job.backend.model.parameters()),
        "tensors": len(job.tensors()),
        "largest parameter bytes": job.largest,
        "torch threads a process": torch.get_num_threads(),
    }


def _may_drop_caches() -> bool:
    return os.access(DROP_CACHES, os.W_OK)


# --- the report -------------------------------------------------------------------------------------------------------


def spread(values: Sequence[float]) -> dict[str, float]:
    """Median, quartiles and extremes."""
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive")
    return {"median": middle, "low": low, "high": high, "min": min(values), "max": max(values)}


def ratios(rounds: Sequence[dict[str, float]], above: str, below: str) -> dict[str, float]:
    """Of two things in the same round."""
    return spread([one[above] / one[below] for one in rounds])


def row(name: str, rounds: Sequence[dict[str, float]], above: str, below: str, target: float | None) -> list[str]:
    """A line of a table of ratios."""
    found = ratios(rounds, above, below)
    seconds = [statistics.median(one[way] for one in rounds) for way in (above, below)]
    verdict = "" if target is None else ("met" if found["median"] <= target else "MISSED")
    return [
        name,
        *(f"{number:.3f}" for number in seconds),
        f"{found['median']:.3f}",
        f"{found['low']:.2f} .. {found['high']:.2f}",
        f"{found['min']:.2f} .. {found['max']:.2f}",
        "" if target is None else f"{target:.2f}",
        verdict,
    ]


HEADER = ["", "s", "of s", "ratio", "quartiles", "extremes", "target", ""]


def table(lines: Sequence[Sequence[str]]) -> str:
    """Columns as wide as they must be, the first one flush left."""
    widths = [max(len(line[column]) for line in lines) for column in range(len(lines[0]))]
    return "\n".join(
        "  ".join(
            text.ljust(width) if column == 0 else text.rjust(width)
            for column, (text, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in lines
    )


def describe(results: dict[str, Any]) -> str:
    """The results for people."""
    parts = [", ".join(f"{name} {value}" for name, value in results["machine"].items())]
    parts.append(", ".join(f"{name} {value}" for name, value in results["settings"].items()))
    if saves := results.get("save"):
        rounds = saves["rounds"]
        written = saves["bytes"]["ours"]
        lines = [
            HEADER,
            row("ours / torch.distributed.checkpoint.save", rounds, "ours", "theirs", TARGETS["save"]),
            row("ours / the same with get_state_dict", rounds, "ours", "theirs with get_state_dict", None),
            row("ours / plain write and fsync", rounds, "ours", "plain", None),
            row("torch's / plain write and fsync", rounds, "theirs", "plain", None),
        ]
        sizes = f"{written:,} bytes of ours, {saves['bytes']['theirs']:,} of torch's"
        parts.append(f"Synchronous save ({sizes})\n{table(lines)}")
    if loads := results.get("load"):
        lines = [HEADER]
        for name, rounds in loads["rounds"].items():
            # Torch makes the optimizer's states in get_state_dict, ours in its load.
            strict, fair = (None, TARGETS["load"]) if "anew" in name else (TARGETS["load"], None)
            lines.append(row(f"{name}: ours / torch's load alone", rounds, "ours", "theirs", strict))
            lines.append(row("  ours / with get_state_dict, set_", rounds, "ours", "theirs with its state dicts", fair))
        text = f"Load (ours with search and checksums)\n{table(lines)}"
        if not loads["page cache dropped"]:
            text += f"\n{DROP_CACHES} may not be written: nothing was measured with the page cache dropped"
        parts.append(text)
    if stalls := results.get("stall"):
        lines = [
            HEADER,
            row(
                "training held up by an asynchronous save / synchronous",
                stalls["rounds"],
                "async",
                "sync",
                TARGETS["stall"],
            ),
            row("asynchronous until complete / synchronous", stalls["rounds"], "async until complete", "sync", None),
            row("step with a save in flight / quiet", stalls["steps"], "busy", "quiet", None),
        ]
        text = (
            f"Asynchronous save\n{table(lines)}\nthe first one of a run holds it up for {stalls['first stall']:.3f} s"
        )
        covered = [one["covered"] for one in stalls["steps"]]
        parts.append(f"{text}; steps counted for each save: {min(covered)} to {max(covered)}")
    if memory := results.get("memory"):
        lines = [["MiB, the larger of both processes", "VmHWM", "", "anonymous", "", "of files", "kept", "allowed"]]
        for case, ranks in memory.items():
            worst = {name: max(rank[name] for rank in ranks) for name in ranks[0]}
            allowed = worst["shard"] + worst["largest parameter"]
            line = [case]
            for name in ("extra resident", "extra anonymous"):
                verdict = "" if case.endswith("torch's") else ("met" if worst[name] <= allowed else "MISSED")
                line += [f"{worst[name] / MIB:.1f}", verdict]
            numbers = (worst["extra of files"], worst["kept afterwards"], allowed)
            lines.append(line + [f"{number / MIB:.1f}" for number in numbers])
        parts.append(
            "Memory beyond the state itself, at its peak; allowed: half the state and the largest parameter\n"
            f"{table(lines)}\n"
            "anonymous: sampled every ms; VmHWM: exact, with pages of mapped files, which the system can take back"
        )
    return "\n\n".join(parts) + "\n"


def machine(folder: Path) -> dict[str, Any]:
    """What was measured on."""
    cpu = next((line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name")), "")
    memory = int(Path("/proc/meminfo").read_text().split()[1]) / MIB
    mount = subprocess.run(["df", "--output=source,fstype", folder], capture_output=True, text=True).stdout
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, cwd=ROOT).stdout
    return {
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
        "cores": os.cpu_count(),
        "CPU": cpu.partition(":")[2].strip(),
        "memory": f"{memory:.0f} GiB",
        "disk": " ".join(mount.splitlines()[-1].split()),
        "Python": platform.python_version(),
        **{name: version(name) for name in ("torch", "accelerate", "safetensors", "xxhash")},
        "commit": commit.strip(),
        "load average before": f"{os.getloadavg()[0]:.2f}",
    }


def main() -> None:
    """Measure and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", type=Path, help="a folder for the results")
    parser.add_argument("--name", default="cpu_ddp", help="of the two files")
    parser.add_argument("--megabytes", type=int, default=400, help="MiB of weights and optimizer states, about")
    parser.add_argument("--width", type=int, default=512, help="of the model: 12 x width squared parameters a block")
    parser.add_argument("--pairs", type=int, default=9, help="rounds of each comparison, after one to warm up")
    parser.add_argument("--steps", type=int, default=2, help="training steps with and without a save in flight")
    parser.add_argument("--step-rounds", type=int, default=5, help="rounds of such steps")
    parser.add_argument("--tokens", type=int, default=64, help="in the micro-batch of such a step")
    parser.add_argument("--threads", type=int, default=1, help="OMP_NUM_THREADS; 1 is what a launch by torch gives")
    parser.add_argument("--folder", type=Path, default=Path("/tmp"), help="where checkpoints are written meanwhile")
    parser.add_argument("--parts", default="save,load,stall,memory", help="which to measure")
    settings = parser.parse_args()
    # Before the server starts that the processes are forked from.
    os.environ["OMP_NUM_THREADS"] = str(settings.threads)
    described = {
        name: getattr(settings, name)
        for name in ("megabytes", "width", "pairs", "steps", "step_rounds", "tokens", "threads")
    }
    results: dict[str, Any] = {"machine": machine(settings.folder), "settings": described | {"processes": WORLD_SIZE}}

    def job(function: Callable[..., Any], folder: str, *arguments: Any) -> list[Any]:
        print(f"{function.__name__} {' '.join(arguments)}", file=sys.stderr, flush=True)
        environment = launch_environment(ROOT / "recipes/accelerate_configs/ddp.yaml", WORLD_SIZE)
        return run_job(
            function,
            settings,
            Path(folder),
            *arguments,
            world_size=WORLD_SIZE,
            environment=environment,
            folder=ROOT,
            timeout=1800,
        )

    parts = settings.parts.split(",")
    for part, measure in (("save", measure_saves), ("load", measure_loads), ("stall", measure_stalls)):
        if part in parts:
            with tempfile.TemporaryDirectory(dir=settings.folder, prefix="bench_checkpoints_") as folder:
                results[part] = job(measure, folder)[0]
    if "memory" in parts:
        with tempfile.TemporaryDirectory(dir=settings.folder, prefix="bench_checkpoints_") as folder:
            job(prepare_memory, folder)
            results["memory"] = {case: job(measure_memory, folder, case) for case in MEMORY_CASES}
    results["machine"]["load average after"] = f"{os.getloadavg()[0]:.2f}"
    settings.results.mkdir(parents=True, exist_ok=True)
    text = describe(results)
    (settings.results / f"{settings.name}.txt").write_text(text)
    (settings.results / f"{settings.name}.json").write_text(json.dumps(results, indent=1) + "\n")
    print(text, end="")


if __name__ == "__main__":
    main()
