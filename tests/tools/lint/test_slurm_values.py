"""Values of Slurm's options."""

import pytest

from largebatch.tools.lint.slurm_values import gpus, gpus_of_gres, node_counts, seconds


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("90", 90 * 60),
        ("90:30", 90 * 60 + 30),
        ("1:30:15", 5415),
        ("24:00:00", 86400),
        ("2-12", 60 * 3600),
        ("2-12:30", 60 * 3600 + 1800),
        ("2-12:30:15", 60 * 3600 + 1815),
        ("UNLIMITED", None),
        ("infinite", None),
        ("0", None),
    ],
)
def test_times(text, expected):
    assert seconds(text) == expected


@pytest.mark.parametrize("text", ["", "half", "1:2:3:4", "2-", "-5", "1.5", "12h", "1:", "1-2-3"])
def test_no_times(text):
    with pytest.raises(ValueError, match="is no time"):
        seconds(text)


@pytest.mark.parametrize(
    ("text", "expected"), [("4", range(4, 5)), ("2-4", range(2, 5)), ("4-4", range(4, 5)), ("1k", range(1024, 1025))]
)
def test_node_counts(text, expected):
    assert node_counts(text) == expected


@pytest.mark.parametrize("text", ["", "0", "=4", "4-2", "-4", "2-", "0-2", "four", "4,2", "4 "])
def test_no_node_counts(text):
    with pytest.raises(ValueError, match="is no number of nodes"):
        node_counts(text)


@pytest.mark.parametrize(
    ("text", "expected"), [("8", 8), ("h100:8", 8), ("nvidia_a100-sxm4-40gb:4", 4), ("a:2,b:3", 5)]
)
def test_gpus(text, expected):
    assert gpus(text) == expected


@pytest.mark.parametrize("text", ["", "h100", "h100:", ":8", "8.0", "-8", "8,"])
def test_no_gpus(text):
    with pytest.raises(ValueError, match="is no number of GPUs"):
        gpus(text)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("gpu:8", 8),
        ("gpu", 1),
        ("gpu:h100:8", 8),
        ("gpu:h100", 1),
        ("gres:gpu:2", 2),
        ("gpu:a:2,nvme:7,gpu:b:3", 5),
        ("nvme:100", 0),
        ("none", 0),
    ],
)
def test_gpus_of_gres(text, expected):
    assert gpus_of_gres(text) == expected


@pytest.mark.parametrize("text", ["gpu=8", "gpu:8:h100", "gpu:", "gpu:2x"])
def test_no_gpus_of_gres(text):
    with pytest.raises(ValueError, match="is no number of GPUs"):
        gpus_of_gres(text)
