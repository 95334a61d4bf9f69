"""What a checkpoint says of itself is read as it was written, or refused."""

import copy
import json

import pytest

from largebatch.storage.layout import (
    CheckpointError,
    Range,
    overlaps,
    read_manifest,
)

RAW = {
    "format": "largebatch 5",
    "step": 7,
    "attempt": 2,
    "world_size": 2,
    "strategy": "zero2",
    "time": 1.5e9,
    "bad_steps": 1,
    "config": {"seed": 3, "name": "größer"},
    "plan": {"num_steps": 9},
    "parameters": {
        "w": {"shape": [2, 3], "scalars": {"step": 7.0}},
        "scale": {"shape": [], "scalars": {}},
        "nothing": {"shape": [0, 4], "scalars": {}},
    },
    "vectors": {
        "weight/w": [[0, 0, 4], [1, 4, 6]],
        "exp_avg/w": [[1, 0, 6]],
        "weight/scale": [[0, 0, 1]],
        "weight/nothing": [],
    },
    "buffers": {"mean": [0, 1], "mask": [0]},
    "running_statistics": ["mean"],
}


def changed(path, value):
    """The manifest with another value at a place."""
    raw = copy.deepcopy(RAW)
    place = raw
    for name in path[:-1]:
        place = place[name]
    if value is KeyError:
        del place[path[-1]]
    else:
        place[path[-1]] = value
    return raw


@pytest.fixture
def parse(tmp_path):
    """The manifest that a file with this content is."""

    def parse(raw):
        (tmp_path / "manifest.json").write_text(json.dumps(raw))
        return read_manifest(tmp_path)

    return parse


def test_a_manifest_is_written_as_it_was_read(parse):
    written = json.loads(json.dumps(parse(RAW).model_dump(exclude_defaults=True)))
    assert written == RAW
    assert parse(written) == parse(RAW)


@pytest.mark.parametrize(
    ("vector", "ranges"),
    [
        ("weight/w", [[0, 0, 3], [1, 4, 6]]),
        ("weight/w", [[0, 0, 5], [1, 4, 6]]),
        ("weight/w", [[0, 0, 8], [1, 8, 6]]),
        ("weight/w", []),
        ("weight/nothing", [[0, 0, 1]]),
    ],
)
def test_gaps_overlaps_and_other_lengths_are_refused(vector, ranges, parse):
    with pytest.raises(CheckpointError, match=vector):
        parse(changed(["vectors", vector], ranges))


def test_a_parameter_without_weights_is_refused(parse):
    with pytest.raises(CheckpointError, match="the weights of w are missing"):
        parse(changed(["vectors", "weight/w"], KeyError))


@pytest.mark.parametrize(
    ("path", "value"),
    [
        *(([name], KeyError) for name in RAW if name != "format"),
        (["parameters", "w"], KeyError),
        (["parameters", "w", "shape"], [-2, -3]),
        (["parameters", "w", "scalars", "step"], float("nan")),
        (["vectors", "weight/w"], [[0, 0, 6.0]]),
        (["vectors", "weight/w"], [[-1, 0, 6]]),
        (["buffers", "mean"], []),
        (["step"], "7"),
    ],
)
def test_what_has_another_form_is_refused(path, value, parse):
    with pytest.raises(CheckpointError):
        parse(changed(path, value))


@pytest.mark.parametrize("raw", [{}, {"format": "largebatch checkpoint 1", "step": "many"}])
def test_other_formats_are_refused_in_one_line_whatever_else_is_wrong(raw, parse):
    with pytest.raises(CheckpointError, match=r"its format is .*, not 'largebatch 5'; use the version"):
        parse(raw)


def test_overlaps_are_the_elements_asked_for_and_their_places():
    ranges = [Range(0, 0, 3), Range(1, 3, 3), Range(2, 3, 4), Range(3, 4, 9)]
    assert list(overlaps(ranges, 2, 6)) == [(Range(0, 2, 3), 2), (Range(2, 3, 4), 0), (Range(3, 4, 6), 0)]
    assert list(overlaps(ranges, 5, 9)) == [(Range(3, 5, 9), 1)]
    assert list(overlaps(ranges, 4, 4)) == []


@pytest.mark.parametrize("content", [b"{", b"\xff\xfe", b"[" * 100_000, b"9" * 5000])
def test_what_is_no_json_is_refused(content, tmp_path):
    (tmp_path / "manifest.json").write_bytes(content)
    with pytest.raises(CheckpointError, match=r"manifest\.json cannot be read"):
        read_manifest(tmp_path)


def test_what_is_no_object_is_refused(parse):
    with pytest.raises(CheckpointError, match=r"manifest\.json is not an object"):
        parse([])


def test_what_is_missing_or_a_folder_is_refused(tmp_path):
    with pytest.raises(CheckpointError, match=r"manifest\.json is missing"):
        read_manifest(tmp_path)
    (tmp_path / "manifest.json").mkdir()
    with pytest.raises(CheckpointError, match=r"manifest\.json cannot be read"):
        read_manifest(tmp_path)
