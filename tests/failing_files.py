"""A run whose file system fails: at one call of a file-system function in its run folder, or from that call on.

Each run is a fork of a process that has imported everything, and that has run no torch operation.
"""

import errno
import fcntl
import io
import json
import os
import re
import shutil
import signal
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from largebatch.storage.catalog import entries
from largebatch.storage.layout import read_object
from largebatch.storage.run_folder import RunFolder
from largebatch.tools.local_jobs.training import train
from paths import PYDOC, ROOT
from processes import forked
from resuming import TINY_GPT
from saving import checksum_problem

CODES = ("EIO", "ENOSPC", "ESTALE", "EACCES")
# Synchronous, so that calls come in the same order each time.
WORDS = (*TINY_GPT, "--train.stop_after_steps=4", '--checkpoint.every={"steps": 2}', "--checkpoint.asynchronous=false")
BEGUN = (*WORDS, "--train.stop_after_steps=2")
SECONDS_OF_A_HANG = 120
BY_PATH = ("open", "rename", "replace", "unlink", "mkdir", "rmdir", "link", "stat", "lstat", "listdir", "scandir")
BY_DESCRIPTOR = ("write", "fsync")
# Names of files that differ from run to run.
CHANGING = re.compile(r"[0-9a-f]{8,}|\d+")


@dataclass(frozen=True)
class Moment:
    """A call: the function, the file in the run folder, and the function of ours that has called it."""

    call: str
    file: str
    caller: str


class FileSystem:
    """Calls of file-system functions about a folder: noted, and failing from a moment on."""

    def __init__(self, folder: Path, moment: Moment | None = None, code: str = "EIO", for_ever: bool = False):
        self._folder = str(folder)
        self._moment = moment
        self._error = getattr(errno, code)
        self._for_ever = for_ever
        self._failing = False
        self.moments: dict[Moment, None] = {}

    def install(self) -> None:
        """Put this in front of the functions of `os` and `io`, for the rest of the process."""
        for name in (*BY_PATH, *BY_DESCRIPTOR):
            setattr(os, name, self._before(name, getattr(os, name)))
        fcntl.flock = self._before("flock", fcntl.flock)
        io.open = self._before("io.open", self._open)

    def _before(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def checked(*arguments: Any, **settings: Any) -> Any:
            for path in arguments[:1] or (".",):
                self._check(name, path, settings.get("dir_fd"))
            return function(*arguments, **settings)

        return checked

    def _open(self, *arguments: Any, original: Callable[..., Any] = io.open, **settings: Any) -> Any:
        file = original(*arguments, **settings)
        for name in ("read", "readinto", "write"):
            if hasattr(file, name):
                setattr(file, name, self._of(file, name))
        return file

    def _of(self, file: Any, name: str) -> Callable[..., Any]:
        function = getattr(file, name)
        descriptor = file.fileno()

        def checked(*arguments: Any) -> Any:
            self._check(name, descriptor, None)
            return function(*arguments)

        return checked

    def _check(self, call: str, path: Any, folder: int | None) -> None:
        """Raise the error if it is this call's turn."""
        if hasattr(path, "fileno"):
            path = path.fileno()
        if isinstance(path, int) or folder is not None:
            place = _readlink(f"/proc/self/fd/{path if folder is None else folder}")
            text = place if folder is None else f"{place}/{os.fsdecode(path)}"
        else:
            text = os.fsdecode(path)
        if text != self._folder and not text.startswith(self._folder + "/"):
            return
        moment = Moment(call, CHANGING.sub("#", text.removeprefix(self._folder).strip("/")), _caller())
        self.moments[moment] = None
        if moment == self._moment or self._failing:
            self._moment = None
            self._failing = self._for_ever
            raise OSError(self._error, os.strerror(self._error), text)


_readlink = os.readlink


def _caller() -> str:
    """The innermost function of largebatch that runs."""
    frame = sys._getframe(1)
    while frame is not None:
        name = frame.f_globals.get("__name__", "")
        if name.startswith("largebatch."):
            return f"{name}.{frame.f_code.co_name}"
        frame = frame.f_back
    return ""


def run(run_dir: Path, words: tuple[str, ...], files: FileSystem | None = None) -> tuple[int, str]:
    """Train in a forked process, and return its exit code (that of SIGALRM if it hung) and its output."""
    output = run_dir.with_name(f"{run_dir.name}.log")
    code = forked(_train, run_dir, words, files, output)
    return code, output.read_text(errors="replace")


def _train(run_dir: Path, words: tuple[str, ...], files: FileSystem | None, output: Path) -> None:
    signal.alarm(SECONDS_OF_A_HANG)
    os.chdir(ROOT)
    sys.stdout = sys.stderr = output.open("w")
    if files is not None:
        files.install()
    try:
        train(PYDOC, *words, run_dir=run_dir)
    finally:
        if files is not None:
            moments = [vars(moment) for moment in files.moments]
            Path(f"{output}.moments").write_text(json.dumps(moments))


@dataclass
class Scenario:
    """A run that begins in a new folder, or that resumes after two of four steps."""

    folder: Path
    name: str
    begun: Path | None = None

    def new_folder(self, name: str) -> Path:
        """The folder of a run as it is before the start."""
        path = self.folder / f"{self.name}_{name}"
        if self.begun is not None:
            shutil.copytree(self.begun, path)
        return path

    def expect(self) -> list[Moment]:
        """Run without a fault, keep what comes of it, and return the moments at which the file system is used."""
        path = self.new_folder("whole")
        code, text = run(path, WORDS, FileSystem(path))
        assert code == 0, text
        self.results = results_of(path)
        return [Moment(**moment) for moment in json.loads(Path(f"{path}.log.moments").read_text())]

    def verdict(self, moment: Moment, code: str, for_ever: bool, number: int) -> tuple[str, int]:
        """What is wrong with how a run meets a fault, "" for nothing; and its exit code."""
        path = self.new_folder(f"fault_{number}")
        exit_code, text = run(path, WORDS, FileSystem(path, moment, code, for_ever))
        wrong = self._wrong(path, exit_code, text)
        if not wrong and exit_code:
            again, text = run(path, WORDS)
            wrong = f"the same command exits with {again}: {text[-500:]}" if again else self._wrong(path, again, text)
        shutil.rmtree(path, ignore_errors=True)
        return wrong, exit_code

    def _wrong(self, path: Path, exit_code: int, text: str) -> str:
        if "Traceback (most recent call last)" in text:
            return f"a traceback: {text[-1500:]}"
        if exit_code == 0 and results_of(path) != self.results:
            return f"the results differ: {results_of(path)}, not {self.results}"
        if exit_code not in (0, 2, 74):
            return f"it exits with {exit_code}: {text[-500:]}"
        return ""


def results_of(run_dir: Path) -> dict[str, Any]:
    """What a run that is over must have left."""
    weights = run_dir / "model/model.safetensors"
    intact = [entry.step for entry in entries(run_dir / "checkpoints") if checksum_problem(entry.path) is None]
    ending = RunFolder(run_dir).ending()
    return {
        "outcome": ending and ending.kind,
        "loss": read_object(run_dir / "summary.json").get("train_loss"),
        "weights": hash(weights.read_bytes()) if weights.exists() else None,
        "checkpoint": max(intact, default=None),
    }


def scenarios(folder: Path) -> Iterator[Scenario]:
    """A new run and a resumed one."""
    yield Scenario(folder, "new")
    begun = folder / "begun"
    code, text = run(begun, BEGUN)
    assert code == 0, text
    yield Scenario(folder, "resumed", begun)
