"""One bar on a terminal, plain lines elsewhere, silence on other ranks."""

import io

import pytest

from largebatch.config import load_config
from largebatch.plan import resolve
from largebatch.run.record import progress
from largebatch.run.record.progress import ProgressBar
from paths import DIGITS

LOGGED = {"step": 10, "loss": 1.2345, "lr": 0.1, "samples_per_second": 1500.0, "seconds": 4.0}


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture
def plan():
    return resolve(load_config(DIGITS), 2)


def test_bar_on_a_terminal(plan, monkeypatch, capsys):
    terminal = Terminal()
    monkeypatch.setattr(progress.sys, "stderr", terminal)
    # Room for any number of steps per second.
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setenv("LINES", "50")
    shown = ProgressBar(plan, shown=True)
    for _ in range(10):
        shown.step()
    shown.logged(LOGGED)
    shown.close()
    bar = terminal.getvalue().split("\r")[-1]
    assert "10/440" in bar
    assert "loss 1.2345, lr 0.1, 1,500 samples/s" in bar
    assert "<" in bar  # elapsed<remaining
    assert capsys.readouterr().out == ""


def test_lines_elsewhere(plan, capsys):
    shown = ProgressBar(plan, shown=True)
    shown.logged(LOGGED)
    # 430 steps are left at 0.4 s each.
    assert capsys.readouterr().out == "step 10/440: loss 1.2345, lr 0.1, 1,500 samples/s, 02:52 left\n"


def test_other_ranks_are_silent(plan, monkeypatch, capsys):
    monkeypatch.setattr(progress.sys, "stderr", Terminal())
    hidden = ProgressBar(plan, shown=False)
    hidden.step()
    hidden.logged(LOGGED)
    hidden.say("evaluation")
    hidden.close()
    assert (capsys.readouterr().out, progress.sys.stderr.getvalue()) == ("", "")
