"""`largebatch lint`: every rule finds the mistake it is for, planted in a copy of what is shipped, and nothing else."""

from pathlib import Path

import pytest

from largebatch.tools.slurm.batch_script import BatchScript
from largebatch.tools.slurm.lint import lint
from paths import RECIPES, ROOT
from planting import plant

SMOKE = "slurm/gpt_pydoc.sbatch"
RECIPE = "recipes/causal_lm/gpt_pydoc.json"
DDP, FSDP, ZERO2 = (f"recipes/accelerate_configs/{name}.yaml" for name in ("ddp", "fsdp", "zero2"))
DEEPSPEED = "ds_configs/zero2.json"
in_a_copy = pytest.mark.usefixtures("project")


def found(*files):
    given = (BatchScript(file) if file.suffix == ".sbatch" else file for file in map(Path, files))
    return [(finding.file, finding.rule) for finding in lint(given)]


def test_nothing_found_in_the_repository_itself(monkeypatch, output_of):
    monkeypatch.chdir(ROOT)
    # Recipes and their batch scripts, Accelerate's and DeepSpeed's configs.
    assert output_of("lint") == f"{2 * len(RECIPES) + 7 + 4} files checked, 0 problems\n"


@in_a_copy
def test_findings_one_a_line(run_command):
    plant(SMOKE, "STRATEGY:-ddp", "STRATEGY:-dpd")
    plant(SMOKE, "#SBATCH --nodes=2", "#SBATCH --nodes=1-6")
    plant(SMOKE, "#SBATCH --cpus-per-task=2", "#SBATCH --cpus-per-task=1")
    code, output, _ = run_command("lint", SMOKE)
    assert code == 1
    # Of the numbers of nodes that the batch does not divide by, the first.
    plan, strategy, count = output.splitlines()
    assert plan.startswith(f"{SMOKE}: nodes x processes per node = 3 x 1: batch: global_batch_size 32 is")
    assert "; nearest: 24, 48" in plan
    assert plan.endswith("[no-plan]")
    assert strategy.startswith(f"{SMOKE}: STRATEGY is dpd: there is no ")
    assert strategy.endswith("[strategy]")
    assert count == "1 file checked, 2 problems"


# Each: file, what is there, what is planted, and the rule.
MISTAKES = [
    # --- the recipe
    (RECIPE, '"seed": 0,', '"seed": 0,,', "syntax"),
    (RECIPE, '"seed": 0,', '"seed": -1,', "recipe"),
    # --- the batch, at the script's nodes and processes
    (SMOKE, "#SBATCH --nodes=2", "#SBATCH --nodes=3", "no-plan"),
    (SMOKE, "#SBATCH --nodes=2", "#SBATCH --nodes=2-4", "no-plan"),
    (SMOKE, "##SBATCH --gpus-per-node=2", "#SBATCH --gpus-per-node=h100:3", "no-plan"),
    # --- pairs of recipe and script
    (SMOKE, "RECIPE=recipes/causal_lm/gpt_pydoc.json", "RECIPE=recipes/none.json", "recipe"),
    (SMOKE, "RECIPE=recipes/causal_lm/gpt_pydoc.json", "RECIPE=recipes/causal_lm/gpt2_124m.json", "recipe"),
    (SMOKE, "STRATEGY=${STRATEGY:-ddp}\n", "", "strategy"),
    # --- the Accelerate config
    (FSDP, "  fsdp_version: 2\n", "", "accelerate-setting"),
    (DDP, "num_machines: 1", "num_machines: [1", "syntax"),
    # tests/backend/test_launch.py has more of what a launch refuses.
    (DDP, "distributed_type: MULTI_GPU", "distributed_type: MULTI_CPU", "accelerate-setting"),
    (DDP, "num_machines: 1", "parallelism_config: {parallelism_config_dp_shard_size: 2}", "accelerate-setting"),
    # Accelerate would ignore it, and train as FSDP over all processes.
    (FSDP, "num_machines: 1", "parallelism_config: {dp_replicate_size: 2}", "accelerate-setting"),
    (ZERO2, "  deepspeed_multinode_launcher: standard\n", "", "accelerate-setting"),
    (ZERO2, "ds_configs/zero2.json", "ds_configs/zero9.json", "accelerate-setting"),
    (ZERO2, "zero3_init_flag: false", "gradient_clipping: 1.0", "accelerate-setting"),
    # --- the DeepSpeed config
    (DEEPSPEED, '"stage": 2,', '"stage": 0,', "deepspeed-setting"),
]


@in_a_copy
@pytest.mark.parametrize("mistake", MISTAKES, ids=lambda mistake: f"{mistake[3]}-{mistake[2].strip()[:40]}")
def test_planted(mistake):
    file, old, new, rule = mistake
    plant(file, old, new)
    # A range of nodes has a finding for each number that is wrong.
    assert set(found(file)) == {(file, rule)}


@in_a_copy
@pytest.mark.parametrize(
    ("file", "line", "said"),
    [
        ("train.py", "from largebatch.run import Ruun", ["largebatch.run.Ruun, did you mean Run?"]),
        ("data.py", "from largebatch.order import derive_seed", ["largebatch.order.derive_seed"]),
        ("config.py", "from largebatch.config import CausalLMConfig", ["largebatch.config.CausalLMConfig"]),
        ("train.py", "from largebatch.data import order", []),
        (
            "train.py",
            "from largebatch.config.optimizers.shipped import SHIPPED, RecipeConfig",
            ["largebatch.config.optimizers.shipped.RecipeConfig"],
        ),
        ("train.py", "from largebatches import anything", []),
    ],
)
def test_what_a_task_imports(file, line, said):
    path = Path("recipes/causal_lm", file)
    path.write_text(f"{line}\n{path.read_text()}")
    findings = [each for each in lint([Path(RECIPE)]) if each.rule == "import"]
    found = [str(each).partition("; ")[0] for each in findings]
    assert found == [f"{path}: line 1: largebatch has no {each}" for each in said]
    assert all(each.message.endswith('says under "Renamed" what to write instead') for each in findings)


# What looks like one of the mistakes and is none.
INNOCENT = [
    (SMOKE, "##SBATCH --account=my_project", "##SBATCH --nodes=3"),
    (SMOKE, "#SBATCH --nodes=2", "#SBATCH --nodes=2 # of 8; not --nodes=3"),
    (SMOKE, "#SBATCH --nodes=2", "#SBATCH --nodes=3\n#SBATCH --gpus=6"),
    (SMOKE, "RECIPE=recipes/causal_lm/gpt_pydoc.json", "RECIPE=${RECIPE:-recipes/causal_lm/gpt_pydoc.json}"),
    (SMOKE, "STRATEGY:-ddp", "STRATEGY:-recipes/accelerate_configs/fsdp.yaml"),
    (DDP, "num_machines: 1", "mixed_precision: 'no'\nuse_cpu: false\ndynamo_config: {}\nparallelism_config: {}"),
    # Sections of a wrong type, which only their own kind of launch reads.
    (DDP, "num_machines: 1", "fsdp_config: true\ndynamo_config: {1: x}"),
    (ZERO2, "zero3_init_flag: false", "gradient_accumulation_steps: 1\n  gradient_clipping: auto"),
]


@in_a_copy
@pytest.mark.parametrize("change", INNOCENT, ids=lambda change: change[2].strip()[:40])
def test_innocent(change):
    plant(*change)
    assert found(change[0]) == []


@in_a_copy
def test_recipe_without_its_train_py():
    Path("recipes/causal_lm/train.py").unlink()
    assert found(SMOKE) == [(SMOKE, "recipe")]


@in_a_copy
def test_fp64_on_deepspeed():
    plant(RECIPE, '"fp32"', '"fp64"')
    plant(SMOKE, "STRATEGY:-ddp", "STRATEGY:-zero2")
    assert found(SMOKE) == [(SMOKE, "strategy")]


@in_a_copy
def test_a_script_brings_what_it_names():
    plant(SMOKE, "STRATEGY:-ddp", "STRATEGY:-zero2")
    plant(RECIPE, '"seed": 0,', '"seed": -1,')
    plant(ZERO2, "standard", "pdsh")
    plant(DEEPSPEED, '  "zero_opt', '  "fp16": {},\n  "zero_opt')
    plant(DDP, "MULTI_GPU", "MULTI_CPU")  # which this script does not name
    assert [file for file, _ in found(SMOKE)] == [DEEPSPEED, ZERO2, RECIPE]


@in_a_copy
def test_deepspeed_configs_are_told_from_recipes():
    Path("mine.json").write_text('{"zero_optimization": {"stage": 5}}')
    Path("other.json").write_text('{"seed": 0}')
    assert set(found("mine.json", "other.json")) == {("mine.json", "deepspeed-setting"), ("other.json", "recipe")}


@in_a_copy
@pytest.mark.parametrize(
    ("file", "words"),
    [
        ("none.sbatch", "none.sbatch: cannot be read: [Errno 2] No such file or directory"),
        ("slurm", "slurm: cannot be read: [Errno 21] Is a directory"),
        ("binary.yaml", "binary.yaml: cannot be read"),
    ],
)
def test_files_that_cannot_be_checked(file, words, refusal_of):
    Path("binary.yaml").write_bytes(b"\xff\xfe\x00")
    assert refusal_of("lint", SMOKE, file).startswith(f"error: {words}")


def test_outside_of_a_repository(tmp_path, monkeypatch, refusal_of):
    monkeypatch.chdir(tmp_path)
    assert "go to the top of the repository, or name FILES" in refusal_of("lint")
