"""The audited function, called in the processes of a job on this machine."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from largebatch.errors import UserError
from largebatch.tools.audit.observe import Observed, observe
from largebatch.tools.local_jobs.jobs import JobFailed, run_job
from largebatch.tools.plan.accelerate_configs import rehearsal_environment

# Words of torch's errors on a machine without GPUs.
ON_A_GPU = (
    "Torch not compiled with CUDA",
    "No CUDA GPUs",
    "Found no NVIDIA driver",
    "CUDA-capable device",
    "device_ids",
)


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
        environment = {"WORLD_SIZE": str(layout.world_size), "LOCAL_WORLD_SIZE": str(layout.world_size)}
        if self.accelerate_config:
            environment = rehearsal_environment(self.accelerate_config, layout.world_size)
        try:
            observed = run_job(
                observe,
                self.file,
                self.function,
                self.precision,
                indices,
                self.batch_size // layout.parts,
                layout.accumulation,
                world_size=layout.world_size,
                environment={**environment, "ACCELERATE_USE_CPU": "true"},
                folder=Path.cwd(),
                timeout=self.timeout,
            )
        except JobFailed as failure:
            raise UserError(f"{layout}: {self._reason(failure)}") from None
        if None in observed:
            raise UserError(f"{layout}: a process called exit(0) before the function had returned; return the model")
        return observed

    def _reason(self, failure: JobFailed) -> str:
        said = failure.in_one_line(self.file.parent).replace(f"{UserError.__module__}.{UserError.__name__}: ", "")
        if any(words in said for words in ON_A_GPU):
            said += "; the audit is on the CPU: choose the device, and device_ids, by torch.cuda.is_available()"
        return said
