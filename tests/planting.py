"""Mistakes planted in a copy of what is shipped."""

from pathlib import Path


def plant(file: str | Path, old: str, new: str) -> None:
    """Replace the one occurrence of `old` in a file of the current folder."""
    path = Path(file)
    text = path.read_bytes().decode()
    assert text.count(old) == 1, f"{old!r} is in {file} {text.count(old)} times"
    path.write_bytes(text.replace(old, new).encode())
