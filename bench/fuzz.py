"""Damaged and hostile input: every command ends soon with a result or a sentence, and never with a traceback.

    python bench/fuzz.py --cases 1000 --seed 0

Each target makes cases of its own kind of input, from a sound one and a few random mutations:

- recipes: a shipped recipe, for `plan` and `lint`.
- overrides: the words of a command line.
- variables: the environment of a job's processes, its batch script and its pre-flight.
- run folders: what `report`, `checkpoints` and `job-ended` read of a run.
- checkpoints: what `checkpoints` and `export` read; half of them with checksums that fit the damage.

A case runs in a forked child of this process, which has imported everything, as root without root's rights over files,
with at most 2 GiB of memory besides the parent's. It holds if it takes at most 10 s of CPU time and 30 s in all, prints
neither a traceback nor a terminal escape, and, if its exit code is not 0, says why: "error: …" or, with exit code 1,
what a check has found. Case number n of a target depends on the seed and n alone: `--only recipes:17` runs one again.
"""

import argparse
import copy
import ctypes
import io
import json
import os
import resource
import select
import shutil
import signal
import stat
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

from record import RESULTS, ROOT, take_facts, write_verdicts

# A run folder and a checkpoint as the tests write them, without training.
sys.path.insert(0, str(ROOT / "tests"))
os.environ["OMP_NUM_THREADS"] = "1"
os.environ["CUDA_VISIBLE_DEVICES"] = ""
os.environ["HF_HUB_OFFLINE"] = "1"

from largebatch.backend.launch import read_launch
from largebatch.run.command_line import user_errors
from largebatch.run.record.folder import RunFolder
from largebatch.run.watch.stop import StopRequests
from largebatch.storage.attempts import job_start
from largebatch.tools.command_line import COMMANDS, build_parser
from largebatch.tools.command_line import main as largebatch
from run_folders import HISTORY, write_run
from saving import FakeRun, mark

CPU_SECONDS, WALL_SECONDS = 10.0, 30.0
MEMORY_BYTES = 2 * 2**30
HELD = "held"

# --- mutations of JSON ------------------------------------------------------------------------------------------------

# Text that `as_text` puts in place of a string: no value of Python's becomes this JSON.
RAW = {
    '"<digits>"': "9" * 5000,
    '"<exponent>"': "1e999",
    '"<nesting>"': "[" * 100_000 + "]" * 100_000,
    # As deep as Python's parser goes, or nearly.
    '"<deep>"': '{"x": ' * 940 + "1" + "}" * 940,
}
EXTREMES: tuple[Any, ...] = (
    *(None, True, False, 0, 1, -1, 2, 0.5, -0.0, 1e-320, 1e308, float("nan"), float("inf")),
    *(2**24, 2**31, 2**53 + 1, 2**62, 2**63 - 1, 2**63, 10**40, "<digits>", "<nesting>", "<deep>", "<exponent>"),
    *("", "x", "²", "\0", "\ud800", "\x1b[31mred", "../../x", "/dev/zero", "x" * 100_000, "none", "auto"),
    *([], {}, [[]], [{}], {"x": 1}, [None], [1, "x"], [2**62] * 10_000),
)
Container = dict[str, Any] | list[Any]


def places(value: Any) -> Iterator[tuple[Container, Any]]:
    """The containers and keys of all values inside a value."""
    if isinstance(value, dict | list):
        for key in list(value) if isinstance(value, dict) else range(len(value)):
            yield value, key
            yield from places(value[key])


def replace(random: Random, container: Any, key: Any) -> None:
    container[key] = copy.deepcopy(random.choice(EXTREMES))


def change_number(random: Random, container: Any, key: Any) -> None:
    number = container[key]
    if isinstance(number, int | float) and not isinstance(number, bool):
        choices = (number + 1, number - 1, -number, number * 10 ** random.randrange(20), number / 3, str(number))
        container[key] = random.choice(choices)


def delete(_: Random, container: Any, key: Any) -> None:
    del container[key]


def repeat(random: Random, container: Any, key: Any) -> None:
    container[key] = [copy.deepcopy(container[key]) for _ in range(random.choice((1, 2, 1000)))]


def add_keys(random: Random, container: Any, _: Any) -> None:
    if isinstance(container, dict):
        count = random.choice((1, 1, 1, 100, 200_000))
        container |= {f"{random.choice('xyz')}{number}": number for number in range(count)}


def rename(_: Random, container: Any, key: Any) -> None:
    if isinstance(container, dict):
        container[f"{key}²"] = container.pop(key)


MUTATIONS = (replace, replace, replace, change_number, delete, repeat, add_keys, rename)


def mutate(random: Random, value: Any) -> Any:
    """Change a JSON value in one to three random places, of which one may be the whole of it."""
    holder = [value]
    for _ in range(random.randint(1, 3)):
        if found := list(places(holder)):
            random.choice(MUTATIONS)(random, *random.choice(found))
    return holder[0] if holder else None


def as_text(value: Any) -> bytes:
    """A mutated value as JSON, which may be out of the ordinary."""
    text = json.dumps(value)
    for name, raw in RAW.items():
        text = text.replace(name, raw)
    return text.encode()


# --- mutations of files -----------------------------------------------------------------------------------------------


def change_bytes(random: Random, file: Path) -> None:
    content = bytearray(file.read_bytes())
    for _ in range(random.randint(1, 4)):
        if content:
            content[random.randrange(len(content))] ^= 1 << random.randrange(8)
    file.write_bytes(content)


def cut(random: Random, file: Path) -> None:
    content = file.read_bytes()
    file.write_bytes(content[: random.randrange(len(content) + 1)])


def insert(random: Random, file: Path) -> None:
    content, junk = file.read_bytes(), random.choice((b"\0", b"\xff\xfe", b"\n", b"{}", b"\x1b[2J", b"[" * 100_000))
    place = random.randrange(len(content) + 1)
    file.write_bytes(content[:place] + junk + content[place:])


def replace_by_kind(random: Random, file: Path) -> None:
    """Put something other than a file in a file's place."""
    file.unlink()
    kind = random.choice(("nothing", "fifo", "folder", "loop", "link", "device", "sparse", "unreadable"))
    if kind == "fifo":
        os.mkfifo(file)
    elif kind == "folder":
        file.mkdir()
    elif kind == "sparse":
        with file.open("wb") as opened:
            opened.truncate(30 * 2**30)
    elif kind == "unreadable":
        file.touch(mode=0)
    elif kind != "nothing":
        targets = {"loop": file.name, "device": "/dev/zero", "link": "../secret.json"}
        file.symlink_to(targets[kind])


def change_json(random: Random, file: Path) -> None:
    """Mutate the value of a JSON file or, in one of JSON lines, of some lines; the bytes of any other file."""
    if file.suffix not in (".json", ".jsonl"):
        change_bytes(random, file)
        return
    lines = file.read_bytes().splitlines() if file.suffix == ".jsonl" else [file.read_bytes()]
    for number in random.sample(range(len(lines)), min(len(lines), random.randint(1, 3))):
        lines[number] = as_text(mutate(random, json.loads(lines[number])))
    file.write_bytes(b"\n".join(lines) + b"\n")


def damage(random: Random, folder: Path) -> None:
    """Damage one to three files of a folder."""
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    for file in random.sample(files, min(len(files), random.randint(1, 3))):
        kinds = (change_bytes, cut, insert, replace_by_kind, *[change_json] * 6)
        random.choice(kinds)(random, file)


# --- targets ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Sound:
    """What cases are made from: a copy of the project, a run, and a run with two checkpoints."""

    project: Path
    run: Path
    checkpoints: Path

    @classmethod
    def make(cls, folder: Path) -> "Sound":
        sound = cls(folder / "project", folder / "run", folder / "checkpoints")
        for name in ("recipes", "slurm", "ds_configs", "launch"):
            shutil.copytree(ROOT / name, sound.project / name)
        write_run(sound.run, history=HISTORY)
        run = FakeRun(sound.checkpoints)
        for step in (7, 9):
            run.save(step)
        return sound


@dataclass(frozen=True)
class Case:
    """What to run in a child, in which folder and with which variables."""

    words: Sequence[str]
    folder: Path
    work: Callable[[Sequence[str]], int | None] = largebatch
    environment: dict[str, str] = field(default_factory=dict)


def recipes(random: Random, sound: Sound, folder: Path) -> Case:
    """A mutated recipe beside its `config.py`."""
    recipe = random.choice(sorted((sound.project / "recipes").glob("*/*_*.json")))
    task = shutil.copytree(recipe.parent, folder / "recipes" / recipe.parent.name)
    shutil.copytree(sound.project / "recipes/accelerate_configs", folder / "recipes/accelerate_configs")
    file = task / recipe.name
    kinds = (change_bytes, cut, insert, replace_by_kind)
    random.choice(kinds if random.random() < 0.15 else (change_json,))(random, file)
    size = str(random.choice((1, 2, 8, 96, 1000)))
    plan = ["plan", str(file), "--world-size", size]
    several = ["plan", str(file), "--world-sizes", "2,8"]
    choices = (plan, plan, plan, plan, [*plan, "--json"], ["lint", str(file)], ["lint", str(file)], several)
    return Case(random.choice(choices), folder)


TEXTS = (
    *("", " ", "0", "1", "-1", "1.5", "1e999", "nan", "inf", "²", "٣", "true", "null", "none", "x", "a,b", ",", "="),
    *("--", "-", "--x", "--=", "--.", "--x.", "--batch", "--model.hidden_size", "--optimizer", "[]", "{}", '"', "{"),
    *("2147483648", "9223372036854775807", "9223372036854775808", "99999999999999999999", "9" * 5000, "[" * 100_000),
    *(
        "x" * 100_000,
        "/".join(["x"] * 3000),
        "../x",
        ".",
        "/dev/null",
        "/dev/zero",
        "/proc/self/mem",
        "a\nb",
        "\x1b[31m",
    ),
    *("\udcff", "$(id)", "`id`", "%j", "4-2", "2-4", "1-99999999", "recipes", "recipes/causal_lm", "gpt_pydoc"),
)


def command_lines(sound: Sound, folder: Path) -> list[list[str]]:
    """A sound line of each command that starts no process, talks to no other machine and trains nothing."""
    gpt, run = "recipes/causal_lm/gpt_pydoc.json", str(folder / "run")
    size = ["--batch.micro_batch_size", "8"]
    steps = ["--train.stop_after_steps=10", "--evaluation.every", '{"steps": 5}']
    start = ["--run-dir", run, "--start", "1", "--max-restarts", "3"]
    return [
        ["plan", gpt, "--world-size", "2", *size, *steps],
        ["plan", gpt, "--world-size", "2", "--model.num_layers", "3", "--optimizer.weight_decay", "0.1", "--json"],
        ["plan", gpt, "--world-sizes", "2,4", "--gpu-memory", "80", *size],
        ["plan", gpt, "--world-sizes", "2,4", "--gpu", "h100", "--network", "400G/gpu", "--gpus-per-node", "8"],
        ["lint", gpt, "slurm/gpt_pydoc.sbatch", "ds_configs/zero3.json"],
        ["submit", "gpt_pydoc", "--nodes", "2-4", "--gpus-per-node", "2", "--partition=x", *steps],
        ["job-begins", *start],
        ["job-ended", *start, "--exit-code", "1", "--asked-to-stop", "SIGTERM"],
        ["checkpoints", run, "--verify"],
        ["report", run, str(sound.checkpoints), "--out", str(folder / "report.html")],
        ["export", run, str(folder / "exported"), "--dtype", "bfloat16"],
        ["schema", "recipes/causal_lm", "--check"],
        ["new", str(folder / "new"), "--recipe", "gpt_pydoc"],
        ["effective-batch", str(folder / "train.py"), "--gpus", "8"],
    ]


def overrides(random: Random, sound: Sound, folder: Path) -> Case:
    """The words of a command, some of them replaced, left out, repeated or added."""
    shutil.copytree(sound.project, folder, dirs_exist_ok=True)
    shutil.copytree(random.choice((sound.run, sound.checkpoints)), folder / "run")
    words = random.choice(command_lines(sound, folder))
    for _ in range(random.randint(1, 3)):
        place, text = random.randrange(1, len(words) + 1), random.choice(TEXTS)
        old = words[place] if place < len(words) else ""
        name, equals, _ = old.partition("=")
        changed = [f"{name}={text}"] if equals or random.random() < 0.2 else [text]
        words[place : place + 1] = random.choice((changed, changed, [], [old, old], [old, text]))
        words = words if len(words) > 1 else [*words, text]
    return Case(words, folder, environment={"LARGEBATCH_JOB_ID": "17"})


VARIABLES = {
    "RANK": "0",
    "WORLD_SIZE": "8",
    "LOCAL_RANK": "0",
    "LOCAL_WORLD_SIZE": "4",
    "ACCELERATE_USE_FSDP": "true",
    "ACCELERATE_USE_DEEPSPEED": "false",
    "ACCELERATE_DEEPSPEED_CONFIG_FILE": "ds_configs/zero2.json",
    "ACCELERATE_USE_PARALLELISM_CONFIG": "true",
    "PARALLELISM_CONFIG_DP_SHARD_SIZE": "4",
    "FSDP_VERSION": "2",
    "LARGEBATCH_SHARD_SIZE": "4",
    "LARGEBATCH_JOB_ID": "17",
    "LARGEBATCH_RESTART": "1",
    "LARGEBATCH_BEGAN": "1795000000",
    "LARGEBATCH_JOB_END_TIME": "1795009999",
    "LARGEBATCH_LOGS": "run/jobs/17/start_1",
    "LARGEBATCH_REFUSAL": "run/jobs/17/start_1/refusal",
    "LARGEBATCH_NODES": "2-4",
    "LARGEBATCH_PROCESSES_PER_NODE": "4",
    "LARGEBATCH_ENV": "",
    "LARGEBATCH_PREFLIGHT": "on",
    "LARGEBATCH_PREFLIGHT_SECONDS": "1",
    "LARGEBATCH_MIN_BUSBW": "10",
    "STRATEGY": "ddp",
    "RUN_DIR": "run",
    "SBATCH_GPUS_PER_NODE": "4",
}


def launched(words: Sequence[str]) -> None:
    """What each process of a job reads of its environment before it joins the others."""
    with user_errors():
        read_launch()
        folder = RunFolder(Path(words[0]))
        folder.check_usable()
        folder.hold()
        StopRequests(folder.stop_files, 60.0).requested()
        job_start()


def variables(random: Random, sound: Sound, folder: Path) -> Case:
    """Values that no launcher gives."""
    shutil.copytree(sound.project, folder, dirs_exist_ok=True)
    shutil.copytree(random.choice((sound.run, sound.checkpoints)), folder / "run")
    given = {name: value for name, value in VARIABLES.items() if random.random() < 0.6}
    for name in random.sample(sorted(VARIABLES), random.randint(1, 3)):
        given[name] = random.choice(TEXTS).replace("\0", "")
    start = ["--run-dir", "run", "--start", "1", "--max-restarts", "3"]
    lines = [["job-begins", *start], ["job-ended", *start, "--exit-code", "1"]]
    lines += [["submit", "gpt_pydoc", "--nodes", "2"], ["checkpoints", "run"]]
    if random.random() < 0.5:
        return Case(["run"], folder, launched, given)
    return Case(random.choice(lines), folder, environment=given)


def run_folders(random: Random, sound: Sound, folder: Path) -> Case:
    """A damaged run folder."""
    (folder / "secret.json").write_text('{"password": "SECRET"}')
    run = shutil.copytree(random.choice((sound.run, sound.run, sound.checkpoints)), folder / "run")
    logs = run / "jobs/17/start_1"
    (logs / "errors").mkdir(parents=True)
    (logs.parent / "starts").write_text("7\n9\n")
    error = {"rank": 0, "node": "a", "process": 1, "time": 1.0, "kind": "error", "exception": "X", "message": "m"}
    (logs / "errors/rank_0.json").write_text(json.dumps(error | {"consequence": False}))
    status = json.loads((run / "status.json").read_text()) if (run / "status.json").exists() else {}
    (run / "status.json").write_text(json.dumps(status | {"job_id": "17", "restart": 1}))
    damage(random, run)
    report = ["report", str(run)]
    two = ["report", str(run), str(sound.run), "--out", str(folder / "two.html")]
    ended = ["job-ended", "--run-dir", str(run), "--start", "1", "--max-restarts", "3", "--exit-code", "1"]
    choices = (report, report, report, two, ended, ["checkpoints", str(run)])
    return Case(random.choice(choices), folder, environment={"LARGEBATCH_JOB_ID": "17"})


def checkpoints(random: Random, sound: Sound, folder: Path) -> Case:
    """A damaged checkpoint."""
    (folder / "secret.json").write_text('{"password": "SECRET"}')
    run = shutil.copytree(sound.checkpoints, folder / "run")
    checkpoint = run / "checkpoints/step_00000009"
    damage(random, checkpoint)
    if random.random() < 0.5 and all(map(is_small_file, checkpoint.iterdir())):
        mark(checkpoint)
    listed = ["checkpoints", str(run)]
    exported = ["export", str(checkpoint), str(folder / "exported")]
    return Case(random.choice((listed, [*listed, "--verify"], exported, exported)), folder)


def is_small_file(path: Path) -> bool:
    state = path.lstat()
    return stat.S_ISREG(state.st_mode) and bool(state.st_mode & stat.S_IRUSR) and state.st_size < 2**20


TARGETS: dict[str, Callable[[Random, Sound, Path], Case]] = {
    each.__name__: each for each in (recipes, overrides, variables, run_folders, checkpoints)
}

# --- a case in a child ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Outcome:
    """How a case ended."""

    verdict: str
    cpu_seconds: float
    output: str


def run_case(case: Case) -> Outcome:
    """Run a case in a child and judge it."""
    sys.stdout.flush()
    sys.stderr.flush()
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        child = os.fork()
        if child == 0:
            os._exit(_in_child(case, out.fileno(), err.fileno()))
        ready = select.select([descriptor := os.pidfd_open(child)], [], [], WALL_SECONDS)[0]
        os.close(descriptor)
        if not ready:
            os.kill(child, signal.SIGKILL)
        _, status, usage = os.wait4(child, 0)
        texts = []
        for file in (out, err):
            file.seek(0)
            texts.append(file.read(2**24).decode(errors="replace"))
    cpu_seconds = usage.ru_utime + usage.ru_stime
    verdict = f"no end in {WALL_SECONDS:g} s" if not ready else judge(os.waitstatus_to_exitcode(status), *texts)
    if ready and cpu_seconds > CPU_SECONDS:
        verdict = f"over {CPU_SECONDS:g} s"
    return Outcome(verdict, cpu_seconds, "".join(texts))


def judge(code: int, out: str, err: str) -> str:
    """The verdict on an exit code, which is negative for a signal, and what was printed."""
    if code < 0:
        return f"killed by {signal.Signals(-code).name}"
    if "Traceback (most recent call last)" in out + err:
        return "traceback"
    if "\x1b" in out + err:
        return "terminal escape"
    if "SECRET" in out + err:
        return "a linked file was printed"
    has_reason = "error: " in err or (code == 1 and out.strip())
    return HELD if code == 0 or has_reason else f"exit code {code} without a reason"


def _in_child(case: Case, out: int, err: int) -> int:
    code: Any = 1
    try:
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.dup2(out, 1)
        os.dup2(err, 2)
        # As Python itself opens them.
        sys.stdout, sys.stderr = (
            io.TextIOWrapper(io.FileIO(1, "w")),
            io.TextIOWrapper(io.FileIO(2, "w"), errors="backslashreplace"),
        )
        os.environ.update(case.environment)
        os.chdir(case.folder)
        _give_up_rights()
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        limit = pages * resource.getpagesize() + MEMORY_BYTES
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
        code = case.work(case.words) or 0
    except SystemExit as end:
        code = end.code or 0
    except BaseException:
        traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    return code if isinstance(code, int) else 1


def _give_up_rights() -> None:
    """Give up root's right to read every file, if this is root."""
    version_3, this_process = 0x20080522, 0
    libc = ctypes.CDLL(None, use_errno=True)
    header, none = (ctypes.c_uint32 * 2)(version_3, this_process), (ctypes.c_uint32 * 6)()
    if libc.capset(header, none):
        raise OSError(ctypes.get_errno(), "capset")


# --- the program ------------------------------------------------------------------------------------------------------


def warm_up(folder: Path) -> Sound:
    """Import what the commands import, and make what cases are made from."""
    import plotly.io  # noqa: F401

    import largebatch.checkpoint.export
    import largebatch.estimate.comparison
    import largebatch.estimate.recipe_model
    import largebatch.tools.report.page  # noqa: F401

    for command in COMMANDS:
        build_parser(command)
    return Sound.make(folder)


def fuzz(target: str, numbers: Sequence[int], seed: int, sound: Sound) -> list[tuple[int, Case, Outcome]]:
    """Run cases of a target; each is made from the seed, the target and its number."""
    outcomes = []
    for number in numbers:
        # Resolved: on some systems the folder is a link.
        with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as name:
            folder = Path(name).resolve()
            case = TARGETS[target](Random(f"{seed} {target} {number}"), sound, folder)
            outcomes.append((number, case, run_case(case)))
    return outcomes


def row_of(target: str, outcomes: Sequence[tuple[int, Case, Outcome]]) -> dict[str, Any]:
    """A target's line in the result."""
    bad = [(number, outcome) for number, _, outcome in outcomes if outcome.verdict != HELD]
    longest = max(outcome.cpu_seconds for _, _, outcome in outcomes)
    return {
        "target": target,
        "cases": len(outcomes),
        "longest CPU seconds": round(longest, 1),
        "not held": {f"{target}:{number}": outcome.verdict for number, outcome in bad},
        "verdict": HELD if not bad else "not held",
    }


def main() -> None:
    """Run all targets and write what came of them, or one case and print it."""
    parser = argparse.ArgumentParser(description="Run commands on damaged and hostile input.")
    parser.add_argument("--cases", type=int, default=1000, help="of each target; default: 1000")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--targets", default=",".join(TARGETS), help="names between commas; default: all")
    parser.add_argument("--only", metavar="TARGET:NUMBER", help="run one case, and print all of it")
    parser.add_argument("--output", type=Path, default=RESULTS / "fuzz/fuzz.json")
    options = parser.parse_args()
    facts, rows = take_facts(("pydantic", "torch", "plotly")), []
    with tempfile.TemporaryDirectory() as folder:
        sound = warm_up(Path(folder).resolve())
        if options.only:
            target, _, number = options.only.partition(":")
            ((_, case, outcome),) = fuzz(target, [int(number)], options.seed, sound)
            print(case.words, case.environment, outcome.output, outcome.verdict, outcome.cpu_seconds, sep="\n")
            return
        for target in options.targets.split(","):
            started = time.monotonic()
            rows.append(row_of(target, fuzz(target, range(options.cases), options.seed, sound)))
            print(json.dumps(rows[-1], indent=1), f"{time.monotonic() - started:.0f} s", flush=True)
    write_verdicts(rows, HELD, facts | {"seed": options.seed}, options.output)


if __name__ == "__main__":
    main()
