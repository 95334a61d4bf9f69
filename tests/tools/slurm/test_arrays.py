"""Sweeps and branches of runs, which are submitted as one array."""

import json
import shlex
from pathlib import Path

import pytest

import tasks
from ending_files import end_run
from manifests import save_with_manifest
from played import write_commands
from run_folders import started, write_lines, write_run
from submitting import RECIPE, SMOKE, called, snapshot

pytestmark = pytest.mark.usefixtures("sbatch")

QUEUE = ((0, "rates"), (2, "rates"), (3, "other"))  # tasks of arrays, and the folders of their sweeps


def test_a_sweep_is_one_array(output_of, refusal_of):
    words = ["sweep", "gpt_pydoc", "--learning_rate.base_lr", "1e-3,2e-3", "--logging.trackers", "[[]]", "--seeds=2"]
    words += ["--slurm", "--nodes", "2", "--partition=gpu", "--max-parallel=3", "--folder=runs/rates"]
    output_of(*words)
    options = "--array=0,1,2,3%3 --output=runs/rates/points/%a.log --nodes=2 --partition=gpu"
    assert called()["words"] == shlex.split(
        f"--parsable {options} --export=ALL {SMOKE} --run-dir={Path.cwd()}/runs/rates --sweep"
    )
    assert snapshot().parent == Path("runs/rates/jobs").absolute()
    assert (snapshot() / RECIPE).is_file()
    lines = ["base_lr=0.002_seed=0", "--learning_rate.base_lr=0.002", "--logging.trackers=[]", "--seed=0"]
    assert Path("runs/rates/points/2").read_text().splitlines() == lines
    # What has finished is not submitted again.
    run = Path("runs/rates/base_lr=0.001_seed=1")
    run.mkdir()
    end_run(run, "finished")
    printed = output_of(*words)
    assert called()["words"][1] == "--array=0,2,3%3"
    assert "4 points in runs/rates, 1 of them trained already\n" in printed
    assert "\nfollow tail -F runs/rates/points/0.log\nwhen all points are trained, the same command" in printed
    # Nor what is in the queue, of this sweep; more values are.
    queue = "".join(f"echo '{number} {SMOKE} --run-dir={Path.cwd()}/runs/{name} --sweep'\n" for number, name in QUEUE)
    write_commands(Path("bin"), {"squeue": queue})
    words[3] = "5e-4,1e-3,2e-3"
    assert "6 points in runs/rates, 1 of them trained already, 2 in Slurm's queue\n" in output_of(*words)
    assert called()["words"][1] == "--array=3,4,5%3"
    # The same folder by another path; and a queue that does not answer.
    Path("link").symlink_to("runs")
    output_of(*words, "--folder=link/rates")
    assert called()["words"][1] == "--array=3,4,5%3"
    Path("called.json").unlink()
    write_commands(Path("bin"), {"squeue": "echo 'Socket timed out' >&2\nexit 1\n"})
    said = "squeue does not say which points are in the queue: Socket timed out; try again"
    assert said in refusal_of(*words)
    # When all have finished, the result.
    write_commands(Path("bin"), {"squeue": ""})
    run.rename("aside")
    for points in Path("runs/rates/points").iterdir():
        write_run(Path("runs/rates", points.read_text().split()[0]))
    assert "6 of them trained already\n\nloss of the last evaluation" in output_of(*words)
    assert not Path("called.json").exists()


OF_TWO_SEEDS = ("sweep", "gpt_pydoc", "--seeds=2", "--slurm", "--nodes=2")


@pytest.mark.parametrize("number", ["N/A", "0-3", "0%2", "9" * 5000])
def test_a_job_of_other_points_is_not_guessed_at(number, refusal_of):
    queue = f"echo '{number} {SMOKE} --run-dir={Path.cwd()}/runs/rates --sweep'\n"
    write_commands(Path("bin"), {"squeue": queue})
    error = refusal_of(*OF_TWO_SEEDS, "--folder=runs/rates")
    assert f"squeue has jobs of {Path.cwd()}/runs/rates without a point each" in error


def test_a_folder_with_a_percent_sign_has_its_logs(output_of):
    assert "follow tail -F runs/%j/points/0.log\n" in output_of(*OF_TWO_SEEDS, "--folder=runs/%j")
    assert "--output=runs/%%j/points/%a.log" in called()["words"]


def test_branches_of_a_jobs_run_are_one_array(output_of, refusal_of):
    """The run has noted the recipe of its snapshot, for which there is no script."""
    run = Path("runs/pydoc")
    write_run(run, history=[started(0, recipe=str(run / "jobs/snapshot" / RECIPE))], config=Path(RECIPE))
    output_of("snapshot", "--to", run / "jobs/snapshot")
    checkpoint = save_with_manifest(run, 100, config=json.loads((run / "config.json").read_text()))
    words = ["critical-batch", f"{run}/", "--at=100", "--batches=1,2", "--slurm", "--nodes=1", "--time=20"]
    printed = output_of(*words)
    folder = Path("runs/pydoc.critical_batch_at_100").absolute()
    options = f"--array=0,1 --output={folder}/points/%a.log --nodes=1 --time=20 --export=ALL"
    assert called()["words"] == shlex.split(f"--parsable {options} {SMOKE} --run-dir={folder} --sweep")
    name, allowed, *overrides = (folder / "points/1").read_text().splitlines()
    assert (name, allowed.partition("=")[0]) == ("global_batch_size=64_seed=0", "--allow-change")
    assert "--train.stop_after_steps=150" in overrides
    linked = folder / name / "checkpoints" / checkpoint.name / "manifest.json"
    assert linked.samefile(checkpoint / "manifest.json")
    # Nothing is said of branches that have not been trained.
    assert printed.endswith("when all points are trained, the same command shows the result\n")
    assert "undecided" not in printed
    assert not (folder / "critical_batch.json").exists()
    # A finding of fewer seeds is not theirs.
    (folder / "critical_batch.json").touch()
    output_of(*words, "--seeds=2")
    assert not (folder / "critical_batch.json").exists()
    # The run of another task, which has no script here.
    mine = tasks.copy("causal_lm", Path("mine")) / "gpt_pydoc.json"
    write_lines(run / "history.jsonl", [started(0, recipe=str(mine))])
    words.append("--folder=branches")
    assert "its recipe, mine/causal_lm/gpt_pydoc.json, is not in " in refusal_of(*words)
    assert "belongs to a different task than mine/causal_lm" in refusal_of(*words, "--recipe", mine)


def test_a_sweep_with_a_wrong_point_is_not_submitted(refusal_of):
    error = refusal_of("sweep", "gpt_pydoc", "--batch.global_batch_size", "32,33", "--slurm", "--nodes", "2")
    assert "  - global_batch_size=33_seed=0: " in error
    assert not Path("called.json").exists()
    assert not Path("runs").exists()
