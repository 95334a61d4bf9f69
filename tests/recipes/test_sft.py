"""Supervised fine-tuning under every strategy, against a plain PyTorch loop; adapters: trained, saved, resumed."""

import json
import math
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.nn.functional import cross_entropy
from transformers import AutoModelForCausalLM

import tasks
from jobs import run_job
from largebatch.__main__ import main
from largebatch.config import load_config
from paths import ADDITION
from reference import global_batches, train_plainly
from resuming import Interruption, assert_bit_for_bit, stop_and_resume
from test_strategies import STEPS, assert_same, recorded

pytestmark = pytest.mark.slow

addition = tasks.module("sft", "data").addition
load_causal_lm = tasks.module("sft", "model").load_causal_lm

TINY = (
    '--model.config={"model_type": "llama", "vocab_size": 256, "hidden_size": 16, "intermediate_size": 32, '
    '"num_hidden_layers": 2, "num_attention_heads": 2, "max_position_embeddings": 64}',
    "--data.num_eval_samples=40",
    '--learning_rate.warmup.duration={"steps": 6}',
)
SINGLE = (*TINY, '--batch={"global_batch_size": 32, "micro_batch_size": 8}')
PACKED = (
    *TINY,
    "--data.packing=true",
    "--data.num_train_samples=1250",
    '--batch={"global_batch_size": 8, "micro_batch_size": 2}',
)
LORA = (*SINGLE, '--model.lora={"rank": 2, "alpha": 4.0}', "--optimizer.weight_decay=0.1")
RECIPES = {"packs": PACKED, "lora": LORA}


def reference_sft(overrides: tuple[str, ...]) -> dict:
    """One process, nothing of the library but the model and the order of samples: each pair alone, its tokens made
    from its text here, the loss torch's mean over the answer tokens of the whole global batch."""
    config = load_config(ADDITION, overrides)
    pairs = [(row["prompt"].encode(), row["answer"].encode() + b"\0") for row in addition()[0]]
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
    torch.manual_seed(config.seed)
    model = tasks.build_model(ADDITION)(config)
    options = config.optimizer
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("lora_" in name or config.model.lora is None)
    groups = [
        {"params": [parameter], "weight_decay": 0.0 if "norm" in name else options.weight_decay}
        for name, parameter in model.named_parameters()
        if parameter.requires_grad
    ]
    optimizer = torch.optim.AdamW(groups, betas=options.betas, eps=options.eps)

    def mean_loss(indices):
        losses = []
        for prompt, answer in (pair for index in indices for pair in samples[index]):
            tokens = torch.tensor([*prompt, *answer])
            logits = model(input_ids=tokens[None, :-1]).logits[0]
            losses.append(cross_entropy(logits[-len(answer) :], tokens[-len(answer) :], reduction="none"))
        return torch.cat(losses).mean()

    # Warmup over 6 steps from zero, then half a cosine.
    size = config.batch.global_batch_size
    rate = config.learning_rate
    final = rate.decay.final_fraction
    left = config.train.duration.epochs * (len(samples) // size) - 6
    falling = [final + (1 - final) * 0.5 * (1 + math.cos(math.pi * step / left)) for step in range(STEPS - 6)]
    peak = rate.base_lr * math.sqrt(size / rate.reference_batch_size)
    rates = [peak * each for each in (*np.arange(6) / 6, *falling)]
    batches = global_batches(len(samples), {0: size}, False, STEPS)
    return train_plainly(config, model, optimizer, mean_loss, batches, rates)


@cache
def plain(name: str) -> dict:
    (result,) = run_job(reference_sft, RECIPES[name], strategy="single")
    return result


@pytest.mark.parametrize(("name", "strategy"), [("packs", "zero3"), ("lora", "fsdp")])
def test_two_processes(name, strategy, tmp_path):
    result = run_job(recorded, ADDITION, tmp_path / "run", *RECIPES[name], strategy=strategy)[0]
    assert_same(result, plain(name))
    if name != "lora":
        expected = evaluate_plainly(tmp_path / "run/model")
        (line,) = result["evaluations"]
        assert {key: line[key] for key in expected} == pytest.approx(expected, rel=1e-5)


def evaluate_plainly(folder: Path) -> dict[str, float]:
    """From the final weights, pair by pair, also where training packs: the loss is a mean over answer tokens, exact
    match over pairs."""
    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    losses = []
    exact = []
    for row in addition()[1].select(range(40)):
        tokens = torch.tensor([*row["prompt"].encode(), *row["answer"].encode(), 0])
        first = len(row["prompt"])
        with torch.no_grad():
            logits = model(input_ids=tokens[None, :-1]).logits[0, first - 1 :]
        losses += cross_entropy(logits, tokens[first:], reduction="none").tolist()
        exact.append(bool((logits.argmax(dim=-1) == tokens[first:]).all()))
    return {"loss": sum(losses) / len(losses), "exact_match": sum(exact) / len(exact)}


# --- adapters -----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """A small pretrained model in a local folder."""
    folder = tmp_path_factory.mktemp("pretrained") / "base"
    torch.manual_seed(7)
    load_causal_lm(load_config(ADDITION, SINGLE).model).save_pretrained(folder)
    (folder / "tokenizer.model").write_bytes(bytes(range(256)))
    return folder


def adapter_words(base: Path, dropout: float = 0.0) -> tuple[str, ...]:
    lora = json.dumps({"rank": 2, "alpha": 4.0, "dropout": dropout})
    return (
        *SINGLE,
        "--model.config=null",
        f"--model.path={base}",
        f"--model.lora={lora}",
        f"--train.stop_after_steps={STEPS}",
        "--logging.every=1",
        "--logging.trackers=[]",
    )


def logits_of(base: Path, adapter: Path):
    """Of the base with an adapter, as a user of peft loads them."""
    from peft import PeftModel

    plain = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32).eval()
    tokens = torch.arange(40, 60)[None]
    with torch.no_grad():
        before = plain(input_ids=tokens).logits.numpy()
        adapted = PeftModel.from_pretrained(plain, adapter).eval()
        return before, adapted(input_ids=tokens).logits.numpy()


def logits_after_training(run_dir: Path, *words: str):
    """Train, and return on rank 0 the logits of the whole weights as the strategy has them, without peft's files."""
    state = recorded(ADDITION, run_dir, *words)["weights"][-1]
    model = load_causal_lm(load_config(ADDITION, words).model).eval()
    model.load_state_dict({name: torch.from_numpy(tensor) for name, tensor in state.items()}, strict=False)
    with torch.no_grad():
        return model(input_ids=torch.arange(40, 60)[None]).logits.numpy()


def test_adapters_are_saved_and_exported_as_peft_has_them(base, tmp_path):
    run_dir = tmp_path / "run"
    words = (*adapter_words(base), '--optimizer.ema_half_life={"samples": 100}')
    expected = run_job(logits_after_training, run_dir, *words, strategy="zero3")[0]
    assert main(["export", str(run_dir), str(tmp_path / "exported")]) == 0
    for folder in (run_dir / "model", tmp_path / "exported"):
        assert {file.name for file in folder.iterdir()} >= {"adapter_config.json", "adapter_model.safetensors"}
        assert not (folder / "model.safetensors").exists()
        assert (folder / "tokenizer.model").read_bytes() == bytes(range(256))
        assert json.loads((folder / "adapter_config.json").read_text())["base_model_name_or_path"] == str(base)
        before, after = logits_of(base, folder)
        assert np.abs(after - expected).max() <= 1e-6 * np.abs(expected).max()
        assert np.abs(after - before).max() > 1e-3 * np.abs(expected).max()
    for ema in ([], ["--ema"]):
        merged, adapter = (tmp_path / f"{kind}{ema}" for kind in ("merged", "adapter"))
        assert main(["export", str(run_dir), str(merged), "--merge", *ema]) == 0
        assert main(["export", str(run_dir), str(adapter), *ema]) == 0
        plain = AutoModelForCausalLM.from_pretrained(merged)
        with torch.no_grad():
            logits = plain(input_ids=torch.arange(40, 60)[None]).logits.numpy()
        expected = logits_of(base, adapter)[1]
        assert np.abs(logits - expected).max() <= 1e-6 * np.abs(expected).max()
        assert (merged / "tokenizer.model").exists()
        assert not any("adapter" in file.name for file in merged.iterdir())
        # As the base has it.
        assert not plain.config.use_cache
    assert np.abs(logits - after).max() > 1e-3 * np.abs(after).max()


def test_adapters_resume_bit_for_bit(base, tmp_path):
    """With dropout, whose seeds must go on where they were."""
    words = (*adapter_words(base, dropout=0.1), '--batch={"global_batch_size": 24, "micro_batch_size": 4}')
    stop_and_resume(tmp_path, words, Interruption("signal", 1, 5), strategy="zero3", recipe=ADDITION)
    assert_bit_for_bit(tmp_path / "run", tmp_path / "whole", "adapter_model.safetensors")
