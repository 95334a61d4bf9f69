"""How jobs are launched: under other strategies, as they were told to, and not on what the pre-flight refuses."""

import json
import re
import shutil
import subprocess
import sys
import time

import pytest

import apptainer
import stand_in
from paths import MAPS, PYDOC, ROOT
from played import write_commands
from resuming import TINY_GPT, assert_close_weights
from slurm_cluster import SBIN
from slurm_job import Job
from tiny_jobs import LAUNCH, TWO_NODES, WORDS

pytestmark = pytest.mark.slow

SMALL_GPT = (
    *TINY_GPT,
    "--model.dropout=0.0",
    "--optimizer.eps=1e-3",
    "--evaluation.every=null",
    "--batch.micro_batch_size=12",
    "--logging.every=20",
    '--train.duration={"steps": 40}',
)
# What would be launched is printed.
TOLD = f"""exec {sys.executable} -c "import json, sys; print('GOT', json.dumps(sys.argv[1:]))" "$@" """
ONLY_TOLD = {"accelerate": TOLD}


# As text, h10 is before h9.
@pytest.mark.parametrize("first_host", [9])
def test_strategies_on_the_same_two_hosts_at_once(submit, uninterrupted, cluster, play, tmp_path):
    """Their ports must not collide, and none may join another's processes."""
    options = (*TWO_NODES, "--nodelist=h9,h10")
    secrets = {"WANDB_API_KEY": "secret-of-wandb", "HF_TOKEN": "secret-of-the-hub"}
    jobs = {
        name: submit(
            *SMALL_GPT,
            options=options,
            name=name,
            recipe=PYDOC,
            programs={"accelerate": LAUNCH},
            STRATEGY=name,
            LARGEBATCH_PREFLIGHT=preflight,
            **secrets,
        )
        for name, preflight in (("fsdp", "on"), ("zero3", "off"))
    }
    reference = uninterrupted(SMALL_GPT, 1, PYDOC)
    for strategy, job in jobs.items():
        assert job.wait_for_end() == "COMPLETED", job.log
        assert ("all-reduce of 64 MiB over 2 nodes by gloo" in job.log) == (strategy == "fsdp")
        assert f"on 2 x {strategy}" in job.log
        assert_close_weights(job.run_dir, reference)
        assert {path.name for path in job.logs.glob("*.log")} == {"h9.log", "h10.log"}
        # Ranks are in Slurm's order.
        for rank, host in enumerate(("h9", "h10")):
            assert f"[rank {rank}]" in (job.logs / f"{host}.log").read_text()
            assert list((job.logs / f"ranks/{host}").rglob("stderr.log"))
        for path in (job.log_file, job.run_dir, *job.run_dir.rglob("*")):
            assert not path.stat().st_mode & 0o002, f"{path} is world-writable"
            assert path.is_dir() or b"secret-of-" not in path.read_bytes(), path
        job.assert_no_survivors()

    # The same over ssh, without Slurm.
    (tmp_path / "hosts").write_text("h9 slots=8\nh10 slots=8\n")
    environment = {"LARGEBATCH_SSH": start_ssh(cluster, tmp_path, "h9", "h10"), "RUN_DIR": str(tmp_path / "over_ssh")}
    environment |= {"LARGEBATCH_ENV": str(play(accelerate=stand_in.program())), "LARGEBATCH_PREFLIGHT": "off"}
    words = ("bash", "launch/hosts.sh", str(tmp_path / "hosts"), str(PYDOC.relative_to(ROOT)), *SMALL_GPT)
    job = Job(cluster, "", tmp_path / "over_ssh", tmp_path / "over_ssh.log")
    with job.log_file.open("w") as log:
        process = subprocess.Popen(
            cluster.on_login_node(*words, cwd=ROOT),
            env=cluster.environment | environment,
            stdout=log,
            stderr=log,
        )
    while job.last_step == 0 or not re.search(r"^\[h10\] stand-in on h10, rank 1", job.log, re.MULTILINE):
        assert process.poll() is None, job.log
        time.sleep(0.2)
    # When this end dies, so does the other.
    assert any("train.py" in each.command for each in job.processes().values())
    process.kill()
    process.wait()
    job.assert_no_survivors()


def start_ssh(cluster, folder, *hosts):
    """Start a daemon on each of the hosts; the command that reaches them."""
    sshd = shutil.which("sshd", path=SBIN)
    if sshd is None:
        pytest.skip("sshd not found; apt-get install openssh-server")
    key = folder / "key"
    config = folder / "sshd_config"
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", key], check=True)
    config.write_text(f"HostKey {key}\nAuthorizedKeysFile {key}.pub\nStrictModes no\n")
    for host in hosts:
        cluster.on_host(host, "mkdir", "-p", "/run/sshd")
        cluster.on_host(host, sshd, "-f", str(config))
    return f"ssh -F none -i {key} -o BatchMode=yes -o StrictHostKeyChecking=no -o UserKnownHostsFile={folder}/known"


def test_sites_of_other_kinds(submit, tmp_path):
    """The environment is not exported; nor is there one in a container, which has no folders but those it is given."""
    odd = tmp_path / "odd_environment"
    # Its last command is false.
    odd.write_text(f"source {sys.prefix}/bin/activate\nexport PYTHONPATH={ROOT}/src\n[[ -d /nowhere ]] && export X=1\n")
    job = submit(
        options=("--nodes=1", "--gpus-per-node=2", f"--export=RUN_DIR={tmp_path / 'odd'},LARGEBATCH_ENV={odd}"),
        name="odd",
        SBATCH_EXPORT="NONE",
        LARGEBATCH_PREFLIGHT="on",
    )
    # Outside of the repository, too.
    recipe = tmp_path / "elsewhere/maps.json"
    recipe.parent.mkdir()
    recipe.write_text(json.dumps(json.loads(MAPS.read_text()) | {"$schema": f"{MAPS.parent}/recipe.schema.json"}))
    contained = submit(
        *WORDS,
        '--train.duration={"steps": 20}',
        recipe=recipe,
        options=("--nodes=1", "--cpus-per-task=1"),
        name="contained",
        LARGEBATCH_CONTAINER="apptainer:image.sif",
        has_environment=False,
        PATH=write_commands(tmp_path / "bin", {"apptainer": apptainer.PROGRAM}),
    )
    assert contained.wait_for_end() == "COMPLETED", contained.log
    assert "other folders are absent" in contained.log
    assert contained.ending.kind == "finished"

    # There are no such GPUs, and the pre-flight could do nothing about it but say so: it is reached with what was set.
    assert job.wait_for_end() == "FAILED"
    assert "note: --export=" in job.log.splitlines()[0]
    assert "on 1 nodes x 2 processes" in job.log
    assert f"the last command of {odd} returned 1" in job.log
    assert "no GPU can be used, and the job was given 2" in job.log
    assert job.exit_code == "3:0"


def test_words_arrive_as_they_were_given(submit):
    """Spaces, quotes, `$` and `;` in options and in the run folder's name; no shell looks at them again."""
    words = ("--data.path", "a b", "--x=\"$HOME\" '$(id)' `id` ; exit 5", "--y", "*", "")
    job = submit(*words, options=TWO_NODES, name='it\'s $HOME `x` "q"', programs=ONLY_TOLD)
    assert job.wait_for_end() == "COMPLETED", job.log
    got = [json.loads(line.split("GOT ")[1]) for line in job.log.splitlines() if line.startswith("GOT ")]
    assert len(got) == 2
    for arguments in got:
        assert arguments[arguments.index("--config") :] == [
            "--config",
            # Of its snapshot.
            f"{job.run_dir.resolve()}/jobs/{job.id}/code/recipes/outside_task/maps.json",
            "--run-dir",
            str(job.run_dir),
            *words,
        ]
    assert sorted(arguments[arguments.index("--machine_rank") + 1] for arguments in got) == ["0", "1"]


def test_a_host_with_a_blocked_port_is_left_out(submit, cluster):
    port = "23456"
    cluster.on_host("h2", "ip", "rule", "add", "ipproto", "tcp", "dport", port, "prohibit")
    settings = {"LARGEBATCH_PREFLIGHT": "on", "LARGEBATCH_EXCLUDE_BAD_NODES": "1", "LARGEBATCH_PORTS": f"{port}-{port}"}
    job = submit(*WORDS, options=TWO_NODES, programs=ONLY_TOLD, **settings)
    assert job.wait_for_end() == "FAILED", job.log
    assert job.exit_code == "3:0"
    assert f"bad node h2: cannot connect to the first node at h1:{port}" in job.log
    number = re.search(r"bad nodes: h2; submitted again without them, as job (\d+)", job.log)[1]
    second = Job(cluster, number, job.run_dir, job.log_file)
    assert second.wait_for_end() == "COMPLETED", job.log
    assert second.show("NodeList") == "h[1,3]"
    # Nothing was launched by the job that was refused.
    assert job.log.count("GOT ") == 2
    job.assert_no_survivors()
