"""Single fields: every problem at once, each with its path and remedy."""

import json
import time
from typing import Annotated, Literal

import pytest
from pydantic import Discriminator, Field, Tag, ValidationError

import tasks
from largebatch.config import load_config
from largebatch.config.problems import explained
from largebatch.config.sections import Section
from largebatch.errors import ConfigError
from paths import IMAGENET, PYDOC
from problems import problem_of, problems_of


def test_all_problems_in_one_error_and_then_those_between_sections():
    optimizer = '--optimizer={"weight_decay": 0}'
    words = ("--compute.complie=true", "--seed=zero", optimizer, "--faults.max_bad_steps=0", "--precision=fp16")
    text = "\n".join(problems_of(*words))
    for words in (
        "compute.complie: unknown key, did you mean compile?",
        'seed: given "zero"; must be a valid integer',
        "optimizer.name: missing; write one of ",
        "faults.max_bad_steps: given 0; must be greater than 0",
        'precision: given "fp16"; must be "fp32", "bf16" or "fp64"',
    ):
        assert words in text
    assert len(text.splitlines()) == 5
    words = ('--learning_rate.warmup.duration={"epochs": 40}', "--batch.global_batch_size=15")
    contradictions = "\n".join(problems_of(*words))
    assert "learning_rate.warmup.duration: warmup takes " in contradictions
    assert "batch.global_batch_size: 15 is not a multiple of" in contradictions


def test_an_option_that_no_field_is():
    """It is not the file that is wrong."""
    with pytest.raises(ConfigError, match=r"the command line:\n  - --strategy: neither an option here nor a field of "):
        load_config(PYDOC, ["--strategy=fsdp"])
    with pytest.raises(ConfigError, match=r"--bach\.global_batch_size: neither .* recipe, did you mean batch\?"):
        load_config(PYDOC, ["--bach.global_batch_size=8"])


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("--seed=99999999999999999999999", "must be less than or equal to 9223372036854775807"),
        ("--learning_rate.base_lr=1e308", "must be less than or equal to 1000000000000"),
        # A key that is also the name of a kind.
        (
            '--learning_rate.decay={"name": "cosine", "cosine": 1}',
            "learning_rate.decay.cosine: unknown key; known here: name, final_fraction",
        ),
        # Or of a JSON type.
        ("--train.object=1", "train.object: unknown key; known here: duration"),
        ("--data=null", "data: given null; must be an object"),
        ("--batch.global_batch_size=33", "33 is not a multiple of batch.micro_batch_size 8; nearest: 32, 40"),
        ("--batch.global_batch_size=6400", "more than the 3200 training samples"),
        ("--learning_rate.base_lr=NaN", "learning_rate.base_lr"),
        (
            "--optimizer.name=adam",
            '"adam" is unknown, did you mean adamw?; write one of "adamw", "lamb", "lars", "muon", "sgd"',
        ),
        ("--model.num_heads=3", "hidden_size 128 is not a multiple of num_heads 3"),
        ("--train.duration={}", "give exactly one of epochs, steps, samples, tokens"),
        ("--logging.trackers=tensorboard", 'logging.trackers: given "tensorboard"; must be a valid array'),
        ("--data.source=hub", 'data.source: "hub" is unknown; write one of "datasets", "megatron", "pydoc"'),
        ("--train.stop_after_steps=x", 'train.stop_after_steps: given "x"; must be a valid integer, or null'),
        ("--evaluation.sets.x.evry=1", "evaluation.sets.x.evry: unknown key, did you mean every?; known here"),
        ("--logging.every=0", "logging.every.steps: given 0; must be greater than 0"),
        ("--logging.every=true", "logging.every: given true; must be an object"),
        ("--learning_rate.warmup=3", "learning_rate.warmup: given 3; must be an object, or null"),
        (
            "--faults.on_non_finite=null",
            'faults.on_non_finite: given null; must be "stop", "skip" or "roll_back"',
        ),
    ],
)
def test_one_problem(override, words):
    assert words in "\n".join(problems_of(override))


class Square(Section):
    kind: Literal["square"]
    side: int = 1


class Circle(Section):
    kind: Literal["circle"]
    radius: int = 1


class Frame(Section):
    kind: Literal["frame", "ring"]
    # A word that is also the name of another kind.
    around: Literal["square"] = "square"


Shape = Annotated[Square | Circle | Frame, Field(discriminator="kind")]
ByFunction = Annotated[
    Annotated[Square, Tag("square")] | Annotated[Circle, Tag("circle")], Discriminator(lambda given: given["kind"])
]


def problem_with(kind, given):
    """The only problem of a value in a field of this type."""

    class Config(Section):
        field: kind

    with pytest.raises(ValidationError) as caught:
        Config.model_validate_json(json.dumps({"field": given}))
    *_, (where, what) = explained(caught.value, Config.model_json_schema())
    return f"{where}: {what}"


def test_an_unknown_kind():
    words = 'field.kind: "circel" is unknown, did you mean circle?; write one of "circle", "frame", "ring", "square"'
    assert problem_with(Shape, {"kind": "circel"}) == words


@pytest.mark.parametrize(
    ("kind", "given"),
    [
        (dict[str, Shape], {"x": {"kind": "sqare"}}),
        (int | list[Shape], [{"kind": "sqare"}]),
        (ByFunction, {"kind": "sqare"}),
    ],
)
def test_an_unknown_kind_where_the_schema_does_not_show_the_kinds(kind, given):
    problem = problem_with(kind, given)
    assert 'given {"kind": "sqare"}; input tag "sqare" found' in problem
    assert 'does not match any of the expected tags: "square", "circle"' in problem


def test_a_missing_kind_where_the_schema_does_not_show_the_kinds():
    words = 'field.x: given {}; unable to extract tag using discriminator "kind"'
    assert problem_with(dict[str, Shape], {"x": {}}) == words


@pytest.mark.parametrize("kind", [Shape, ByFunction, ByFunction | None])
def test_kinds_have_fields_of_their_own(kind):
    square = "field.radius: unknown key; known here: kind, side"
    assert problem_with(kind, {"kind": "square", "radius": 1}) == square
    circle = 'field.radius: given "x"; must be a valid integer'
    assert problem_with(kind, {"kind": "circle", "radius": "x"}) == circle


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


@pytest.mark.parametrize("field", ["train.duration", "checkpoint.every"])
@pytest.mark.parametrize(
    ("value", "words"),
    [('{"epoch": 2}', "epoch: unknown key, did you mean epochs?"), ('{"steps": -2}', "steps: given")],
)
def test_a_duration_without_a_valid_unit_is_one_problem(field, value, words):
    assert problem_of(f"--{field}", value).startswith(f"{field}.{words}")


def test_images_are_normalized_on_a_scale_from_0_to_1():
    """In many scripts it is one from 0 to 255, with which the model would see next to nothing."""
    words = ("--data.mean=[123.7, 0.4, 0.4]", "--data.std=[0.2, 58.4, 0]")
    assert problems_of(*words, recipe=IMAGENET) == [
        "data.mean[0]: given 123.7; must be less than or equal to 1",
        "data.std[1]: given 58.4; must be less than or equal to 1",
        "data.std[2]: given 0; must be greater than 0",
    ]
