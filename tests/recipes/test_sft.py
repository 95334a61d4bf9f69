"""Supervised fine-tuning under every strategy, against a plain PyTorch loop; adapters: trained, saved, resumed."""

import json

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
from reference import reference_addition
from resuming import Interruption, assert_bit_for_bit, stop_and_resume
from test_strategies import SMALL_ADDITION, STEPS, assert_same, recorded

pytestmark = pytest.mark.slow

addition = tasks.module("sft", "data").addition
load_causal_lm = tasks.module("sft", "model").load_causal_lm

SINGLE = (*SMALL_ADDITION, '--batch={"global_batch_size": 32, "micro_batch_size": 8}')
PACKED = (
    *SMALL_ADDITION,
    "--data.packing=true",
    "--data.num_train_samples=1250",
    '--batch={"global_batch_size": 8, "micro_batch_size": 2}',
)
TOKENS = torch.arange(40, 60)[None]
LORA = (*SINGLE, '--model.lora={"rank": 2, "alpha": 4.0}', "--optimizer.weight_decay=0.1")


@pytest.mark.parametrize(("words", "strategy"), [(PACKED, "zero3"), (LORA, "fsdp")], ids=["packs", "lora"])
def test_two_processes(words, strategy, run_dir):
    result = run_job(recorded, ADDITION, run_dir, *words, strategy=strategy)[0]
    (plain,) = run_job(reference_addition, ADDITION, words, STEPS, strategy="single")
    assert_same(result, plain)
    if words == PACKED:
        expected = evaluate_plainly(run_dir / "model")
        (line,) = result["evaluations"]
        assert {key: line[key] for key in expected} == pytest.approx(expected, rel=1e-5)


def evaluate_plainly(folder):
    """From the final weights, pair by pair, also where training packs: the loss is a mean over answer tokens, exact
    match over pairs."""
    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    losses = []
    exact = []
    for row in addition()[1].select(range(40)):
        answer = torch.tensor([*row["answer"].encode(), 0])
        tokens = torch.tensor([*row["prompt"].encode(), *answer])
        with torch.no_grad():
            logits = model(input_ids=tokens[None, :-1]).logits[0, -len(answer) :]
        losses += cross_entropy(logits, answer, reduction="none").tolist()
        exact.append(torch.equal(logits.argmax(dim=-1), answer))
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


def adapter_words(base):
    return (
        *SINGLE,
        "--model.config=null",
        f"--model.path={base}",
        '--model.lora={"rank": 2, "alpha": 4.0}',
        f"--train.stop_after_steps={STEPS}",
        "--logging.every=1",
        "--logging.trackers=[]",
    )


def logits_of(base, adapter):
    """Of the base with an adapter, as a user of peft loads them."""
    from peft import PeftModel

    plain = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32).eval()
    with torch.no_grad():
        before = plain(input_ids=TOKENS).logits.numpy()
        adapted = PeftModel.from_pretrained(plain, adapter).eval()
        return before, adapted(input_ids=TOKENS).logits.numpy()


def logits_after_training(run_dir, *words):
    """Train, and return on rank 0 the logits of the whole weights as the strategy has them, without peft's files."""
    state = recorded(ADDITION, run_dir, *words)["weights"][-1]
    model = load_causal_lm(load_config(ADDITION, words).model).eval()
    model.load_state_dict({name: torch.from_numpy(tensor) for name, tensor in state.items()}, strict=False)
    with torch.no_grad():
        return model(input_ids=TOKENS).logits.numpy()


def difference(found, expected):
    """The largest one, relative to the largest number."""
    return np.abs(found - expected).max() / np.abs(expected).max()


def test_adapters_are_saved_and_exported_as_peft_has_them(base, run_dir, tmp_path):
    words = (*adapter_words(base), '--optimizer.ema_half_life={"samples": 100}')
    expected = run_job(logits_after_training, run_dir, *words, strategy="zero3")[0]
    assert main(["export", str(run_dir), str(tmp_path / "exported")]) == 0
    for folder in (run_dir / "model", tmp_path / "exported"):
        assert {file.name for file in folder.iterdir()} >= {"adapter_config.json", "adapter_model.safetensors"}
        assert not (folder / "model.safetensors").exists()
        # It was trained on bytes.
        assert not (folder / "tokenizer.model").exists()
        assert (folder / "generation_config.json").exists()
        assert json.loads((folder / "adapter_config.json").read_text())["base_model_name_or_path"] == str(base)
        before, after = logits_of(base, folder)
        assert difference(after, expected) <= 1e-6
        assert difference(before, expected) > 1e-3
    averaged = tmp_path / "averaged"
    assert main(["export", str(run_dir), str(averaged), "--ema"]) == 0
    _, average = logits_of(base, averaged)
    assert difference(average, after) > 1e-3
    merged = tmp_path / "merged"
    assert main(["export", str(run_dir), str(merged), "--ema", "--merge"]) == 0
    plain = AutoModelForCausalLM.from_pretrained(merged)
    with torch.no_grad():
        logits = plain(input_ids=TOKENS).logits.numpy()
    assert difference(logits, average) <= 1e-6
    assert (merged / "generation_config.json").exists()
    # As the base has it.
    assert not plain.config.use_cache


def test_adapters_resume_bit_for_bit(base, tmp_path):
    """With dropout, whose seeds must go on where they were."""
    words = (
        *adapter_words(base),
        "--model.lora.dropout=0.1",
        "--batch.global_batch_size=24",
        "--batch.micro_batch_size=4",
    )
    stop_and_resume(tmp_path, words, Interruption("signal", 1, 5), strategy="zero3", recipe=ADDITION)
    assert_bit_for_bit(tmp_path / "run", tmp_path / "whole", "adapter_model.safetensors")
