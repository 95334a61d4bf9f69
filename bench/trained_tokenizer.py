"""Trains the tokenizer of a benchmark: byte-level byte-pair encoding on a recipe's documents."""

from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from largebatch.data.hub import open_splits

END_OF_TEXT = "<|endoftext|>"


def train_tokenizer(config: Any, vocab_size: int, folder: Path) -> None:
    """Train a tokenizer on all documents of a recipe's training split, as docs/data.md shows, and save it."""
    documents, _ = open_splits(config.data)
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(documents["text"], trainer)
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=END_OF_TEXT).save_pretrained(folder)
