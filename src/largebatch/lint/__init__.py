"""Mistakes in the files of a job, found without a GPU, a cluster or torch."""

from largebatch.lint.findings import Finding
from largebatch.lint.job import CommandLine
from largebatch.lint.project import Report, lint_files, lint_repository

__all__ = ["CommandLine", "Finding", "Report", "lint_files", "lint_repository"]
