"""The chat template of a tokenizer, and which part of a conversation's text each turn of the assistant is.

A conversation is written once, as a whole. A turn is where the template's own marks, `{% generation %}`, say. Without
marks, it is what the template writes up to and including it, minus what it writes before it with the prompt to answer.
"""

import re
import signal
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NoReturn

from transformers.utils.chat_template_utils import render_jinja_template

from largebatch.data.tokenizer import PretrainedTokenizer, Tokenizer
from largebatch.errors import DataError, reason_of

from .encoding import InexactTemplate, Unusable

Conversation = list[dict[str, Any]]
Tools = list[dict[str, Any]] | None
Span = tuple[int, int]
"""The start and end of a part of a text."""

HAS_MARKS = re.compile(r"\{%-?\s*generation\s*-?%\}")
TAG = re.compile(r"(</?\w+>)")
REMEDY = (
    "write {% generation %} … {% endgeneration %} around what the assistant says in the tokenizer's chat_template.jinja"
)
WITHOUT_TODAY = "{% set strftime_now = the_date_of_today %}\n"
"""Takes from a template the function for today's date: many write a date of their own then, the same every day."""
WEIGHTS = (
    "weight",  # OpenAI
    "train",  # axolotl, as the next two
    "training",
    "train_detail",
    "loss",  # ms-swift, as the next one
    "loss_scale",
    "trainable",
    "is_trainable",
    "train_on_turn",
    "loss_mask",
    "loss_weight",
)
"""Keys with which other programs choose the messages that are predicted."""
MASKS = ("masked", "ignore")
"""Keys with which other programs, such as torchtune, choose answers that are not."""
NO_TEXT = ("role", "content", *WEIGHTS, *MASKS)
"""Keys of messages without a text, besides the content, which `ChatTemplate.turns` compares."""
CALL_NO_TEXT = ("id", "type")
"""Keys of calls that need not be written."""


MAX_SECONDS = 10  # of the processor, in which a template writes one conversation
MAX_CHARACTERS = 10**7


@contextmanager
def _time_limit() -> Iterator[None]:
    """Raise InexactTemplate in the block after `MAX_SECONDS`; only the main thread, in which templates run, can."""

    def interrupt(*_: object) -> NoReturn:
        raise InexactTemplate(
            f"the chat template takes more than {MAX_SECONDS} s for a conversation; correct its loops"
        )

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGVTALRM, interrupt)
    signal.setitimer(signal.ITIMER_VIRTUAL, MAX_SECONDS)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, before)


class ChatTemplate:
    """A chat template that writes conversations in which the assistant has these tools.

    Raises:
        DataError: The tokenizer has none.
    """

    def __init__(self, tokenizer: Tokenizer, tools: Tools = None):
        assert isinstance(tokenizer, PretrainedTokenizer)
        try:
            self.template = WITHOUT_TODAY + tokenizer.tokenizer.get_chat_template(tools=tools)
        except ValueError as error:
            remedy = "use the tokenizer of a chat model, or add chat_template.jinja to a copy of its folder"
            raise DataError(f"data.tokenizer: it has no chat template: {reason_of(error)}; {remedy}") from error
        self.special_tokens = tokenizer.tokenizer.special_tokens_map
        self.special_token_in = tokenizer.special_token_in
        self.tools = tools
        self.has_marks = HAS_MARKS.search(self.template) is not None

    def write(self, conversation: Conversation, **options: Any) -> tuple[str, list[Span]]:
        """The text, and the parts of it that are marked."""
        try:
            with _time_limit():
                texts, marks = render_jinja_template(
                    [conversation],
                    chat_template=self.template,
                    return_assistant_tokens_mask=self.has_marks,
                    **{"tools": self.tools, **self.special_tokens, **options},
                )
        except InexactTemplate:
            raise
        # A template is a program, which raises exceptions of many kinds.
        except Exception as error:
            raise Unusable(f"the chat template fails: {reason_of(error)}") from error
        if len(texts[0]) > MAX_CHARACTERS:
            raise Unusable(f"the chat template writes more than {MAX_CHARACTERS:,} characters")
        return texts[0], marks[0] if self.has_marks else []

    def turns(self, conversation: Conversation, numbers: list[int]) -> tuple[str, list[Span]]:
        """The text of a conversation, and what the assistant writes in the messages of these numbers.

        Args:
            conversation: The messages.
            numbers: Numbers of the assistant's messages: of all, or of the last one.

        Raises:
            InexactTemplate: It is not clear what the assistant writes.
            Unusable: The template cannot write the conversation.
        """
        text, spans = self._find(conversation, numbers)
        self._check(conversation, numbers)
        # Templates strip texts. What else they rewrite would be lost, such as reasoning before "</think>", "/think" in
        # the middle of a path, or lines and indentation. Some write results of tools as JSON, and earlier answers
        # without their reasoning.
        answers = _written("".join(text[start:end] for start, end in spans))
        whole = _written(text)
        place = 0
        for number, message in enumerate(conversation):
            content = _written(message.get("content", ""))
            found = 0
            if number in numbers:
                found = answers.find(content, place)
                place = found + len(content)
            elif message["role"] in ("system", "developer", "user"):
                found = whole.find(content)
            if found < 0:
                raise Unusable(
                    f"the chat template does not write all of message {number}, {message['content'][:60]!r}; use one "
                    "that does, with lines and spaces as they are, or write what it leaves out, such as reasoning, "
                    "under a key that it reads"
                )
        return text, spans

    def _find(self, conversation: Conversation, numbers: list[int]) -> tuple[str, list[Span]]:
        text, marks = self.write(conversation)
        if self.has_marks:
            if any(message["role"] == "assistant" for message in conversation[: numbers[0]]):
                _, earlier = self.write(conversation[: numbers[0]])
                marks = marks[len(earlier) :]
            return text, marks
        spans = []
        for number in numbers:
            if number == 0:
                raise Unusable("it begins with the assistant, and nothing before it can be answered")
            before, _ = self.write(conversation[:number], add_generation_prompt=True)
            through, _ = self.write(conversation[: number + 1])
            if not through.startswith(before) or through == before:
                raise InexactTemplate(
                    f"the chat template does not write message {number} after its prompt to answer "
                    f"(add_generation_prompt); {REMEDY}"
                )
            if not text.startswith(through):
                raise InexactTemplate(
                    f"the chat template writes message {number} differently when others follow it; {REMEDY}, or "
                    '"last" in data.messages.train_on'
                )
            spans.append((len(before), len(through)))
        return text, spans

    def left_out(self, conversation: Conversation, text: str) -> Iterator[str]:
        """Yield what makes no difference to the text of a conversation: keys of messages, and "tools".

        Raises:
            Unusable: A result is not in its call's place, and the template does not write which that is.
        """
        if self.tools and self._writes(text, conversation, tools=None):
            yield "tools"
        calls = [call for message in conversation for call in message.get("tool_calls", ())]
        called = {
            "tool_call_id": [call.get("id") for call in calls],
            "name": [call.get("function", call)["name"] for call in calls],
        }

        def makes_no_difference(holder: dict[str, Any], key: str) -> bool:
            value = holder[key]
            holder[key] = type(value)()
            is_same = self._writes(text, conversation)
            holder[key] = value
            return is_same

        for number, (message, known) in enumerate(zip(conversation, _known_from_calls(conversation), strict=True)):
            for holder, key, name in _texts_of(message):
                value = holder[key]
                if message.get(name, "") == known.get(name) or not makes_no_difference(holder, key):
                    continue
                if message["role"] != "tool" or value not in called.get(name, ()):
                    yield name
                # A name that only one call has says whose result it is, too.
                elif called["name"].count(message.get("name")) != 1 or makes_no_difference(message, "name"):
                    raise Unusable(
                        f"message {number} has the {name} {value!r} of a call whose result belongs elsewhere, and the "
                        "chat template does not write it; put one result for each call, in the order of the calls"
                    )

    def _writes(self, text: str, conversation: Conversation, **options: Any) -> bool:
        """Whether this is the text of a conversation."""
        try:
            return self.write(conversation, **options)[0] == text
        except Unusable:
            return False

    def _check(self, conversation: Conversation, numbers: list[int]) -> None:
        """Compare what is found in a conversation of the same form, whose texts occur once, with what must be."""
        conversation = [_stand_in(number, message) for number, message in enumerate(conversation)]
        text, spans = self._find(conversation, numbers)
        found = "\n".join(text[start:end] for start, end in spans)
        for number, message in enumerate(conversation):
            content = _unique(number, "content")
            is_predicted = number in numbers
            if not is_predicted and content in found:
                raise InexactTemplate(
                    f"the chat template marks message {number}, of the {message['role']}, as predicted; {REMEDY}"
                )
            if is_predicted and found.count(content) < text.count(content):
                raise InexactTemplate(f"the chat template has marks that do not cover message {number}; {REMEDY}")
            written = found if is_predicted else text
            if any(message.get(key) and _unique(number, key) not in written for key in ("content", "tool_calls")):
                raise Unusable(
                    f"the chat template leaves out message {number}, of the role {message['role']}; use one that "
                    "writes it, or say in data.messages.roles which of its roles that is"
                )
        # The model must learn to stop. Marks may divide a turn.
        ends = {end for _, end in spans}.difference(start for start, _ in spans)
        if not all(self.special_token_in(STAND_IN.split(text[:end])[-1]) for end in ends):
            raise InexactTemplate(
                "the chat template has no special token that is predicted after what the assistant says, so the model "
                "would not stop; write one there, such as eos_token, inside of any marks, in the tokenizer's "
                "chat_template.jinja, or make the one there special in tokenizer.json"
            )


def _written(text: str) -> str:
    """A text without white space at its ends, and around tags such as "</think>", to which templates add lines."""
    return "".join(map(str.strip, TAG.split(text)))


def _unique(number: int, key: str) -> str:
    """The text that stands in for the content of a message, or for the names of its functions."""
    return f"{key}{number}text"


STAND_IN = re.compile(r"(?:content|tool_calls)\d+text")


def _stand_in(number: int, message: dict[str, Any]) -> dict[str, Any]:
    """A message of the same form, with a text and names of functions that no other message has."""
    stand_in = dict(message)
    if message.get("content"):
        stand_in["content"] = _unique(number, "content")
    if calls := message.get("tool_calls"):
        name = {"name": _unique(number, "tool_calls")}
        # The function may be an object of its own in a call.
        stand_in["tool_calls"] = [
            call | ({"function": call["function"] | name} if "function" in call else name) for call in calls
        ]
    return stand_in


def _known_from_calls(conversation: Conversation) -> Iterator[dict[str, Any]]:
    """Yield, for each message, the keys whose text follows from the calls before it, with that text.

    The "name" of a result is that of the called function. Its "tool_call_id" follows if it answers the first call that
    still waits for a result.
    """
    waiting: list[dict[str, Any]] = []
    for message in conversation:
        known = {}
        if message["role"] == "assistant":
            calls = message.get("tool_calls")
            waiting = [*waiting, *calls] if calls else []
        elif message["role"] == "tool" and waiting:
            identity = message.get("tool_call_id")
            first = waiting[0]
            call = next((each for each in waiting if each.get("id") == identity), first)
            known["name"] = call.get("function", call)["name"]
            # Of a single call without an ID, a result may have any.
            is_only = len(waiting) == 1 and "id" not in first
            if first.get("id") == identity or is_only:
                known["tool_call_id"] = identity
            waiting.remove(call)
        yield known


def _texts_of(fields: dict[str, Any], no_text: Sequence[str] = NO_TEXT) -> Iterator[tuple[dict[str, Any], str, str]]:
    """Yield, for each text of a message, of its calls and their functions: the object that has it, under which key, and
    that key's name in `may_omit`."""
    for key, value in fields.items():
        if key == "tool_calls":
            for call in value:
                yield from _texts_of(call, CALL_NO_TEXT)
        elif key == "function" and isinstance(value, dict):
            for holder, inner, name in _texts_of(value, CALL_NO_TEXT):
                # "name" in `may_omit` is that of a message, not that of a function.
                yield holder, inner, "tool_calls" if name == "name" else name
        elif (has_text(value) or (value and key == "tool_call_id")) and key not in no_text:
            yield fields, key, key


def has_text(value: Any) -> bool:
    """Whether a value of JSON is a text, or may hold one."""
    return bool(value.strip() if isinstance(value, str) else isinstance(value, list | dict) and value)
