"""The pre-flight of real jobs names the bad host."""

import importlib.metadata
from pathlib import Path

from test_slurm_jobs import TWO_NODES, WORDS, steps


def test_a_host_with_another_package_is_left_out(submit, cluster, tmp_path):
    files = importlib.metadata.files("safetensors")
    metadata = next(Path(file.locate()) for file in files if file.name == "METADATA")
    other = tmp_path / "METADATA"
    other.write_text(metadata.read_text().replace("\nVersion: ", "\nVersion: 9", 1))
    cluster.on_host("h2", "mount", "--bind", str(other), str(metadata))
    try:
        job = submit("gpt_pydoc", *WORDS, *steps(20), options=TWO_NODES, LARGEBATCH_EXCLUDE_BAD_NODES="1")
        assert job.wait_for_end() == "COMPLETED", job.log
    finally:
        cluster.on_host("h2", "umount", str(metadata))
    version = importlib.metadata.version("safetensors")
    assert f"bad node h2: safetensors is 9{version} there, and {version} on the other node" in job.log
    assert "bad nodes: h2; requeued" in job.log
    assert job.starts == 2
    assert job.show("NodeList") == "h[1,3]"
    assert "on 2 x ddp" in job.log


def test_an_unshared_folder_and_a_blocked_port(submit, cluster, tmp_path):
    own, shared = tmp_path / "own", tmp_path / "shared"
    own.mkdir()
    options = (*TWO_NODES, "--nodelist=h1,h2")
    cluster.on_host("h2", "mount", "-t", "tmpfs", "none", str(own))
    unshared = submit("gpt_pydoc", *WORDS, options=options, name="unshared", RUN_DIR=str(own / "run"))
    blocked = submit("gpt_pydoc", *WORDS, options=(*options, "--hold"), name="blocked", RUN_DIR=str(shared))
    rule = ("ipproto", "tcp", "dport", str(10000 + int(blocked.id) * 16 % 22000), "prohibit")
    cluster.on_host("h2", "ip", "rule", "add", *rule)
    try:
        cluster.command("scontrol", "release", blocked.id)
        for job in (unshared, blocked):
            assert job.wait_for_end() == "FAILED"
            assert (job.exit_code, job.starts) == ("3:0", 1)
    finally:
        cluster.on_host("h2", "ip", "rule", "del", *rule)
        cluster.on_host("h2", "umount", str(own))
    assert "bad node h2: " in unshared.log
    assert "is not the folder that the batch script wrote to" in unshared.log
    assert "bad node h1: h2 cannot connect to h1 at port " + rule[3] in blocked.log
    for job in (unshared, blocked):
        assert "training was not started" in job.log
        assert job.log.count("bad node") == 1
        job.assert_no_survivors()
