"""Conversations in runs: mixed with pairs, shown as the model reads them, and trained until a model answers."""

import numpy as np
import pytest
import torch
from test_chats import ASK, SAY, chat_config, chat_sources
from transformers import AutoModelForCausalLM, AutoTokenizer

import tasks
from jobs import train_in_job
from largebatch.__main__ import main
from largebatch.storage.files import read_json_lines
from paths import ADDITION, CLIP_DIGITS, DIGITS, EMBED_PYDOC
from small_data import rows_in


def test_pairs_and_conversations_are_mixed(tmp_path):
    one = {"weight": 1, "num_train_samples": 1, "num_eval_samples": 1}
    asked = rows_in(tmp_path / "pairs.jsonl", [{"ask": "Hello", "reply": "Good."}])
    asked |= {"prompt": "{ask}", "answer": "{reply}", "name": "pairs", "format": "chat", "weight": 1}
    sources = [{"name": "chats", "format": "messages", **one}, asked]
    two = {"num_train_samples": 2, "num_eval_samples": 2}
    config = chat_config(tmp_path, [{"messages": [ASK, SAY]}], format="plain", sources=sources, **two)
    _, evaluation = chat_sources(config)
    batch = evaluation.fetch(np.arange(2), None)
    for tensor in batch.values():
        assert tensor[0].equal(tensor[1])


def test_a_whole_config_as_runs_keep_it_can_be_read_again(tmp_path):
    config = chat_config(tmp_path, [], format="chat", prompt="{ask}", answer="{reply}")
    assert type(config.data).model_validate_json(config.data.model_dump_json()) == config.data


@pytest.mark.parametrize("packing", ["false", "true"])
def test_samples_are_shown_as_the_model_reads_them(packing, tmp_path, capsys):
    rows = [{"messages": [ASK, SAY | {"content": "\x1b[2JÇa va."}, ASK]}, {"messages": [ASK, SAY]}]
    recipe = tmp_path / "mine.json"
    recipe.write_text(chat_config(tmp_path, rows).model_dump_json(by_alias=True))
    words = [f"--data.packing={packing}", "--task", str(ADDITION.parent)]
    assert main(["prepare", str(recipe), "--workers=1", "--show=2", *words]) == 0
    user = "<|im_start|>user\nHello<|im_end|>\n"
    assistant = "<|im_start|>assistant\n[[{}<|im_end|>\n]]"
    # The last token of the first conversation is not read, as nothing is predicted from it.
    escaped = r"\x1b[2JÇa va."
    first = f"{user}{assistant.format(escaped)}{user}".removesuffix("\n")
    expected = [first, f"{user}{assistant.format('Good.')}"]
    if packing == "true":
        expected = ["".join(expected)]
    shown = "".join(f"sample {number}:\n{text}\n" for number, text in enumerate(expected))
    assert capsys.readouterr().out.endswith(shown)


@pytest.mark.parametrize("recipe", [DIGITS, CLIP_DIGITS, EMBED_PYDOC])
def test_only_text_that_is_predicted_is_shown(recipe, capsys):
    assert main(["prepare", str(recipe), "--show=1"]) == 2
    assert "--show: the data is not text of which tokens are predicted; remove --show" in capsys.readouterr().err


CODES = {"Anna": "417", "Bert": "902", "Cleo": "385"}


def code_of(name):
    """Two turns, whose last answer nobody can know who has not learned it."""
    return [ASK, SAY, {"role": "user", "content": f"{name}?"}, {"role": "assistant", "content": CODES[name]}]


def answer(chat, model, name):
    """What a user of `transformers` gets."""
    asked = chat.apply_chat_template(
        code_of(name)[:3], add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    written = model.generate(**asked, max_new_tokens=8, do_sample=False)
    return chat.decode(written[0, asked["input_ids"].shape[1] :])


@pytest.mark.slow
def test_a_model_learns_to_answer_and_to_stop(tmp_path):
    rows = [{"messages": code_of(name)} for name in CODES] * 2
    config = chat_config(tmp_path, rows, marked=False, num_train_samples=6)
    # Its own tokenizer is not there, and its end of text is another token than that of answers.
    torch.manual_seed(0)
    tasks.module("sft", "model").load_causal_lm(config.model).save_pretrained(tmp_path / "base")
    (tmp_path / "tokenizer/tokenizer.model").write_bytes(bytes(range(256)))
    words = [
        f"--data={config.data.model_dump_json()}",
        "--model.config=null",
        f"--model.path={tmp_path / 'base'}",
        '--batch={"global_batch_size": 6, "micro_batch_size": 3}',
        '--train.duration={"steps": 80}',
        "--learning_rate.reference_batch_size=6",
        '--learning_rate.warmup.duration={"steps": 10}',
        '--evaluation.every={"steps": 80}',
        "--logging.trackers=[]",
        "--evaluation.answers=3",
    ]
    train_in_job(ADDITION, tmp_path / "run", *words, strategy="fsdp")
    # The recipe evaluates on a single conversation.
    (line,) = read_json_lines(tmp_path / "run/answers/80.jsonl")
    assert line["prompt"].endswith("<|im_start|>user\nAnna?<|im_end|>\n<|im_start|>assistant\n")
    assert (line["answer"], line["expected"]) == ("417<|im_end|>", "417<|im_end|>\n")
    assert (tmp_path / "run/model/tokenizer.model").read_bytes() == bytes(range(256))
    chat = AutoTokenizer.from_pretrained(tmp_path / "run/model")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "run/model").eval()
    assert [answer(chat, model, name) for name in CODES] == [f"{code}<|im_end|>" for code in CODES.values()]
