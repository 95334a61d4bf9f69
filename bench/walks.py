"""How a run and a plan walk through the rooms of the package: rooms entered, calls upwards, and re-entries.

    python bench/walks.py --checkout DIR

A room is a module or package directly inside src/largebatch; `tools/x` is a room of its own. The calls are those that
Python really makes (`sys.setprofile`) in the checkout's own environment: of one small run of `gpt_pydoc.json` in one
process, and of one `largebatch plan … --world-sizes`. A room is entered by a call from another room or from outside of
the package; what is called meanwhile by code outside of the package, such as a recipe or torch, is called by the room
that called that code. Code that runs while modules are imported is left out, and so are other threads and processes.

- rooms: those that are entered.
- calls upwards: entries from a room into one that stands later in ROOMS of the checkout's tests/test_rooms.py, and so
  may import it but not be imported by it.
- re-entries: entries into a room that was entered before.

Four walks: the whole run until its third step ends, restricted to calls that get or return the number of
`global_batch_size`, by itself or in a tuple, list or dict; the same restricted to calls that get or return a sample: a
batch, which is a dict with "input_ids", or an integer array with a row of a sample's length; the third step of the run;
and the plan.
"""

import argparse
import json
import runpy
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

from record import RESULTS, Figure, Record, tables, take_facts

RECIPE = "recipes/causal_lm/gpt_pydoc.json"
# No other number of the run.
GLOBAL_BATCH_SIZE = 1994
BLOCK_SIZE = 14
STEPS = 3
WORDS = [
    f"--batch.global_batch_size={GLOBAL_BATCH_SIZE}",
    f"--batch.micro_batch_size={GLOBAL_BATCH_SIZE // 2}",
    f"--data.block_size={BLOCK_SIZE}",
    "--data.num_train_samples=9000",
    "--data.num_eval_samples=16",
    "--data.num_workers=0",
    "--model.num_layers=1",
    "--model.hidden_size=8",
    "--model.num_heads=2",
    '--learning_rate.warmup.duration={"steps": 2}',
    "--logging.every=100",
    "--logging.trackers=[]",
    f"--train.stop_after_steps={STEPS + 1}",
]
PLAN = ["plan", RECIPE, "--world-sizes", "2,4"]
WALKS = {
    "global_batch_size": "global_batch_size",
    "sample": "a sample",
    "step": "one step",
    "plan": "`plan --world-sizes`",
}
IMPORTED = "imported"
"""The room of code that runs while a module is imported."""

Entry = tuple[str, str]
"""The room that calls, "" for none, and the room that is entered."""


@dataclass
class Call:
    """A call that has not returned.

    Args:
        room: The room of the function, or that of its caller if it is outside of the package.
        entry: The rooms of caller and function if the call enters a room.
        noted: The walks that know that the call carries what they follow.
    """

    room: str
    entry: Entry | None = None
    noted: set[str] = field(default_factory=set)


class Walk:
    """The entries into rooms, in order: of all calls, of one step's, and of those that carry something.

    Args:
        package: The folder src/largebatch.
    """

    def __init__(self, package: Path):
        self._package = f"{package}/"
        self._rooms: dict[str, str] = {}
        self._stack: list[Call] = []
        self._step = 0
        self.entries: dict[str, list[Entry]] = {walk: [] for walk in WALKS}

    def profile(self, frame: FrameType, event: str, argument: Any) -> None:
        """Follow a call or return of a Python function; for `sys.setprofile`."""
        if event == "call":
            self._stack.append(self._called(frame))
        elif event == "return" and self._stack:
            self._note(self._stack.pop(), argument)

    def _called(self, frame: FrameType) -> Call:
        caller = self._stack[-1].room if self._stack else ""
        if frame.f_code.co_name == "<module>":
            # A train.py that runs calls like somebody outside of the package.
            return Call("" if frame.f_globals.get("__name__") == "__main__" else IMPORTED)
        room = self._room(frame)
        if caller == IMPORTED or not room:
            return Call(caller)
        if not caller and frame.f_code.co_name == "steps":
            # A train.py asks for its next step.
            self._step += 1
        if caller == room:
            return Call(room)
        self.entries["plan"].append((caller, room))
        if self._step == STEPS:
            self.entries["step"].append((caller, room))
        call = Call(room, (caller, room))
        code = frame.f_code
        for name in code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]:
            self._note(call, frame.f_locals.get(name))
        return call

    def _note(self, call: Call, value: object) -> None:
        """Add a call that enters a room to the walks that follow this value, which it gets or returns."""
        if call.entry is None or self._step > STEPS:
            return
        for walk, is_followed in (("global_batch_size", is_global_batch_size), ("sample", is_sample)):
            if walk not in call.noted and any(is_followed(part) for part in parts_of(value)):
                call.noted.add(walk)
                self.entries[walk].append(call.entry)

    def _room(self, frame: FrameType) -> str:
        """The room of a frame's code, or "" outside of the package."""
        file = frame.f_code.co_filename
        if file not in self._rooms:
            is_inside = file.startswith(self._package)
            self._rooms[file] = room_of(Path(file.removeprefix(self._package))) if is_inside else ""
        return self._rooms[file]


def room_of(file: Path) -> str:
    """The room of a file, by its path in the package; "" for the package's own module."""
    parts = file.with_suffix("").parts
    room = "/".join(parts[:2]) if parts[0] == "tools" else parts[0]
    return "" if room in ("__init__", "__main__") else room


def parts_of(value: object) -> Iterator[object]:
    """A value, and the items of a tuple, list or dict."""
    yield value
    if isinstance(value, tuple | list):
        yield from value[:64]
    elif isinstance(value, dict):
        yield from list(value.values())[:64]


def is_global_batch_size(value: object) -> bool:
    return type(value) is int and value == GLOBAL_BATCH_SIZE


def is_sample(value: object) -> bool:
    if isinstance(value, dict):
        return "input_ids" in value
    dtype = str(getattr(value, "dtype", ""))
    shape = getattr(value, "shape", ())
    return "int" in dtype and isinstance(shape, tuple) and len(shape) > 0 and shape[-1] in (BLOCK_SIZE, BLOCK_SIZE + 1)


def walk_in_this_process(checkout: Path, what: str) -> dict[str, list[Entry]]:
    """The entries of a run or of a plan."""
    walk = Walk(checkout / "src/largebatch")
    work: Callable[[], object]
    if what == "plan":
        from largebatch.__main__ import main as largebatch

        def work():
            return largebatch(PLAN)
    else:

        def work():
            return runpy.run_path(str(Path(RECIPE).with_name("train.py")), run_name="__main__")

    with tempfile.TemporaryDirectory() as folder:
        sys.argv = ["train.py", "--config", RECIPE, "--run-dir", f"{folder}/run", *WORDS]
        sys.setprofile(walk.profile)
        try:
            work()
        except SystemExit as end:
            if end.code:
                raise
        finally:
            sys.setprofile(None)
    return walk.entries


def python_of(checkout: Path, *words: str) -> str:
    """What the checkout's own Python prints."""
    command = [checkout / ".venv/bin/python", *words]
    environment = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": "", "PATH": "/usr/bin:/bin"}
    return subprocess.run(command, cwd=checkout, env=environment, stdout=subprocess.PIPE, text=True, check=True).stdout


def upward_calls(entries: list[Entry], order: list[str]) -> list[Entry]:
    """The entries from a room into one that stands later in the order; all tools have one place in it."""
    place = {room: number for number, room in enumerate(order)}
    pairs = ((caller, room, place[room.partition("/")[0]]) for caller, room in entries if caller)
    return [(caller, room) for caller, room, number in pairs if number > place[caller.partition("/")[0]]]


def rooms_that_name(checkout: Path, word: str) -> list[str]:
    """The rooms whose code names a field."""
    package = checkout / "src/largebatch"
    files = [file for file in package.rglob("*.py") if word in file.read_text(encoding="utf-8")]
    return sorted({room_of(file.relative_to(package)) for file in files} - {""})


def traced(checkout: Path) -> dict[str, list[Entry]]:
    """The entries of each walk, from a run and a plan in processes of the checkout."""
    found = {}
    with tempfile.TemporaryDirectory() as folder:
        for what, walks in (("run", [*WALKS][:-1]), ("plan", ["plan"])):
            file = Path(folder, what)
            print(python_of(checkout, __file__, "--checkout", str(checkout), "--trace", what, "--json", str(file)))
            entries = json.loads(file.read_text(encoding="utf-8"))
            found |= {walk: [(caller, room) for caller, room in entries[walk]] for walk in walks}
    return found


def main() -> None:
    """Count and write."""
    parser = argparse.ArgumentParser(description="Count how a run and a plan walk through the rooms of the package.")
    parser.add_argument("--checkout", type=Path, default=Path(__file__).parents[1], help="its .venv runs it")
    parser.add_argument("--json", type=Path, metavar="OUT", help="default: bench/results/walks/<commit>.json")
    parser.add_argument("--trace", choices=["run", "plan"], help=argparse.SUPPRESS)
    options = parser.parse_args()
    checkout = options.checkout.resolve()
    if options.trace:
        options.json.write_text(json.dumps(walk_in_this_process(checkout, options.trace)), encoding="utf-8")
        return
    ask = "import sys, json; sys.path.insert(0, 'tests'); import test_rooms; print(json.dumps(test_rooms.ROOMS))"
    order = json.loads(python_of(checkout, "-c", ask).splitlines()[-1])
    commit = subprocess.check_output(["git", "-C", checkout, "rev-parse", "--short", "HEAD"], text=True).strip()
    record = Record(
        program="walks",
        title=f"Walks through the rooms at commit {commit}",
        about=(__doc__ or "").partition("DIR\n\n")[2],
        settings={"run": WORDS, "plan": PLAN, "order": order},
        facts=take_facts(("torch", "accelerate")) | {"commit": commit},
    )
    for walk, entries in traced(checkout).items():
        rooms = list(dict.fromkeys(room for _, room in entries))
        upwards = upward_calls(entries, order)
        counts = {"rooms": len(rooms), "calls upwards": len(upwards), "re-entries": len(entries) - len(rooms)}
        record.figures += [Figure(f"{WALKS[walk]}: {what}", "", [float(count)]) for what, count in counts.items()]
        pairs = [f"{caller} to {room} ({count})" for (caller, room), count in Counter(upwards).items()]
        record.remarks.append(f"{WALKS[walk]}: {', '.join(rooms)}. Calls upwards: {', '.join(pairs) or 'none'}.")
    named = rooms_that_name(checkout, "global_batch_size")
    record.remarks.append(f"{len(named)} rooms name `global_batch_size` in their source: {', '.join(named)}.")
    print("\n".join([*tables(record), "", *record.remarks]))
    out = options.json or RESULTS / f"walks/{commit}.json"
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(record.to_json(), encoding="utf-8")


if __name__ == "__main__":
    main()
