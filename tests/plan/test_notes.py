"""Notes on plans: what gets one, and that shipped recipes get none."""

import json

import pytest

from largebatch.__main__ import main
from largebatch.config import load_config
from largebatch.plan import notes_on, resolve
from paths import CLIP_B32, PYDOC, RECIPES, ROOT

GPT2 = ROOT / "recipes/causal_lm/gpt2_124m.json"
RESNET = ROOT / "recipes/image_classification/resnet50_imagenet_32k.json"
BERT = ROOT / "recipes/masked_lm/bert_large_64k_128.json"
LORA = ROOT / "recipes/sft/sft_qwen_7b_lora.json"
CHATS = ROOT / "recipes/sft/sft_qwen_7b.json"


def notes(recipe, *words, critical_batch=None):
    config = load_config(recipe, words)
    return list(notes_on(config, resolve(config, 8), critical_batch))


TRAINED_ON = "evaluation reads rows that are trained on; give it a split of its own"
FILES = (
    "--data.path=text --data.config_name=null --data.train_split=train --data.eval_split=validation "
    "--data.data_files.train=a.txt --data.data_files.eval=a.txt"
)
NO_EVALUATION = "no evaluation before the end: write a shorter evaluation.every"
NO_CHECKPOINT = "no checkpoint before the end; a run that is killed starts over: write a shorter checkpoint.every"


@pytest.mark.parametrize(
    ("recipe", "words", "expected"),
    [
        (GPT2, '--train.duration={"steps":500}', []),
        (
            GPT2,
            '--train.duration={"steps":499}',
            ["499 steps are few to train from random weights; a smaller batch takes more of them"],
        ),
        # Of pretrained weights.
        (CHATS, '--train.duration={"steps":219}', []),
        (GPT2, '--learning_rate.warmup.duration={"steps":20}', []),
        (
            GPT2,
            '--learning_rate.warmup.duration={"steps":19}',
            [
                "19 steps of warmup are few for averages over gradients to settle; "
                "lengthen learning_rate.warmup.duration"
            ],
        ),
        (GPT2, "--learning_rate.warmup=null", []),
        (GPT2, '--optimizer.ema_half_life={"epochs":1}', []),
        (
            GPT2,
            '--optimizer.ema_half_life={"epochs":99}',
            ["optimizer.ema_half_life is longer than the run, so first weights count over half as much as the last"],
        ),
        (GPT2, "--evaluation.every=null", [NO_EVALUATION]),
        # The recipe has an epoch of 4,687 steps.
        (GPT2, '--evaluation.every={"steps":4686}', []),
        (GPT2, '--evaluation.every={"steps":4687}', [NO_EVALUATION]),
        (GPT2, '--checkpoint.every={"epochs":2}', [NO_CHECKPOINT]),
        # A trial is judged as the whole run.
        (GPT2, "--train.stop_after_steps=250", []),
        (GPT2, '--train.duration={"steps":500} --faults.spike={"window":499}', []),
        (
            GPT2,
            '--train.duration={"steps":500} --faults.spike={"window":500}',
            ["faults.spike compares no step before step 501, after the end; write a smaller window"],
        ),
        (GPT2, '--train.duration={"epochs":4}', []),
        (
            GPT2,
            '--train.duration={"epochs":5}',
            ["text is read 5 times; more than 4 passes add little (arXiv 2305.16264)"],
        ),
        # 8 x (1 - 0.9) from 1.
        (
            GPT2,
            "--optimizer.beta_scaling=sde --learning_rate.scaling=sqrt --learning_rate.reference_batch_size=256",
            ["optimizer.beta_scaling: with a beta of 0.2, Adam hardly averages; it is for small k"],
        ),
        (GPT2, "--optimizer.beta_scaling=half_life --learning_rate.reference_batch_size=256", []),
        # 3,276,800 = 100 x 32,768.
        (CLIP_B32, "--data.num_train_samples=3276800", []),
        (
            CLIP_B32,
            "--data.num_train_samples=3276799",
            ["an epoch has 99 steps, each with 1 % of the data; a smaller batch takes more of them"],
        ),
        (GPT2, "--data.eval_split=train[:5000]+train[9000:]", []),
        (GPT2, "--data.eval_split=train", [TRAINED_ON]),
        (GPT2, "--data.eval_split=train[5000:]", [TRAINED_ON]),
        (GPT2, "--data.train_split=train --data.eval_split=validation+train[-1%:]", [TRAINED_ON]),
        (GPT2, f"{FILES} --data.data_files.eval=b.txt", []),
        (GPT2, f'{FILES} --data.data_files.eval=["b.txt","a.txt"]', [TRAINED_ON]),
        (GPT2, f"{FILES} --data.train_split=train[9:] --data.eval_split=validation[:9]", []),
        # Images are augmented, and other tokens are masked, in each pass.
        (RESNET, "", []),
        (BERT, "", []),
        (GPT2, "--checkpoint.every=null --evaluation.every=null --demonstration=true", []),
    ],
)
def test_notes(recipe, words, expected):
    assert notes(recipe, *words.split()) == expected


def test_each_source_of_a_mixture_is_counted():
    sources = [
        {"name": name, "weight": weight, "path": name, "num_train_samples": size, "num_eval_samples": 1024}
        for name, weight, size in (("many", 0.9, 9_000_000), ("few", 0.1, 100_000))
    ]
    data = {"source": "datasets", "tokenizer": "bytes", "block_size": 1024, "sources": sources}
    data |= {"num_train_samples": 9_100_000, "num_eval_samples": 2048}
    words = [
        "--data",
        json.dumps(data),
        '--train.duration={"steps": 2500}',
        "--learning_rate.reference_duration=null",
    ]
    # 2,048 x 2,500 x 0.1 = 512,000 of its 100,000 samples.
    assert notes(GPT2, *words) == ["text is read 5.12 times; more than 4 passes add little (arXiv 2305.16264)"]


def test_a_batch_beyond_the_critical_one():
    """Twice as many samples as at the limit of small batches at the critical batch, so three times at its double."""
    assert notes(GPT2, critical_batch=2048) == []
    (note,) = notes(GPT2, critical_batch=1024)
    assert note == "beyond the critical batch, the same loss takes 3 times the fewest samples (arXiv 1812.06162)"


def test_shipped_recipes_get_none():
    for recipe in RECIPES:
        config = load_config(recipe)
        notes = list(notes_on(config, resolve(config, 1 if config.demonstration or "cifar" in recipe.name else 8)))
        assert notes == [], recipe


def test_plan_prints_them_and_succeeds(capsys):
    assert main(["plan", str(GPT2), "--world-size=8", "--evaluation.every=null", "--critical-batch=512"]) == 0
    printed = capsys.readouterr().out
    assert "  Notes         beyond the critical batch, the same loss takes 5 times" in printed
    assert f"                {NO_EVALUATION}\n" in printed
    # What was asked is answered of a demonstration, too.
    assert main(["plan", str(PYDOC), "--world-size=1", "--critical-batch=8"]) == 0
    assert "  Notes         beyond the critical batch, the same loss takes " in capsys.readouterr().out
    assert main(["plan", str(GPT2), "--world-size=8"]) == 0
    assert "Notes" not in capsys.readouterr().out
    with pytest.raises(SystemExit, match="2"):
        main(["plan", str(GPT2), "--world-sizes=8", "--critical-batch=512"])
