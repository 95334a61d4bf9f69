"""Count the bytes that the loss of a language model moves, and time its chunks, eager and compiled.

    .venv/bin/python bench/loss_chunks.py

Bytes are counted on tensors without memory: an operation reads its inputs and writes its outputs, views are free, and
what picks elements of a tensor does not read the others. A compiled function, like the Triton kernel of Liger, reads a
chunk's logits and writes their gradient; both read each row twice, the second time from a cache. The loop of Liger's
`fused_linear_cross_entropy_forward` (commit ead96b6, `accum_dtype=torch.float32`) is repeated here, operation by
operation, with inputs and weights that are in bfloat16 already. Takes a minute.
"""

import argparse
import os
import time
from collections.abc import Callable
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from largebatch.model import token_losses
from largebatch.model.token_losses import compiled, losses_and_gradients
from paired import interleave
from record import Comparison, Record, add_output_options, take_facts, write_record

MODELS = {
    "GPT-2 124M, 32 x 1,024 tokens": (32 * 1024, 768, 50304),
    "Llama 1B, 4 x 2,048 tokens": (4 * 2048, 2048, 128256),
}
TIMED = (256, 50304)
ABOUT = """Bytes that the output layer and the loss move in a micro-batch under bf16 autocast: counted on tensors
without memory, as what operations read and write, without the scaling of gradients in the backward pass. `eager` is the
chain of a CPU with chunks of 2^26 logits, `compiled` is for GPUs, with chunks of 2^28, and `Liger` is the loop of
Liger's fused linear cross-entropy with an fp32 sum of the weight's gradient. Seconds are those of a chunk of 256 tokens
and 50,304 words in bf16 on one CPU core. Nothing here was measured on a GPU."""
# Operations on few elements of their first argument.
PICKING = ("index", "index_put_", "nll_loss_forward")


class Traffic(TorchDispatchMode):
    """Bytes that operations read and write; the inside of `fused` functions is not counted."""

    moved, is_fused = 0, False

    def __torch_dispatch__(self, func: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        name = func._schema.name.removeprefix("aten::")
        if func.is_view or self.is_fused or "empty" in name:
            return result
        if name in PICKING:
            self.moved += 2 * bytes_of(args[1:])
        elif name.startswith("zero"):
            self.moved += bytes_of(result)
        else:
            # The target of a copy is written only.
            self.moved += bytes_of(result) + bytes_of(args[1:] if name == "copy_" else args)
        return result

    def fused(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """The function as one kernel, which reads its arguments and writes its results once."""

        def run(*arguments: Any) -> Any:
            self.is_fused = True
            results = function(*arguments)
            self.is_fused = False
            self.moved += bytes_of(arguments) + bytes_of(results)
            return results

        return run


def bytes_of(tree: Any) -> int:
    """Bytes of all tensors."""
    return sum(leaf.nbytes for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor))


def of_ours(shape: tuple[int, int, int], is_compiled: bool) -> int:
    """Bytes of `linear_token_losses`."""
    tokens, width, words = shape
    with torch.device("meta"):
        inputs, weight = torch.empty(tokens, width, requires_grad=True), torch.empty(words, width, requires_grad=True)
        targets = torch.empty(tokens, dtype=torch.int64)
    plain = token_losses.losses_and_gradients, token_losses.MAX_LOGITS, token_losses._add_product
    with Traffic() as traffic:
        if is_compiled:
            token_losses.MAX_LOGITS = token_losses.MAX_COMPILED_LOGITS
            token_losses.losses_and_gradients = traffic.fused(losses_and_gradients)
            token_losses._add_product = add_in_fp32
        losses = token_losses._through_chunks(inputs, weight, None, targets, None, torch.bfloat16, (True, True, False))
    token_losses.losses_and_gradients, token_losses.MAX_LOGITS, token_losses._add_product = plain
    assert len(losses[0]) == tokens
    return traffic.moved


def add_in_fp32(total: torch.Tensor, left: torch.Tensor, right: torch.Tensor) -> None:
    """What a GPU does to the sum of the weight's gradient."""
    torch.addmm(total, left, right, out_dtype=total.dtype, out=total)


def of_liger(shape: tuple[int, int, int]) -> int:
    """Bytes of Liger's loop."""
    tokens, width, words = shape
    # Its sizes of chunks: logits take about as much memory as the inputs.
    factor = -(-words // width)
    size = 1 << (-(-tokens // factor) - 1).bit_length()
    with torch.device("meta"), Traffic() as traffic, torch.no_grad():
        inputs, weight = torch.empty(tokens, width).bfloat16(), torch.empty(words, width).bfloat16()
        targets, losses = torch.empty(tokens, dtype=torch.int64), torch.zeros(tokens)
        of_inputs, of_weight = torch.zeros_like(inputs), torch.zeros(words, width)
        kernel = traffic.fused(lambda logits, targets: (logits, targets.float()))
        for start in range(0, tokens, size):
            chunk = slice(start, start + size)
            gradient, losses[chunk] = kernel(inputs[chunk] @ weight.t(), targets[chunk])
            of_inputs[chunk] = gradient @ weight
            add_in_fp32(of_weight, gradient.t(), inputs[chunk])
    return traffic.moved


def timed(function: Callable[..., Any], arguments: tuple[Any, ...]) -> float:
    started = time.perf_counter()
    function(*arguments)
    return time.perf_counter() - started


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    add_output_options(parser, "loss_chunks")
    parser.add_argument("--rounds", type=int, default=15)
    options = parser.parse_args()
    facts = take_facts(("torch",))
    comparisons = []
    for name, shape in MODELS.items():
        counts = {"compiled": of_ours(shape, True), "eager": of_ours(shape, False), "Liger": of_liger(shape)}
        gigabytes = {contender: moved / 1e9 for contender, moved in counts.items()}
        comparisons.append(Comparison("GB", "compiled", [gigabytes], case=name))
    logits, targets = torch.randn(TIMED).bfloat16(), torch.randint(TIMED[1], TIMED[:1])
    arguments = (logits, targets, None, True, False)
    ways = {"compiled": compiled(logits.device), "eager": losses_and_gradients}
    for function in ways.values():
        function(*arguments)
    rounds = interleave(list(ways), options.rounds, lambda name: timed(ways[name], arguments))
    comparisons.append(Comparison("s", "compiled", rounds, case="a chunk on the CPU"))
    title = "The loss of a language model, chunk by chunk"
    record = Record("loss_chunks", title, ABOUT, {"rounds": options.rounds, "threads": 1}, facts, comparisons)
    write_record(record, options)


if __name__ == "__main__":
    main()
