"""Text to tokens: as bytes, or by a tokenizer of `transformers`."""

import re
from bisect import bisect_right
from collections.abc import Sequence
from functools import cached_property
from operator import itemgetter
from typing import TYPE_CHECKING

import tokenizers
import xxhash
from huggingface_hub import try_to_load_from_cache
from huggingface_hub.constants import HF_HOME

from largebatch.errors import DataError, reason_of
from largebatch.system.repositories import Place, find

if TYPE_CHECKING:
    from transformers import PretrainedConfig

PROBE = "Don't I'LL re-read 2023 650841823\n\n\n    return  x_1\t\r\n 12 Ünï\uff21 e\u0301 中文 don't"
"""A text that tokenizers of different kinds split differently."""
RARE = "\N{CUNEIFORM SIGN A}"  # which few tokenizers know


class ByteTokenizer:
    """UTF-8 bytes; a zero byte ends each document."""

    vocab_size = 256
    fingerprint = "bytes"
    end_of_text = 0
    special_tokens: Sequence[int] = (0,)  # tokens that represent no text
    unknown_token: int | None = None  # the token that stands for text that it does not know
    mask_token: int | None = 256  # the token that hides others in masked language modeling; it follows all bytes
    prefix: Sequence[int] = ()  # tokens that begin a whole text
    adds_to_parts = False  # whether a part of a text, encoded alone, gets something that is not there, such as a space

    def encode(self, documents: list[str | None]) -> list[list[int]]:
        """The documents' tokens, each with an end-of-text token."""
        return [[*(document or "").encode(), self.end_of_text] for document in documents]

    def special_token_in(self, text: str) -> str | None:  # noqa: ARG002 - a zero byte is not text
        """What of a text would be read as a special token."""
        return None

    def merges_spaces_in(self, text: str) -> bool:  # noqa: ARG002 - bytes are kept
        """Whether line breaks, tabs or several spaces within a text are read as one space."""
        return False

    def decode(self, tokens: list[int]) -> str:
        """The text of tokens; the mask has none."""
        return bytes(token for token in tokens if token < self.vocab_size).decode(errors="replace")


class PretrainedTokenizer:
    """A tokenizer of `transformers`, with its own end-of-text token."""

    def __init__(self, path: str):
        from transformers import AutoTokenizer

        self._place = place = find(path, "data.tokenizer")
        try:
            # Without a value, it asks on stdin whether to run a folder's code.
            self.tokenizer = AutoTokenizer.from_pretrained(place.name, revision=place.revision, trust_remote_code=False)
            stored = _stored_tokenizer(place)
        # It raises exceptions of many kinds for tokenizers that cannot be reached, found or read.
        except Exception as error:
            raise DataError(
                f"data.tokenizer: {path!r} could not be loaded: {reason_of(error)}; write bytes, a local folder, or a "
                f"hub id; if the hub cannot be reached from here, first run `largebatch prepare` where it can, with "
                f"this HF_HOME: {HF_HOME}"
            ) from error
        if not self.tokenizer.is_fast:
            kind = type(self.tokenizer).__name__
            raise DataError(f"data.tokenizer: {path!r} is a {kind}, which is not a fast tokenizer; write one that is")
        # `transformers` makes an empty tokenizer from a folder with a model and no tokenizer.
        if not self.tokenizer("a", add_special_tokens=False)["input_ids"]:
            raise DataError(f"data.tokenizer: {path!r} has no tokenizer that makes tokens; write that of the model")
        # An encoder's tokenizer has a separator instead of an end-of-text token.
        candidates = (self.tokenizer.eos_token_id, self.tokenizer.sep_token_id)
        ends: list[int] = [token for token in candidates if token is not None]
        if not ends:
            raise DataError(f"data.tokenizer: {path!r} has no end-of-text token to separate documents; use another one")
        self.end_of_text = ends[0]
        backend = self.tokenizer.backend_tokenizer
        if getattr(backend.model, "dropout", None):
            raise DataError(
                f'data.tokenizer: {path!r} splits a text differently each time; write "dropout": null into '
                "tokenizer.json in a copy"
            )
        if backend.encode_special_tokens:
            raise DataError(
                f"data.tokenizer: {path!r} splits its special tokens; remove split_special_tokens from "
                "tokenizer_config.json in a copy"
            )
        if self._leaves_out_unknown():
            raise DataError(
                f"data.tokenizer: {path!r} leaves out characters that it does not know; use one with an unknown token, "
                "or of bytes"
            )
        backend.no_truncation()
        backend.no_padding()
        if stored is not None and self._differs_from(stored):
            raise DataError(
                f"data.tokenizer: transformers reads {path!r} as {type(self.tokenizer).__name__}, which splits text "
                "differently from its tokenizer.json, so programs would disagree about the tokens; to follow "
                'tokenizer.json, write "tokenizer_class": "PreTrainedTokenizerFast" in tokenizer_config.json in a copy '
                "of the folder; or, also where that has no effect, write a folder with what transformers reads: "
                f"AutoTokenizer.from_pretrained({path!r}).save_pretrained(NEW_FOLDER)"
            )
        # The numbers of tokens may have gaps.
        self.vocab_size = max(len(self.tokenizer), 1 + max(self.tokenizer.get_vocab().values()))
        added = self.tokenizer.added_tokens_decoder.items()
        # Without a name, such as "bos_token", they are special, too.
        unnamed = {number for number, token in added if token.special}
        self.special_tokens: Sequence[int] = sorted(unnamed.union(self.tokenizer.all_special_ids))
        # Those that know all bytes may name another token.
        unknown = self.tokenizer.unk_token_id
        is_used = unknown is not None and unknown in self.encode([RARE])[0][:-1]
        self.unknown_token: int | None = unknown if is_used else None
        self.mask_token: int | None = self.tokenizer.mask_token_id

    def encode(self, documents: list[str | None]) -> list[list[int]]:
        """The documents' tokens, each with an end-of-text token."""
        texts = [document or "" for document in documents]
        # Without the offsets in the text, which `transformers` would compute, too.
        encoded = self.tokenizer.backend_tokenizer.encode_batch_fast(texts, add_special_tokens=False)
        return [[*document.ids, self.end_of_text] for document in encoded]

    def special_token_in(self, text: str) -> str | None:
        """What of a text would be read as a special token."""
        given, normalized = self._special_token
        found = (given and given.search(text)) or (normalized and normalized.search(self._normalized(text)))
        return found and found[0]

    def _normalized(self, text: str) -> str:
        normalizer = self.tokenizer.backend_tokenizer.normalizer
        return normalizer.normalize_str(text) if normalizer else text

    def merges_spaces_in(self, text: str) -> bool:
        """Whether line breaks, tabs or several spaces within a text are read as one space."""
        text = text.strip()
        return any(space in text for space in self._merged_spaces)

    @cached_property
    def _merged_spaces(self) -> list[str]:
        (one,) = self.encode(["a a"])
        return [space for space in ("  ", "\n", "\t") if self.encode([f"a{space}a"]) == [one]]

    @cached_property
    def _special_token(self) -> list[re.Pattern[str] | None]:
        """What is sought in a text as it is, and in a normalized one; None where there is nothing to seek."""
        patterns: tuple[list[str], list[str]] = ([], [])
        for number, token in self.tokenizer.added_tokens_decoder.items():
            content = self._normalized(token.content) if token.normalized else token.content
            if number in self.special_tokens and content:
                word = r"(?<!\w){}(?!\w)" if token.single_word else "{}"
                patterns[token.normalized].append(word.format(re.escape(content)))
        return [re.compile("|".join(each)) if each else None for each in patterns]

    def _differs_from(self, stored: tokenizers.Tokenizer) -> bool:
        """Whether it splits a text differently from tokenizer.json."""
        texts = [PROBE]
        # tokenizer_config.json may ask for a space before each text, which a text that begins with one does not get.
        if self.tokenizer.init_kwargs.get("add_prefix_space"):
            texts.append(f" {PROBE}")
        try:
            return all(
                self.tokenizer.backend_tokenizer.encode(text, add_special_tokens=False).ids
                != stored.encode(text, add_special_tokens=False).ids
                for text in texts
            )
        # Of no kind of its own: there is no token for a part of the text.
        except Exception:
            return False

    def misread_beside(self, config: "PretrainedConfig") -> str | None:
        """The class as which it is read in a folder with this model's configuration, if that splits text differently.

        `transformers` may choose the class by the model's type, whatever tokenizer_config.json says.
        """
        from transformers import AutoTokenizer

        path, revision = self._place
        try:
            beside = AutoTokenizer.from_pretrained(path, revision=revision, config=config, trust_remote_code=False)
            ours, theirs = (each(PROBE)["input_ids"] for each in (self.tokenizer, beside))
        # Whoever loads it there gets that error.
        except Exception:
            return None
        return None if ours == theirs else type(beside).__name__

    def _leaves_out_unknown(self) -> bool:
        model = self.tokenizer.backend_tokenizer.model
        # Other models raise an error without it.
        if not isinstance(model, tokenizers.models.BPE) or model.unk_token is not None:
            return False
        with_sign, without = self.encode([f"a {RARE}", "a "])
        return with_sign == without

    def decode(self, tokens: list[int]) -> str:
        """The text of tokens, special ones included."""
        return str(self.tokenizer.decode(tokens, clean_up_tokenization_spaces=False))

    @cached_property
    def prefix(self) -> Sequence[int]:
        """The tokens that begin a whole text."""
        whole: list[int] = self.tokenizer("a")["input_ids"]
        (*text, _) = self.encode(["a"])[0]
        found = [start for start in range(len(whole)) if whole[start : start + len(text)] == text]
        return whole[: found[0]] if found else []

    @cached_property
    def adds_to_parts(self) -> bool:
        """Whether a part of a text, encoded alone, gets something that is not there, such as a space."""
        (*first, _), (*second, _) = self.encode(["1", "2"])
        return self.decode(first + second) != "12"

    @cached_property
    def fingerprint(self) -> str:
        """A checksum of all that the tokens of a text depend on."""
        return xxhash.xxh3_64_hexdigest(f"{self.end_of_text}{self.tokenizer.backend_tokenizer.to_str()}".encode())


def _stored_tokenizer(place: Place) -> tokenizers.Tokenizer | None:
    """The tokenizer as it is in tokenizer.json, without what `transformers` makes of it; None if there is no such file.

    That of a hub id must have been downloaded.
    """
    name = "tokenizer.json"
    if place.folder is None:
        file = try_to_load_from_cache(place.name, name, revision=place.revision)
    else:
        file = str(place.folder / name) if (place.folder / name).exists() else None
    if not isinstance(file, str):
        return None
    stored = tokenizers.Tokenizer.from_file(file)
    stored.no_truncation()
    stored.no_padding()
    return stored


Tokenizer = ByteTokenizer | PretrainedTokenizer


def load_tokenizer(name: str) -> Tokenizer:
    """The tokenizer that the config names: "bytes", a local folder, or an id on the hub."""
    return ByteTokenizer() if name == "bytes" else PretrainedTokenizer(name)


class IndivisibleText(Exception):
    """A text has other tokens than its parts; the message says where."""


def encode_parts(tokenizer: PretrainedTokenizer, text: str, places: Sequence[int]) -> tuple[list[int], list[int]]:
    """A text's tokens, and how many of them come before each of these places in it.

    What is between the first and the second place is predicted, between the third and the fourth, and so on.

    What the tokenizer adds to a text, such as a space at its start, is there once.

    Raises:
        IndivisibleText: The text before a place has other tokens alone, as a model would read it, or a special token
            takes in spaces of what is predicted.
    """
    encoded = tokenizer.tokenizer.backend_tokenizer.encode(text, add_special_tokens=False)
    tokens: list[int] = encoded.ids
    # Nothing before an added token changes what follows it, unless it looks at its neighbors. So the last one before a
    # place is as good a start as the text's, from which the time would grow with the square of the number of places.
    added = tokenizer.tokenizer.added_tokens_decoder
    starts = [(0, 0, 0)]
    for number, (token, (start, end)) in enumerate(zip(tokens, encoded.offsets, strict=True)):
        known = added.get(token)
        # An unknown word has the number of an added token, too.
        begin = -1 if known is None else text.find(known.content, start, end)
        if known is None or begin < 0:
            continue
        if text[start:end] == known.content and not (known.lstrip or known.rstrip or known.single_word):
            starts.append((end, start, number))
        # A character is predicted if the number of places up to it is odd.
        first = bisect_right(places, begin)
        last = bisect_right(places, end - 1)
        is_lost_after = first < last and last % 2
        if is_lost_after or (start < begin and bisect_right(places, begin - 1) % 2):
            raise IndivisibleText(
                f"the tokenizer reads {text[start:end]!r} as {known.content}, so spaces or newlines of an answer would "
                "be lost; remove them there"
            )
    chosen = [starts[bisect_right(starts, place, key=itemgetter(0)) - 1] for place in places]
    parts = tokenizer.encode([text[start:place] for place, (_, start, _) in zip(places, chosen, strict=True)])
    counts = []
    for place, (*part, _), (_, _, before) in zip(places, parts, chosen, strict=True):
        counts.append(before + len(part))
        if tokens[before : counts[-1]] != part:
            raise IndivisibleText(
                f"{text[max(place - 12, 0) : place]!r} and {text[place : place + 12]!r}, "
                "of which only one is predicted, have other tokens together than apart, so the model "
                "would not read what it was trained on; remove spaces and newlines where they meet"
            )
    return tokens, counts


def check_vocabulary(rows: int, num_tokens: int, whose: str) -> None:
    """Raise DataError if a model's embedding has fewer rows than there are tokens."""
    if num_tokens > rows:
        raise DataError(f"model.vocab_size: {rows} is below the {num_tokens} tokens of {whose}; write at least that")
