"""Adapters merged into the weights at export: against the model with its adapters, as `peft` computes it."""

import pytest
import torch
from peft import LoraConfig
from transformers import AutoConfig, AutoModelForCausalLM

from largebatch.__main__ import main
from largebatch.errors import UserError
from largebatch.model.parts import store_frozen_in_bf16
from largebatch.run.checkpoint.export import export_intact
from largebatch.run.checkpoint.model_files import model_files
from saving import FakeBackend, FakeRun

TOKENS = torch.arange(20)[None]
LLAMA = {
    "model_type": "llama",
    "vocab_size": 64,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "max_position_embeddings": 64,
}
TIED = LLAMA | {"tie_word_embeddings": True}
# Its linear layers have their inputs first, and the output layer is the embedding.
GPT2 = {"model_type": "gpt2", "vocab_size": 64, "n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 64}


def adapted(config, **lora):
    """A model whose weights are all random, those of the adapters, too."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**config)).eval()
    model.add_adapter(LoraConfig(r=2, lora_alpha=6, task_type="CAUSAL_LM", **lora))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    return model


def checkpoint(path, model):
    backend = FakeBackend()
    backend.state = {f"weight/{name}": parameter.detach() for name, parameter in model.named_parameters()}
    run = FakeRun(path, backend=backend)
    run.writer.save(1, {"bad_steps": 0})
    run.writer.wait()
    folder = run.checkpoints / "step_00000001"
    for name, content in model_files(model, None).items():
        (folder / name).write_bytes(content)
    return folder


@pytest.mark.parametrize(
    ("config", "lora"),
    [
        (LLAMA, {"target_modules": ["q_proj", "embed_tokens", "lm_head"]}),
        (GPT2, {"target_modules": "all-linear"}),
        (LLAMA, {"target_modules": ["v_proj"], "modules_to_save": ["lm_head"], "use_rslora": True}),
    ],
)
def test_a_plain_model_computes_the_same(config, lora, tmp_path):
    model = adapted(config, **lora)
    export_intact(checkpoint(tmp_path, model), tmp_path / "merged", merge=True)
    assert not list(tmp_path.glob("merged/*adapter*"))
    plain, about = AutoModelForCausalLM.from_pretrained(tmp_path / "merged", output_loading_info=True)
    assert not any(about.values())
    assert plain.dtype == torch.float32
    with torch.no_grad():
        expected = model(input_ids=TOKENS).logits
        assert (plain(input_ids=TOKENS).logits - expected).abs().max() <= 3e-6 * expected.abs().max()


def test_rounded_once(tmp_path):
    """Merged in fp32, however the frozen weights are stored, and then cast to their dtype."""
    model = adapted(LLAMA, target_modules="all-linear")
    store_frozen_in_bf16(model)
    layer = model.model.layers[0].mlp.up_proj
    exact = layer.base_layer.weight.float() + 3 * layer.lora_B["default"].weight @ layer.lora_A["default"].weight
    folder = checkpoint(tmp_path, model)
    for dtype, expected in ((None, torch.bfloat16), ("float32", torch.float32)):
        export_intact(folder, tmp_path / "merged", dtype, merge=True)
        plain = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
        assert {each.dtype for each in plain.parameters()} == {expected}
        torch.testing.assert_close(
            plain.model.layers[0].mlp.up_proj.weight, exact.to(expected), rtol=0, atol=1e-7 if dtype else 0
        )


@pytest.mark.parametrize(
    "lora",
    [
        {"target_modules": ["lm_head"]},
        {"target_modules": ["embed_tokens"]},
        {"target_modules": ["q_proj"], "modules_to_save": ["embed_tokens"]},
    ],
)
def test_a_tied_weight_with_an_adapter_is_refused(lora, tmp_path):
    folder = checkpoint(tmp_path, adapted(TIED, **lora))
    with pytest.raises(UserError, match="share a weight, and one of them has an adapter; leave out --merge"):
        export_intact(folder, tmp_path / "merged", merge=True)
    assert not (tmp_path / "merged").exists()


def test_without_adapters_it_is_refused(run_dir, tmp_path, capsys):
    FakeRun(run_dir).save(1)
    assert main(["export", str(run_dir), str(tmp_path / "merged"), "--merge"]) == 2
    assert "it has no adapters of a model of transformers; leave out --merge" in capsys.readouterr().err
