"""Branches of a run with other batches, and what few seeds allow to say of the critical one."""

import json
import math
from functools import partial

import pytest

import jobs
from largebatch.__main__ import main
from largebatch.config import as_json, load_config
from largebatch.plan import resolve
from largebatch.storage.files import read_json_lines
from largebatch.tools.sweep.critical_batch import branch_sections
from largebatch.tools.sweep.points import Sweep
from largebatch.tools.sweep.verdicts import bounds, largest_within
from manifests import save_with_manifest
from paths import MAPS
from resuming import TINY_MAPS, assert_same_weights
from run_folders import started, write_lines

STEP = 128  # the branches begin after this step, and train on so many samples
WINDOW = 512
BATCH = 4
WORDS = (
    *TINY_MAPS,
    "--data.num_train_samples=100000",
    f'--batch={{"global_batch_size": {BATCH}, "micro_batch_size": {BATCH}}}',
    "--learning_rate.decay.name=constant",
    '--train.duration={"steps": 400}',
    f'--checkpoint={{"keep_every": {{"steps": {STEP}}}}}',
    '--logging.every={"samples": 256}',
)


@pytest.mark.slow
def test_branches_of_a_run(run_dir, tmp_path, capsys):
    """The branch of the run's own batch is the run itself, bit for bit.

    The command that follows the run's checkpoints does not follow those of branches.

    bench/results/critical_batch has all batches and enough seeds, of losses that are known in closed form.
    """
    folder = tmp_path / "branches"
    commanded = tmp_path / "commanded"
    words = (*WORDS, f"--train.stop_after_steps={STEP + WINDOW // BATCH}", f"--evaluation.every.steps={STEP}")
    words += (f'--checkpoint.then=["touch", "{commanded}"]',)
    jobs.run_job(partial(jobs.train, MAPS, *words, run_dir=run_dir), strategy="single")
    commanded.unlink()
    command = ["critical-batch", str(run_dir), "--at", str(STEP), "--batches=8", "--window=500", "--recipe", str(MAPS)]
    command += ["--folder", str(folder)]
    # Once more, as for more seeds: branches stay as they are.
    for _ in range(2):
        assert main(command) == 0

    own, other = Sweep.read(folder).points
    assert_same_weights(folder / own.name / "model", run_dir / "model")
    for point, multiple in ((own, 1), (other, 8)):
        history = read_json_lines(folder / point.name / "history.jsonl")
        last = STEP + WINDOW // (multiple * BATCH)
        assert [(line["event"], line["step"]) for line in history] == [("started", STEP), ("finished", last)]
        line = read_json_lines(folder / point.name / "evaluations.jsonl")[-1]
        assert line["samples"] == STEP * BATCH + WINDOW
        # The square-root rule, from a reference batch of 12.
        rate = read_json_lines(folder / point.name / "metrics.jsonl")[-1]["lr"]
        assert rate == pytest.approx(0.002 * math.sqrt(multiple * BATCH / 12))
    assert not commanded.exists()
    found = json.loads((folder / "critical_batch.json").read_text())
    (size,) = found.pop("sizes")
    assert found == {"samples": None, "at_step": STEP, "tolerance": 0.01}
    losses = [read_json_lines(folder / point.name / "evaluations.jsonl")[-1]["loss"] for point in (own, other)]
    cost = pytest.approx(losses[1] - losses[0])
    assert size == {"batch": 32, "verdict": "undecided", "cost": cost, "margin": None, "missing_seeds": 1}
    output, errors = capsys.readouterr()
    # Only before the branches are trained.
    assert errors.count("one seed leaves the critical batch undecided; add --seeds\n") == 1
    assert "  batch 32: undecided: at least 1 more seed\nthe critical batch is undecided\n" in output
    assert "warning" not in output
    assert main([*command, "--tolerance=0.5"]) == 0
    assert "\nwarning: a tolerance of 0.5 is large beside the run's own loss, " in capsys.readouterr().out


def test_a_branch_has_its_moments_in_samples():
    words = [*WORDS, '--learning_rate.warmup={"duration": {"steps": 200}}', "--evaluation.every.steps=10"]
    words += ['--batch.global_batch_size=[{"from": {"steps": 0}, "size": 4}, {"from": {"steps": 100}, "size": 8}]']
    config = load_config(MAPS, words)
    sections = branch_sections(as_json(config), resolve(config, 1).timeline, 128, 16)
    sizes = [{"from": {"steps": step}, "size": size} for step, size in ((0, 4), (100, 8), (128, 16))]
    assert sections["batch"]["global_batch_size"] == sizes
    # 100 steps of 4 samples, and the rest of 8.
    assert sections["learning_rate"]["warmup"]["duration"] == {"samples": 400 + 800}
    assert sections["train"]["duration"] == {"samples": 400 + 300 * 8}
    assert sections["evaluation"]["every"] == {"samples": 40}
    assert "optimizer" not in sections


REFERENCE = {0: 2.0, 1: 2.1, 2: 1.9, 3: 2.0}


def plus(*differences):
    return {seed: REFERENCE[seed] + difference for seed, difference in enumerate(differences)}


# Mean 0.002, spread 0.002, and t with 3 degrees of freedom is 2.353: at most 0.0044.
WITHIN = plus(0.0, 0.004, 0.004, 0.0)
# Mean 0.005 and spread 0.0115: 2.353 x 0.0115 / 2 is 0.0136, and with 17 seeds 1.746 x 0.0115 / 4.12 is 0.0049.
UNDECIDED = plus(0.015, -0.005, 0.015, -0.005)
BEYOND = plus(0.02, 0.03, 0.02, 0.03)
DIVERGED = plus(math.inf, 0.0)


@pytest.mark.parametrize(
    ("losses", "batch", "conclusion", "words"),
    [
        (
            {8: WITHIN},
            8,
            "at least 8, the largest that was tried",
            ["within: it costs 0.002 ± 0.0027 (95 %, one-sided)"],
        ),
        ({8: WITHIN, 16: BEYOND}, 8, "at least 8 and less than 16", ["within", "beyond: it costs 0.025"]),
        # A size that passes by chance beyond one that does not is not taken.
        ({8: BEYOND, 16: WITHIN}, 4, "at least 4 and less than 8", ["beyond", "within"]),
        # One beyond an undecided one is told, too.
        (
            {8: UNDECIDED, 16: BEYOND},
            None,
            "undecided",
            ["undecided: at least 13 more seeds; it costs 0.005 ± 0.014", "beyond"],
        ),
        ({8: {}}, None, "undecided", ["undecided: at least 2 more seeds"]),
        ({8: WITHIN, 16: DIVERGED}, 8, "at least 8 and less than 16", ["within", "beyond: a run diverged"]),
        ({4: DIVERGED}, None, "undecided", []),
    ],
)
def test_the_largest_batch_within_the_tolerance(losses, batch, conclusion, words):
    losses = {4: REFERENCE} | losses
    largest, found = largest_within(losses, tolerance=0.01)
    assert (largest, bounds(largest, losses)) == (batch, conclusion)
    assert all(str(each).startswith(word) for each, word in zip(found.values(), words, strict=True))


@pytest.mark.parametrize("link", [False, True])
def test_code_beside_a_recipe_that_only_a_run_names_is_not_run(link, tmp_path, monkeypatch, refusal_of):
    """A folder that the user has linked to is theirs."""
    task = tmp_path / "elsewhere/task"
    task.mkdir(parents=True)
    (task / "config.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\n")
    (task / "r.json").write_text("{}")
    (tmp_path / "recipes").mkdir()
    if link:
        (tmp_path / "recipes/task").symlink_to(task)
    monkeypatch.chdir(tmp_path)
    run = tmp_path / "run"
    save_with_manifest(run, 3, config={"task": "x", "batch": {}})
    recipe = tmp_path / "recipes/task/r.json" if link else task / "r.json"
    write_lines(run / "history.jsonl", [started(0, recipe=str(recipe))])
    error = refusal_of("critical-batch", "run", "--at=3")
    assert (f"its recipe, {recipe}, is not in {tmp_path}/recipes; " in error) != link
    assert (tmp_path / "ran").exists() == link
    refusal_of("critical-batch", "run", "--at=3", "--recipe", recipe)
    assert (tmp_path / "ran").exists()


def test_what_is_no_run(refusal_of):
    error = refusal_of("critical-batch", "runs/none", "--at=3")
    assert "runs/none: not a run's folder, or its recipe, none, is not in " in error


def save_checkpoint(run_dir, **values):
    """Save one of a run with `WORDS`, in whose manifest these values stand."""
    config = as_json(load_config(MAPS, WORDS))
    return save_with_manifest(run_dir, STEP, **({"config": config} | values))


@pytest.mark.parametrize(
    ("damage", "words", "message"),
    [
        ({"plan": 5}, [], "--at 128: its manifest.json is not readable: plan"),
        ({"config": {}}, [], "--at 128: the config in its manifest.json has no batch"),
        # Not of the recipe, which is sound.
        ({"config": {"batch": 5}}, [], "step_00000128/manifest.json:\n  - batch: "),
        ({}, ["--at=5"], " has checkpoints of the steps 128; checkpoint.keep"),
        ({}, ["--window=1089", "--batches=8"], "--window: only 1,088 samples are left after step 128, not 1,120"),
        ({}, ["--window", "9" * 15], "--window: only 1,088 samples are left"),
        ({}, ["--batches", ",".join(map(str, range(1, 102)))], "the list has 101 numbers; write at most 100"),
        ({}, ["--seeds=100000"], "the sweep would have 400,000 points, at most 1,000"),
    ],
)
def test_damaged_checkpoints_and_impossible_numbers(damage, words, message, tmp_path, refusal_of):
    save_checkpoint(tmp_path, **damage)
    folder = tmp_path / "branches"
    words = ["--at", STEP, "--folder", folder, "--recipe", MAPS, *words]
    assert message in refusal_of("critical-batch", tmp_path, *words)
    assert not folder.exists()


def test_a_checkpoint_that_is_not_complete(tmp_path, refusal_of):
    (save_checkpoint(tmp_path) / "complete.json").unlink()
    error = refusal_of("critical-batch", tmp_path, "--at", STEP, "--recipe", MAPS)
    assert "--at 128: there is no complete.json in it" in error


def test_a_plan_without_an_end_is_not_copied(run_dir, run_command):
    """A link to a device, or to another file of the reader's."""
    save_checkpoint(run_dir)
    (run_dir / "config.json").write_text("{}")
    (run_dir / "plan.json").symlink_to("/dev/zero")
    code, _, error = run_command("critical-batch", run_dir, "--at", STEP, "--recipe", MAPS, "--window=512")
    assert code == 2
    assert "its run must have a plan.json" in error
