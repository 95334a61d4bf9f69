"""`largebatch lint`: mistakes in recipes, scripts and configs, one a line."""

from collections.abc import Sequence
from pathlib import Path

from largebatch.counted import counted
from largebatch.lint import lint_files, lint_repository


def print_findings(files: Sequence[Path]) -> bool:
    """Check files, or the whole repository where none are named, and print what is found.

    Returns:
        Whether nothing was found.

    Raises:
        UserError: A file cannot be read, or is of no known kind.
    """
    report = lint_files(files) if files else lint_repository()
    for finding in report.findings:
        print(finding)
    print(f"{counted(report.files, 'file')}, {len(report.findings) or 'nothing'} found")
    return not report.findings
