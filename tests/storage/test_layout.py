"""What a checkpoint says of itself is read as it was written, or refused."""

import copy
import itertools
import json

import pytest

from largebatch.storage.layout import (
    CheckpointError,
    Manifest,
    Range,
    check_file_names,
    folder_name,
    overlaps,
    rank_file,
    read_json,
    read_manifest,
    temporary_name,
)

FIRST = "rank_00000.safetensors"
SECOND = "rank_00001.safetensors"
RAW = {
    "format": "largebatch 3",
    "step": 7,
    "attempt": 2,
    "world_size": 2,
    "strategy": "zero2",
    "time": 1.5e9,
    "bad_steps": 1,
    "config": {"seed": 3, "name": "größer"},
    "plan": {"num_steps": 9},
    "files": [FIRST, SECOND],
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
NO_FILES = [
    "../x",
    "/etc/passwd",
    "",
    "rank_0.safetensors",
    "rank_00000.safetensors\n",
    "rank_00000xsafetensors",
    "complete.json",
    3,
]


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


def test_a_manifest_written_by_hand_is_read():
    manifest = Manifest.from_json(RAW)
    assert (manifest.step, manifest.attempt, manifest.world_size, manifest.strategy) == (7, 2, 2, "zero2")
    assert (manifest.bad_steps, manifest.time) == (1, 1.5e9)
    assert manifest.config == {"seed": 3, "name": "größer"}
    assert manifest.plan == {"num_steps": 9}
    assert manifest.vectors["weight/w"] == (Range(0, 0, 4), Range(1, 4, 6))
    assert manifest.vectors["exp_avg/w"] == (Range(1, 0, 6),)
    assert manifest.files == (FIRST, SECOND)
    assert manifest.buffers == {"mean": (0, 1), "mask": (0,)}
    assert manifest.running_statistics == ("mean",)
    assert manifest.parameters["w"].scalars == {"step": 7.0}
    assert [info.shape for info in manifest.parameters.values()] == [(2, 3), (), (0, 4)]


def test_a_manifest_is_written_as_it_was_read():
    text = json.dumps(Manifest.from_json(RAW).model_dump(exclude_defaults=True))
    assert json.loads(text) == RAW
    assert Manifest.from_json(json.loads(text)) == Manifest.from_json(RAW)


@pytest.mark.parametrize(
    ("vector", "ranges"),
    [
        ("weight/w", [[0, 0, 3], [1, 4, 6]]),
        ("weight/w", [[0, 0, 5], [1, 4, 6]]),
        ("weight/w", [[1, 4, 6], [0, 0, 4]]),
        ("weight/w", [[0, 1, 6]]),
        ("weight/w", [[0, 0, 7]]),
        ("weight/w", [[0, 0, 8], [1, 8, 6]]),
        ("weight/w", []),
        ("weight/nothing", [[0, 0, 1]]),
        ("exp_avg/w", [[1, 0, 4]]),
    ],
)
def test_gaps_overlaps_and_other_lengths_are_refused(vector, ranges):
    with pytest.raises(CheckpointError, match=f"{vector}"):
        Manifest.from_json(changed(["vectors", vector], ranges))


def test_a_parameter_without_weights_is_refused():
    with pytest.raises(CheckpointError, match="the weights of w are missing"):
        Manifest.from_json(changed(["vectors", "weight/w"], KeyError))


@pytest.mark.parametrize(
    ("path", "value"),
    [
        *(([name], KeyError) for name in RAW if name != "format"),
        (["files"], [FIRST]),
        (["parameters", "w"], KeyError),
        (["parameters", "w", "shape"], [-2, -3]),
        (["parameters", "w", "scalars", "step"], float("nan")),
        (["vectors", "weight/w"], [[0, 0]]),
        (["vectors", "weight/w"], [[0, 0, "6"]]),
        (["vectors", "weight/w"], [[0, 0, 6.0]]),
        (["vectors", "weight/w"], [[2, 0, 6]]),
        (["vectors", "weight/w"], [[-1, 0, 6]]),
        (["buffers", "mean"], [2]),
        (["buffers", "mean"], []),
        (["step"], "7"),
        (["config"], []),
    ],
)
def test_what_has_another_form_is_refused(path, value):
    with pytest.raises(CheckpointError):
        Manifest.from_json(changed(path, value))


@pytest.mark.parametrize("raw", [None, [], "largebatch", {}, {"format": "largebatch checkpoint 1", "step": "many"}])
def test_other_formats_are_refused_in_one_line_whatever_else_is_wrong(raw):
    with pytest.raises(CheckpointError, match=r"its format is .*, not 'largebatch 3'; use the version"):
        Manifest.from_json(raw)


@pytest.mark.parametrize("name", NO_FILES)
def test_names_that_are_no_files_of_a_checkpoint_are_refused(name):
    with pytest.raises(CheckpointError, match="which is not a checkpoint's"):
        check_file_names([FIRST, name])
    with pytest.raises(CheckpointError, match=r"which is not a checkpoint's|files\.1: "):
        Manifest.from_json({**RAW, "files": [FIRST, name]})


def test_overlaps_are_the_elements_asked_for_and_their_places():
    bounds = [0, 3, 3, 4, 9, 12]
    ranges = [Range(number, *pair) for number, pair in enumerate(itertools.pairwise(bounds))]
    elements = [(part.file, place) for part in ranges for place in range(part.stop - part.start)]
    for start in range(13):
        for stop in range(start, 13):
            found = [
                (part.start + offset, part.file, place + offset)
                for part, place in overlaps(ranges, start, stop)
                for offset in range(part.stop - part.start)
            ]
            assert found == [(element, *elements[element]) for element in range(start, stop)]


def test_names():
    assert folder_name(400) == "step_00000400"
    assert folder_name(1_234_567_890) == "step_1234567890"
    assert rank_file(12) == "rank_00012.safetensors"
    assert temporary_name(600, "0002_5e1f0a3b", "tmp") == ".step_00000600.attempt_0002_5e1f0a3b.tmp"


@pytest.mark.parametrize(
    "content", [b"", b"{", b'{"a": 1} x', b"\x80\x04}q\x00.", b"\xff\xfe", b"[" * 100_000, b"9" * 5000]
)
def test_what_is_no_json_is_refused(content, tmp_path):
    (tmp_path / "manifest.json").write_bytes(content)
    with pytest.raises(CheckpointError, match=r"manifest\.json cannot be read"):
        read_json(tmp_path / "manifest.json")
    with pytest.raises(CheckpointError, match=r"manifest\.json cannot be read"):
        read_manifest(tmp_path)


def test_what_is_missing_or_a_folder_is_refused(tmp_path):
    with pytest.raises(CheckpointError, match=r"manifest\.json is missing"):
        read_manifest(tmp_path)
    (tmp_path / "manifest.json").mkdir()
    with pytest.raises(CheckpointError, match=r"manifest\.json cannot be read"):
        read_manifest(tmp_path)


def test_a_manifest_in_a_folder_is_read(tmp_path):
    (tmp_path / "manifest.json").write_text(json.dumps(RAW, ensure_ascii=False), encoding="utf-8")
    assert read_manifest(tmp_path) == Manifest.from_json(RAW)
