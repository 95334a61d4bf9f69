"""What a node says of itself."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any


@dataclass
class Report:
    """What one node found.

    Args:
        node: Its name.
        versions: Of Python, of the packages that largebatch needs, and of the code and recipe (a checksum), by name.
        problems: What is wrong with this node itself.
        unreachable: What it could not connect to: pairs of a node's name and a port.
        refusal: Why the recipe cannot be run on this job at all.
        free_bytes: Free disk space in the run folder.
        checkpoint_bytes: Size of a checkpoint; None where this node did not compute it.
        no_checkpoint_size: Why it is not known, where it was tried.
        all_reduce: What the all-reduce over all nodes measured, or an empty mapping.
        all_reduce_error: How it failed.
    """

    node: str
    versions: dict[str, str] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)
    unreachable: list[tuple[str, int]] = field(default_factory=list)
    refusal: str = ""
    free_bytes: int = 0
    checkpoint_bytes: int | None = None
    no_checkpoint_size: str = ""
    all_reduce: dict[str, Any] = field(default_factory=dict)
    all_reduce_error: str = ""

    @property
    def is_good(self) -> bool:
        """Whether the node found nothing that keeps it from talking to the others."""
        return not (self.problems or self.unreachable or self.refusal)

    def to_json(self) -> dict[str, Any]:
        """As plain data."""
        return asdict(self)

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> "Report":
        """From plain data.

        Raises:
            TypeError: It is not that of a report.
        """
        report = cls(**value)
        report.unreachable = [(node, port) for node, port in report.unreachable]
        return report
