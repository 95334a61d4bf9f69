"""The part of a report about a sweep: its table, and the metric against the learning rate."""

from html import escape

from plotly.express import line

from largebatch.tools.report.curves import as_text
from largebatch.tools.sweep.points import RATE
from largebatch.tools.sweep.results import Group, Results


def sweep_html(results: Results, target: float | None) -> str:
    """HTML for a page that has plotly's script already; the plot has a line for each value of the other fields."""
    groups = [group for group in results.groups if group.cell.values and RATE in group.settings]
    figure = line(
        x=[group.settings[RATE] for group in groups],
        y=[results.sign * group.cell.mean for group in groups],
        error_y=[group.cell.std for group in groups],
        color=[_others(group) for group in groups],
        labels={"x": RATE, "y": f"{as_text(results.sweep.metric)}, mean ± standard deviation over seeds", "color": ""},
        log_x=True,
        markers=True,
        template="plotly_white",
    )
    plot = figure.to_html(full_html=False, include_plotlyjs=False, div_id="sweep")
    return f"<h2>Sweep</h2>\n<pre>{escape(results.table(target))}</pre>\n{plot}"


def _others(group: Group) -> str:
    return as_text(", ".join(f"{name}={value}" for name, value in group.settings.items() if name != RATE))
