"""Ablations of forward and backward passes. Each takes whether its sizes are small, for a rehearsal on the CPU."""

from collections.abc import Callable
from functools import partial
from itertools import cycle

import torch
from torch import nn

from gpu.models import GPT2, LLAMA, RESNET_LARS, batch_of, build, fixed, join, train_on
from gpu.rows import Result
from gpu.turns import Variant, device, in_turns
from largebatch.backend.compilation import CompiledRegions
from largebatch.model.activation_checkpointing import checkpoint_activations
from largebatch.model.attention import set_attention


def loss_chunks(is_small: bool) -> list[Result]:
    """The output layer with its loss, in chunks of several sizes."""
    from largebatch.model import token_losses as module

    tokens, width, words = (64, 32, 256) if is_small else (8192, 4096, 128256)
    inputs = torch.randn(tokens, width, device=device(), requires_grad=True)
    weight = torch.randn(words, width, device=device()).mul_(0.02).requires_grad_()
    targets = torch.randint(words, (tokens,), device=device())

    def step() -> None:
        with torch.autocast(device().type, torch.bfloat16):
            losses = module.linear_token_losses(inputs, weight, None, targets)
        losses.sum().backward()
        inputs.grad = weight.grad = None

    def variant(max_logits: int) -> Callable[[], object]:
        assert hasattr(module, "MAX_LOGITS")
        assert hasattr(module, "MAX_COMPILED_LOGITS")
        module.MAX_LOGITS = module.MAX_COMPILED_LOGITS = max_logits
        return step

    variants = {f"2^{power} logits": partial(variant, 2**power) for power in (26, 28)}
    return in_turns("Output layer and loss of Llama", "2^26 logits", variants)


def ddp_optimizer(is_small: bool) -> list[Result]:
    """Dynamo cuts compiled blocks under DDP at its buckets, or does not."""
    from torch.nn.parallel import DistributedDataParallel

    join()

    config, model = build(GPT2, is_small)
    CompiledRegions(model, device())
    wrapped = DistributedDataParallel(model, gradient_as_bucket_view=True)
    step = partial(train_on, wrapped, batch_of(config))

    def variant(flag: bool) -> Callable[[], object]:
        # No guard looks at this flag: what was compiled with the other value would be called again.
        torch._dynamo.reset()
        torch._dynamo.config.optimize_ddp = flag
        return step

    variants = {"on": partial(variant, True), "off": partial(variant, False)}
    return in_turns("GPT-2, compiled, DDP, torch._dynamo.config.optimize_ddp", "on", variants)


def document_mask(is_small: bool) -> list[Result]:
    """A sequence is one document, or four that are kept apart by a mask."""
    config, model = build(LLAMA, is_small)
    checkpoint_activations(model, "full")
    batch = batch_of(config)
    length = config.data.block_size
    positions = torch.arange(length, device=device()).remainder(length // 4).unsqueeze(0)
    return in_turns(
        f"Llama with activation checkpointing, {length:,} tokens",
        "one document",
        {
            "one document": fixed(partial(train_on, model, batch)),
            "four, kept apart": fixed(partial(train_on, model, batch | {"position_ids": positions})),
        },
    )


def document_kernels(is_small: bool) -> list[Result]:
    """Four documents of a sequence are kept apart by a mask, or by skipping each other's tokens."""
    config, model = build(LLAMA, is_small)
    checkpoint_activations(model, "full")
    length = config.data.block_size
    positions = torch.arange(length, device=device()).remainder(length // 4).unsqueeze(0)
    step = partial(train_on, model, batch_of(config) | {"position_ids": positions})

    def variant(kernel: str) -> Callable[[], object]:
        set_attention(model, kernel)
        return step

    # On the CPU, `flex_attention` has no backward pass.
    kernels = ("sdpa",) if device().type == "cpu" else ("sdpa", "flex_attention")
    title = f"Llama with activation checkpointing, four documents in {length:,} tokens"
    return in_turns(title, "sdpa", {kernel: partial(variant, kernel) for kernel in kernels})


def unequal_lengths(is_small: bool) -> list[Result]:
    """Each micro-batch has another length: with cuDNN's attention, padded to few lengths for it, or without it."""
    config, model = build(GPT2, is_small)
    batch = batch_of(config)
    longest = config.data.block_size
    # Up to a quarter shorter: more lengths than a variant makes steps, and few multiples of 64.
    lengths = (longest - torch.randperm(longest // 4)).tolist()

    def variant(multiple: int, cudnn: bool) -> Variant:
        left = cycle(lengths)

        def step() -> None:
            length = -(-next(left) // multiple) * multiple
            train_on(model, {name: tensor[:, :length].contiguous() for name, tensor in batch.items()})

        def begin() -> Callable[[], object]:
            torch.backends.cuda.enable_cudnn_sdp(cudnn)
            return step

        return begin

    return in_turns(
        "GPT-2, micro-batches of unequal lengths",
        "cuDNN",
        {
            "cuDNN": variant(1, cudnn=True),
            "cuDNN, padded to a multiple of 64": variant(min(64, longest), cudnn=True),
            "without cuDNN": variant(1, cudnn=False),
        },
    )


def image_layout(is_small: bool) -> list[Result]:
    """ResNet-50 with channels first or last, with and without cuDNN's choice of the fastest algorithms."""
    config, model = build(RESNET_LARS, is_small)
    side = config.data.image_size
    size = 4 if is_small else 256
    images = torch.randn(size, 3, side, side, device=device())
    labels = torch.randint(config.data.num_classes, (size,), device=device())

    def variant(layout: torch.memory_format, benchmark: bool) -> Callable[[], object]:
        torch.backends.cudnn.benchmark = benchmark
        model.to(memory_format=layout)
        pixels = images.to(memory_format=layout)

        def step() -> None:
            with torch.autocast(device().type, torch.bfloat16):
                logits = model(pixel_values=pixels).logits
            nn.functional.cross_entropy(logits.float(), labels).backward()
            model.zero_grad(set_to_none=True)

        return step

    layouts = {"NCHW": torch.contiguous_format, "NHWC": torch.channels_last}
    variants = {
        name + (", cudnn.benchmark" if benchmark else ""): partial(variant, layout, benchmark)
        for name, layout in layouts.items()
        for benchmark in (False, True)
    }
    return in_turns("ResNet-50, memory layout", "NCHW", variants)
