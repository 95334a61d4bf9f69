"""Numbers, lists and tables as text for people."""

import difflib
import textwrap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import IO, Any

WIDTH = 110


def printable(text: str) -> str:
    """A text with all characters that a terminal would obey, such as colors, as escapes that it shows."""
    return "".join(c if c.isprintable() or c in "\n\t" else ascii(c)[1:-1] for c in text)


class PrintableOutput:
    """A stream of text to which everything is written as `printable` shows it."""

    def __init__(self, stream: IO[str]):
        self._stream = stream

    def write(self, text: str) -> int:
        return self._stream.write(printable(text))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def counted(number: float, noun: str, form: str = ",") -> str:
    """ "1 step", "2,000 steps", "0.5 epochs".

    Args:
        number: The number; the noun is singular if it is formatted as 1.
        noun: The noun in the singular.
        form: The format of the number.
    """
    shown = format(number, form)
    plural = noun + ("es" if noun.endswith("s") else "s")
    return f"{shown} {noun if shown == '1' else plural}"


def bulleted(lines: Iterable[str]) -> str:
    """Lines of their own, to be appended to what introduces them."""
    return "".join(f"\n  - {line}" for line in lines)


def some(names: Sequence[str], most: int = 4) -> str:
    """ "a, b and 3 more": the first names, and how many there are besides."""
    more = len(names) - most
    return ", ".join(names[:most]) + (f" and {more} more" if more > 0 else "")


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """ ", did you mean gpt2_124m?", to be appended to what is wrong; empty if no known name is similar."""
    close = difflib.get_close_matches(name, list(known), n=1)
    return f", did you mean {close[0]}?" if close else ""


def aligned(rows: Mapping[str, Mapping[str, str]]) -> Iterator[str]:
    """Named rows of cells under their headings."""
    if not rows:
        return
    lines = [["", *next(iter(rows.values()))], *([name, *cells.values()] for name, cells in rows.items())]
    longest, *widths = (max(map(len, cells)) for cells in zip(*lines, strict=True))
    for name, *cells in lines:
        row = "  ".join(cell.rjust(width) for cell, width in zip(cells, widths, strict=True))
        yield f"  {name:<{longest}}  {row}"


def digits(number: float) -> str:
    """A number with three digits, a whole one if it has more, and two digits below 1."""
    if number < 0.995:
        return f"{number:.2g}"
    if number < 10:
        return f"{number:.2f}"
    if number < 100:
        return f"{number:.1f}"
    return f"{number:,.0f}"


def span(ends: Iterable[float]) -> str:
    """The ends of a range, as one number if they look the same."""
    return " to ".join(dict.fromkeys(map(digits, ends)))


def wrapped(text: str) -> list[str]:
    return textwrap.wrap(text, WIDTH, subsequent_indent="  ")
