"""A Slurm cluster on one Linux machine: real hosts as far as Slurm, torch and NCCL's kind can tell.

    sudo python tests/cluster/slurm_cluster.py start 2     # hosts h1 and h2; prints how to use it
    sudo python tests/cluster/slurm_cluster.py stop

Each host is a set of namespaces (network, processes, mounts, host name) on a bridge of its own that leads nowhere else,
with a real slurmd; slurmctld and munged run beside them. Folders are the machine's own, so shared by all hosts. It
needs Debian's packages slurm-wlm and munge, iproute2, and root.

Partitions: `main`, and `urgent`, whose jobs take the hosts of `main`'s by requeueing them.
"""

import argparse
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

FOLDER = Path("/tmp/largebatch_cluster")
BRIDGE = "lbcluster"
CONTROLLER_ADDRESS = "10.77.0.254"
PROGRAMS = ("slurmctld", "slurmd", "sbatch", "munged", "unshare", "nsenter", "ip")
SECONDS_OF_GRACE = 40

CONFIG = """\
ClusterName=rehearsal
SlurmctldHost={controller}({controller_address})
SlurmUser=root
SlurmdUser=root
SlurmctldPort=6817
SlurmdPort=6818
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket,cred_expire=5
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool.%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SlurmdParameters=config_overrides
SchedulerParameters=sched_interval=2,bf_interval=2,batch_sched_delay=1
ReturnToService=2
JobRequeue=1
JobCompType=jobcomp/filetxt
JobCompLoc={folder}/jobs.txt
SlurmdTimeout=8
KillWait=10
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
NodeName=DEFAULT CPUs=4 State=UNKNOWN
{nodes}
PartitionName=main Default=YES Nodes=ALL PriorityTier=1 GraceTime={grace} MaxTime=60
PartitionName=urgent Nodes=ALL PriorityTier=10 PreemptMode=OFF MaxTime=60
"""

# The first process of a host: it takes in orphans, and all processes of the host end with it.
HOST = """\
set -e
hostname {name}
mount --bind {folder}/hosts /etc/hosts
until ip link show eth0 >/dev/null 2>&1; do sleep 0.05; done
ip link set lo up
ip addr add {address}/24 dev eth0
ip link set eth0 up
slurmd -D -N {name} -f {folder}/slurm.conf &
while :; do sleep 1000 & wait $!; done
"""


class ClusterError(RuntimeError):
    """The cluster cannot be started here; says why."""


def why_not() -> str | None:
    """What is missing for a cluster on this machine; None is nothing."""
    missing = [program for program in PROGRAMS if _find(program) is None]
    if missing:
        return f"{', '.join(missing)} not found; apt-get install slurm-wlm munge iproute2"
    return None if os.geteuid() == 0 else "namespaces and a bridge need root"


class Cluster:
    """A running cluster.

    Args:
        names: Its hosts.
    """

    def __init__(self, names: Sequence[str]):
        self.names = tuple(names)
        self.environment = os.environ | {"SLURM_CONF": str(FOLDER / "slurm.conf")}

    def command(self, *words: str, environment: Mapping[str, str] | None = None, cwd: Path | None = None) -> str:
        """Run one of Slurm's commands, as on a login node, and return its output.

        Raises:
            subprocess.CalledProcessError: It failed.
        """
        result = subprocess.run(
            words, env=self.environment | dict(environment or {}), cwd=cwd, capture_output=True, text=True, check=False
        )
        if result.returncode:
            raise subprocess.CalledProcessError(result.returncode, words, result.stdout, result.stderr + result.stdout)
        return result.stdout

    def on_host(self, name: str, *words: str) -> str:
        """Run a command in a host's namespaces."""
        first = (FOLDER / f"{name}.pid").read_text()
        return self.command("nsenter", "--target", first, "--net", "--uts", "--mount", "--pid", "--", *words)

    def cut_off(self, name: str) -> None:
        """Cut a host's network; it stays alive."""
        _run("ip", "link", "set", f"lb_{name}", "down")

    def join_again(self, name: str) -> None:
        """Mend a host's network."""
        _run("ip", "link", "set", f"lb_{name}", "up")

    def kill_slurmd(self, name: str) -> None:
        """End a host's daemon by SIGKILL; the processes of its jobs stay."""
        self.on_host(name, "pkill", "-KILL", "-x", "slurmd")

    def start_slurmd(self, name: str) -> None:
        """Start a host's daemon again."""
        self.on_host(name, "slurmd", "-N", name, "-f", str(FOLDER / "slurm.conf"))

    def wait_until_idle(self, seconds: float = 60) -> None:
        """Until all hosts are free."""
        deadline = time.monotonic() + seconds
        while (
            states := self.command("sinfo", "--noheader", "--Node", "--partition=main", "--format=%T")
        ) != "idle\n" * len(self.names):
            if time.monotonic() > deadline:
                raise ClusterError(f"hosts are not idle after {seconds:.0f} s but {states.split()}; see {FOLDER}/*.log")
            time.sleep(0.3)


def start(num_hosts: int) -> Cluster:
    """Start a cluster of hosts h1, h2, …

    Raises:
        ClusterError: Something is missing, or there is one already.
    """
    if reason := why_not():
        raise ClusterError(reason)
    if FOLDER.exists():
        raise ClusterError(f"{FOLDER} is there: a cluster is running; stop it first")
    addresses = {f"h{number}": f"10.77.0.{number}" for number in range(1, num_hosts + 1)}
    FOLDER.mkdir(mode=0o755)
    for name in ("state", *(f"spool.{name}" for name in addresses)):
        (FOLDER / name).mkdir()
    controller = socket.gethostname().split(".")[0]
    hosts = {"localhost": "127.0.0.1", **addresses, controller: CONTROLLER_ADDRESS}
    (FOLDER / "hosts").write_text("".join(f"{address} {name}\n" for name, address in hosts.items()))
    nodes = "\n".join(f"NodeName={name} NodeAddr={address}" for name, address in addresses.items())
    (FOLDER / "slurm.conf").write_text(
        CONFIG.format(
            controller=controller,
            controller_address=CONTROLLER_ADDRESS,
            folder=FOLDER,
            nodes=nodes,
            grace=SECONDS_OF_GRACE,
        )
    )
    _start_munge()
    _run("ip", "link", "add", BRIDGE, "type", "bridge")
    _run("ip", "addr", "add", f"{CONTROLLER_ADDRESS}/24", "dev", BRIDGE)
    _run("ip", "link", "set", BRIDGE, "up")
    cluster = Cluster(tuple(addresses))
    _daemon("slurmctld", "-D", "-f", str(FOLDER / "slurm.conf"), environment=cluster.environment)
    for name, address in addresses.items():
        _start_host(cluster, name, address)
    cluster.wait_until_idle()
    return cluster


def running() -> Cluster:
    """The cluster that was started before.

    Raises:
        ClusterError: There is none.
    """
    names = sorted(path.stem for path in FOLDER.glob("h*.pid"))
    if not names:
        raise ClusterError("no cluster is running")
    return Cluster(names)


def stop() -> None:
    """End the cluster with all of its processes, and take its network and folder away."""
    for path in FOLDER.glob("pids/*"):
        with suppress(ProcessLookupError):
            os.kill(int(path.name), signal.SIGKILL)
    with suppress(subprocess.CalledProcessError):
        _run("ip", "link", "del", BRIDGE)
    for _ in range(50):
        if not any(_alive(int(path.name)) for path in FOLDER.glob("pids/*")):
            break
        time.sleep(0.1)
    shutil.rmtree(FOLDER, ignore_errors=True)


def _start_munge() -> None:
    key = FOLDER / "munge.key"
    key.write_bytes(os.urandom(128))
    key.chmod(0o600)
    names = {"socket": "socket", "pid-file": "pid", "log-file": "log", "seed-file": "seed"}
    options = [f"--{option}={FOLDER}/munge.{name}" for option, name in names.items()]
    _daemon("munged", "--foreground", "--force", f"--key-file={key}", *options)


def _start_host(cluster: Cluster, name: str, address: str) -> None:
    script = HOST.format(name=name, address=address, folder=FOLDER)
    namespaces = ("--net", "--uts", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc")
    outside = _daemon("unshare", *namespaces, "bash", "-c", script, environment=cluster.environment)
    children = Path(f"/proc/{outside}/task/{outside}/children")
    while not (first := children.read_text().strip()):
        time.sleep(0.02)
    (FOLDER / f"{name}.pid").write_text(first)
    _run("ip", "link", "add", f"lb_{name}", "type", "veth", "peer", "name", "eth0", "netns", first)
    _run("ip", "link", "set", f"lb_{name}", "master", BRIDGE, "up")


def _daemon(*words: str, environment: Mapping[str, str] | None = None) -> int:
    """Start a process that outlives this one; its number is kept for `stop`."""
    log = (FOLDER / "daemons.log").open("ab")
    program = _find(words[0])
    assert program is not None
    process = subprocess.Popen(
        [program, *words[1:]], env=environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
    )
    (FOLDER / "pids").mkdir(exist_ok=True)
    (FOLDER / "pids" / str(process.pid)).touch()
    return process.pid


def _run(*words: str) -> None:
    subprocess.run(words, check=True, capture_output=True, text=True)


def _find(program: str) -> str | None:
    return shutil.which(program, path=f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin")


def _alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except OSError:
        return False
    return state != "Z"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("start").add_argument("hosts", type=int)
    commands.add_parser("stop")
    options = parser.parse_args()
    try:
        if options.command == "start":
            start(options.hosts)
            print(f"export SLURM_CONF={FOLDER}/slurm.conf   # then sinfo, sbatch slurm/resnet_digits.sbatch, squeue …")
        else:
            stop()
    except ClusterError as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main()
