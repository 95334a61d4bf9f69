import json

import pytest

from largebatch.__main__ import main


@pytest.fixture
def audit(tmp_path, capsys):
    """Audit a file with this text; its exit code and what it says as JSON, or the error."""

    def audited(text, *words, batch=4):
        (tmp_path / "loop.py").write_text(text)
        small = [f"--batch={batch}", "--world-sizes=1,2", "--accumulations=1,2"]
        code = main(["audit", str(tmp_path / "loop.py"), "--json", *small, *map(str, words)])
        out, err = capsys.readouterr()
        return code, json.loads(out) if out else err

    return audited
