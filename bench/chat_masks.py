"""Tokens of conversations, and which of them TRL predicts, with five well-known chat templates.

    pip install -r bench/requirements.txt
    python bench/chat_masks.py

The suite compares `data.format: "messages"` with its output, tests/chats/trl.json, without TRL. It takes TRL's trainer
as a user does: "all" are its `assistant_only_loss`, "last" its prompts and completions, and "packed" its packs.
"""

import argparse
import json
import os
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path
from typing import Any

os.environ["HF_HUB_OFFLINE"] = "1"

from record import ROOT

sys.path.insert(0, str(ROOT / "tests"))

from datasets import Dataset, load_dataset
from transformers import LlamaConfig, LlamaForCausalLM

from chat_templates import FOLDER, MAX_TOKENS, TEMPLATES, chat_tokenizer, template

Rows = list[dict[str, Any]]


def prepared(name: str, rows: Dataset, **options: Any) -> Rows:
    """The rows as TRL's trainer trains on them."""
    from trl import SFTConfig, SFTTrainer

    bos, eos, _ = TEMPLATES[name]
    tokenizer = chat_tokenizer(template(name), bos, eos)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=len(tokenizer), hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1
        )
    )
    with tempfile.TemporaryDirectory() as folder:
        arguments = SFTConfig(folder, use_cpu=True, bf16=False, report_to=[], max_length=MAX_TOKENS, **options)
        trainer = SFTTrainer(model, arguments, train_dataset=rows, processing_class=tokenizer)
        return [as_mask(row) for row in trainer.train_dataset]


def as_mask(row: dict[str, Any]) -> dict[str, Any]:
    """A row's tokens, and 1 for each that is predicted; for packs, also the lengths of their conversations."""
    tokens = row["input_ids"]
    labels = row["labels"]
    assert all(label in (token, -100) for token, label in zip(tokens, labels, strict=True))
    predicted = "".join("0" if label == -100 else "1" for label in labels)
    lengths = {"lengths": row["seq_lengths"]} if "seq_lengths" in row else {}
    return {"tokens": tokens, "predicted": predicted} | lengths


def as_prompt(row: dict[str, Any]) -> dict[str, Any]:
    """A conversation without what follows the last message of the assistant, which completes it."""
    messages = row["messages"]
    last = max(number for number, message in enumerate(messages) if message["role"] == "assistant")
    return {"prompt": messages[:last], "completion": messages[last : last + 1]}


def main() -> None:
    parser = argparse.ArgumentParser(description="Write what TRL predicts of the suite's conversations.")
    parser.add_argument("--output", type=Path, default=FOLDER / "trl.json")
    options = parser.parse_args()
    found: dict[str, Any] = {"versions": {name: version(name) for name in ("trl", "transformers", "tokenizers")}}
    for name, (_, _, numbers) in TEMPLATES.items():
        with tempfile.TemporaryDirectory() as cache:
            files = {"train": str(FOLDER / "conversations.jsonl")}
            rows = load_dataset("json", data_files=files, split="train", cache_dir=cache).select(numbers)
            rows = rows.remove_columns("name")
            found[name] = {
                "all": prepared(name, rows, assistant_only_loss=True),
                "last": prepared(name, rows.map(as_prompt, remove_columns="messages"), completion_only_loss=True),
                "packed": prepared(name, rows, assistant_only_loss=True, packing=True),
            }
    options.output.write_text(json.dumps(found, separators=(",", ":")) + "\n")


if __name__ == "__main__":
    main()
