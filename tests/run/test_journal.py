"""Lines that were written stay, those that training comes to again go, and only the current attempt writes."""

import json

import pytest

from largebatch.errors import TrainingFailed
from largebatch.run.record.journal import Journal
from largebatch.storage.attempts import claim
from largebatch.storage.files import read_json_lines


@pytest.fixture
def journal(tmp_path):
    warnings = []
    yield Journal(tmp_path / "metrics.jsonl", claim(tmp_path / "attempts", {}), warnings.append)
    assert warnings == []


@pytest.fixture
def path(tmp_path):
    return tmp_path / "metrics.jsonl"


def steps(path):
    return [json.loads(text)["step"] for text in path.read_text().splitlines()]


def append_all(journal, *numbers):
    for number in numbers:
        journal.append({"step": number})


def test_lines_are_appended_as_they_come(journal, path):
    for number, text in enumerate(["x", "größer\n\u2028\x85", '"']):
        journal.append({"step": number, "text": text})
        assert path.read_text().endswith("}\n")
        assert len(path.read_bytes().split(b"\n")) == number + 2
    assert [line["text"] for line in read_json_lines(path)] == ["x", "größer\n\u2028\x85", '"']


@pytest.mark.parametrize(("step", "left"), [(9, []), (10, [10])])
def test_lines_of_later_steps_are_left_out(step, left, journal, path):
    append_all(journal, 10, 20, 30)
    assert journal.keep_until(step) == ({"step": left[-1]} if left else {})
    assert steps(path) == left
    append_all(journal, step + 1)
    assert steps(path) == [*left, step + 1]


def test_lines_without_a_step_stay(journal, path):
    path.write_text('{"event": "started"}\n{"step": 3}\n')
    assert journal.keep_until(0) == {"event": "started"}
    assert path.read_text() == '{"event": "started"}\n'


def test_the_latest_of_each_name_is_what_was_left(journal):
    for line in (
        {"step": 1, "loss": 2.0},
        {"step": 2, "far/loss": 3.0},
        {"step": 2, "loss": 1.0},
        {"step": 3, "loss": 0},
    ):
        journal.append(line)
    assert journal.keep_until(2) == {"step": 2, "loss": 1.0, "far/loss": 3.0}


def test_without_a_file_nothing_stays_and_none_is_made(journal, path):
    assert journal.keep_until(5) == {}
    assert read_json_lines(path) == []
    assert not path.exists()


def test_a_last_line_that_was_cut_short_is_left_out_wherever_it_was_cut(journal, path):
    """Or zeros that a crash has left behind the lines."""
    whole = '{"step": 1}\n'
    last = '{"step": 2, "loss": 0.25}'
    for rest in ["\0" * 100, *(last[:length] for length in range(len(last)))]:
        path.write_text(whole + rest)
        assert journal.keep_until(9) == {"step": 1}
        assert path.read_text() == whole
    path.write_text(whole + last)
    assert journal.keep_until(9)["step"] == 2
    append_all(journal, 3)
    assert steps(path) == [1, 2, 3]


def test_a_stale_attempt_writes_nothing(tmp_path, journal, path):
    append_all(journal, 1)
    later = Journal(path, claim(tmp_path / "attempts", {}), print)
    for number in (2, 3):
        with pytest.raises(TrainingFailed, match=r"attempt 2 on .* has taken over"):
            append_all(journal, number)
    assert steps(path) == [1]
    append_all(later, 4)
    assert steps(path) == [1, 4]


def test_lines_that_cannot_be_read_stay_and_cost_no_others(tmp_path):
    path = tmp_path / "metrics.jsonl"
    warnings = []
    path.write_bytes(b'{"step": 1}\n{"st\xff\xfe\n[1]\n{"step": "x"}\n{"step": 2}\n{"step": 3}\n')
    journal = Journal(path, claim(tmp_path / "attempts", {}), warnings.append)
    assert journal.keep_until(2) == {"step": 2}
    assert path.read_bytes() == b'{"step": 1}\n{"st\xff\xfe\n[1]\n{"step": "x"}\n{"step": 2}\n'
    assert len(warnings) == 3
    assert [line["step"] for line in read_json_lines(path)] == [1, 2]
