"""Masked language modeling in phases: the second one starts from the weights of the first, or is refused."""

import numpy as np
import pytest
import torch
from torch.nn.functional import cross_entropy
from transformers import BertForMaskedLM

import tasks
from jobs import run_job, train_in_job
from largebatch.config import load_config
from largebatch.storage.files import read_json_lines
from paths import BERT
from starting import starting_weights

pytestmark = pytest.mark.slow

TINY = (
    "--model.hidden_size=24",
    "--model.num_layers=2",
    "--model.num_heads=3",
    "--model.max_positions=48",
    "--batch.global_batch_size=8",
    "--batch.micro_batch_size=2",
    "--learning_rate.warmup=null",
    "--evaluation.every=null",
    "--data.num_train_samples=60",
    "--data.num_eval_samples=20",
    "--logging.trackers=[]",
    '--train.duration={"steps": 3}',
)
FIRST = "--data.block_size=16"
SECOND = "--data.block_size=48"


@pytest.fixture(scope="module")
def first_phase(tmp_path_factory):
    """The run folder of a first phase on blocks of 16 tokens, and its evaluation."""
    run_dir = tmp_path_factory.mktemp("phases") / "first"
    train_in_job(BERT, run_dir, *TINY, FIRST)
    return run_dir


def test_the_second_phase_starts_from_the_weights_of_the_first(first_phase, run_dir):
    words = (*TINY, SECOND, f"--model.initial_weights={first_phase / 'model'}")
    found = run_job(starting_weights, BERT, run_dir, *words, strategy="zero3")[0]
    for name, parameter in BertForMaskedLM.from_pretrained(first_phase / "model").named_parameters():
        np.testing.assert_array_equal(found[name], parameter.detach().numpy(), err_msg=name)


def test_the_saved_model_computes_what_was_evaluated(first_phase):
    """By `from_pretrained`, over the same masked samples."""
    _, evaluation = tasks.sources("masked_lm")(load_config(BERT, (*TINY, FIRST)))
    model = BertForMaskedLM.from_pretrained(first_phase / "model").eval()
    batch = evaluation.fetch(np.arange(20), None)
    masked = batch["labels"] >= 0
    labels = batch["labels"][masked]
    with torch.no_grad():
        logits = model(input_ids=batch["input_ids"]).logits[masked].double()
    found = read_json_lines(first_phase / "evaluations.jsonl")[-1]
    assert len(labels) == 20 * 2
    assert found["loss"] == pytest.approx(cross_entropy(logits, labels).item(), rel=1e-5)
    assert found["accuracy"] == pytest.approx((logits.argmax(dim=1) == labels).double().mean().item())
