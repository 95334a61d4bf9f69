"""The loops of docs/audit.md, changes to them, and processes that try one loop after another."""

import gc
import importlib
import multiprocessing
import os
import re
import signal
import traceback
from contextlib import suppress
from threading import Thread

import torch

from largebatch.tools.audit import observe
from largebatch.tools.local_jobs.jobs import JobFailed, run_job
from largebatch.tools.plan.accelerate_configs import rehearsal_environment
from paths import ROOT

PAGE = (ROOT / "docs/audit.md").read_text()
EXAMPLES = {re.match(r"# (\w+)\.py", block)[1]: block for block in re.findall(r"(?ms)^```python\n(.*?)^```$", PAGE)}


def changed(text, *changes):
    """A text in which each first part is replaced by the second one."""
    for old, new in changes:
        assert old in text
        text = text.replace(old, new)
    return text


class Processes:
    """The processes of one job, for many calls: forking and connecting them for each would take minutes.

    A call that fails ends them, because one of them may wait for another; the next call starts new ones.
    """

    def __init__(self, world_size):
        self.settings = {"world_size": world_size, "environment": rehearsal_environment(None, world_size)}
        self.pipes = ()

    def call(self, *arguments):
        """What `run_job` returns or raises for `observe` and these arguments."""
        if not self.pipes:
            self._start()
        try:
            for pipe in self.pipes:
                pipe.send(arguments)
            assert all(pipe.poll(120) for pipe in self.pipes), "a process waits for another one"
            found = [pipe.recv() for pipe in self.pipes]
            if failures := [(rank, each, "") for rank, each in enumerate(found) if isinstance(each, str)]:
                raise JobFailed(failures)
        except BaseException:
            self.end()
            raise
        return found

    def _start(self):
        self.pipes, theirs = zip(*(multiprocessing.Pipe() for _ in range(self.settings["world_size"])), strict=True)
        Thread(target=self._run, args=(theirs,), daemon=True).start()
        self.pids = [pipe.recv() for pipe in self.pipes]

    def _run(self, pipes):
        with suppress(JobFailed):
            run_job(_observe_in_turn, pipes, **self.settings, timeout=3600)

    def end(self):
        for pid in self.pids if self.pipes else ():
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.pipes = ()


def _observe_in_turn(pipes):
    """Observe each call that comes, as a new process would."""
    made = {"hooks": [], "libraries": []}
    register = observe.register_optimizer_step_pre_hook
    library = torch.library.Library
    observe.register_optimizer_step_pre_hook = lambda hook: made["hooks"].append(register(hook)) or made["hooks"][-1]
    torch.library.Library = lambda *about: made["libraries"].append(library(*about)) or made["libraries"][-1]
    pipe = pipes[int(os.environ["RANK"])]
    pipe.send(os.getpid())
    while True:
        arguments = pipe.recv()
        try:
            found = observe.observe(*arguments)
        except Exception:
            found = traceback.format_exc()
        pipe.send(found)
        made["hooks"].pop().remove()
        made["libraries"].pop()._destroy()
        importlib.reload(torch.nn.utils.clip_grad)
        gc.collect()
