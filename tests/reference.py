"""The same training in plain PyTorch, in one process, with nothing of the library but the order of samples.

What every strategy is compared with: one loop over the whole global batch, torch's own optimizer, clipping and mean.
"""

import math
from pathlib import Path

import numpy as np
import torch
from torch.nn.functional import cross_entropy, one_hot

import tasks
from largebatch.config import load_config
from largebatch.data.order import derive_seed, epoch_order
from plain_optimizers import PlainLamb, PlainLars


def begin(recipe: Path, overrides: tuple[str, ...]) -> tuple:
    """The config, a model with its starting weights, and the options of the optimizer."""
    config = load_config(recipe, overrides)
    torch.manual_seed(config.seed)
    return config, tasks.build_model(recipe)(config), config.optimizer


def groups_of(model, options, exempt: tuple[str, ...], own: dict[str, float] | None = None) -> list[dict]:
    """A group for each trained parameter, by parts of its name: those that are exempt have no weight decay, and `own`
    has factors of the learning rate."""
    return [
        {
            "params": [parameter],
            "weight_decay": 0.0 if any(part in name for part in exempt) else options.weight_decay,
            "factor": next((factor for part, factor in (own or {}).items() if part in name), 1),
        }
        for name, parameter in model.named_parameters()
        if parameter.requires_grad
    ]


def reference_digits(recipe: Path, overrides: tuple[str, ...], steps: int, warmup: int = 0) -> dict:
    """SGD, LARS or AdamW on the digits; BatchNorm over micro-batches, as Goyal's workers do.

    After a warmup of so many steps from zero, the learning rate is half a cosine.
    """
    from largebatch.data.images import digits, normalize_pixels

    config, model, options = begin(recipe, overrides)
    train_set, _ = digits(config.data)
    if options.name == "adamw":
        # Matrices and the patch embedding decay.
        groups = groups_of(model, options, ("bias", "layernorm", "cls_token", "position_embeddings"))
        optimizer = torch.optim.AdamW(groups, betas=options.betas, eps=options.eps)
    elif options.name == "lars":
        # Vectors are normalizations and biases here.
        momentum = {"momentum": options.momentum, "nesterov": options.nesterov}
        optimizer = PlainLars(model.parameters(), options.weight_decay, options.trust_coefficient, **momentum)
    else:
        groups = groups_of(model, options, ("normalization",))
        optimizer = torch.optim.SGD(groups, momentum=options.momentum, nesterov=options.nesterov)

    def mean_loss(indices):
        losses = []
        for chunk in np.split(indices, len(indices) // config.batch.micro_batch_size):
            batch = train_set.fetch(chunk, 0)
            pixels = normalize_pixels(batch["pixel_values"], config.data)
            targets = one_hot(batch["labels"], 10).float()
            if config.loss.mixup_alpha is not None:
                pixels, targets = mixed_in_pairs(pixels, targets, chunk, config)
            smoothing = config.loss.label_smoothing
            targets = (1 - smoothing) * targets + smoothing / 10
            losses.append(cross_entropy(model(pixel_values=pixels).logits, targets, reduction="none"))
        return torch.cat(losses).mean()

    size = config.batch.global_batch_size
    peak = config.learning_rate.base_lr
    total = round(config.train.duration.epochs) * (1437 // size)
    cosine = [peak * (1 + math.cos(math.pi * (step - warmup) / (total - warmup))) / 2 for step in range(steps)]
    rates = [peak * step / warmup if step < warmup else rate for step, rate in enumerate(cosine)]
    return train_plainly(config, model, optimizer, mean_loss, global_batches(1437, {0: size}, False, steps), rates)


def mixed_in_pairs(pixels, targets, indices, config):
    """Mixup by the definition, one pair after the other, of a micro-batch."""
    mixed_pixels = pixels.clone()
    mixed_targets = targets.clone()
    for first in range(0, len(indices), 2):
        random = np.random.default_rng(derive_seed(config.seed, "mixup", 0, int(indices[first])))
        weight = np.float32(random.beta(config.loss.mixup_alpha, config.loss.mixup_alpha))
        for one, other in ((first, first + 1), (first + 1, first)):
            mixed_pixels[one] = weight * pixels[one] + (1 - weight) * pixels[other]
            mixed_targets[one] = weight * targets[one] + (1 - weight) * targets[other]
    return mixed_pixels, mixed_targets


def reference_pydoc(
    recipe: Path, overrides: tuple[str, ...], steps: int, size_at: dict[int, int], own: dict[str, float] | None = None
) -> dict:
    """AdamW or LAMB on a recipe of Python's reference, the whole global batch in one pass, its loss torch's mean over
    targets.

    `size_at` has the steps at which batch sizes come into force, as the overrides say it in other words. So does `own`
    have, by a part of their names, parameters with a factor of the learning rate.
    """
    config, model, options = begin(recipe, overrides)
    if config.model.architecture != "gpt2":
        draw_by_name(model, config.seed, config.model.initializer_range)
    train_set, _ = tasks.sources(recipe.parent.name)(config)
    groups = groups_of(model, options, ("ln_", "norm", "LayerNorm", "bias"), own)
    kind = PlainLamb if options.name == "lamb" else torch.optim.AdamW
    optimizer = kind(groups, betas=options.betas, eps=options.eps)

    def mean_loss(indices):
        batch = train_set.fetch(indices, 0)
        logits = model(input_ids=batch["input_ids"]).logits
        return cross_entropy(logits.flatten(0, 1), batch["labels"].flatten())

    # Warmup over 40 steps from zero; in samples, by the square-root rule.
    rate = config.learning_rate
    batches = global_batches(len(train_set), size_at, not config.batch.drop_last, steps=41)
    in_force = [[size for start, size in size_at.items() if start <= step][-1] for step in range(steps)]
    peaks = [rate.base_lr * math.sqrt(size / rate.reference_batch_size) for size in in_force]
    rates = [peak * batch[3] / batches[40][3] for peak, batch in zip(peaks, batches, strict=False)]
    return train_plainly(config, model, optimizer, mean_loss, batches[:steps], rates)


def reference_addition(
    recipe: Path, overrides: tuple[str, ...], steps: int, own: dict[str, float] | None = None
) -> dict:
    """AdamW on the sums, each pair alone, its tokens made from its text here, the loss torch's mean over the answer
    tokens of the whole global batch. `own` has, by a part of their names, parameters with a factor of the rate.
    """
    config, model, options = begin(recipe, overrides)
    texts = tasks.module("sft", "data").addition()[0]
    pairs = [(row["prompt"].encode(), row["answer"].encode() + b"\0") for row in texts]
    samples = [[pair] for pair in pairs]
    if config.data.packing:
        samples = []
        room = 0
        for prompt, answer in pairs:
            length = len(prompt) + len(answer) - 1
            if length > room:
                samples.append([])
                room = config.data.block_size
            samples[-1].append((prompt, answer))
            room -= length
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("lora_" in name or config.model.lora is None)
    groups = groups_of(model, options, ("norm",), own)
    optimizer = torch.optim.AdamW(groups, betas=options.betas, eps=options.eps)

    def mean_loss(indices):
        losses = []
        for prompt, answer in (pair for index in indices for pair in samples[index]):
            tokens = torch.tensor([*prompt, *answer])
            logits = model(input_ids=tokens[None, :-1]).logits[0]
            losses.append(cross_entropy(logits[-len(answer) :], tokens[-len(answer) :], reduction="none"))
        return torch.cat(losses).mean()

    # Warmup over 6 steps from zero, then half a cosine; in samples.
    size = config.batch.global_batch_size
    rate = config.learning_rate
    final = rate.decay.final_fraction
    duration = config.train.duration
    num_samples = config.data.num_train_samples
    total = duration.steps or round(duration.epochs * (num_samples // size))
    batches = global_batches(num_samples, {0: size}, not config.batch.drop_last, total + 1)
    before = [each[3] for each in batches]
    peak = rate.base_lr * math.sqrt(size / rate.reference_batch_size)
    rates = [peak * each / before[6] for each in before[:6]]
    for each in before[6:steps]:
        progress = (each - before[6]) / (before[total] - before[6])
        rates.append(peak * (final + (1 - final) * 0.5 * (1 + math.cos(math.pi * progress))))
    return train_plainly(config, model, optimizer, mean_loss, batches[:steps], rates)


def draw_by_name(model, seed: int, std: float) -> None:
    """Starting weights of Llama and BERT: ones for norms, zeros for biases; everything else normal, each parameter with
    a seed of its own."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                parameter.fill_(0.0)
            elif "norm" in name.lower():
                parameter.fill_(1.0)
            else:
                generator = torch.Generator().manual_seed(derive_seed(seed, "weights", name))
                parameter.normal_(0.0, std, generator=generator)


def global_batches(num_samples: int, size_at: dict[int, int], keep_last: bool, steps: int) -> list[tuple]:
    """(epoch, start, size, samples before) of each step; `size_at` has the steps at which sizes come into force."""
    batches = []
    epoch = 0
    start = 0
    trained = 0
    size = 0
    for step in range(steps):
        size = size_at.get(step, size)
        if start == num_samples or (start + size > num_samples and not keep_last):
            epoch = epoch + 1
            start = 0
        taken = min(size, num_samples - start)
        batches.append((epoch, start, taken, trained))
        start = start + taken
        trained = trained + taken
    return batches


def train_plainly(config, model, optimizer, mean_loss, batches, rates, tensors=torch.nn.Module.named_parameters):
    """The metrics of each step, and what `tensors` finds in the model after it."""
    model.train()
    metrics = []
    weights = []
    for (epoch, start, size, _), learning_rate in zip(batches, rates, strict=True):
        order = epoch_order(config.data.num_train_samples, config.seed, epoch)
        optimizer.zero_grad()
        loss = mean_loss(order(np.arange(start, start + size)))
        loss.backward()
        for group in optimizer.param_groups:
            group["lr"] = learning_rate * group.get("factor", 1)
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), config.optimizer.clip_norm or float("inf"))
        optimizer.step()
        metrics.append({"loss": loss.item(), "lr": learning_rate, "grad_norm": norm.item()})
        weights.append({name: tensor.detach().numpy().copy() for name, tensor in tensors(model)})
    return {"metrics": metrics, "weights": weights}
