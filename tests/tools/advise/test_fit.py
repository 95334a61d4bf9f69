"""The fit of the critical batch: against that of `scipy`, published and simulated points, and bad files."""

import json

import numpy as np
import pytest
from scipy.stats import chi2

from largebatch.errors import UserError
from largebatch.tools.advise.fit import doubts, fit, read_points, read_sweep
from tools.sweep.test_results import write_sweep

HEADER = "batch,samples,spread,seeds"
# MLPerf's reference convergence points (github.com/mlcommons/logging, rcp_checker, commit 7bbf792): batch size, mean of
# the samples to the target, their standard deviation, seeds.
LLAMA = """
16,161587,4502,20
32,179405,7351,20
64,226714,10900,20
96,278640,11714,20
128,345907,24985,20
"""
BERT = """
256,2552704,224080,20
448,2410630,201829,23
1536,2777588,84343,20
3072,2768215,170435,20
4096,2843443,119629,20
4608,2794752,134366,20
6144,3321446,150502,20
6912,3596122,124957,20
8192,4191437,90728,20
8704,4278144,137525,20
12288,4470336,90865,20
13056,4632576,183667,20
16384,5504307,148400,20
"""


@pytest.fixture
def read(tmp_path):
    """Points from the text of a CSV file, with the usual header if it has none."""

    def read(text):
        file = tmp_path / "points.csv"
        if isinstance(text, str):
            text = (text if "atch" in text else f"{HEADER}\n{text}").encode()
        file.write_bytes(text)
        return read_points(file)

    return read


def pooled(points):
    """The relative standard deviation over seeds, from those of all batch sizes."""
    _, samples, spread, seeds, every = points
    relative = spread / (samples - every / 2)
    return np.sqrt(np.average(relative**2, weights=seeds - 1))


def chi_square(points, critical, least):
    batch, samples, _, seeds, _ = points
    errors = pooled(points) ** 2 / seeds + 0.04**2
    return np.sum(np.log(samples / (least * (1 + batch / critical))) ** 2 / errors)


def test_published_points(read):
    """By scipy: `curve_fit` of the logarithms, with the spread over seeds and 4 % as errors.

    The F test has 3 and 20,293 degrees of freedom, the latter by Satterthwaite's rule: only the spread is estimated.
    """
    found = fit(read(LLAMA))
    assert [found.critical_batch, found.least_samples] == pytest.approx([83.934, 132_197], rel=1e-3)
    assert found.p == pytest.approx(0.588266, rel=1e-5)


def test_points_that_contradict_the_form(read):
    assert fit(read(BERT)).p < 0.01


def test_limits(read):
    text = "256,1000,0,2\n512,1000,0,2\n1024,1000,0,2\n"
    flat = fit(read(text))
    assert flat.critical_batch == np.inf
    assert flat.interval[1] == np.inf
    assert flat.least_samples == pytest.approx(1000, rel=1e-3)
    # Where 4 % at each point, which is known, cannot tell it from infinity: chi-square grows by 3.84.
    assert chi_square(read(text), flat.interval[0], 1000) > 3.84
    steep = fit(read("256,1000,0,2\n512,2000,0,2\n1024,4000,0,2\n"))
    assert steep.critical_batch == steep.interval[0] == 0
    # At a limit, one parameter is fitted.
    uneven = read("256,1000,0,2\n512,1050,0,2\n1024,900,0,2\n")
    found = fit(uneven)
    assert found.critical_batch == np.inf
    assert found.p == pytest.approx(chi2.sf(chi_square(uneven, np.inf, found.least_samples), 2), rel=0.01)


def test_few_seeds_give_wider_intervals(read):
    """With equal relative spreads, as if the standard error were known: only the spread's own uncertainty differs."""

    def width(seeds):
        lines = [
            f"{64 * 4**n},{1000 * (1 + 4.0 ** (n - 1))},{100 * seeds**0.5 * (1 + 4.0 ** (n - 1))},{seeds}"
            for n in range(3)
        ]
        low, high = fit(read("\n".join(lines))).interval
        return np.log(high / low)

    assert width(2) > 1.2 * width(3) > 1.2 * width(20)


@pytest.mark.parametrize("text", ["100,2000,0,2\n300,4000,0,2\n", "100,2000,0,2\n300,4000,0,2\n300,4000,0,2\n"])
def test_two_sizes_are_fitted_and_cannot_be_tested(text, read):
    found = fit(read(text))
    assert (found.critical_batch, found.least_samples) == pytest.approx((100, 1000), rel=1e-4)
    assert found.p is None
    assert "the form is not tested, which takes three batch sizes" in " ".join(found.in_words())


def test_one_seed_of_each_size_has_no_error(read):
    """Whatever is given as its spread."""
    found = fit(read("100,2000,900,1\n300,4000,900,1\n900,10000,900,1\n"))
    assert found.critical_batch == pytest.approx(100, rel=0.02)
    assert (found.interval, found.p) == ((), None)
    assert "(one seed each: its error is not known)" in " ".join(found.in_words())
    bent = fit(read("100,2000,0,1\n300,1000,0,1\n900,10000,0,1\n"))
    assert f"points are up to {100 * bent.deviation:.2g} % from it" in " ".join(bent.in_words())
    assert bent.deviation > 1


def test_a_seed_alone_says_nothing_of_the_spread(read):
    """Whatever its column has: of the others, 2 % and 4 %, by their degrees of freedom."""
    lines = ["100,2000,40,2", "300,4000,160,3", "900,10000,{},1"]
    found, same = (fit(read("\n".join(lines).format(spread))) for spread in (0, 9000))
    assert found == same
    assert pooled(read("\n".join(lines).format(0))) ** 2 == pytest.approx((0.02**2 + 2 * 0.04**2) / 3)


def test_the_interval_of_evaluations_is_half_subtracted_and_an_error(read):
    lines = [f"{line},{every}" for line, every in zip(LLAMA.split(), (12288, 12288, 12288, 49152, 49152), strict=True)]
    found = fit(read("\n".join(["batch,samples,spread,seeds,every", *lines])))
    # By scipy, as above.
    assert [found.critical_batch, found.least_samples] == pytest.approx([93.119, 130_756], rel=1e-3)


def test_what_is_taken_for_known(read):
    points = read("batch,samples,spread,seeds,every\n1,9,0,1,0\n2,10,0,5,0\n4,11,2,5,0\n8,12,0,5,3\n")
    (doubt,) = doubts(points)
    assert doubt == "batch 2: no spread over 5 seeds; if evaluations were rare, add a column every"


def test_a_sweep(tmp_path, capsys):
    """Each run is at 1.25 after step 100; the last evaluation decides the best rate, at which no seed may diverge."""
    table = """
0.1   64  1.0 1.2 1.1
0.2   64  1.3 1.2 1.4
0.1  128  1.2 1.2 1.2
0.2  128  1.0 1.1 0.9
0.1  256  1.0  -  1.1
0.2  256  1.2 1.3 1.0
"""
    points = read_sweep(write_sweep(tmp_path, table), 1.25)
    # Evaluations were 100 steps apart.
    assert points.T.tolist() == [[batch, 100 * batch, 0, 3, 100 * batch] for batch in (64, 128, 256)]
    with pytest.raises(UserError, match="all runs at 0 of its batch sizes reached 1; it takes two"):
        read_sweep(tmp_path, 1.0)
    (tmp_path / "one").mkdir()
    with pytest.raises(UserError, match="of 0 listed batch sizes, all runs of a rate have finished; it takes two"):
        read_sweep(write_sweep(tmp_path / "one", "\n0.1  64  1.0\n0.2  64  1.3\n"), 1.25)
    assert "batch 64 is left out: 2 of its runs have not reached 1\n" in capsys.readouterr().out


def test_a_sweep_that_varies_more(tmp_path):
    """Two points of the same batch size are no measurement of it."""
    write_sweep(tmp_path, "\n0.1   64  1.0 1.2\n0.1  128  1.2 1.2\n")
    sweep = json.loads((tmp_path / "sweep.json").read_text())
    for number, point in enumerate(sweep["points"]):
        point["settings"] |= {"batch.global_batch_size": 64, "seed of data": number // 2}
    (tmp_path / "sweep.json").write_text(json.dumps(sweep))
    with pytest.raises(UserError, match="it varies more than batch size and rate; sweep these alone"):
        read_sweep(tmp_path, 1.25)


@pytest.mark.parametrize(
    "text",
    [
        "\ufeffBatch, samples,spread,seeds\n16,161587,4502,20\n\n32,179405,7351,20\n",
        # As spreadsheets write them.
        '"batch","samples","spread","seeds"\r\n"16","161587","4502","20"\r\n"32","179405","7351","20"\r\n,,,\r\n',
        "Seeds,note,spread,batch,samples\n20,,4502,16,161587\n20,good,7351,32,179405\n",
    ],
)
def test_a_header_names_the_columns_and_others_are_skipped(text, read):
    assert read(text).T.tolist() == [[16, 161587, 4502, 20, 0], [32, 179405, 7351, 20, 0]]


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("", "two batch sizes"),
        ("batch,samples,seeds\n256,1000,5\n", "line 2 cannot"),
        ("256,1000,0,1\n512,many,0,1\n", "line 3 cannot"),
        ("256,1000,-1,1\n", "line 2 cannot"),
        ("256,1000,0,0\n", "line 2 cannot"),
        ("batch,samples,spread,seeds,every\n256,1000,0,1,2000\n", "line 2 cannot"),
        ("256,1000,9e17,1\n512,1000,9e17,1\n", "line 2 cannot"),
        (1001 * "256,1000,0,1\n", "1,001 points"),
        (b"\xff\xfe\x00", "codec"),
    ],
)
def test_bad_files(read, text, problem):
    with pytest.raises(UserError, match=r"points\.csv") as error:
        read(text)
    assert problem in str(error.value)
    assert "batch,samples,spread,seeds" in str(error.value)


def test_points_that_determine_nothing(read):
    points = read("1,27369,1e10,2\n128,466,5.46e10,4\n2097152,32539,6680,2\n536870912,22,1.48e12,4\n")
    with pytest.raises(UserError, match="the points do not determine a critical batch"):
        fit(points)


def test_no_file(tmp_path):
    with pytest.raises(UserError, match="No such file"):
        read_points(tmp_path / "points.csv")
