"""A manifest whose checksum is right, but whose content is not a run's: the start ends with one sentence."""

import json

import pytest

from jobs import JobFailed, run_job, train
from paths import PYDOC
from saving import mark
from tasks import SMALL


def train_until(step, run_dir):
    train(PYDOC, *SMALL, f"--train.stop_after_steps={step}", run_dir=run_dir)


def without_plan(manifest):
    manifest["plan"] = {}


def with_another_scalar(manifest):
    next(info for info in manifest["parameters"].values() if info["scalars"])["scalars"]["mu"] = 1.0


@pytest.mark.slow
def test_what_is_not_a_runs_is_refused(tmp_path):
    run_job(train_until, 1, tmp_path, strategy="single", world_size=1)
    folder = tmp_path / "checkpoints/step_00000001"
    content = (folder / "manifest.json").read_text()
    for damage, message in (
        (without_plan, "the config or plan in its manifest.json is not one of largebatch: 'timeline'"),
        (with_another_scalar, "the checkpoint has 'mu' for a parameter, which this optimizer does not keep"),
    ):
        manifest = json.loads(content)
        damage(manifest)
        (folder / "manifest.json").write_text(json.dumps(manifest))
        mark(folder)
        with pytest.raises(JobFailed) as caught:
            run_job(train_until, 2, tmp_path, strategy="single", world_size=1)
        assert message in caught.value.in_one_line()
        assert "exit code 2" in str(caught.value)
