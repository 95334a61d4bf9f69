"""Recipes with several sources: what is refused, with the field and what to write, and what the plan says."""

import json
from collections import Counter
from types import SimpleNamespace

import pytest
import torch

from largebatch.config import load_config
from largebatch.errors import ConfigError
from largebatch.plan import explain, resolve
from largebatch.run.feed import training_feed
from paths import BERT, PYDOC, ROOT

PAIRS = ROOT / "recipes/sft/sft_qwen_gsm8k.json"

FIRST = {"name": "web", "weight": 0.75, "path": "user/web", "num_train_samples": 600, "num_eval_samples": 20}
SECOND = {"name": "code", "weight": 0.25, "path": "user/code", "num_train_samples": 100, "num_eval_samples": 10}
TOTALS = {"num_train_samples": 700, "num_eval_samples": 30}


def load(sources=(FIRST, SECOND), words=(), recipe=PYDOC, second=None, **changes):
    if second:
        sources = [FIRST, SECOND | second]
    data = {"source": "datasets", "tokenizer": "bytes", "block_size": 32, "sources": sources, **TOTALS}
    batch = '--batch={"global_batch_size": 32, "micro_batch_size": 8}'
    more = ('--train.duration={"steps": 30}', "--learning_rate.warmup=null", "--evaluation.every=null")
    return load_config(recipe, ["--data", json.dumps(data | changes), batch, *more, *words])


def test_the_plan_says_how_often_each_source_is_seen():
    text = explain(resolve(load(), 2), "mixture")
    assert "web: 75 % of each batch, 720 samples: 1.2 passes over its 600" in text
    assert "code: 25 % of each batch, 240 samples: 2.4 passes over its 100" in text
    assert "epoch" not in text


def test_a_wrong_sum_hides_no_other_problem():
    words = ['--train.duration={"epochs": 2}', "--batch.micro_batch_size=5"]
    with pytest.raises(ConfigError) as caught:
        load(words=words, num_train_samples=1_000_000, num_eval_samples=5)
    told = str(caught.value)
    for text, times in (("add up to", 2), ("is not a multiple of", 1), ("is given in epochs", 1)):
        assert told.count(text) == times


class Indices:
    """Samples that are their own numbers, of 32 tokens."""

    def fetch(self, indices, _epoch):
        return {"index": torch.from_numpy(indices)}

    def weight(self, batch):
        return 32 * len(batch["index"])


WEIGHTLESS = [{name: value for name, value in each.items() if name != "weight"} for each in (FIRST, SECOND)]


def test_sources_by_size_are_read_as_if_they_were_one():
    words = ('--train.duration={"epochs": 3}', "--batch.global_batch_size=96", "--batch.drop_last=false")
    plan = resolve(load(WEIGHTLESS, words, weights="by_size"), 1)
    # 700 samples are 7 batches of 96 and one of 28.
    assert plan.total_steps == 24
    assert [plan.batch_at(step).size for step in (6, 7, 8)] == [96, 28, 96]
    reads = [Counter() for _ in range(3)]
    backend = SimpleNamespace(plan=plan, rank=0, device=torch.device("cpu"))
    for step, work in enumerate(training_feed(backend, Indices(), 0, 0, iter)):
        reads[step // 8].update(index for each in work.micro_steps for index in each.batch["index"].tolist())
    # Each draw of both sources in its epoch: its number there times 2, and 1 if it is of the second.
    assert reads == [
        Counter([*range(1200 * epoch, 1200 * (epoch + 1), 2), *range(200 * epoch + 1, 200 * (epoch + 1), 2)])
        for epoch in range(3)
    ]
    text = explain(plan, "mixture")
    assert "code: 14.3 % of each batch, 300 samples: 3 passes over its 100" in text


def test_a_source_has_the_section_and_its_own_fields():
    config = load([FIRST | {"train_split": "train[:1%]", "config_name": "en"}, SECOND])
    web, code = config.data.sections().values()
    assert (web.path, web.config_name, web.train_split, web.num_train_samples) == ("user/web", "en", "train[:1%]", 600)
    assert (code.path, code.config_name, code.train_split, code.tokenizer) == ("user/code", None, "train", "bytes")


def test_other_tasks_have_them():
    config = load(recipe=BERT, words=["--checkpoint.every=null"])
    assert [each.path for each in config.data.sections().values()] == ["user/web", "user/code"]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_train_samples": 5}, "num_train_samples: 5, but the sources add up to 700; write 700"),
        ({"sources": [FIRST]}, "data.sources: given"),
        ({"second": {"name": "web"}}, "duplicate name in web, web"),
        (
            {"second": {"pathh": 1}},
            # What all sources share is not among them.
            "sources[1].pathh (code): unknown key, did you mean path?; known here: name, weight, "
            "num_train_samples, num_eval_samples, num_workers, source, path, config_name, data_files, train_split, "
            "eval_split, prepare, text_column",
        ),
        (
            {"second": {"source": "megatron"}},
            "sources[1].path (code): unknown key; known here: name, weight, num_train_samples, num_eval_samples, "
            "num_workers, source, train, eval",
        ),
        ({"path": "user/all"}, "data: path has no effect, because each source has its own; remove it here"),
        (
            {"sources": [FIRST | {"text_column": "a"}, SECOND | {"text_column": "b"}], "text_column": "c"},
            "data: text_column has no effect, because each source has its own",
        ),
        ({"second": {"source": {}}}, "sources[1].source (code): {} is unknown here; write one of datasets, megatron"),
        (
            {"second": {"data_files": {"trian": "x"}}},
            "sources[1].data_files.trian (code): unknown key, did you mean train?; known here: train, eval",
        ),
        (
            {"second": {"tokenizer": "x"}},
            "sources[1].tokenizer (code): must be the same for all sources; write it outside of them",
        ),
        (
            {"sources": [{"name": "web", "weight": 1}, SECOND]},
            "sources[0].num_train_samples (web): missing; number of training samples",
        ),
        ({"sources": [WEIGHTLESS[0], SECOND]}, 'sources[0].weight: write either that or "weights": "by_size"'),
        ({"sources": [WEIGHTLESS[0], SECOND], "weights": "by_size"}, "sources[1].weight: write either that or"),
        ({"second": FIRST | {"name": "code", "num_train_samples": 1}}, "sources: two of them read the same"),
        # Which is not rounded to none.
        ({"sources": [FIRST | {"weight": 1e-10}, SECOND]}, 'weight 1e-10 gives "web" less than one sample'),
        ({"sources": [FIRST | {"weight": 0}, SECOND | {"weight": 0}]}, "all weights are 0"),
        ({"second": {"path": ""}}, "sources[1] (code): path is missing; write a hub id"),
        ({"sources": None, "path": "x", "weights": "by_size"}, "weights: is for sources; write sources, or remove it"),
        (
            {"sources": [FIRST | {"weight": 99}, SECOND | {"weight": 1}]},
            'weight 1 gives "code" less than one sample per batch of 32; write at least 3.19355, a larger',
        ),
    ],
)
def test_what_is_refused(changes, message):
    with pytest.raises(ConfigError) as caught:
        load(**changes)
    assert message in str(caught.value)


def test_pairs_may_have_templates_by_source_alone():
    words = ["--checkpoint.every=null"]
    first = FIRST | {"prompt": "{q}", "answer": "{a}"}
    second = SECOND | {"prompt": "{task}"}
    config = load([first, second | {"answer": "{code}"}], words, PAIRS)
    assert [each.prompt for each in config.data.sections().values()] == ["{q}", "{task}"]
    with pytest.raises(ConfigError, match=r"sources\[1\] \(code\): answer is missing"):
        load([first, second], words, PAIRS)


def test_the_smallest_valid_weight_is_accepted():
    load([FIRST | {"weight": 99}, SECOND | {"weight": 3.19355}])
