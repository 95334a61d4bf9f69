"""Every shipped recipe, copied to stand alone: its files fit together, its commands are right, and it trains."""

import json
import re
import runpy
import shlex
from pathlib import Path

import pytest

from jobs import run_job, train
from largebatch.tools.command_line import main
from largebatch.tools.new.create import create_bundle
from largebatch.tools.new.job import BundledJob
from largebatch.tools.verify.differences import read_run
from paths import RECIPES, ROOT

every_recipe = pytest.mark.parametrize("recipe", RECIPES, ids=lambda path: path.stem)
# One of each task and architecture; the others differ from them in numbers.
TRAINED = [path for path in RECIPES if path.stem in ("bert_large_64k_128", "gpt2_124m", "llama_8b", "sft_qwen_gsm8k")]
TRAINED += [path for path in RECIPES if path.stem in ("resnet50_imagenet_8k", "simclr_resnet50_4k", "vit_s16_imagenet")]
assert len(TRAINED) == 7


@pytest.fixture
def bundle(recipe, tmp_path, monkeypatch):
    """The current folder is the recipe's bundle."""
    folder = tmp_path / "job"
    create_bundle(folder, BundledJob.find(recipe.stem, None), vendor=False)
    monkeypatch.chdir(folder)
    monkeypatch.delenv("STRATEGY", raising=False)
    monkeypatch.delenv("RUN_DIR", raising=False)
    return folder


def command_of_the_readme(name: str) -> list[str]:
    text = Path("README.md").read_text().replace("\\\n", "")
    (command,) = re.findall(rf"^\$ largebatch ({name} .*)$", text, re.MULTILINE)
    return shlex.split(command)


@every_recipe
@pytest.mark.usefixtures("bundle")
def test_lint_finds_nothing(capsys):
    assert main(["lint"]) == 0, capsys.readouterr().out


@every_recipe
@pytest.mark.usefixtures("bundle")
def test_the_job_of_the_readme_can_be_submitted(recipe, capsys):
    words = command_of_the_readme("submit")
    assert main(words) == 0, capsys.readouterr().out
    processes = command_of_the_readme("plan")[-1]
    assert re.search(rf"{recipe.stem} under \w+, .*on {processes} process(es)?\n", capsys.readouterr().out)
    assert main(command_of_the_readme("plan")) == 0


@every_recipe
@pytest.mark.usefixtures("recipe")
def test_links_lead_somewhere(bundle):
    for text in bundle.glob("**/*.md"):
        for link in re.findall(r"\]\(([^)#]+)", text.read_text()):
            assert link.startswith("https://") or (text.parent / link).is_file(), (text, link)


@every_recipe
def test_nothing_local_is_named_that_is_not_copied(bundle, recipe):
    """Copied is the JSON alone: whatever else a recipe names is a hub's."""

    def strings(value):
        if isinstance(value, str):
            yield value
        elif isinstance(value, dict | list):
            for inner in value.values() if isinstance(value, dict) else value:
                yield from strings(inner)

    for text in strings(json.loads(recipe.read_text())):
        for place in (ROOT, recipe.parent):
            if (place / text).exists():
                assert text == "recipe.schema.json"
                assert (bundle / recipe.relative_to(ROOT).parent / text).is_file()


def train_copy(recipe, overrides, run_dir):
    train(recipe, *overrides, run_dir=run_dir)


# Its debug model has the vocabulary of the tokenizer that the recipe names, which takes a minute on a CPU.
SMALL_VOCABULARY = {"sft_qwen_gsm8k": ["--model.config.vocab_size=512"]}


@pytest.mark.slow
@pytest.mark.parametrize("recipe", TRAINED, ids=lambda path: path.stem)
def test_its_test_trains_it(bundle, recipe, tmp_path):
    """With the overrides of the bundle's own test, in one process."""
    overrides = runpy.run_path(str(bundle / "tests/test_recipe.py"))["OVERRIDES"]
    overrides += SMALL_VOCABULARY.get(recipe.stem, [])
    run_job(train_copy, bundle / recipe.relative_to(ROOT), overrides, tmp_path / "run", strategy="single", world_size=1)
    assert [line["step"] for line in read_run(tmp_path / "run").metrics] == [1, 2]
