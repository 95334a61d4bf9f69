"""Checkpoints whose manifests say what a test wants, and whose checksums fit."""

import json
from pathlib import Path
from typing import Any

from saving import FakeRun, mark


def save_with_manifest(run_dir: Path, step: int, **values: Any) -> Path:
    """Save a checkpoint in whose manifest these values stand."""
    checkpoint = FakeRun(run_dir).save(step)
    file = checkpoint / "manifest.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | values))
    mark(checkpoint)
    return checkpoint
