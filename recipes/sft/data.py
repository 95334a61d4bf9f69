"""Prompts with their answers, which are predicted; conversations are in chats.py.

A pair is a row of tokens: the prompt's, the answer's, and the tokens that end it. The model reads all but the last one
and predicts those after the prompt. No token spans both, and a prompt has the same tokens as when the model answers it:
they are tokenized apart or, by a tokenizer that would add something to the answer, together.
"""

from collections.abc import Iterable, Mapping
from decimal import Decimal
from functools import partial
from itertools import starmap
from pathlib import Path
from string import Formatter
from typing import Any

import datasets
import numpy as np
from datasets.fingerprint import Hasher

from largebatch.data.columns import Use
from largebatch.data.forked import forked_by_datasets
from largebatch.data.hub import open_splits
from largebatch.data.mixture import open_mixed
from largebatch.data.order import Permutation
from largebatch.data.preparation import Preparation
from largebatch.data.source import Sources
from largebatch.data.tokenizer import IndivisibleText, PretrainedTokenizer, Tokenizer, encode_parts, load_tokenizer
from largebatch.errors import DataError

from .chat_template import AS_TEXT, MERGED, ChatTemplate, InexactTemplate, UnusableConversation
from .chats import ChatEncoder
from .config import AdditionData, Config, HubPairs
from .model import configuration
from .pairs import Encoded, PairSamples, as_columns

FORMAT = "6"
"""Another number where the same rows make other tokens, or are not accepted any more."""


def sources(config: Config, preparation: Preparation) -> Sources:
    """The training and evaluation samples.

    Batches are {"input_ids": int64 (batch, tokens), "labels": int64 (batch, tokens)}. Labels are the inputs one token
    later, or `IGNORE_INDEX` in prompts and padding, which are not predicted. Packs also have "position_ids" of the same
    shape, which begin at 0 in each pair.

    Raises:
        DataError: The data or its tokenizer cannot be loaded or do not fit the model, or there are unusable pairs.
    """
    return open_mixed(config.data, config.seed, partial(_open, config, preparation))


def _open(config: Config, preparation: Preparation, data: AdditionData | HubPairs, _seed: int) -> Sources:
    tokenizer = load_tokenizer(data.tokenizer)
    encoder: PairEncoder | ChatEncoder
    if isinstance(data, HubPairs) and data.format == "messages":
        encoder = ChatEncoder(data, tokenizer)
    else:
        encoder = PairEncoder(data, tokenizer)
    splits = addition() if isinstance(data, AdditionData) else open_splits(data, preparation, encoder.uses)
    train_rows, eval_rows = (tokenize(data, split, encoder, preparation) for split in splits)
    train = PairSamples(train_rows, data, "training")
    evaluation = PairSamples(eval_rows, data, "evaluation")
    # The model's own answers go on until a sample is full.
    is_filled = config.evaluation.answers is not None
    longest = data.block_size if is_filled else int(max(train.lengths.max(), evaluation.lengths.max()))
    _check_fits_the_model(config, tokenizer, longest)
    return train, evaluation


def _check_fits_the_model(config: Config, tokenizer: Tokenizer, longest: int) -> None:
    model = configuration(config.model).get_text_config()
    if tokenizer.vocab_size > model.vocab_size:
        raise DataError(
            f"data.tokenizer: it has {tokenizer.vocab_size} tokens, more than the model's vocabulary of "
            f"{model.vocab_size}; write the model's own tokenizer"
        )
    if isinstance(tokenizer, PretrainedTokenizer) and config.model.path not in (None, config.data.tokenizer):
        other = tokenizer.misread_beside(configuration(config.model))
        if other is not None:
            raise DataError(
                "data.tokenizer: beside the model's config.json, where the run saves it, transformers reads it as "
                f"{other}, which splits text differently; write the model's own tokenizer"
            )
    given = f"data.block_size: samples have up to {longest} tokens to predict from"
    rope = getattr(model, "rope_parameters", None) or {}
    if rope.get("rope_type") in ("longrope", "dynamic"):
        name = "original_max_position_embeddings"
        original = rope.get(name, getattr(model, name, None))
        if original is not None and longest > original:
            raise DataError(
                f"{given}, but beyond {original} the model's positions depend on the longest pair of a batch, so a "
                f"pair's loss would on others; write {original}"
            )
    positions = getattr(model, "max_position_embeddings", None)
    if positions is not None and longest > positions:
        raise DataError(f"{given}, but the model reads at most {positions}; write {positions}")


# --- sums ---------------------------------------------------------------------------------------------------------

NUM_SUMS = 10_000
NUM_HELD_OUT = 1_000


def addition() -> tuple[datasets.Dataset, datasets.Dataset]:
    """The sums of `AdditionData` as text, for training and for evaluation."""
    places = Permutation(NUM_SUMS, key=0)(np.arange(NUM_SUMS)).tolist()
    sums = [{"prompt": f"{place // 100}+{place % 100}=", "answer": f"{place // 100 + place % 100}"} for place in places]
    return datasets.Dataset.from_list(sums[:-NUM_HELD_OUT]), datasets.Dataset.from_list(sums[-NUM_HELD_OUT:])


# --- tokenizing ---------------------------------------------------------------------------------------------------


EMPTY = "an empty prompt or answer"
OR_PLAIN = 'or write format "plain", with templates of your own'


class PairEncoder:
    """Turns rows of a data set into tokens.

    In the format "chat", the tokenizer's chat template writes prompt and answer as messages of a user and an assistant,
    and ends answers itself; otherwise the end-of-text token ends them.

    Raises:
        DataError: The tokenizer has no chat template, or texts would begin or end twice.
    """

    def __init__(self, data: AdditionData | HubPairs, tokenizer: Tokenizer):
        self.prompt = data.prompt
        self.answer = data.answer
        of_prompt = columns_of(self.prompt)
        of_answer = columns_of(self.answer)
        self.columns = (of_prompt, of_answer)
        self.uses = dict.fromkeys(of_answer, Use("answer")) | dict.fromkeys(of_prompt, Use("prompt"))
        self.tokenizer = tokenizer
        chat = data.format == "chat"
        self.template = ChatTemplate(tokenizer) if chat else None
        # Chat templates write the tokens that begin and end a text themselves.
        self.begin = [] if chat else [*tokenizer.prefix]
        self.end = [] if chat else [tokenizer.end_of_text]
        in_prompt, in_answer = tokenizer.encode([self.prompt, self.answer])
        if self.prompt and in_prompt[0] in self.begin:
            raise DataError(
                f"data.prompt: {self.prompt!r} begins with what the tokenizer adds to a text; remove it there"
            )
        if in_answer[-2:] == self.end * 2:
            raise DataError(
                f"data.answer: {self.answer!r} ends with the end-of-text token, which is added; remove it there"
            )
        self.is_apart = not (chat or tokenizer.adds_to_parts)

    def __call__(self, rows: Mapping[str, list[Any]]) -> dict[str, list[Any]]:
        """The columns of `tokenize`."""
        texts = [self._texts(values) for values in zip(*(rows[name] for name in self.uses), strict=True)]
        parts: Iterable[Encoded]
        if self.is_apart:
            prompts, answers, problems = zip(*texts, strict=True)
            # The tokenizer ends each text; only the ends of answers are kept.
            begun = [tokens[:-1] for tokens in self.tokenizer.encode([*prompts])]
            parts = zip(begun, self.tokenizer.encode([*answers]), problems, strict=True)
        else:
            parts = starmap(self._together, texts)
        encoded: list[Encoded] = []
        for prompt, answer, problem in parts:
            tokens = [*self.begin, *prompt, *answer]
            start = len(tokens) - len(answer)
            is_usable = start and not problem
            encoded.append((tokens, [start, len(tokens)], "") if is_usable else ([], [], problem or EMPTY))
        return as_columns(encoded, self.tokenizer.unknown_token)

    def _together(self, prompt: str, answer: str, problem: str) -> Encoded:
        """The tokens of a prompt, those of its answer, and what is wrong with them."""
        assert isinstance(self.tokenizer, PretrainedTokenizer)
        try:
            tokens, (count,) = encode_parts(self.tokenizer, prompt + answer, [len(prompt)])
        except IndivisibleText as reason:
            return [], [], str(reason)
        return tokens[:count], [*tokens[count:], *self.end], problem

    def _texts(self, values: Iterable[Any]) -> tuple[str, str, str]:
        """A prompt and the text to predict after it; or two empty texts and what is wrong with the row."""
        row = {name: _as_text(name, value) for name, value in zip(self.uses, values, strict=True)}
        for names in self.columns:
            if not any(str(row[name]).strip() for name in names):
                return "", "", EMPTY
        for name, value in row.items():
            if token := self.tokenizer.special_token_in(str(value)):
                return "", "", f"{name} {AS_TEXT.format(token)}"
            if self.tokenizer.merges_spaces_in(str(value)):
                return "", "", f"{name} {MERGED}"
        prompt = self.prompt.format(**row)
        answer = self.answer.format(**row)
        if self.template is None:
            return prompt, answer, ""
        conversation = [{"role": "user", "content": prompt}, {"role": "assistant", "content": answer}]
        try:
            text, ((start, _),) = self.template.turns(conversation, [1])
        except InexactTemplate as error:
            raise DataError(f"data.format: {error}; {OR_PLAIN}") from error
        except UnusableConversation as error:
            return "", "", f"{error}; {OR_PLAIN}"
        return text[:start], text[start:], ""


def _as_text(name: str, value: Any) -> Any:
    """A column's value for a template; empty text if there is none."""
    if value is None:
        return ""
    # Python would write the zero of a column with ten decimals as 0E-10.
    if isinstance(value, Decimal):
        return format(value, "f")
    if isinstance(value, str | int | float) and not isinstance(value, bool):
        return value
    raise DataError(
        f"data: the column {name!r} has {str(value)[:60]!r}, a {type(value).__name__}, neither text nor a number; "
        "convert it to a column of text, and name that in data.prompt or data.answer"
    )


def columns_of(template: str) -> list[str]:
    """The names in braces, in their order."""
    return [name for _, name, _, _ in Formatter().parse(template) if name is not None]


def tokenize(
    data: AdditionData | HubPairs,
    dataset: datasets.Dataset,
    encoder: PairEncoder | ChatEncoder,
    preparation: Preparation,
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
                cache_file_name=None if cache is None else str(cache),
                new_fingerprint=fingerprint,
                desc="tokenizing",
            )
    except UnicodeDecodeError as error:
        raise DataError(f"data: a text cannot be read: {error}; save it as UTF-8") from error


def _is_whole(cache: Path) -> bool:
    """Whether `datasets` has written a file of its cache, or all parts of it by several processes."""
    counts = [path.stem.rpartition("_of_")[2] for path in cache.parent.glob(f"{cache.stem}_*_of_*.arrow")]
    return cache.exists() or any(counts.count(count) == int(count) for count in counts)
