import json

import pytest

from audited_loops import EXAMPLES, Processes, changed
from largebatch.__main__ import main


@pytest.fixture
def audit_in_new_processes(tmp_path_factory, capsys):
    """Audit a loop of the page with some changes, or a function of a file; what it says as JSON, or the error."""

    def audited(*changes, loop="train", words=(), batch=4):
        if loop in EXAMPLES:
            file = tmp_path_factory.mktemp("audited") / "loop.py"
            file.write_text(changed(EXAMPLES[loop], *changes))
            loop = str(file)
        small = [f"--batch={batch}", "--world-sizes=1,2", "--accumulations=1,2"]
        code = main(["audit", loop, "--json", *small, *map(str, words)])
        out, err = capsys.readouterr()
        if not out:
            assert code == 2
            return err
        found = json.loads(out)
        assert code == bool(found["wrong"])
        return found

    return audited


@pytest.fixture(scope="module")
def processes():
    processes = {world_size: Processes(world_size) for world_size in (1, 2)}
    yield processes
    for each in processes.values():
        each.end()


@pytest.fixture
def audit(processes, audit_in_new_processes, monkeypatch):
    """The same in processes that all of a file's tests share."""

    def call(_, *arguments, world_size, **__):
        return processes[world_size].call(*arguments)

    monkeypatch.setattr("largebatch.tools.audit.outcome.run_job", call)
    return audit_in_new_processes
