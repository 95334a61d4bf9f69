"""Answers that the model writes at evaluations: those of `generate`, and harmless."""

from functools import partial
from types import SimpleNamespace
from unittest.mock import MagicMock

import pytest
import torch
from test_sft import SINGLE
from transformers import AutoModelForCausalLM

import tasks
from chat_templates import chat_tokenizer
from jobs import train_in_job
from largebatch.config import load_config
from largebatch.errors import DataError
from largebatch.storage.files import read_json_lines
from paths import ADDITION
from resuming import EXACT

answers = tasks.module("sft", "answers")

WORDS = (
    *SINGLE,
    "--train.stop_after_steps=12",
    '--evaluation.every={"steps": 6}',
    "--logging.every=1",
    "--logging.trackers=[]",
)
# No room for all digits of some sums and their end.
ANSWERS = ("--evaluation.answers=5", "--evaluation.max_answer_tokens=3")


def generated(model, prompt):
    """What a user of `transformers` gets from a model."""
    tokens = torch.tensor([list(prompt.encode())])
    written = model.generate(tokens, max_new_tokens=3, do_sample=False, eos_token_id=0, pad_token_id=0)
    return bytes(written[0, len(prompt) :].tolist()).decode(errors="replace")


def trained(run_dir):
    lines = [{name: line[name] for name in EXACT} for line in read_json_lines(run_dir / "metrics.jsonl")]
    return lines, (run_dir / "model/model.safetensors").read_bytes()


@pytest.mark.slow
def test_answers_are_those_of_generate_and_harmless(tmp_path):
    train_in_job(ADDITION, tmp_path / "without", *WORDS, strategy="fsdp")
    # Between its evaluations, this run stops and is resumed.
    train_in_job(ADDITION, tmp_path / "fsdp", *WORDS, *ANSWERS, "--train.stop_after_steps=9", strategy="fsdp")
    train_in_job(ADDITION, tmp_path / "fsdp", *WORDS, *ANSWERS, strategy="fsdp")
    assert not (tmp_path / "without/answers").exists()
    assert trained(tmp_path / "fsdp") == trained(tmp_path / "without")
    first, last = (read_json_lines(tmp_path / f"fsdp/answers/{step}.jsonl") for step in (6, 12))
    assert [line["answer"] for line in first] != [line["answer"] for line in last]
    prompts = [line["prompt"] for line in last]
    sums = tasks.module("sft", "data").addition()[1].select(range(5))
    assert prompts == sums["prompt"][:]
    assert [line["expected"] for line in last] == [f"{answer}\0" for answer in sums["answer"]]
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "fsdp/model").eval()
    assert [line["answer"] for line in last] == [generated(model, prompt) for prompt in prompts]


def test_an_answer_may_be_all_that_is_predicted():
    """The last turn of a conversation is what `test_chat_runs.py` asks for."""
    batch = {"input_ids": torch.tensor([[1, 2, 3]]), "labels": torch.tensor([[2, 3, 4]])}
    assert answers.prompts_and_answers(batch) == [([1], [2, 3, 4])]


@pytest.fixture
def answer_of(tmp_path, monkeypatch):
    """What is recorded of a model that would write a text after "Hello", where texts end with </s>."""
    tokenizer = chat_tokenizer(None, eos="</s>")
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    encode = partial(tokenizer.encode, add_special_tokens=False)

    def ask(expected, written, max_tokens=20, block_size=40):
        prompt = encode("Hello")
        tokens = encode(f"{written}xxxxxxx")
        monkeypatch.setattr(answers, "prompts_and_answers", lambda _: [(prompt, encode(expected))])
        run = MagicMock(completed_steps=7)
        run.config.data = SimpleNamespace(tokenizer=str(tmp_path / "tokenizer"), block_size=block_size)
        run.config.evaluation = SimpleNamespace(answers=4, max_answer_tokens=max_tokens)
        run.backend.device = torch.device("cpu")
        run.folder.path = tmp_path
        passes = []
        # Another process has an answer of seven tokens.
        run.any_process = lambda goes_on: goes_on or len(passes) < 7

        def model(input_ids):
            assert run.evaluating().__enter__.called
            assert not run.evaluating().__exit__.called
            passes.append(len(passes))
            place = input_ids.shape[1] - len(prompt)
            assert input_ids[0].tolist() == prompt + tokens[:place]
            logits = torch.zeros(*input_ids.shape, len(tokenizer))
            logits[0, -1, tokens[place]] = 1
            return SimpleNamespace(logits=logits)

        answers.write_answers(run, model, MagicMock())
        (line,) = read_json_lines(tmp_path / "answers/7.jsonl")
        answer = line.pop("answer")
        assert line == {"step": 7, "prompt": "Hello", "expected": expected}
        return answer

    return ask


@pytest.mark.parametrize(
    ("expected", "answer"),
    [
        ("It is.</s>", "It was.</s>"),
        # A chat template may end turns with another token, and write more after it.
        ("It is.<|im_end|>\n", "It was.</s>no<|im_end|>"),
    ],
)
def test_an_answer_ends_as_the_expected_one(expected, answer, answer_of):
    assert answer_of(expected, "It was.</s>no<|im_end|>\n<|im_end|>") == answer


def test_an_answer_is_no_longer_than_it_may_be(answer_of):
    assert answer_of("no</s>", "abcdefgh</s>", max_tokens=3) == "abc"
    # Nothing says where such an answer ends.
    assert answer_of("no", "ab</s>defgh</s>", max_tokens=5) == "ab</s>de"
    # "Hello" is one token: with four more, five are read, and the last one is not.
    assert answer_of("no</s>", "abcdefgh</s>", block_size=4) == "abcd"


def test_answers_that_cannot_be_written_are_not_the_end(answer_of, tmp_path, capsys):
    (tmp_path / "answers").write_text("a file")
    with pytest.raises(ValueError, match="not enough values"):
        answer_of("no</s>", "no</s>")
    assert "WARNING: " in capsys.readouterr().out


def test_there_must_be_room_for_answers():
    words = ("--evaluation.answers=1", "--model.config.max_position_embeddings=32")
    with pytest.raises(DataError, match=r"samples have up to 64 tokens .* the model reads at most 32"):
        tasks.sources("sft")(load_config(ADDITION, words))
