"""Results as a table, as Markdown, and as a plot in the manner of Goyal et al. 2017, figure 1."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from experiments import Experiment
from largebatch.tools.sweep.verdicts import Cell
from verdicts import flat_up_to, verdicts


def table(cells: Mapping[tuple[str, int], Cell], experiment: Experiment) -> str:
    """Mean and standard deviation of every rule at every batch size, in Markdown."""
    batches = [batch for batch in experiment.batches if any(place[1] == batch for place in cells)]
    lines = ["| rule | " + " | ".join(f"{batch:,}" for batch in batches) + " |", "| --- |" + " --- |" * len(batches)]
    for rule in experiment.rules:
        row = [_shown(cells.get((rule, batch)), experiment) for batch in batches]
        lines.append(f"| {rule} | " + " | ".join(row) + " |")
    return "\n".join(lines)


def _shown(cell: Cell | None, experiment: Experiment) -> str:
    if cell is None:
        return ""
    scale, digits = (100, 1) if experiment.is_error else (1, 3)
    text = f"{scale * cell.mean:.{digits}f} ± {scale * cell.std:.{digits}f}"
    return f"{text} ({cell.diverged} of {len(cell.values)} diverged)" if cell.diverged else text


def summary(name: str, cells: Mapping[tuple[str, int], Cell], experiment: Experiment, settings: Sequence[str]) -> str:
    """The whole result of an experiment in Markdown: settings, table, and what holds of the literature's orderings.

    Args:
        name: The experiment's.
        cells: Its results.
        experiment: What was trained.
        settings: Lines on machine, versions, and how the runs were made.
    """
    unit = f"1 - {experiment.metric} in per cent" if experiment.is_error else f"evaluation {experiment.metric}"
    of = f", median of the last {experiment.last} evaluations" if experiment.last > 1 else " at the end"
    seeds = max(len(cell.values) for cell in cells.values())
    lines = [f"# {name}", "", *settings, "", f"Mean ± standard deviation over {seeds} seeds: {unit}{of}.", ""]
    lines += [table(cells, experiment), ""]
    for rule in experiment.rules:
        flat = flat_up_to(cells, experiment, rule)
        lines.append(f"- {rule}: up to batch {flat:,} not clearly above batch {experiment.reference}")
    if not experiment.orderings:
        return "\n".join(lines) + "\n"
    lines += ["", "| lower | higher | batch | in the literature | here |", "| --- | --- | --- | --- | --- |"]
    for ordering, lower, higher, found in verdicts(cells, experiment.orderings):
        here = f"{_shown(lower, experiment)} against {_shown(higher, experiment)}: **{found}**"
        lines.append(f"| {ordering.lower} | {ordering.higher} | {ordering.batch:,} | {ordering.source} | {here} |")
    return "\n".join(lines) + "\n"


def plot(cells: Mapping[tuple[str, int], Cell], experiment: Experiment, file: Path) -> None:
    """Result against batch size, a line a rule, with bars of one standard deviation."""
    import matplotlib

    matplotlib.use("svg")
    # The same picture from the same numbers.
    matplotlib.rcParams["svg.hashsalt"] = "largebatch"
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4.5))
    scale = 100 if experiment.is_error else 1
    for rule in experiment.rules:
        points = [(batch, cells[rule, batch]) for batch in experiment.batches if (rule, batch) in cells]
        axes.errorbar(
            [batch for batch, _ in points],
            [scale * cell.mean for _, cell in points],
            yerr=[scale * cell.std for _, cell in points],
            marker="o",
            capsize=3,
            label=rule,
        )
    axes.set_xscale("log", base=2)
    axes.set_xticks(experiment.batches, [str(batch) for batch in experiment.batches])
    if experiment.is_error:
        # Where training fails, errors are tens of times those that are to be compared.
        axes.set_yscale("log")
        axes.yaxis.set_major_formatter("{x:g}")
    axes.set_xlabel("global batch size")
    axes.set_ylabel(f"1 - {experiment.metric}, %" if experiment.is_error else f"evaluation {experiment.metric}")
    axes.legend()
    axes.grid(alpha=0.3)
    figure.tight_layout()
    figure.savefig(file, metadata={"Date": None})
    pyplot.close(figure)
