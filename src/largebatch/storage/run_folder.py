"""The files of a run: where each is, and how it is read and written.

config.json           the resolved config
plan.json             the resolved plan
source/               a copy of the task's folder at the latest start, and its git commit
metrics.jsonl         one line per logged step
evaluations.jsonl     one line per evaluation
noise_scale.jsonl     one line per measurement of the gradient noise scale
answers/              written by fine-tuning's `evaluation.answers`: one file per evaluation
history.jsonl         one line per start (with changes of the recipe), skipped step, failed checkpoint, failed command
                      of `checkpoint.then`, and end
summary.json          the final numbers
critical_batch.json   what `largebatch critical-batch` has found, in the folder of its branches
tensorboard/          the same numbers for TensorBoard
trackers/             files of trackers, such as the id and the last number of the run in W&B (wandb.json)
checkpoints/          see `storage.layout`
then/                 the weights for the command of `checkpoint.then`, while it runs
model/                the final weights, for `from_pretrained`
attempts/             the starts of the run, see `storage.attempts`, and how their processes ended, see `system.endings`
stacks/               what the processes were doing when the run hung, and their collectives
jobs/                 one folder per job of a scheduler, with one per start of it (logs, and how it ended), and copies
                      of what the jobs run
report.html           written by `largebatch report`; runs ignore it
stop                  a file whose creation asks the run to stop; the run deletes it
stop.<job>            the same for the batch script of that job, which other jobs do not obey
lock                  held by the run while it is running
"""

from pathlib import Path

from largebatch.config import RecipeConfig, as_json
from largebatch.config.problems import JsonObject
from largebatch.plan import RunPlan
from largebatch.storage.attempts import Record, attempt_name, latest_attempt, read_attempts
from largebatch.storage.catalog import Entry, entries
from largebatch.storage.files import Line, read_json_lines, replace_file, replace_json_file
from largebatch.storage.layout import read_object
from largebatch.system.endings import Ending, decisive, read_endings
from largebatch.system.failures import Kind
from largebatch.system.presence import exists
from largebatch.system.regular_file import read_bytes


class RunFolder:
    """The folder of a run, which may be another's, damaged, or not there."""

    def __init__(self, path: Path):
        self.path = path
        self.config_file = path / "config.json"
        self.plan_file = path / "plan.json"
        self.source_dir = path / "source"
        self.metrics_file = path / "metrics.jsonl"
        self.evaluations_file = path / "evaluations.jsonl"
        self.noise_scale_file = path / "noise_scale.jsonl"
        self.history_file = path / "history.jsonl"
        self.summary_file = path / "summary.json"
        self.critical_batch_file = path / "critical_batch.json"
        self.checkpoints_dir = path / "checkpoints"
        self.attempts_dir = path / "attempts"
        self.model_dir = path / "model"
        self.tensorboard_dir = path / "tensorboard"
        self.trackers_dir = path / "trackers"
        self.then_dir = path / "then"
        self.stacks_dir = path / "stacks"
        self.jobs_dir = path / "jobs"
        self.report_file = path / "report.html"
        self.stop_file = path / "stop"
        self.lock_file = path / "lock"

    def stop_file_of(self, job: str) -> Path:
        """The request to stop of a job's batch script."""
        return self.path / f"stop.{job}"

    def stop_files(self) -> list[Path]:
        """The requests to stop that there are, of whichever job. Folders are not: they cannot be deleted like files."""
        found = [*self.path.glob("stop"), *self.path.glob("stop.*")]
        return [file for file in found if not file.is_dir()]

    @property
    def is_a_run(self) -> bool:
        """Whether it holds a run."""
        return exists(self.plan_file) or exists(self.config_file)

    # --- what is in them; what is missing, damaged or cannot be read now is empty, unless an OSError is mentioned ---

    def config(self) -> JsonObject:
        """The resolved config, as JSON."""
        return read_object(self.config_file)

    def plan(self) -> RunPlan | None:
        """The plan; None if it is damaged, or from another version. OSError if it cannot be read."""
        try:
            return RunPlan.from_json(read_bytes(self.plan_file).decode())
        except ValueError:
            return None

    def metrics(self) -> list[Line]:
        """The lines of logged steps; OSError if they cannot be read."""
        return read_json_lines(self.metrics_file)

    def evaluations(self) -> list[Line]:
        """The lines of evaluations; OSError if they cannot be read."""
        return read_json_lines(self.evaluations_file)

    def noise_scale(self) -> list[Line]:
        """The measurements of the gradient noise scale; OSError if they cannot be read."""
        return read_json_lines(self.noise_scale_file)

    def history(self) -> list[Line]:
        """What happened to the run; OSError if it cannot be read."""
        return read_json_lines(self.history_file)

    def summary(self) -> JsonObject:
        """The final numbers."""
        return read_object(self.summary_file)

    def checkpoints(self) -> list[Entry]:
        """The checkpoints, latest first, complete or not; OSError if they cannot be listed."""
        return entries(self.checkpoints_dir)

    def checkpoint_step(self) -> int:
        """The step of the latest complete checkpoint; 0 if there is none."""
        return next((entry.step for entry in self.checkpoints() if entry.problem is None), 0)

    def attempts(self) -> list[Record]:
        """The records of all starts, in their order."""
        return read_attempts(self.attempts_dir)

    def endings_of(self, attempt: Record) -> list[Ending]:
        """How the processes of the attempt with this record have ended."""
        return read_endings(self.attempts_dir / attempt_name(attempt))

    def out_of_memory(self, attempt: Record) -> Ending | None:
        """The ending of a process that was out of memory, if the attempt with this record had one."""
        return decisive(ending for ending in self.endings_of(attempt) if ending.kind == Kind.OUT_OF_MEMORY)

    def ending(self) -> Ending | None:
        """How the latest attempt has ended; None if there is none, it is still running, or it was killed."""
        try:
            latest = latest_attempt(self.attempts_dir)
        except OSError:
            return None
        return None if latest is None else decisive(self.endings_of(latest))

    def write_config(self, config: RecipeConfig) -> None:
        """Write the resolved config."""
        replace_json_file(self.config_file, as_json(config))

    def write_plan(self, plan: RunPlan) -> None:
        """Write the plan, which marks the folder as a run's."""
        replace_file(self.plan_file, plan.to_json().encode())

    def write_summary(self, summary: JsonObject) -> None:
        """Write the final numbers."""
        replace_json_file(self.summary_file, summary)

    def write_critical_batch(self, finding: JsonObject) -> None:
        """Write what `largebatch critical-batch` has found."""
        replace_json_file(self.critical_batch_file, finding)
