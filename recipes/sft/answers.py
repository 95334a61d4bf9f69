"""Answers that the model itself writes to the first prompts of the evaluation set, for people to read."""

import json

import numpy as np
import torch
from torch import nn

from largebatch.data.source import Batch, SampleSource
from largebatch.data.text import IGNORE_INDEX
from largebatch.data.tokenizer import Tokenizer, load_tokenizer
from largebatch.run import Run
from largebatch.storage.files import replace_file

from .config import Config

NUM_STOPPED = 64  # answers of which it is looked up how they end


def write_answers(run: Run[Config], model: nn.Module, eval_set: SampleSource) -> None:
    """Write a line per prompt to answers/STEP.jsonl in the run's folder; all processes must call this.

    A prompt is all that precedes the last answer of a sample. The model's answer consists of the likeliest tokens. It
    ends with the special token that ends the expected one, after `evaluation.max_answer_tokens`, or with the last token
    that a sample of `data.block_size` has.

    Every process writes every answer, one at a time: all make the same passes, which sharded strategies need, and none
    holds more logits than in an evaluation.
    """
    evaluation = run.config.evaluation
    tokenizer = load_tokenizer(run.config.data.tokenizer)
    first = np.arange(min(evaluation.answers or 0, len(eval_set)))
    lines = ""
    with run.evaluating():
        for prompt, expected in prompts_and_answers(eval_set.fetch(first, None)):
            end = _end_of(expected, tokenizer)
            limit = min(evaluation.max_answer_tokens, run.config.data.block_size - len(prompt) + 1)
            answer: list[int] = []
            while run.any_process(goes_on := len(answer) < limit and end not in answer[-1:]):
                tokens = torch.tensor([[*prompt, *answer]], device=run.backend.device)
                token = int(model(input_ids=tokens).logits[0, -1].argmax())
                # Another process, with other rounding, may go on.
                answer += [token] * goes_on
            line = {
                "step": run.completed_steps,
                "prompt": tokenizer.decode(prompt),
                "answer": tokenizer.decode(answer),
                "expected": tokenizer.decode(expected),
            }
            lines += json.dumps(line, ensure_ascii=False) + "\n"
    if run.is_main_process:
        file = run.folder.path / "answers" / f"{run.completed_steps}.jsonl"
        try:
            file.parent.mkdir(exist_ok=True)
            replace_file(file, lines.encode())
        except OSError as error:
            print(f"WARNING: {file} cannot be written: {error}", flush=True)


def stop_tokens(config: Config, train_set: SampleSource) -> list[int]:
    """The special tokens with which the first answers end."""
    tokenizer = load_tokenizer(config.data.tokenizer)
    first = train_set.fetch(np.arange(min(NUM_STOPPED, len(train_set))), 0)
    found = {_end_of(answer, tokenizer) for _, answer in prompts_and_answers(first)}
    return sorted(token for token in found if token is not None)


def _end_of(answer: list[int], tokenizer: Tokenizer) -> int | None:
    """The special token that ends an answer, after which templates may write newlines."""
    last = next((token for token in reversed(answer) if tokenizer.decode([token]).strip()), None)
    return last if last in tokenizer.special_tokens else None


def prompts_and_answers(batch: Batch) -> list[tuple[list[int], list[int]]]:
    """The tokens of each sample up to its last answer, and those of that answer."""
    samples = []
    for tokens, labels in zip(batch["input_ids"].numpy(), batch["labels"].numpy(), strict=True):
        predicted = np.flatnonzero(labels != IGNORE_INDEX)
        # The last one that does not follow another.
        first = predicted[np.diff(predicted, prepend=-2) > 1][-1]
        samples.append((tokens[: first + 1].tolist(), labels[first : predicted[-1] + 1].tolist()))
    return samples
