"""Which nodes are named, from what the nodes said."""

from largebatch.tools.preflight.reports import Report, Severity, nodes_by_finding

NODES = ["n1", "n2", "n3", "n4"]
USUAL = {"python": "3.13", "torch": "2.13"}


def reports(**versions):
    """The report of one good node each, with other versions where a node's name is given."""
    return [Report(node, {}, versions.get(node, USUAL)) for node in NODES]


def bad(text):
    return Severity.BAD_NODE, text


def test_the_usual_version_is_right_even_if_the_first_node_has_another():
    found = nodes_by_finding(reports(n1=USUAL | {"torch": "2.12"}))
    assert found == {bad("torch is 2.12, but 2.13 on 3 nodes"): ["n1"]}


def test_of_two_alike_the_first_node_is_right():
    two = [Report("n1", {}, {"torch": "2.12"}), Report("n2", {}, {"torch": "2.13"})]
    assert nodes_by_finding(two) == {bad("torch is 2.13, but 2.12 on 1 node"): ["n2"]}
    assert nodes_by_finding(two[::-1]) == {bad("torch is 2.12, but 2.13 on 1 node"): ["n1"]}


def test_a_missing_package_and_a_node_that_could_not_say_anything():
    found = nodes_by_finding(reports(n3={"python": "3.13"}, n4={}))
    assert found == {bad("torch is missing, but 2.13 on 2 nodes"): ["n3"]}


def test_what_nodes_have_in_common_is_said_once_and_the_first_failure_first():
    failed = [
        Report(node, {text: Severity.REFUSED}) for node, text in zip(NODES, ("late", "no", "late", "no"), strict=True)
    ]
    for number, report in enumerate(failed):
        report.failed_at = 10.0 - number
    found = nodes_by_finding(failed)
    assert list(found.items()) == [((Severity.REFUSED, "no"), ["n4", "n2"]), ((Severity.REFUSED, "late"), ["n3", "n1"])]
