"""A report as somebody sees it: its tables, and the points of its plots by the ticks and labels of their axes."""

import re
from html.parser import HTMLParser
from pathlib import Path
from xml.etree import ElementTree

import numpy as np

XLINK = "http://www.w3.org/1999/xlink"
PREFIXES = {"": 1.0, "k": 1e3, "M": 1e6, "m": 1e-3}


class Page(HTMLParser):
    """What a page has: rows of tables, text, attributes, ids, and the elements that are still open."""

    def __init__(self, text: str):
        super().__init__()
        self.rows: list[list[str]] = []
        self.text = ""
        self.attributes: list[tuple[str, str, str]] = []
        self.tags: list[str] = []
        self.events: list[dict[str, str]] = []
        self._cell = False
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += [(tag, name, value or "") for name, value in attrs]
        if tag == "tr":
            self.rows.append([])
        elif tag in ("td", "th"):
            self.rows[-1].append("")
            self._cell = True
        elif tag == "li" and "data-kind" in dict(attrs):
            self.events.append(dict(attrs) | {"text": ""})

    def handle_endtag(self, tag):
        if tag in ("td", "th"):
            self._cell = False

    def handle_data(self, data):
        self.text += data
        if self._cell:
            self.rows[-1][-1] += data.strip()
        if self.events:
            self.events[-1]["text"] += data

    def row(self, name: str) -> list[str]:
        """The values of the row that begins with a name."""
        (row,) = (row for row in self.rows if row[0] == name)
        return row[1:]


class Plot:
    """One SVG of a page, measured by its own axes."""

    def __init__(self, text: str, title: str, axis: str):
        (figure,) = re.findall(rf"<figure>\s*<h3>{re.escape(title)}</h3>.*?</figure>", text, re.DOTALL)
        (svg,) = re.findall(rf'<svg class="by-{axis}".*?</svg>', figure, re.DOTALL)
        self.root = ElementTree.fromstring(svg.replace("<svg", f'<svg xmlns:xlink="{XLINK}"', 1))
        self.parts = {
            part.get("id").partition("-")[2].partition("-")[2]: part
            for part in self.root.iter("g")
            if "id" in part.attrib
        }
        self.x = self._scale("xtick", "x")
        self.y = self._scale("ytick", "y")

    def _scale(self, name, coordinate):
        """From a place in the picture to a value: through two labeled ticks, and true of the others."""
        ticks = []
        for part in (part for key, part in self.parts.items() if key.startswith(name)):
            labels = ["".join(text.itertext()) for text in part.iter("text")]
            marks = [float(use.get(coordinate)) for use in part.iter("use")]
            if labels and marks:
                ticks.append((marks[0], _value(labels[0])))
        places, values = np.array(sorted(ticks)).T
        steps = np.diff(values) / np.diff(places)
        if np.allclose(steps, steps[0], rtol=1e-3):
            return lambda place: values[0] + (place - places[0]) * steps[0]
        logs = np.log(values)
        slope = (logs[-1] - logs[0]) / (places[-1] - places[0])
        np.testing.assert_allclose(logs, logs[0] + (places - places[0]) * slope, atol=1e-3)
        return lambda place: np.exp(logs[0] + (place - places[0]) * slope)

    def curve(self, name):
        """The points of a line, as an array of shape (points, 2)."""
        (path,) = (path for path in self.parts[name].findall("path"))
        places = np.array(re.findall(r"[ML] (\S+) (\S+)", path.get("d")), dtype=float)
        return np.stack([self.x(places[:, 0]), self.y(places[:, 1])], axis=1)

    def marks(self):
        """Where the symbols below the curves are: by kind, run and step."""
        found = {}
        for name, part in self.parts.items():
            if re.fullmatch(r"[a-z_]+-\d+-\d+", name):
                (use,) = part.iter("use")
                kind, run, step = name.split("-")
                found[kind, int(run), int(step)] = self.x(float(use.get("x")))
        return found


def _value(label: str) -> float:
    number, prefix = re.fullmatch(r"([^a-zA-Zµ]*(?:e[^a-zA-Z]+)?)([a-zA-Zµ]?)", label.replace("\u2212", "-")).groups()
    return float(number) * PREFIXES[prefix]


def read(file: Path) -> tuple[str, Page]:
    """The text of a report and what is in it."""
    text = file.read_text(encoding="utf-8")
    return text, Page(text)
