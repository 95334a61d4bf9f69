"""`largebatch prepare`: what it prints, writes and refuses."""

import errno
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import tasks
from largebatch.config import load_config
from largebatch.data import preparation, prepared
from largebatch.data.loading import check_sizes
from largebatch.errors import DataError
from paths import ADDITION, CIFAR, CLIP_B32, CLIP_DIGITS, EMBED_PYDOC, ROOT
from pictures import png, write_parquet
from played import run_bash
from small_data import rows_in

pytestmark = pytest.mark.usefixtures("recipe")


@pytest.fixture
def recipe(project, monkeypatch):
    """A recipe on twelve documents of eleven bytes, with their ends 144 tokens, that asks for more than there are."""
    monkeypatch.setattr(prepared, "HF_HOME", str(project / "cache"))
    rows = [json.dumps({"text": f"document {number:02d}"}) + "\n" for number in range(12)]
    (project / "text.jsonl").write_text("".join(rows))
    path = project / "recipes/causal_lm/mine.json"
    content = json.loads((ROOT / "recipes/causal_lm/gpt_pydoc.json").read_text())
    content["data"] = {
        "source": "datasets",
        "path": "json",
        "data_files": {"train": "text.jsonl", "eval": "text.jsonl"},
        "tokenizer": "bytes",
        "block_size": 8,
        "num_train_samples": 3200,
        "num_eval_samples": 100,
    }
    content["batch"] = {"global_batch_size": 4, "micro_batch_size": 2}
    content["train"]["duration"] = {"steps": 100}
    path.write_text(json.dumps(content, indent=2))
    return path


def test_it_says_how_many_samples_there_are_and_writes_them(recipe, run_command, output_of):
    code, output, error = run_command("prepare", "mine", "--workers=1")
    assert code == 2
    assert re.search(r"data\.num_train_samples +17 samples found; the recipe expects 3,200\n", output)
    assert error.endswith(f"error: {refusal_of_a_run(recipe)}\n")
    content = json.loads(recipe.read_text())
    output_of("prepare", "mine", "--workers=1", "--write")
    content["data"] |= {"num_train_samples": 17, "num_eval_samples": 17}
    assert recipe.read_text() == json.dumps(content, indent=2) + "\n"
    assert "checksums agree, and each sample can be read\n" in output_of("prepare", "mine", "--check")
    assert "17 samples found; the recipe expects 17" in output_of("prepare", "mine")


@pytest.mark.parametrize("batch", [4, 18])
def test_numbers_that_contradict_the_rest_are_written_first(batch, recipe, run_command):
    content = json.loads(recipe.read_text())
    content["data"]["num_train_samples"] = 3
    content["batch"]["global_batch_size"] = batch
    recipe.write_text(json.dumps(content))
    code, _, error = run_command("prepare", "mine", "--workers=1", "--write")
    assert f"- batch.global_batch_size: {batch} is more than the 3 training samples; " in error
    assert json.loads(recipe.read_text())["data"]["num_train_samples"] == 17
    # More than the data has stays wrong.
    assert code == (0 if batch == 4 else 2)
    assert ("18 is more than the 17 training samples; write fewer, or correct" in error) is (batch == 18)


def test_what_a_tasks_code_relies_on_is_told_as_by_a_run(run_command):
    """Images of classes need the settings of the images that are trained on, and digits have none."""
    images = '--zero_shot.images={"path": "imagefolder", "files": "none/*.png"}'
    code, _, error = run_command("prepare", CLIP_DIGITS, images)
    assert code == 2
    problem = error[error.index("warning: ") + len("warning: ") : error.index("\nits data is read all the same\n")]
    assert error.endswith(f"error: {problem}\n")


@pytest.mark.parametrize("split", ["train", "eval"])
def test_no_samples_are_no_number_to_write(split, recipe, run_command):
    Path("short.jsonl").write_text('{"text": "short"}\n')
    content = recipe.read_text().replace(f'"{split}": "text', f'"{split}": "short')
    recipe.write_text(content)
    code, _, error = run_command("prepare", "mine", "--workers=1", "--write")
    assert code == 2
    assert f"error: data.num_{split}_samples: the data has no whole sample" in error
    assert recipe.read_text() == content


def refusal_of_a_run(recipe, *words):
    """What a run says when it opens the recipe's data."""
    config = load_config(recipe, words)
    with pytest.raises(DataError) as caught:
        check_sizes(tasks.sources(config.task)(config), config.data)
    return str(caught.value)


def words_with(data, num_train_samples, num_eval_samples):
    """Overrides with a section of data, and with a batch and a rate that a few samples are enough for."""
    settings = {
        "data": data | {"num_train_samples": num_train_samples, "num_eval_samples": num_eval_samples},
        "batch": {"global_batch_size": 2, "micro_batch_size": 1},
        "learning_rate.warmup": None,
        "learning_rate.decay": {"name": "constant"},
    }
    return [f"--{name}={json.dumps(value)}" for name, value in settings.items()]


BLACK = png(np.zeros((32, 32, 3), np.uint8))


def test_it_decodes_each_image_when_asked_and_names_those_that_it_cannot(output_of, run_command):
    files = [BLACK] * 4
    write_parquet(Path("whole.parquet"), files, [0, 1] * 2)
    files[1] = b""
    files[3] = png(np.arange(3 * 32 * 32, dtype=np.uint8).reshape(32, 32, 3))[:90]
    write_parquet(Path("broken.parquet"), files, [0, 1] * 2)
    data = {"source": "datasets", "path": "parquet", "data_files": {"train": "broken.parquet", "eval": "whole.parquet"}}
    words = ["prepare", CIFAR, *words_with(data | OF_IMAGES, 4, 4)]
    output_of(*words)
    code, output, error = run_command(*words, "--check")
    assert code == 2
    assert "each sample can be read" not in output
    assert "error: 2 samples cannot be read:\n" in error
    assert re.findall(r"- training sample (\d): the image of sample \d cannot be decoded", error) == ["1", "3"]
    output_of(*words, "--check", "--data.data_files.train=whole.parquet")


@pytest.mark.slow
def test_it_prints_no_warnings_of_datasets(project):
    """As of one file for two processes."""
    command = [sys.executable, "-m", "largebatch", "prepare", "mine", "--workers=2", "--write"]
    environment = os.environ | {"HF_HOME": str(project / "cache")}
    told = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert "Generating train split" in told.stderr
    assert "num_proc" not in told.stderr


def test_it_names_samples_at_which_a_tasks_own_code_fails(monkeypatch, output_of, run_command):
    """Whatever it raises, and before any is shown: loader processes would share files that `fetch` has opened."""
    output_of("new", "made", "--task", "own")
    monkeypatch.chdir("made")
    recipe = Path("recipes/own/own.json")
    data = recipe.with_name("data.py")
    data.write_text(f"{data.read_text()}\n{FAILS_AT_THREE}")
    code, _, error = run_command("prepare", recipe, "--check", "--show=1", "--workers=2")
    assert code == 2
    problems = ["training sample 3: no number (ValueError)", "evaluation sample 3: no number (ValueError)"]
    assert re.findall(r"- (.*)", error) == problems


FAILS_AT_THREE = """
opened = sources


def sources(config, preparation):
    for source in (found := opened(config, preparation)):
        source.__class__.fetch = failing(source.__class__.fetch)
    return found


def failing(fetch):
    def failing_fetch(self, indices, epoch):
        if 3 in indices:
            raise ValueError("no number")
        return fetch(self, indices, epoch)

    return failing_fetch
"""

COLORS = {"mean": [0.5, 0.5, 0.5], "std": [0.5, 0.5, 0.5]}
OF_IMAGES = {"image_size": 32, "num_classes": 2, "train_augmentation": "none", **COLORS}


@pytest.mark.parametrize(
    ("shipped", "path", "files", "fields", "words"),
    [
        (CIFAR, "parquet", "images.parquet", OF_IMAGES, []),
        (
            CLIP_B32,
            "csv",
            "images.csv",
            {"tokenizer": "bytes", "max_tokens": 8, "image_size": 32, **COLORS},
            ["--model.vocab_size=256", "--model.end_of_text=0"],
        ),
        (EMBED_PYDOC, "json", "pairs.jsonl", {"source": "texts", "max_tokens": 8}, ["--model.vocab_size=256"]),
    ],
)
@pytest.mark.parametrize("asked", [3, 5])
def test_other_numbers_than_the_recipe_says_are_refused_as_by_a_run(
    shipped, path, files, fields, words, asked, run_command
):
    """In all data whose rows are used as they are: more rows are as wrong as fewer."""
    Path("black.png").write_bytes(BLACK)
    Path("images.csv").write_text("image,caption\n" + "black.png,night\n" * 4)
    Path("pairs.jsonl").write_text('{"query": "a", "positive": "b"}\n' * 4)
    write_parquet(Path("images.parquet"), [BLACK] * 4, [0, 1] * 2)
    data = {"source": "datasets", "path": path, "data_files": {"train": files, "eval": files}, **fields}
    words = [*words_with(data, asked, 4), *words]
    code, _, error = run_command("prepare", shipped, "--workers=1", *words)
    assert code == 2
    assert error.endswith(f"error: {refusal_of_a_run(shipped, *words)}\n")
    assert f"data.num_train_samples: the recipe says {asked}, but the data has 4 samples" in error
    # Labels that are no classes of the recipe, too.
    if shipped == CIFAR:
        words.append("--data.num_classes=1")
        _, _, error = run_command("prepare", shipped, "--workers=1", *words)
        assert f"error: {refusal_of_a_run(shipped, *words)}\n" in error


def test_it_says_what_is_skipped(output_of):
    rows = [{"question": "q", "reply": reply} for reply in ("a", "", "b")]
    fields = {"prompt": "{question}", "answer": "{reply}", "tokenizer": "bytes", "block_size": 16, "on_invalid": "skip"}
    words = words_with(rows_in(Path("pairs.jsonl"), rows) | fields, 2, 2)
    output = output_of("prepare", ADDITION, "--workers=1", *words)
    for split in ("training", "evaluation"):
        assert f"\nof 3 {split} rows, 1 cannot be used (the first is row 1: an empty prompt" in output


def test_tokens_are_carried_to_another_machine(project, monkeypatch, output_of):
    """With the documents' files, whose times must stay the same."""
    output_of("prepare", "mine", "--workers=1", "--write")
    (project / "cache").rename(project / "carried")
    monkeypatch.setattr(prepared, "HF_HOME", str(project / "carried"))
    shutil.copy2("text.jsonl", "copy.jsonl")
    Path("copy.jsonl").replace("text.jsonl")
    with monkeypatch.context() as without_hub:
        without_hub.setattr(prepared, "open_splits", None)
        output_of("prepare", "mine")
    os.utime("text.jsonl")
    assert "must still be prepared" in output_of("prepare", "mine", "--dry-run")


def test_a_full_disk_leaves_the_recipe_as_it_was(recipe, run_command, monkeypatch):
    before = recipe.read_bytes()
    link = recipe.with_name("link.json")
    link.symlink_to(recipe)
    recipe.chmod(0o640)
    run_command("prepare", link, "--workers=1")
    with monkeypatch.context() as context:
        context.setattr("largebatch.storage.files.write_file", full_disk)
        code, _, error = run_command("prepare", link, "--write")
    assert code == 74
    assert "No space left on device" in error
    assert recipe.read_bytes() == before
    run_command("prepare", link, "--write")
    assert link.is_symlink()
    assert json.loads(recipe.read_text())["data"]["num_train_samples"] == 17
    assert recipe.stat().st_mode & 0o777 == 0o640


def full_disk(path, _):
    path.write_bytes(b"")
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_a_dry_run_says_what_is_missing_and_prepares_nothing(output_of, run_command):
    words = ("prepare", "mine", "--dry-run")
    assert "0.0 MiB of data must still be prepared: a job does that when it starts; " in output_of(*words)
    code, output, _ = run_command(*words, "--data.prepare=require")
    assert code == 1
    assert "a job would refuse that; run `largebatch prepare recipes/causal_lm/mine.json` first; " in output
    assert not Path("cache/largebatch").exists()
    run_command("prepare", "mine", "--data.block_size=4", "--workers=1")
    code, output, _ = run_command(*words, "--data.prepare=require")
    assert code == 2
    assert "17 samples found; the recipe expects 3,200" in output


def mix(recipe, **files):
    """Give the recipe two sources with the files that it has, or with others."""
    content = json.loads(recipe.read_text())
    sizes = {"num_train_samples": 10, "num_eval_samples": 3}
    shared = {"weight": 1, "data_files": content["data"].pop("data_files"), **sizes}
    sources = [shared | {"name": name} | files.get(name, {}) for name in ("one", "two")]
    content["data"] |= {"num_train_samples": 20, "num_eval_samples": 6, "sources": sources}
    content["evaluation"]["every"] = None
    recipe.write_text(json.dumps(content))


def test_each_source_of_a_mixture(recipe, output_of):
    mix(recipe, two={"eval_split": "validation[:100%]"})
    output = output_of("prepare", "mine", "--workers=1")
    assert re.search(r"one: data\.num_train_samples +17 samples found; the recipe expects 10\n", output)
    assert re.search(r"two: data\.num_eval_samples +17 samples found; the recipe expects 3\n", output)
    output_of("prepare", "mine", "--write")
    data = json.loads(recipe.read_text())["data"]
    assert [source["num_train_samples"] for source in data["sources"]] == [17, 17]
    assert (data["num_train_samples"], data["num_eval_samples"]) == (34, 34)
    assert load_config(recipe).data.sections()["two"].num_eval_samples == 17


def test_a_source_that_fails_is_named_and_the_others_are_prepared(recipe, run_command):
    mix(recipe, one={"data_files": {"train": "lost.jsonl", "eval": "text.jsonl"}})
    before = recipe.read_text()
    code, output, error = run_command("prepare", "mine", "--workers=1", "--write")
    assert code == 2
    assert "error: one: data.data_files.train: no file matches 'lost.jsonl'" in error
    assert "two: data.num_train_samples" in output
    assert recipe.read_text() == before


def test_small_sources_are_not_small_together(recipe, run_command, monkeypatch):
    shutil.copy("text.jsonl", "other.jsonl")
    # Each source has the file twice.
    monkeypatch.setattr(preparation, "MAX_BYTES_IN_A_JOB", 3 * Path("text.jsonl").stat().st_size)
    mix(recipe, two={"data_files": {"train": "other.jsonl", "eval": "other.jsonl"}})
    code, output, _ = run_command("prepare", "mine", "--dry-run")
    assert code == 1
    one, two = output.splitlines()
    assert one.startswith("one: about 0.0 MiB of data must still be prepared: a job does that when it starts")
    assert two.startswith("two: about 0.0 MiB of data must still be prepared: a job would refuse that; run")


def test_an_array_with_gaps_is_refused():
    array = {"ID": "0", "MIN": "0", "MAX": "6", "COUNT": "4"}
    environment = os.environ | {f"SLURM_ARRAY_TASK_{name}": value for name, value in array.items()}
    code, log = run_bash("slurm/prepare.sbatch", "gpt_pydoc", cwd=ROOT, environment=environment)
    assert (code, "the array's indices must be contiguous" in log) == (2, True)


def test_parts_count_from_zero_or_one(output_of, run_command, monkeypatch):
    monkeypatch.setattr("largebatch.data.prepared.MIN_SHARD_BYTES", 30)
    for part in ("1/3", "2/3"):
        assert "others are not finished yet" in output_of("prepare", "mine", "--workers=1", "--shard", part)
    assert "17 samples found" in run_command("prepare", "mine", "--workers=1", "--shard=0/3")[1]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["gpt_pydoc", "--write"], "--write: the numbers of this data follow from the recipe"),
        (["mine", "--write", "--data.block_size=4"], "or are overridden; remove --write"),
        (["mine", "--workers=1", "--data.path=parquet"], "could not be loaded"),
        *(
            (["mine", f"--shard={part}"], "is not a part; write 1/4")
            for part in ("4/3", "1", "1/0", "-1/3", "a/b", f"1/{'9' * 5000}")
        ),
    ],
)
def test_what_is_refused(refusal_of, words, message):
    assert message in refusal_of("prepare", *words)


def test_data_that_needs_no_preparation(output_of):
    output = output_of("prepare", "resnet_digits", "--workers=1")
    assert "1,437 samples found; the recipe expects 1,437" in output


def test_a_task_without_sources(refusal_of):
    folder = shutil.copytree("recipes/causal_lm", "recipes/other")
    Path(folder, "data.py").write_text("")
    assert "has no attribute 'sources'" in refusal_of("prepare", f"{folder}/gpt_pydoc.json")
