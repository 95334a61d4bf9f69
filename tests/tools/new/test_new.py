"""`largebatch new`: what is made works as it is, and what is refused leaves nothing behind."""

import json
import re
import shlex
import stat
from pathlib import Path

import pytest

from jobs import run_job, train
from largebatch import __version__
from largebatch.__main__ import main
from largebatch.config import load_config
from largebatch.tools.local_jobs.small_runs import debug_model_overrides, tiny_data_overrides
from largebatch.tools.verify.differences import read_run
from paths import RECIPES, ROOT
from played import write_commands

# One of each task but GPT's, which `verify` makes small; the others differ from them in numbers.
TRAINED = ("bert_large_64k_128", "sft_qwen_gsm8k", "simclr_resnet50_4k", "vit_s16_imagenet")


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("LARGEBATCH_ENV", "")
    monkeypatch.delenv("STRATEGY", raising=False)
    monkeypatch.delenv("RUN_DIR", raising=False)


def tree(folder):
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


# No recipe's own batch script.
PATTERNS = ("launch/*", "slurm/**/*.sh", "slurm/prepare.sbatch", "recipes/accelerate_configs/*", "ds_configs/*")
SHARED = {str(path.relative_to(ROOT)) for pattern in PATTERNS for path in ROOT.glob(pattern)}
WRITTEN = {"README.md", "requirements.txt", ".gitignore", "LICENSE.largebatch"}


def test_a_recipe(tmp_path):
    main(["new", "job", "--recipe=gpt_pydoc"])
    made = tree(tmp_path / "job")
    task = ROOT / "recipes/causal_lm"
    names = {path.name for path in task.iterdir() if path.suffix in (".py", ".md")}
    names |= {"recipe.schema.json", "gpt_pydoc.json"}
    copied = SHARED | {f"recipes/causal_lm/{name}" for name in names} | {"slurm/gpt_pydoc.sbatch"}
    assert made.keys() == copied | WRITTEN
    original = {name: (ROOT / name).read_bytes() for name in copied}
    recipe = "recipes/causal_lm/gpt_pydoc.json"
    # A person's own run is meant to train well.
    assert json.loads(made[recipe]) | {"demonstration": True} == json.loads(original[recipe])
    assert "demonstration" not in json.loads(made[recipe])
    assert {name: made[name] for name in copied - {recipe}} == {name: original[name] for name in copied - {recipe}}
    assert made["LICENSE.largebatch"] == (ROOT / "LICENSE").read_bytes()
    assert list(tmp_path.iterdir()) == [tmp_path / "job"]
    runnable = {path.name for path in Path("job").glob("*/*.*") if path.stat().st_mode & stat.S_IXUSR}
    assert runnable == {"claim_start.sh", "free_port.sh", "hosts.sh", "node.sh"}

    needed = {line for line in made["requirements.txt"].decode().splitlines() if "==" in line}
    tested = {line for line in (ROOT / "requirements.txt").read_text().splitlines() if "==" in line}
    checks = {"pytest", "pytest-xdist", "jsonschema", "mypy", "pytorch-optimizer", "ruff"}
    assert {line for line in tested if line.partition("==")[0] not in checks} == needed - {f"largebatch=={__version__}"}
    assert f"largebatch=={__version__}" in needed


def command_of_the_readme(name):
    (command,) = re.findall(rf"^\$ largebatch ({name}.*)$", Path("README.md").read_text(), re.MULTILINE)
    return shlex.split(command)


@pytest.mark.parametrize("recipe", {path.parent: path for path in RECIPES}.values(), ids=lambda path: path.stem)
def test_a_recipe_of_every_task(recipe, monkeypatch, output_of):
    output_of("new", "job", "--recipe", recipe.stem)
    monkeypatch.chdir("job")
    output_of(*command_of_the_readme("lint"))
    output_of(*command_of_the_readme("plan"))
    for text in Path().glob("**/*.md"):
        for link in re.findall(r"\]\(([^)#]+)", text.read_text()):
            assert link.startswith("https://") or (text.parent / link).exists(), (text, link)


def train_copy(recipe, overrides, run_dir):
    train(recipe, *overrides, "--logging.trackers=[]", run_dir=run_dir)


# Its debug model has the vocabulary of the tokenizer that the recipe names, which takes a minute on a CPU.
SMALL_VOCABULARY = {"sft_qwen_gsm8k": ["--model.config.vocab_size=512"]}


@pytest.mark.slow
@pytest.mark.parametrize("name", TRAINED)
def test_a_large_recipe_trains_when_it_is_made_small(name, run_dir, tmp_path):
    main(["new", "job", "--recipe", name])
    (recipe,) = tmp_path.glob(f"job/recipes/*/{name}.json")
    config = load_config(recipe)
    overrides = [*debug_model_overrides(config), *tiny_data_overrides(config), *SMALL_VOCABULARY.get(name, ())]
    overrides += ["--train.stop_after_steps=2", "--evaluation.max_samples=8", "--logging.every=1"]
    run_job(train_copy, recipe, overrides, run_dir, strategy="single")
    assert [line["step"] for line in read_run(run_dir).metrics] == [1, 2]


def test_the_smallest_task(monkeypatch, output_of):
    """What trains, plans, verifies and submits as it is."""
    output_of("new", "job", "--task", "tide_tables")
    made = tree(Path("job"))
    of_the_task = {f"recipes/tide_tables/{name}" for name in ("README.md", "recipe.schema.json", "tide_tables.json")}
    of_the_task |= {f"recipes/tide_tables/{name}.py" for name in ("config", "data", "model", "train")}
    assert made.keys() == of_the_task | SHARED | WRITTEN | {"slurm/tide_tables.sbatch"}
    assert not [name for name, text in made.items() if re.search(rb"@(?!300)", text) and name not in SHARED]

    monkeypatch.chdir("job")
    assert output_of("lint") == "13 files checked, 0 problems\n"
    output_of("schema", "--check", "recipes/tide_tables")
    monkeypatch.setenv("PATH", write_commands(Path("bin").resolve(), {"sbatch": ""}))
    processes = command_of_the_readme("plan")[-1]
    submitted = output_of(*command_of_the_readme("submit"))
    assert re.search(rf"tide_tables under ddp, .*on {processes} processes\n", submitted)


@pytest.mark.slow
def test_the_smallest_task_learns(run_dir, tmp_path):
    main(["new", "job", "--task=tides"])
    recipe = tmp_path / "job/recipes/tides/tides.json"
    run_job(train_copy, recipe, (), run_dir, strategy="single")
    losses = [line["loss"] for line in read_run(run_dir).evaluations]
    # The values' variance is 4 (1 - sin(6) / 6) / 2, which is 2.1.
    assert losses[0] < 1 > 100 * losses[-1]


@pytest.mark.parametrize(
    ("place", "what", "message"),
    [
        ("x", "--recipe=gpt2_124", "argument --recipe: invalid choice: 'gpt2_124'"),
        ("x", "--recipe=../recipes/causal_lm/gpt_pydoc", "argument --recipe: invalid choice: "),
        ("x", "--task=../Tide tables", "--task ../Tide tables: write lowercase letters"),
        ("x", "--task=accelerate_configs", "--task accelerate_configs: write "),
        (
            "full",
            "--recipe=gpt_pydoc",
            "full cannot be created (File exists); remove what is there, or",
        ),
        ("none/x", "--recipe=gpt_pydoc", "none/x cannot be created (No such file or directory)"),
    ],
)
def test_refused(place, what, message, tmp_path, refusal_of):
    Path("full").mkdir()
    Path("full/a").touch()
    before = sorted(tmp_path.rglob("*"))
    assert f"error: {message}" in refusal_of("new", place, what)
    assert sorted(tmp_path.rglob("*")) == before
