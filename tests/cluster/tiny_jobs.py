"""The words of the cluster's jobs, how they are stopped, and what they must have left."""

from largebatch.storage.files import read_json_lines
from resuming import TINY_MAPS

WORDS = (*TINY_MAPS, "--logging.every=20")
# Until the test stops it: no job may finish before the test has done to it what it wants to.
ENDLESS = (*WORDS, '--train.duration={"steps": 100000}')
# The same launcher, without the imports of Accelerate's other commands.
LAUNCH = """[[ $1 == launch ]] && exec accelerate-launch "${@:2}" """
# One process per node.
ONE_PROCESS = ("--cpus-per-task=1",)
TWO_NODES = (*ONE_PROCESS, "--nodes=2")


def assert_logged_once(job):
    """Every step that the stand-in took, whatever happened to it."""
    steps = [line["step"] for line in read_json_lines(job.run_dir / "metrics.jsonl")]
    assert steps == list(range(1, job.ending.step + 1))


def stop_for_good(job):
    """Stop an endless job by its stop file."""
    (job.run_dir / "stop").touch()
    assert job.wait_for_end() == "FAILED", job.log
    assert job.exit_code == "75:0", job.log
    assert "stopped by the stop file, after step" in job.log
