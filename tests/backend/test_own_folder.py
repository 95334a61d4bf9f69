"""Compiled code, which torch executes, lies in a folder that no other user has made or can write to."""

import os
import tempfile

import pytest

from largebatch.backend.start import _own_folder


@pytest.mark.parametrize(
    "kind", ["none", "own", "a link", pytest.param("of another user", marks=pytest.mark.root), "open to others"]
)
def test_a_folder_of_another_user_is_not_used(tmp_path, monkeypatch, kind):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    there = tmp_path / f"largebatch_{os.getuid()}"
    if kind == "a link":
        (tmp_path / "elsewhere").mkdir()
        there.symlink_to("elsewhere")
    elif kind != "none":
        there.mkdir(mode=0o700)
        there.chmod(0o777 if kind == "open to others" else 0o700)
        if kind == "of another user":
            os.chown(there, 1234, 1234)
    folder = _own_folder()
    assert (folder == there) == (kind in ("none", "own"))
    assert folder.stat().st_uid == os.getuid()
    assert folder.stat().st_mode & 0o777 == 0o700
