"""File systems that cannot do what runs need."""

import errno
import fcntl
import os
from pathlib import Path

import pytest

from largebatch.tools.preflight.run_folder import missing_ability


def test_this_file_system_has_all(tmp_path):
    assert missing_ability(tmp_path, "n1") is None
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("module", "name", "said"),
    [
        (fcntl, "flock", "not support locks (flock): Function not implemented; set RUN_DIR to a "),
        (Path, "hardlink_to", "not support hard links: Function not implemented; set RUN_DIR to a "),
        (Path, "rename", "not support renaming a file over another: Function not implemented; set RUN_DIR"),
    ],
)
def test_what_is_missing_is_named(module, name, said, tmp_path, monkeypatch):
    def missing(*_, **__):
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))

    monkeypatch.setattr(module, name, missing)
    assert said in missing_ability(tmp_path, "n1")


def test_a_folder_that_cannot_be_written(tmp_path):
    with pytest.raises(OSError, match="No such file"):
        missing_ability(tmp_path / "gone", "n1")
