"""The curves of runs as one figure of plotly: a plot per quantity, a color per run."""

from collections.abc import Sequence
from html import escape

import numpy as np
from plotly.colors import qualitative
from plotly.graph_objects import Scatter
from plotly.subplots import make_subplots

from largebatch.errors import UserError
from largebatch.tools.reported_runs import EVALUATION, Array, ReportedRun

MAX_POINTS = 2000  # of a curve as drawn
MAX_DOTS = 30  # a curve of at most this many points has a dot at each
DASHES = ("solid", "dash", "dot", "dashdot")  # neighboring runs can be told apart without seeing colors
PLOT_HEIGHT = 300  # in pixels


def curves_html(runs: Sequence[ReportedRun], axis: str) -> str:
    """The figure as HTML with plotly's script in it; empty if no run has logged anything.

    `axis` is one of `ReportedRun.places`; a run that has not logged it is not drawn.
    """
    logged = dict.fromkeys(title for run in runs for title in run.curves)
    if not logged:
        return ""
    # A rate that is constant in each run is in the tables.
    varying = {title for run in runs for title, points in run.curves.items() if np.ptp(points[1]) > 0}
    titles = [title for title in logged if title in varying or title == "loss" or title.startswith(EVALUATION)]
    titles = titles or list(logged)
    shown = [_as_text(title) for title in titles]
    figure = make_subplots(len(titles), shared_xaxes=True, subplot_titles=shown, vertical_spacing=0.3 / len(titles))
    for index, run in enumerate(runs):
        drawn = [title for title in titles if title in run.curves]
        for order, title in enumerate(drawn):
            steps, values = _thinned(run.curves[title]).tolist()
            places = run.places(steps)
            if axis not in places:
                continue
            curve = Scatter(
                name=_as_text(run.name),
                legendgroup=index,
                # The legend names each run once, to show and hide all of its curves.
                showlegend=order == 0,
                x=places[axis],
                y=values,
                mode="lines+markers" if len(steps) <= MAX_DOTS else "lines",
                line={"color": qualitative.D3[index % len(qualitative.D3)], "dash": DASHES[index % len(DASHES)]},
            )
            figure.add_trace(curve, titles.index(title) + 1, 1)
    if not figure.data:
        raise UserError(f"--axis {axis}: no run has logged it; choose another, such as step")
    figure.update_xaxes(showticklabels=True, title_text=axis)
    figure.update_layout(
        template="plotly_white",
        height=PLOT_HEIGHT * len(titles),
        # In pixels; Plotly widens them as labels and the legend need.
        margin={"l": 0, "r": 10, "t": 30},
        hovermode="x unified",
        legend={"orientation": "h", "y": 1 + 0.1 / len(titles), "yanchor": "bottom"},
    )
    return str(figure.to_html(full_html=False, div_id="curves", config={"displaylogo": False}))


def _thinned(points: Array) -> Array:
    """At most `MAX_POINTS` points of a curve: a spike of a single step keeps its place and its height."""
    if points.shape[1] <= MAX_POINTS:
        return points
    parts = np.array_split(points, MAX_POINTS // 2, axis=1)
    return np.hstack([part[:, sorted((part[1].argmin(), part[1].argmax()))] for part in parts])


def _as_text(text: str) -> str:
    """Text that plotly shows as it is: no tags, and no half characters from names of files."""
    return escape(text, quote=False).encode(errors="replace").decode()
