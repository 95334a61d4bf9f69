"""Reading a recipe: its file, its task and its overrides, and what is wrong with them."""

import json
from pathlib import Path

import pytest

import tasks
from largebatch.config import as_json, load_config
from largebatch.errors import ConfigError
from paths import DIGITS, PYDOC
from problems import problem_of, problems_of


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


def test_a_recipe_of_another_task_is_refused():
    (problem,) = problems_of(recipe=DIGITS, task=PYDOC.parent)
    assert problem.startswith("belongs to a different task than ")
    assert problem.endswith(f"; run {DIGITS.with_name('train.py')} instead")
    assert load_config(DIGITS, (), DIGITS.parent).data.num_train_samples == 1437


def test_a_recipe_without_its_task(tmp_path):
    (tmp_path / "lone.json").write_text(DIGITS.read_text())
    (problem,) = problems_of(recipe=tmp_path / "lone.json")
    assert problem.startswith(f"there is no {tmp_path}/config.py, which defines a recipe's fields; move its JSON")


def test_a_recipe_elsewhere(tmp_path, monkeypatch):
    """Its task is the one that runs it, the one that is named, or that of its schema, wherever one stands."""
    (tmp_path / "experiments").mkdir()
    recipe = tmp_path / "experiments/mine.json"
    recipe.write_text(DIGITS.read_text())
    config = load_config(recipe, (), DIGITS.parent)
    assert load_config(recipe, task=DIGITS.parent) == config
    (tmp_path / "task").symlink_to(DIGITS.parent)
    for place, folder in (("../task", "."), (str(DIGITS.parent), "/")):
        recipe.write_text(json.dumps(json.loads(DIGITS.read_text()) | {"$schema": f"{place}/recipe.schema.json"}))
        monkeypatch.chdir(tmp_path / folder)
        assert as_json(load_config(recipe)) == as_json(config)
        # What is named comes first.
        assert load_config(recipe, task=DIGITS.parent.parent / "../recipes/image_classification").task == config.task
        with pytest.raises(ConfigError, match=r"model.architecture|unknown key"):
            load_config(recipe, (), PYDOC.parent)
    with pytest.raises(ConfigError, match=r"there is no nowhere/config\.py"):
        load_config(recipe, task=Path("nowhere"))


HEAD = "from largebatch.config import RecipeConfig\n\nclass Config(RecipeConfig):\n"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("import largebatch\nx = 1 +\n", ":2: SyntaxError: invalid syntax"),
        ("\n\nwords = nothing\n", ":3: NameError: name 'nothing' is not defined"),
        ("from .missing import x\n", ":1: ModuleNotFoundError: No module named 'my_task_"),
        ("from .other import Config\n", ": has no class Config(RecipeConfig) of its own"),
        (
            "Config = 5\n",
            ": has no class Config(RecipeConfig) of its own; write one in this file, as docs/tasks.md describes",
        ),
        (f"{HEAD}    pass\n", ": data is Data; write a subclass of largebatch.config.data.Data"),
        ("raise SystemExit(0)\n", ":1: SystemExit: 0"),
        (f"{HEAD}    x: y\n", ":4: NameError: name 'y' is not defined"),
        (f"{HEAD}    data: 'Nothing'\n", ": PydanticUndefinedAnnotation: name 'Nothing' is not defined"),
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
