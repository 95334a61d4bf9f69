"""A tokenizer from a recipe's own documents: byte-level byte-pair encoding, as GPT-2's (Radford et al. 2019, 2.2)."""

from collections.abc import Iterator
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from largebatch.config import RecipeConfig
from largebatch.config.data import HubText
from largebatch.data.hub import column, open_splits
from largebatch.errors import DataError

END_OF_TEXT, MASK = "<|endoftext|>", "<|mask|>"
DOCUMENTS_AT_ONCE = 1000


def train_tokenizer(config: RecipeConfig, vocab_size: int, out: Path) -> int:
    """Train a tokenizer on all documents of a recipe's training split, and save it as `data.tokenizer` takes it.

    Any text can be written in it, for every byte is a token. It has an end of text, and a mask for masked language
    modelling; `data.tokenizer` of the recipe is not read.

    Args:
        config: Of a task that trains on documents, with `data.source` "datasets".
        vocab_size: Tokens at most, the 256 bytes and the two special ones among them.
        out: Folder to make.

    Returns:
        The number of tokens: fewer than `vocab_size` where the documents have no more pairs to join.

    Raises:
        DataError: The recipe has no documents, they cannot be read, or `out` exists.
    """
    data = config.data
    if not isinstance(data, HubText):
        raise DataError(
            f'data.source: "{getattr(data, "source", None)}" of task "{config.task}" has no documents to train a '
            'tokenizer on; give a causal_lm or masked_lm recipe whose data.source is "datasets"'
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
    whole = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=END_OF_TEXT, mask_token=MASK)
    whole.save_pretrained(out)
    return len(whole)
