"""A run that is stopped and resumed is one more combination: it finds what checkpoints do not have."""

import re

import pytest

from tasks import TINY
from verifying import SGD, recipe_with, verify


@pytest.mark.slow
def test_state_that_checkpoints_do_not_have_is_found_by_resuming(tmp_path, monkeypatch, capfd):
    """A moving average in train.py, which every run that is not stopped has."""
    recipe = recipe_with("average = 1.0", tmp_path)
    script = recipe.with_name("train.py")
    text = script.read_text().replace(
        "options: RunOptions) -> None:\n", "options: RunOptions) -> None:\n    global average\n"
    )
    text = text.replace("        run.update(step)\n", "        average = average * 0.9 + 1\n        run.update(step)\n")
    script.write_text(text.replace("token_losses(batch).sum())", "token_losses(batch).sum() * average)"))
    monkeypatch.chdir(tmp_path)
    words = ["--strategies=ddp", "--world-sizes=2", "--micro-batch-sizes=4", "--steps=4", *TINY, *SGD]
    code, output, errors = verify(capfd, str(recipe), *words)
    assert code == 1, errors
    verdicts = re.findall(r"  (\w+)(?:, resumed .*)?\n", output.split("verdict\n")[1])
    assert verdicts == ["reference", "agrees", "differs"]
    assert "resumed halfway from a checkpoint of one process" in output
    assert "1 of 2 combinations agree with one process" in output
    assert "an average in train.py (keep it in a buffer of the model)" in output
    assert "an attribute of the optimizer (use optimizer.state)" in output
