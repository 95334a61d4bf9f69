"""Loops and options that cannot be audited are refused with the reason."""

import pytest

from largebatch.__main__ import main
from largebatch.tools.local_jobs.jobs import JobTimedOut

BAD = {
    "raise ValueError('a bad sample')": "rank 1: ValueError: a bad sample",
    "exit(3)": "rank 1: exit code 3",
    "import time; time.sleep(100)": "rank 1: no result within 10 s; give it a longer --timeout",
}


@pytest.mark.parametrize("line", BAD)
def test_a_process_that_does_not_return(line, audit_in_new_processes):
    ends = f"    if dist.get_rank() == 1:\n        {line}\n    return model"
    found = audit_in_new_processes(("    return model", ends), words=["--timeout=10"])
    assert found["wrong"][0].startswith(f"W = 2, A = 1: {BAD[line]}")


def test_another_number_of_steps_at_the_end(audit_in_new_processes):
    share = "(Subset(data, range(dist.get_rank(), len(data), dist.get_world_size())), micro_batch_size)"
    (wrong,) = audit_in_new_processes(
        ("(data, micro_batch_size, sampler=DistributedSampler(data, shuffle=False))", share)
    )["wrong"]
    failure = "if 3 samples are left at the end of an epoch, training fails: W = 2, A = 2: rank 0: "
    assert wrong.startswith(failure)
    assert " others had ended: all processes must make the same calls; drop them" in wrong


def test_a_loop_that_hangs_is_tried_once(audit_in_new_processes, monkeypatch):
    tried = []

    def hangs(*arguments, **_):
        tried.append(arguments)
        raise JobTimedOut([(0, "no result within 5 s", "")])

    monkeypatch.setattr("largebatch.tools.audit.outcome.run_job", hangs)
    assert "no result within 5 s" in audit_in_new_processes()
    assert len(tried) == 1


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("def audit(", "def fit(", "loop.py has no function audit"),
        ("return model\n", "return None\n", "it returned NoneType without parameters"),
        ("            optimizer.step()", "            pass", "make 0 steps of a torch optimizer"),
        ("/ accumulation", "* float('nan')", "the gradient is not finite"),
        ("def audit(", "train(data, 4, 1)\n\n\ndef audit(", "loop.py trains when it is imported"),
        (
            "import torch\n",
            "import argparse\nparser = argparse.ArgumentParser()\nparser.add_argument('x')\n"
            "parser.parse_args()\nimport torch\n",
            "gets no arguments",
        ),
        ("return model\n", "exit(0)\n", "called exit(0) before the function had returned"),
        ("model(x)", "model(x.cuda())", "the audit is on the CPU: choose the device"),
        ("(Subset(data, indices)", "(data", "4 samples in one micro-batch make 25 steps"),
        ("parameters(), lr=0.1", "parameters(), lr=0.1 if indices else", "SyntaxError"),
    ],
)
def test_what_cannot_be_audited(old, new, said, audit_in_new_processes):
    assert said in audit_in_new_processes((old, new))


def test_numbers_that_do_not_follow_from_a_seed(audit_in_new_processes, tmp_path):
    draw = f"""def draw():
    # Drawn from the machine, two numbers are alike now and then; these never are.
    with open({str(tmp_path / "drawn")!r}, "a") as drawn:
        drawn.write("1")
        return drawn.tell()


def train("""
    error = audit_in_new_processes(("model(x)", "model(x + draw())"), ("def train(", draw))
    assert "with the samples in reverse order, the gradient differs by" in error


def test_options_that_do_not_fit(audit_in_new_processes, tmp_path, capsys):
    with pytest.raises(SystemExit):
        audit_in_new_processes(batch=6)
    assert "write a --batch of a multiple of 4" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        audit_in_new_processes(words=["--world-sizes=1", "--accumulations=1"])
    assert "nothing to compare with one process and one micro-batch" in capsys.readouterr().err
    assert main(["audit", str(tmp_path / "absent.py")]) == 2
    assert "absent.py is not a file" in capsys.readouterr().err
