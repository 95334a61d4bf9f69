"""Checkpoints of a run without an engine: the state of every step is known, and read again without `largebatch`."""

import json
import re
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace

import torch
import xxhash
from safetensors.torch import load_file

from largebatch.backend.processes import Processes
from largebatch.backend.state import EngineState, Piece
from largebatch.config.sections import Checkpoint
from largebatch.run.checkpoint.save import CheckpointWriter
from largebatch.storage.attempts import Attempt, claim
from largebatch.storage.catalog import entries, remove_leftovers, set_aside, verify_checksums
from largebatch.storage.layout import BestEvaluation, CheckpointError, ParameterInfo

MODEL_CONFIG = '{"model_type": "gpt2"}'
ATTEMPT = "0001_0123abcd"


def state_of(step: int) -> dict[str, torch.Tensor]:
    """All tensors of a model and its optimizer after a step, as checkpoints name them."""
    shapes = {"linear.weight": (3, 5), "norm.weight": (3,), "scale": (), "nothing": (0, 4)}
    state = {}
    for number, (name, shape) in enumerate(shapes.items()):
        values = torch.arange(torch.Size(shape).numel(), dtype=torch.float32).reshape(shape) / 7 + number
        state[f"weight/{name}"] = values + step
        state[f"exp_avg/{name}"] = (values - step).bfloat16()
    state["buffer/norm.running_mean"] = torch.tensor([0.5, -1.5, step])
    state["buffer/norm.num_batches_tracked"] = torch.tensor(step)
    state["buffer/mask"] = torch.tensor([True, False, step % 2 == 0])
    return state


class Bomb:
    """Makes a file when its pickle is read."""

    def __init__(self, path: Path):
        self.path = path

    def __reduce__(self):
        return Path.touch, (self.path,)


class FakeBackend(Processes):
    """What writing and loading ask of a strategy; processes share the elements of each vector evenly."""

    device = torch.device("cpu")
    statistics = SimpleNamespace(names=frozenset({"norm.running_mean"}), count=lambda _: None)
    launch = SimpleNamespace(strategy="ddp", local_world_size=2)
    plan = SimpleNamespace(keeps_checkpoint_of=lambda _: False, to_json=lambda: '{"num_steps": 100}')

    def __init__(self, rank: int = 0, world_size: int = 1):
        super().__init__(rank, world_size, micro_batch_size=1)
        self.is_main_process = rank == 0
        self.state = state_of(0)

    def engine_state(self) -> EngineState:
        vectors = {name: tensor for name, tensor in self.state.items() if not name.startswith("buffer/")}
        return EngineState(
            parameters={
                name.removeprefix("weight/"): ParameterInfo(tuple(tensor.shape), {"step": 3.0})
                for name, tensor in vectors.items()
                if name.startswith("weight/")
            },
            pieces=[Piece(name, 0, tensor, self._owned(tensor)) for name, tensor in vectors.items() if tensor.numel()],
            buffers={
                name.removeprefix("buffer/"): tensor
                for name, tensor in self.state.items()
                if name.startswith("buffer/")
            },
        )

    def _owned(self, tensor: torch.Tensor) -> tuple[int, int]:
        size = tensor.numel()
        return size * self.rank // self.world_size, size * (self.rank + 1) // self.world_size


class FakeRun:
    """One attempt of a run that saves checkpoints."""

    def __init__(
        self,
        path: Path,
        keep_last: int | None = None,
        asynchronous: bool = False,
        backend: FakeBackend | None = None,
        attempt: Attempt | None = None,
    ):
        path.mkdir(exist_ok=True)
        self.checkpoints = path / "checkpoints"
        self.attempt = attempt or claim(path / "attempts", {})
        self.backend = backend or FakeBackend()
        self.warnings: list[str] = []
        self.writer = CheckpointWriter(
            self.backend,
            self.checkpoints,
            self.attempt,
            Checkpoint(keep_last=keep_last, asynchronous=asynchronous),
            {"seed": 0},
            {"model_config.json": MODEL_CONFIG.encode()},
            self.warnings.append,
            lambda _step, _reason: None,
            heartbeat=lambda: None,
        )

    def save(self, step: int, best: BestEvaluation | None = None) -> Path:
        """Train to a step and save a checkpoint there, where `best` is the best evaluation so far."""
        self.begin_to_save(step, best)
        self.writer.wait()
        return self.checkpoints / f"step_{step:08d}"

    def begin_to_save(self, step: int, best: BestEvaluation | None = None) -> None:
        self.backend.state = state_of(step)
        self.writer.save(step, {"bad_steps": 0, "best": best})


def assert_holds(folder: Path, step: int) -> None:
    """A checkpoint is the state of a step, to the bit."""
    manifest = json.loads((folder / "manifest.json").read_text())
    assert manifest["step"] == step
    files = [load_file(folder / f"rank_{rank:05d}.safetensors") for rank in range(manifest["world_size"])]
    found = {f"buffer/{name}": files[holders[0]][f"buffer/{name}"] for name, holders in manifest["buffers"].items()}
    for name, ranges in manifest["vectors"].items():
        if ranges:
            parts = [files[rank][name] for rank, _, _ in ranges]
            found[name] = torch.cat(parts).reshape(manifest["parameters"][name.partition("/")[2]]["shape"])
    expected = {name: tensor for name, tensor in state_of(step).items() if tensor.numel()}
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert_same(found[name], tensor)


def assert_same(tensor: torch.Tensor, expected: torch.Tensor) -> None:
    assert tensor.dtype == expected.dtype
    assert tensor.shape == expected.shape
    assert torch.equal(tensor, expected)


def checksum_problem(path: Path, share: int = 0, num_shares: int = 1) -> str | None:
    """What `verify_checksums` raises, as text; None if the checksums are right."""
    try:
        verify_checksums(path, share, num_shares)
    except (CheckpointError, OSError) as error:
        return str(error)
    return None


def usable(folder: Path) -> list[int]:
    """Steps of the checkpoints that are complete and intact, the newest first; each holds the state of its step."""
    found = [entry for entry in entries(folder) if entry.problem is None]
    for entry in found:
        verify_checksums(entry.path)
        assert_holds(entry.path, entry.step)
    return [entry.step for entry in found]


def assert_training_goes_on(path: Path) -> None:
    """A new attempt begins behind the newest checkpoint, and saves the next."""
    folder = path / "checkpoints"
    attempt = claim(path / "attempts", {})
    newest = usable(folder)[0]
    remove_leftovers(folder)
    assert temporary_folders(folder) == []
    set_aside(folder, newest, attempt.name)
    assert usable(folder)[0] == newest
    run = FakeRun(path, keep_last=1, attempt=attempt)
    run.save(newest + 4)
    assert run.warnings == []
    assert usable(folder) == [newest + 4]
    assert [name.name for name in folder.iterdir()] == [f"step_{newest + 4:08d}"]


def make_checkpoint(path: Path, files: Mapping[str, bytes] | None = None) -> Path:
    """A folder that is a complete checkpoint as far as sizes and checksums tell."""
    path.mkdir(parents=True)
    for name, content in (files or {"manifest.json": b"{}", "rank_00000.safetensors": b"tensors"}).items():
        (path / name).write_bytes(content)
    return mark(path)


def mark(path: Path) -> Path:
    """Give a folder the marker that fits the files that it has now."""
    files = {
        file.name: {"size": file.stat().st_size, "checksum": xxhash.xxh3_128(file.read_bytes()).hexdigest()}
        for file in path.iterdir()
        if file.name != "complete.json"
    }
    step = re.search("[0-9]+", path.name)
    (path / "complete.json").write_text(json.dumps({"step": int(step[0]) if step else 1, "files": files}))
    return path


def temporary_folders(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if path.name.startswith("."))
