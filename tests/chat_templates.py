"""Five well-known chat templates, written from their public descriptions, and tokenizers, one with their tokens."""

import json
import re
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

FOLDER = Path(__file__).parent / "chats"
# The beginning and end of a text, and the conversations that each template writes, by their numbers.
TEMPLATES = {
    "chatml": ("<s>", "<|im_end|>", (0, 1, 2, 3, 4, 7, 8, 9)),
    "llama3": ("<|begin_of_text|>", "<|eot_id|>", (0, 1, 2, 3, 4, 7, 8, 9)),
    "qwen": ("<s>", "<|im_end|>", (0, 1, 2, 3, 4, 5, 6, 7, 8, 9)),
    "mistral": ("<s>", "</s>", (0, 1, 2, 3, 4, 5, 6, 9)),
    "gemma": ("<bos>", "<eos>", (0, 2, 3, 9)),
}
# A conversation with more tokens is truncated by TRL, and skipped here.
MAX_TOKENS = 460
SPECIAL = (
    *("<s>", "</s>", "<bos>", "<eos>", "<|begin_of_text|>", "<|im_start|>", "<|im_end|>"),
    *("<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<start_of_turn>", "<end_of_turn>"),
    *("[INST]", "[/INST]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]", "[TOOL_CALLS]", "[TOOL_RESULTS]"),
    *("[/TOOL_RESULTS]", "<tool_call>", "</tool_call>"),
)
# How the tokenizers of these models split texts before they merge bytes: newlines stay together, whatever follows.
WORDS = r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
MERGED = ("ĊĊ", "Ġthe", "Ġand", "Hello", "assistant", "user", "Ġline", "Ġis", "It")


def word_tokenizer(words: list[str], **special: str | None) -> PreTrainedTokenizerFast:
    """Whole words, of which "[UNK]" is for all others."""
    numbers = {word: number for number, word in enumerate(words)}
    tokenizer = Tokenizer(models.WordLevel(numbers, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="[UNK]", **special)


def conversations() -> list[dict]:
    return [json.loads(line) for line in (FOLDER / "conversations.jsonl").read_text().splitlines()]


def template(name: str, marked: bool = True) -> str:
    """With marks of what the assistant writes, or without them, as most models have it."""
    text = (FOLDER / f"{name}.jinja").read_text()
    return text if marked else re.sub(r"\{%- (end)?generation %\}", "", text)


def chat_tokenizer(
    chat_template: str | None,
    bos: str = "<s>",
    eos: str = "</s>",
    merged: tuple[str, ...] = MERGED,
    takes_in_spaces: bool = False,
) -> PreTrainedTokenizerFast:
    """Byte-level byte-pair encoding with a few words; texts begin with `bos`, unless special tokens are left out."""
    vocabulary = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = []
    for word in merged:
        for end in range(2, len(word) + 1):
            if word[:end] not in vocabulary:
                merges.append((word[: end - 1], word[end - 1]))
                vocabulary.append(word[:end])
    numbers = {token: number for number, token in enumerate(vocabulary)}
    tokenizer = Tokenizer(models.BPE(numbers, merges))
    words = pre_tokenizers.Split(Regex(WORDS), behavior="isolated")
    in_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([words, in_bytes])
    tokenizer.decoder = decoders.ByteLevel()
    strip = {"lstrip": takes_in_spaces, "rstrip": takes_in_spaces}
    tokenizer.add_special_tokens([AddedToken(token, special=True, **strip) for token in SPECIAL])
    begin = [(bos, tokenizer.token_to_id(bos))]
    tokenizer.post_processor = processors.TemplateProcessing(single=f"{bos} $A", special_tokens=begin)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token=bos, eos_token=eos, pad_token=eos, chat_template=chat_template
    )
