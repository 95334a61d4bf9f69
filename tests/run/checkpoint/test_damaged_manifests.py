"""A manifest whose checksum is right, but whose content is not a run's: the start ends with one sentence."""

import json

import pytest

from jobs import JobFailed, train_in_job
from paths import PYDOC
from saving import mark
from tasks import SMALL


def without_plan(manifest):
    manifest["plan"] = {}


def with_another_scalar(manifest):
    next(info for info in manifest["parameters"].values() if info["scalars"])["scalars"]["mu"] = 1.0


@pytest.mark.slow
def test_what_is_not_a_runs_is_refused(tmp_path):
    train_in_job(PYDOC, tmp_path, *SMALL, "--train.stop_after_steps=1", strategy="single")
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
            train_in_job(PYDOC, tmp_path, *SMALL, "--train.stop_after_steps=2", strategy="single")
        assert message in caught.value.in_one_line()
        assert "exit code 2" in str(caught.value)
