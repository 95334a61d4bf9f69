"""Conversations: tokens and what is predicted of them, equal to TRL's; what is refused, and how that is said."""

import json
import signal
import time
from types import SimpleNamespace

import numpy as np
import pytest

import tasks
from chat_templates import FOLDER, MAX_TOKENS, TEMPLATES, chat_tokenizer, conversations, template
from largebatch.data.tokenizer import PretrainedTokenizer
from largebatch.errors import ConfigError, DataError
from paths import ADDITION
from small_data import load_with, rows_in

chat_sources = tasks.sources("sft")
ASK = {"role": "user", "content": "Hello"}
SAY = {"role": "assistant", "content": "Good."}
CALL = {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{}"}}]}
THOUGHT = {"role": "assistant", "content": "<think>\nHm.\n</think>\n\nGood."}
PARTS = [{"type": "text", "text": "Hel"}, {"type": "text", "text": "lo", "citations": None}]
TWO_TURNS = [ASK, SAY, ASK, SAY]
MARKED = template("chatml")
UNMARKED = template("chatml", marked=False)
ROOM = ("--model.config.vocab_size=400", "--model.config.max_position_embeddings=1000")
UNENDED = UNMARKED.replace("+ '<|im_end|>\\n'", "+ '\\n'")
ENDED_AT_THE_END = UNENDED + "{% if not add_generation_prompt %}</s>{% endif %}"


def chat_config(tmp_path, rows, name="chatml", marked=True, **data):
    bos, eos, _ = TEMPLATES[name]
    chat_tokenizer(template(name, marked), bos, eos).save_pretrained(tmp_path / "tokenizer")
    section = rows_in(tmp_path / "chats.jsonl", rows) | {
        "format": "messages",
        "tokenizer": str(tmp_path / "tokenizer"),
        "block_size": MAX_TOKENS - 1,
        "num_train_samples": 1,
        "num_eval_samples": 1,
    }
    return load_with(ADDITION, section | data, *ROOM)


def encoder(tmp_path, chat_template, block_size=1000, takes_in_spaces=False, **layout):
    chat_tokenizer(chat_template, takes_in_spaces=takes_in_spaces).save_pretrained(tmp_path)
    messages = tasks.module("sft", "config").Messages(**layout)
    data = SimpleNamespace(messages=messages, block_size=block_size)
    return tasks.module("sft", "chats").ChatEncoder(data, PretrainedTokenizer(str(tmp_path)))


def problems_of(tmp_path, chat_template, *conversations, tools=(), **layout):
    """What is wrong with each conversation, and its tools; nothing with those that can be used."""
    rows = {layout.get("column", "messages"): conversations, "tools": tools or [None] * len(conversations)}
    return encoder(tmp_path, chat_template, **layout)(rows)["problem"]


def samples_of(config):
    """What is read, and the labels of that."""
    train, _ = chat_sources(config)
    batches = [train.fetch(np.array([index]), 0) for index in range(train.num_available)]
    return [(batch["input_ids"][0].tolist(), batch["labels"][0].tolist()) for batch in batches]


def as_sample(tokens, predicted):
    labels = [token if flag == "1" else -100 for token, flag in zip(tokens, predicted, strict=True)]
    return tokens[:-1], labels[1:]


@pytest.mark.parametrize("name", TEMPLATES)
def test_tokens_and_targets_are_those_of_trl(name, tmp_path):
    """What TRL's trainer trains on, from bench/chat_masks.py of commit adf16c3f."""
    trl = json.loads((FOLDER / "trl.json").read_text())[name]
    chosen = [conversations()[number] for number in TEMPLATES[name][2]]
    expected = [as_sample(row["tokens"], row["predicted"]) for row in trl["all"]]
    # TRL truncates what is too long, and here it is skipped.
    whole = [len(row["tokens"]) < MAX_TOKENS for row in trl["all"]]
    can_begin = [row["messages"][0]["role"] != "assistant" for row in chosen]
    for marked in (True, False):
        used = [fits and (marked or begins) for fits, begins in zip(whole, can_begin, strict=True)]
        found = samples_of(chat_config(tmp_path, chosen, name, marked, on_invalid="skip"))
        assert found == [sample for sample, is_used in zip(expected, used, strict=True) if is_used]
        last = {"messages": {"train_on": "last"}, "on_invalid": "skip"}
        found = samples_of(chat_config(tmp_path, chosen, name, marked, **last))
        # TRL leaves out what follows the last turn of the assistant, and what it had to truncate.
        for (inputs, labels), row in zip(found, trl["last"], strict=True):
            read, targets = as_sample(row["tokens"], row["predicted"])
            assert inputs[: len(read)] == read
            assert labels[: len(read)] == targets
            assert {*labels[len(read) :]} <= {-100}


def test_the_template_of_the_readme_is_one_of_these():
    assert template("chatml") in (ADDITION.parent / "README.md").read_text()


def test_parts_of_text_are_one_text_and_weights_that_agree_are_read(tmp_path):
    weighted = [
        ASK | {"content": PARTS, "weight": 0, "train": False, "masked": "", "ignore": False},
        SAY | {"weight": 1.0, "train": True, "masked": False},
    ]
    (plain, read) = encoder(tmp_path, UNMARKED)({"messages": [[ASK, SAY], weighted]})["input_ids"]
    assert read == plain != []
    # Of the last turn only, an earlier one weighs nothing.
    assert problems_of(tmp_path, UNMARKED, [ASK, SAY | {"weight": 0}, *weighted], train_on="last") == [""]


# --- what cannot be used ------------------------------------------------------------------------------------------


WRONG = [
    ("Hello", 'messages, "Hello", cannot be read as JSON: Expecting value'),
    ('"Hello"', 'messages is "Hello"; write a list of messages'),
    ('[{"role": "user", "content": "kept?", "content": "last"}]', "cannot be read as JSON: 'content' occurs twice"),
    (
        [ASK, CALL | {"tool_calls": [{"name": "f", "arguments": '{"id": 12345678901234567890.0}'}]}],
        "the number 12345678901234567890.0, which would become 1.2345678901234567e+19",
    ),
    ([ASK, "Good."], 'message 1 is "Good."; write an object with role and content'),
    ([ASK, SAY | {"role": "bot"}], 'message 1 has the role "bot"; write one of system, developer, user'),
    ([{"from": "human", "value": "Hello"}], "message 0 has no role, only from, value; name its keys"),
    (
        [
            ASK,
            {"role": "assistant", "content": None, "function_call": {"name": "f", "arguments": "{}"}},
        ],
        'message 1 has function_call, which is an earlier form of calls; write "tool_calls"',
    ),
    ([ASK, SAY | {"content": " "}], 'message 1 has the content " "; write text'),
    (
        [ASK | {"content": [*PARTS, {"type": "image"}]}, SAY],
        'message 0 has the content [{"type": "text", "text": "Hel"}, {"type": "text", "text": "…; write text',
    ),
    (
        [ASK | {"content": [{"type": "text", "text": "Hi", "citations": ["north"]}]}, SAY],
        '"citations": ["north"]}]; write text, or parts with only that',
    ),
    ([ASK, SAY | {"weight": 0}], "message 1 has weight 0, but is predicted: messages.train_on"),
    ([ASK | {"train": True}, SAY], "message 0 has train true, but is not predicted: "),
    ([ASK, SAY | {"loss": False}], "message 1 has loss false, but is predicted: "),
    ([ASK, SAY | {"masked": True}], "message 1 has masked true, but is predicted: "),
    ([ASK, SAY | {"weight": "1"}], 'message 1 has weight "1"; write a number, true or false'),
    (str([ASK, SAY]), "as Python shows it, not JSON; write it with json.dumps"),
    ([ASK | {"content": "Hi<|im_end|>"}, SAY], "message 0 has '<|im_end|>' in its text, which the"),
    ([ASK, SAY | {"reasoning_content": "</s>"}], "message 1 has '</s>' in its text, which the"),
    ([ASK | {"content": "a\0"}, SAY], "message 0 has a zero byte, which is not text; remove it"),
    (json.dumps([ASK, SAY | {"content": "\ud800"}]), "message 1 has half of a character, 0xd800, which is not"),
    ([ASK, SAY | {"tool_calls": "f"}], 'message 1 has the tool_calls "f"; write a list of functions'),
    # Python before 3.14 says "maximum recursion depth exceeded", and later ones "Stack overflow".
    ("[" * 10**5, ", cannot be read as JSON: "),
    ([SAY, ASK, SAY], "it begins with the assistant, and nothing before it can be answered"),
    ([ASK, CALL], "the chat template fails: "),
    ([ASK, SAY | {"content": "\nGood."}], "have other tokens together than apart"),
]


def test_what_is_wrong_with_a_row_is_said(tmp_path):
    encoded = encoder(tmp_path, UNMARKED)({"messages": [TWO_TURNS, *(messages for messages, _ in WRONG)]})
    first, *problems = encoded["problem"]
    assert first == ""
    for problem, (_, reason) in zip(problems, WRONG, strict=True):
        assert reason in problem
    assert encoded["input_ids"][1:] == [[]] * len(WRONG)


def test_what_is_wrong_with_tools_is_said(tmp_path):
    wrong = [
        ([{"name": "</s>"}], "tools has '</s>' in its text, which the"),
        ('{"f', ", cannot be read as JSON: Unterminated string"),
        ('{"f": ' + "[" * 960 + "]" * 960 + "}", "tools"),
        ({"f": 1}, 'tools are {"f": 1}; write a list of JSON schemas'),
    ]
    problems = problems_of(tmp_path, UNMARKED, *[TWO_TURNS] * len(wrong), tools=[tools for tools, _ in wrong])
    for problem, (_, reason) in zip(problems, wrong, strict=True):
        assert reason in problem


@pytest.mark.parametrize(
    ("chat_template", "block_size", "num_spans"),
    [(MARKED, 10**6, 1500), (UNMARKED, 1000, 0)],
    ids=["that fits", "that does not"],
)
def test_the_time_of_a_conversation_grows_with_its_length(chat_template, block_size, num_spans, tmp_path):
    encode = encoder(tmp_path, chat_template, block_size)
    start = time.process_time()
    encoded = encode({"messages": [[ASK, SAY] * 1500]})
    assert time.process_time() - start < 10
    assert encoded["problem"] == [""]
    assert encoded["num_tokens"] == [8 * 3000]
    assert len(encoded["predicted"][0]) == 2 * num_spans


@pytest.mark.parametrize(
    ("chat_template", "reason"),
    [
        ("{{ raise_exception('x ' * 1500000) }}", f"the chat template fails: {'x ' * 149}… (TemplateError)"),
        ("{{ raise_exception('\x1b[31m\x9b') }}", r"the chat template fails: \x1b[31m\x9b (TemplateError)"),
        ("{{ 'x' * 10000001 }}", "the chat template writes more than 10,000,000 characters"),
    ],
)
def test_templates_that_flood(chat_template, reason, tmp_path):
    assert problems_of(tmp_path, chat_template, TWO_TURNS) == [reason]


def test_a_template_that_loops_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(tasks.module("sft", "chat_template"), "MAX_SECONDS", 0.1)
    before = signal.getsignal(signal.SIGVTALRM)
    loops = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
    with pytest.raises(DataError, match=r"takes more than 0\.1 s for a conversation; correct its loops"):
        problems_of(tmp_path, loops, TWO_TURNS)
    assert signal.getsignal(signal.SIGVTALRM) == before
    assert signal.getitimer(signal.ITIMER_VIRTUAL) == (0, 0)


def test_unusable_rows_are_refused_or_skipped(tmp_path):
    rows = [{"messages": TWO_TURNS}, {"messages": [ASK]}, {"messages": [ASK, SAY]}]
    with pytest.raises(DataError) as caught:
        chat_sources(chat_config(tmp_path, rows))
    assert str(caught.value) == (
        "data.on_invalid: of 3 training rows, 1 cannot be used (the first is row 1: it has no message with "
        'the role "assistant", so nothing is predicted); correct the data, or write "skip"'
    )
    assert len(samples_of(chat_config(tmp_path, rows, on_invalid="skip"))) == 2


# As Qwen3's: only the last turn keeps what was thought before it.
WITHOUT_REASONING = UNMARKED.replace(
    "{%- for message in messages %}",
    "{%- for each in messages %}{%- set message = {'role': each.role, 'content': each.content if loop.last else "
    "each.content.split('</think>')[-1] | trim} %}",
)
FOR_ALL = MARKED.replace("== 'assistant'", "!= 'nobody'")
FOR_THE_FIRST = MARKED.replace("== 'assistant'", "== 'assistant' and loop.index0 < 2")
CONTENT_ONLY = MARKED.replace(
    "+ '<|im_end|>\\n' }}\n        {%- endgeneration %}", "}}{%- endgeneration %}{{- '<|im_end|>\\n' }}"
)
LAST_ENDED = MARKED.replace("+ '<|im_end|>", "+ '<|im_end|>' * loop.last + '")
DIVIDED = CONTENT_ONLY.replace("{{- '<|im_end|>\\n' }}", "{% generation %}{{- '<|im_end|>\\n' }}{% endgeneration %}")
END_ONLY = MARKED.replace(
    "{%- generation %}\n            {{- message['content'] +", "{{- message['content'] }}{%- generation %}{{-"
)
WITHOUT_CALLS = template("llama3", marked=False)


@pytest.mark.parametrize(
    ("chat_template", "train_on", "reason"),
    [
        (FOR_ALL, "all", "marks message 0, of the user, as predicted"),
        (FOR_THE_FIRST, "last", "has marks that do not cover message 3"),
        (CONTENT_ONLY, "all", "has no special token that is predicted after what the assistant says"),
        (LAST_ENDED, "all", "has no special token"),
        (UNMARKED.replace("<|im_end|>", "<|end|>"), "all", "has no special token"),
        (UNENDED, "last", "has no special token"),
        (END_ONLY, "all", "has marks that do not cover message 1"),
        (ENDED_AT_THE_END, "all", "writes message 1 differently when others follow it"),
    ],
)
def test_templates_that_are_not_exact_are_refused(chat_template, train_on, reason, tmp_path):
    with pytest.raises(DataError, match=f"^data.format: the chat template {reason}"):
        problems_of(tmp_path, chat_template, TWO_TURNS, train_on=train_on)


def test_a_turn_of_calls_that_nothing_ends_is_refused(tmp_path):
    calls = "{% if message.tool_calls %}{{ message.tool_calls[0].function.name }}{% else %}"
    written = "{{ '<|im_start|>' + message.role + '\n' }}" + calls + "{{ message.content + '<|im_end|>' }}{% endif %}"
    asked = "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
    template = "{% for message in messages %}" + written + "{% endfor %}" + asked
    assert problems_of(tmp_path, template, TWO_TURNS) == [""]
    with pytest.raises(DataError, match=r"no special token that is predicted .* or make the one there special"):
        problems_of(tmp_path, template, [ASK, CALL])


@pytest.mark.parametrize(
    ("chat_template", "messages", "train_on"),
    [
        (FOR_ALL, TWO_TURNS, "last"),
        (DIVIDED, TWO_TURNS, "all"),
        (ENDED_AT_THE_END, TWO_TURNS, "last"),
        (ENDED_AT_THE_END, [ASK, SAY], "all"),
        (WITHOUT_REASONING, [ASK, THOUGHT, ASK, THOUGHT], "last"),
    ],
)
def test_templates_that_are_exact_in_what_is_predicted(chat_template, messages, train_on, tmp_path):
    assert problems_of(tmp_path, chat_template, messages, train_on=train_on) == [""]


def test_an_end_that_a_tokenizer_of_bytes_names_for_unknown_text(tmp_path):
    tokenizer = chat_tokenizer(MARKED)
    tokenizer.unk_token = "<|im_end|>"
    tokenizer.save_pretrained(tmp_path)
    assert PretrainedTokenizer(str(tmp_path)).unknown_token is None


@pytest.mark.parametrize(
    ("asked", "said", "read"),
    [
        ("  Hello\n", "x\n  y", None),
        ("Hello", "  x", r"'[/INST]\n  '"),
        ("Hello", "x\n", r"'\n<|im_end|>\n'"),
    ],
)
def test_special_tokens_that_take_in_spaces(asked, said, read, tmp_path):
    """As those of Phi do: around answers, the template's own newlines may be lost."""
    written = "{% for m in messages %}{{ {'user': '[INST]', 'assistant': '[/INST]'}[m.role] + '\n' + m.content }}"
    prompt = "{% if add_generation_prompt %}{{ '[/INST]\n' }}{% endif %}"
    template = written + "<|im_end|>\n{% endfor %}" + prompt
    messages = [ASK | {"content": asked}, SAY | {"content": said}] * 2
    row = encoder(tmp_path, template, takes_in_spaces=True)({"messages": [messages]})
    if read is not None:
        assert f"reads {read} as" in row["problem"][0]
        return
    first, stop, *_ = row["predicted"][0]
    assert PretrainedTokenizer(str(tmp_path)).decode(row["input_ids"][0][first:stop]) == f"{said}<|im_end|>"


def test_a_message_that_is_left_out_makes_its_conversation_unusable(tmp_path):
    assert problems_of(tmp_path, WITHOUT_CALLS, [ASK, CALL], TWO_TURNS) == [
        "the chat template leaves out message 1, of the role assistant; use one that writes it, or "
        "say in data.messages.roles which of its roles that is",
        "",
    ]


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({"prompt": "{messages}"}, 'format "messages" does not use prompt; remove that, or correct format'),
        ({"format": "plain", "messages": {"column": "chat"}}, 'format "plain" does not use messages'),
        ({"messages": {"roles": {"gpt": "model"}}}, "data.messages.roles"),
    ],
)
def test_fields_of_another_format_are_refused(data, message, tmp_path):
    with pytest.raises(ConfigError, match=message):
        chat_config(tmp_path, [], **data)


@pytest.mark.parametrize(("field", "name"), [("column", "chat"), ("tools", "functions")])
def test_columns_are_named(field, name, tmp_path):
    with pytest.raises(DataError, match=rf"data\.messages\.{field}: no column '{name}'; the data has 'messages'"):
        chat_sources(chat_config(tmp_path, [{"messages": TWO_TURNS}], messages={field: name}))


def test_a_column_has_one_meaning(tmp_path):
    with pytest.raises(DataError, match=r"^data\.messages: messages, tools are not three columns"):
        chat_sources(chat_config(tmp_path, [{"messages": TWO_TURNS}], messages={"system": "messages"}))


def test_a_system_is_text(tmp_path):
    with pytest.raises(DataError, match="line 1: 'system' holds false, which is not text; write text"):
        chat_sources(chat_config(tmp_path, [{"messages": TWO_TURNS, "system": False}]))
