"""Prompts with answers: which tokens are predicted, which pairs cannot be used, and what a pack holds."""

from unittest.mock import Mock

import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

import tasks
from chat_templates import word_tokenizer
from largebatch.config import load_config
from largebatch.errors import ConfigError, DataError
from paths import ADDITION
from small_data import load_with, rows_in

addition = tasks.module("sft", "data").addition
pair_sources = tasks.sources("sft")

ROWS = [
    {"question": "alpha beta", "reply": "gamma"},
    {"question": "beta", "reply": "alpha alpha beta"},
    {"question": "gamma gamma", "reply": "beta"},
]
ALPHA, BETA, GAMMA, EOS, MASK, BOS, ASK, SAY = range(2, 10)


@pytest.fixture
def opened(tmp_path):
    """From rows, and other fields of the data, to the sets for training and for evaluation."""

    def open_sources(rows=ROWS, *words, **data):
        templates = {"prompt": "{question}", "answer": "{reply}", "tokenizer": "bytes", "block_size": 64}
        section = rows_in(tmp_path / "pairs.jsonl", rows) | templates | {"num_train_samples": len(rows)}
        return pair_sources(load_with(ADDITION, section | data, *words))

    return open_sources


def texts_in(tokens):
    """Rows of bytes, with a dash where nothing is predicted."""
    return [bytes(row) for row in tokens.masked_fill(tokens < 0, ord("-")).tolist()]


def fetched(source, *indices):
    return source.fetch(np.array(indices), None)


@pytest.fixture
def tokenizer(tmp_path):
    """Whole words; texts begin with two tokens, as GLM's do."""
    names = ["[UNK]", "[PAD]", "alpha", "beta", "gamma", "<eos>", "<mask>", "<bos>", "<ask>", "<say>"]
    saved = word_tokenizer(names, eos_token="<eos>", bos_token="<bos>", pad_token="[PAD]")
    special = [("<mask>", MASK), ("<bos>", BOS)]
    begin = processors.TemplateProcessing(single="<mask> <bos> $A", special_tokens=special)
    saved.backend_tokenizer.post_processor = begin

    def save(chat_template=None):
        saved.chat_template = chat_template
        saved.save_pretrained(tmp_path / "tokenizer")
        return str(tmp_path / "tokenizer")

    return save


def targets_of(source, index):
    labels = fetched(source, index)["labels"]
    return labels[labels != -100].tolist()


def test_answers_are_predicted_with_their_end_and_prompts_are_not(opened):
    rows = [{"question": "2+3", "reply": 5}, {"question": "Ü", "reply": "é 10"}]
    train, evaluation = opened(rows, prompt="{question}=", answer=" {reply}")
    batch = fetched(train, 0, 1)
    assert texts_in(batch["input_ids"]) == [b"2+3= 5\0\0\0", "Ü= é 10".encode()]
    assert texts_in(batch["labels"]) == [b"--- 5\0---", "-- é 10\0".encode()]
    assert train.weight(batch) == 3 + 7
    assert batch.keys() == {"input_ids", "labels"}
    assert targets_of(evaluation, 0) == [*b" 5", 0]


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (
            {"prompt": "<bos> <ask> {question}"},
            r"data\.prompt: '<bos> <ask> {question}' begins with what the tokenizer",
        ),
        ({"answer": "{reply} <eos>"}, r"data\.answer: '{reply} <eos>' ends with the end-of-text token, which is added"),
    ],
)
def test_what_is_added_is_not_in_the_templates(data, message, opened, tokenizer):
    with pytest.raises(DataError, match=message):
        opened(tokenizer=tokenizer(), **data)


CHAT = (
    "{% for message in messages %}"
    "{% if message.role == 'user' %}<bos> <ask> {{ message.content }} "
    "{% else %}<say> {{ message.content }} <eos> {% endif %}"
    "{% endfor %}{% if add_generation_prompt %}<say> {% endif %}"
)


MARKED_TWICE = CHAT.replace(
    "{{ message.content }} <eos>",
    "{% generation %}{{ message.content }} {% endgeneration %}{% generation %}<eos>{% endgeneration %}",
)


@pytest.mark.parametrize("template", [CHAT, MARKED_TWICE])
def test_a_chat_template_writes_both(template, opened, tokenizer):
    """What generation is asked with is read; what the template writes behind it, the end of the turn too, predicted."""
    train, _ = opened(tokenizer=tokenizer(template), format="chat")
    batch = fetched(train, 0)
    assert batch["input_ids"].tolist() == [[BOS, ASK, ALPHA, BETA, SAY, GAMMA]]
    assert batch["labels"].tolist() == [[-100, -100, -100, -100, GAMMA, EOS]]


@pytest.mark.parametrize(
    ("template", "message"),
    [
        (None, r"data\.tokenizer: it has no chat template"),
        (
            "{{ raise_exception('no system') }}",
            r"of 3 .*, 3 cannot be used \(the first is row 0: the chat template fails: no system",
        ),
        (
            CHAT.replace("<say> {% endif %}", "<say> <say> {% endif %}"),
            r'does not write message 1 after its prompt to answer \(add_generation_prompt\).*; or write format "plain"',
        ),
    ],
)
def test_chat_templates_that_cannot_be_used(template, message, opened, tokenizer):
    with pytest.raises(DataError, match=message):
        opened(tokenizer=tokenizer(template), format="chat")


def test_special_tokens_in_a_text_are_no_text(opened, tokenizer):
    """In a template of the recipe they are meant."""
    rows = [{"question": "alpha", "reply": "beta <eos> gamma"}, {"question": "beta", "reply": "gamma"}]
    data = {"tokenizer": tokenizer(), "prompt": "<ask> {question} ", "num_train_samples": 1}
    with pytest.raises(
        DataError, match=r"row 0: reply has '<eos>' in its text, which the tokenizer reads as a special"
    ):
        opened(rows, **data)
    train, _ = opened(rows[1:], **data)
    assert fetched(train, 0)["input_ids"].tolist() == [[MASK, BOS, ASK, BETA, GAMMA]]


@pytest.mark.parametrize(
    ("text", "is_kept"),
    [
        ("alpha\n  beta", False),
        ("beta\talpha", False),
        (" beta\xa0gamma\n", True),
    ],
)
def test_lines_and_spaces_that_a_tokenizer_does_not_tell_apart(text, is_kept, opened, tokenizer):
    pairs = {"rows": [{"question": text, "reply": "beta"}], "tokenizer": tokenizer(CHAT)}
    messages = [{"role": "user", "content": "alpha"}, {"role": "assistant", "content": text}]
    chats = {"rows": [{"messages": messages}], "tokenizer": pairs["tokenizer"], "format": "messages"}
    chats |= {"prompt": "", "answer": ""}
    for data in (pairs, chats):
        if is_kept:
            assert len(opened(**data)[0]) == 1
        else:
            with pytest.raises(
                DataError, match=r"row 0: (question|message 1) has line breaks, tabs or several spaces, which"
            ):
                opened(**data)


def test_text_that_the_tokenizer_does_not_know(opened, tokenizer):
    """A model that answers would not know it of a prompt either."""
    rows = [{"question": "odd odd odd", "reply": "gamma"}, {"question": "alpha", "reply": "gamma odd gamma"}]
    with pytest.raises(DataError, match=r"of 2 .*, 1 cannot .*row 1: the tokenizer does not know all of"):
        opened(rows, tokenizer=tokenizer(), prompt="{question} ")


# --- packs --------------------------------------------------------------------------------------------------------


def test_a_pack_is_its_pairs_one_behind_the_other(opened):
    rows = [{"question": "ab", "reply": "c"}, {"question": "d", "reply": "efg"}, {"question": "hi", "reply": "j"}]
    train, evaluation = opened(rows, packing=True, block_size=8, num_train_samples=2)
    batch = fetched(train, 1, 0)
    assert texts_in(batch["input_ids"]) == [b"hij\0\0\0\0", b"abcdefg"]
    assert batch["position_ids"].tolist() == [[0, 1, 2, 0, 0, 0, 0], [0, 1, 2, 0, 1, 2, 3]]
    assert texts_in(batch["labels"]) == [b"-j\0----", b"-c\0efg\0"]
    assert train.weight(batch) == 2 + 2 + 4
    # Evaluation counts single pairs.
    assert targets_of(evaluation, 0) == [*b"c", 0]


def test_the_number_of_packs_is_told():
    train, _ = pair_sources(load_config(ADDITION, ["--data.packing=true"]))
    assert len(train) == train.num_available == 1250


# --- sums ---------------------------------------------------------------------------------------------------------


def test_sums_are_right_and_held_out_ones_are_not_trained_on():
    train, evaluation = addition()
    assert (len(train), len(evaluation)) == (9000, 1000)
    rows = {(row["prompt"], row["answer"]) for row in [*train, *evaluation]}
    assert rows == {(f"{a}+{b}=", f"{a + b}") for a in range(100) for b in range(100)}


# --- what cannot be used ------------------------------------------------------------------------------------------

UNUSABLE = [
    *ROWS,
    {"question": "beta", "reply": " "},
    {"question": None, "reply": "x"},
    {"question": "q" * 70, "reply": "x"},
]


def test_unusable_pairs_are_told_and_refused(opened, monkeypatch):
    data = tasks.module("sft", "data")
    monkeypatch.setattr(data, "tokenize", Mock(wraps=data.tokenize))
    with pytest.raises(DataError) as caught:
        opened(UNUSABLE)
    # Before the evaluation's are tokenized.
    data.tokenize.assert_called_once()
    assert str(caught.value) == (
        "data.on_invalid: of 6 training rows, 2 cannot be used (the first is row 3: an empty prompt or answer) and 1 "
        "would predict from more than data.block_size 64 tokens (the first is row 5, the longest from 71); correct the "
        'data or raise data.block_size, or write "skip"'
    )


def test_one_empty_column_of_several_leaves_a_prompt(opened):
    """As of instructions with an optional input; null and nothing are the same."""
    rows = [{"question": "2+3", "context": context, "reply": "5"} for context in ("", None, "of numbers")]
    train, _ = opened(rows, prompt="{question}\n{context}=")
    read = texts_in(fetched(train, 0, 2, 1)["input_ids"])
    assert read == [b"2+3\n=5" + bytes(10), b"2+3\nof numbers=5", b"2+3\n=5" + bytes(10)]
    rows.append({"question": "", "context": None, "reply": "5"})
    with pytest.raises(
        DataError, match=r"of \d+ \w+ rows, 1 cannot be used \(.* row 3: an empty prompt or answer\); correct the"
    ):
        opened(rows, prompt="{question}\n{context}=")


def test_unusable_pairs_are_left_out(opened):
    train, _ = opened([UNUSABLE[5], UNUSABLE[3], *ROWS], on_invalid="skip", num_train_samples=3)
    assert [bytes(targets_of(train, index)) for index in range(3)] == [b"gamma\0", b"alpha alpha beta\0", b"beta\0"]
    assert train.remark.startswith("of 5 training rows, 1 cannot be used (the first is row 1: an empty")
    assert train.remark.endswith(": skipped")


def test_no_usable_pair_is_an_error(opened):
    with pytest.raises(DataError, match="so none is left; correct the data"):
        opened(UNUSABLE[3:5], on_invalid="skip", num_train_samples=2)


def test_the_longest_pair_that_fits(opened):
    """64 tokens to predict from are 65 with the end, which is predicted and not read."""
    rows = [{"question": "q" * 60, "reply": "abcd"}]
    train, _ = opened(rows)
    assert fetched(train, 0)["input_ids"].shape == (1, 64)
    with pytest.raises(DataError, match=r"1 would predict from more than data\.block_size 63 tokens"):
        opened(rows, block_size=63)


def test_an_answer_is_text(opened):
    rows = [row | {"both": [row["reply"]]} for row in ROWS]
    with pytest.raises(DataError, match=r"line 1: 'both' holds \[\"gamma\"\], which is not text"):
        opened(rows, answer="{both}")


@pytest.mark.parametrize(
    ("word", "message"),
    [
        (
            '--model.config.rope_parameters={"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0, '
            '"original_max_position_embeddings": 19}',
            "samples have up to 20 tokens to predict from, but beyond 19 the model's positions depend on the longest",
        ),
        ("--model.config.vocab_size=255", "it has 256 tokens, more than the model's vocabulary of 255"),
        ("--model.config.max_position_embeddings=19", "samples have up to 20 tokens to predict from"),
    ],
)
def test_data_that_does_not_fit_the_model(word, message, opened):
    with pytest.raises(DataError, match=message):
        opened(ROWS, word)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({"prompt": "no column"}, "data.prompt: 'no column' is not a template; write column names in braces"),
        *(
            ({"answer": f"{{{name}}}"}, f"'{{{name}}}' has a column name with ., :, ! or [ in it; rename the column")
            for name in ("Q.1", "Answer: de", "Really!", "reply:>5", "Q[1]")
        ),
        ({"prompt": "{0}"}, "data.prompt: '{0}' is not a template"),
        ({"prompt": "{question"}, "data.prompt: '{question' is not a template: "),
        ({"prompt": r"{question}\nAnswer:"}, "has a backslash and an n where a newline may be meant"),
        ({"format": "chat"}, '"bytes" has none; write another tokenizer'),
    ],
)
def test_templates_are_checked_before_anything_starts(data, message, opened):
    with pytest.raises(ConfigError) as caught:
        opened(**data)
    assert message in str(caught.value)


# --- parts are encoded as parts ------------------------------------------------------------------------------------


INSTRUCTIONS = (
    "{{ bos_token }}{% for m in messages %}{% if m['role'] == 'user' %}[INST] {{ m['content'] }} [/INST]"
    "{% else %} {{ m['content'] }}{{ eos_token }}{% endif %}{% endfor %}"
)


@pytest.fixture(params=["whole", "first"])
def spaced(request, tmp_path):
    """A tokenizer that puts a space before texts, as Llama 2's does, or as `Metaspace` does by itself."""
    letters = sorted(set("▁[]INST/hiyes127Anwr:"))
    vocabulary = {"<unk>": 0, "<s>": 1, "</s>": 2} | {letter: 3 + number for number, letter in enumerate(letters)}
    letters_alone = Tokenizer(models.BPE(vocabulary, [], unk_token="<unk>"))
    if request.param == "whole":
        normal = [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
        letters_alone.normalizer = normalizers.Sequence(normal)
        parts = [decoders.Replace("▁", " "), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
        letters_alone.decoder = decoders.Sequence(parts)
    else:
        letters_alone.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
        letters_alone.decoder = decoders.Metaspace(prepend_scheme="first")
    letters_alone.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    saved = PreTrainedTokenizerFast(
        tokenizer_object=letters_alone, bos_token="<s>", eos_token="</s>", unk_token="<unk>", chat_template=INSTRUCTIONS
    )
    saved.save_pretrained(tmp_path / "tokenizer")
    return saved


@pytest.mark.parametrize(("prompt", "answer"), [("Answer: ", "7"), ("Answer:", " 7")])
def test_a_pair_is_the_tokens_of_its_whole_text(prompt, answer, spaced, opened, tmp_path):
    rows = [{"question": prompt, "reply": answer}]
    train, _ = opened(rows, tokenizer=str(tmp_path / "tokenizer"))
    batch = fetched(train, 0)
    expected = [*spaced(prompt + answer)["input_ids"], spaced.eos_token_id]
    assert [*batch["input_ids"][0].tolist(), spaced.eos_token_id] == expected
    predicted = len(expected) - len(spaced(prompt)["input_ids"])
    assert targets_of(train, 0) == expected[-predicted:]


def test_a_prompt_as_chat_is_its_conversation(spaced, opened, tmp_path):
    rows = [{"question": "hi", "reply": "yes"}]
    messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yes"}]
    train, _ = opened(rows, tokenizer=str(tmp_path / "tokenizer"), format="chat")
    tokens = [*fetched(train, 0)["input_ids"][0].tolist(), spaced.eos_token_id]
    assert tokens == spaced.apply_chat_template(messages, return_dict=True)["input_ids"]
