"""What a node finds, as it reports that to the first node."""

from dataclasses import dataclass, field


@dataclass
class Report:
    """The findings of one node."""

    node: str
    # What must be the same everywhere, by name: versions, checksums of the code and the recipe, GPUs, limits.
    versions: dict[str, str] = field(default_factory=dict)
    # What may differ a little between nodes, by name and unit.
    amounts: dict[str, float] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)  # what is wrong with this node itself
    # What it could not connect to: triples of a node's name, the place, and the reason.
    unreachable: list[tuple[str, str, str]] = field(default_factory=list)
    refusals: list[str] = field(default_factory=list)  # what is wrong with the job, wherever it runs
    notes: list[str] = field(default_factory=list)  # what was measured
