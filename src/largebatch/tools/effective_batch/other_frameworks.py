"""The batch of a script written for another framework: what its numbers mean there, and what they are in a recipe.

What the frameworks do is documented: torch's DistributedDataParallel and DataParallel, Lightning ("Effective batch
size"), `transformers.TrainingArguments`, DeepSpeed ("Batch Size Related Parameters"), Horovod (`DistributedOptimizer`);
for parameter servers, Dean et al. 2012 and Chen et al. 2016 (arXiv 1604.00981).
"""

from dataclasses import dataclass
from typing import Literal

from largebatch.batch.division import gradient_accumulation_steps, nearest_multiples
from largebatch.errors import UserError

Gradients = Literal["average", "sum", "separate"]
Loss = Literal["mean", "sum"]


@dataclass(frozen=True)
class Framework:
    """How a framework treats a batch."""

    gradients: tuple[Gradients, ...] = ("average",)  # how it can combine the processes' gradients; the default first
    divides_accumulation: bool = False  # whether it divides the loss by the accumulation; if not, the script must
    one_process: bool = False  # whether one process drives all devices, and splits its batch among them


FRAMEWORKS = {
    "ddp": Framework(),
    "ddp_spawn": Framework(),
    "ddp_sharded": Framework(),
    "dp": Framework(gradients=("sum",), one_process=True),
    "fsdp": Framework(),
    "deepspeed": Framework(gradients=("average", "sum"), divides_accumulation=True),
    "horovod": Framework(gradients=("average", "sum")),
    "parameter-server": Framework(gradients=("separate", "average", "sum")),
    "lightning": Framework(divides_accumulation=True),
    "hf-trainer": Framework(divides_accumulation=True),
}


@dataclass(frozen=True)
class OtherBatch:
    """A script's numbers.

    Raises:
        UserError: The numbers contradict each other.
    """

    framework: str  # one of `FRAMEWORKS`
    batch_size: int  # the loader's; without `split_batches`, that of each process's loader
    devices: int = 1  # GPUs per node that share the samples
    nodes: int = 1
    accumulation: int = 1  # backward passes per optimizer step
    split_batches: bool = False  # whether all processes share the loader's batch
    loss: Loss = "mean"  # what the loss is over the samples of one backward pass, before it is divided by accumulation
    gradients: Gradients | None = None  # how the processes' gradients are combined; None means the framework's default
    learning_rate: float | None = None  # the script's, if it is known

    def __post_init__(self) -> None:
        known = FRAMEWORKS[self.framework]
        if self.gradients is None:
            object.__setattr__(self, "gradients", known.gradients[0])
        elif self.gradients not in known.gradients:
            raise UserError(
                f"--gradients {self.gradients}: {self.framework} does not combine them that way; write --gradients "
                f"{' or '.join(known.gradients)}, or remove it"
            )
        if known.one_process and self.nodes > 1:
            raise UserError(
                f"--from {self.framework} --nodes {self.nodes}: DataParallel is one process on one node, so each node "
                "would train a model of its own; use --from ddp, or --nodes 1"
            )
        if known.one_process and self.split_batches:
            raise UserError(f"--split-batches: --from {self.framework} always splits its batch; remove it")
        if self.split_batches and self.batch_size % self.processes:
            raise UserError(
                f"--batch-size {self.batch_size} --split-batches: not a multiple of {self.nodes} nodes x "
                f"{self.devices} devices = {self.processes} processes; "
                f"{nearest_multiples(self.batch_size, self.processes)}; or remove --split-batches if each process "
                "loads that many"
            )

    @property
    def processes(self) -> int:
        """Processes that have a loader each."""
        return 1 if FRAMEWORKS[self.framework].one_process else self.nodes * self.devices

    @property
    def per_process(self) -> int:
        """Samples that a process loads for one backward pass."""
        return self.batch_size // self.processes if self.split_batches else self.batch_size

    @property
    def per_device(self) -> list[int]:
        """Samples of one backward pass on each device of a process, cut as by `torch.chunk`; the last may get none."""
        if not FRAMEWORKS[self.framework].one_process:
            return [self.per_process]
        largest = -(-self.per_process // self.devices)
        return [min(largest, max(0, self.per_process - device * largest)) for device in range(self.devices)]

    @property
    def processes_per_update(self) -> int:
        """Processes whose gradients make up one update of the weights."""
        return 1 if self.gradients == "separate" else self.processes

    @property
    def global_batch_size(self) -> int:
        """Samples that make up one update of the weights: the effective batch."""
        return self.per_process * self.processes_per_update * self.accumulation

    @property
    def gradient_factor(self) -> int:
        """The gradient of an update, as a multiple of the gradient of the mean loss over the global batch."""
        of_a_process = self.per_process if self.loss == "sum" else 1
        return of_a_process * (self.processes_per_update if self.gradients == "sum" else 1)


@dataclass(frozen=True)
class RecipeBatch:
    """A batch as a recipe states it, and the accumulation that follows."""

    global_batch_size: int
    micro_batch_size: int
    world_size: int
    accumulation: int


def recipe_batch(
    script: OtherBatch,
    global_batch_size: int | None = None,
    micro_batch_size: int | None = None,
    world_size: int | None = None,
) -> RecipeBatch:
    """Return the recipe's numbers for a script's batch.

    By default the global batch is the script's effective batch, a micro-batch has as many samples as a device of the
    script had at a time, and there are as many processes as the script had devices.

    Raises:
        ConfigError: The global batch does not divide evenly.
    """
    size = global_batch_size or script.global_batch_size
    samples, devices = script.per_device[0], max(script.processes_per_update, len(script.per_device))
    if len(set(script.per_device)) > 1 and micro_batch_size is None and world_size is None:
        # Shares of several sizes cannot be one micro-batch size; the whole batch in one process always can.
        samples, devices = script.per_process, 1
    micro_batch_size = micro_batch_size or samples
    world_size = world_size or devices
    accumulation = gradient_accumulation_steps(size, micro_batch_size, world_size)
    return RecipeBatch(size, micro_batch_size, world_size, accumulation)
