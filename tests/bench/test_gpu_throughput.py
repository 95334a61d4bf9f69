"""bench/gpu_throughput.py: the jobs are those that are named, and the program works at a toy size."""

import json

import numpy as np
import pytest
import torch

import gpu_throughput
from record import Figure, Record, read_record, take_facts
from tasks import build_model

# Parameters in millions, from the papers; of Llama 1.3B, 24 x (4 x 2048² + 3 x 2048 x 5632) and the embedding.
SIZES = {"gpt2_124m": 124.4, "llama_1b": 1298.7, "resnet50": 25.6}
STEPS = {"gpt2_124m": 128 * 1024, "llama_1b": 16 * 2048, "resnet50": 256}


@pytest.mark.parametrize("name", gpu_throughput.JOBS)
def test_the_models_have_the_sizes_in_their_names(name):
    job = gpu_throughput.JOBS[name]
    config, _ = gpu_throughput.config_of(job, toy=False)
    with torch.device("meta"):
        model = build_model(job.path)(config)
    assert sum(parameter.numel() for parameter in model.parameters()) / 1e6 == pytest.approx(SIZES[name], rel=0.003)
    assert config.precision == "bf16"
    assert gpu_throughput.units_of_step(config) == STEPS[name]


@pytest.mark.parametrize("name", ["gpt2_124m", "resnet50"])
def test_generated_samples_are_what_the_recipe_reads(name):
    config, _ = gpu_throughput.config_of(gpu_throughput.JOBS[name], toy=True)
    train, evaluation = gpu_throughput.generated_sources(config)
    assert (len(train), len(evaluation)) == (config.data.num_train_samples, config.data.num_eval_samples)
    batch = train.fetch(np.array([0, len(train) - 1]), 0)
    if name == "resnet50":
        assert (batch["pixel_values"].shape, batch["pixel_values"].dtype) == ((2, 3, 32, 32), torch.uint8)
        assert 0 <= batch["labels"].min() <= batch["labels"].max() < 1000
    else:
        assert batch["input_ids"].shape == batch["labels"].shape == (2, 16)
        assert batch["input_ids"].max() < config.model.vocab_size


def run(monkeypatch, *words: str) -> None:
    monkeypatch.setattr("sys.argv", ["gpu_throughput.py", *words])
    # The program sets them.
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    gpu_throughput.main()


@pytest.mark.slow
def test_a_toy(tmp_path, monkeypatch):
    out = tmp_path / "out.json"
    words = ["--rounds=2", "--steps=1", "--warmup=1", "--strategies=ddp", "--jobs=gpt2_124m"]
    run(monkeypatch, "--toy", "--json", str(out), *words)
    ratios = json.loads(out.read_text())["median_ratio_to_bare"]
    assert {case: [*of_case] for case, of_case in ratios.items()} == {
        "GPT-2 124M, Trainer": ["bare", "trainer"],
        "GPT-2 124M, ddp": ["bare", "ours"],
    }
    record = read_record(out)
    ddp = {each.case: each for each in record.comparisons}["GPT-2 124M, ddp"]
    # Four samples of 16 tokens a step.
    assert record.figures[0].samples == [pytest.approx(4 * 16 / each["ours"]) for each in ddp.rounds]


def test_a_toy_does_not_go_into_the_results(monkeypatch, capsys):
    with pytest.raises(SystemExit):
        run(monkeypatch, "--toy")
    assert "name a file with --json OUT" in capsys.readouterr().err


def test_without_a_gpu_it_says_that_nothing_is_measured(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(gpu_throughput, "gpu_name", lambda: None)
    run(monkeypatch, str(tmp_path))
    assert read_record(tmp_path / "cuda.json").is_measured is False
    text = (tmp_path / "README.md").read_text()
    assert "not measured yet, for lack of the machine" in text
    assert "| GPT-2 124M, ours on ddp | not measured yet | at least 500,000 |" in text
    # What a GPU has given is not overwritten.
    measured = Record("gpu_throughput", "T", "A", {}, take_facts(()), figures=[Figure("a", "s", [1.0])])
    (tmp_path / "cuda.json").write_text(measured.to_json())
    run(monkeypatch, str(tmp_path))
    assert read_record(tmp_path / "cuda.json") == measured
    assert "is left as it is" in capsys.readouterr().err
