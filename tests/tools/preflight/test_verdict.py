"""Which nodes are named, from what the nodes said."""

import pytest

from largebatch.tools.preflight.verdict import Findings, compare

NODES = ["n1", "n2", "n3", "n4"]


def findings(**changes):
    """The findings of one good node each, changed where a node's name is given."""
    return [Findings(node, **({"versions": {"torch": "2.13"}} | changes.get(node, {}))) for node in NODES]


def test_the_usual_version_is_right_even_if_the_first_node_has_another():
    verdict = compare(findings(n1={"versions": {"torch": "2.12"}}))
    assert verdict.bad_nodes == {"n1": ["torch is 2.12, but 2.13 on 3 nodes"]}


def test_of_two_alike_the_first_node_is_right():
    two = [Findings("n1", {"torch": "2.12"}), Findings("n2", {"torch": "2.13"})]
    assert compare(two).bad_nodes == {"n2": ["torch is 2.13, but 2.12 on 1 node"]}
    assert compare(two[::-1]).bad_nodes.keys() == {"n1"}


def test_a_missing_package():
    assert compare(findings(n3={"versions": {}})).bad_nodes == {"n3": ["torch is missing, but 2.13 on 3 nodes"]}


@pytest.mark.parametrize(("cut_off", "bad"), [(["n2"], ["n2"]), (["n2", "n4"], ["n2", "n4"]), (NODES[1:], ["n1"])])
def test_nodes_that_cannot_reach_the_first_one(cut_off, bad):
    """If nobody can, it is the first one's fault."""
    verdict = compare(findings(**{node: {"unreachable": "cannot connect"} for node in cut_off}))
    assert list(verdict.bad_nodes) == bad
    assert [text for reasons in verdict.bad_nodes.values() for text in reasons] == [
        f"{node} cannot connect" for node in cut_off
    ]


def test_the_first_failures_of_the_all_reduce():
    failed = {node: {"failure": "no", "failed_at": 10.0 - number} for number, node in enumerate(NODES)}
    verdict = compare(findings(**failed))
    assert verdict.problems == ["failure 1, on n4: no", "failure 2, on n3: no", "failure 3, on n2: no"]
    assert (verdict.bad_nodes, verdict.exit_code) == ({}, 2)
