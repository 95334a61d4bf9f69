"""Fill in what the tables of recipes say of batch sizes and published figures, from the recipes themselves.

    python docs/recipe_tables.py

These are the cells in the columns of `CELLS`, of every row whose first cell names recipes; other cells are written by
hand, and stay.
"""

import re
from collections.abc import Callable
from pathlib import Path

from largebatch.config import RecipeConfig, load_config
from largebatch.plan.expected import describe_figure
from largebatch.task_folders import recipes_in

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", ROOT / "docs/recipes.md", *sorted(ROOT.glob("recipes/*/README.md"))]
NAMED = re.compile(r"`(?:\w+/)?(\w+)(?:\.json)?`")


def batch(config: RecipeConfig) -> str:
    """The global batch size, in samples; the first and the last if it changes."""
    sizes = config.batch.sizes
    return " to ".join(f"{size:,}" for size in dict.fromkeys((sizes[0], sizes[-1])))


def figure(config: RecipeConfig) -> str:
    """The published figure and its source."""
    if config.expected is None:
        return ""
    value, _, seeds = describe_figure(config.expected)[0].partition(": ")
    return f"{value}, {seeds.rpartition(' of ')[2]} ({config.expected.source})"


CELLS: dict[str, Callable[[RecipeConfig], str]] = {"global batch": batch, "published figure": figure}


def page(text: str, recipes: dict[str, Path]) -> str:
    """Return a page with its cells filled in."""
    lines: list[str] = []
    headings: list[str] = []
    for line in text.split("\n"):
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if not line.startswith("|"):
            headings = []
        elif not headings:
            headings = cells
        elif named := [recipes[name] for name in NAMED.findall(cells[0]) if name in recipes]:
            for place, heading in enumerate(headings):
                if heading in CELLS:
                    cells[place] = "; ".join(dict.fromkeys(CELLS[heading](load_config(recipe)) for recipe in named))
            line = f"| {' | '.join(cells)} |"
        lines.append(line)
    return "\n".join(lines)


def pages() -> dict[Path, str]:
    """Return all pages as they should be."""
    recipes = {file.stem: file for file in recipes_in(ROOT / "recipes")}
    return {path: page(path.read_text(encoding="utf-8"), recipes) for path in PAGES}


if __name__ == "__main__":
    for path, text in pages().items():
        path.write_text(text, encoding="utf-8")
