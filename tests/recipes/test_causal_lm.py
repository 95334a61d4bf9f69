"""Models from a folder or a configuration: the dtype of their weights, their dropout, and adapters."""

import json
import os
import re

import pytest
import torch
import transformers
from packaging.version import Version
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from tokenizers.models import BPE
from transformers import AutoTokenizer, PreTrainedTokenizerFast

import tasks
from largebatch.config import load_config
from largebatch.errors import UserError
from largebatch.model.attention import autocast_experts
from largebatch.model.parts import is_adapter, without_adapter
from largebatch.run.checkpoint.model_files import model_files
from paths import ADDITION
from problems import problem_of

AutoCausalLM = tasks.module("sft", "config").AutoCausalLM
Lora = tasks.module("sft", "config").Lora
check_adapters = tasks.module("sft", "adapters").check_adapters
configuration = tasks.module("sft", "model").configuration
load_causal_lm = tasks.module("sft", "model").load_causal_lm

TOKENS = torch.arange(10)[None]
LORA = Lora(rank=2, alpha=4.0)
SMALL = {"vocab_size": 64, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
SMALL |= {"num_key_value_heads": 2, "intermediate_size": 8}
SINCE_5_23 = pytest.mark.skipif(Version(transformers.__version__) < Version("5.23"), reason="it came with 5.23")
MIXTRAL = SMALL | {"model_type": "mixtral", "num_local_experts": 4}
QWEN2_MOE = {"num_experts": 4, "moe_intermediate_size": 8, "shared_expert_intermediate_size": 8}
GPT_OSS = {"num_local_experts": 4}
LLAMA4 = {"num_local_experts": 4, "head_dim": 8, "intermediate_size_mlp": 8}
DEEPSEEK = {"n_routed_experts": 16, "moe_intermediate_size": 8, "first_k_dense_replace": 1}
VISION = {"hidden_size": 8, "intermediate_size": 8, "num_attention_heads": 1, "image_size": 8, "patch_size": 4}
GEMMA3 = {"text_config": SMALL, "vision_config": {"num_hidden_layers": 1, **VISION}, "mm_tokens_per_image": 4}
OUTPUT = {"self_attn.o_proj.weight"}
ATTENTION = {f"self_attn.{each}_proj.weight" for each in "qkvo"}
MLP = ["gate_proj", "up_proj", "down_proj"]
GPT2 = {"model_type": "gpt2", "vocab_size": 64, "n_embd": 16, "n_layer": 1, "n_head": 2, "n_positions": 16}


def section(**fields):
    return AutoCausalLM(architecture="auto", **fields)


def loaded(folder, lora=None):
    return load_causal_lm(section(path=str(folder), lora=lora))


def edit_config(folder, **fields):
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))


@pytest.fixture
def folder(tmp_path):
    """A model stored in bfloat16."""
    load_causal_lm(section(config=GPT2)).to(torch.bfloat16).save_pretrained(tmp_path / "stored")
    return tmp_path / "stored"


def test_stored_weights_are_trained_in_fp32(folder):
    from transformers import GPT2LMHeadModel

    stored = GPT2LMHeadModel.from_pretrained(folder, dtype=torch.bfloat16)
    for name, parameter in loaded(folder).named_parameters():
        assert parameter.dtype == torch.float32
        assert torch.equal(parameter, stored.get_parameter(name).float()), name


def test_a_model_is_not_random_in_training(folder, tmp_path):
    """GPT-2's configuration has a dropout of 0.1 three times, and Mixtral's router may have noise."""
    noisy = tmp_path / "noisy"
    load_causal_lm(section(config=MIXTRAL)).save_pretrained(noisy)
    edit_config(noisy, router_jitter_noise=0.5)
    for model in (loaded(folder), load_causal_lm(section(config=GPT2)), loaded(noisy)):
        model.train()
        assert torch.equal(model(TOKENS).logits, model(TOKENS).logits)


def test_adapters_alone_are_trained_and_change_nothing_at_first(folder):
    adapted = loaded(folder, LORA)
    trained = {name for name, parameter in adapted.named_parameters() if parameter.requires_grad}
    layers = ("attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj")
    expected = {f"transformer.h.0.{layer}.lora_{part}.default.weight" for layer in layers for part in "AB"}
    assert trained == expected
    assert torch.equal(adapted(TOKENS).logits, loaded(folder)(TOKENS).logits)


@pytest.mark.parametrize(
    ("kind", "more", "targets", "left"),
    [
        ("qwen2_moe", QWEN2_MOE, "all-linear", set()),
        # The layers of an expert are also in the stacked "gate_up_proj".
        ("mixtral", GPT_OSS, ["gate_proj"], {"mlp.gate.weight", "mlp.experts.down_proj", *ATTENTION}),
        ("qwen2_moe", QWEN2_MOE, MLP, {"mlp.gate.weight", "mlp.shared_expert_gate.weight", *ATTENTION}),
        ("gpt_oss", GPT_OSS, "all-linear", {"mlp.experts.down_proj_bias", "mlp.experts.gate_up_proj_bias"}),
        # A router that is a linear layer, and returns two tensors.
        ("llama4_text", LLAMA4, "all-linear", set()),
        ("llama4_text", LLAMA4, ["router", *MLP], ATTENTION),
        # Here, peft takes these names for those of experts.
        ("deepseek_v3", DEEPSEEK, "all-linear", set()),
        ("deepseek_v3", DEEPSEEK, ["gate", *MLP, "q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj"], OUTPUT),
        # Images, which are never seen, pass layers of the same names.
        ("gemma3", GEMMA3, ["q_proj", "k_proj", "v_proj", *MLP], OUTPUT),
    ],
)
def test_layers_that_get_an_adapter(kind, more, targets, left):
    """All that are named, also stacked experts and routers; what peft adds to a weight itself is added in fp32."""
    sizes = {} if kind == "gemma3" else SMALL
    lora = Lora(rank=2, alpha=4.0, target_modules=targets)
    model = load_causal_lm(section(config=sizes | more | {"model_type": kind}, lora=lora, frozen_dtype="bf16"))
    adapted = {
        without_adapter(f"{name}.{getattr(module, 'parameter_name', 'weight')}"): module
        for name, module in model.named_modules()
        if hasattr(module, "lora_A")
    }
    matrices = {
        without_adapter(name)
        for name, parameter in model.named_parameters()
        if parameter.dim() > 1 and ".layers." in name and "vision" not in name and not is_adapter(name)
    }
    assert {re.sub(r".*layers\.\d+\.", "", name) for name in matrices - {*adapted}} == left
    assert all(each.get_param().dtype == torch.float32 for each in adapted.values() if hasattr(each, "get_param"))
    check_adapters(model)
    with torch.autocast("cpu", torch.bfloat16):
        model(TOKENS).logits.sum().backward()
    for name, parameter in model.named_parameters():
        assert is_adapter(name) == parameter.requires_grad == (parameter.grad is not None)


def test_layers_with_an_adapter_that_the_model_does_not_call_are_refused():
    for targets in ("all-linear", ["dt_proj"]):
        lora = Lora(rank=2, alpha=4.0, target_modules=targets)
        model = load_causal_lm(section(config=SMALL | {"model_type": "jamba", "num_experts": 2}, lora=lora))
        with pytest.raises(
            UserError, match=r"JambaForCausalLM uses the weight of model\.layers\.0\.mamba\.dt_proj, model\.layers"
        ):
            check_adapters(model)


def test_what_text_does_not_reach_is_not_trained():
    model = load_causal_lm(section(config=GEMMA3 | {"model_type": "gemma3"}))
    model(TOKENS).logits.sum().backward()
    for name, parameter in model.named_parameters():
        assert (".language_model." in name) == parameter.requires_grad == (parameter.grad is not None)


def test_only_shapes_on_the_meta_device(folder):
    """As the pre-flight asks for them."""
    with torch.device("meta"):
        model = loaded(folder, LORA)
    assert all(parameter.is_meta for parameter in model.parameters())
    assert any("lora_" in name for name, _ in model.named_parameters())


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"path": "./nowhere"}, "model.path: there is no folder './nowhere'"),
        (
            {"config": {"model_type": "llama", "hiden_size": 8}},
            "model.config: hiden_size would have no effect: llama has no such setting, it is given twice, or",
        ),
        # What every configuration has, and no model uses in training.
        (
            {"config": {"model_type": "llama", "attention_dropout": 0.1, "dtype": "bfloat16"}},
            "model.config: attention_dropout, dtype would have no effect",
        ),
        ({"config": MIXTRAL | {"router_jitter_noise": 0.1}}, "model.config: router_jitter_noise would have no effect"),
        ({"config": GPT2 | {"hidden_size": 8}}, "model.config: hidden_size would have no effect"),
        # No layer has a window: it is off, or from a later layer on.
        ({"config": {"model_type": "qwen2", "sliding_window": 8}}, "model.config: sliding_window would have no effect"),
        (
            {"config": {"model_type": "qwen2", "use_sliding_window": True, "num_hidden_layers": 2}},
            "model.config: use_sliding_window would have no effect",
        ),
        (
            {"config": {"model_type": "qwen2", "max_window_layers": 1, "num_hidden_layers": 2}},
            "model.config: max_window_layers would have no effect",
        ),
        (
            {"config": GPT2, "lora": Lora(rank=2, alpha=4.0, target_modules=["c_attn", "c_prj"])},
            "model.lora.target_modules: no layer is named c_prj; write names of the model's linear layers (c_attn, c_",
        ),
        # Of names such as "gate_up_proj" and "gate.weight".
        *(
            (
                {"config": MIXTRAL, "lora": Lora(rank=2, alpha=4.0, target_modules=["q_proj", part])},
                f"model.lora.target_modules: no layer is named {part}; write names of",
            )
            for part in ("proj", "weight")
        ),
        (
            {"config": MIXTRAL, "lora": Lora(rank=2, alpha=4.0, dropout=0.1)},
            "model.lora.dropout: peft has no dropout for model.layers.0.mlp.experts.down_proj, ",
        ),
        ({"config": {"model_type": "resnet"}}, "model.config: transformers cannot build it: "),
    ],
)
def test_models_that_cannot_be_built(fields, message):
    with pytest.raises(UserError) as caught:
        load_causal_lm(section(**fields))
    assert str(caught.value).startswith(message)


@pytest.mark.parametrize(
    "more",
    [
        {"model_type": "mistral", "sliding_window": 8},
        {"model_type": "qwen2", "sliding_window": 8, "use_sliding_window": True, "max_window_layers": 1},
        {"model_type": "qwen2", "sliding_window": None},
        {"model_type": "minimax", "sliding_window": 8, "layer_types": ["full_attention", "linear_attention"]},
        {"model_type": "recurrent_gemma", "sliding_window": 8, "block_types": ["attention"]},
    ],
)
def test_windows_that_layers_have(more):
    sizes = {"num_hidden_layers": 2, "hidden_size": 8, "num_attention_heads": 2, "num_key_value_heads": 1}
    assert configuration(section(config=sizes | more)).sliding_window == more["sliding_window"]


@pytest.mark.parametrize(
    "given",
    [
        {"model_type": "moshi", "sliding_window": 8},
        {"model_type": "zaya", "sliding_window": 8},
        {"model_type": "nemotron_h", "sliding_window": 8},
        pytest.param(
            {
                "model_type": "lfm3",
                "sliding_window": 8,
                "num_hidden_layers": 2,
                "layer_types": ["full_attention", "conv"],
            },
            marks=SINCE_5_23,
        ),
        pytest.param(
            {"model_type": "recurrent_gemma", "attention_window_size": 8, "block_types": ["recurrent"]},
            marks=SINCE_5_23,
        ),
    ],
)
def test_windows_that_no_layer_has(given):
    """With 2 instead of 20, the models' outputs are the same."""
    with pytest.raises(UserError, match=f"model.config: {list(given)[1]} would have no effect"):
        configuration(section(config=given))


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        ({"num_hidden_layers": 10**9}, "num_hidden_layers is too large; the most is 1,000"),
        ({"n_layer": 10**400}, "n_layer is too large; the most is 1,000"),
        ({"model_type": "gemma3", "text_config": {"num_hidden_layers": 10**9}}, "num_hidden_layers is too large"),
        ({"num_labels": 10**8}, "num_labels is too large; the most is 1,000,000"),
        ({"text_config": {"text_config": {}}}, "'dict' object has no attribute"),
    ],
)
def test_damaged_configurations_are_refused_at_once(damage, message, tmp_path):
    config = GPT2 | damage
    (tmp_path / "config.json").write_text(json.dumps(config))
    for fields, what in (({"config": config}, "model.config: "), ({"path": str(tmp_path)}, "model.path: ")):
        with pytest.raises(UserError, match=message) as caught:
            load_causal_lm(section(**fields))
        assert str(caught.value).startswith(what)


def test_the_reason_behind_a_first_line_is_told():
    with pytest.raises(UserError, match=r"^model\.config: transformers cannot build it: .*expected int, got str"):
        load_causal_lm(section(config=GPT2 | {"vocab_size": "300"}))


def test_aliases_of_settings_are_known():
    """GPT-2 calls its width n_embd, and takes hidden_size too."""
    assert load_causal_lm(section(config=GPT2 | {"resid_pdrop": 0.0})).config.hidden_size == 16
    config = GPT2 | {"hidden_size": 8}
    del config["n_embd"]
    assert load_causal_lm(section(config=config)).config.n_embd == 8


def test_weights_that_are_missing_are_not_drawn(tmp_path):
    from transformers import LlamaConfig, LlamaForSequenceClassification

    sizes = {"vocab_size": 64, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1}
    config = LlamaConfig(**sizes, num_attention_heads=2, pad_token_id=0)
    LlamaForSequenceClassification(config).save_pretrained(tmp_path)
    with pytest.raises(
        UserError,
        match=r"not .* the weights of the LlamaForCausalLM in its config\.json:\n  - it has no lm_head\.weight\n",
    ):
        loaded(tmp_path)


def test_two_matrices_that_are_one_parameter(tmp_path):
    """Trained as two, they would be one again when the exported model is loaded."""
    config = section(config=GPT2 | {"tie_word_embeddings": False})
    load_causal_lm(config).save_pretrained(tmp_path)
    edit_config(tmp_path, tie_word_embeddings=True)
    with pytest.raises(
        UserError, match=r"lm_head\.weight and transformer\.wte\.weight differ, but are one parameter by"
    ):
        loaded(tmp_path)
    stored = load_file(tmp_path / "model.safetensors")
    same = stored | {"lm_head.weight": stored["transformer.wte.weight"].clone()}
    save_file(same, tmp_path / "model.safetensors", {"format": "pt"})
    model = loaded(tmp_path)
    assert model.get_input_embeddings().weight is model.get_output_embeddings().weight


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"n_layer": 1}, r"of the GPT2LMHeadModel in its config\.json:\n  - the model has no transformer\.h\.1\."),
        ({"quantization_config": {"quant_method": "fp8"}}, r"is quantized \(quantization_config in its config\.json\)"),
    ],
)
def test_a_configuration_with_which_the_weights_mean_something_else(fields, message, tmp_path):
    load_causal_lm(section(config=GPT2 | {"n_layer": 2})).save_pretrained(tmp_path)
    stored = load_file(tmp_path / "model.safetensors")
    old = stored | {"transformer.h.0.attn.masked_bias": torch.tensor(-1e4)}
    save_file(old, tmp_path / "model.safetensors", {"format": "pt"})
    loaded(tmp_path)
    edit_config(tmp_path, **fields)
    with pytest.raises(UserError, match=message):
        loaded(tmp_path)


def test_the_loss_of_a_router(tmp_path):
    sizes = {"vocab_size": 64, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "num_experts": 2}
    config = {"model_type": "qwen3_moe", "num_key_value_heads": 2, "num_experts_per_tok": 1, **sizes}
    load_causal_lm(section(config=config)).save_pretrained(tmp_path)
    edit_config(tmp_path, output_router_logits=True)
    with pytest.raises(UserError, match="the loss of a router, which training does not add"):
        loaded(tmp_path)


def test_what_would_be_padding_is_a_token(tmp_path):
    """OLMo's default is 1, and nothing here is padded with it."""
    config = {"model_type": "olmo", "vocab_size": 64, "hidden_size": 16, "num_hidden_layers": 1}
    drawn = load_causal_lm(section(config=config | {"num_attention_heads": 2}))
    drawn.save_pretrained(tmp_path)
    for model in (drawn, loaded(tmp_path)):
        embedding = model.get_input_embeddings().weight
        assert 0.5 < embedding[1].std() / embedding.std() < 2
        model(TOKENS).logits.sum().backward()
        assert (embedding.grad[TOKENS[0]] != 0).any(dim=1).all()


def test_an_adapter_is_not_taken_for_a_model(folder, tmp_path):
    """Also where it is beside the files of its model."""
    adapted = loaded(folder, LORA)
    for each in (tmp_path / "adapter", folder):
        adapted.save_pretrained(each)
        with pytest.raises(UserError, match=r"holds an adapter .* write the folder of its base model, or of the"):
            loaded(each)


def test_adapters_without_peft(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    with pytest.raises(UserError, match=r'peft is not installed; pip install "largebatch\[lora\]"'):
        load_causal_lm(section(config=GPT2, lora=LORA))


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--model.path=x"], "model: write either path, for pretrained weights, or config, for random ones"),
        (['--model.config={"hidden_size": 8}'], 'model: config needs a model_type, such as "llama"'),
    ],
)
def test_either_pretrained_or_random(words, message):
    assert message in problem_of(*words, recipe=ADDITION)


def test_dropout_of_adapters_is_declared():
    for dropout in (0.0, 0.1):
        words = [f"--model.lora.{word}" for word in ("rank=2", "alpha=4.0", f"dropout={dropout}")]
        assert load_config(ADDITION, words).model.uses_dropout == (dropout > 0)


def save_as_pickle(folder):
    torch.save(load_file(folder / "model.safetensors"), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()


def make_pipe(folder):
    (folder / "model.safetensors").unlink()
    os.mkfifo(folder / "model.safetensors")


@pytest.mark.parametrize(
    ("plant", "message"),
    [
        (save_as_pickle, r"neither model\.safetensors nor .*may hold code; convert .*save_pretrained\(NEW_FOLDER\)$"),
        (make_pipe, r"model\.safetensors cannot be read: .*Not a regular file"),
    ],
)
def test_weights_are_tensors_in_files_of_the_folder(plant, message, folder):
    """Neither pickles, which `transformers` would load, nor files elsewhere, nor pipes, which would be waited for."""
    plant(folder)
    with pytest.raises(UserError, match=rf"^model\.path: {folder}: .*{message}"):
        loaded(folder)


def test_what_is_not_a_file_beside_the_weights_would_fail_again(folder):
    """It is not "try again", with which a job is started again."""
    (folder / "tokenizer.json").mkdir()
    with pytest.raises(UserError, match=r"Is a directory: .*tokenizer\.json'; correct or remove it") as raised:
        model_files(loaded(folder), folder, folder)
    assert raised.value.exit_code == 2


@pytest.mark.parametrize("others", [[], ["tool_use", "rag"]])
def test_all_chat_templates_are_kept(others, folder, tmp_path):
    """Those besides the default are files of a folder, which checkpoints do not have."""
    templates = {name: f"{name}: {{{{ messages }}}}" for name in ("default", *others)}
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(BPE()), chat_template=templates)
    tokenizer.save_pretrained(folder)
    assert (folder / "additional_chat_templates").exists() == bool(others)
    for name, content in model_files(loaded(folder), folder, folder).items():
        (tmp_path / name).write_bytes(content)
    found = AutoTokenizer.from_pretrained(tmp_path).chat_template
    assert found == (templates if others else templates["default"])


def test_a_file_of_weights_that_the_configuration_names_is_not_read(folder):
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"transformers_weights": "other.safetensors"}))
    assert loaded(folder).config.to_dict().get("transformers_weights") is None


def test_autocast_casts_stacked_experts():
    """As it casts those of the implementation that calls `linear` for each expert: losses and gradients are equal."""
    torch.manual_seed(0)
    model = load_causal_lm(section(config=MIXTRAL))
    found = {}
    autocast_experts()
    for name in ("eager", "grouped_mm"):
        model.set_experts_implementation(name)
        model.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            logits = model(input_ids=TOKENS).logits
        logits.square().sum().backward()
        found[name] = [logits.detach(), *(each.grad for each in model.parameters())]
    for ours, theirs in zip(*found.values(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-3 * float(theirs.abs().max()))
    # In bf16, rows of 12 numbers are too short for torch's kernel.
    with torch.autocast("cpu", torch.bfloat16):
        load_causal_lm(section(config=MIXTRAL | {"intermediate_size": 12}))(input_ids=TOKENS)
