"""Models of any architecture from a folder: each process reads its parts of what `from_pretrained` reads, or the whole
model where that is not all that `from_pretrained` does."""

import json
from contextlib import redirect_stdout
from io import StringIO

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from test_causal_lm import GEMMA3, save_as_pickle
from test_what_tokens_see import ARCHITECTURES as KINDS
from test_what_tokens_see import SMALL, UNABLE
from transformers import AutoConfig, AutoModelForCausalLM

import tasks
from jobs import run_job, train
from largebatch.config import load_config
from largebatch.errors import ConfigError, UserError
from largebatch.model.building import SeededWeights, build_without_weights
from largebatch.model.parts import is_adapter, without_adapter
from largebatch.model.pretrained import PretrainedWeights
from largebatch.plan.strategies import STRATEGIES
from largebatch.storage.files import read_json_lines
from paths import ADDITION
from starting import starting_weights

PADDED = SMALL | {"pad_token_id": 0, "num_hidden_layers": 3}
# Rotary and learned positions, tied and untied output layers, norms of their own, capped logits, experts.
ARCHITECTURES = {
    "qwen2": {"model_type": "qwen2", "tie_word_embeddings": True, **PADDED},
    "mistral": {"model_type": "mistral", "tie_word_embeddings": False, **PADDED},
    "gemma2": {"model_type": "gemma2", "head_dim": 8, **PADDED},
    "gpt2": KINDS["gpt2"],
    "mixtral": KINDS["mixtral"],
    "llama4": {"model_type": "llama4_text", "num_local_experts": 4, "head_dim": 8, **PADDED},
    "bloom": UNABLE["bloom"],
    # Stored by other names than the model's.
    "gpt_neox": {"model_type": "gpt_neox", **PADDED},
    "gemma3": {"model_type": "gemma3", **GEMMA3},
}
LORA = '--model.lora={"rank": 2, "alpha": 4.0}'


def saved(folder, name, **options):
    """A model in bfloat16, all of its weights random."""
    torch.manual_seed(99)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**ARCHITECTURES[name])).to(torch.bfloat16)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    model.save_pretrained(folder, **options)
    return folder


def words_for(folder, *more):
    batch = '--batch={"global_batch_size": 24, "micro_batch_size": 4}'
    warmup = '--learning_rate.warmup.duration={"steps": 6}'
    return ("--model.config=null", f"--model.path={folder}", "--logging.trackers=[]", batch, warmup, *more)


def in_parts(folder, *words):
    """The model that a run builds, and its weights, read from the folder."""
    config = load_config(ADDITION, words_for(folder, *words))
    model, draws = build_without_weights(lambda: tasks.build_model(ADDITION)(config), is_adapter)
    weights = PretrainedWeights(folder, model, SeededWeights(model, draws, seed=0))
    return model, {n: weights.read(n, 0, p.numel()).float().view(p.shape) for n, p in model.named_parameters()}


def as_transformers_reads(folder):
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)


def assert_reads(weights, folder):
    """The base as `transformers` alone reads it; adapters that change nothing, of which no two begin alike."""
    base = as_transformers_reads(folder).state_dict()
    drawn = []
    for name, tensor in weights.items():
        tensor = np.asarray(tensor)
        if ".lora_B." in name:
            assert not tensor.any()
        elif ".lora_A." in name:
            assert np.abs(tensor).max() < 1 / np.sqrt(tensor.shape[-1])
            drawn.append(tensor.tobytes())
        else:
            assert tensor.tobytes() == base[without_adapter(name)].numpy().tobytes(), name
    assert len(set(drawn)) == len(drawn)


def weights_of_a_run(run_dir, *words):
    """As they are when the first step would begin; no process loads the whole model."""
    AutoModelForCausalLM.from_pretrained = None
    return starting_weights(ADDITION, run_dir, *words)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "strategy"), [("qwen2", "fsdp"), ("mistral", "zero3")])
def test_processes_read_what_from_pretrained_reads(name, strategy, tmp_path):
    folder = saved(tmp_path / "model", name, max_shard_size="20KB")
    found = run_job(weights_of_a_run, tmp_path / "run", *words_for(folder, LORA), strategy=strategy)[0]
    assert_reads(found, folder)
    assert any("lora_A" in name for name in found)


@pytest.mark.parametrize("name", ["qwen2", "gemma2", "gpt2", "bloom", "llama4", "gpt_neox", "gemma3"])
def test_weights_buffers_and_what_tokens_see(name, tmp_path):
    """A small twin is asked what tokens see, with the same answer as the model itself."""
    attention = tasks.module("sft", "attention")
    folder = saved(tmp_path, name)
    model, weights = in_parts(folder, LORA)
    assert_reads(weights, folder)
    buffers = dict(as_transformers_reads(folder).named_buffers())
    assert {key: b.tolist() for key, b in model.named_buffers()} == {key: b.tolist() for key, b in buffers.items()}
    state = torch.get_rng_state()
    attention.check_causal(model)
    tasks.module("sft", "adapters").check_adapters(model)
    if name == "bloom":
        with pytest.raises(UserError, match="BloomForCausalLM does not keep the pairs of a pack apart"):
            attention.check_packing(model)
    else:
        attention.check_packing(model)
    assert torch.equal(torch.get_rng_state(), state)


def test_a_model_that_caps_its_logits_gives_losses_without_having_weights(tmp_path):
    """As Gemma 2 does: its twin shows that the output layer's losses would not be the model's."""
    folder = saved(tmp_path, "gemma2")
    model, weights = in_parts(folder)
    for name, parameter in model.named_parameters():
        torch.utils.swap_tensors(parameter, torch.nn.Parameter(weights[name]))
    tokens = torch.arange(20)[None]
    with torch.no_grad():
        losses = model(input_ids=tokens, targets=tokens + 1)
        logits = as_transformers_reads(folder)(input_ids=tokens).logits
    expected = torch.nn.functional.cross_entropy(logits[0], tokens[0] + 1, reduction="none")
    torch.testing.assert_close(losses[0], expected)


def test_files_of_the_model_inside(tmp_path):
    """As those of GPT-2 on the hub: without the prefix, with the masks of old versions."""
    folder = saved(tmp_path, "gpt2")
    file = folder / "model.safetensors"
    tensors = {name.removeprefix("transformer."): tensor for name, tensor in load_file(file).items()}
    save_file(tensors | {f"h.{n}.attn.bias": torch.ones(1, 1, 64, 64) for n in range(2)}, file, {"format": "pt"})
    assert_reads(in_parts(folder)[1], folder)


def with_another_tensor(folder):
    file = folder / "model.safetensors"
    save_file(load_file(file) | {"extra": torch.ones(2)}, file, {"format": "pt"})


@pytest.mark.parametrize(
    ("name", "change", "reason"),
    [
        ("mixtral", lambda _: None, r"transformers merges or splits model\.layers\.0\S+experts"),
        ("qwen2", save_as_pickle, "neither model.safetensors nor"),
        ("qwen2", with_another_tensor, "the model has no extra"),
    ],
)
def test_what_is_not_just_read_is_refused_in_parts(name, change, reason, tmp_path):
    folder = saved(tmp_path, name)
    change(folder)
    with pytest.raises(UserError, match=rf"(?s)model\.path: .*{reason}"):
        in_parts(folder)


def losses(run_dir, *words):
    train(ADDITION, *words, run_dir=run_dir)
    return [line["loss"] for line in read_json_lines(run_dir / "metrics.jsonl")]


@pytest.mark.slow
def test_frozen_weights_in_bf16_change_no_loss(tmp_path):
    """Those of files in bf16, which autocast would cast to the same numbers."""
    folder = saved(tmp_path / "model", "qwen2")
    short = ("--train.stop_after_steps=4", "--logging.every=1", "--evaluation.every=null", "--data.num_eval_samples=40")
    words = words_for(folder, LORA, "--precision=bf16", "--batch.micro_batch_size=3", *short)
    expected = run_job(losses, tmp_path / "fp32", *words)[0]
    found = run_job(losses, tmp_path / "fsdp", *words, "--model.frozen_dtype=bf16", strategy="fsdp")[0]
    assert found == expected
    state = load_file(tmp_path / "fsdp/checkpoints/step_00000004/rank_00000.safetensors")
    kinds = {name: tensor.dtype for name, tensor in state.items() if name.endswith("q_proj.base_layer.weight")}
    assert set(kinds.values()) == {torch.bfloat16}


def test_frozen_weights_in_bf16_are_refused_where_they_would_not_work():
    words = (LORA, "--precision=bf16", "--model.frozen_dtype=bf16")
    config = load_config(ADDITION, words)
    assert [name for name, entry in STRATEGIES.items() if entry.refusal_of(config)] == ["zero1", "zero2", "zero3"]
    for kept in (words[1:], (words[0], words[2])):
        with pytest.raises(ConfigError, match=r'model\.frozen_dtype: "bf16" needs model.lora and precision "bf16"'):
            load_config(ADDITION, kept)


def train_aloud(run_dir, *words):
    with redirect_stdout(StringIO()) as said:
        losses(run_dir, *words)
    return said.getvalue()


@pytest.mark.slow
def test_a_model_that_is_converted_is_loaded_whole_which_is_said(tmp_path):
    folder = saved(tmp_path / "model", "mixtral")
    (folder / "tokenizer.json").write_text('{"version": "1.0"}')
    (folder / "preprocessor_config.json").write_text('{"size": 8}')
    (folder / "generation_config.json").write_text('{"eos_token_id": 7, "temperature": 0.7}')
    words = words_for(folder, "--train.stop_after_steps=1", "--data.num_eval_samples=40", "--evaluation.every=null")
    said, _ = run_job(train_aloud, tmp_path / "run", *words, strategy="fsdp")
    assert "Model         loaded whole on every process: model.path: " in said
    assert "transformers merges or splits" in said
    # The recipe has no tracker.
    assert "  weights      " in said
    assert "tensorboard" not in said
    assert read_json_lines(tmp_path / "run/metrics.jsonl")
    # What is deployed is what was fine-tuned: answers in bytes, which end with 0.
    exported = tmp_path / "run/model"
    assert json.loads((exported / "generation_config.json").read_text()) == {"eos_token_id": [7, 0], "temperature": 0.7}
    assert (exported / "preprocessor_config.json").read_text() == '{"size": 8}'
    assert not (exported / "tokenizer.json").exists()
