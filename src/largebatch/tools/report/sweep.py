"""The part of a report about a sweep: its table, and the metric against the learning rate or the batch size."""

from html import escape

from plotly.express import line

from largebatch.tools.report.curves import as_text
from largebatch.tools.reported_runs import number
from largebatch.tools.sweep.points import BATCH, RATE
from largebatch.tools.sweep.results import Group, Results


def sweep_html(results: Results, target: float | None) -> str:
    """HTML for a page that has plotly's script already; the plot has a line for each value of the other fields."""
    table = f"<h2>Sweep</h2>\n<pre>{escape(results.table(target))}</pre>\n"
    groups = [group for group in results.groups if group.cell.values]
    axis = next((name for name in (RATE, BATCH) if groups and name in groups[0].settings), "")
    # Points that were added to a sweep are its last.
    groups.sort(key=lambda group: number(group.settings, axis) or 0)
    # None without an axis, and for a batch that grows.
    places = [number(group.settings, axis) for group in groups]
    if not groups or None in places:
        return table
    figure = line(
        x=places,
        y=[results.sign * group.cell.mean for group in groups],
        error_y=[group.cell.std for group in groups],
        color=[_others(group, axis) for group in groups],
        labels={"x": axis, "y": f"{as_text(results.sweep.metric)}, mean ± standard deviation over seeds", "color": ""},
        log_x=True,
        markers=True,
        template="plotly_white",
    )
    return table + str(figure.to_html(full_html=False, include_plotlyjs=False, div_id="sweep"))


def _others(group: Group, axis: str) -> str:
    return as_text(", ".join(f"{name}={value}" for name, value in group.settings.items() if name != axis))
