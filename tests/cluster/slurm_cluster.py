"""A real Slurm cluster on one Linux machine, for tests and for trying things.

    sudo python tests/cluster/slurm_cluster.py --hosts 2   # a shell on its login node

The cluster is gone when the shell ends. Each host is a set of namespaces (network, processes, mounts, host name) with
a real slurmd, on a bridge that leads nowhere else; slurmctld and munged run on the login node. All of it lives inside
one outer set of namespaces, so clusters do not see each other and need no names of their own, and nothing outlives its
owner. Folders are the machine's own and shared by all hosts, except /run, which belongs to the cluster.

Needs root, and Debian's packages slurm-wlm, munge and iproute2. Partitions: `main`, and `urgent`, whose jobs take the
hosts of `main`'s by requeueing them.
"""

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

SBIN = f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin"
PROGRAMS = ("slurmctld", "slurmd", "sbatch", "munged", "unshare", "nsenter", "ip")

# The outer set of namespaces, with $1 hosts, whose numbers begin at $2. /proc stays the owner's: process ids that are
# read there mean the same to the owner. A requeued job starts again after cred_expire; a host that does not answer is
# given up after SlurmdTimeout.
LOGIN_NODE = r"""
set -euo pipefail
exec 3>&1 1>&2
mount -t tmpfs -o mode=755 none /run
mkdir /run/state
hostname login
printf '127.0.0.1 localhost\n10.77.0.254 login\n' >/run/hosts
for ((i = $2; i < $1 + $2; i++)); do echo "10.77.0.$i h$i" >>/run/hosts; done
mount --bind /run/hosts /etc/hosts
cat >/run/slurm.conf <<END
ClusterName=rehearsal
SlurmctldHost=login(10.77.0.254)
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket=/run/munge.socket,cred_expire=8
StateSaveLocation=/run/state
SlurmdSpoolDir=/run/spool.%n
SlurmctldPidFile=/run/slurmctld.pid
SlurmdPidFile=/run/slurmd.%n.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/affinity
GresTypes=gpu
JobAcctGatherType=jobacct_gather/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SlurmdParameters=config_overrides
SchedulerParameters=sched_interval=2,bf_interval=2,batch_sched_delay=1
ReturnToService=2
JobRequeue=1
SlurmdTimeout=12
MessageTimeout=30
KillWait=5
BatchStartTimeout=120
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
NodeName=h[$2-$(($1 + $2 - 1))] NodeAddr=10.77.0.[$2-$(($1 + $2 - 1))] CPUs=4 Gres=gpu:8 State=UNKNOWN
PartitionName=main Default=YES Nodes=ALL PriorityTier=1 GraceTime=300 MaxTime=60
PartitionName=urgent Nodes=ALL PriorityTier=10 PreemptMode=OFF MaxTime=60
END
# Slurm counts GPUs that are not there; it wants to see a file for each.
touch /run/gpu{0..7}
echo 'Name=gpu File=/run/gpu[0-7]' >/run/gres.conf

ip link set lo up
ip link add bridge type bridge
ip addr add 10.77.0.254/24 dev bridge
ip link set bridge up
(umask 077; head -c 128 /dev/urandom >/run/munge.key)
munged --foreground --key-file=/run/munge.key --socket=/run/munge.socket --pid-file=/run/munge.pid \
  --log-file=/run/munge.log --seed-file=/run/munge.seed </dev/null &
slurmctld -D </dev/null &
for ((i = $2; i < $1 + $2; i++)); do
  ip netns add "h$i"
  ip link add "h$i" type veth peer name eth0 netns "h$i"
  ip link set "h$i" master bridge up
  ip -n "h$i" link set lo up
  ip -n "h$i" addr add "10.77.0.$i/24" dev eth0
  ip -n "h$i" link set eth0 up
  nsenter --net="/run/netns/h$i" unshare --uts --mount --pid --fork --kill-child bash -c "$HOST" "h$i" </dev/null &
done
until [[ $(sinfo --noheader --partition=main --format=%D:%T) == "$1:idle" ]]; do
  ((SECONDS < 120))
  sleep 0.1
done
echo ready >&3
# Only the owner holds the other end of this pipe. When the owner is gone, the first process of the namespaces ends
# here, and the kernel kills all others.
read -r || true
"""

# The first process of a host, $0: it reaps orphans, and all processes of the host end with it.
HOST = r"""
read -r first _ </proc/self/stat
echo "$first" >"/run/$0.pid"
mount -t proc proc /proc
hostname "$0"
slurmd -D -N "$0" &
sleep infinity &
wait $!
"""


class ClusterError(RuntimeError):
    """The cluster cannot be started here; says why."""


def why_not() -> str | None:
    """What is missing for a cluster on this machine; None if nothing is."""
    missing = [program for program in PROGRAMS if shutil.which(program, path=SBIN) is None]
    if missing:
        return f"{', '.join(missing)} not found; apt-get install slurm-wlm munge iproute2"
    return None if os.geteuid() == 0 else "namespaces and a bridge need root"


class Cluster:
    """A running cluster, until `close` or the end of this process, however that comes.

    Args:
        num_hosts: Its hosts are h1, h2, …, or from another number on.
        log: What its daemons say is appended to this file.
        first: The number of the first host.

    Raises:
        ClusterError: It cannot be started.
    """

    def __init__(self, num_hosts: int, log: Path, first: int = 1):
        if reason := why_not():
            raise ClusterError(reason)
        self.environment = os.environ | {"SLURM_CONF": "/run/slurm.conf", "PATH": SBIN}
        namespaces = ("--net", "--uts", "--mount", "--pid", "--fork", "--kill-child")
        with log.open("ab") as file:
            self._process = subprocess.Popen(
                ["unshare", *namespaces, "bash", "-c", LOGIN_NODE, "login", str(num_hosts), str(first)],
                env=self.environment | {"HOST": HOST},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=file,
                start_new_session=True,
            )
        assert self._process.stdout is not None
        if not self._process.stdout.readline():
            self.close()
            raise ClusterError(f"the cluster did not start:\n{log.read_text(errors='replace')}")

    def close(self) -> None:
        """End the cluster with all of its processes."""
        self._process.communicate()

    def on_login_node(self, *words: str, cwd: Path) -> list[str]:
        """The command that runs a command on the login node; give it `environment`."""
        target = ("--target", str(self._process.pid))
        return ["nsenter", *target, "--net", "--uts", "--mount", f"--wdns={cwd}", "--", *words]

    def command(self, *words: str, environment: Mapping[str, str] | None = None, cwd: Path = Path("/")) -> str:
        """Run a command on the login node and return its output."""
        return self._output(self.on_login_node(*words, cwd=cwd), environment or {})

    def on_host(self, name: str, *words: str) -> str:
        """Run a command on a host and return its output."""
        first = Path(f"/proc/{self._process.pid}/root/run/{name}.pid").read_text().strip()
        return self._output(["nsenter", "--target", first, "--net", "--uts", "--mount", "--pid", "--", *words], {})

    def cut_off(self, name: str) -> None:
        """Cut a host's network; it stays alive."""
        self.command("ip", "link", "set", name, "down")

    def _output(self, command: list[str], environment: Mapping[str, str]) -> str:
        result = subprocess.run(command, env=self.environment | dict(environment), capture_output=True, text=True)
        assert result.returncode == 0, f"{command}: {result.stderr}{result.stdout}"
        return result.stdout


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hosts", type=int, default=3, help="number of hosts (default: 3)")
    options = parser.parse_args()
    with tempfile.NamedTemporaryFile(prefix="slurm_cluster.") as log:
        try:
            cluster = Cluster(options.hosts, Path(log.name))
        except ClusterError as error:
            sys.exit(f"error: {error}")
        print(f"The daemons' log is {log.name}; exit takes the cluster away.")
        shell = cluster.on_login_node(os.environ.get("SHELL", "bash"), cwd=Path.cwd())
        result = subprocess.run(shell, env=cluster.environment)
        cluster.close()
    sys.exit(result.returncode)


if __name__ == "__main__":
    main()
