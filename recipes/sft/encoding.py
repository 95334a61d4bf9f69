"""Rows of a data set as tokens, of which some are predicted; kept in the cache of `datasets`."""

import json
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from itertools import chain, repeat
from pathlib import Path
from typing import Any

import datasets
from datasets.fingerprint import Hasher

from largebatch.data.columns import Use
from largebatch.data.forked import forked_by_datasets
from largebatch.data.not_text import not_text_in
from largebatch.data.preparation import Preparation
from largebatch.data.tokenizer import IndivisibleText, Tokenizer
from largebatch.errors import DataError

from .config import AdditionData, HubPairs

FORMAT = "9"
"""Another number where the same rows make other tokens, or are not accepted any more."""


class Unusable(Exception):
    """A row cannot be used; the message says why."""


class InexactTemplate(Exception):
    """It is not clear what a chat template's assistant writes; the message says why, and what to write instead."""


class Encoder(ABC):
    """Turns rows of a data set into tokens.

    Args:
        uses: The columns that are read, in the order of the arguments of `encode`.
        tokenizer: The tokenizer.
    """

    def __init__(self, uses: dict[str, Use], tokenizer: Tokenizer):
        self.uses = uses
        self.tokenizer = tokenizer

    @abstractmethod
    def encode(self, *values: Any) -> tuple[list[int], list[int]]:
        """The tokens of a row, and the start and the end of each span of them that is predicted, one after the other.

        Raises:
            Unusable: The row cannot be used.
            InexactTemplate: No row can be.
        """

    def __call__(self, rows: Mapping[str, list[Any]]) -> dict[str, list[Any]]:
        """The columns of `PairSamples`; a row that cannot be used has no tokens, but a problem."""
        # Optional columns need not be there.
        encoded = map(self._encode, *(rows.get(name, repeat(None)) for name in self.uses))
        tokens, predicted, problems = map(list, zip(*encoded, strict=True))
        return {"input_ids": tokens, "predicted": predicted, "num_tokens": [*map(len, tokens)], "problem": problems}

    def _encode(self, *values: Any) -> tuple[list[int], list[int], str]:
        try:
            tokens, spans = self.encode(*values)
            places = zip(spans[::2], spans[1::2], strict=True)
            if any(self.tokenizer.unknown_token in tokens[start:stop] for start, stop in places):
                raise Unusable("the tokenizer does not know all of what is predicted")
        # What can just be read may be nested too deeply to be written.
        except (Unusable, IndivisibleText, RecursionError) as reason:
            return [], [], str(reason)
        except InexactTemplate as reason:
            raise DataError(f"data.format: {reason}; it was found in {short(values[0])}") from reason
        return tokens, spans, ""

    def check_text(self, what: str, value: Any) -> None:
        """Raise Unusable if a text in a value would not be read as it is."""
        for text in all_in(value):
            if not isinstance(text, str):
                continue
            if wrong := not_text_in(text):
                raise Unusable(f"{what} has {wrong}, which is not text; remove it")
            if token := self.tokenizer.special_token_in(text):
                raise Unusable(
                    f"{what} has {token!r} in its text, which the tokenizer reads as a special token; write it "
                    "otherwise"
                )
            if self.tokenizer.merges_spaces_in(text):
                raise Unusable(
                    f"{what} has line breaks, tabs or several spaces, which the tokenizer reads as one space; write "
                    "one, or use another"
                )


def all_in(value: Any) -> Iterator[Any]:
    """Yield a value of JSON, and all values and names of keys in it."""
    yield value
    if isinstance(value, list | dict):
        for item in chain.from_iterable(value.items()) if isinstance(value, dict) else value:
            yield from all_in(item)


def short(value: Any) -> str:
    """A value for a message: at most 60 characters of its JSON."""
    text = json.dumps(value, ensure_ascii=False, default=str)
    return text if len(text) <= 60 else f"{text[:60]}…"


def tokenize(
    data: AdditionData | HubPairs, dataset: datasets.Dataset, encoder: Encoder, preparation: Preparation
) -> datasets.Dataset:
    """The rows' tokens, as `PairSamples` takes them; `datasets` keeps the result in its cache on disk.

    Raises:
        NotPrepared: They are not there, and may not be made here.
        DataError: Text of the data is not in UTF-8.
    """
    fingerprint = Hasher.hash([FORMAT, dataset._fingerprint, Hasher.hash(encoder)])
    cache = None
    num_workers = 0
    if isinstance(data, HubPairs):
        num_workers = preparation.workers_for(data)
        cache = Path(dataset.cache_files[0]["filename"]).with_name(f"tokens_{fingerprint}.arrow")
        if not _is_whole(cache):
            preparation.check(data, dataset.data.nbytes)
    number = datasets.Value("int32")
    numbers = datasets.List(number)
    text = datasets.Value("string")
    try:
        with forked_by_datasets():
            return dataset.map(
                encoder,
                batched=True,
                remove_columns=dataset.column_names,
                features=datasets.Features(input_ids=numbers, predicted=numbers, num_tokens=number, problem=text),
                num_proc=num_workers or None,
                cache_file_name=cache and str(cache),
                new_fingerprint=fingerprint,
                desc="tokenizing",
            )
    except UnicodeDecodeError as error:
        raise DataError(f"data: a text cannot be read: {error}; save it as UTF-8") from error


def _is_whole(cache: Path) -> bool:
    """Whether `datasets` has written a file of its cache, or all parts of it by several processes."""
    counts = [path.stem.rpartition("_of_")[2] for path in cache.parent.glob(f"{cache.stem}_*_of_*.arrow")]
    return cache.exists() or any(counts.count(count) == int(count) for count in counts)
