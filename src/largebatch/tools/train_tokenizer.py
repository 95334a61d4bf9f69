"""`largebatch train-tokenizer`: byte-level byte-pair encoding for a recipe's documents (Radford et al. 2019, 2.2)."""

import argparse
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from largebatch.errors import DataError
from largebatch.tools.options import Commands, add_command, add_recipe, positive_int

if TYPE_CHECKING:
    from largebatch.config import RecipeConfig

END_OF_TEXT, MASK = "<|endoftext|>", "<|mask|>"
DOCUMENTS_AT_ONCE = 1000


def add_parser(commands: Commands) -> None:
    """Declare the command."""
    parser = add_command(
        commands,
        "train-tokenizer",
        run,
        help="train a tokenizer on a recipe's documents",
        description="Train a byte-pair encoding on all documents of a recipe's training split, and save it for "
        "data.tokenizer. The recipe may already name the folder. Fields are overridden as in a run: --data.path json.",
        epilog="""examples:
  largebatch train-tokenizer my_recipe.json --vocab-size 16384 --out my_tokenizer""",
        takes_overrides=True,
    )
    add_recipe(parser)
    parser.add_argument("--vocab-size", type=positive_int, required=True, help="maximum number of tokens; at least 258")
    parser.add_argument("--out", type=Path, required=True, help="the folder to create")


def run(options: argparse.Namespace) -> int:
    """Train the tokenizer and say what to write into the recipe."""
    from largebatch.config import load_config

    num_tokens = train_tokenizer(load_config(options.config, options.overrides), options.vocab_size, options.out)
    print(f"{num_tokens:,} tokens; write data.tokenizer {options.out} and a model.vocab_size of at least that many")
    return 0


def train_tokenizer(config: "RecipeConfig", vocab_size: int, out: Path) -> int:
    """Train a tokenizer on all documents of a recipe's training split, and save it in `out` for `data.tokenizer`.

    It can encode any text, because every byte is a token, and has two special tokens: an end of text, and a mask.

    Returns:
        The number of tokens: fewer than `vocab_size` if the documents have no more pairs to join.

    Raises:
        DataError: The recipe has no documents, they cannot be read, or `out` exists.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    from largebatch.config.data import HubText
    from largebatch.data.hub import column, open_splits

    data = config.data
    if not isinstance(data, HubText):
        raise DataError(
            f'data.source: "{getattr(data, "source", None)}" of {config.task} has no documents to train a tokenizer '
            'on; give a recipe of a language model whose data.source is "datasets"'
        )
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    if vocab_size < len(alphabet) + 2:
        raise DataError(
            f"--vocab-size: {vocab_size} is less than the {len(alphabet)} bytes and two special tokens; write at least "
            f"{len(alphabet) + 2}"
        )
    if out.exists():
        raise DataError(f"--out: {out} exists, and would be overwritten; name another folder, or remove it")
    documents, _ = open_splits(data)
    text_column = column(documents, data.text_column, "text_column")

    def texts() -> Iterator[list[str]]:
        for rows in documents.select_columns([text_column]).iter(batch_size=DOCUMENTS_AT_ONCE):
            yield [text for text in rows[text_column] if text]

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size, special_tokens=[END_OF_TEXT, MASK], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(texts(), trainer)
    saved = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=END_OF_TEXT, mask_token=MASK)
    saved.save_pretrained(out)
    return len(saved)
