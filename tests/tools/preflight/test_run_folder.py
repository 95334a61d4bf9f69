"""File systems that cannot do what runs need."""

import errno
import fcntl
import os
from pathlib import Path

import pytest

from largebatch.tools.preflight.run_folder import missing_ability
from played import write_commands


@pytest.mark.parametrize(
    ("mount", "name"), [("my bucket fuse.gcsfuse", "gcsfuse"), ("mountpoint-s3 fuse", "mountpoint-s3")]
)
def test_an_object_store_is_refused_by_name(mount, name, tmp_path, monkeypatch):
    path = write_commands(tmp_path / "bin", {"df": f"printf 'Filesystem Type\\n{mount}\\n'"})
    monkeypatch.setenv("PATH", path)
    problem = missing_ability(tmp_path, "n1")
    assert f"the run folder is on {name}, which presents an object store as files" in problem
    assert "aws s3 sync, gcloud storage rsync" in problem


def test_this_file_system_has_all(tmp_path):
    assert missing_ability(tmp_path, "n1") is None
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("module", "name", "said"),
    [
        (fcntl, "flock", "not support locks (flock): Function not implemented; mount it with locks (Lustre"),
        (Path, "hardlink_to", "not support hard links: Function not implemented; set RUN_DIR to another file system"),
        (Path, "rename", "not support renaming a file over another: Function not implemented; set RUN_DIR"),
    ],
)
def test_what_is_missing_is_named(module, name, said, tmp_path, monkeypatch):
    def missing(*_, **__):
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))

    monkeypatch.setattr(module, name, missing)
    problem = missing_ability(tmp_path, "n1")
    assert said in problem
    assert "(unknown)" not in problem


def test_a_folder_that_cannot_be_written(tmp_path):
    with pytest.raises(OSError, match="No such file"):
        missing_ability(tmp_path / "gone", "n1")
