"""docs/performance.md is what bench/performance.py makes of bench/results; a record computes ratios and verdicts."""

import re

import performance
from paths import ROOT
from record import Comparison, Figure, Record, behind, not_measured, take_facts


def test_the_document_is_the_one_that_is_made_of_the_results():
    made = performance.document()
    assert performance.DOCUMENT.read_text(encoding="utf-8") == made, "run bench/performance.py"


def test_one_entry_runs_all_programs_and_says_what_they_are():
    makefile, readme = (ROOT / "Makefile").read_text(), (ROOT / "bench/README.md").read_text()
    assert re.search(r"^BENCH \?= (.*)$", makefile, re.MULTILINE).group(1).split() == [*performance.PROGRAMS]
    modules = {"paired.py", "record.py", "performance.py", "checkpoint_job.py"}
    for program in (ROOT / "bench").glob("*.py"):
        assert f"`{program.name}" in readme, program.name
        if program.name not in modules and "add_output_options" in program.read_text():
            assert program.stem in performance.PROGRAMS


def test_ratios_and_what_misses_its_aim():
    # The ratios are 3, 1 and 1; the ratio of the medians is 1.5.
    rounds = [{"raw": 1.0, "ours": 3.0}, {"raw": 5.0, "ours": 5.0}, {"raw": 2.0, "ours": 2.0}]
    comparison = Comparison("s", "raw", rounds, limits={"ours": 0.5})
    assert comparison.median_ratios() == {"raw": 1.0, "ours": 1.0}
    figures = [
        Figure("tokens", "/s", [1.0, 3.0, 2.0], at_least=2.5),
        Figure("start", "s", [0.4], at_most=0.5),
        Figure("on a GPU", "/s", [], at_least=1.0),
    ]
    record = Record("some", "Some", "What it is.", {}, take_facts(("torch",)), [comparison], figures)
    assert behind(record) == [
        "ours takes 1.000 times as much as raw; the target is at most 0.5",
        "tokens: 2 /s; the target is at least 2.5",
    ]
    assert not_measured(record) == ["on a GPU"]
