import json

import pytest

from audited_loops import EXAMPLES, changed
from largebatch.__main__ import main


@pytest.fixture
def audit(tmp_path, capsys):
    """Audit a loop of the page with some changes; what it says as JSON, or the error."""

    def audited(*changes, loop="train", words=(), batch=4):
        (tmp_path / "loop.py").write_text(changed(EXAMPLES[loop], *changes))
        small = [f"--batch={batch}", "--world-sizes=1,2", "--accumulations=1,2"]
        code = main(["audit", str(tmp_path / "loop.py"), "--json", *small, *map(str, words)])
        out, err = capsys.readouterr()
        if not out:
            assert code == 2
            return err
        found = json.loads(out)
        assert code == bool(found["wrong"])
        return found

    return audited
