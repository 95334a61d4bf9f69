"""Conversations: rows that `prepare` reads for fine-tuning, and the template that writes them."""

import json
from pathlib import Path
from random import Random

from chat_templates import chat_tokenizer, conversations, template
from fuzzing.cases import Case
from fuzzing.mutations import as_text, change_bytes, cut, insert, mutate

TOKENIZERS = ("chatml", "llama3", "mistral")


def case(random: Random, folder: Path) -> Case:
    """Mutated conversations, or a damaged template."""
    tokenizer = folder / "tokenizer"
    chat_tokenizer(template(random.choice(TOKENIZERS), marked=random.random() < 0.5)).save_pretrained(tokenizer)
    rows = [random.choice(conversations()) for _ in range(4)]
    lines = [as_text(mutate(random, row)) if random.random() < 0.5 else json.dumps(row).encode() for row in rows]
    for name in ("train", "eval"):
        (folder / f"{name}.jsonl").write_bytes(b"\n".join(lines) + b"\n")
    if random.random() < 0.3:
        file = random.choice([tokenizer / "chat_template.jinja", folder / "train.jsonl"])
        random.choice((change_bytes, cut, insert))(random, file)
    data = {
        "source": "datasets",
        "path": "json",
        "data_files": {"train": "train.jsonl", "eval": "eval.jsonl"},
        "format": "messages",
        "tokenizer": str(tokenizer),
        "block_size": 512,
        "on_invalid": random.choice(("skip", "refuse")),
        "num_train_samples": 1,
        "num_eval_samples": 1,
    }
    words = ["prepare", "recipes/sft/sft_addition.json", f"--data={json.dumps(data)}", "--workers=1", "--show=1"]
    words += ['--batch={"global_batch_size": 1, "micro_batch_size": 1}', "--learning_rate.warmup=null"]
    # A model that takes each tokenizer, and the conversations.
    words += ["--model.config.vocab_size=512", "--model.config.max_position_embeddings=512"]
    return Case(words, folder)
