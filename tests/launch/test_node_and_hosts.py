"""launch/node.sh and launch/hosts.sh without a scheduler, with the commands that they run played."""

import socket
import subprocess
import time

import pytest
import yaml

from largebatch.system.endings import read_endings
from played import ACCELERATE, copy_checkout, environment_in, run_bash, write_commands
from processes import is_running

RECIPE = "recipes/causal_lm/gpt_pydoc.json"
# What bash's `wait` sometimes returns for a process that ends at that moment.
BY_CHANCE = 255
# What bash waits for before it sends a signal.
BEGUN = "until [[ -s $RUN_DIR/slow ]]; do sleep 0.1; done"
COMMANDS = {
    "largebatch": """printf '%s\\n' "$@" >"$RUN_DIR/preflight"; exit "${PREFLIGHT_CODE:-0}" """,
    "accelerate": f"""
      if [[ $LARGEBATCH_NODE == "${{SLOW:-}}" ]]; then
        trap 'echo "got TERM"; exit 3' TERM
        echo "$$" >"$RUN_DIR/slow"
        for ((;;)); do sleep 0.1; done
      fi
      [[ $LARGEBATCH_NODE != "${{BROKEN:-}}" ]] || {{ until [[ -s $RUN_DIR/slow ]]; do sleep 0.1; done; exit 5; }}
      {ACCELERATE}""",
    # Where every host is this machine; nothing of this end's environment is there.
    "ssh": 'shift $(($# - 2)); cd /; exec env -i HOME=/ PATH="$PATH" bash -c "$2"',
}


@pytest.fixture
def launch(run_dir, tmp_path):
    """The folder and the environment of a launch."""
    checkout = copy_checkout(tmp_path / "checkout")
    run_dir.mkdir()
    (tmp_path / "hosts").write_text("# two machines\na slots=8\nb slots=8\na slots=8\n")
    path = write_commands(tmp_path / "bin", COMMANDS)
    return checkout, {"HOME": "/", "PATH": path, "RUN_DIR": str(run_dir), "LARGEBATCH_ENV": ""}


def node(launch, *words, **changes):
    """The second of two nodes, unless words say otherwise."""
    checkout, environment = launch
    environment = environment | {"LARGEBATCH_JOB_ID": "9", "LARGEBATCH_RESTART": "0"} | changes
    place = ("--nodes", "2", "--node-rank", "1", "--address", "fe80::1", "--port", "2000")
    return run_bash("launch/node.sh", *place, *words, cwd=checkout, environment=environment)


@pytest.fixture
def written(run_dir):
    """The words in a file that a played command wrote, with a space behind each."""
    return lambda name: (run_dir / name).read_text().replace("\n", " ")


def test_a_recipe_elsewhere(launch, tmp_path, written):
    """Its task is that of its schema."""
    mine = tmp_path / "mine.json"
    mine.write_text('{"$schema":"checkout/recipes/causal_lm/recipe.schema.json", "seed": 1}')
    code, log = node(launch, str(mine), LARGEBATCH_NODE="b")
    assert code == 0, log
    assert f" {tmp_path}/checkout/recipes/causal_lm/train.py --config {mine} " in written("words.b")
    mine.write_text('{"seed": 1}')
    code, log = node(launch, str(mine))
    assert (code, 'write "$schema": "TASK/recipe.schema.json" into it' in log) == (2, True)


def wait_for(condition):
    deadline = time.monotonic() + 120
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.1)


def test_a_node(launch, tmp_path, written):
    """Its rank is what it is told, and where it has met in the pre-flight it meets again."""
    settings = {"LARGEBATCH_NODE": "n7", "STRATEGY": "zero1", "LARGEBATCH_WRAP": "env X=1"}
    code, log = node(launch, "--processes-per-node", "4", RECIPE, "--seed", "a  b", **settings)
    assert code == 0, log
    assert " --address [fe80::1] --port 2000 " in written("preflight")
    assert " --seconds 600 --min-busbw 0 " in written("preflight")
    # Everybody on the node sees the words.
    assert "9.0" not in written("preflight")
    logs = f"{tmp_path}/run/jobs/9/start_0"
    assert written("words.n7") == (
        "n7 launch --config_file recipes/accelerate_configs/zero1.yaml --num_machines 2 --num_processes 8 "
        f"--machine_rank 1 --tee 3 --log_dir {logs}/ranks/n7 "
        "--main_process_ip [fe80::1] --main_process_port 2000 --rdzv_backend static "
        f"recipes/causal_lm/train.py --config {RECIPE} --run-dir {tmp_path}/run --seed a  b "
    )
    environment = environment_in(tmp_path / "run")
    assert environment["TORCH_FR_DUMP_TEMP_FILE"] == f"{logs}/fr_"
    assert (environment["PYTHONUNBUFFERED"], environment["X"], environment["LARGEBATCH_TOKEN"]) == ("1", "1", "9.0")
    # Torch's store shows it to strangers.
    assert len(environment["PET_RDZV_ID"]) == 64
    assert environment.keys().isdisjoint({"NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME"})
    assert (tmp_path / "run/limit").read_text() == "0\n"
    assert (tmp_path / "run/jobs/9/start_0/n7.log").read_text() == "trains on n7\n"
    # The second node does not write what the first has.
    assert not (tmp_path / "run/jobs/9/start_0/preflight/token").exists()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--gpus", "2", RECIPE), "--gpus: not an option of node.sh"),
        (("--node-rank", "2", RECIPE), "--node-rank 2: there are 2 nodes, counted from 0"),
        ((), "write node.sh --nodes N"),
        (("nope.json",), "there is no nope.json"),
    ],
)
def test_words_that_are_refused(launch, words, message):
    code, log = node(launch, *words)
    assert (code, message in log) == (2, True), log


@pytest.mark.parametrize(
    ("settings", "code", "message"),
    [
        ("PREFLIGHT_CODE=3", 3, ""),
        ("PREFLIGHT_CODE=3 LARGEBATCH_PREFLIGHT=off TRAIN_CODE=1", 1, "trains on"),
        ("PREFLIGHT_CODE=3 LARGEBATCH_PREFLIGHT=warn TRAIN_CODE=1", 1, "starts anyway"),
        ("PREFLIGHT_CODE=1 LARGEBATCH_PREFLIGHT=warn", 1, ""),
        ("LARGEBATCH_PREFLIGHT=maybe", 2, "LARGEBATCH_PREFLIGHT=maybe: write on, warn or off"),
        ("LARGEBATCH_PREFLIGHT_SECONDS=10m", 2, "LARGEBATCH_PREFLIGHT_SECONDS=10m: not a number"),
        ("RUN_DIR=gs://bucket", 2, "object stores"),
        ("STRATEGY=x", 2, "STRATEGY=x: there is no recipes/accelerate_configs/x.yaml"),
        # Two nodes could not know of each other's folder.
        ("LARGEBATCH_JOB_ID=", 2, "2 nodes need the same name for this start: set LARGEBATCH_JOB_ID"),
        ("LARGEBATCH_RESTART=", 2, "LARGEBATCH_RESTART to the number of its restarts on all of them"),
        ("LARGEBATCH_JOB_ID=a/b", 2, "LARGEBATCH_JOB_ID=a/b: it names a folder"),
        ("LARGEBATCH_TOKEN=x", 2, "LARGEBATCH_LOGS and LARGEBATCH_TOKEN go together"),
    ],
)
def test_a_node_that_does_not_train(launch, settings, code, message):
    changes = dict(setting.split("=") for setting in settings.split())
    returned, log = node(launch, RECIPE, **changes)
    assert returned == code, log
    assert message in log


def test_a_refusal_of_the_training_counts_without_a_preflight(launch):
    code, log = node(launch, "--train-only", RECIPE, PREFLIGHT_CODE="3", TRAIN_CODE="1", REFUSAL="why")
    assert (code, "trains on" in log) == (2, True), log


def test_options_of_the_jobset(launch, run_dir, written):
    checkout, environment = launch
    spec = yaml.safe_load((checkout / "launch/kubernetes.yaml").read_text())["spec"]
    (container,) = spec["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]["containers"]
    fields = {
        "metadata.labels['jobset.sigs.k8s.io/jobset-uid']": "uid",
        "metadata.labels['jobset.sigs.k8s.io/restart-attempt']": "3",
        "spec.nodeName": "n7",
    }
    for variable in container["env"]:
        field = variable.get("valueFrom", {}).get("fieldRef", {}).get("fieldPath")
        environment.setdefault(variable["name"], fields[field] if field else variable["value"])
    words = [word.replace("$(JOB_COMPLETION_INDEX)", "1") for word in container["args"]]
    assert container["command"] == ["bash", "launch/node.sh"]
    code, log = run_bash("launch/node.sh", *words, cwd=checkout, environment=environment)
    assert code == 0, log
    assert environment_in(run_dir)["LARGEBATCH_TOKEN"] == "uid.3"
    assert " --gpus 8 " in written("preflight")
    assert " --num_machines 2 --num_processes 16 --machine_rank 1 " in written("words.n7")
    place = " --main_process_ip largebatch-node-0-0.largebatch --main_process_port 29500 "
    assert place in written("words.n7")


def leave_files_in(start):
    """What an earlier start has left."""
    for name in ("preflight/ended.of_it", "preflight/bad_nodes", "endings/rank_0.json"):
        (start / name).parent.mkdir(parents=True, exist_ok=True)
        (start / name).write_text('{"kind": "refused"}')


def test_the_first_node_removes_what_an_earlier_start_has_left(launch, run_dir):
    start = run_dir / "jobs/9/start_0"
    leave_files_in(start)
    assert node(launch, RECIPE)[0] == 2  # the refusal counts, since the second node removes nothing
    code, log = node(launch, "--node-rank", "0", RECIPE)
    assert code == 0, log
    assert [path.name for path in (start / "preflight").iterdir()] == ["token"]
    assert (start / "preflight/token").read_text() == "9.0\n"
    assert not (start / "endings").exists()
    # A caller that has made the folder and the token has files of its own there.
    (start / "preflight/token").write_text("mine\n")
    code, log = node(launch, "--node-rank", "0", RECIPE, LARGEBATCH_LOGS=str(start), LARGEBATCH_TOKEN="mine")
    assert (code, (start / "preflight/token").read_text()) == (0, "mine\n"), log


@pytest.mark.parametrize("text", [None, "another start's"])
def test_a_folder_that_is_not_the_callers(launch, tmp_path, text):
    """As on a node that does not see the caller's file system: the folder is not there, or another one."""
    write_commands(tmp_path / "bin", {"sleep": ""})
    if text:
        (tmp_path / "preflight").mkdir()
        (tmp_path / "preflight/token").write_text(text)
    code, log = node(launch, RECIPE, LARGEBATCH_LOGS=str(tmp_path), LARGEBATCH_TOKEN="mine", LARGEBATCH_NODE="n7")
    assert (code, "trains on" in log) == (3, False), log
    assert f"error: n7: {launch[0]}: {tmp_path}/preflight is not the folder that the caller wrote to" in log


@pytest.mark.parametrize(("job", "folder", "restart"), [("", "none", None), ("9", "9", "1")])
def test_every_start_on_one_node_has_a_folder(launch, tmp_path, job, folder, restart):
    leave_files_in(tmp_path / "run/jobs" / folder / "start_0")
    words = ("--nodes", "1", "--node-rank", "0", RECIPE)
    code, log = node(launch, *words, LARGEBATCH_JOB_ID=job, LARGEBATCH_RESTART="", GLOO_SOCKET_IFNAME="ib0")
    assert code == 0, log
    environment = environment_in(tmp_path / "run")
    assert (environment["NCCL_SOCKET_IFNAME"], environment["GLOO_SOCKET_IFNAME"]) == ("lo", "ib0")
    assert environment["LARGEBATCH_LOGS"] == f"{tmp_path}/run/jobs/{folder}/start_1"
    assert environment["LARGEBATCH_TOKEN"] == f"{folder}.1"
    assert (environment["LARGEBATCH_RESTART"] or None) == restart
    assert (tmp_path / f"run/jobs/{folder}/start_1/preflight/token").read_text() == f"{folder}.1\n"


@pytest.mark.parametrize("ended_with", ["124", "137"])
def test_a_preflight_that_hangs(launch, tmp_path, ended_with):
    write_commands(tmp_path / "bin", {"timeout": f"exit {ended_with}"})
    code, log = node(launch, RECIPE, LARGEBATCH_PREFLIGHT_SECONDS="7", LARGEBATCH_NODE="n7")
    assert (code, "trains on" in log) == (2, False)
    assert "error: n7: the pre-flight " in log
    assert "607 seconds (LARGEBATCH_PREFLIGHT_SECONDS + 600)" in log
    code, log = node(launch, RECIPE, LARGEBATCH_PREFLIGHT="warn", LARGEBATCH_NODE="n7")
    assert (code, "trains on n7" in log) == (0, True)
    assert "warning: n7: the pre-flight " in log


@pytest.mark.parametrize(
    ("commands", "code"),
    [
        ("false; true", 2),
        ("true; false", 2),
        ("[[ -d /nowhere ]] && true; false || true; : $UNSET; export PREPARED=$#; ulimit -n 77", 0),
    ],
)
def test_before_training(launch, tmp_path, commands, code):
    """Any command that fails counts, and is no reason to try again."""
    (launch[0] / "slurm/site.sh").write_text(f"before_training() {{ {commands}; }}\n")
    write_commands(tmp_path / "bin", {"accelerate": f"ulimit -n\n{ACCELERATE}"})
    returned, log = node(launch, RECIPE, LARGEBATCH_NODE="n7")
    assert (returned, "trains on" in log) == (code, not code), log
    endings = [(each.kind, each.message) for each in read_endings(tmp_path / "run/jobs/9/start_0/endings")]
    if code:
        assert endings == [("refused", "before_training of slurm/site.sh failed on n7; see its output")]
        assert "error: n7: before_training of slurm/site.sh failed" in log
    else:
        assert not endings
        assert environment_in(tmp_path / "run")["PREPARED"] == "0"
        assert "77\n" in log


@pytest.mark.parametrize("file", ["slurm/site.sh", "profile"])
def test_files_that_set_up_a_node(launch, tmp_path, file):
    """They see no arguments, and cannot change what the caller has decided; arrays and other variables stay."""
    (launch[0] / file).write_text(
        "echo $# words >&2\n"
        f"export RUN_DIR={tmp_path}/elsewhere STRATEGY=fsdp LARGEBATCH_JOB_ID=1 LARGEBATCH_RESTART=5\n"
        "export LARGEBATCH_NODE=x KEPT=1\n"
        "LARGEBATCH_WRAP=(env 'X=two words')\n"
    )
    changes = {"LARGEBATCH_ENV": "profile"} if file == "profile" else {}
    code, log = node(launch, RECIPE, LARGEBATCH_NODE="n7", STRATEGY="zero1", **changes)
    assert (code, "0 words" in log) == (0, True), log
    environment = environment_in(tmp_path / "run")
    assert environment["LARGEBATCH_LOGS"] == f"{tmp_path}/run/jobs/9/start_0"
    assert [environment[name] for name in ("STRATEGY", "LARGEBATCH_NODE")] == ["zero1", "n7"]
    assert [environment[name] for name in ("KEPT", "X")] == ["1", "two words"]


def test_the_first_process_of_a_container_passes_signals_on(launch):
    checkout, environment = launch
    namespaces = "unshare --user --map-root-user --pid --fork --kill-child --mount-proc"
    if subprocess.run([*namespaces.split(), "true"], capture_output=True).returncode:
        pytest.skip("no namespaces for users here")
    node_sh = f"launch/node.sh --nodes 1 --node-rank 0 --address x --port 2000 {RECIPE}"
    stopped = f"{namespaces} bash {node_sh} & {BEGUN}; kill $(pgrep -P $!); wait $!"
    environment |= {"SLOW": "n7", "LARGEBATCH_NODE": "n7"}
    code, log = run_bash("-c", stopped, cwd=checkout, environment=environment)
    assert (code, "got TERM" in log) == (3, True), log


def hosts(launch, tmp_path, *words, **changes):
    checkout, environment = launch
    file = str(tmp_path / "hosts")
    return run_bash("launch/hosts.sh", file, RECIPE, *words, cwd=checkout, environment=environment | changes)


def test_hosts(launch, tmp_path, written):
    code, log = hosts(launch, tmp_path, "--seed", "a  b", WANDB_API_KEY="it's $HOME")
    assert code == 0, log
    assert sorted(line for line in log.splitlines() if "trains" in line) == ["[a] trains on a", "[b] trains on b"]
    for rank, host in enumerate("ab"):
        for words in (f" --config {RECIPE} ", f" --machine_rank {rank} ", " --main_process_ip a ", " --seed a  b "):
            assert words in written(f"words.{host}")
    assert environment_in(tmp_path / "run")["WANDB_API_KEY"] == "it's $HOME"


@pytest.mark.parametrize("name", ["c/../d", "-oProxyCommand=x"])
def test_a_host_that_is_no_name_starts_nothing(launch, tmp_path, name):
    (tmp_path / "hosts").write_text(f"a\n{name}\n")
    code, log = hosts(launch, tmp_path)
    assert (code, f"{name} is not the name of a machine" in log) == (2, True), log
    assert not (tmp_path / "run/jobs").exists()


def test_every_start_over_ssh_has_a_folder_and_a_token(launch, tmp_path):
    leave_files_in(tmp_path / "run/jobs/9/start_0")
    (tmp_path / "profile").write_text("echo welcome\n")
    tokens = set()
    for restart in "12":
        code, log = hosts(launch, tmp_path, LARGEBATCH_JOB_ID="9", BASH_ENV=str(tmp_path / "profile"))
        assert code == 0, log
        trained_in = environment_in(tmp_path / "run")
        logs = tmp_path / f"run/jobs/9/start_{restart}"
        assert (trained_in["LARGEBATCH_LOGS"], trained_in["LARGEBATCH_RESTART"]) == (str(logs), restart)
        tokens.add((logs / "preflight/token").read_text().strip())
        assert trained_in["LARGEBATCH_TOKEN"] in tokens
    assert len(tokens) == 2


@pytest.mark.slow
def test_a_host_that_fails_ends_the_others(launch, tmp_path):
    (tmp_path / "played").write_text("export SLOW=a BROKEN=b\n")
    code, log = hosts(launch, tmp_path, LARGEBATCH_ENV=str(tmp_path / "played"))
    assert code in (5, BY_CHANCE), log
    assert "[a] got TERM" in log
    assert not is_running((tmp_path / "run/slow").read_text().strip())


@pytest.mark.slow
def test_a_signal_arrives_at_remote_processes(launch, tmp_path):
    """What follows when this end is killed is tried in tests/cluster."""
    (tmp_path / "played").write_text("export SLOW=a\n")
    (tmp_path / "hosts").write_text("a\n")
    stopped = f'launch/hosts.sh "$@" & {BEGUN}; kill $!; wait $!'
    checkout, environment = launch
    environment |= {"LARGEBATCH_ENV": str(tmp_path / "played")}
    words = ("-c", stopped, "bash", str(tmp_path / "hosts"), RECIPE)
    code, log = run_bash(*words, cwd=checkout, environment=environment)
    assert code in (3, BY_CHANCE)
    assert "[a] got TERM" in log
    wait_for(lambda: not is_running((tmp_path / "run/slow").read_text().strip()))


def test_free_ports(launch):
    checkout, environment = launch
    with socket.create_server(("127.0.0.1", 0)) as server:
        used = server.getsockname()[1]
        for ports, answer in ((f"{used}-{used}", 1), ("20-10", 2), ("x", 2)):
            settings = environment | {"LARGEBATCH_PORTS": ports}
            code, log = run_bash("launch/free_port.sh", "127.0.0.1", cwd=checkout, environment=settings)
            assert (code, f"LARGEBATCH_PORTS={ports}" in log) == (answer, True)
        code, port = run_bash("launch/free_port.sh", "127.0.0.1", cwd=checkout, environment=environment)
    assert (code, 10000 <= int(port) < 32768) == (0, True)
