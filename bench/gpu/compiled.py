"""A row of compiled code fails if a run goes on eagerly, which a run itself only records."""

from typing import Any

from largebatch.run.record.recorder import Recorder
from largebatch.tools.local_jobs.training import train


def fail_if_not_compiled() -> None:
    """In this process, make runs whose model cannot be compiled fail with the reason."""
    add_event = Recorder.event

    def event(recorder: Recorder, name: str, **about: Any) -> None:
        if name == "not_compiled":
            raise RuntimeError(f"the model is not compiled: {about['reason']}")
        add_event(recorder, name, **about)

    Recorder.event = event  # type: ignore[method-assign]


def train_compiled(*arguments: Any, **options: Any) -> Any:
    """Train as `largebatch.tools.local_jobs.training.train` does, compiled or not at all."""
    fail_if_not_compiled()
    return train(*arguments, **options)
