"""Which nodes are named, from what the nodes said."""

import pytest

from largebatch.tools.command_line import main
from largebatch.tools.preflight.report import Report, read_reports, report_lines
from largebatch.tools.preflight.verdict import judge

NODES = ["n1", "n2", "n3", "n4"]


def reports(**changes):
    """One good report a node, changed where a node's name is given."""
    return [Report(node, **({"versions": {"torch": "2.13"}} | changes.get(node, {}))) for node in NODES]


def test_nothing_to_say():
    verdict = judge(reports(), NODES)
    assert (verdict.bad_nodes, verdict.problems, verdict.notes) == ({}, [], [])


def test_a_node_that_does_not_answer():
    assert judge(reports()[:3], NODES).bad_nodes == {"n4": ["it did not answer"]}


def test_the_usual_version_is_right_even_if_the_first_node_has_another():
    verdict = judge(reports(n1={"versions": {"torch": "2.12"}}), NODES)
    assert verdict.bad_nodes == {"n1": ["torch is 2.12, but 2.13 on 3 nodes"]}


def test_of_two_alike_the_first_node_is_right():
    two = [Report("n1", {"torch": "2.12"}), Report("n2", {"torch": "2.13"})]
    assert judge(two, ["n1", "n2"]).bad_nodes == {"n2": ["torch is 2.13, but 2.12 on 1 node"]}
    assert judge(two[::-1], ["n1", "n2"]).bad_nodes.keys() == {"n2"}


def test_a_missing_package():
    assert judge(reports(n3={"versions": {}}), NODES).bad_nodes == {"n3": ["torch is missing, but 2.13 on 3 nodes"]}


def test_what_a_node_says_of_itself():
    verdict = judge(reports(n2={"problems": ["GPU 3 fails: Xid"]}), NODES)
    assert verdict.bad_nodes == {"n2": ["GPU 3 fails: Xid"]}


@pytest.mark.parametrize(
    ("unreachable", "bad"),
    [
        # Nobody reaches n1.
        ({"n2": [("n1", 9)], "n3": [("n1", 9)], "n4": [("n1", 9)]}, {"n1"}),
        # n3 reaches nobody.
        ({"n3": [("n1", 9), ("n2", 9), ("n4", 9)]}, {"n3"}),
        # One connection alone: the place where something is blocked.
        ({"n2": [("n1", 9)]}, {"n1"}),
        ({"n3": [("n1", 9), ("n2", 9)], "n4": [("n2", 9)]}, {"n2", "n1"}),
    ],
)
def test_the_fewest_nodes_explain_what_fails(unreachable, bad):
    verdict = judge(reports(**{node: {"unreachable": pairs} for node, pairs in unreachable.items()}), NODES)
    assert verdict.bad_nodes.keys() == bad
    assert all("cannot connect to" in reason for (reason,) in verdict.bad_nodes.values())


def test_a_bad_node_explains_that_it_is_not_reached():
    changes = {"n2": {"problems": ["the run folder is not shared"], "unreachable": [("n1", 9)]}}
    verdict = judge(reports(n1={"unreachable": [("n2", 8)]}, **changes), NODES)
    assert verdict.bad_nodes == {"n2": ["the run folder is not shared"]}


def test_no_node_is_to_blame():
    refused = {node: {"refusal": "batch: 7 does not divide"} for node in NODES}
    assert judge(reports(**refused), NODES).problems == ["batch: 7 does not divide"]
    verdict = judge(reports(n1={"all_reduce_error": "timeout"}, n2={"all_reduce_error": "reset"}), NODES)
    assert verdict.problems == ["the all-reduce over all nodes failed: timeout"]
    assert verdict.bad_nodes == {}


def test_no_room_for_checkpoints_is_no_nodes_fault():
    verdict = judge(reports(n1={"disk_problem": "make room"}), NODES)
    assert (verdict.problems, verdict.bad_nodes) == (["make room"], {})
    assert judge(reports(n1={"disk_note": "1.00 GB are free"}), NODES).notes == ["1.00 GB are free"]


def test_what_was_measured():
    assert judge(reports(n1={"all_reduce": "all-reduce of 64 MiB: 45.25 GB/s"}), NODES).notes == [
        "all-reduce of 64 MiB: 45.25 GB/s"
    ]


@pytest.mark.parametrize(
    ("changes", "code", "names"),
    [
        ({}, 0, None),
        ({"n2": {"refusal": "no"}}, 2, None),
        ({"n2": {"problems": ["x"]}, "n3": {"problems": ["y"]}}, 3, "n2,n3"),
    ],
)
def test_the_command(changes, code, names, tmp_path, capsys):
    lines = [line for report in reports(**changes) for line in report_lines(report)]
    # Among other output, and not from the start of a line.
    (tmp_path / "reports").write_text("\n".join(["a warning", *lines[:2], "x " + lines[2], lines[3], "{}"]) + "\n")
    words = ["preflight-verdict", str(tmp_path / "reports"), "--nodes", ",".join(NODES)]
    assert main([*words, "--bad-nodes", str(tmp_path / "bad")]) == code
    assert ((tmp_path / "bad").read_text().strip() if names else (tmp_path / "bad").exists()) == (names or False)
    assert capsys.readouterr().out.startswith("Pre-flight on 4 nodes: n1, n2, n3, n4\n")


def test_reports_arrive_whole_in_lines_that_srun_keeps_whole():
    """It passes on 1,024 bytes at a time, and the lines of other nodes come between."""
    first, second = (
        Report(node, versions={f"package-{number}": "1.0" for number in range(100)}, problems=["ä " * 500])
        for node in ("h1", "h2")
    )
    lines = [report_lines(report) for report in (first, second)]
    assert min(map(len, lines)) > 3
    assert max(len(line.encode()) for each in lines for line in each) < 1000
    mixed = [line for pair in zip(*map(reversed, lines), strict=True) for line in pair]
    assert sorted(read_reports(["something else", *mixed]), key=lambda report: report.node) == [first, second]
    # Half a report is none: the verdict says that the node did not answer.
    assert read_reports([*lines[0], *lines[1][:-1]]) == [first]
    # Nor is one whose node died while it was printed, wherever its last line is cut.
    last = lines[1][-1]
    for length in (*range(50), len(last) - 1):
        assert read_reports([*lines[0], *lines[1][:-1], last[:length]]) == [first]
