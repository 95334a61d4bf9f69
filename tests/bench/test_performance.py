"""docs/performance.md is what bench/performance.py makes of bench/results, and says where we are behind."""

import json
import re

import performance
from paths import ROOT
from record import Comparison, Figure, Record, take_facts


def test_the_document_is_the_one_that_is_made_of_the_results():
    made = performance.document()
    assert performance.DOCUMENT.read_text(encoding="utf-8") == made, "run bench/performance.py"


def test_what_it_says_of_results(tmp_path):
    facts = take_facts(("torch",))
    rounds = [{"raw": 1.0, "ours": 1.5}]
    figures = [Figure("tokens", "/s", [5.0], at_least=6.0), Figure("on a GPU", "/s", [])]
    loop = Record("loop_tax", "Loop tax", "About it.", {}, facts, [Comparison("s", "raw", rounds)], figures)
    (tmp_path / "loop_tax").mkdir()
    (tmp_path / "loop_tax/cpu.json").write_text(loop.to_json())
    (tmp_path / "by_hand").mkdir()
    (tmp_path / "by_hand/README.md").write_text("# Faults\n\nText.\n")
    (tmp_path / "by_hand/some.json").write_text(json.dumps([1, 2]))
    text = performance.document(tmp_path)
    behind = text.partition("## Where it is behind")[2].partition("\n## ")[0]
    assert "- Loop tax: ours takes 1.500 times as much as raw.\n" in behind
    assert "- Loop tax: tokens: 5 /s; the aim is at least 6." in behind
    waiting = text.partition("## What is not measured yet")[2].partition("\n## ")[0]
    assert "- on a GPU: not measured yet." in waiting
    assert "- `bench/start.py`: not measured yet." in waiting
    assert "loop_tax.py" not in waiting
    assert "- `make gpu` (correctness, ablations, memory, throughput, scaling): no GPU has been used yet." in waiting
    assert "| ours | 1.5 s | 1.500 of raw |  |" in text
    assert text.endswith("## Other measurements\n\n- [Faults](../bench/results/by_hand/README.md)\n")


def test_what_a_gpu_has_given_is_on_the_page(tmp_path):
    figures = [Figure("peak", "GiB", [2.0], at_most=1.0), Figure("zero3", "", [])]
    part = Record("gpu", "Memory on a GPU", "About it.", {}, take_facts(("torch",)), figures=figures)
    (tmp_path / "gpu").mkdir()
    (tmp_path / "gpu/memory.json").write_text(part.to_json())
    text = performance.document(tmp_path)
    assert "- Memory on a GPU: peak: 2 GiB; the aim is at most 1." in text
    assert "- zero3: not measured yet." in text
    assert "- `make gpu` (correctness, ablations, throughput, scaling): not measured yet." in text
    assert "| peak | 2 GiB | at most 1: **missed** |" in text


def test_one_entry_runs_all_programs_and_says_what_they_are():
    makefile, readme = (ROOT / "Makefile").read_text(), (ROOT / "bench/README.md").read_text()
    assert re.search(r"^BENCH \?= (.*)$", makefile, re.MULTILINE).group(1).split() == [*performance.PROGRAMS]
    modules = {"paired.py", "record.py", "performance.py", "checkpoint_job.py"}
    for program in (ROOT / "bench").glob("*.py"):
        assert f"`{program.name}" in readme, program.name
        if program.name not in modules and "add_output_options" in program.read_text():
            assert program.stem in performance.PROGRAMS
