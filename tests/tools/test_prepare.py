"""`largebatch prepare`: what it prints, writes and refuses."""

import errno
import json
import os
import re
import shutil
from pathlib import Path

import numpy as np
import pytest

import tasks
from largebatch.__main__ import main
from largebatch.config import load_config
from largebatch.data import preparation, prepared
from largebatch.data.loading import check_sizes
from largebatch.errors import DataError
from paths import ADDITION, CIFAR, CLIP_B32, EMBED_PYDOC, ROOT
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


def test_it_says_how_many_samples_there_are_and_writes_them(recipe, capsys):
    assert main(["prepare", "mine", "--workers=1"]) == 2
    printed = capsys.readouterr()
    assert "data.num_train_samples" in printed.out
    assert "17 samples found; the recipe expects 3,200" in printed.out
    assert printed.err.endswith(f"error: {refusal_of_a_run(recipe)}\n")
    content = json.loads(recipe.read_text())
    assert main(["prepare", "mine", "--workers=1", "--write"]) == 0
    content["data"] |= {"num_train_samples": 17, "num_eval_samples": 17}
    assert recipe.read_text() == json.dumps(content, indent=2) + "\n"
    assert main(["prepare", "mine", "--check"]) == 0
    assert "checksums agree, and each sample can be read\n" in capsys.readouterr().out
    assert main(["prepare", "mine"]) == 0
    assert "17 samples found; the recipe expects 17" in capsys.readouterr().out


def refusal_of_a_run(recipe, *words):
    """What a run says when it opens the recipe's data."""
    config = load_config(recipe, words)
    with pytest.raises(DataError) as caught:
        check_sizes(tasks.sources(config.task)(config), config.data)
    return str(caught.value)


def test_it_decodes_each_image_when_asked_and_names_those_that_it_cannot(capsys):
    broken = [
        (1, b""),
        (4, b"\0\0\0\x18ftypheic"),
        (6, png(np.arange(3 * 32 * 32, dtype=np.uint8).reshape(32, 32, 3))[:90]),
    ]
    files = [png(np.zeros((32, 32, 3), np.uint8))] * 8
    write_parquet(Path("whole.parquet"), files, [0, 1] * 4)
    for index, content in broken:
        files[index] = content
    write_parquet(Path("broken.parquet"), files, [0, 1] * 4)
    data = {"source": "datasets", "path": "parquet", "data_files": {"train": "broken.parquet", "eval": "whole.parquet"}}
    numbers = {"num_train_samples": 8, "num_eval_samples": 8}
    words = [
        f"--data={json.dumps(data | numbers | OF_IMAGES)}",
        '--batch={"global_batch_size": 2, "micro_batch_size": 1}',
    ]
    words += ["--learning_rate.warmup=null", '--learning_rate.decay={"name": "constant"}']
    assert main(["prepare", str(CIFAR), *words]) == 0
    assert main(["prepare", str(CIFAR), "--check", *words]) == 2
    printed = capsys.readouterr()
    assert "error: 3 samples cannot be read:\n" in printed.err
    found = re.findall(r"- training sample (\d): the image of sample \d cannot be decoded", printed.err)
    assert found == ["1", "4", "6"]
    assert "each sample can be read" not in printed.out
    assert main(["prepare", str(CIFAR), "--check", *words, "--data.data_files.train=whole.parquet"]) == 0


def test_it_names_samples_at_which_a_tasks_own_code_fails(monkeypatch, capsys):
    """Whatever it raises, and before any is shown: loader processes would share files that `fetch` has opened."""
    assert main(["new", "made", "--task", "own"]) == 0
    monkeypatch.chdir("made")
    recipe = Path("recipes/own/own.json")
    data = recipe.with_name("data.py")
    data.write_text(f"{data.read_text()}\n{FAILS_AT_THREE}")
    assert main(["prepare", str(recipe), "--check", "--show=1", "--workers=2"]) == 2
    problems = ["training sample 3: no number (ValueError)", "evaluation sample 3: no number (ValueError)"]
    assert re.findall(r"- (.*)", capsys.readouterr().err) == problems


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
    ("shipped", "path", "files", "fields"),
    [
        (CIFAR, "imagefolder", "images/train/*/*", OF_IMAGES),
        (CIFAR, "parquet", "images.parquet", OF_IMAGES),
        (CLIP_B32, "csv", "images.csv", {"tokenizer": "bytes", "max_tokens": 8, "image_size": 32, **COLORS}),
        (EMBED_PYDOC, "json", "pairs.jsonl", {"source": "texts", "max_tokens": 8}),
    ],
)
@pytest.mark.parametrize("asked", [(3, 4), (4, 3), (5, 4)])
def test_other_numbers_than_the_recipe_says_are_refused_as_by_a_run(shipped, path, files, fields, asked, capsys):
    """In all data whose rows are used as they are: more rows are as wrong as fewer."""
    rows = [{"image": f"images/train/{number % 2}/{number}.png", "caption": f"{number}"} for number in range(4)]
    for row in rows:
        file = Path(row["image"])
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(png(np.zeros((32, 32, 3), np.uint8)))
    Path("images.csv").write_text("image,caption\n" + "".join(f"{','.join(row.values())}\n" for row in rows))
    Path("pairs.jsonl").write_text("".join(f'{{"query": "{number}", "positive": "a"}}\n' for number in range(4)))
    write_parquet(Path("images.parquet"), [png(np.zeros((32, 32, 3), np.uint8))] * 4, [0, 1] * 2)
    data = {"source": "datasets", "path": path, "data_files": {"train": files, "eval": files}, **fields}
    settings = {
        "data": data | dict(zip(("num_train_samples", "num_eval_samples"), asked, strict=True)),
        "batch": {"global_batch_size": 2, "micro_batch_size": 1},
        "learning_rate.warmup": None,
        "learning_rate.decay": {"name": "constant"},
        "model.vocab_size": 256,
        "model.end_of_text": 0,
    }
    if shipped == CIFAR:
        settings = {name: value for name, value in settings.items() if not name.startswith("model")}
    if shipped == EMBED_PYDOC:
        settings.pop("model.end_of_text")
    words = [f"--{name}={json.dumps(value)}" for name, value in settings.items()]
    assert main(["prepare", str(shipped), "--workers=1", *words]) == 2
    printed = capsys.readouterr()
    assert printed.err.endswith(f"error: {refusal_of_a_run(shipped, *words)}\n")
    which, number = ("train", asked[0]) if asked[0] != 4 else ("eval", asked[1])
    assert f"data.num_{which}_samples: the recipe says {number}, but the data has 4 samples" in printed.err
    # Labels that are no classes of the recipe, too.
    if shipped == CIFAR:
        words = [*words, "--data.num_classes=1"]
        assert main(["prepare", str(shipped), "--workers=1", *words]) == 2
        assert f"error: {refusal_of_a_run(shipped, *words)}\n" in capsys.readouterr().err


def test_it_says_what_is_skipped(capsys):
    rows = [{"question": "q", "reply": reply} for reply in ("a", "", "b")]
    section = rows_in(Path("pairs.jsonl"), rows) | {"prompt": "{question}", "answer": "{reply}", "tokenizer": "bytes"}
    data = section | {"block_size": 16, "on_invalid": "skip", "num_train_samples": 2, "num_eval_samples": 2}
    settings = {"data": data, "batch": {"global_batch_size": 2, "micro_batch_size": 1}, "learning_rate.warmup": None}
    words = [f"--{name}={json.dumps(value)}" for name, value in settings.items()]
    assert main(["prepare", str(ADDITION), "--workers=1", *words]) == 0
    printed = capsys.readouterr().out
    for split in ("training", "evaluation"):
        assert f"\n1 of 3 {split} pairs has an empty prompt or answer (the first is row 1): skipped\n" in printed


def test_tokens_are_carried_to_another_machine(project, monkeypatch, capsys):
    """With the documents' files, whose times must stay the same."""
    assert main(["prepare", "mine", "--workers=1", "--write"]) == 0
    (project / "cache").rename(project / "carried")
    monkeypatch.setattr(prepared, "HF_HOME", str(project / "carried"))
    shutil.copy2("text.jsonl", "copy.jsonl")
    Path("copy.jsonl").replace("text.jsonl")
    with monkeypatch.context() as without_hub:
        without_hub.setattr(prepared, "open_splits", None)
        assert main(["prepare", "mine"]) == 0
    os.utime("text.jsonl")
    capsys.readouterr()
    assert main(["prepare", "mine", "--dry-run"]) == 0
    assert "must still be prepared" in capsys.readouterr().out


def test_a_full_disk_leaves_the_recipe_as_it_was(recipe, capsys, monkeypatch):
    before = recipe.read_bytes()
    link = recipe.with_name("link.json")
    link.symlink_to(recipe)
    recipe.chmod(0o640)
    assert main(["prepare", str(link), "--workers=1"]) == 2
    with monkeypatch.context() as context:
        context.setattr("largebatch.storage.files.write_file", full_disk)
        assert main(["prepare", str(link), "--write"]) == 74
    assert "No space left on device" in capsys.readouterr().err
    assert recipe.read_bytes() == before
    assert main(["prepare", str(link), "--workers=1", "--write"]) == 0
    assert link.is_symlink()
    assert json.loads(recipe.read_text())["data"]["num_train_samples"] == 17
    assert recipe.stat().st_mode & 0o777 == 0o640


def full_disk(path, _):
    path.write_bytes(b"")
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_a_dry_run_says_what_is_missing_and_prepares_nothing(capsys):
    assert main(["prepare", "mine", "--dry-run"]) == 0
    assert "0.0 MiB of data must still be prepared: a job does that when it starts; " in capsys.readouterr().out
    assert main(["prepare", "mine", "--dry-run", "--data.prepare=require"]) == 1
    refused = "a job would refuse that; run `largebatch prepare recipes/causal_lm/mine.json` first; "
    assert refused in capsys.readouterr().out
    assert not Path("cache/largebatch").exists()
    assert main(["prepare", "mine", "--data.block_size=4", "--workers=1"]) == 2
    capsys.readouterr()
    assert main(["prepare", "mine", "--dry-run", "--data.prepare=require"]) == 2
    assert "17 samples found; the recipe expects 3,200" in capsys.readouterr().out


def mix(recipe, **files):
    """Give the recipe two sources with the files that it has, or with others."""
    content = json.loads(recipe.read_text())
    sizes = {"num_train_samples": 10, "num_eval_samples": 3}
    shared = {"weight": 1, "data_files": content["data"].pop("data_files"), **sizes}
    sources = [shared | {"name": name} | files.get(name, {}) for name in ("one", "two")]
    content["data"] |= {"num_train_samples": 20, "num_eval_samples": 6, "sources": sources}
    content["evaluation"]["every"] = None
    recipe.write_text(json.dumps(content))


def test_each_source_of_a_mixture(recipe, capsys):
    mix(recipe, two={"eval_split": "validation[:100%]"})
    assert main(["prepare", "mine", "--workers=1"]) == 0
    printed = capsys.readouterr().out
    assert re.search(r"one: data\.num_train_samples +17 samples found; the recipe expects 10\n", printed)
    assert re.search(r"two: data\.num_eval_samples +17 samples found; the recipe expects 3\n", printed)
    assert main(["prepare", "mine", "--write"]) == 0
    data = json.loads(recipe.read_text())["data"]
    assert [source["num_train_samples"] for source in data["sources"]] == [17, 17]
    assert (data["num_train_samples"], data["num_eval_samples"]) == (34, 34)
    assert load_config(recipe).data.sections()["two"].num_eval_samples == 17


def test_a_source_that_fails_is_named_and_the_others_are_prepared(recipe, capsys):
    mix(recipe, one={"data_files": {"train": "lost.jsonl", "eval": "text.jsonl"}})
    before = recipe.read_text()
    assert main(["prepare", "mine", "--workers=1", "--write"]) == 2
    printed = capsys.readouterr()
    assert "error: one: data.data_files.train: no file matches 'lost.jsonl'" in printed.err
    assert "two: data.num_train_samples" in printed.out
    assert recipe.read_text() == before


def test_small_sources_are_not_small_together(recipe, capsys, monkeypatch):
    shutil.copy("text.jsonl", "other.jsonl")
    # Each source has the file twice.
    monkeypatch.setattr(preparation, "MAX_BYTES_IN_A_JOB", 3 * Path("text.jsonl").stat().st_size)
    mix(recipe, two={"data_files": {"train": "other.jsonl", "eval": "other.jsonl"}})
    assert main(["prepare", "mine", "--dry-run"]) == 1
    one, two = capsys.readouterr().out.splitlines()
    assert one.startswith("one: about 0.0 MiB of data must still be prepared: a job does that when it starts")
    assert two.startswith("two: about 0.0 MiB of data must still be prepared: a job would refuse that; run")


def test_an_array_with_gaps_is_refused():
    array = {"ID": "0", "MIN": "0", "MAX": "6", "COUNT": "4"}
    environment = os.environ | {f"SLURM_ARRAY_TASK_{name}": value for name, value in array.items()}
    code, log = run_bash("slurm/prepare.sbatch", "gpt_pydoc", cwd=ROOT, environment=environment)
    assert (code, "the array's indices must be contiguous" in log) == (2, True)


def test_parts_count_from_zero_or_one(capsys, monkeypatch):
    monkeypatch.setattr("largebatch.data.prepared.MIN_SHARD_BYTES", 30)
    for part in ("1/3", "2/3"):
        assert main(["prepare", "mine", "--workers=1", "--shard", part]) == 0
        assert "others are not finished yet" in capsys.readouterr().out
    assert main(["prepare", "mine", "--workers=1", "--shard=0/3"]) == 2
    assert "17 samples found" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["gpt_pydoc", "--write"], "--write: the numbers of this data follow from the recipe"),
        (["mine", "--write", "--data.block_size=4"], "or are overridden; remove --write"),
        (["mine", "--workers=1", "--data.path=parquet"], "could not be loaded"),
    ],
)
def test_what_is_refused(capsys, words, message):
    assert main(["prepare", *words]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("part", ["4/3", "1", "1/0", "-1/3", "a/b", f"1/{'9' * 5000}"])
def test_parts_that_do_not_exist(capsys, part):
    with pytest.raises(SystemExit):
        main(["prepare", "mine", f"--shard={part}"])
    assert "is not a part; write 1/4" in capsys.readouterr().err


def test_data_that_needs_no_preparation(capsys):
    assert main(["prepare", "resnet_digits", "--workers=1"]) == 0
    assert "1,437 samples found; the recipe expects 1,437" in capsys.readouterr().out


def test_a_task_without_sources(project, capsys):
    folder = shutil.copytree("recipes/causal_lm", "recipes/other")
    (project / folder / "data.py").write_text("")
    assert main(["prepare", f"{folder}/gpt_pydoc.json"]) == 2
    assert "has no attribute 'sources'" in capsys.readouterr().err
