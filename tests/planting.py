"""Mistakes planted in a copy of what is shipped."""

from pathlib import Path


def plant(file: str, old: str, new: str) -> None:
    """Replace the one occurrence of `old` in a file of the current folder."""
    path = Path(file)
    text = path.read_bytes().decode()
    assert text.count(old) == 1, f"{old!r} is in {file} {text.count(old)} times"
    path.write_bytes(text.replace(old, new).encode())


def line_of(file: str, words: str) -> int:
    """The one line of a file with these words in it; 1 for none."""
    lines = Path(file).read_bytes().decode().split("\n")
    numbers = [number for number, line in enumerate(lines, 1) if words in line]
    assert len(numbers) == 1, f"{words!r} is in lines {numbers} of {file}"
    return numbers[0]
