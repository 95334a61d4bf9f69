"""Every command that the documents show works: each is run, in a copy of the repository.

Stand-ins take down what is called. `largebatch` is then run in this process. What would train, or needs a cluster, is
asked of the real parsers: that scripts, configs and recipes are there, and that the recipe has a plan with those
overrides on that many processes.
"""

import json
import re
import shlex
import shutil
import subprocess
import sys
import textwrap
from contextlib import suppress
from itertools import accumulate, chain, pairwise, product
from pathlib import Path
from pydoc_data.topics import topics

import pytest
from PIL import Image

import batch_size
from experiments import EXPERIMENTS
from jobs import train_in_job
from largebatch.__main__ import build_parser, main
from largebatch.config import load_config, override_words
from largebatch.errors import ConfigError
from largebatch.tools.local_jobs.small_runs import tiny_data_overrides
from paths import BERT, PYDOC, RECIPES, ROOT
from played import write_commands
from resuming import TINY_GPT
from run_folders import write_run
from test_readme import shown_outputs

CONTRIBUTING = ROOT / "CONTRIBUTING.md"
DOCUMENTS = [
    ROOT / "README.md",
    ROOT / "AGENTS.md",
    CONTRIBUTING,
    *sorted(ROOT.glob("docs/*.md")),
    *sorted(ROOT.glob("recipes/*/README.md")),
]
RECORDER = f"""#!{sys.executable}
import json, sys
with open("calls.jsonl", "a") as file:
    file.write(json.dumps([sys.argv[0].rpartition("/")[2], *sys.argv[1:]]) + "\\n")
"""
# `make` is the real one.
STAND_INS = ("accelerate", "sbatch", "pytest", "ruff", "mypy", "pip", "git", "tail", "wandb", "largebatch")
STAND_INS += ("curl", "docker", "enroot", "apptainer", "shellcheck")
# Where every host is this machine: the last word is the command.
SSH = 'exec bash -c "${@: -1}"'


# A list's blocks are indented.
BLOCK = re.compile(r"(?ms)^ *```(console|bash)\n(.*?)^ *```$")


def commands(document):
    """The commands after the prompts of a document's console blocks, with continued lines, and whole bash blocks."""
    found = []
    for kind, indented in BLOCK.findall(document.read_text()):
        block = textwrap.dedent(indented)
        if kind == "bash":
            found.append(block)
            continue
        lines = iter(block.splitlines())
        for line in lines:
            if not line.startswith("$ "):
                continue
            command = line.removeprefix("$ ")
            while subprocess.run(["bash", "-n"], input=command, capture_output=True, text=True).returncode or (
                command.endswith("\\")
            ):
                command += "\n" + next(lines)
            found.append(command)
    return found


@pytest.fixture
def repository(project, monkeypatch):
    """The current folder is a copy of the repository, in an environment with stand-ins."""
    for name in ("Makefile", "requirements.txt", "pyproject.toml"):
        shutil.copy(ROOT / name, project / name)
    shutil.copytree(ROOT / "launch", project / "launch")
    (project / "bench").symlink_to(ROOT / "bench")
    (project / "tests").mkdir(exist_ok=True)
    shutil.copy(ROOT / "tests/packed_assignments.py", project / "tests")
    programs = project / ".venv/bin"
    programs.mkdir(parents=True)
    for name in ("recorder", *STAND_INS):
        (programs / name).write_text(RECORDER + ("print(7)\n" if name == "sbatch" else ""))
        (programs / name).chmod(0o755)
    # Measurements take minutes: that the program is there is asked below. `make train` counts GPUs with torch.
    python = (
        'case "$*" in bench/*) exec "$(dirname "$0")/recorder" "$@";; "-c import torch"*) echo 2;; '
        f'*) exec {sys.executable} "$@";; esac'
    )
    python3 = f'exec {sys.executable} "$@"'
    path = write_commands(programs, {"python": python, "python3": python3, "ssh": SSH, "blaunch": SSH})
    (programs / "activate").touch()
    (project / ".venv/installed").touch()
    # What the documents speak of as the reader's own.
    (project / "largebatch").symlink_to(".")
    for split in ("train", "valid"):
        documents = [{"text": document.read_text()} for document in DOCUMENTS]
        Path(f"{split}.jsonl").write_text("".join(f"{json.dumps(each)}\n" for each in documents))
    for name in ("resnet_digits", "batch_64", "batch_512"):
        write_run(Path("runs", name), steps=range(1, 3))
    Path("nodes").write_text("n1\nn2\n")
    for name, value in {
        # What schedulers set.
        "PBS_O_WORKDIR": ".",
        "PBS_JOBID": "1.server",
        "PBS_NODEFILE": "nodes",
        "LSB_JOBID": "2",
        "LSB_DJOB_HOSTFILE": "nodes",
        "PATH": path,
        "PYTHONPATH": str(ROOT / "src"),
    }.items():
        monkeypatch.setenv(name, value)
    for name in ("RUN_DIR", "NUM_PROCESSES", "MAKELEVEL", "PYTEST_ADDOPTS"):
        monkeypatch.delenv(name, raising=False)
    return project


def write_own_data():
    """Write what the page on data takes for the reader's own: a folder of text, a file of pairs, folders of images."""
    from datasets import Dataset

    # As in a project that `largebatch new` made.
    for recipe in Path("recipes").glob("*/*.json"):
        recipe.write_text(recipe.read_text().replace('  "demonstration": true,\n', ""))
    Path("texts").mkdir()
    for name, text in topics.items():
        Path("texts", f"{name}.txt").write_text(text)
    pairs = [{"question": f"{a} + {b} = ?", "answer": str(a + b)} for a in range(30) for b in range(30)]
    Dataset.from_list(pairs).to_parquet("pairs.parquet")
    for split, label, number in product(("train", "valid"), range(10), range(20)):
        folder = Path("images", split, str(label))
        folder.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (32, 32), (label * 20, number, number)).save(folder / f"{number}.png")
    # As macOS writes beside files of other disks.
    for file in (Path("texts/._topic.txt"), Path("images/train/0/._0.png")):
        file.write_bytes(b"\0\xb0")


def write_own_recipe(text):
    """Write the recipe, on the reader's own documents, that a document's commands name."""
    place = Path("recipes", BERT.parent.name, "my_bert.json")
    if str(place) in text:
        config = json.loads(BERT.read_text())
        files = {"train": "train.jsonl", "eval": "valid.jsonl"}
        config["data"] |= {"source": "datasets", "path": "json", "data_files": files, "tokenizer": "my_tokenizer"}
        config["model"]["vocab_size"] = 16384
        place.write_text(json.dumps(config))


def calls_of(command):
    """Run a command; the programs that it called, with their words."""
    file = Path("calls.jsonl")
    file.unlink(missing_ok=True)
    result = subprocess.run(["bash", "-ec", command], capture_output=True, text=True, stdin=subprocess.DEVNULL)
    assert result.returncode == 0, f"{command}\n{result.stdout}{result.stderr}"
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def assert_planned(recipe, words, world_size):
    assert main(["plan", recipe, "--world-size", str(world_size), *words]) == 0, (recipe, words)


def check_launch(words):
    """As Accelerate itself reads it."""
    from accelerate.commands.launch import launch_command_parser

    assert words[0] == "launch"
    launch = launch_command_parser().parse_args(words[1:])
    assert Path(launch.config_file).exists(), launch.config_file
    assert Path(launch.training_script).exists(), launch.training_script
    option, recipe, *overrides = launch.training_script_args
    assert option == "--config"
    # node.sh names the run folder.
    if overrides[:1] == ["--run-dir"]:
        del overrides[:2]
    assert_planned(recipe, overrides, launch.num_processes or 2)


def check_preflight(words):
    """The options exist; the nodes do not."""
    build_parser("preflight").parse_known_args(words)


def check_submission(words):
    """Options of sbatch, the script, and overrides of its recipe, which stand-ins for `largebatch submit` have, too."""
    at = next(number for number, word in enumerate(words) if word.endswith(".sbatch"))
    script = Path(words[at])
    if script.name == "prepare.sbatch":
        return assert_planned(words[at + 1], words[at + 2 :], 4)
    assert main(["lint", str(script)]) == 0
    recipe = re.search(r"(?m)^RECIPE=(\S+)$", script.read_text())[1]
    overrides = words[at + 1 :]
    if overrides[:1] == ["--strategy"]:
        del overrides[:2]
    return assert_planned(recipe, overrides, 4)


def check_image(words):
    """A command in a container is a command here."""
    if "run" in words:
        program, command, recipe, *_ = words[words.index("largebatch") + 1 :]
        assert (program, command) == ("largebatch", "prepare")
        assert_planned(recipe, [], 8)


def check_measurement(words):
    """That of bench/science, which knows the study."""
    program, study = words[:2]
    assert Path(program).samefile(batch_size.__file__)
    assert study in EXPERIMENTS


def plan_instead(options):
    """What stands in for the runs of `verify`: the recipe, with what takes the place of its data, has a plan on each
    number of processes."""
    tiny = tiny_data_overrides(load_config(options.config, options.overrides)) if options.tiny_data else []
    for world_size in options.world_sizes:
        assert_planned(str(options.config), [*tiny, *options.overrides], world_size)
    return True


COMPARED = [command for command, _ in shown_outputs()]
CHECKS = {
    "accelerate": check_launch,
    "sbatch": check_submission,
    "docker": check_image,
    "recorder": check_measurement,
    "preflight": check_preflight,
}


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """The folder of a run of `gpt_pydoc`, made before there are any stand-ins."""
    run_dir = tmp_path_factory.mktemp("trained") / "gpt_pydoc"
    train_in_job(PYDOC, run_dir, *TINY_GPT, "--train.stop_after_steps=2", strategy="single")
    return run_dir


def anchors(document):
    """The anchors that GitHub makes of the headings."""
    text = re.sub(r"(?ms)^```.*?^```$", "", document.read_text())
    headings = re.findall(r"(?m)^#+ (.*)$", text)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_links_lead_somewhere():
    """Within the repository: to files and folders that exist, and to headings that they have."""
    broken = []
    for document in [*DOCUMENTS, ROOT / "SECURITY.md", ROOT / "bench/README.md"]:
        for link in re.findall(r"\]\((?!https?:)([^)\s]+)\)", document.read_text()):
            name, _, anchor = link.partition("#")
            target = document.parent / name if name else document
            if not target.exists() or (anchor and anchor not in anchors(target)):
                broken.append(f"{document.relative_to(ROOT)}: {link}")
    assert broken == []


@pytest.mark.slow
@pytest.mark.parametrize(
    "document",
    [each for each in DOCUMENTS if BLOCK.search(each.read_text())],
    ids=lambda path: str(path.relative_to(ROOT)),
)
def test_commands_work(document, trained, repository, monkeypatch, capsys):
    shown = commands(document)
    monkeypatch.setattr("largebatch.tools.verify.table.verify", plan_instead)
    write_own_recipe(document.read_text())
    if any("images/train" in command for command in shown):
        write_own_data()
    if any("runs/gpt_pydoc" in command for command in shown):
        shutil.copytree(trained, repository / "runs/gpt_pydoc")
    for command in shown:
        # What is printed is compared there.
        if command in COMPARED:
            continue
        if changed := re.fullmatch(r"cd ([\w./]+)", command):
            monkeypatch.chdir(changed[1])
            continue
        # An error that is shown is compared word by word in test_readme.
        code = 2 if f"$ {command}\nerror:" in document.read_text() else 0
        for program, *words in calls_of(command):
            name = words[0] if program == "largebatch" else program
            if name in CHECKS:
                CHECKS[name](words)
            elif name == "submit":
                # The image that enroot, which has a stand-in, would have made.
                (repository.parent / "carried").mkdir(exist_ok=True)
                (repository.parent / "carried/largebatch.sqsh").touch()
                # The environment of the user's project.
                Path(".venv/bin").mkdir(parents=True, exist_ok=True)
                Path(".venv/bin/activate").touch()
                # Its data cannot be looked at, without a hub; what stands in the way before that is "not submitted".
                with monkeypatch.context() as patched:
                    patched.setattr(sys, "executable", "false")
                    assert main(words) in (0, 1), command
                assert "\nnot submitted\n" not in capsys.readouterr().out, command
            elif program == "largebatch":
                assert main(words) == code, command


@pytest.mark.slow
def test_the_optimizer_of_contributing_is_one_like_the_others(tmp_path, monkeypatch):
    """Its files and commands, in a copy; of the strategies that it compares, one, which is not resumed."""
    text = CONTRIBUTING.read_text()
    for folder in ("src/largebatch", "recipes", "ds_configs"):
        shutil.copytree(ROOT / folder, tmp_path / folder)
    (tmp_path / "docs").mkdir()
    for name, code in re.findall(r"(?ms)^```python\n# (\S+)\n(.*?)^```$", text):
        (tmp_path / name).write_text(code)
    shipped = tmp_path / "src/largebatch/config/optimizers/shipped.py"
    listed = "from largebatch.config.optimizers.sgdw import SGDW\n\nSHIPPED = (*SHIPPED, SGDW)\n"
    shipped.write_text(shipped.read_text() + listed)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "src"))
    (block,) = re.findall(r"(?ms)^```shell\n(.*?)^```$", text)
    for line in block.splitlines():
        command = line.replace("$ largebatch", f"{sys.executable} -m largebatch").replace(
            "ddp,fsdp,zero2", "fsdp --no-resume"
        )
        result = subprocess.run(["bash", "-c", command], cwd=tmp_path, capture_output=True, text=True)
        assert result.returncode == 0, f"{command}\n{result.stdout}{result.stderr}"
    assert re.search(r"(?m)^fsdp .* agrees$", result.stdout)


UNITS = {"epochs", "steps", "samples", "tokens"}
# What is known to be faster or slower only on GPUs.
FOR_MEASUREMENTS = {".compute.cudnn_attention", ".compute.gather_in_bf16"}


def options_of(command):
    """The options of a command, and so the fields that it overrides, by dotted name."""
    found = {}
    for word, following in pairwise([*shlex.split(command.replace("\\\n", ""), comments=True), ""]):
        name, equals, text = word.partition("=")
        if name.startswith("--"):
            found[name[2:]] = text if equals else following
            with suppress(ValueError):
                found[name[2:]] = json.loads(found[name[2:]])
    return found


def overriding_blocks(document):
    """The fields that are shown as parts of a recipe's JSON, by dotted name."""
    blocks = re.findall(r'(?ms)^```json\n(".*?)^```$', document.read_text())
    return [json.loads(f"{{{block}}}") for block in blocks]


def names_in(value, path):
    """The paths of all fields of a JSON value, and the words that they hold."""
    if isinstance(value, dict):
        for name, each in value.items():
            yield f"{path}.{name}"
            yield from names_in(each, f"{path}.{name}")
    elif isinstance(value, list):
        for each in value:
            yield from names_in(each, path)
    elif isinstance(value, str):
        yield f"{path}={value}"


def names_of(schema, field, path):
    """The same for all fields that a schema knows, and for the words that tell kinds of sections apart."""
    if "$ref" in field:
        field = schema["$defs"][field["$ref"].rpartition("/")[2]]
    for option in [*field.get("anyOf", ()), *field.get("oneOf", ()), *([field["items"]] if "items" in field else [])]:
        yield from names_of(schema, option, path)
    for name, each in field.get("properties", {}).items():
        if isinstance(each.get("const"), str) and name in field.get("required", ()):
            yield f"{path}.{name}={each['const']}"
        if name not in UNITS:
            yield f"{path}.{name}"
        yield from names_of(schema, each, f"{path}.{name}")


def test_every_field_has_a_user():
    """In a shipped recipe, or in a command or a part of a recipe that a page shows and a test runs."""
    known = set()
    used = set()
    for schema in map(json.loads, (path.read_text() for path in ROOT.glob("recipes/*/recipe.schema.json"))):
        known |= set(names_of(schema, schema, ""))
    for recipe in RECIPES:
        used |= set(names_in(json.loads(recipe.read_text()), ""))
    for document in DOCUMENTS:
        shown = [*map(options_of, commands(document)), *overriding_blocks(document)]
        for name, value in chain.from_iterable(each.items() for each in shown):
            used |= set(accumulate(name.split("."), "{}.{}".format, initial=""))
            used |= set(names_in(value, f".{name}"))
    assert sorted(known - used - FOR_MEASUREMENTS) == []


# That of a mixture has no epochs.
IN_SAMPLES = ("--train.duration", '{"samples": 1000000000}', "--evaluation.every=null", "--checkpoint.every=null")


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_shown_parts_are_those_of_a_recipe(document):
    """Of one of the recipes, whose other fields they fit; those of an own task are in that page's test."""
    likely_first = sorted(RECIPES, key=lambda recipe: recipe.parent != document.parent)
    for part in overriding_blocks(document) if document.name not in ("cookbook.md", "getting_started.md") else ():
        problems = []
        for recipe in likely_first:
            try:
                load_config(recipe, [*IN_SAMPLES, *override_words(part)])
                break
            except ConfigError as error:
                problems.append(str(error))
        else:
            pytest.fail(min(problems, key=len))
