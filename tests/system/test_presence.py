"""Only what the file system says is not there is taken for that."""

import os
from pathlib import Path

import pytest

from largebatch.system.presence import exists, is_folder


def test_what_is_there(tmp_path):
    file = tmp_path / "file"
    file.touch()
    (tmp_path / "link").symlink_to("nowhere")
    (tmp_path / "loop").symlink_to("loop")
    found = [(exists(each), is_folder(each)) for each in (tmp_path, file)]
    assert found == [(True, True), (True, False)]
    for nothing in ("nothing", "file/nothing", "link", "loop"):
        assert not exists(tmp_path / nothing)
        assert not is_folder(tmp_path / nothing)


@pytest.mark.parametrize("ask", [exists, is_folder])
def test_what_cannot_be_told(ask, tmp_path):
    """Root may look into any folder, but no path is so long."""
    with pytest.raises(OSError, match="name too long"):
        ask(tmp_path / ("x" * 300))
    with pytest.raises(OSError, match="name too long"):
        ask(Path("/" + "x/" * os.pathconf("/", "PC_PATH_MAX")))
