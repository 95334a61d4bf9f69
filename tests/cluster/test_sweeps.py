"""Sweeps as arrays of jobs; `bench/results/sweep_array` is of a larger one, with training."""

import pytest

import stand_in
from largebatch.storage.files import read_json_lines
from sweeping_array import SweepingArray

pytestmark = pytest.mark.slow

STEPS = 60


def test_a_sweep_whose_host_dies_is_complete_and_trains_nothing_twice(cluster, play, tmp_path):
    """The points of 2 rates and 2 seeds; a host loses its network and its processes while it trains some of them.

    The command is repeated while they train.
    """
    words = ["sweep", "gpt_pydoc", "--learning_rate.base_lr", "1e-3,2e-3", "--seeds", "2"]
    hold = tmp_path / "hold"
    programs = {"accelerate": stand_in.program(f"--hold={hold}")}
    environment = {"LARGEBATCH_ENV": str(play(**programs)), "LARGEBATCH_PREFLIGHT": "off"}
    words += [f"--train.stop_after_steps={STEPS}"]
    array = SweepingArray(cluster, tmp_path / "sweep", words, environment)
    output = array.command()
    assert "4 points in" in output
    assert output.endswith("when all points are trained, the same command shows the result\n")
    number = array.number

    def in_training():
        steps = [len(read_json_lines(point / "metrics.jsonl")) for point in array.points]
        return [index for index, step in enumerate(steps) if step == stand_in.HELD_AT]

    index = array.wait_for(in_training)[0]
    output = array.command()
    assert "0 of them trained already, 4 in Slurm's queue\n" in output
    assert array.number == number
    killed = array.lose_host_of(index)
    hold.touch()
    array.wait_for_end()

    assert array.outcomes() == {"finished"}, array.logs()
    assert [point.name[-7:] for point in array.points] == ["_seed=0", "_seed=1"] * 2
    for point in array.points:
        assert [line["step"] for line in read_json_lines(point / "metrics.jsonl")] == list(range(1, STEPS + 1))
        # A killed one may not have begun.
        assert len(list((point / "attempts").glob("*.json"))) <= (2 if point in killed else 1)
    assert len(list((array.points[index] / "attempts").glob("*.json"))) == 2
