"""Bad configs: every problem at once, each with its path and remedy."""

import json
import time
from pathlib import Path

import pytest

import tasks
from largebatch.config import as_json, load_config, validate
from largebatch.config.sections import Duration, Section
from largebatch.errors import ConfigError
from paths import DIGITS, IMAGENET, PYDOC, ROOT, VIT_DIGITS

CausalLMConfig = tasks.module("causal_lm", "config").Config
ImageClassificationConfig = tasks.module("image_classification", "config").Config


def problems_of(*overrides: str, recipe=PYDOC, task=None) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        load_config(recipe, overrides, task)
    return caught.value.problems


def problem_of(*overrides: str, recipe=PYDOC) -> str:
    (problem,) = problems_of(*overrides, recipe=recipe)
    return problem


def test_all_problems_of_both_kinds_in_one_error(tmp_path):
    raw = json.loads(PYDOC.read_text())
    raw["compute"] = {"complie": True}
    raw["seed"] = "zero"
    del raw["optimizer"]["name"]
    raw["faults"] = {"max_bad_steps": 0}
    raw["learning_rate"]["warmup"]["duration"] = {"epochs": 40}
    raw["precision"] = "fp16"
    bad = tasks.copy("causal_lm", tmp_path) / "bad.json"
    bad.write_text(json.dumps(raw))
    text = "\n".join(problems_of(recipe=bad))
    for words in (
        "compute.complie: unknown key, did you mean compile?",
        'seed: given "zero"; must be a valid integer',
        "optimizer.name: missing; write one of ",
        "faults.max_bad_steps: given 0; must be greater than 0",
        "learning_rate.warmup.duration: 40 epochs is 4000 steps, longer than the whole run of 200",
        'precision: given "fp16"; must be "fp32", "bf16" or "fp64"',
    ):
        assert words in text
    assert len(text.splitlines()) == 6


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("--batch.global_batch_size=0", "batch.global_batch_size: given 0; must be greater than 0"),
        ("--seed=99999999999999999999999", "must be less than or equal to 9223372036854775807"),
        ("--learning_rate.base_lr=1e308", "must be less than or equal to 1000000000000"),
        ("--data=null", "data: given null; must be an object"),
        ("--optimizer=[]", "optimizer: given []; must be an object"),
        ("--batch.global_batch_size=64.5", "must be a valid integer"),
        ("--batch.global_batch_size=33", "33 is not a multiple of batch.micro_batch_size 8; nearest: 32, 40"),
        ("--batch.global_batch_size=6400", "more than the 3200 training samples"),
        ("--learning_rate.base_lr=NaN", "learning_rate.base_lr"),
        ("--learning_rate.base_lr=fast", 'given "fast"; must be a valid number'),
        (
            "--optimizer.name=adam",
            '"adam" is unknown, did you mean adamw?; write one of "adamw", "lamb", "lars", "sgd"',
        ),
        ("--optimizer.betas=[0.9,1.0]", "optimizer.betas[1]: given 1.0; must be less than 1"),
        ("--model.num_heads=3", "hidden_size 128 is not a multiple of num_heads 3"),
        ("--train.duration={}", "give exactly one of epochs, steps, samples, tokens"),
        ("--logging.trackers=tensorboard", 'logging.trackers: given "tensorboard"; must be a valid array'),
        ("--data.source=hub", 'data.source: "hub" is unknown; write one of "datasets", "megatron", "pydoc"'),
        (
            "--data={}",
            'data.source: missing; write one of "datasets", "megatron", "pydoc"',
        ),
        ("--data.num_train_sample=3", "did you mean num_train_samples?"),
        ("--train.stop_after_steps=x", 'train.stop_after_steps: given "x"; must be a valid integer, or null'),
        ("--optimizer.clip_norm=0", "optimizer.clip_norm: given 0; must be greater than 0, or null"),
        ("--learning_rate.warmup=3", "learning_rate.warmup: given 3; must be an object, or null"),
        (
            "--faults.on_non_finite=null",
            'faults.on_non_finite: given null; must be "stop", "skip" or "roll_back"',
        ),
    ],
)
def test_one_problem(override, words):
    assert words in "\n".join(problems_of(override))


@pytest.mark.parametrize("field", ["model.num_layers", "model.hidden_size", "model.vocab_size", "data.block_size"])
def test_sizes_that_no_machine_could_build(field):
    assert "must be less than or equal to" in problem_of(f"--{field}={2**62}")


def test_many_unknown_keys_are_told_in_time(tmp_path):
    raw = json.loads(PYDOC.read_text()) | {f"x{number}": 0 for number in range(200_000)}
    bad = tasks.copy("causal_lm", tmp_path) / "bad.json"
    bad.write_text(json.dumps(raw))
    begun = time.process_time()
    problems = problems_of(recipe=bad)
    assert time.process_time() - begun < 10
    assert len(problems) == 101
    assert problems[-1] == "the whole file: 199,900 more problems, which are not shown"


@pytest.mark.parametrize("field", ["train.duration", "learning_rate.warmup.duration", "checkpoint.every"])
@pytest.mark.parametrize(
    ("value", "words"),
    [('{"epoch": 2}', "epoch: unknown key, did you mean epochs?"), ('{"steps": -2}', "steps: given")],
)
def test_a_duration_without_a_valid_unit_is_one_problem(field, value, words):
    assert problem_of(f"--{field}", value).startswith(f"{field}.{words}")


TEN_TIMES = ("--batch.global_batch_size=320", "--learning_rate.warmup=null")
GROWING = '--batch.global_batch_size=[{"from": {"steps": 0}, "size": 32}, {"from": {"epochs": 1}, "size": 64}]'


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (
            ['--learning_rate.decay={"name": "batch_growth"}'],
            'learning_rate.decay: "batch_growth" needs a growing batch',
        ),
        (
            ["--optimizer.beta_scaling=sde", *TEN_TIMES],
            'optimizer.beta_scaling: "sde": at 10 times the batch that they were tuned at, the beta 0.9 would become',
        ),
        (
            ["--optimizer.beta_scaling=half_life", "--optimizer.betas=[0.9,0.95]", *TEN_TIMES],
            '"half_life": at 10 times the batch that they were tuned at, the second beta becomes 0.95 ** 10',
        ),
        (["--optimizer.beta_scaling=sde", "--learning_rate.scaling=linear"], 'set learning_rate.scaling to "sqrt"'),
        (["--optimizer.beta_scaling=half_life", GROWING], 'write "fixed", or a batch that does not grow'),
        (
            ["--faults.on_non_finite=roll_back", "--checkpoint.every=null"],
            'checkpoint.every: faults.on_non_finite "roll_back" needs it; write one',
        ),
        (["--learning_rate.warmup.shape=constant"], "a constant warmup at zero would not train"),
        (
            ['--optimizer={"name": "lamb", "weight_decay": 0, "beta_scaling": "sde"}'],
            "optimizer.beta_scaling: unknown key",
        ),
        (['--optimizer={"name": "lars", "weight_decay": 0, "momentum": 0, "nesterov": true}'], "momentum above 0"),
    ],
)
def test_rules_outside_their_range(overrides, words):
    assert words in problem_of(*overrides)


@pytest.mark.parametrize(
    ("decay", "words"),
    [
        (
            {"name": "step", "factor": 0.1, "at": [{"epochs": 2}]},
            "decay.at[0]: 2 epochs is step 200, not after 0 and before 200",
        ),
        (
            {"name": "step", "factor": 0.1, "at": [{"steps": 9}, {"steps": 9}]},
            "decay.at[1]: 9 steps is step 9, not after 9 and before 200",
        ),
        (
            {"name": "warmup_stable_decay", "decay": {"steps": 161}},
            "161 steps of decay after 40 steps of warmup is longer",
        ),
    ],
)
def test_decay_outside_the_run(decay, words):
    assert words in problem_of("--learning_rate.decay", json.dumps(decay))


@pytest.mark.parametrize(
    ("size", "words"),
    [
        (
            '[{"from": {"steps": 1}, "size": 32}]',
            "global_batch_size[0].from: 1 step, but training starts at 0",
        ),
        (
            '[{"from": {"steps": 0}, "size": 32}, {"from": {"epochs": 2}, "size": 64}]',
            "size 64 starts at step 200, but the run has 200",
        ),
        (
            '[{"from": {"steps": 0}, "size": 32}, {"from": {"steps": 0}, "size": 64}]',
            "starts at 0 steps, which is step 0, not after",
        ),
        (
            '[{"from": {"epoch": 0}, "size": 32}]',
            "batch.global_batch_size[0].from.epoch: unknown key, did you mean epochs",
        ),
        ("[]", "batch.global_batch_size: given []; "),
        (
            '{"start": 8, "end": 60, "increment": 8, "over": {"epochs": 1}}',
            "do not reach end 60; write an end such as 56",
        ),
        ('{"start": 8, "end": 16, "increment": 8}', "batch.global_batch_size.over: missing"),
        ('"big"', 'batch.global_batch_size: given "big"; must be a valid integer'),
    ],
)
def test_batch_size_schedules(size, words):
    assert words in problem_of(f"--batch.global_batch_size={size}")


def test_documents_have_no_fixed_number_of_tokens():
    words = ["--data.samples=documents", "--data.num_train_samples=2000", "--train.duration", '{"tokens": 1000}']
    assert "train.duration: is given in tokens, but the samples of this data have no fixed" in problem_of(*words)


def test_overrides_reach_any_depth_in_both_forms():
    config = load_config(
        DIGITS,
        ["--batch.global_batch_size", "512", "--learning_rate.warmup.start=zero", "--optimizer.nesterov", "false"],
    )
    assert (config.batch.global_batch_size, config.learning_rate.warmup.start) == (512, "zero")
    assert config.optimizer.nesterov is False


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["--seed"], "--seed: has no value"),
        (["seed", "3"], "seed: not an option"),
        (["--"], "not an option"),
    ],
)
def test_malformed_overrides(overrides, words):
    assert words in "\n".join(problems_of(*overrides))


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{", "cannot be read as JSON"),
        ("[1]", "must be a JSON object"),
        ('{"seed": 1, "seed": 1}', "given twice"),
        ("{}", "model: missing"),
    ],
)
def test_unusable_files(tmp_path, text, words):
    file = tasks.copy("causal_lm", tmp_path) / "recipe.json"
    file.write_text(text)
    assert words in "\n".join(problems_of(recipe=file))


def test_files_that_cannot_be_read(tmp_path):
    assert "no such file" in problem_of(recipe=tmp_path / "none.json")
    assert "cannot be read" in problem_of(recipe=tmp_path)
    (tmp_path / "binary.json").write_bytes(b"\xff\xfe\x00")
    assert "cannot be read" in problem_of(recipe=tmp_path / "binary.json")
    (tmp_path / "nested.json").write_text("[" * 100_000)
    assert "cannot be read" in problem_of(recipe=tmp_path / "nested.json")
    assert "seed: given" in problem_of("--seed", "[" * 100_000)


class Swap(Section):
    every: list[Duration]


class WithSwap(CausalLMConfig):
    swap: Swap


def test_durations_of_the_tasks_own_sections_are_checked():
    raw = json.loads(PYDOC.read_text())
    raw["data"]["samples"] = "documents"
    with pytest.raises(ConfigError) as caught:
        validate(raw | {"swap": {"every": [{"steps": 1}, {"tokens": 5}]}}, WithSwap)
    assert "swap.every[1]: is given in tokens" in "\n".join(caught.value.problems)


def test_a_recipe_of_another_task_is_refused():
    (problem,) = problems_of(recipe=DIGITS, task=CausalLMConfig)
    assert problem.startswith("belongs to a different task than ")
    assert problem.endswith(f"; run {DIGITS.with_name('train.py')} instead")
    assert load_config(DIGITS, (), ImageClassificationConfig).data.num_train_samples == 1437


def test_a_recipe_without_its_task(tmp_path):
    (tmp_path / "lone.json").write_text(DIGITS.read_text())
    (problem,) = problems_of(recipe=tmp_path / "lone.json")
    assert problem.startswith(f"there is no {tmp_path}/config.py, which defines a recipe's fields; move its JSON")


def test_a_recipe_elsewhere(tmp_path, monkeypatch):
    """Its task is the one that runs it, the one that is named, or that of its schema, wherever one stands."""
    (tmp_path / "experiments").mkdir()
    recipe = tmp_path / "experiments/mine.json"
    recipe.write_text(DIGITS.read_text())
    config = load_config(recipe, (), ImageClassificationConfig)
    assert load_config(recipe, task=DIGITS.parent) == config
    (tmp_path / "task").symlink_to(DIGITS.parent)
    for place, folder in (("../task", "."), (str(DIGITS.parent), "/")):
        recipe.write_text(json.dumps(json.loads(DIGITS.read_text()) | {"$schema": f"{place}/recipe.schema.json"}))
        monkeypatch.chdir(tmp_path / folder)
        assert as_json(load_config(recipe)) == as_json(config)
        # What is named comes first.
        assert load_config(recipe, task=DIGITS.parent.parent / "../recipes/image_classification").task == config.task
        with pytest.raises(ConfigError, match=r"model.architecture|unknown key"):
            load_config(recipe, (), CausalLMConfig)
    with pytest.raises(ConfigError, match=r"belongs to a different task than .*causal_lm; run .*train.py instead"):
        load_config(DIGITS, task=PYDOC.parent)
    with pytest.raises(ConfigError, match=r"there is no nowhere/config\.py"):
        load_config(recipe, task=Path("nowhere"))


HEAD = "from largebatch.config import RecipeConfig\n\nclass Config(RecipeConfig):\n"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("import largebatch\nx = 1 +\n", ":2: SyntaxError: invalid syntax"),
        ("\n\nwords = nothing\n", ":3: NameError: name 'nothing' is not defined"),
        ("from .missing import x\n", ":1: ModuleNotFoundError: No module named 'my-task.missing'"),
        ("from .other import Config\n", ": its Config is from my-task.other; write class Config(…) in this file"),
        ("Config = 5\n", ": has no class Config(RecipeConfig); write one, as docs/tasks.md describes"),
        ("class Config:\n    pass\n", ": has no class Config(RecipeConfig)"),
        (f"{HEAD}    pass\n", ": data is Data; write a subclass of largebatch.config.data.Data"),
        ("from largebatch.config import RecipeConfig as Config\n", ": its Config is from largebatch.config.recipe"),
        ("raise SystemExit(0)\n", ":1: SystemExit: 0"),
        (f"{HEAD}    x: y\n", ":4: NameError: name 'y' is not defined"),
        (f"{HEAD}    data: 'Nothing'\n", ": PydanticUndefinedAnnotation: name 'Nothing' is not defined"),
        (
            f"{HEAD}    data: int\n",
            ": data is int; write a subclass of largebatch.config.data.Data, or a union of subclasses",
        ),
    ],
)
def test_config_py_that_cannot_be_used(text, words, tmp_path):
    folder = tmp_path / "my-task"
    folder.mkdir()
    (folder / "config.py").write_text(text)
    (folder / "other.py").write_text(f"{HEAD}    pass\n")
    (folder / "lone.json").write_text(DIGITS.read_text())
    (problem,) = problems_of(recipe=folder / "lone.json")
    assert problem.startswith(f"{folder}/config.py{words}")


def test_an_error_inside_of_a_module_that_config_py_imports(tmp_path):
    folder = tasks.copy("causal_lm", tmp_path)
    (folder / "config.py").write_text("from .sections import x\n")
    (folder / "sections.py").write_text("\nx = 1 / 0\n")
    (problem,) = problems_of(recipe=folder / "gpt_pydoc.json")
    assert problem == f"{folder}/sections.py:2: ZeroDivisionError: division by zero"


def with_check(tmp_path, lines):
    """A copy of the task of GPT's recipe, with one more check."""
    folder = tasks.copy("causal_lm", tmp_path)
    text = (folder / "config.py").read_text()
    (folder / "config.py").write_text(f"{text}\n    @check\n    def _own(self) -> Iterator[str]:\n        {lines}\n")
    return folder / "gpt_pydoc.json"


@pytest.mark.parametrize(
    ("lines", "words"),
    [
        ("return 'model: wrong'", "config.py: Config._own returned 'model: wrong'; a check must yield its problems"),
        ("pass", "config.py: Config._own returned None; a check must yield its problems"),
        ("yield from self.nothing", "AttributeError: 'Config' object has no attribute 'nothing'"),
    ],
)
def test_checks_that_are_wrong_themselves(lines, words, tmp_path):
    problem = problem_of(recipe=with_check(tmp_path, lines))
    assert words in problem
    assert "Traceback" not in problem


@pytest.mark.parametrize(
    ("recipe", "overrides", "count"),
    [
        # The ViT's section is wrong, and a ResNet's has BatchNorm.
        ("image_classification/vit_digits", ["--model.patch_sise=16", "--batch.drop_last=false"], 1),
        # The digits' section has a default for the number of samples, and the hub's has none.
        ("image_classification/resnet50_imagenet_8k", ['--data={"source": "datasets", "image_size": 224}'], 7),
        ("causal_lm/llama_pydoc", ["--data.foo=1", "--precision=fp64"], 2),
        # Refused by a validator of the field.
        ("sft/sft_qwen_gsm8k", ["--data.prompt=none", "--data.block_size=0"], 2),
        # Valid field by field, and wrong together, so that nothing is said of the batch sizes.
        (
            "causal_lm/gpt_pydoc",
            ['--batch.global_batch_size={"start": 8, "end": 60, "increment": 7, "over": {"steps": 9}}'],
            1,
        ),
    ],
)
def test_no_problem_is_made_up_and_none_is_missed(recipe, overrides, count):
    problems = problems_of(*overrides, recipe=ROOT / f"recipes/{recipe}.json")
    assert len(problems) == count, problems


def test_problems_are_told_whatever_a_check_makes_of_them(tmp_path):
    folder = tasks.copy("causal_lm", tmp_path)
    text = (
        (folder / "config.py").read_text()
        + """
    @check
    def _divides(self) -> Iterator[str]:
        if 12 // self.model.num_layers < 7:
            yield "model.num_layers: too many; write 1"
"""
    )
    (folder / "config.py").write_text(text)
    recipe = folder / "gpt_pydoc.json"
    assert problem_of(recipe=recipe) == "model.num_layers: too many; write 1"
    assert len(problems_of("--seed=x", recipe=recipe)) == 2
    assert problem_of("--model.num_layers=0", recipe=recipe) == "model.num_layers: given 0; must be greater than 0"


def test_images_are_normalized_on_a_scale_from_0_to_1():
    """In many scripts it is one from 0 to 255, with which the model would see next to nothing."""
    words = ("--data.mean=[123.7, 0.4, 0.4]", "--data.std=[0.2, 58.4, 0]")
    assert problems_of(*words, recipe=IMAGENET) == [
        "data.mean[0]: given 123.7; must be less than or equal to 1",
        "data.std[1]: given 58.4; must be less than or equal to 1",
        "data.std[2]: given 0; must be greater than 0",
    ]


FILES = '--data.data_files={"train": "a.jsonl", "eval": "b.jsonl"}'


@pytest.mark.parametrize(
    ("words", "is_valid"),
    [
        # gpt2_124m evaluates on a part of the hub's only split, and would on a part of a.jsonl.
        ((), False),
        (("--data.eval_split=test",), False),
        (("--data.eval_split=validation",), True),
        (("--data.train_split=train+validation[10:]",), True),
        (('--data.data_files={"train": "a.jsonl", "eval": "a.jsonl"}',), True),
    ],
)
def test_files_that_no_split_reads(words, is_valid):
    recipe, words = PYDOC.with_name("gpt2_124m.json"), (FILES, *words)
    if is_valid:
        assert load_config(recipe, words).data.data_files.train == "a.jsonl"
    else:
        assert "do not read both data_files" in problem_of(*words, recipe=recipe)


@pytest.mark.parametrize("field", ["train.duration", "checkpoint.every", "checkpoint.keep_every"])
def test_durations_in_a_unit_that_the_data_does_not_have(field):
    with pytest.raises(ConfigError, match=field.replace(".", r"\.") + ": is given in tokens"):
        load_config(DIGITS, [f'--{field}={{"tokens": 5}}'])


@pytest.mark.parametrize("words", [(), ('--data={"source": "digits"}',)])
def test_patches_must_divide_the_image(words):
    """Also an image whose size is left to its default."""
    assert load_config(VIT_DIGITS, ("--model.patch_size=8", *words)).model.patch_size == 8
    problem = problem_of("--model.patch_size=12", *words, recipe=VIT_DIGITS)
    assert problem.startswith("model.patch_size: 12 does not divide data.image_size 32, so ")
