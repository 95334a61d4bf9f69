"""The batch of a script written for another framework: what its numbers mean there, and what they are in a recipe.

What the frameworks do is said in their documentation: torch's DistributedDataParallel and DataParallel, Lightning
("Effective batch size"), `transformers.TrainingArguments`, DeepSpeed ("Batch Size Related Parameters"), Horovod
(`DistributedOptimizer`). Of parameter servers it is Dean et al. 2012, and Chen et al. 2016 (arXiv 1604.00981).
"""

from dataclasses import dataclass
from typing import Literal

from largebatch.batch.division import gradient_accumulation_steps
from largebatch.errors import UserError

Gradients = Literal["average", "sum", "separate"]
Loss = Literal["mean", "sum"]


@dataclass(frozen=True)
class Framework:
    """How a framework treats a batch."""

    # How it may combine the processes' gradients; the first is what it does unless told otherwise.
    gradients: tuple[Gradients, ...] = ("average",)
    # Whether it divides the loss by the accumulation itself; elsewhere the script must.
    divides_accumulation: bool = False
    one_process: bool = False  # whether one process drives all devices, and cuts its batch up for them


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
        UserError: The numbers do not go together.
    """

    framework: str  # one of `FRAMEWORKS`
    batch_size: int  # the loader's; without `split_batches`, each process's loader's
    devices: int = 1  # GPUs of each node that share the samples
    nodes: int = 1
    accumulation: int = 1  # backward passes per optimizer step
    split_batches: bool = False  # whether the loader's batch is what all processes share
    loss: Loss = "mean"  # what the script's loss is over the samples of one backward pass; divided by the accumulation
    # How the processes' gradients are combined; None is what the framework does unless told otherwise.
    gradients: Gradients | None = None
    learning_rate: float | None = None  # the script's, if it is known

    def __post_init__(self) -> None:
        known = FRAMEWORKS[self.framework]
        if self.gradients is None:
            object.__setattr__(self, "gradients", known.gradients[0])
        elif self.gradients not in known.gradients:
            raise UserError(
                f"--gradients {self.gradients}: {self.framework} does not combine them so; write --gradients "
                f"{' or '.join(known.gradients)}, or leave it out"
            )
        if known.one_process and self.nodes > 1:
            raise UserError(
                f"--from {self.framework} --nodes {self.nodes}: DataParallel is one process on one node, so each node "
                "would train a model of its own; write --from ddp, or --nodes 1"
            )
        if known.one_process and self.split_batches:
            raise UserError(f"--split-batches: --from {self.framework} always splits its batch; leave it out")
        if self.split_batches and self.batch_size % self.processes:
            below = self.batch_size // self.processes * self.processes
            nearest = " or ".join(str(size) for size in (below, below + self.processes) if size)
            raise UserError(
                f"--batch-size {self.batch_size} --split-batches: does not divide over {self.nodes} nodes x "
                f"{self.devices} devices = {self.processes} processes; write --batch-size {nearest}, or leave "
                "--split-batches out if each process loads that many"
            )

    @property
    def processes(self) -> int:
        """Processes with a loader each."""
        return 1 if FRAMEWORKS[self.framework].one_process else self.nodes * self.devices

    @property
    def per_process(self) -> int:
        """Samples that a process loads for one backward pass."""
        return self.batch_size // self.processes if self.split_batches else self.batch_size

    @property
    def per_device(self) -> list[int]:
        """Samples of one backward pass on each device of a process, as `torch.chunk` cuts them; some may get none."""
        if not FRAMEWORKS[self.framework].one_process:
            return [self.per_process]
        largest = -(-self.per_process // self.devices)
        starts = (device * largest for device in range(self.devices))
        return [max(0, min(largest, self.per_process - start)) for start in starts]

    @property
    def processes_per_update(self) -> int:
        """Processes whose gradients one update of the weights is made of."""
        return 1 if self.gradients == "separate" else self.processes

    @property
    def global_batch_size(self) -> int:
        """Samples that one update of the weights is made of: the effective batch."""
        return self.per_process * self.processes_per_update * self.accumulation

    @property
    def gradient_factor(self) -> int:
        """What the gradient of an update is, in multiples of the gradient of the mean loss over the global batch."""
        of_a_process = self.per_process if self.loss == "sum" else 1
        return of_a_process * (self.processes_per_update if self.gradients == "sum" else 1)


@dataclass(frozen=True)
class RecipeBatch:
    """What a recipe says for a batch, and the accumulation that follows."""

    global_batch_size: int
    micro_batch_size: int
    world_size: int
    accumulation: int


def recipe_batch(
    there: OtherBatch,
    global_batch_size: int | None = None,
    micro_batch_size: int | None = None,
    world_size: int | None = None,
) -> RecipeBatch:
    """Return the recipe's numbers for a script's batch.

    By default the global batch is the script's effective batch, a micro-batch has as many samples as a device had at a
    time there, and there are as many processes as there were devices.

    Raises:
        ConfigError: They do not divide.
    """
    size = global_batch_size or there.global_batch_size
    samples, devices = there.per_device[0], there.processes_per_update
    if FRAMEWORKS[there.framework].one_process:
        devices = there.devices
        if len(set(there.per_device)) > 1 and micro_batch_size is None and world_size is None:
            # Shares of several sizes are no micro-batch of all processes; the whole batch on one process always is.
            samples, devices = there.per_process, 1
    micro_batch_size = micro_batch_size or samples
    world_size = world_size or devices
    accumulation = gradient_accumulation_steps(size, micro_batch_size, world_size)
    return RecipeBatch(size, micro_batch_size, world_size, accumulation)
