"""Every rule finds the mistake it is for, planted in a copy of what is shipped, and nothing else does."""

from pathlib import Path

import pytest

from largebatch.tools.slurm.files import files_of_repository, lint_files
from paths import RECIPES
from planting import line_of, plant

pytestmark = pytest.mark.usefixtures("project")

SMOKE = "slurm/gpt_pydoc.sbatch"
DIGITS = "slurm/resnet_digits.sbatch"
LARGE = "slurm/resnet50_imagenet_8k.sbatch"
RECIPE = "recipes/causal_lm/gpt_pydoc.json"
DDP, FSDP, HSDP, ZERO2 = (f"recipes/accelerate_configs/{name}.yaml" for name in ("ddp", "fsdp", "hsdp", "zero2"))
DEEPSPEED = "ds_configs/zero2.json"
END = "source slurm/launch.sh\n"
WHOLE_FILE = ""


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
    (RECIPE, '"micro_batch_size": 8', '"micro_batch_size": 5', "recipe"),
    (RECIPE, '{"steps": 40}', '{"steps": 4000}', "recipe"),
    # --- the batch, at the script's nodes and processes
    (SMOKE, "#SBATCH --nodes=2", "#SBATCH --nodes=3", "no-plan"),
    (SMOKE, "#SBATCH --nodes=2", "#SBATCH --nodes=2-4", "no-plan"),
    (SMOKE, "#SBATCH --nodes=2", "#SBATCH -N 3", "no-plan"),
    (SMOKE, "#SBATCH --nodes=2", "#SBATCH -N3", "no-plan"),
    (SMOKE, "#SBATCH --nodes=2", "#SBATCH --nodes 3", "no-plan"),
    (SMOKE, "#SBATCH --cpus-per-task=2", "#SBATCH --cpus-per-task=3", "no-plan", "#SBATCH --nodes"),
    (SMOKE, "##SBATCH --gpus-per-node=2", "#SBATCH --gpus-per-node=3", "no-plan", "#SBATCH --nodes"),
    (SMOKE, "##SBATCH --gpus-per-node=2", "#SBATCH --gpus-per-node=h100:3", "no-plan", "#SBATCH --nodes"),
    (SMOKE, "##SBATCH --gpus-per-node=2", "#SBATCH --gres=gpu:3", "no-plan", "#SBATCH --nodes"),
    (SMOKE, "##SBATCH --gpus-per-node=2", "#SBATCH --gres=nvme:1,gpu:h100:3", "no-plan", "#SBATCH --nodes"),
    (SMOKE, "##SBATCH --gpus-per-node=2", "#SBATCH --gpus-per-task=3", "no-plan", "#SBATCH --nodes"),
    (RECIPE, '"global_batch_size": 32', '"global_batch_size": 40', "no-plan", (SMOKE, "#SBATCH --nodes")),
    # --- pairs of recipe and script
    (SMOKE, "RECIPE=recipes/causal_lm/gpt_pydoc.json", "RECIPE=recipes/none.json", "recipe-missing"),
    (SMOKE, "RECIPE=recipes/causal_lm/gpt_pydoc.json\n", "", "recipe-missing", WHOLE_FILE),
    (SMOKE, "RECIPE=recipes/causal_lm/gpt_pydoc.json", "RECIPE=recipes/causal_lm/gpt2_124m.json", "names-differ"),
    (SMOKE, "STRATEGY:-ddp", "STRATEGY:-dpd", "strategy"),
    (SMOKE, "STRATEGY=${STRATEGY:-ddp}\n", "", "strategy", WHOLE_FILE),
    # --- #SBATCH lines
    (SMOKE, "--requeue", "--requeue --ntasks-per-node=2", "ntasks-per-node"),
    (SMOKE, "--requeue", "--requeue --tasks-per-node=2", "tasks-per-node"),
    (SMOKE, "#SBATCH --requeue", "#SBATCH --requeue\n#SBATCH --gpus=4", "gpus", "--gpus=4"),
    (SMOKE, "#SBATCH --requeue", "#SBATCH --requeue\n#SBATCH -G4", "gpus", "-G4"),
    (SMOKE, "--output=slurm-%x-%j.log", "--output=$HOME/%x.log", "variable-in-sbatch-line"),
    (SMOKE, "--output=slurm-%x-%j.log", '--output="${USER}-%x.log"', "variable-in-sbatch-line"),
    (SMOKE, "--output=slurm-%x-%j.log", '--output="$(date +%F).log"', "variable-in-sbatch-line"),
    (SMOKE, "--output=slurm-%x-%j.log", "--output=`hostname`.log", "variable-in-sbatch-line"),
    (SMOKE, "--nodes=2", "--nodes=$NODES", "variable-in-sbatch-line"),
    (SMOKE, "#SBATCH --requeue\n", "", "requeue", WHOLE_FILE),
    (SMOKE, "#SBATCH --requeue", "#SBATCH --no-requeue", "requeue"),
    (SMOKE, "#SBATCH --open-mode=append\n", "", "open-mode", WHOLE_FILE),
    (SMOKE, "--open-mode=append", "--open-mode=truncate", "open-mode"),
    (SMOKE, "#SBATCH --time=00:30:00\n", "", "time", WHOLE_FILE),
    (SMOKE, "--time=00:30:00", "--time=half", "time"),
    (SMOKE, "--nodes=2", "--nodes=0", "nodes"),
    (SMOKE, "--cpus-per-task=2", "--cpus-per-task=two", "cpus-per-task"),
    (SMOKE, "##SBATCH --gpus-per-node=2", "#SBATCH --gres=gpu:2x", "gres"),
    (SMOKE, "#SBATCH --signal=B:USR1@300\n", "", "signal", WHOLE_FILE),
    (SMOKE, "--signal=B:USR1@300", "--signal=USR1@300", "signal"),
    (SMOKE, "--signal=B:USR1@300", "--signal=B:USR1", "signal"),
    (SMOKE, "--signal=B:USR1@300", "--signal=B:TERM@300", "signal"),
    (SMOKE, "--signal=B:USR1@300", "--signal=B:USR1@soon", "signal"),
    (SMOKE, "--output=slurm-%x-%j.log", "--output=logs/%x-%j.log", "log-folder"),
    (SMOKE, "--output=slurm-%x-%j.log", "--output=slurm/%x/%j.log", "log-folder"),
    (SMOKE, "#SBATCH --requeue", "#SBATCH --requeue\n#SBATCH -e logs/err", "log-folder", "-e logs/err"),
    (SMOKE, "#SBATCH --nodes=2", "# SBATCH --nodes=2", "commented-sbatch-line"),
    (SMOKE, "#SBATCH --nodes=2", "#SBATCH --nodes=2 --exclusive", "whole-nodes", "--exclusive"),
    (SMOKE, "#SBATCH --nodes=2", "#SBATCH --nodes=2 --mem=0", "whole-nodes", "--mem=0"),
    (SMOKE, END, f"#SBATCH --exclusive\n{END}", "late-sbatch-line", "--exclusive"),
    # --- the time to stop
    (SMOKE, "--signal=B:USR1@300", "--signal=B:USR1@1800", "time-too-short", "--time"),
    (
        RECIPE,
        '"logging":',
        '"faults": {"time_limit_margin_seconds": 1800},\n  "logging":',
        "time-too-short",
        (SMOKE, "--time"),
    ),
    (SMOKE, "--time=00:30:00", "--time=5", "time-too-short"),
    (SMOKE, "--time=00:30:00", "--time=00:05:00", "time-too-short"),
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
    line = where if isinstance(where, int) else 1 if where == WHOLE_FILE else line_of(file, where)
    assert found() == [(file, line, rule)]


# What looks like one of the mistakes and is none.
INNOCENT = [
    (SMOKE, "##SBATCH --account=my_project", "##SBATCH --nodes=3 --time=never $USER"),
    (SMOKE, "#SBATCH --nodes=2", "#SBATCH --nodes=2 # of 8 CPUs; not --nodes=3"),
    (SMOKE, "#SBATCH --nodes=2", "#SBATCH --nodes=1-2"),
    (SMOKE, "#SBATCH --nodes=2", "#SBATCH -H -N 2"),
    (SMOKE, "#SBATCH --nodes=2", "#SBATCH --nodes=2 --container-image=x.sif --site-plugin=1"),
    (SMOKE, "#SBATCH --nodes=2", "#SBATCH --nodes='2' --comment=\"it's 5 o'clock; $5\""),
    (SMOKE, "#SBATCH --nodes=2", "#SBATCH --nodes=2 --exclusive --mem-per-gpu=90G"),
    (SMOKE, "#SBATCH --nodes=2", "#SBATCH --nodes=2 --exclusive --mem=0 --gres=nvme:100 --licenses=fluent:3"),
    (SMOKE, "--nodes=2", "--nodes=2 --ntasks-per-node=1"),
    (SMOKE, "--signal=B:USR1@300", "--signal=B:SIGUSR1@299"),
    (SMOKE, "--time=00:30:00", "--time=UNLIMITED"),
    (SMOKE, "--time=00:30:00", "--time=0-1"),
    (SMOKE, "--output=slurm-%x-%j.log", "--output=slurm/%x-%j.log"),
    (SMOKE, "--output=slurm-%x-%j.log", "--output=/dev/null"),
    (SMOKE, "RECIPE=recipes/causal_lm/gpt_pydoc.json", 'RECIPE="recipes/causal_lm/gpt_pydoc.json"'),
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
    plant(SMOKE, "#SBATCH --requeue\n", "#SBATCH --ntasks-per-node=8\n")
    plant(RECIPE, '"seed": 0,', '"seed": -1, "sed": 0,')
    plant(ZERO2, "standard", "pdsh")
    assert [(file, rule) for file, _, rule in found()] == [
        (ZERO2, "deepspeed-launcher"),
        (RECIPE, "recipe"),
        (RECIPE, "recipe"),
        (SMOKE, "requeue"),
        (SMOKE, "ntasks-per-node"),
    ]


def test_every_finding_says_why_and_what_to_write():
    plant(SMOKE, "--signal=B:USR1@300", "--signal=USR1@300")
    (finding,) = lint_repository()
    assert str(finding) == (
        f"{SMOKE}:14: --signal=USR1@300: the script waits for USR1 before the time limit; without B: the signal kills "
        "the launchers instead; write --signal=B:USR1@300 [signal]"
    )


def test_recipe_without_its_train_py():
    Path("recipes/causal_lm/train.py").unlink()
    assert found() == [
        (f"slurm/{name}.sbatch", line_of(f"slurm/{name}.sbatch", "RECIPE="), "train-missing")
        for name in sorted(path.stem for path in RECIPES if path.parent.name == "causal_lm")
    ]


def test_nesting_without_end():
    Path(DDP).write_text("a: " + "[" * 600)
    Path(DEEPSPEED).write_text('{"zero_optimization": {"stage": 2, "offload_param": ' + "[" * 900 + "]" * 900 + "}}")
    Path("ds_configs/zero1.json").write_text("[" * 100_000)
    assert [(file, rule) for file, _, rule in found()] == [
        ("ds_configs/zero1.json", "json-syntax"),
        (DDP, "yaml-syntax"),
    ]


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("RECIPE=recipes/causal_lm/gpt_pydoc.json", "RECIPE=recipes/causal_lm/gpt_pydoc.json; export RECIPE"),
    ],
)
def test_other_ways_to_say_the_same(old, new):
    plant(SMOKE, f"\n{old}\n", f"\n{new}\n")
    assert not lint_repository()


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


# --- time to stop -----------------------------------------------------------------------------------------------------


def test_time_must_be_longer_than_lead_and_margin_together():
    plant(SMOKE, "--time=00:30:00", "--time=10:01")
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
