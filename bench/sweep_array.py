"""Train a sweep and a critical batch as Slurm arrays that each lose a host, and compare them with the same ones here.

    sudo python bench/sweep_array.py

On the test cluster (tests/cluster/slurm_cluster.py), a job trains a tiny GPT, and `largebatch critical-batch` branches
its run at two batch sizes with two seeds, as one array. The points of two rates, three batch sizes and two seeds are
another. Of each array, the network of one host is cut off and its processes are killed while it trains. The same
commands without Slurm, in processes forked here, say what the points must have reached: every number that does not
depend on the clock, and the weights, to the last bit; every step logged once; one attempt, or two for what was killed.
"""

import argparse
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from record import RESULTS, ROOT, take_facts, write_verdicts

# The same array as the test's, with training.
sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "tests/cluster")]

from largebatch.storage.files import read_json_lines  # noqa: E402
from largebatch.storage.run_folder import RunFolder  # noqa: E402
from resuming import EXACT  # noqa: E402
from slurm_cluster import Cluster  # noqa: E402
from sweeping_array import SweepingArray  # noqa: E402

LARGEBATCH = (sys.executable, "-m", "largebatch")
NUM_HOSTS = 4  # one of which each array loses
BATCH = 16
TINY = (
    "--model.num_layers=1",
    "--model.hidden_size=16",
    "--model.num_heads=2",
    "--model.dropout=0.1",
    "--data.block_size=16",
    "--batch.micro_batch_size=8",
    '--learning_rate.warmup.duration={"samples": 320}',
    '--train.duration={"samples": 6400}',
    '--evaluation.every={"samples": 1600}',
    '--checkpoint.every={"samples": 640}',
    "--logging.every=1",
)
GRID = ("--learning_rate.base_lr=1e-3,4e-3", f"--batch.global_batch_size={BATCH},{2 * BATCH},{4 * BATCH}", "--seeds=2")
AT = 100  # the step of the checkpoint from which branches begin
BRANCHES = (f"--at={AT}", "--batches=1,4", "--seeds=2", "--window=3200")


def survive(array: SweepingArray) -> list[Path]:
    """Submit, lose a host during training, and wait for the end; the killed points, first the one that trained."""
    output = array.command()
    print(output, flush=True)
    assert "when all points are trained, the same command shows the result" in output, output
    assert "undecided" not in output, output
    again = array.command()
    assert f"{len(array.points)} in Slurm's queue" in again, again + array.logs()
    killed = array.wait_for(lambda: lose_a_host(array))
    print(f"lost a host with {', '.join(point.name for point in dict.fromkeys(killed))}", flush=True)
    array.wait_for_end()
    return killed


def lose_a_host(array: SweepingArray) -> list[Path]:
    """Lose the host of a point that is found while it trains; none if none is."""
    for index, point in enumerate(array.points):
        if 40 <= len(read_json_lines(point / "metrics.jsonl")) < 100:
            # The job may have ended meanwhile.
            with suppress(LookupError), array.job(index).paused(rank=0):
                if RunFolder(point).ending() is None:
                    return [point, *array.lose_host_of(index)]
    return []


def compare(array: SweepingArray, killed: list[Path], here: Path) -> Iterator[dict[str, Any]]:
    """A row for each point: what it has trained in the array, and whether that is what it has trained here."""
    for point in array.points:
        other = here / point.name
        wrong = [
            name for name in ("metrics.jsonl", "evaluations.jsonl") if numbers(point, name) != numbers(other, name)
        ]
        weights = [(run_dir / "model/model.safetensors").read_bytes() for run_dir in (point, other)]
        if weights[0] != weights[1]:
            wrong.append("weights")
        steps = [line["step"] for line in read_json_lines(point / "metrics.jsonl")]
        if steps != list(range(steps[0], steps[0] + len(steps))):
            wrong.append("steps")
        attempts = len(RunFolder(point).attempts())
        # One that was killed together with the first may not have begun, or may have finished.
        least, most = (2 if point == killed[0] else 1), (2 if point in killed else 1)
        if not least <= attempts <= most:
            wrong.append("attempts")
        about = {"sweep": array.folder.name, "point": point.name, "killed": point in killed, "attempts": attempts}
        yield about | {"steps": len(steps), "verdict": "wrong" if wrong else "equal", "wrong": wrong}


def numbers(run_dir: Path, file: str) -> list[dict[str, Any]]:
    """The lines of a file, without what depends on the clock."""
    return [{name: line[name] for name in EXACT if name in line} for line in read_json_lines(run_dir / file)]


def main() -> None:
    """Train, compare and write."""
    parser = argparse.ArgumentParser(
        description="Compare arrays on a cluster that loses hosts with the same runs here."
    )
    parser.add_argument("--output", type=Path, default=RESULTS / "sweep_array/array.json")
    options = parser.parse_args()
    facts, rows = take_facts(("torch", "accelerate")), []
    os.environ["OMP_NUM_THREADS"] = "1"
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        (folder / "activate").write_text(f"source {sys.prefix}/bin/activate\n")
        environment = {"LARGEBATCH_ENV": str(folder / "activate"), "LARGEBATCH_PREFLIGHT": "off"}
        cluster = Cluster(NUM_HOSTS, folder / "cluster.log")
        # The run of a job, to branch from.
        words = [*TINY, "--logging.trackers=[]", f"--batch.global_batch_size={BATCH}"]
        words += ['--checkpoint.keep_every={"steps": 100}', f"--run-dir={folder}/run", f"--output={folder}/run.log"]
        submit = [*LARGEBATCH, "submit", "gpt_pydoc", "--nodes=1", "--cpus-per-task=1", *words]
        cluster.command(*submit, environment=environment, cwd=ROOT)
        commands = {
            "critical_batch": ["critical-batch", f"{folder}/run/", *BRANCHES],
            "sweep": ["sweep", "gpt_pydoc", "--logging.trackers=[[]]", *TINY, *GRID],
        }
        for name, command in commands.items():
            array = SweepingArray(cluster, folder / name, [*command, "--max-parallel=3"], environment)
            array.wait_for_end()  # of the run
            killed = survive(array)
            here = [*LARGEBATCH, *command, "--strategy=ddp", "--max-parallel=2", f"--folder={folder}/{name}_here"]
            expected = subprocess.run(here, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True).stdout
            rows += compare(array, killed, folder / f"{name}_here")
            printed, wanted = (text.partition("\n\n")[2] for text in (array.command(), expected))
            print(printed, flush=True)
            verdict = "equal" if printed == wanted else "wrong"
            rows.append({"sweep": name, "printed": printed.splitlines(), "verdict": verdict})
        cluster.close()
    write_verdicts(rows, "equal", facts, options.output)


if __name__ == "__main__":
    main()
