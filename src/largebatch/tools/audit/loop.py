"""The audited function, called in the processes of a job on this machine."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from largebatch.errors import UserError
from largebatch.tools.audit.observe import Observed, observe
from largebatch.tools.local_jobs.jobs import JobFailed, run_job
from largebatch.tools.plan.accelerate_configs import rehearsal_environment
from largebatch.words import counted


@dataclass(frozen=True)
class Layout:
    """One way to divide a batch."""

    world_size: int
    accumulation: int  # backward passes of a step

    def __str__(self) -> str:
        return f"W = {self.world_size}, A = {self.accumulation}"

    @property
    def parts(self) -> int:
        return self.world_size * self.accumulation

    @property
    def factors(self) -> Mapping[str, float]:
        """What a wrong loop may multiply by, by name, the simplest first."""
        w = self.world_size
        a = self.accumulation
        return {
            "1": 1,
            "W": w,
            "1/W": 1 / w,
            "A": a,
            "1/A": 1 / a,
            "W·A": w * a,
            "1/(W·A)": 1 / (w * a),
            "W/A": w / a,
            "A/W": a / w,
        }


ALONE = Layout(1, 1)


@dataclass(frozen=True)
class Loop:
    """A user's function that trains a model for one epoch on given samples."""

    file: Path
    function: str
    batch_size: int  # samples of a step
    accelerate_config: Path | None
    timeout: float  # seconds of a call
    precision: str = "float64"  # torch's default dtype

    def call(self, layout: Layout, indices: Sequence[int]) -> list[Observed]:
        """Train on samples in a layout; what each process noted, by rank.

        Raises:
            UserError: A process failed, ended or did not return in time; the message says how.
        """
        environment = rehearsal_environment(self.accelerate_config, layout.world_size)
        try:
            observed = run_job(
                observe,
                self.file,
                self.function,
                self.precision,
                list(indices),
                self.batch_size // layout.parts,
                layout.accumulation,
                world_size=layout.world_size,
                environment={**environment, "ACCELERATE_USE_CPU": "true"},
                folder=Path.cwd(),
                timeout=self.timeout,
            )
        except JobFailed as failure:
            said = re.sub(r"largebatch\.\S+: ", "", failure.in_one_line(self.file.parent))
            if re.search("CUDA|NVIDIA|device_ids", said):
                said += "; the audit is on the CPU: choose the device, and device_ids, by torch.cuda.is_available()"
            raise UserError(f"{layout}: {said}") from None
        if None in observed:
            raise UserError(f"{layout}: a process called exit(0) before the function had returned; return the model")
        return observed

    def one_step(self, indices: Sequence[int]) -> Observed:
        """What one process notes if it trains on all samples in one backward pass."""
        observed = self.call(ALONE, indices)[0]
        if len(observed.gradients) != 1:
            raise UserError(
                f"{counted(len(indices), 'sample')} in one micro-batch make "
                f"{counted(len(observed.gradients), 'step')} of a torch optimizer; train on the given indices alone, "
                "once, in micro-batches of micro_batch_size, and step after `accumulation` of them"
            )
        return observed
