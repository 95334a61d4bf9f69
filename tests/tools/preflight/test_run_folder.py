"""File systems that cannot do what runs need."""

import errno
import fcntl
import os
from pathlib import Path

import pytest

from largebatch.tools.preflight.run_folder import missing_ability, mount_of

MOUNTS = """\
10.0.0.1:/home /home nfs4 rw 0 0
/dev/sda1 / ext4 rw 0 0
bucket /mnt/my\\040bucket fuse.gcsfuse rw 0 0
mountpoint-s3 /mnt/s3 fuse rw 0 0
"""


@pytest.mark.parametrize(
    ("folder", "mount"),
    [
        ("/home/me/runs", ("10.0.0.1:/home", "nfs4")),
        ("/homework", ("/dev/sda1", "ext4")),
        ("/mnt/my bucket/runs", ("bucket", "fuse.gcsfuse")),
    ],
)
def test_where_a_folder_is_mounted(folder, mount):
    assert mount_of(Path(folder), MOUNTS) == mount


@pytest.mark.parametrize(("folder", "name"), [("/mnt/my bucket/runs", "gcsfuse"), ("/mnt/s3/runs", "mountpoint-s3")])
def test_an_object_store_is_refused_by_name(folder, name):
    problem = missing_ability(Path(folder), "n1", MOUNTS)
    assert f"the run folder is on {name}, which presents an object store as files" in problem
    assert "aws s3 sync, gcloud storage rsync" in problem


def test_this_file_system_has_all(tmp_path):
    assert missing_ability(tmp_path, "n1", MOUNTS) is None
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
    problem = missing_ability(tmp_path, "n1", MOUNTS)
    assert said in problem
    assert "(ext4)" in problem


def test_a_folder_that_cannot_be_written(tmp_path):
    with pytest.raises(OSError, match="No such file"):
        missing_ability(tmp_path / "gone", "n1", MOUNTS)
