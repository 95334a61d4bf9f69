"""A report as a browser lays it out: on a desktop and a phone, in the light and in the dark."""

import base64
import json
import re
import shutil
import subprocess
from html import escape
from importlib.resources import files

import pytest

from largebatch.tools.command_line import main
from largebatch.tools.report.plots import VARIABLES
from run_folders import HISTORY, write_run

CHROMIUM = shutil.which("chromium")
# It runs as root in containers, and has nothing to load from a network.
SWITCHES = [
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync"),
    *("--disable-background-networking", "--disable-component-update", "--window-size=1400,900"),
]
DARK, LIGHT = 0, 1

# Measures the page in frames of both widths, with either axis.
PROGRAM = """
const found = [];
for (const width of [1280, 390]) for (const axis of ["step", "samples"]) {
  const frame = document.querySelector("#w" + width), page = frame.contentDocument;
  page.getElementById("by-" + axis).checked = true;
  const shown = [...page.querySelectorAll("figure > svg")].filter(svg => svg.getBoundingClientRect().height > 0);
  const label = shown[0].querySelector("text");
  found.push({
    width, axis, scrollWidth: page.documentElement.scrollWidth,
    background: frame.contentWindow.getComputedStyle(page.body).backgroundColor,
    ink: frame.contentWindow.getComputedStyle(label).fill,
    curve: frame.contentWindow.getComputedStyle(page.querySelector('g[id$="-run-0"] path')).stroke,
    axes: shown.map(svg => svg.getAttribute("class")),
    columns: new Set(shown.map(svg => Math.round(svg.getBoundingClientRect().left))).size,
    pixels: Math.min(...shown.map(svg => 12 * svg.getBoundingClientRect().width / svg.viewBox.baseVal.width)),
  });
}
document.body.innerHTML = "<pre>" + btoa(JSON.stringify(found)) + "</pre>";
"""


@pytest.fixture(scope="module")
def report(tmp_path_factory):
    folder = tmp_path_factory.mktemp("browser")
    write_run(folder / "a_run_whose_name_is_quite_long_and_has_no_place_to_break_it", history=HISTORY)
    write_run(folder / "large", ("--batch.global_batch_size=512",), steps=range(1, 40), outcome="running")
    assert main(["report", *map(str, folder.iterdir()), "--out", str(folder / "report.html")]) == 0
    return folder / "report.html"


def measured(report, scheme, folder):
    """What the program finds under a color scheme."""
    page = escape(report.read_text(encoding="utf-8"))
    frames = "".join(
        f'<iframe id="w{width}" width="{width}" height="800" srcdoc="{page}"></iframe>' for width in (1280, 390)
    )
    wrapper = folder / "wrapper.html"
    wrapper.write_text(f"<body>{frames}<script>onload = () => {{{PROGRAM}}};</script>", encoding="utf-8")
    words = [CHROMIUM, *SWITCHES, f"--user-data-dir={folder / 'profile'}"]
    words += [f"--blink-settings=preferredColorScheme={scheme}", "--dump-dom", wrapper.as_uri()]
    result = subprocess.run(words, capture_output=True, text=True, timeout=600, check=True)
    (encoded,) = re.findall(r"<pre>([^<]+)</pre>", result.stdout)
    return json.loads(base64.b64decode(encoded))


def channels(color):
    return [int(number) / 255 for number in re.findall(r"\d+", color)[:3]]


def contrast(one, other):
    """Of two colors, by WCAG 2.2."""
    lights = []
    for color in (one, other):
        linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels(color)]
        lights.append(0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2])
    return (max(lights) + 0.05) / (min(lights) + 0.05)


@pytest.mark.skipif(CHROMIUM is None, reason="needs chromium")
@pytest.mark.slow
def test_on_a_desktop_and_a_phone_in_the_light_and_in_the_dark(report, tmp_path):
    backgrounds = set()
    for scheme in (LIGHT, DARK):
        (tmp_path / str(scheme)).mkdir()
        found = measured(report, scheme, tmp_path / str(scheme))
        assert [(view["width"], view["axis"]) for view in found] == [
            (1280, "step"),
            (1280, "samples"),
            (390, "step"),
            (390, "samples"),
        ]
        for view in found:
            assert view["scrollWidth"] <= view["width"], view
            # Only the plots against the axis that was chosen.
            assert view["axes"] == [f"by-{view['axis']}"] * 6
            assert view["columns"] == (3 if view["width"] == 1280 else 1)
            assert view["pixels"] >= 10
            assert contrast(view["ink"], view["background"]) >= 4.5
            assert contrast(view["curve"], view["background"]) >= 3
        backgrounds.add(found[0]["background"])
    assert len(backgrounds) == 2


def test_contrasts_of_all_colors():
    """Those of the style sheet, in the light and in the dark."""
    style = files("largebatch.tools.report").joinpath("page.css").read_text(encoding="utf-8")
    parts = re.findall(r":root \{(.*?)\}", style, re.DOTALL)
    schemes = [dict(re.findall(r"--([\w-]+): (#[0-9a-f]{6});", part)) for part in parts]
    assert len(schemes) == 2
    # What matplotlib draws is the light scheme.
    assert all(schemes[0][name] == color for color, name in VARIABLES.items())
    for scheme in schemes:
        decimal = {name: str(list(bytes.fromhex(color[1:]))) for name, color in scheme.items()}
        for name in ("ink", "muted"):
            assert contrast(decimal[name], decimal["page"]) >= 4.5
        runs = [name for name in decimal if name.startswith("run-")]
        assert len(runs) == 6
        assert all(contrast(decimal[name], decimal["page"]) >= 3 for name in runs)
