"""What a conversation has is in the text, or the template is said not to write it."""

import json

import pytest
from test_chats import ASK, CALL, MARKED, SAY, THOUGHT, UNMARKED, encoder, problems_of

from chat_templates import template

TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {}}}]
WRITES_ALL = (
    "{{ tools | tojson if tools else '' }}{% for message in messages %}<|im_start|>{{ message.role }}\n"
    "{{ message.reasoning_content }}{{ message.tool_calls | tojson if message.tool_calls else '' }}"
    "{{ message.content }}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@pytest.mark.parametrize(
    ("message", "lost"),
    [
        (SAY | {"thinking": "It is north.", "name": "B"}, "name, thinking"),
        (SAY | {"metadata": {"lang": "en"}, "seconds": 3, "empty": " "}, "metadata"),
    ],
)
def test_text_that_the_template_does_not_write(message, lost, tmp_path):
    rows = {"messages": [[ASK, SAY], [ASK, message]]}
    assert problems_of(tmp_path, UNMARKED, *rows["messages"]) == [
        "",
        f"the chat template does not write {lost}; use a template that does, "
        'remove them (in calls, write "arguments"), or name them in data.messages.may_omit',
    ]
    allowed = encoder(tmp_path, UNMARKED, may_omit=lost.split(", "))(rows)
    assert allowed["problem"] == ["", ""]
    assert allowed["input_ids"][0] == allowed["input_ids"][1]


def test_text_that_the_template_writes(tmp_path):
    assert problems_of(tmp_path, WRITES_ALL, [ASK, SAY | {"reasoning_content": "It is north."}]) == [""]


# As DeepSeek-R1's: no turn keeps what was thought before it.
THE_MARKED = "{%- generation %}\n            {{- message['content']"
SPLIT = MARKED.replace(THE_MARKED, THE_MARKED + ".split('</think>')[-1] | trim")


def test_a_part_of_an_answer_that_the_template_does_not_write(tmp_path):
    stripped = SAY | {"content": " Very\ngood.\n"}
    rows = [[ASK, THOUGHT, ASK, stripped], [ASK, SAY, THOUGHT | {"role": "user"}, THOUGHT]]
    read, problem = problems_of(tmp_path, SPLIT, *rows, train_on="last")
    assert read == ""
    assert "does not write all of message 3, '<think>" in problem


def test_a_part_of_what_the_user_says_that_the_template_does_not_write(tmp_path):
    """As some take "/think" out of a prompt, wherever it is."""
    without = UNMARKED.replace("message['content']", "message['content'].replace('/think', '')")
    assert without != UNMARKED
    told = problems_of(tmp_path, without, [ASK | {"content": "Open /thinking"}, SAY], [ASK, SAY])
    assert "does not write all of message 0, 'Open /thinking'; use one that does" in told[0]
    assert told[1] == ""


CODE = " def f():\n    return  1\n"


@pytest.mark.parametrize("change", [".split() | join(' ')", ".replace('\n    ', '\n')", ".replace('  ', ' ')"])
def test_lines_and_spaces_that_the_template_does_not_write(change, tmp_path):
    without = UNMARKED.replace("message['content']", f"(message['content']{change})")
    rows = [[ASK, SAY | {"content": CODE}], [ASK | {"content": CODE}, SAY], [ASK, SAY]]
    told = problems_of(tmp_path, without, *rows)
    assert "does not write all of message 1, ' def f" in told[0]
    assert "does not write all of message 0, ' def f" in told[1]
    assert told[2] == ""


@pytest.mark.parametrize("change", [" | trim", ".strip().replace('</think>', '\n</think>\n\n')"])
def test_lines_and_spaces_at_ends_and_around_tags_may_change(change, tmp_path):
    other = UNMARKED.replace("message['content']", f"(message['content']{change})")
    thought = SAY | {"content": f"<think>Hm.</think>{CODE}"}
    assert problems_of(tmp_path, other, [ASK | {"content": CODE}, thought, ASK, SAY | {"content": CODE}]) == [""]


def test_no_template_writes_the_date_of_today(tmp_path):
    dated = "{{ strftime_now('%Y') if strftime_now is defined else '2024' }}" + UNMARKED
    fixed = "2024" + UNMARKED
    rows = {"messages": [[ASK, SAY]]}
    assert encoder(tmp_path, dated)(rows) == encoder(tmp_path, fixed)(rows)
    assert encoder(tmp_path, fixed)(rows)["problem"] == [""]


def test_tools_and_arguments_that_the_template_does_not_write(tmp_path):
    call = CALL | {"tool_calls": [{"function": {"name": "f", "arguments": {"town": "Oslo"}}}]}
    names_only = WRITES_ALL.replace("tools | tojson if tools", "'' if tools").replace(
        "s | tojson", "s[0].function.name"
    )
    (problem,) = problems_of(tmp_path, names_only, [ASK, call], tools=[TOOLS])
    assert "does not write arguments, tools;" in problem
    assert problems_of(tmp_path, WRITES_ALL, [ASK, call], tools=[TOOLS]) == [""]


def test_nulls_of_other_rows_are_not_trained(tmp_path):
    """Objects in a column of Parquet all have the same keys; text in JSON has its own."""

    def called(arguments):
        call = {"function": {"name": "f", "arguments": arguments}, "id": None}
        return [ASK, CALL | {"tool_calls": [call]}]

    filled = {"town": "Oslo", "zip": None}
    tools = [{"type": "function", "function": {"name": "f", "parameters": {"zip": None}}}]
    null = "have null, with which Parquet fills the keys that other rows have; write their JSON as text"
    rows = [called(filled), called({"in": [filled]}), called(json.dumps(filled)), json.dumps(called(filled))]
    in_calls = f"the arguments of its calls {null}"
    assert problems_of(tmp_path, WRITES_ALL, *rows) == [in_calls, in_calls, "", ""]
    told = problems_of(tmp_path, WRITES_ALL, *[called({})] * 2, tools=[tools, json.dumps(tools)])
    assert told == [f"tools {null}", ""]


@pytest.mark.parametrize(
    ("call", "lost"),
    [
        ({"type": "function", "function": {"name": "f", "parameters": {"town": "Oslo"}}}, "parameters"),
        ({"function": {"name": "f", "arguments": {}}, "extra_content": "north"}, "extra_content"),
        ({"index": 0, "id": "c1", "function": {"name": "f", "arguments": "{}", "thought": None}, "extra": None}, None),
    ],
)
def test_fields_of_a_call_that_the_template_does_not_write(call, lost, tmp_path):
    called = CALL | {"tool_calls": [*CALL["tool_calls"], call]}
    turn = {"role": "function_call", "content": json.dumps(call)}
    for problem in problems_of(tmp_path, template("qwen"), [ASK, called], [ASK, turn]):
        assert (f"does not write {lost}; " in problem) if lost else (problem == ""), problem


@pytest.mark.parametrize("turn", ["tool_calls", "function_call"])
def test_arguments_of_a_call_are_an_object(turn, tmp_path):
    """No arguments, as some programs write them, are an empty one."""

    def called(function):
        if turn == "function_call":
            return [ASK, {"role": turn, "content": json.dumps(function)}]
        return [ASK, CALL | {"tool_calls": [{"type": "function", "function": function}]}]

    none, *others = ({"name": "f"} | each for each in ({}, *({"arguments": none} for none in ("", None, "null", "{}"))))
    wrong = [{"name": "f", "arguments": value} for value in ("[]", 5, '"{}"', False, [])]
    encoded = encoder(tmp_path, template("qwen"))({"messages": [*map(called, [none, *others, *wrong])]})
    tokens = encoded["input_ids"][0]
    assert encoded["input_ids"] == [tokens] * 5 + [[]] * 5
    told = [
        f"message 1 has the arguments {each}; write an object, or its JSON" for each in ("[]", 5, '"{}"', "false", "[]")
    ]
    assert encoded["problem"] == [""] * 5 + told


def test_results_whose_order_does_not_say_whose_they_are(tmp_path):
    """The template writes neither ids nor names of results."""
    calls = [{"id": name, "function": {"name": name, "arguments": {}}} for name in "fg"]
    of_f, of_g = ({"role": "tool", "content": "cold", "tool_call_id": name, "name": name} for name in "fg")
    named_f, named_g = ({"role": "tool", "content": "cold", "name": name} for name in "fg")
    results = [[of_f, of_g], [of_g, of_f], [of_f, of_f], [of_f, of_g, of_g], [named_f, named_g], [named_g, named_f]]
    rows = [[ASK, CALL | {"tool_calls": calls}, *each, SAY] for each in results]
    for may_omit in ([], ["name", "tool_call_id"]):
        problems = problems_of(tmp_path, template("qwen"), *rows, may_omit=may_omit)
        told = [
            f"message {number} has the tool_call_id '{identity}' of a call whose result belongs elsewhere, and the "
            "chat template does not write it; put one result for each call, in the order of the calls"
            for number, identity in ((2, "g"), (3, "f"), (4, "g"))
        ]
        assert problems == ["", *told, "", told[0].replace("tool_call_id", "name")]
    numbered = [call | {"id": number} for number, call in enumerate(calls, 1)]
    swapped = [{"role": "tool", "content": "cold", "tool_call_id": number} for number in (2, 1)]
    (problem,) = problems_of(tmp_path, template("qwen"), [ASK, CALL | {"tool_calls": numbered}, *swapped, SAY])
    assert problem == told[0].replace("'g'", "2")
    # Those that no call has may be left out.
    unknown = [ASK, CALL | {"tool_calls": calls}, of_f | {"tool_call_id": "x", "name": "y"}, SAY]
    assert "does not write name, tool_call_id;" in problems_of(tmp_path, template("qwen"), unknown)[0]
    assert problems_of(tmp_path, template("qwen"), unknown, may_omit=["name", "tool_call_id"]) == [""]
    with_ids = template("qwen").replace("message.content", "message.content ~ message.tool_call_id")
    assert problems_of(tmp_path, with_ids, rows[1]) == [""]
    with_names = with_ids.replace("tool_call_id", "name")
    of_same = [ASK, CALL | {"tool_calls": [call | {"function": calls[0]["function"]} for call in calls]}, of_g, of_f]
    same_names = [message | {"name": "f"} if "name" in message else message for message in of_same]
    assert problems_of(tmp_path, with_names, rows[1], [*same_names, SAY]) == ["", told[0]]


def test_a_message_has_one_text(tmp_path):
    rows = [
        [{"role": "user", "text": "Hello", "content": other}, {"role": "assistant", "text": "Good."}]
        for other in (None, "", "Hello", "<b>lost</b>")
    ]
    (*same, problem) = problems_of(tmp_path, MARKED, *rows, content="text")
    assert same == ["", "", ""]
    assert "message 0 has text and another text in content" in problem


def test_a_message_has_one_role_and_one_call(tmp_path):
    say = {"from": "gpt", "value": "Good."}
    call = {"from": "function_call", "value": '{"name": "f"}'}
    turns = [[{"from": "human", "value": "Hello", "role": role}, say] for role in (None, "human", "user", "system")] + [
        [{"from": "human", "value": "Hello"}, call | {"tool_calls": CALL["tool_calls"]}]
    ]
    layout = {"column": "conversations", "role": "from", "content": "value"}
    roles = {"human": "user", "gpt": "assistant"}
    (*same, system, twice) = problems_of(tmp_path, template("qwen"), *turns, **layout, roles=roles)
    assert same == ["", "", ""]
    assert "message 0 has from and another role in role; keep one of them" in system
    assert "message 1 is a function_call and has tool_calls; keep one of them" in twice


def test_the_column_of_the_system_comes_first(tmp_path):
    system = {"role": "system", "content": "Use tools."}
    tokens = encoder(tmp_path, MARKED)({"messages": [[system, ASK, SAY]]})["input_ids"]
    rows = {"messages": [[ASK, SAY], [system, ASK, SAY], [system, ASK, SAY]], "system": ["Use tools.", None, "Others."]}
    found = encoder(tmp_path, MARKED)(rows)
    assert found["input_ids"] == [*tokens, *tokens, []]
    assert "the system has a message and another text in its column" in found["problem"][2]


def test_a_turn_of_function_call_is_a_call_and_not_its_json(tmp_path):
    """As LLaMA-Factory's ShareGPT rows have it, equal to OpenAI's form."""
    row = r"""[
      {"from": "human", "value": "Oslo?"},
      {"from": "function_call", "value": "{\"name\": \"f\", \"arguments\": {\"town\": \"Oslo\"}}"},
      {"from": "observation", "value": "cold"},
      {"from": "gpt", "value": "Cold."}
    ]"""
    messages = """[
      {"role": "user", "content": "Oslo?"},
      {"role": "assistant", "tool_calls": [
        {"type": "function", "function": {"name": "f", "arguments": {"town": "Oslo"}}}
      ]},
      {"role": "tool", "content": "cold"},
      {"role": "assistant", "content": "Cold."}
    ]"""
    names = {"human": "user", "gpt": "assistant", "observation": "tool"}
    layout = {"column": "conversations", "role": "from", "content": "value", "roles": names}
    expected = encoder(tmp_path, template("qwen"))({"messages": [messages]})
    assert expected["problem"] == [""]
    assert encoder(tmp_path, template("qwen"), **layout)({"conversations": [row]}) == expected
    with pytest.raises(ValueError, match='"function_call" as "assistant" would be trained as bare JSON'):
        encoder(tmp_path, MARKED, roles={"function_call": "assistant"})
