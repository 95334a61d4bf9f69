"""A task outside of the repository, of another kind than the shipped ones, goes through everything.

tests/outside_task has its files: pixels as the unit of the loss, weights that are fractions, a ragged last batch, a
section of its own with a check, random mirroring, plain layers as a model, and an optimizer that config.py declares.
"""

import json
import shutil
from pathlib import Path

import jsonschema
import numpy as np
import pytest
import torch

from jobs import train_in_job
from largebatch.__main__ import main
from largebatch.config import load_config
from largebatch.data.order import epoch_order
from largebatch.storage.files import read_json_lines
from largebatch.task_folders import import_from
from paths import ROOT
from played import write_commands
from resuming import assert_close_weights, assert_same_weights

FILES = ROOT / "tests/outside_task"


@pytest.fixture
def project(tmp_path, monkeypatch):
    """The current folder is a project that `largebatch new` has made, whose task is replaced by that of FILES."""
    folder = tmp_path / "atlas"
    assert main(["new", str(folder), "--task", "maps"]) == 0
    for file in FILES.glob("*.*"):
        shutil.copy(file, folder / "recipes/maps")
    monkeypatch.chdir(folder)
    monkeypatch.setenv("LARGEBATCH_ENV", "")
    monkeypatch.setenv("PATH", write_commands(tmp_path / "bin", {"sbatch": ""}))
    assert main(["schema", "recipes/maps"]) == 0
    return folder


RECIPE = "recipes/maps/maps.json"


def output_of(capsys, *words, code=0):
    capsys.readouterr()
    assert main([*words]) == code
    printed = capsys.readouterr()
    return printed.err if code else printed.out


@pytest.mark.usefixtures("project")
def test_config_schema_and_plans(capsys):
    for wrong, told in (
        ("--optimizer.softnes=1", "optimizer.softnes: unknown key, did you mean softness?"),
        ("--border.width=6", "border.width: 6 leaves nothing of 12 pixels; write at most 5"),
    ):
        assert told in output_of(capsys, "plan", RECIPE, "--world-size=2", wrong, code=2)

    schema = json.loads(Path("recipes/maps/recipe.schema.json").read_text())
    jsonschema.Draft202012Validator(schema).validate(json.loads(Path(RECIPE).read_text()))
    assert schema["$defs"]["Softsign"]["properties"]["softness"]["default"] == 1e-3
    assert schema["$defs"]["Border"]["properties"]["width"]["description"].startswith("How many along each side.")

    plan = output_of(capsys, "plan", RECIPE, "--world-size=2")
    assert "the mean over all pixels of the global batch" in plan
    assert "samples have different numbers of pixels, which are counted over all processes before each step" in plan
    assert "softsign with beta 0.9, softness 0.001; weight decay 0.01" in plan

    compared = json.loads(output_of(capsys, "plan", RECIPE, "--world-sizes=1,2", "--gpu-memory=80", "--json"))
    parameters = (9 * 1 * 8 + 8) + (9 * 8 * 16 + 16) + (16 * 2 + 2)
    assert compared["parameters"] == parameters
    assert compared["world_sizes"][0]["strategies"]["ddp"]["model_state_bytes"]["optimizer"] == 4 * parameters
    assert compared["estimated_activation_bytes"] > 2 * 12 * 12 * (8 + 16) * 4

    assert output_of(capsys, "lint").endswith("checked, 0 problems\n")
    submission = output_of(capsys, "submit", "maps", "--nodes=2", "--dry-run", "--border.width=2")
    assert "sbatch --parsable --nodes=2 --export=ALL" in submission
    assert " slurm/maps.sbatch --border.width=2\n" in submission
    assert "not a field" not in submission


def first_loss(recipe):
    """The mean loss of the first global batch by its definition, with the weights in double precision."""
    config = load_config(recipe)
    torch.manual_seed(config.seed)
    model = import_from(recipe.parent, "model").build_model(config)
    data = import_from(recipe.parent, "data")
    batch = data.sources(config, None)[0].fetch(epoch_order(200, config.seed, 0)(np.arange(24)), 0)
    weights = batch["weights"]
    assert weights.dtype == torch.float64
    # Of seven kinds, and zero where there is no label.
    assert len(weights.unique()) == 8
    losses = torch.nn.functional.cross_entropy(
        model(batch["map"]).detach(), batch["labels"], ignore_index=-1, reduction="none"
    )
    return float((weights * losses).sum() / weights.sum())


@pytest.mark.slow
def test_training_resuming_export_and_report(project, tmp_path, capsys):
    recipe = project / RECIPE
    train_in_job(recipe, tmp_path / "whole")
    chain = [("zero2", 2, 8), ("fsdp", 3, 18)]
    for strategy, world_size, last in chain:
        until = f"--train.stop_after_steps={last}"
        train_in_job(recipe, tmp_path / "chain", until, strategy=strategy, world_size=world_size)
        # The second runs it from outside of its task's folder.
        moved = tmp_path / "moved.json"
        raw = json.loads((project / RECIPE).read_text()) | {"$schema": "atlas/recipes/maps/recipe.schema.json"}
        moved.write_text(json.dumps(raw))
        recipe = moved
    assert_close_weights(tmp_path / "chain", tmp_path / "whole")
    losses = [line["loss"] for line in read_json_lines(tmp_path / "whole/metrics.jsonl")]
    # 200 samples are 8 batches of 24, and one of 8.
    assert len(losses) == 2 * 9
    assert losses[-1] < losses[0] < 1
    assert losses[0] == pytest.approx(first_loss(project / RECIPE), rel=1e-6)

    assert main(["export", str(tmp_path / "chain"), str(tmp_path / "exported")]) == 0
    assert_same_weights(tmp_path / "exported", tmp_path / "chain/model")
    # What only reads what runs have written needs nothing of the task.
    shutil.rmtree(project / "recipes/maps")
    assert "step_00000018" in output_of(capsys, "checkpoints", str(tmp_path / "chain"))
    report = tmp_path / "report.html"
    assert main(["report", str(tmp_path / "chain"), str(tmp_path / "whole"), "--out", str(report)]) == 0
    assert report.read_text().count("<div>finished after step 18</div>") == 2
