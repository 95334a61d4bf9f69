"""A report as somebody sees it: its tables, and the data of its figure."""

import json
import re
from html.parser import HTMLParser
from pathlib import Path


class Page(HTMLParser):
    """What a page has: its source, tables, text without scripts, tags, and plotly's figure."""

    def __init__(self, file: Path):
        super().__init__()
        self.source = file.read_text(encoding="utf-8")
        self.tables: list[list[list[str]]] = []
        self.text = ""
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.feed(self.source)
        # What no run has logged has no figure.
        self.data = []
        self.layout = {}
        if call := re.search(r'Plotly\.newPlot\(\s*"curves",\s*', self.source):
            self.data, end = json.JSONDecoder().raw_decode(self.source, call.end())
            self.layout, _ = json.JSONDecoder().raw_decode(
                self.source, re.compile(r",\s*").match(self.source, end).end()
            )

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        if tag == "table":
            self.tables.append([])
        elif tag == "tr":
            self.tables[-1].append([])
        elif tag in ("td", "th"):
            self.tables[-1][-1].append("")

    def handle_data(self, data):
        tag = self.tags[-1][0] if self.tags else ""
        if tag in ("div", "th", "wbr"):
            self.tables[-1][-1][-1] += data.strip()
        if tag != "script":
            self.text += data

    @property
    def rows(self) -> list[list[str]]:
        """The rows of all tables."""
        return [row for table in self.tables for row in table]

    def column(self, name: str) -> list[str]:
        """A column of the table of runs."""
        header, *runs = self.tables[0]
        return [run[header.index(name)] for run in runs]

    def row(self, name: str) -> list[str]:
        """The values of the row that begins with a name."""
        (row,) = (row for row in self.rows if row[0] == name)
        return row[1:]

    def titles(self) -> list[str]:
        """The titles of the plots."""
        return [annotation["text"] for annotation in self.layout["annotations"]]

    def points(self, title: str, run: int) -> list[tuple[float, float]]:
        """A run's curve in the plot with a title."""
        number = self.titles().index(title) + 1
        (trace,) = (
            trace
            for trace in self.data
            if trace["yaxis"] == f"y{number if number > 1 else ''}" and trace["legendgroup"] == str(run)
        )
        return list(zip(trace["x"], trace["y"], strict=True))
