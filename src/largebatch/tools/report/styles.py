"""Colors, dashes and symbols, for plots and for the page's legend alike.

Neighboring runs differ in color, dashes and symbol, so that they can be told apart without seeing colors. Colors of
graphics have a contrast of at least 3 to the page, in the light and in the dark, and text of at least 4.5 (WCAG 2.2).
"""

import math
from dataclasses import dataclass

Shape = list[tuple[float, float]]
"""A closed polygon around (0, 0), y upwards."""

INK, MUTED, RULE = "#1b1f24", "#59636e", "#d9dee3"
COLOURS = ["#0068a8", "#c04a00", "#00784f", "#a0307a", "#7a5c00", "#5c5f66"]
VARIABLES = {INK: "ink", MUTED: "muted", RULE: "rule"} | {
    color: f"run-{number}" for number, color in enumerate(COLOURS)
}
"""What the page's style sheet calls each color."""
DASHES: list[tuple[float, ...]] = [(), (6, 2), (2, 1.5), (7, 2, 2, 2)]


def _polygon(corners: int, turn: float = 0.0, inner: float | None = None) -> Shape:
    """A regular polygon, or with an inner radius a star, that reaches to 1; turned by radians, clockwise."""
    count = corners if inner is None else 2 * corners
    radii = [1.0 if inner is None or number % 2 == 0 else inner for number in range(count)]
    angles = [turn + 2 * math.pi * number / count for number in range(count)]
    points = [(radius * math.sin(angle), radius * math.cos(angle)) for radius, angle in zip(radii, angles, strict=True)]
    reach = max(abs(coordinate) for point in points for coordinate in point)
    return [(x / reach, y / reach) for x, y in [*points, points[0]]]


CIRCLE, SQUARE, TRIANGLE, DIAMOND = _polygon(16), _polygon(4, math.pi / 4), _polygon(3), _polygon(4)
SYMBOLS = [CIRCLE, SQUARE, TRIANGLE, DIAMOND, _polygon(3, math.pi)]
MARKS = {
    "restarted": TRIANGLE,
    "stopped": SQUARE,
    "failed": _polygon(4, math.pi / 4, inner=0.3),
    "skipped": DIAMOND,
    "checkpoint_failed": _polygon(3, math.pi),
    "checkpoint_not_used": _polygon(5, inner=0.45),
}
"""The symbol of each kind of event that plots mark."""


@dataclass(frozen=True)
class Style:
    """How a run is drawn; see the lists above."""

    number: int
    color: str
    dashes: tuple[float, ...]
    symbol: Shape


def style_of(run: int) -> Style:
    """Of the run with this number, from 0; from the sixty-first on they come again."""
    number = run % len(COLOURS)
    return Style(number, COLOURS[number], DASHES[run % len(DASHES)], SYMBOLS[run % len(SYMBOLS)])
