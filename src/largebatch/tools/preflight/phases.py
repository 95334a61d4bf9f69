"""The pre-flight of a node from beginning to end, in phases that all nodes enter together."""

import socket
from collections.abc import Generator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import NoReturn

from largebatch.errors import counted, reason_of
from largebatch.tools.preflight import bandwidth
from largebatch.tools.preflight.all_reduce import TIMES, why
from largebatch.tools.preflight.meeting import SECONDS_TO_CONNECT, Ended, Job, Meeting, Message, conclude
from largebatch.tools.preflight.node import check_node, check_room_for_checkpoints
from largebatch.tools.preflight.report import Report
from largebatch.tools.preflight.run_folder import SECONDS_UNTIL_VISIBLE, appears
from largebatch.tools.preflight.verdict import Verdict, judge

SECONDS_TO_CHECK = 300.0  # how long a node's own checks may take; GPUs take a long time to start on a cold node
SECONDS_TO_TELL = 30.0


def preflight(
    job: Job, recipe: Path, accelerate_config: Path, overrides: Sequence[str], minimum_bandwidth: float
) -> int:
    """Check this node together with the others, and return the exit code, which is the same on all of them.

    `minimum_bandwidth` is the bus bandwidth of the all-reduce, in GB/s, that the job needs; 0 if it is only printed.
    """
    meeting = None
    try:
        meeting = Meeting(job)
        meeting.gather()
        report = check_node(job, recipe, accelerate_config, overrides)
        _compare(meeting, "its own checks", report, SECONDS_TO_CHECK)
        room = Report(job.node)
        if job.rank == 0:
            # The others wait without a deadline.
            check_room_for_checkpoints(room, job.folder, recipe, overrides)
        notes = _compare(meeting, "the sizes of checkpoints", room, SECONDS_TO_TELL)
        _compare(meeting, "connections", _reach_next_node(meeting), SECONDS_UNTIL_VISIBLE + SECONDS_TO_TELL)
        _all_reduce(meeting, minimum_bandwidth, notes)
    except Ended as ended:
        return ended.exit_code
    finally:
        if meeting:
            meeting.close()


def _compare(meeting: Meeting, phase: str, report: Report, seconds: float) -> list[str]:
    """End the pre-flight if any node's report says why; otherwise return what was measured."""

    def decide(said: Mapping[int, Message], silent: Mapping[str, str]) -> Message:
        verdict = judge([Report(**said[rank]) for rank in sorted(said)], silent)
        if verdict.exit_code:
            conclude(meeting.job, verdict)
        return {"notes": verdict.notes}

    return list(meeting.agree(phase, asdict(report), seconds, decide)["notes"])


def _reach_next_node(meeting: Meeting) -> Report:
    """Connect in a circle, so that each node is tried once as the source and once as the target."""
    job = meeting.job
    report = Report(job.node)
    after = (job.rank + 1) % job.num_nodes
    node, (address, port) = meeting.nodes[after], meeting.places[after]
    try:
        socket.create_connection((address, port), SECONDS_TO_CONNECT).close()
    except OSError as error:
        report.unreachable.append((node, f"{address}:{port}", reason_of(error)))
    if not appears(job.file(f"visible_{after}"), node):
        report.refusals.append(
            f"{job.node} did not see within {SECONDS_UNTIL_VISIBLE:.0f} seconds what {node} wrote to the run folder: "
            "mount its file system with shorter caching (NFS: -o actimeo=3), or set RUN_DIR to another one"
        )
    return report


def _all_reduce(meeting: Meeting, minimum: float, notes: Sequence[str]) -> NoReturn:
    """Measure in groups of nodes until the first node knows enough to conclude."""
    job, store = meeting.job, meeting.store
    if job.num_nodes * bandwidth.processes_of_a_node(job) == 1:
        conclude(job, Verdict({}, [], list(notes)))
    rounds = _judge_bandwidth(meeting, minimum, notes)
    groups, number = next(rounds), 0
    while True:
        number += 1
        labels = [f"all-reduce {number}.{index}" for index in range(len(groups))]
        for label, group in zip(labels, groups, strict=True):
            if job.rank in group:
                bandwidth.measure(job, store, label, group)

        def decide(_: Mapping[int, Message], silent: Mapping[str, str], labels: Sequence[str] = labels) -> Message:
            if silent:
                conclude(job, judge([], silent))
            keys = [f"{label}/speed" for label in labels]
            try:
                return {"groups": rounds.send([float(store.get(key)) if store.check([key]) else 0 for key in keys])}
            except StopIteration as end:
                conclude(job, end.value)

        groups = meeting.agree(f"all-reduce {number}", {}, bandwidth.SECONDS + SECONDS_TO_TELL, decide)["groups"]


def _judge_bandwidth(
    meeting: Meeting, minimum: float, notes: Sequence[str]
) -> Generator[bandwidth.Groups, Sequence[float], Verdict]:
    """Yield groups of nodes to measure, given the speeds of those before, and return the verdict."""
    job = meeting.job
    processes = bandwidth.processes_of_a_node(job)
    (speed,) = yield [list(range(job.num_nodes))]
    found = (
        f"all-reduce of {bandwidth.mebibytes(job)} MiB over {counted(job.num_nodes, 'node')} by "
        f"{'nccl' if job.gpus else 'gloo'}, {counted(processes, 'process', 'processes')} per node: "
    )
    if not speed:
        found += f"failed: {why(meeting.store, 'all-reduce 1.0')}"
    else:
        found += f"{speed:.2f} GB/s (bus bandwidth, median of {TIMES})"
        if speed >= minimum:
            return Verdict({}, [], [*notes, found])
        found += f", less than LARGEBATCH_MIN_BUSBW={minimum:g}"
    slow = yield from bandwidth.search(job.num_nodes, processes > 1, minimum)
    if slow:
        reason = "all-reduces with this node are slow or fail, and those without it are fast"
        return Verdict({meeting.nodes[rank]: [reason] for rank in slow}, [], [*notes, found])
    remedy = (
        "no single node explains this; NCCL_DEBUG=INFO shows which network is used (NCCL_SOCKET_IFNAME, NCCL_IB_HCA)"
    )
    return Verdict({}, [f"{found}; {remedy}" if job.gpus else found], list(notes))
