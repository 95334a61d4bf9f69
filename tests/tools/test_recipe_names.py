"""Every command that takes a recipe takes it by its path or, at the top of a project, by its name."""

import shlex

import pytest

from largebatch.__main__ import build_parser, main
from paths import PYDOC, RECIPES, ROOT

COMMANDS = (
    "plan RECIPE --world-size 1",
    "verify RECIPE",
    "submit RECIPE --nodes 1",
    "lint RECIPE",
    "preflight RECIPE --accelerate-config x --node-rank 0 --num-nodes 1 --address x --port 1 --gpus 0 --seconds 1",
)


@pytest.mark.parametrize("command", COMMANDS)
def test_a_name_is_the_file_of_the_recipe(command, monkeypatch):
    monkeypatch.chdir(ROOT)
    by_name, by_path = (
        vars(build_parser(command.split()[0]).parse_args(shlex.split(command.replace("RECIPE", recipe))))
        | {"refuse": None}
        for recipe in ("gpt_pydoc", str(PYDOC.relative_to(ROOT)))
    )
    assert by_name == by_path


@pytest.mark.parametrize("command", COMMANDS)
def test_a_name_that_is_no_recipe(command, monkeypatch, capsys):
    monkeypatch.chdir(ROOT)
    with pytest.raises(SystemExit, match="2"):
        main(shlex.split(command.replace("RECIPE", "gpt_pydocs")))
    known = ", ".join(sorted(path.stem for path in RECIPES))
    assert capsys.readouterr().err.endswith(
        "gpt_pydocs: no such recipe, did you mean gpt_pydoc?; give a recipe's JSON file or its name, before any "
        f"overrides; known: {known}\n"
    )


def test_outside_a_project_there_are_no_names(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit, match="2"):
        main(["plan", "gpt_pydoc", "--world-size=1"])
    assert f"known: none in {tmp_path}\n" in capsys.readouterr().err
