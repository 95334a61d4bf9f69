"""The command that follows each checkpoint that is kept: an evaluation by another program, or an upload."""

import atexit
import math
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from largebatch.config.sections import Checkpoint
from largebatch.errors import TrainingFailed, UserError
from largebatch.run.watch.waiting import in_thread
from largebatch.storage.files import link_folder, parse_object, remove_folder
from largebatch.system.parent_process import die_with_thread

MAX_OUTPUT_BYTES = 2**20
SECONDS_BETWEEN_LOOKS = 0.1
SECONDS_UNTIL_ENDED = 5.0
JOB_VARIABLES = (
    "ACCELERATE_",
    "FSDP_",
    "GROUP_RANK",
    "GROUP_WORLD_SIZE",
    "LARGEBATCH_",
    "LOCAL_RANK",
    "LOCAL_WORLD_SIZE",
    "MASTER_",
    "RANK",
    "ROLE_",
    "TORCHELASTIC_",
    "WORLD_",
)
"""Prefixes of environment variables that would make a program believe that it is a process of a distributed job."""


def check_program(settings: Checkpoint) -> None:
    """Raise UserError if this process cannot run the command's program."""
    if settings.then is not None and shutil.which(settings.then[0]) is None:
        raise UserError(
            f"checkpoint.then: there is no program {settings.then[0]!r} that may be run; write one on PATH, or its path"
        )


@dataclass
class Then:
    """Runs the command beside training, for one checkpoint at a time; a newer one replaces one that waits.

    Only the main process calls it. Whatever the command does, training goes on.
    """

    settings: Checkpoint  # the recipe's section, with the command
    folder: Path  # for the exported weights
    # Called with the step and the numbers in the last JSON object that the command has printed on a line.
    answered: Callable[[int, dict[str, float]], None]
    failed: Callable[[int, str], None]  # called with the step and what went wrong
    _waiting: tuple[int, Path] | None = None
    _running: tuple[int, "Future[dict[str, float]]"] | None = None
    _process: "subprocess.Popen[bytes] | None" = None
    _why_ended: str = ""  # why the command was killed, if it was

    def __post_init__(self) -> None:
        if self.settings.then is not None:
            atexit.register(self.end)

    def follow(self, step: int, checkpoint: Path) -> None:
        """Run the command for a complete checkpoint, after the one that it is running for."""
        if self.settings.then is not None:
            self._waiting = step, checkpoint
            self.poll()

    def poll(self) -> None:
        """Take the command's answer if it has ended, and start it for the checkpoint that waits."""
        if self._running is not None and self._running[1].done():
            step, work = self._running
            self._running = None
            if error := work.exception():
                self.failed(step, self._why_ended or str(error))
            elif answer := work.result():
                self.answered(step, answer)
        if self._running is None and self._waiting is not None:
            step, checkpoint = self._waiting
            self._waiting = None
            self._running = step, in_thread("then", lambda: self._run(step, checkpoint))

    def finish(self) -> None:
        """Wait until nothing runs or waits, but not longer than the settings say; then end the command."""
        deadline = time.monotonic() + self.settings.then_seconds
        while self._running is not None and time.monotonic() < deadline:
            time.sleep(SECONDS_BETWEEN_LOOKS)
            self.poll()
        seconds = self.settings.then_seconds
        self.end(f"it was still running {seconds:g} s after the end of training; raise checkpoint.then_seconds")

    def end(self, why: str = "the run ended before it did") -> None:
        """Kill the command with its process group, without waiting for processes that have left the group."""
        if self._waiting is not None:
            self.failed(self._waiting[0], "the run ended before it began")
            self._waiting = None
        deadline = time.monotonic() + SECONDS_UNTIL_ENDED
        while self._running is not None and time.monotonic() < deadline:
            if self._process is not None and self._process.returncode is None:
                self._why_ended = why
                with suppress(ProcessLookupError):
                    os.killpg(self._process.pid, signal.SIGKILL)
            time.sleep(SECONDS_BETWEEN_LOOKS)
            self.poll()

    def _run(self, step: int, checkpoint: Path) -> dict[str, float]:
        """The numbers that the command prints for a checkpoint."""
        assert self.settings.then is not None
        model = self.folder / f"step_{step}"
        words = [word.replace("{model}", str(model)).replace("{step}", str(step)) for word in self.settings.then]
        # A better checkpoint may replace this one meanwhile.
        kept = links = self.folder / checkpoint.name
        remove_folder(self.folder)
        try:
            try:
                link_folder(checkpoint, kept)
            except FileNotFoundError as error:
                raise TrainingFailed("the checkpoint is gone before its turn; was there a better one?") from error
            except OSError:
                # The file system has no links, or they would lead to another one.
                kept = checkpoint
            try:
                # By another process, whose work does not slow down training.
                self._output_of([sys.executable, "-m", "largebatch", "export", str(kept), str(model)])
            except TrainingFailed as error:
                raise TrainingFailed(f"its weights could not be exported: {error}") from error
            remove_folder(links)
            # Bars of progress and warnings may come after it.
            lines = reversed(self._output_of(words).splitlines())
            found = (parse_object(line) for line in lines if line.lstrip().startswith(b"{"))
            answer = next((each for each in found if each is not None), {})
        finally:
            remove_folder(self.folder)
        return {
            name: float(value) for name, value in answer.items() if type(value) in (int, float) and math.isfinite(value)
        }

    def _output_of(self, command: list[str]) -> bytes:
        """Run a command, and return what it prints."""
        environment = {name: value for name, value in os.environ.items() if not name.startswith(JOB_VARIABLES)}
        # A Python program would print what it has kept in its buffer after its error, which comes last.
        environment["PYTHONUNBUFFERED"] = "1"
        output = b""
        with subprocess.Popen(
            command,
            bufsize=0,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env=environment,
            start_new_session=True,
            preexec_fn=die_with_thread,
        ) as process:
            self._process = process
            assert process.stdout is not None
            os.set_blocking(process.stdout.fileno(), False)
            # More would fill this process's memory.
            while len(output) < MAX_OUTPUT_BYTES:
                # What it has started may outlive it, and keep its output open.
                has_ended = process.poll() is not None
                new = process.stdout.read(MAX_OUTPUT_BYTES)
                if new:
                    output += new
                elif has_ended or new is not None:
                    break
                else:
                    time.sleep(SECONDS_BETWEEN_LOOKS)
            process.stdout.close()
        if len(output) >= MAX_OUTPUT_BYTES:
            raise TrainingFailed(f"{command[0]} prints more than {MAX_OUTPUT_BYTES:,} bytes")
        if process.returncode:
            text = output.strip().rpartition(b"\n")[2].decode(errors="replace")
            raise TrainingFailed(f"{command[0]} has ended with code {process.returncode}: {text}")
        return output
