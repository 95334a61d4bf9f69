"""Who is missing in a hang, from what each process reports."""

import pickle

import pytest

from largebatch.run.watch import hang
from largebatch.run.watch.hang import Collectives, HangReport, Report, compare, report_of

PLACES = ["h1, process 10", "h1, process 11", "h2, process 12", "h2, process 13"]


def entered(number, *, waits=None, group="0", since=5):
    """A process has entered a group's collectives up to `number`, and waits in `waits`."""
    waiting = {} if waits is None else {"waits_in": waits, "operation": f"operation_{group}", "since": since}
    return Collectives(group, f"{group} (all) over gloo", number, **waiting)


def report(*collectives, groups=("0",)):
    return Report(list(groups), list(collectives))


def test_one_has_not_entered():
    # Those that wait have begun others, too.
    ahead, behind = report(entered(14, waits=12)), report(entered(11))
    assert compare({0: ahead, 1: ahead, 2: behind, 3: ahead}, PLACES) == (
        "rank 2 (h2, process 12) had not entered operation_0 number 12 of group 0 (all) over gloo, "
        "in which ranks 0-1, 3 waited"
    )


def test_the_first_collective_of_a_group():
    ahead = report(entered(1, waits=1))
    assert compare({0: ahead, 1: report(), 2: ahead, 3: ahead}, PLACES).startswith("rank 1 (h1, process 11) had not")


def test_one_is_silent():
    ahead = report(entered(12, waits=12))
    text = compare({0: ahead, 1: ahead, 2: ahead}, PLACES)
    assert text.startswith("rank 3 (h2, process 13) wrote no stack: stopped, ")
    assert text.endswith("; ranks 0-2 waited in operation_0 number 12 of group 0 (all) over gloo")


def test_many_are_silent():
    places = [f"h{rank}, process 1" for rank in range(8)]
    assert compare({2: report(entered(1))}, places).startswith("ranks 0-1, 3-7 wrote no stack")


def test_who_waits_for_a_third_is_not_to_blame():
    """Rank 1 waits for rank 0, and ranks 2 and 3, since earlier, for rank 1."""
    reports = {
        0: report(entered(4), groups=["0", "a"]),
        1: report(entered(5, waits=5), entered(6, group="b"), groups=["0", "b"]),
        2: report(entered(7, waits=7, group="b", since=2), groups=["b"]),
        3: report(entered(7, waits=7, group="b", since=3), groups=["b"]),
    }
    assert compare(reports, PLACES).startswith("rank 0 (h1, process 10) had not entered operation_0 number 5")


def test_others_are_no_members():
    reports = {
        0: report(entered(4, waits=4, group="a"), groups=["a"]),
        1: report(entered(3, group="a"), groups=["a"]),
        2: report(entered(9), groups=["0"]),
        3: report(entered(9), groups=["0"]),
    }
    assert compare(reports, PLACES).startswith("rank 1 (h1, process 11) had not entered operation_a")


@pytest.mark.parametrize(
    ("reports", "message"),
    [
        ([report(entered(4, waits=4))] * 4, "all processes had entered operation_0 number 4 of group 0"),
        ([report(entered(4))] * 4, "no process waited in a collective"),
        ([report()] * 4, "torch recorded no collectives"),
    ],
)
def test_nobody_is_missing(reports, message):
    assert compare(dict(enumerate(reports)), PLACES).startswith(message)


def entry(number, *, state="scheduled", retired=False, is_p2p=False, operation="nccl:all_reduce"):
    """As torch 2.13 records it; NCCL's have states."""
    return {
        "process_group": ("0", "default_pg"),
        "profiling_name": operation,
        "collective_seq_id": number,
        "is_p2p": is_p2p,
        "retired": retired,
        "state": state,
        "time_created_ns": 100 + number,
    }


def test_the_records_of_torch():
    nccl = [entry(6, retired=True), entry(7, state="completed"), entry(9), entry(8, state="started")]
    gloo = [entry(2, operation="gloo:barrier", retired=True), entry(90, operation="gloo:send", is_p2p=True)]
    assert report_of([{"entries": nccl}, {"entries": gloo}]).collectives == [
        Collectives("0", "0 (default_pg) over nccl", 9, 8, "all_reduce", 108),
        Collectives("0", "0 (default_pg) over gloo", 2),
    ]


def test_the_reports_of_all_are_awaited_for_some_time(tmp_path, monkeypatch):
    monkeypatch.delenv("LARGEBATCH_LOGS", raising=False)
    dump = pickle.dumps({"entries": [entry(7)]})
    monkeypatch.setattr(hang, "_dumps", lambda: [dump, dump])
    first, second = (HangReport(tmp_path, rank, PLACES[:2]) for rank in (0, 1))
    assert first.explain(0).startswith("rank 1 (h1, process 11) wrote no stack")
    # Nobody is missing, so it does not wait.
    assert second.explain(1e6).startswith("all processes had entered all_reduce number 7 of group 0 (default_pg)")
    assert {path.name for path in tmp_path.iterdir()} == {
        *("rank_00000.json", "fr_0", "host_fr_0"),
        *("rank_00001.json", "fr_1", "host_fr_1"),
    }


def test_a_process_alone_waits_for_nobody(tmp_path):
    assert HangReport(tmp_path, 0, PLACES[:1]).explain(1e6) == "the stack says where it hangs"
