"""The plot of a sweep: the metric against the learning rate, a line for each batch size."""

from plotly.graph_objects import Figure, Scatter

from largebatch.tools.report.curves import as_text
from largebatch.tools.sweep.results import Results


def sweep_html(results: Results) -> str:
    """The figure as HTML, for a page that has plotly's script already."""
    figure = Figure()
    cells = {place: cell for place, cell in results.cells.items() if cell.values}
    for others, batch in dict.fromkeys((place.others, place.batch) for place in cells):
        places = [place for place in cells if (place.others, place.batch) == (others, batch)]
        line = Scatter(
            name=as_text(f"batch {batch:,}{others and ', '}{others}"),
            x=[place.base_lr for place in places],
            y=[cells[place].mean for place in places],
            error_y={"array": [cells[place].std for place in places]},
            mode="lines+markers",
        )
        figure.add_trace(line)
    figure.update_xaxes(type="log", title_text="base_lr")
    figure.update_yaxes(title_text=as_text(f"{results.sweep.metric}, mean ± standard deviation over seeds"))
    figure.update_layout(template="plotly_white")
    return str(figure.to_html(full_html=False, include_plotlyjs=False, div_id="sweep"))
