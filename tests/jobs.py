"""Jobs of several processes, forked from a server that has imported the engines already.

A fresh `accelerate launch` takes 10 to 20 s of imports; these start at once. Their environment is the one that
`accelerate launch` would give them, made from the same YAML files by Accelerate's own code.
"""

import contextlib
import multiprocessing
import os
import runpy
import socket
import sys
import tempfile
import traceback
from collections.abc import Callable, Sequence
from functools import cache
from multiprocessing import forkserver
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from paths import ROOT

context = multiprocessing.get_context("forkserver")
context.set_forkserver_preload(["preloaded"])


@cache
def _start_server() -> None:
    """The server finds `preloaded` by PYTHONPATH alone, and without it would go on with nothing imported."""
    before = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join([str(Path(__file__).parent), *([before] if before else [])])
    forkserver.ensure_running()
    if before is None:
        del os.environ["PYTHONPATH"]
    else:
        os.environ["PYTHONPATH"] = before


class JobFailed(AssertionError):
    """A process of a job raised, exited or did not end in time; carries the output of all of them."""


def run_job(
    function: Callable[..., Any],
    *arguments: Any,
    strategy: str = "ddp",
    world_size: int = 2,
    timeout: float = 180,
    environment: dict[str, str] | None = None,
) -> list[Any]:
    """Call `function(*arguments)` in every process of a job and return the results by rank.

    Raises:
        JobFailed: With the output and the traceback of the processes that failed.
    """
    _start_server()
    settings = launch_environment(strategy, world_size) if strategy != "single" else {}
    settings |= environment or {}
    with tempfile.TemporaryDirectory() as folder:
        processes, pipes = [], []
        for rank in range(world_size):
            mine, theirs = context.Pipe(duplex=False)
            output = Path(folder, f"rank{rank}.log")
            per_rank = {"RANK": str(rank), "LOCAL_RANK": str(rank)} if strategy != "single" else {}
            process = context.Process(target=_work, args=(theirs, output, settings | per_rank, function, arguments))
            process.start()
            theirs.close()
            processes.append(process)
            pipes.append(mine)
        results: dict[int, tuple[str, Any]] = {}
        while len(results) < world_size:
            waiting = [pipe for rank, pipe in enumerate(pipes) if rank not in results]
            ready = wait(waiting, timeout=timeout)
            if not ready:
                break
            for pipe in ready:
                rank = pipes.index(pipe)
                try:
                    results[rank] = pipe.recv()
                except EOFError:
                    results[rank] = ("error", "the process ended without a result")
            if any(kind == "error" for kind, _ in results.values()):
                # The others would wait for the one that failed.
                timeout = min(timeout, 1)
        for process in processes:
            process.join(timeout=10 if len(results) == world_size else 0)
            if process.is_alive():
                process.kill()
                process.join()
        logs = {rank: Path(folder, f"rank{rank}.log").read_text(errors="replace") for rank in range(world_size)}
    failed = [rank for rank in range(world_size) if results.get(rank, ("error", ""))[0] == "error"]
    if failed:
        reports = [
            f"--- rank {rank}: {results.get(rank, ('', 'no result in time'))[1]}\n{logs[rank]}" for rank in failed
        ]
        raise JobFailed("\n".join(reports))
    return [results[rank][1] for rank in range(world_size)]


def launch_environment(strategy: str, world_size: int) -> dict[str, str]:
    """What `accelerate launch` and torchrun would set for all processes of a one-machine job."""
    from accelerate.commands.launch import _validate_launch_command, launch_command_parser
    from accelerate.utils.launch import prepare_deepspeed_cmd_env, prepare_multi_gpu_env

    words = ["--config_file", str(ROOT / f"recipes/accelerate_configs/{strategy}.yaml")]
    words += ["--num_processes", str(world_size), "train.py"]
    args, defaults, _ = _validate_launch_command(launch_command_parser().parse_args(words))
    if args.use_deepspeed:
        args.deepspeed_fields_from_accelerate_config = ",".join(defaults.deepspeed_config)
        launched = prepare_deepspeed_cmd_env(args)[1]
    else:
        launched = prepare_multi_gpu_env(args)
    changed = {name: value for name, value in launched.items() if os.environ.get(name) != value}
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    return changed | {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "WORLD_SIZE": str(world_size),
        "LOCAL_WORLD_SIZE": str(world_size),
    }


def train(recipe: Path, *overrides: str, run_dir: Path) -> None:
    """Run a recipe's train.py in this process, as if it were started from the command line."""
    words = [str(recipe.parent / "train.py"), "--config", str(recipe), "--run_dir", str(run_dir), *overrides]
    sys.argv = words
    runpy.run_path(words[0], run_name="__main__")


def _work(
    pipe: Connection, output: Path, environment: dict[str, str], function: Callable[..., Any], arguments: Sequence[Any]
) -> None:
    os.environ.update(environment)
    os.chdir(ROOT)
    with output.open("w") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
        try:
            result = ("result", function(*arguments))
        except SystemExit as left:
            result = ("error", f"exit code {left.code}")
        except BaseException:
            result = ("error", traceback.format_exc())
        with contextlib.suppress(BrokenPipeError):
            pipe.send(result)
        sys.stdout.flush()
        sys.stderr.flush()
    # Not through interpreter shutdown: threads of the engines may still wait for processes that failed.
    os._exit(0)
