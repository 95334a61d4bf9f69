"""What SECURITY.md says of code that runs, as far as no other test shows it."""

import ast
import json
import tokenize

import pytest

from largebatch.__main__ import COMMANDS, main
from largebatch.errors import UserError
from largebatch.tools import checkpoints
from paths import ROOT
from run_folders import started, write_lines

# Words of each command that reads a recipe, a task or a run.
OF_A_TASK = {
    "plan": ["RECIPE", "--world-size=1"],
    "lint": ["RECIPE"],
    "verify": ["RECIPE"],
    "prepare": ["RECIPE"],
    "sweep": ["RECIPE", "--seed=1,2"],
    "submit": ["RECIPE", "--nodes=1"],
    "schema": ["TASK"],
    "advise": ["RECIPE", "--critical-batch=100"],
}
OF_A_RUN = {
    "report": ["run"],
    "checkpoints": ["run"],
    "export": ["run", "out"],
    "critical-batch": ["run", "--at=3"],
    "snapshot": ["--to=copy", "RECIPE"],
}
# `new` copies what it is told, `effective-batch` computes, and the others are part of a job, which trains.
OTHERS = {"audit", "new", "effective-batch", "preflight", "job-begins", "job-ended"}


@pytest.fixture
def words(tmp_path, monkeypatch):
    """Fill in the words of a command. A task, and the copy of it in a run's folder, leave a trace when they run."""
    monkeypatch.chdir(tmp_path)
    for folder in ("elsewhere/task", "run/source/task"):
        (tmp_path / folder).mkdir(parents=True)
        code = f"open({str(tmp_path / 'ran')!r}, 'w')\nraise ImportError('on purpose')\n"
        for name in ("config.py", "data.py", "model.py", "train.py", "__init__.py"):
            (tmp_path / folder / name).write_text(code)
        (tmp_path / folder / "r.json").write_text("{}")
    recipe = tmp_path / "elsewhere/task/r.json"
    (tmp_path / "pointing.json").write_text('{"$schema": "elsewhere/task/recipe.schema.json"}')
    write_lines(tmp_path / "run/history.jsonl", [started(0, recipe=str(recipe))])
    (tmp_path / "run/config.json").write_text(json.dumps({"task": str(recipe.parent)}))
    places = {"RECIPE": str(recipe), "TASK": str(recipe.parent)}
    return lambda given: [places.get(word, word) for word in given]


@pytest.mark.parametrize("name", OF_A_TASK)
def test_commands_that_run_code_of_the_task_they_are_given(name, words, tmp_path):
    main([name, *words(OF_A_TASK[name])])
    assert (tmp_path / "ran").exists()


@pytest.mark.usefixtures("words")
def test_a_recipe_names_code_by_its_schema(tmp_path):
    main(["plan", "pointing.json", "--world-size=1"])
    assert (tmp_path / "ran").exists()


@pytest.mark.parametrize("name", OF_A_RUN)
def test_commands_that_run_no_code(name, words, tmp_path):
    """Neither the copy in the run's folder nor the task that it names."""
    main([name, *words(OF_A_RUN[name])])
    assert not (tmp_path / "ran").exists()


def test_all_commands_are_known():
    assert OF_A_TASK.keys() | OF_A_RUN.keys() | OTHERS == COMMANDS.keys()


UNPICKLING = {"pickle", "cloudpickle", "dill", "marshal", "shelve", "read_array"}
UNPICKLING |= {"all_gather_object", "gather_object", "scatter_object_list", "broadcast_object_list"}
UNPICKLING |= {"send_object_list", "recv_object_list"}


def test_nothing_is_unpickled():
    """Neither files nor what processes send: by no library for it, and no call that does so or lets `transformers`."""
    for file in [*ROOT.glob("src/**/*.py"), *ROOT.glob("recipes/**/*.py")]:
        with file.open() as lines:
            assert not UNPICKLING & {token.string for token in tokenize.generate_tokens(lines.readline)}, file
        for call in ast.walk(ast.parse(file.read_text())):
            if isinstance(call, ast.Call):
                words = {word.arg: ast.unparse(word.value) for word in call.keywords}
                name = ast.unparse(call.func)
                assert name != "torch.load", file
                assert {words.get("allow_pickle"), words.get("trust_remote_code")} <= {None, "False"}, (file, name)
                if name.startswith("Auto") and name.endswith((".from_pretrained", ".from_config")):
                    assert words.get("trust_remote_code") == "False", (file, name)


# What a terminal obeys: a color, an operating system command, the 8-bit form of escapes, a return to the line's start.
OBEYED = "\x1b[31m \x1b]0;title\x07 \x9b31m \r\x7f\x00 \udc9b"
SHOWN = r"\x1b[31m \x1b]0;title\x07 \x9b31m \r\x7f\x00 \udc9b"


@pytest.mark.parametrize(
    ("raised", "code"), [(None, 0), (UserError(OBEYED), 2), (OSError(2, OBEYED), 2), (OSError(28, OBEYED), 74)]
)
def test_nothing_that_a_command_prints_is_obeyed_by_the_terminal(raised, code, monkeypatch, capsys):
    """In its output, its errors and those of its command line."""

    def run(_):
        print(OBEYED, "Ünï 🙂")
        if raised is not None:
            raise raised
        return 0

    monkeypatch.setattr(checkpoints, "run", run)
    assert main(["checkpoints", "run"]) == code
    printed = capsys.readouterr()
    assert printed.out == f"{SHOWN} Ünï 🙂\n"
    assert not set(printed.err) & set(OBEYED) - set(SHOWN)
    assert (r"\x1b[31m \x1b]0;title" in printed.err) == (raised is not None)
    with pytest.raises(SystemExit):
        main(["checkpoints", OBEYED, OBEYED])
    assert SHOWN in capsys.readouterr().err
