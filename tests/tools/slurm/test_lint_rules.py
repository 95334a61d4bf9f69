"""Every rule finds the mistake it is for, planted in a copy of what is shipped, and nothing else does."""

from pathlib import Path

import pytest

from largebatch.tools.slurm.checks import files_of_repository, lint_files
from paths import RECIPES
from planting import line_of, plant

pytestmark = pytest.mark.usefixtures("project")

SMOKE = "slurm/gpt_pydoc.sbatch"
RECIPE = "recipes/causal_lm/gpt_pydoc.json"
DDP, FSDP, HSDP, ZERO2 = (f"recipes/accelerate_configs/{name}.yaml" for name in ("ddp", "fsdp", "hsdp", "zero2"))
DEEPSPEED = "ds_configs/zero2.json"
WHOLE_FILE, NOWHERE = 1, 0


def lint_repository():
    return lint_files(files_of_repository())


def found() -> list[tuple[str, int, str]]:
    return [(finding.file, finding.line, finding.rule) for finding in lint_repository()]


def test_silent_on_the_repository():
    assert lint_repository() == []
    # Recipes and their batch scripts, Accelerate's and DeepSpeed's configs.
    assert len(files_of_repository()) == 2 * len(RECIPES) + 7 + 4


# Each: file, what is there, what is planted, rule, and words of the line that is named (by default what was planted).
MISTAKES = [
    # --- the recipe
    (RECIPE, '"seed": 0,', '"seed": 0,,', "json-syntax"),
    (RECIPE, '"seed": 0,', '"seed": -1,', "recipe"),
    (RECIPE, '"weight_decay": 0.1', '"weight_decai": 0.1, "weight_decay": 0.1', "recipe"),
    (RECIPE, '"seed": 0,', '"seed": 0, "seed": 1,', "recipe"),
    # --- the batch, at the script's nodes and processes
    (SMOKE, "#SBATCH --nodes=2", "#SBATCH --nodes=3", "no-plan", NOWHERE),
    (SMOKE, "#SBATCH --nodes=2", "#SBATCH --nodes=2-4", "no-plan", NOWHERE),
    (SMOKE, "#SBATCH --cpus-per-task=2", "#SBATCH --cpus-per-task=3", "no-plan", NOWHERE),
    (SMOKE, "##SBATCH --gpus-per-node=2", "#SBATCH --gpus-per-node=h100:3", "no-plan", NOWHERE),
    (RECIPE, '"global_batch_size": 32', '"global_batch_size": 40', "no-plan", (SMOKE, NOWHERE)),
    # --- pairs of recipe and script
    (SMOKE, "RECIPE=recipes/causal_lm/gpt_pydoc.json", "RECIPE=recipes/none.json", "recipe-missing"),
    (SMOKE, "RECIPE=recipes/causal_lm/gpt_pydoc.json\n", "", "recipe-missing", WHOLE_FILE),
    (SMOKE, "RECIPE=recipes/causal_lm/gpt_pydoc.json", "RECIPE=recipes/causal_lm/gpt2_124m.json", "names-differ"),
    (SMOKE, "STRATEGY:-ddp", "STRATEGY:-dpd", "strategy"),
    (SMOKE, "STRATEGY=${STRATEGY:-ddp}\n", "", "strategy", WHOLE_FILE),
    # --- the Accelerate config
    (DDP, "num_machines: 1", "num_machines: [1", "yaml-syntax", "num_processes: 2"),
    (DDP, "distributed_type: MULTI_GPU", "distributed_type: MULTI_CPU", "one-process"),
    (DDP, "num_machines: 1", "use_cpu: true", "one-process"),
    (DDP, "num_machines: 1", "mixed_precision: bf16", "recipe-setting"),
    (FSDP, "fsdp_version: 2", "fsdp_version: 1", "fsdp-version"),
    (FSDP, "  fsdp_version: 2\n", "", "fsdp-version", "fsdp_config:"),
    (FSDP, "ram_efficient_loading: false", "ram_efficient_loading: true", "recipe-setting"),
    (FSDP, "fsdp_version: 2", "fsdp_version: 2\n  offload_params: true", "recipe-setting", "offload_params"),
    (HSDP, "parallelism_config_dp_shard_size: 1", "parallelism_config_tp_size: 2", "recipe-setting"),
    (HSDP, "parallelism_config_dp_shard_size: 1", "parallelism_config_dp_replicate_size: 2", "recipe-setting"),
    (HSDP, "parallelism_config_dp_shard_size: 1", "dp_shard_size: 4", "unknown-setting"),
    (DDP, "num_machines: 1", "parallelism_config: {parallelism_config_dp_shard_size: 2}", "recipe-setting"),
    (ZERO2, "deepspeed_multinode_launcher: standard", "deepspeed_multinode_launcher: pdsh", "deepspeed-launcher"),
    (ZERO2, "  deepspeed_multinode_launcher: standard\n", "", "deepspeed-launcher", "deepspeed_config:"),
    (ZERO2, "ds_configs/zero2.json", "ds_configs/zero9.json", "deepspeed-config-missing"),
    (ZERO2, "  deepspeed_config_file: ds_configs/zero2.json\n", "", "deepspeed-config-missing", "deepspeed_config:"),
    (ZERO2, "zero3_init_flag: false", "gradient_accumulation_steps: 4", "recipe-setting"),
    (ZERO2, "zero3_init_flag: false", "gradient_clipping: 1.0", "recipe-setting"),
    # --- the DeepSpeed config
    (DEEPSPEED, '"stage": 2,', '"stage": 2;', "json-syntax"),
    (DEEPSPEED, '"stage": 2,', '"stage": 0,', "deepspeed-setting"),
    (DEEPSPEED, '  "zero_opt', '  "scheduler": {"type": "WarmupLR"},\n  "zero_opt', "deepspeed-setting", "scheduler"),
    (DEEPSPEED, '  "zero_opt', '  "optimizer": {"type": "AdamW"},\n  "zero_opt', "deepspeed-setting", '"optimizer"'),
    (DEEPSPEED, '  "zero_opt', '  "gradient_clipping": 1.0,\n  "zero_opt', "deepspeed-setting", "gradient_clipping"),
    (DEEPSPEED, '  "zero_opt', '  "train_batch_size": 32,\n  "zero_opt', "deepspeed-setting", "train_batch_size"),
    (DEEPSPEED, '"overlap_comm": true', '"overlap_comm": true, "loco_param": {}', "deepspeed-setting"),
]


@pytest.mark.parametrize("mistake", MISTAKES, ids=lambda mistake: f"{mistake[3]}-{mistake[2].strip()[:40]}")
def test_planted(mistake):
    file, old, new, rule, *place = mistake
    plant(file, old, new)
    where = place[0] if place else new
    if isinstance(where, tuple):
        file, where = where
    line = where if isinstance(where, int) else line_of(file, where)
    assert found() == [(file, line, rule)]


# What looks like one of the mistakes and is none.
INNOCENT = [
    (SMOKE, "##SBATCH --account=my_project", "##SBATCH --nodes=3"),
    (SMOKE, "#SBATCH --nodes=2", "#SBATCH --nodes=2 # of 8; not --nodes=3"),
    (SMOKE, "#SBATCH --nodes=2", "#SBATCH --nodes=1-2"),
    (SMOKE, "#SBATCH --nodes=2", "#SBATCH --nodes=3\n#SBATCH --gpus=6"),
    (SMOKE, "RECIPE=recipes/causal_lm/gpt_pydoc.json", "RECIPE=${RECIPE:-recipes/causal_lm/gpt_pydoc.json}"),
    (SMOKE, "STRATEGY:-ddp", "STRATEGY:-recipes/accelerate_configs/fsdp.yaml"),
    (DDP, "num_machines: 1", "mixed_precision: 'no'\nuse_cpu: false\ndynamo_config: {}\nparallelism_config: {}"),
    (ZERO2, "zero3_init_flag: false", "gradient_accumulation_steps: 1\n  gradient_clipping: auto"),
    (DEEPSPEED, '  "zero_opt', '  "gradient_clipping": "auto",\n  "zero_opt'),
    (RECIPE, "  ", "\t"),
]


@pytest.mark.parametrize("change", INNOCENT, ids=lambda change: change[2].strip()[:40])
def test_innocent(change):
    file, old, new = change
    if old == "  ":
        Path(file).write_text(Path(file).read_text().replace(old, new))
    else:
        plant(file, old, new)
    assert found() == []


def test_all_at_once_in_the_order_of_the_files():
    plant(SMOKE, "#SBATCH --nodes=2", "#SBATCH --nodes=3")
    plant(ZERO2, "standard", "pdsh")
    plant(FSDP, "fsdp_version: 2", "fsdp_version: 1")
    assert [(file, rule) for file, _, rule in found()] == [
        (FSDP, "fsdp-version"),
        (ZERO2, "deepspeed-launcher"),
        (SMOKE, "no-plan"),
    ]


def test_recipe_without_its_train_py():
    Path("recipes/causal_lm/train.py").unlink()
    assert found() == [
        (f"slurm/{name}.sbatch", line_of(f"slurm/{name}.sbatch", "RECIPE="), "train-missing")
        for name in sorted(path.stem for path in RECIPES if path.parent.name == "causal_lm")
    ]


def test_every_number_of_nodes_is_named_that_has_no_plan():
    plant(SMOKE, "#SBATCH --nodes=2", "#SBATCH --nodes=1-16")
    plant(SMOKE, "#SBATCH --cpus-per-task=2", "#SBATCH --cpus-per-task=1")
    (finding,) = lint_repository()
    assert finding.why.startswith(
        "nodes x processes per node = 3, 5, 6, 7, 8, 9, … x 1: batch: global_batch_size 32 is"
    )
    assert finding.remedy.startswith("nearest: 24, 48")


def test_one_node_where_none_are_asked_for():
    plant(SMOKE, "#SBATCH --nodes=2\n", "")
    plant(SMOKE, "--cpus-per-task=2", "--cpus-per-task=4")
    assert found() == []


def test_lines_of_json_that_is_indented_with_tabs():
    plant(RECIPE, '"seed": 0,', '"seed": -1,')
    Path(RECIPE).write_text(Path(RECIPE).read_text().replace("  ", "\t"))
    assert found() == [(RECIPE, 3, "recipe")]


def test_fp64_on_deepspeed():
    plant(RECIPE, '"fp32"', '"fp64"')
    plant(SMOKE, "STRATEGY:-ddp", "STRATEGY:-zero2")
    assert found() == [(SMOKE, line_of(SMOKE, "STRATEGY:-zero2"), "strategy")]


@pytest.mark.parametrize("file", [RECIPE, DDP, ZERO2, DEEPSPEED])
def test_dos_line_breaks_are_nothing_to_json_and_yaml(file):
    text = Path(file).read_bytes()
    Path(file).write_bytes(text.replace(b"\n", b"\r\n"))
    assert found() == []


# --- named files ---------------------------------------------------------------------------------------------------


def test_a_script_brings_what_it_names():
    plant(SMOKE, "STRATEGY:-ddp", "STRATEGY:-zero2")
    plant(RECIPE, '"seed": 0,', '"seed": -1,')
    plant(ZERO2, "standard", "pdsh")
    plant(DEEPSPEED, '  "zero_opt', '  "fp16": {},\n  "zero_opt')
    plant(DDP, "MULTI_GPU", "MULTI_CPU")  # which this script does not name
    assert [finding.file for finding in lint_files([Path(SMOKE)])] == [DEEPSPEED, ZERO2, RECIPE]


def test_deepspeed_configs_are_told_from_recipes():
    Path("mine.json").write_text('{"zero_optimization": {"stage": 5}}')
    Path("other.json").write_text('{"seed": 0}')
    findings = lint_files([Path("mine.json"), Path("other.json")])
    assert {(finding.file, finding.rule) for finding in findings} == {
        ("mine.json", "deepspeed-setting"),
        ("other.json", "recipe"),
    }
