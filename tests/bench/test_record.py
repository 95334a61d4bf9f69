"""bench/record.py: what a record says of its samples."""

import argparse
import json
import math
from dataclasses import replace

import pytest

from record import Comparison, Figure, Record, behind, not_measured, read_record, tables, take_facts, write_record

# By hand: the ratios of ours to raw are 2, 1 and 4, though the medians are equal.
ROUNDS = [{"raw": 1.0, "ours": 2.0}, {"raw": 4.0, "ours": 4.0}, {"raw": 2.0, "ours": 8.0}]
LOOP = Comparison("s", "raw", [*ROUNDS[:2], {"raw": 2.0, "ours": 8.0}])


def record(*comparisons: Comparison, figures: tuple[Figure, ...] = ()) -> Record:
    facts = take_facts(("torch", "no-such-package"))
    return Record("some", "Some", "What it is.", {}, facts, list(comparisons), list(figures))


def test_the_median_is_of_ratios_in_the_same_round():
    assert LOOP.median_ratios() == {"raw": 1.0, "ours": 2.0}
    # The ratio of the medians is another number.
    assert LOOP.median("ours") / LOOP.median("raw") == 2.0
    shifted = replace(LOOP, rounds=[{"raw": 1.0, "ours": 3.0}, {"raw": 5.0, "ours": 5.0}, {"raw": 2.0, "ours": 2.0}])
    assert shifted.median_ratios()["ours"] == 1.0
    assert shifted.median("ours") / shifted.median("raw") == 1.5


def test_the_json_says_the_ratios_by_contender_or_by_case():
    assert json.loads(record(LOOP).to_json())["median_ratio_to_raw"] == {"raw": 1.0, "ours": 2.0}
    cases = [replace(LOOP, case="a"), replace(LOOP, case="b", rounds=[])]
    assert json.loads(record(*cases).to_json())["median_ratio_to_raw"] == {"a": {"raw": 1.0, "ours": 2.0}, "b": {}}


def test_what_is_behind_and_what_is_not_measured():
    fast = replace(LOOP, rounds=[{"raw": 2.0, "ours": 1.0, "slow": 4.0}], limits={"slow": 1.5, "ours": 1.0})
    figures = (
        Figure("tokens", "/s", [1.0, 3.0, 2.0], at_least=2.5),
        Figure("start", "s", [0.4], at_most=0.5),
        Figure("on a GPU", "/s", [], at_least=1.0),
    )
    assert behind(record(LOOP)) == ["ours takes 2.000 times as much as raw"]
    assert behind(record(fast, figures=figures)) == [
        "slow takes 2.000 times as much as raw; the aim is at most 1.5",
        "tokens: 2 /s; the aim is at least 2.5",
    ]
    waiting = replace(LOOP, rounds=[], case="on a GPU, too", limits={"ours": 1.01})
    assert behind(record(waiting)) == []
    assert not_measured(record(waiting)) == ["Some"]
    assert not_measured(record(waiting, figures=figures)) == ["on a GPU, too", "on a GPU"]
    text = "\n".join(tables(record(waiting, figures=figures)))
    assert "| on a GPU, too | ours | not measured yet |  | at most 1.01 |" in text
    assert "| on a GPU | not measured yet | at least 1 |" in text
    assert "| tokens | 2 /s | at least 2.5: **missed** |" in text
    assert math.isnan(waiting.median("ours"))


@pytest.mark.parametrize("alone", [False, True])
def test_writing_and_reading_again(tmp_path, alone):
    written = record(LOOP, figures=(Figure("start", "s", [0.4], at_most=0.5),))
    written.remarks.append("Something was left out.")
    out = tmp_path / "out/a.json"
    write_record(written, argparse.Namespace(results=tmp_path / "some", json=out if alone else None))
    assert read_record(out if alone else tmp_path / "some/cpu.json") == written
    assert written.facts["versions"]["no-such-package"] == "not installed"
    assert (tmp_path / "some").exists() is not alone
    if not alone:
        readme = (tmp_path / "some/README.md").read_text()
        assert readme.startswith("# Some\n\nWhat it is.\n")
        assert "| ours | 4 s | 2.000 (1.500 to 3.000) of raw |  |" in readme
        assert readme.endswith("Something was left out.\n")


def test_a_result_of_another_kind_is_no_record(tmp_path):
    file = tmp_path / "a.json"
    for text in ("[]", '{"rows": 1}'):
        file.write_text(text)
        assert read_record(file) is None
