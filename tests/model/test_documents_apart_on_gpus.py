"""GPU kernels for documents kept apart: the losses and gradients of attention with a mask, to rounding.

Everything but the kernels themselves runs here on the CPU: `flex_attention` by torch's own reference, uncompiled, and
`varlen_attn` by a loop over documents.
"""

from functools import partial
from itertools import pairwise

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import DynamicOutputShapeException, FakeTensorMode
from torch.nn.attention import flex_attention as torch_flex
from torch.nn.functional import cross_entropy, scaled_dot_product_attention
from transformers import (
    BloomConfig,
    BloomForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    masking_utils,
)
from transformers.integrations import flex_attention as transformers_flex

from jobs import JobFailed, run_job, train
from largebatch.config import load_config
from largebatch.errors import ConfigError, UserError
from largebatch.model import documents_apart
from largebatch.model.activation_checkpointing import checkpoint_activations
from largebatch.model.documents_apart import keep_apart_with
from largebatch.model.given_positions import keep_apart_by_given_positions
from largebatch.storage.files import read_json_lines
from paths import ADDITION

GPU = torch.device("cuda")
NO_TOKENS = {"use_cache": False, "bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
SMALL = {
    "vocab_size": 50,
    "hidden_size": 48,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 16,
    **NO_TOKENS,
}
MODELS = {
    "llama": lambda: LlamaForCausalLM(LlamaConfig(**SMALL)),
    "mistral, with a window": lambda: MistralForCausalLM(MistralConfig(sliding_window=3, **SMALL)),
    "gpt2": lambda: gpt2(dropout=0.0),
}
TOKENS = torch.randint(50, (2, 12), generator=torch.Generator().manual_seed(0))
# Two documents; three, of which one is a single token, and padding.
POSITIONS = torch.stack(
    [
        torch.cat([torch.arange(5), torch.arange(7)]),
        torch.cat([torch.arange(1), torch.arange(6), torch.arange(3), torch.zeros(2, dtype=torch.int64)]),
    ]
)


def gpt2(dropout):
    sizes = {"vocab_size": 50, "n_positions": 16, "n_embd": 48, "n_layer": 2, "n_head": 4}
    return GPT2LMHeadModel(GPT2Config(**sizes, attn_pdrop=dropout, embd_pdrop=0, resid_pdrop=0, **NO_TOKENS))


def build(name, kernel=None):
    torch.manual_seed(0)
    model = MODELS[name]().train()
    keep_apart_by_given_positions(model)
    if kernel:
        keep_apart_with(kernel, model, GPU)
    return model


def loop_over_documents(query, key, value, starts, starts_of_keys, longest, longest_of_keys, **options):
    """`varlen_attn` by its definition, on tensors of shape (tokens, heads, channels)."""
    left, right = options.pop("window_size")
    scale = options.pop("scale")
    assert not options or options == {"enable_gqa": True}
    assert starts.dtype == torch.int32
    assert torch.equal(starts, starts_of_keys)
    assert right == 0
    bounds, outputs = starts.tolist(), []
    assert longest == longest_of_keys == max(end - start for start, end in pairwise(bounds))
    for start, end in pairwise(bounds):
        part = [tensor[start:end].transpose(0, 1)[None] for tensor in (query, key, value)]
        back = torch.arange(end - start)[:, None] - torch.arange(end - start)
        mask = (back >= 0) & ((back <= left) | (left < 0))
        attended = scaled_dot_product_attention(*part, mask, scale=scale, enable_gqa=True)
        outputs.append(attended[0].transpose(0, 1))
    return torch.cat(outputs)


def put_in_kernels_of_the_cpu(put):
    """Replace the kernels of GPUs; returns how often each is called. `put` is `setattr`, or monkeypatch's."""
    calls = {"flex": 0, "flash": 0}

    def counted(kernel, function, *arguments, **options):
        calls[kernel] += 1
        return function(*arguments, **options)

    def uncompiled(query, key, value, **options):
        del options["training"]
        return torch_flex.flex_attention(query, key, value, **options)

    def block_mask(_compile, **options):
        return torch_flex.create_block_mask(**options)

    # Torch refuses the backward pass on the CPU, where its reference nevertheless has one.
    put(torch_flex, "_validate_device", lambda *_: None)
    put(transformers_flex, "compile_friendly_flex_attention", partial(counted, "flex", uncompiled))
    put(masking_utils, "create_block_mask", block_mask)
    put(documents_apart, "varlen_attn", partial(counted, "flash", loop_over_documents))
    return calls


@pytest.fixture
def calls(monkeypatch):
    return put_in_kernels_of_the_cpu(monkeypatch.setattr)


def mask_of(kernel, **options):
    """The mask of a Llama for 8 tokens."""
    config = build("llama", kernel).config
    return masking_utils.create_causal_mask(config, torch.zeros(1, 8, 48), None, None, **options)


def outputs_of(model, positions):
    logits = model(input_ids=TOKENS, position_ids=positions).logits
    loss = cross_entropy(logits[:, :-1].flatten(0, 1), TOKENS[:, 1:].flatten())
    loss.backward()
    return logits.detach(), loss.detach(), [parameter.grad for parameter in model.parameters()]


@pytest.mark.parametrize("kernel", ["flex", "flash"])
@pytest.mark.parametrize("name", MODELS)
def test_the_same_as_with_a_mask(name, kernel, calls):
    found, expected = (outputs_of(build(name, each), POSITIONS) for each in (kernel, None))
    assert calls == {"flex": 0, "flash": 0} | {kernel: 2}
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kernel", ["flex", "flash"])
def test_recomputed_blocks(kernel, calls):
    expected = outputs_of(build("llama", kernel), POSITIONS)
    model = build("llama", kernel)
    checkpoint_activations(model)
    torch.testing.assert_close(outputs_of(model, POSITIONS), expected, rtol=0, atol=0)
    assert calls[kernel] == 2 + 4


@pytest.mark.parametrize("kernel", ["flex", "flash"])
@pytest.mark.usefixtures("calls")
def test_in_bfloat16_all_inputs_of_the_kernel_are(kernel, monkeypatch):
    """Llama's rotary positions leave queries and keys in fp32."""
    seen = []

    def record(query, key, value, *_, **__):
        seen.extend(tensor.dtype for tensor in (query, key, value))
        return torch.zeros_like(query)

    monkeypatch.setattr(transformers_flex, "compile_friendly_flex_attention", record)
    monkeypatch.setattr(documents_apart, "varlen_attn", record)
    with torch.autocast("cpu", torch.bfloat16):
        build("llama", kernel)(input_ids=TOKENS, position_ids=POSITIONS)
    assert seen == [torch.bfloat16] * 6


@pytest.mark.parametrize("kernel", ["flex", "flash"])
@pytest.mark.parametrize("name", MODELS)
def test_whole_samples_are_computed_as_before(name, kernel, calls):
    found, expected = (outputs_of(build(name, each), None) for each in (kernel, None))
    torch.testing.assert_close(found, expected, rtol=0, atol=0)
    assert calls == {"flex": 0, "flash": 0}


@pytest.mark.usefixtures("calls")
def test_the_host_waits_for_the_device_in_no_mask_of_blocks():
    """Fake tensors have no numbers to read. FlashAttention's mask, whose size depends on the data, needs them."""
    with FakeTensorMode():
        assert isinstance(mask_of("flex", position_ids=torch.zeros(1, 8, dtype=torch.int64)), torch_flex.BlockMask)
        with pytest.raises(DynamicOutputShapeException):
            mask_of("flash", position_ids=torch.zeros(1, 8, dtype=torch.int64))


@pytest.mark.usefixtures("calls")
def test_tokens_that_see_later_ones_get_a_mask():
    """Two blocks whose tokens see each other, as those of an image."""
    mask = mask_of("flash", block_sequence_ids=torch.tensor([[0] * 4 + [1] * 4]))
    assert isinstance(mask, torch.Tensor)
    assert mask[0, 0, 0].tolist() == [True] * 4 + [False] * 4


def test_dropout_of_attention_is_refused(calls):
    model = gpt2(dropout=0.1).train()
    keep_apart_by_given_positions(model)
    keep_apart_with("flex", model, GPU)
    with pytest.raises(UserError, match=r"GPT2Attention drops weights of attention with probability 0\.1.*\"sdpa\""):
        model(input_ids=TOKENS, position_ids=POSITIONS)
    model.eval()(input_ids=TOKENS, position_ids=POSITIONS)
    assert calls["flex"] == 2


@pytest.mark.parametrize("name", ["softcap", "s_aux", "position_bias"])
def test_what_flash_attention_cannot_compute_is_refused(name, calls):
    model = build("llama", "flash")
    attention = model.model.layers[0].self_attn
    attend = documents_apart.AttentionInterface()[documents_apart.IMPLEMENTATIONS["flash"]]
    documents = documents_apart.Documents(torch.tensor([0, 4], dtype=torch.int32), 4)
    tensors = [torch.zeros(1, 4, 4, 12) for _ in range(3)]
    with pytest.raises(UserError, match=rf"LlamaAttention computes attention with {name}, .*write \"flex\""):
        attend(attention, *tensors, documents, **{name: 1.0})
    attend(attention, *tensors, documents, **{name: None}, scaling=0.3)
    assert calls == {"flex": 0, "flash": 1}


def test_devices_and_models_without_the_kernels_are_refused():
    with pytest.raises(UserError, match=r'"flash" needs an NVIDIA GPU, and this is cpu; write "sdpa"'):
        keep_apart_with("flash", build("llama"), torch.device("cpu"))
    with pytest.raises(UserError, match="Linear is not one"):
        keep_apart_with("flex", nn.Linear(2, 2), GPU)
    bloom = BloomForCausalLM(BloomConfig(vocab_size=50, hidden_size=8, n_layer=1, n_head=2))
    with pytest.raises(UserError, match="BloomForCausalLM is not one"):
        keep_apart_with("flex", bloom, GPU)


def test_flash_attention_needs_bf16():
    with pytest.raises(ConfigError, match=r'"flash" computes in bfloat16, and precision is "fp32"; write "flex"'):
        load_config(ADDITION, ["--compute.attention=flash"])
    load_config(ADDITION, ["--compute.attention=flash", "--precision=bf16"])


PACKED = (
    "--data.packing=true",
    "--data.num_train_samples=1250",
    '--batch={"global_batch_size": 8, "micro_batch_size": 2}',
    "--train.stop_after_steps=3",
    "--evaluation.max_samples=8",
    "--logging.every=1",
)


def train_packed(run_dir, *words):
    train(ADDITION, *PACKED, *words, run_dir=run_dir)


def train_as_on_a_gpu(run_dir, *words):
    calls = put_in_kernels_of_the_cpu(setattr)
    apart = documents_apart.keep_apart_with
    documents_apart.keep_apart_with = lambda kernel, model, _: apart(kernel, model, GPU)
    train_packed(run_dir, *words)
    return calls


@pytest.mark.slow
def test_a_packed_run(tmp_path):
    losses = {}
    for kernel in ("sdpa", "flex"):
        calls = run_job(train_as_on_a_gpu, tmp_path / kernel, f"--compute.attention={kernel}", strategy="fsdp")
        assert all((each["flex"] > 0) == (kernel == "flex") for each in calls)
        losses[kernel] = [line["loss"] for line in read_json_lines(tmp_path / kernel / "metrics.jsonl")]
    assert losses["flex"] == pytest.approx(losses["sdpa"], rel=1e-5)


@pytest.mark.slow
def test_a_run_on_a_cpu_is_refused(tmp_path):
    with pytest.raises(JobFailed, match=r'compute.attention: "flex" needs an NVIDIA GPU, and this is cpu'):
        run_job(train_packed, tmp_path / "run", "--compute.attention=flex")
