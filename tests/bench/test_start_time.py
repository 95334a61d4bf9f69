"""bench/start.py: what counts as the first step, and that the bare script imports what a recipe does."""

import ast
import subprocess
import sys
import time

import pytest

import start
from paths import ROOT

SCRIPT = """
import sys, time
from pathlib import Path
Path(sys.argv[1]).touch()
time.sleep(0.3)
Path(sys.argv[1]).write_text("1.0")
while not Path(sys.argv[3]).exists():
    time.sleep(0.05)
sys.exit(sys.argv[2] or 0)
"""


@pytest.mark.parametrize("reason", ["", "no such model"])
def test_the_first_step_is_when_it_has_written_something(tmp_path, monkeypatch, reason):
    script, may_end, waited = tmp_path / "script.py", tmp_path / "may end", []
    script.write_text(SCRIPT)

    def launch_command(_, folder):
        return [sys.executable, script, folder / "a", reason, may_end], folder / "a"

    monkeypatch.setattr(start, "launch_command", launch_command)

    class Process(subprocess.Popen):
        """It ends when it is waited for."""

        def wait(self, timeout=None):
            waited.append(time.perf_counter())
            may_end.touch()
            return super().wait(timeout)

    monkeypatch.setattr(subprocess, "Popen", Process)
    if reason:
        with pytest.raises(SystemExit, match="bare failed:\nno such model"):
            start.seconds_to_first_step("bare")
    else:
        began = time.perf_counter()
        seconds = start.seconds_to_first_step("bare")
        # Neither when the file was made nor when the process ended.
        assert 0.3 < seconds < waited[0] - began


def packages_after(code: str) -> set[str]:
    """Installed packages that are imported when the code has run in a Python of its own."""
    files = "((name, getattr(module, '__file__', None) or '') for name, module in sys.modules.items())"
    ask = f"import sys; print({{name.partition('.')[0] for name, file in {files} if 'site-packages' in file}})"
    result = subprocess.run(
        [sys.executable, "-c", f"{code}\n{ask}"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    return ast.literal_eval(result.stdout.strip().splitlines()[-1])


@pytest.mark.slow
def test_the_bare_script_imports_what_a_recipe_does():
    bare = ast.parse((ROOT / "bench/peers/start/bare.py").read_text())
    imports = "\n".join(ast.unparse(node) for node in bare.body if isinstance(node, ast.Import | ast.ImportFrom))
    recipe = "from largebatch.task_folders import import_from; import_from('recipes/causal_lm', 'train')"
    # A tracker is imported when the run begins.
    theirs = packages_after(f"{recipe}\nfrom torch.utils.tensorboard import SummaryWriter")
    mine = packages_after(imports)
    assert {"torch", "transformers", "accelerate"} <= mine
    # More would flatter ours.
    assert mine == theirs
