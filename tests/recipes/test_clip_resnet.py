"""CLIP's ResNet: its parameters, its outputs, which are open_clip's, its training, and what is saved of it."""

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from test_two_towers import FP64, SGD, STEPS, TINY_TOWER, reference, softmax_loss
from torch.nn.functional import normalize
from transformers import CLIPConfig

import tasks
from jobs import run_job, train_in_job
from largebatch.config import load_config
from largebatch.data.images import normalize_pixels
from paths import CLIP_DIGITS, CLIP_RN50
from stepping import prepared
from test_strategies import assert_same, recorded

resnet = tasks.module("two_towers", "resnet")

WORDS = (
    *SGD,
    FP64,
    '--model={"architecture": "clip_resnet", "vocab_size": 256, "end_of_text": 0, "features": 16}',
    '--model.image={"width": 4, "depths": [1, 2, 1, 1]}',
    f"--model.text={TINY_TOWER}",
    "--evaluation.max_samples=30",
    "--data.image_size=64",
    "--batch.micro_batch_size=12",
    "--compute.deterministic=true",
)


def test_the_recipes_model_has_the_parameters_of_the_papers():
    """38,316,896 of the images' tower, and 102.01 million in all, as open_clip's table of results says."""
    model = tasks.build_model(CLIP_RN50)(load_config(CLIP_RN50))
    parts = (model.vision_model, model.visual_projection)
    assert sum(p.numel() for part in parts for p in part.parameters()) == 38_316_896
    assert round(sum(p.numel() for p in model.parameters()) / 1e6, 2) == 102.01
    # Half of the pixels after the stem's first convolution and after its pooling, and in each stage but the first.
    with torch.no_grad():
        assert model.vision_model(torch.zeros(1, 3, 224, 224)).last_hidden_state.shape == (1, 2048, 7, 7)
    # Each block starts as its shortcut.
    images = torch.rand(2, 256, 8, 8)
    assert torch.equal(model.vision_model.blocks[1](images), images)


def test_the_tower_is_open_clips():
    """Against the outputs of `ModifiedResNet` of open_clip at its commit 89fb801, which was given the same weights."""
    text = {"hidden_size": 8, "num_hidden_layers": 0, "num_attention_heads": 1, "vocab_size": 10}
    tower = {"width": 4, "depths": [1, 2, 1, 1], "hidden_size": 128, "image_size": 64, "num_hidden_layers": 0}
    config = CLIPConfig(text_config=text, vision_config=tower | {"num_attention_heads": 1}, projection_dim=3)
    model = resnet.ResNetCLIP(config).double()
    with torch.no_grad():
        parameters = (*model.vision_model.parameters(), *model.visual_projection.parameters())
        for number, parameter in enumerate(parameters):
            wave = torch.sin(torch.arange(parameter.numel(), dtype=torch.float64) * 0.7 + number).view(parameter.shape)
            parameter.copy_(wave + 1 if parameter.ndim == 1 else wave / parameter[0].numel() ** 0.5)
    images = torch.cos(torch.arange(2 * 3 * 64 * 64, dtype=torch.float64) * 0.37).view(2, 3, 64, 64)
    expected = [
        [2.849441324453, -4.565790382468, -1.197118620215],
        [2.856107424331, -4.566244480798, -1.203726082892],
    ]
    found = model.train().get_image_features(images).pooler_output
    torch.testing.assert_close(found, torch.tensor(expected, dtype=torch.float64), rtol=0, atol=1e-10)


def in_micro_batches(config, model, batch):
    """The loss of all pairs, whose images were normalized by BatchNorm in two micro-batches of 12."""
    pixels = normalize_pixels(batch["pixel_values"], config.data, torch.float64)
    images = torch.cat([model.get_image_features(each).pooler_output for each in pixels.split(12)])
    texts = model.get_text_features(batch["input_ids"].squeeze(1)).pooler_output
    return softmax_loss(normalize(images, dim=-1) @ normalize(texts, dim=-1).T * model.logit_scale.exp(), batch)


@pytest.mark.slow
@pytest.mark.parametrize(("strategy", "world_size"), [("fsdp", 2), ("ddp", 1)])
def test_training(strategy, world_size, run_dir):
    """With one micro-batch a process, and with two, whose images are encoded twice."""
    result = run_job(recorded, CLIP_DIGITS, run_dir, *WORDS, strategy=strategy, world_size=world_size)[0]
    assert_same(result, reference(CLIP_DIGITS, WORDS, in_micro_batches), STEPS, tolerance=1e-10)


def starting_buffers(run_dir, *words):
    run, *_ = prepared(CLIP_DIGITS, run_dir, *WORDS, *words)
    state = run.unwrapped_model.state_dict()
    return {name: buffer.numpy() for name, buffer in run.unwrapped_model.named_buffers() if name in state}


@pytest.mark.slow
def test_it_is_read_back_and_starts_another_run(tmp_path):
    folder = tmp_path / "run/model"
    train_in_job(CLIP_DIGITS, tmp_path / "run", *WORDS, strategy="fsdp")
    _, report = resnet.ResNetCLIP.from_pretrained(folder, output_loading_info=True)
    assert not any(report.values())
    # With its running statistics.
    (started,) = run_job(starting_buffers, tmp_path / "second", f"--model.initial_weights={folder}", strategy="single")
    saved = load_file(folder / "model.safetensors")
    assert sum("running_var" in name for name in started) > 5
    for name, buffer in started.items():
        assert np.array_equal(buffer, saved[name]), name
