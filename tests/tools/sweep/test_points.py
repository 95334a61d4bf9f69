"""Which points a command line means, and when a folder's sweep is another one."""

import json
from dataclasses import asdict, replace

import pytest

from largebatch.errors import UserError
from largebatch.tools.sweep.points import Sweep, grid
from paths import MAPS

RATES = ("--learning_rate.base_lr", "1e-3,2e-3")


def names(points):
    return [point.name for point in points]


def test_all_combinations_with_each_seed():
    points = grid([*RATES, "--batch.global_batch_size=12,24", "--data.side", "6"], seeds=2, seed=3)
    assert names(points) == [
        f"base_lr={rate}_global_batch_size={batch}_seed={seed}"
        for rate in (0.001, 0.002)
        for batch in (12, 24)
        for seed in (3, 4)
    ]
    assert points[3].settings == {"learning_rate.base_lr": 0.001, "batch.global_batch_size": 24}
    assert points[3].overrides == [
        "--learning_rate.base_lr=0.001",
        "--batch.global_batch_size=24",
        "--data.side=6",
        "--seed=4",
    ]


@pytest.mark.parametrize(
    ("text", "values"),
    [
        ("1,2.5", [1, 2.5]),
        ('["sqrt", "linear"]', ["sqrt", "linear"]),
        ("sqrt,linear", ["sqrt,linear"]),
        ('[{"steps": 3}, null]', [{"steps": 3}, None]),
        ("[8, 16]", [8, 16]),
        ("[[8, 16]]", [[8, 16]]),
        ("[[]]", [[]]),
    ],
)
def test_values(text, values):
    points = grid(["--a.b", text], seeds=1)
    assert [json.loads(point.overrides[0].removeprefix("--a.b=")) for point in points] == values
    assert len(set(names(points))) == len(values)
    assert all("/" not in name for name in names(points))


def test_points_have_a_limit():
    with pytest.raises(UserError, match="would have 1,002 points, at most 1,000; list fewer values or seeds"):
        grid(["--seed=1,2"], 501)


def test_the_file_of_a_sweep_has_the_limit_too(tmp_path):
    points = [asdict(point) for point in grid([], 1)] * 20_000
    (tmp_path / "sweep.json").write_text(json.dumps({"recipe": "r.json", "content": {}, "points": points}))
    with pytest.raises(UserError, match=r"is not a sweep's, or cannot be read: .* at most 1000 items"):
        Sweep.read(tmp_path)


def test_names_that_cannot_be_confused():
    points = grid(['--a.x=["a/b", "c"]', '--b.x=[{"y": 1}, {"y": 2}]', "--seed", "7,9"], seeds=1)
    assert names(points)[:3] == [
        "x=value1_x=value1_seed=7",
        "x=value1_x=value1_seed=9",
        "x=value1_x=value2_seed=7",
    ]
    assert names(points)[-1] == "x=c_x=value2_seed=9"


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (["--a", "[]"], r"--a \[\]: the list has no values; a value that is itself a list is written \[\[…\]\]"),
        (["--a", "1,1"], "a=1_seed=0: a value is listed twice"),
        (["--a"], "--a: has no value"),
    ],
)
def test_lists_that_are_refused(words, problem):
    with pytest.raises(UserError, match=problem):
        grid(words, seeds=1)


def sweep(*words, seeds=1, content=None):
    return Sweep("x.json", content or {"seed": 0, "train": {"duration": {"steps": 5}}}, grid(words, seeds))


def test_a_folder_gets_more_points_but_no_other_sweep(tmp_path):
    folder = tmp_path / "sweep"
    folder.mkdir()
    (folder / ".sweep.json.0123.tmp").touch()  # of a command that was killed
    sweep(*RATES).continued(folder).write(folder)
    assert Sweep.read(folder) == sweep(*RATES)
    more_rates = "--learning_rate.base_lr=5e-4,1e-3,2e-3,4e-3"
    more = sweep(more_rates, seeds=2).continued(folder)
    more.write(folder)
    # Jobs in the queue have the numbers of the earlier ones.
    assert names(more.points)[:2] == names(sweep(*RATES).points)
    assert len(more.points) == 8
    for number, point in enumerate(more.points):
        assert (folder / f"points/{number}").read_text().splitlines() == [point.name, *point.overrides]
    assert Sweep.read(folder) == more
    for other, line in (
        (
            sweep(*RATES),
            r"that also has base_lr=0\.0005_seed=0, .*base_lr=0\.004_seed=1; list these, too, or choose another folder",
        ),
        (
            sweep(more_rates, "--a=1", seeds=2),
            "with other settings: --a=1; choose another folder",
        ),
        (
            replace(more, content={"train": {"duration": {"steps": 6}}}),
            r"with other settings: recipe\.seed, recipe\.train\.duration\.steps; ",
        ),
    ):
        with pytest.raises(UserError, match=f"{folder} holds a sweep {line}"):
            other.continued(folder)
    assert Sweep.read(folder) == more
    (tmp_path / "other").mkdir()
    (tmp_path / "other/file").touch()
    with pytest.raises(UserError, match="other holds files that are not a sweep's; choose another folder"):
        more.continued(tmp_path / "other")


def test_a_wrong_point_is_told_before_any_starts(tmp_path, refusal_of):
    folder = tmp_path / "sweep"
    words = ["--learning_rate.base_lr=[0.001, -1]", "--batch.global_batch_size=20,24", "--seeds=2"]
    told = refusal_of("sweep", MAPS, *words, "--num-processes=5", "--folder", folder)
    assert "2 problems in the sweep; nothing was started:" in told
    assert "  - base_lr=0.001_global_batch_size=24_seed=3: " in told
    assert "24 is not a multiple of micro_batch_size x world_size" in told
    assert "  - base_lr=-1_global_batch_size=20_seed=3: " in told
    assert not folder.exists()


def test_options_of_sbatch_need_slurm(tmp_path, refusal_of):
    error = refusal_of("sweep", MAPS, "--partition=gpu", "--folder", tmp_path / "sweep")
    assert "--partition=gpu: an option of sbatch, which needs --slurm" in error
