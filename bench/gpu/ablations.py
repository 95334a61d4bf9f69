"""Ablations: what single choices cost in time and memory, each in a process of its own, with its variants in turns."""

from functools import partial

from gpu import forward_ablations, state_ablations
from gpu.machine import Gpus
from gpu.rows import SINGLE, Deadline, Launcher, Part, Result, Row

TITLE = "Ablations on one GPU"
ABOUT = """What single choices cost: two turns of five steps of each variant, in turns, in one process per table entry.
A step is a forward and a backward pass under bf16 autocast with fp32 weights, without an optimizer unless it is named.
*Llama* has 8 layers in the shape of Llama 8B, its vocabulary of 128,256 and one sequence of 8,192 tokens; *GPT-2* is
GPT-2 124M on 16 x 1,024 tokens; *ResNet-50* has 256 images of 224 pixels. The peak is of memory beyond the weights."""

# By name: the function, and the strategy whose launch it needs.
ABLATIONS = {
    "asynchronous checkpoint": (state_ablations.asynchronous_checkpoint, SINGLE),
    "memory layout of images": (forward_ablations.image_layout, SINGLE),
    "loss chunks": (forward_ablations.loss_chunks, SINGLE),
    "LARS": (state_ablations.lars, SINGLE),
    "LAMB": (state_ablations.lamb, SINGLE),
    "documents kept apart": (forward_ablations.document_mask, SINGLE),
    "documents kept apart by kernels": (forward_ablations.document_kernels, SINGLE),
    "unequal lengths": (forward_ablations.unequal_lengths, SINGLE),
    "DDP's optimizer in Dynamo": (forward_ablations.ddp_optimizer, "ddp"),
}


def measure(part: Part, gpus: Gpus) -> None:
    """Measure all rows."""
    launcher = Launcher(1, sorted({strategy for _, strategy in ABLATIONS.values()} - {SINGLE}))

    def ablation(name: str, deadline: Deadline) -> list[Result]:
        function, strategy = ABLATIONS[name]
        results: list[Result] = launcher.run(deadline, strategy, function, gpus.count == 0)
        return results

    part.measure(Row(name, partial(ablation, name)) for name in ABLATIONS)
