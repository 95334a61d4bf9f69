"""Run folders: what `report`, `checkpoints` and `job-ended` read of a run."""

import json
import shutil
from pathlib import Path
from random import Random

from fuzzing.cases import Case, Sound
from fuzzing.mutations import damage


def case(random: Random, sound: Sound, folder: Path) -> Case:
    """A damaged run folder."""
    (folder / "secret.json").write_text('{"password": "SECRET"}')
    run = shutil.copytree(random.choice((sound.run, sound.run, sound.checkpoints)), folder / "run")
    logs = run / "jobs/17/start_1"
    (logs / "endings").mkdir(parents=True)
    (logs.parent / "starts").write_text("7\n9\n")
    ending = {"rank": 0, "node": "a", "time": 1.0, "kind": "error", "exception": "X", "message": "m"}
    (logs / "endings/rank_0.json").write_text(json.dumps(ending))
    record = run / "attempts/0001.json"
    about = json.loads(record.read_text()) if record.exists() else {}
    record.parent.mkdir(exist_ok=True)
    record.write_text(json.dumps(about | {"job_id": "17", "restart": 1}))
    damage(random, run)
    report = ["report", str(run)]
    two = ["report", str(run), str(sound.run), "--out", str(folder / "two.html")]
    ended = ["job-ended", "--run-dir", str(run), "--start", "1", "--max-restarts", "3", "--exit-code", "1"]
    choices = (report, report, report, two, ended, ["checkpoints", str(run)])
    return Case(random.choice(choices), folder, environment={"LARGEBATCH_JOB_ID": "17"})
