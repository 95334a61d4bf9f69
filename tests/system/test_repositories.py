"""Names of repositories on the hub, and the commits that they stand for."""

import pytest

from largebatch.errors import UserError
from largebatch.system.repositories import Place, commit_of, find

COMMIT = "0123456789abcdef0123456789abcdef01234567"


def test_folders_and_ids(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "user/data@v1").mkdir(parents=True)
    assert find("user/data@v1", "data.path") == Place("user/data@v1", None)
    assert find("user/data@v2", "data.path") == Place("user/data", "v2")
    assert find("user/data", "data.path") == Place("user/data", "main")
    with pytest.raises(
        UserError, match=r"data.path: there is no folder './data' \(relative to .*; write a local folder"
    ):
        find("./data", "data.path")


def test_a_branch_is_the_commit_that_it_has_now(hub):
    first = hub.commit("datasets/user/data", {"a.txt": b"1"})
    tagged = hub.commit("datasets/user/data", {"a.txt": b"2"}, "v2")
    assert commit_of(Place("user/data", "main"), "dataset", "data.path") == first
    assert commit_of(Place("user/data", "v2"), "dataset", "data.path") == tagged
    moved = hub.commit("datasets/user/data", {"a.txt": b"3"})
    assert commit_of(Place("user/data", "main"), "dataset", "data.path") == moved
    # Without a question.
    assert commit_of(Place("nobody/nothing", COMMIT), "model", "model.path") == COMMIT


def test_without_the_hub_it_is_as_it_was_last_seen(hub, monkeypatch, tmp_path):
    commit = hub.commit("models/user/model", {"config.json": b"{}"}, "refs/pr/1")
    assert commit_of(Place("user/model", "refs/pr/1"), "model", "model.path") == commit
    # One that another program has seen.
    other = tmp_path / "home/hub/models--user--other/refs/main"
    other.parent.mkdir(parents=True)
    other.write_text(COMMIT)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://127.0.0.1:9")
    assert commit_of(Place("user/model", "refs/pr/1"), "model", "model.path") == commit
    assert commit_of(Place("user/other", "main"), "model", "model.path") == COMMIT
    with pytest.raises(UserError, match=r"data.path: the commit of user/model@main could not be found: .*prepare"):
        commit_of(Place("user/model", "main"), "dataset", "data.path")


def test_what_the_hub_has_no_more_is_not_taken_from_memory(hub):
    hub.commit("datasets/user/data", {}, "old")
    commit_of(Place("user/data", "old"), "dataset", "data.path")
    hub.remove_branch("datasets/user/data", "old")
    with pytest.raises(UserError, match="the commit of user/data@old could not be found"):
        commit_of(Place("user/data", "old"), "dataset", "data.path")
