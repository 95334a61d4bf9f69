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


def test_a_name_that_is_no_recipe(tmp_path, monkeypatch, capsys):
    """Outside a project there are none."""
    names = ", ".join(sorted(path.stem for path in RECIPES))
    copy = "`largebatch new FOLDER --recipe NAME` copies one"
    for folder, words, known in (
        (ROOT, ", did you mean gpt_pydoc?", names),
        (tmp_path, "", f"none in {tmp_path}; {copy}"),
    ):
        monkeypatch.chdir(folder)
        with pytest.raises(SystemExit, match="2"):
            main(["plan", "gpt_pydocs", "--world-size=1"])
        words = f"{words}; give a recipe's JSON file or its name, before any overrides; known: {known}\n"
        assert capsys.readouterr().err.endswith(f"gpt_pydocs: no such recipe{words}")
