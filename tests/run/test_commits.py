"""A run reads the hub's repositories at one commit, from its start to its end and in all that it writes."""

import json
from functools import partial

import pytest

from hub import use
from jobs import run_job, train
from largebatch.config import load_config
from largebatch.config.commits import at_commits, find_commits
from largebatch.data.hub import open_splits
from largebatch.data.preparation import NotPrepared, Preparation
from largebatch.data.tokenizer import load_tokenizer
from largebatch.errors import DataError
from largebatch.model.pretrained import find_folder
from largebatch.storage.layout import read_manifest, read_object
from paths import PYDOC
from tasks import TINY

TEMPLATE = "additional_chat_templates/tools.jinja"

STEPS = ('--train.duration={"steps": 4}', '--evaluation.every={"steps": 4}', "--learning_rate.warmup=null")
WORDS = (*TINY, *STEPS, "--logging.trackers=[]", "--checkpoint.asynchronous=false", "--train.stop_after_steps=2")


def section(**fields):
    common = {"source": "datasets", "tokenizer": "bytes", "block_size": 16, "num_train_samples": 48}
    return "--data=" + json.dumps({**common, "num_eval_samples": 4, **fields})


def files(train):
    evaluation = "".join(f"line {number}\n" for number in range(20))
    return {"train.txt": train.encode(), "validation.txt": evaluation.encode()}


def texts(path):
    config = load_config(PYDOC, [section(path=path), *STEPS])
    train_rows, _ = open_splits(config.data, Preparation())
    return train_rows["text"]


def test_a_commit_is_read_whatever_came_later(hub):
    first = hub.commit("datasets/user/data", files("old\n"))
    second = hub.commit("datasets/user/data", files("new\n"))
    assert texts("user/data") == texts(f"user/data@{second}") == ["new"]
    assert texts(f"user/data@{first}") == ["old"]


def test_another_commit_in_the_cache_is_not_taken_for_it(hub, monkeypatch, tmp_path):
    """`datasets` would take the latest one that it has."""
    first = hub.commit("datasets/user/data", files("old\n"))
    assert texts(f"user/data@{first}") == ["old"]
    second = hub.commit("datasets/user/data", files("new\n"))
    use(monkeypatch, "http://127.0.0.1:9", tmp_path / "home", offline=True)
    assert texts(f"user/data@{first}") == ["old"]
    with pytest.raises(DataError, match=f"{first} is the latest commit of user/data in the cache, not {second}"):
        texts(f"user/data@{second}")


def test_a_job_does_not_download_more_than_it_may(hub):
    commit = hub.commit("datasets/user/data", files("x" * 2**20))
    config = load_config(PYDOC, [section(path=f"user/data@{commit}", prepare="require"), *STEPS])
    with pytest.raises(NotPrepared, match=r"data.prepare: 1.0 MiB would have to be prepared"):
        open_splits(config.data, Preparation())


def test_each_name_gets_its_commit_and_nothing_else_changes(hub, tmp_path):
    data = hub.commit("datasets/user/data", {})
    other = hub.commit("datasets/user/other", {}, "v2")
    tokenizer = hub.commit("models/user/data", {})
    (tmp_path / "local").mkdir()
    sizes = {"weight": 1, "num_train_samples": 24, "num_eval_samples": 2}
    sources = [
        {"name": "inherited", **sizes},
        {"name": "own", "path": "user/other@v2", **sizes},
        {"name": "folder", "path": str(tmp_path / "local"), **sizes},
        {"name": "files", "path": "text", "data_files": {"train": "a.txt", "eval": "b.txt"}, **sizes},
    ]
    totals = {"num_train_samples": 96, "num_eval_samples": 8}
    config = load_config(PYDOC, [section(path="user/data", tokenizer="user/data", sources=sources, **totals), *STEPS])
    commits = find_commits(config, {})
    assert commits == {"datasets/user/data": data, "datasets/user/other@v2": other, "user/data": tokenizer}
    found = at_commits(config, commits)
    own = [source.path for source in found.data.sections().values()]
    assert own == [f"user/data@{data}", f"user/other@{other}", str(tmp_path / "local"), "text"]
    assert {source.tokenizer for source in found.data.sections().values()} == {f"user/data@{tokenizer}"}
    # A run that resumes asks for nothing that is known.
    hub.commit("datasets/user/data", {"new": b""})
    assert find_commits(config, commits) == commits
    assert find_commits(config, {})["datasets/user/data"] != data


def test_a_tokenizer_at_a_commit(hub):
    found = []
    for ids in ({"a": 0, "</s>": 1}, {"a": 0, "b": 1, "</s>": 2}):
        tokenizer = {
            "version": "1.0",
            "added_tokens": [],
            "model": {"type": "WordLevel", "vocab": ids, "unk_token": "a"},
        }
        settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "</s>"}
        content = {"tokenizer.json": tokenizer, "tokenizer_config.json": settings, TEMPLATE: "{{ tools }}"}
        found.append(hub.commit("models/user/t", {name: json.dumps(each).encode() for name, each in content.items()}))
    assert [load_tokenizer(f"user/t@{commit}").vocab_size for commit in found] == [2, 3]
    assert (find_folder(f"user/t@{found[0]}", "data.tokenizer") / TEMPLATE).exists()


def train_with_the_hub(url, *words, run_dir):
    with pytest.MonkeyPatch.context() as patch:
        use(patch, url, run_dir.parent / "home")
        train(PYDOC, *words, run_dir=run_dir)


@pytest.mark.slow
def test_a_run_that_goes_on_reads_what_it_began_with(hub, run_dir, tmp_path):
    first = hub.commit("datasets/user/data", files("".join(f"the text {number}\n" for number in range(200))))
    words = (*WORDS, section(path="user/data"))
    run_job(partial(train_with_the_hub, hub.url, run_dir=run_dir), *words)
    second = hub.commit("datasets/user/data", files("".join(f"other {number}\n" for number in range(300))))
    run_job(partial(train_with_the_hub, hub.url, run_dir=run_dir), *words, "--train.stop_after_steps=4")
    run_job(partial(train_with_the_hub, hub.url, run_dir=tmp_path / "new"), *words)
    for folder, commit in ((run_dir, first), (tmp_path / "new", second)):
        assert read_object(folder / "plan.json")["commits"] == {"datasets/user/data": commit}
    manifest = read_manifest(run_dir / "checkpoints/step_00000004")
    assert manifest.plan["commits"] == {"datasets/user/data": first}
    assert manifest.config["data"]["path"] == "user/data"
