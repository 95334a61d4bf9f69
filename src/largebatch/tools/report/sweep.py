"""The part of a report about a sweep: its table, and the metric against the learning rate."""

import json
from html import escape

from plotly.graph_objects import Figure, Scatter

from largebatch.tools.report.curves import as_text
from largebatch.tools.sweep.points import RATE
from largebatch.tools.sweep.results import Group, Results


def sweep_html(results: Results, target: float | None) -> str:
    """HTML for a page that has plotly's script already; the plot has a line for each value of the other fields."""
    lines: dict[str, list[Group]] = {}
    for group in results.groups:
        if group.cell.values and RATE in group.settings:
            others = [f"{name}={json.dumps(value)}" for name, value in group.settings.items() if name != RATE]
            lines.setdefault(", ".join(others), []).append(group)
    figure = Figure()
    for name, groups in lines.items():
        line = Scatter(
            name=as_text(name),
            x=[group.settings[RATE] for group in groups],
            y=[results.sign * group.cell.mean for group in groups],
            error_y={"array": [group.cell.std for group in groups]},
        )
        figure.add_trace(line)
    figure.update_xaxes(type="log", title_text=RATE)
    figure.update_yaxes(title_text=as_text(f"{results.sweep.metric}, mean ± standard deviation over seeds"))
    figure.update_layout(template="plotly_white")
    plot = figure.to_html(full_html=False, include_plotlyjs=False, div_id="sweep")
    return f"<h2>Sweep</h2>\n<pre>{escape(str(results.table(target)))}</pre>\n{plot}"
