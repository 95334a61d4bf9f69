"""Run folders: what `report`, `checkpoints` and `job-ended` read of a run."""

import json
from pathlib import Path
from random import Random

from fuzzing import SOUND
from fuzzing.cases import Case
from fuzzing.mutations import damage


def case(random: Random, folder: Path) -> Case:
    """A damaged run folder."""
    (folder / "secret.json").write_text('{"password": "SECRET"}')
    run = folder / "run"
    logs = run / "jobs/17/start_1"
    (logs / "endings").mkdir(parents=True)
    (logs.parent / "starts").write_text("7\n9\n")
    ending = {"rank": 0, "node": "a", "time": 1.0, "kind": "error", "exception": "X", "message": "m"}
    (logs / "endings/rank_0.json").write_text(json.dumps(ending))
    record = run / "attempts/0002.json"
    record.write_text(json.dumps(json.loads(record.read_text()) | {"job_id": "17", "restart": 1}))
    damage(random, run)
    report = ["report", str(run)]
    two = ["report", str(run), str(SOUND / "run"), "--out", str(folder / "two.html")]
    ended = ["job-ended", "--run-dir", str(run), "--start", "1", "--max-restarts", "3", "--exit-code", "1"]
    choices = (report, report, report, two, ended, ["checkpoints", str(run)])
    return Case(random.choice(choices), folder, environment={"LARGEBATCH_JOB_ID": "17"})
