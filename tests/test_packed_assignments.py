"""Which assignments `make lint` refuses."""

import pytest

from packed_assignments import main, packed_assignments


@pytest.mark.parametrize(
    ("source", "lines"),
    [
        ("a, b = 1, 2", [1]),
        ("x = 1\nself.a, b[0] = x, f(x)", [2]),
        ("a, b = b, a", []),
        ("a, b = pair", []),
        ("a = b = 1, 2", []),
        ("for a, b in pairs:\n    c = a, b", []),
        ("a, *b = 1, 2, 3", [1]),
    ],
)
def test_only_swaps_are_written_in_one_line(source, lines):
    assert list(packed_assignments(source)) == lines


def test_the_program_names_file_and_line(tmp_path, capsys):
    (tmp_path / "a.py").write_text("a = 1\nb, c = 1, 2\n")
    assert main([str(tmp_path / "a.py")]) == 1
    assert f"{tmp_path}/a.py:2:" in capsys.readouterr().err
