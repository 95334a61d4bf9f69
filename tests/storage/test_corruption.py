"""Whatever happens to a file of a checkpoint that was complete is found."""

import os
import pickle
import shutil

import pytest

from largebatch.storage.catalog import entries, read_marker
from saving import Bomb, FakeRun, checksum_problem

FILES = ["rank_00000.safetensors", "manifest.json", "complete.json", "model_config.json"]


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    run = FakeRun(tmp_path_factory.mktemp("written") / "run")
    path = run.save(7)
    assert run.warnings == []
    return path


@pytest.fixture
def checkpoint(written, tmp_path):
    return shutil.copytree(written, tmp_path / "checkpoints/step_00000007")


def problem_of(checkpoint):
    (entry,) = entries(checkpoint.parent)
    assert entry.path == checkpoint
    return entry.problem or checksum_problem(checkpoint)


@pytest.mark.parametrize("file", FILES)
def test_a_file_of_another_content_or_none(file, checkpoint, tmp_path):
    content = (checkpoint / file).read_bytes()
    cut = [content[: int(len(content) * part)] for part in (0.0, 0.3, 0.9)]
    pickled = pickle.dumps(Bomb(tmp_path / "exploded"))
    flipped = content[:-2] + bytes([content[-2] ^ 1]) + content[-1:]
    for other in (*cut, content.rstrip()[:-1], content + b"\0", flipped, pickled):
        (checkpoint / file).write_bytes(other)
        assert problem_of(checkpoint) is not None
    # A sparse file, which would take minutes to read.
    os.truncate(checkpoint / file, 2**40)
    assert problem_of(checkpoint) is not None
    assert not (tmp_path / "exploded").exists()
    (checkpoint / file).unlink()
    assert file in problem_of(checkpoint)


def test_any_changed_byte_of_the_marker_is_found_or_without_meaning(checkpoint):
    path = checkpoint / "complete.json"
    content = bytearray(path.read_bytes())
    records = read_marker(checkpoint)
    harmless = []
    for place in range(len(content)):
        content[place] ^= 1
        path.write_bytes(content)
        if problem_of(checkpoint) is None:
            assert read_marker(checkpoint) == records
            harmless.append(place)
        content[place] ^= 1
    # Of `"step": 7,` the name and the number are for people.
    step = content.index(b'"step"')
    assert [place for place in harmless if not step <= place <= step + len(b'"step": 7')] == []
