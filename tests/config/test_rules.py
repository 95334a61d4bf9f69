"""Rules between the fields of a recipe, and those that a task adds."""

import json

import pytest

import tasks
from largebatch.config import as_json, load_config, validate
from largebatch.config.sections import Duration, Section
from largebatch.errors import ConfigError
from paths import ADDITION, DIGITS, PYDOC, ROOT, VIT_DIGITS
from problems import problem_of, problems_of

CausalLMConfig = tasks.module("causal_lm", "config").Config


GROWING = '--batch.global_batch_size=[{"from": {"steps": 0}, "size": 32}, {"from": {"epochs": 1}, "size": 64}]'
LINEAR = "--learning_rate.scaling=linear"


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (
            ['--learning_rate.decay={"name": "batch_growth"}'],
            'learning_rate.decay: "batch_growth" needs a growing batch',
        ),
        (
            ["--optimizer.beta_scaling=sde", "--batch.global_batch_size=320", "--learning_rate.warmup=null"],
            "optimizer.beta_scaling: at 10 times the batch that they were tuned at, the beta 0.9 would become",
        ),
        (["--optimizer.beta_scaling=sde", LINEAR], 'set learning_rate.scaling to "sqrt"'),
        (
            ["--optimizer.weight_decay_scaling=power_lines"],
            'learning_rate.reference_duration: null, but "power_lines" needs a length',
        ),
        (
            ['--optimizer={"name": "lamb", "weight_decay": 0, "weight_decay_scaling": "timescale"}', LINEAR],
            'optimizer.weight_decay_scaling: "timescale" requires the square-root rule',
        ),
        (["--optimizer.weight_decay_scaling=timescale", GROWING], 'write "fixed", or a batch that does not grow'),
        (["--optimizer.beta_scaling=half_life", GROWING], 'write "fixed", or a batch that does not grow'),
        (
            ["--faults.on_non_finite=roll_back", "--checkpoint.every=null"],
            'checkpoint.every: faults.on_non_finite "roll_back" needs it; write one',
        ),
        (["--learning_rate.scaling=none", "--learning_rate.warmup.start=base_lr"], "it would end where it starts"),
        (['--learning_rate.reference_duration={"epochs": 2}'], "only rules of weight_decay_scaling use it"),
        (
            ["--faults.max_bad_steps=9"],
            'faults.max_bad_steps: has no effect, because faults.on_non_finite is "stop"; remove it',
        ),
        (["--compute.couple=one_pass"], "compute.couple: has no effect, because each sample of this task has its own"),
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


def test_defaults_without_effect_may_stay():
    """The configs of runs have them."""
    raw = as_json(load_config(PYDOC))
    raw.pop("task")
    assert validate(raw, CausalLMConfig).logging == load_config(PYDOC).logging


def test_answers_that_are_not_written():
    words = "--evaluation.max_answer_tokens=9"
    assert "has no effect, because evaluation.answers is null; remove it" in problem_of(words, recipe=ADDITION)
    assert load_config(ADDITION, [words, "--evaluation.answers=2"]).evaluation.max_answer_tokens == 9


def test_tokens_per_parameter_need_tokens():
    words = ("--optimizer.weight_decay_scaling=power_lines", '--learning_rate.reference_duration={"epochs": 2}')
    assert 'write "timescale" or "fixed"' in problem_of(*words, recipe=VIT_DIGITS)


@pytest.mark.parametrize(
    ("decay", "words"),
    [
        (
            {"name": "step", "factor": 0.1, "at": [{"epochs": 2}]},
            "decay.at[0]: it is step 200, not after 40 and before 200",
        ),
        ({"name": "step", "factor": 0.1, "at": [{"steps": 40}]}, "decay.at[0]: it is step 40, not after 40 and before"),
        (
            {"name": "step", "factor": 0.1, "at": [{"steps": 49}, {"steps": 49}]},
            "decay.at[1]: it is step 49, not after 49 and before 200",
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
    assert words in problem_of("--batch.global_batch_size", size)


class Swap(Section):
    every: list[Duration]


class WithSwap(tasks.module("sft", "config").Config):
    swap: Swap


def test_durations_of_the_tasks_own_sections_are_checked():
    """Answers have no fixed number of tokens."""
    raw = json.loads(ADDITION.read_text())
    with pytest.raises(ConfigError) as caught:
        validate(raw | {"swap": {"every": [{"steps": 1}, {"tokens": 5}]}}, WithSwap)
    (problem,) = caught.value.problems
    assert "swap.every[1]: is given in tokens, but the samples of this data have no fixed" in problem


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
        ("causal_lm/llama_pydoc", ["--data.foo=1", "--data.block_size=0"], 2),
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
    recipe = PYDOC.with_name("gpt2_124m.json")
    assert "config_name 'sample-10BT' has no effect on data_files" in problem_of(FILES, *words, recipe=recipe)
    words = (FILES, "--data.config_name=null", *words)
    # The hub's id would stay, too; and `datasets` unpickles files of "pandas".
    for path in ((), ("--data.path=pandas",)):
        assert "is not a format of data_files that is read; write one of parquet, json" in problem_of(
            *words, *path, recipe=recipe
        )
    words = (*words, "--data.path=json")
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
