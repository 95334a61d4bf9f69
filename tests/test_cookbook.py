"""All recipes of docs/cookbook.md in one task, under every kind of strategy, against plain torch."""

import json
import re
import shutil
import textwrap
from functools import partial

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, load_model, save_model
from sklearn.metrics import roc_auc_score
from torch.nn.functional import cross_entropy

from jobs import train_in_job
from largebatch.config import load_config
from largebatch.data.preparation import Preparation
from largebatch.storage.files import read_json_lines
from largebatch.task_folders import import_from
from paths import ROOT
from small_data import assert_drawn_by_seed_epoch_and_sample

pytestmark = pytest.mark.slow

TEXT = (ROOT / "docs/cookbook.md").read_text()
(EVALUATION,) = re.findall(r'(?m)^```json\n"evaluation": (.*)\n```$', TEXT)
(GROUPS,) = re.findall(r'(?m)^```json\n"optimizer.groups": (.*)\n```$', TEXT)
OF_THIS_MACHINE = {"seconds", "samples_per_second", "data_wait_seconds", "peak_memory_gib"}  # what varies in a line
CLIPPED = re.search(r'`"optimizer": (\{"name": "clipped_adamw".*\})`', TEXT)[1]


@pytest.fixture(scope="module")
def recipe(tmp_path_factory):
    """The task of tests/cookbook, with each block of the page in its place."""
    folder = shutil.copytree(ROOT / "tests/cookbook", tmp_path_factory.mktemp("recipes") / "sequences")
    for place, code in re.findall(r"(?ms)^```python\n# ([^\n]+)\n(.*?)^```$", TEXT):
        file = folder / place.partition(",")[0]
        marker = f"# cookbook: {place}\n"
        text = file.read_text() if file.exists() else marker
        assert text.count(marker) == 1, place
        indent = re.search(rf"(?m)^( *){re.escape(marker)}", text)[1]
        file.write_text(text.replace(indent + marker, textwrap.indent(code, indent) + "\n" + indent + marker))
    return folder / "sequences.json"


@pytest.fixture(scope="module")
def pretrained(recipe, tmp_path_factory):
    torch.manual_seed(5)
    file = tmp_path_factory.mktemp("pretrained") / "model.safetensors"
    save_model(import_from(recipe.parent, "model").build_model(load_config(recipe)), str(file))
    return file


@pytest.fixture(scope="module")
def alone(recipe, pretrained, tmp_path_factory):
    """The folder of a run, and its overrides."""
    run_dir = tmp_path_factory.mktemp("alone") / "run"
    words = (
        f"--model.pretrained={pretrained}",
        f"--optimizer={CLIPPED}",
        f"--optimizer.groups={GROUPS}",
        f"--evaluation={EVALUATION}",
    )
    train_in_job(recipe, run_dir, *words, strategy="single")
    return run_dir, words


def test_one_process_against_plain_torch(recipe, pretrained, alone):
    run_dir, _ = alone
    metrics = read_json_lines(run_dir / "metrics.jsonl")
    config = load_config(recipe)
    model = import_from(recipe.parent, "model").build_model(config)
    final = load_file(run_dir / "model/model.safetensors")
    first = load_file(pretrained)
    missing, unexpected = load_model(model, str(run_dir / "model/model.safetensors"), strict=False)
    assert (missing, unexpected) == (set(), ["averages"])
    model.eval()

    def losses_of(source, count):
        batch = source.fetch(np.arange(count), None)
        with torch.no_grad():
            logits = model(input_ids=batch["tokens"]).logits[:, :-1]
        return cross_entropy(logits.transpose(1, 2), batch["tokens"][:, 1:], reduction="none").mean(dim=1), batch

    # What is frozen has stayed what was loaded.
    is_as_loaded = {name for name in final.keys() & first.keys() if torch.equal(final[name], first[name])}
    assert is_as_loaded == {"transformer.wpe.weight"}
    # Of an epoch in five batches, of which the last one has two samples, each sample is counted once.
    sizes = (24, 24, 24, 24, 2)
    assert sum(line["share_of_errors"] * size for line, size in zip(metrics, sizes, strict=False)) == pytest.approx(49)
    assert [line["epoch_index"] for line in metrics] == [0] * 5 + [1] * 4
    # Evaluations, each with its interval, and the last ones of both sets in the summary.
    evaluations = read_json_lines(run_dir / "evaluations.jsonl")
    of_shifted = [line["step"] for line in evaluations if "shifted/loss" in line]
    assert of_shifted == [3, 6, 9]
    assert [line["step"] for line in evaluations if "auc" in line] == [5, 9]
    _, eval_set, shifted_set = import_from(recipe.parent, "data").sources(config, Preparation())
    scores, batch = losses_of(eval_set, 22)
    expected = {
        "loss": float(scores.mean()),
        "auc": roc_auc_score(batch["has_error"], scores),
        "shifted/loss": float(losses_of(shifted_set, 30)[0].mean()),
    }
    assert 0.5 < expected["auc"] < 0.99
    assert json.loads((run_dir / "summary.json").read_text())["evaluation"] == pytest.approx(expected, rel=1e-5)
    prompts = batch["tokens"][:6, :4]
    tokens = model.generate(prompts, max_new_tokens=4, do_sample=False)[:, 4:]
    assert (run_dir / "generated.txt").read_text() == f"{tokens.tolist()}\n"


def numbers_of(file):
    """What a file has of each step, without what varies."""
    found = {}
    for line in read_json_lines(file):
        numbers = {name: value for name, value in line.items() if name not in OF_THIS_MACHINE}
        found.setdefault(line["step"], {}).update(numbers)
    return found


def test_sharded_and_resumed_under_another_strategy(recipe, alone, run_dir):
    whole, words = alone
    for strategy, last in (("ddp", 4), ("zero3", 9)):
        more = (*words, f"--train.stop_after_steps={last}", "--batch.micro_batch_size=2")
        train_in_job(recipe, run_dir, *more, strategy=strategy)
    for file in ("metrics.jsonl", "evaluations.jsonl"):
        # The stop has an evaluation of its own.
        found, expected = (numbers_of(folder / file) for folder in (run_dir, whole))
        for step, numbers in expected.items():
            assert {name: found[step][name] for name in numbers} == pytest.approx(numbers, rel=1e-5), (file, step)
    assert (run_dir / "generated.txt").read_text() == (whole / "generated.txt").read_text()
    # Of the steps of one process.
    averages = []
    for line in read_json_lines(whole / "metrics.jsonl"):
        latest = [line["loss"], line["share_of_errors"]]
        averages = [0.9 * old + 0.1 * new for old, new in zip(averages or latest, latest, strict=True)]
    kept = load_file(run_dir / "model/model.safetensors")["averages"].tolist()
    assert kept == pytest.approx(averages, rel=1e-5)


def test_own_optimizers_step_as_the_page_says(recipe):
    torch.manual_seed(0)
    weights = torch.randn(4, 3)
    gradients = [torch.randn(4, 3) * 0.1 for _ in range(3)]

    def stepped(kind, gradients, **options):
        parameter = torch.nn.Parameter(weights.clone())
        optimizer = kind([{"params": [parameter], "weight_decay": 0.1}], lr=0.01, **options)
        for gradient in gradients:
            parameter.grad = gradient
            optimizer.step()
            assert parameter.grad is gradient
        return parameter.detach()

    clipped = import_from(recipe.parent, "clipped").ClippedAdamW
    expected = stepped(torch.optim.AdamW, [each.clamp(-0.05, 0.05) for each in gradients], betas=(0.9, 0.99))
    assert torch.equal(stepped(clipped, gradients, betas=(0.9, 0.99), clip_value=0.05), expected)

    scaled = import_from(recipe.parent, "scaled").Scaled
    step = 0.5 * weights.norm() / gradients[0].norm() * gradients[0]
    expected = weights * (1 - 0.01 * 0.1) - 0.01 * step
    assert torch.allclose(stepped(scaled, gradients[:1], trust=0.5), expected, rtol=1e-6)


@pytest.mark.parametrize("drawn", ["time", "noise"])
def test_noise_belongs_to_a_sample(drawn, recipe):
    def fetch(indices, epoch, seed=0):
        source = import_from(recipe.parent, "data").Noisy(load_config(recipe, [f"--seed={seed}"]), 8, "train")
        return source.fetch(np.array(indices), epoch)[drawn]

    assert_drawn_by_seed_epoch_and_sample(fetch, partial(fetch, seed=1))
    assert torch.equal(fetch([1, 2], None), fetch([1, 2], None))


def test_of_two_players_one_raises_what_the_other_lowers(recipe):
    values = torch.randn(5, requires_grad=True)
    reversed_values = import_from(recipe.parent, "model").Reversed.apply(values)
    assert torch.equal(reversed_values, values)
    gradient = torch.randn(5)
    reversed_values.backward(gradient)
    assert torch.equal(values.grad, -gradient)
