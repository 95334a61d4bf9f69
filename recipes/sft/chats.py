"""Conversations as rows of tokens, of which the assistant's turns are predicted."""

from collections.abc import Mapping
from itertools import chain
from typing import Any, get_args

from largebatch.data.columns import Use
from largebatch.data.text_rows import parse_json
from largebatch.data.tokenizer import PretrainedTokenizer, Tokenizer, encode_parts
from largebatch.errors import DataError

from .chat_template import MASKS, WEIGHTS, ChatTemplate, Conversation, Tools, has_text
from .config import HubPairs, Messages, Role
from .encoding import Encoder, Unusable, all_in, short

FILLED = "have null, with which Parquet fills the keys that other rows have; write their JSON as text"


class ChatEncoder(Encoder):
    """Turns rows with conversations into tokens of the model's tokenizer.

    Raises:
        DataError: The tokenizer has no chat template, or a column is named twice.
    """

    def __init__(self, data: HubPairs, tokenizer: Tokenizer):
        layout = self.layout = data.messages
        uses = {
            layout.column: Use("messages.column", "any"),
            layout.tools or "tools": Use("messages.tools", "any", is_optional=not layout.tools),
            layout.system or "system": Use("messages.system", "string", is_optional=not layout.system),
        }
        if len(uses) < 3:
            raise DataError(f"data.messages: {', '.join(uses)} are not three columns; write each name once")
        super().__init__(uses, tokenizer)
        self.block_size = data.block_size
        # Raises an error if there is none.
        ChatTemplate(tokenizer)

    def encode(self, messages: Any, tools: Any, system: Any) -> tuple[list[int], list[int]]:
        """As any encoder; of a conversation that is too long, no spans are sought: their time grows with its square."""
        assert isinstance(self.tokenizer, PretrainedTokenizer)
        conversation = conversation_of(messages, system, self.layout)
        functions = tools_of(tools)
        numbers = [number for number, message in enumerate(conversation) if message["role"] == "assistant"]
        if not numbers:
            raise Unusable('it has no message with the role "assistant", so nothing is predicted')
        if self.layout.train_on == "last":
            numbers = numbers[-1:]
        for number, message in enumerate(conversation):
            _check_weights(f"message {number}", message, number in numbers)
            self.check_text(f"message {number}", message)
        self.check_text("tools", functions)
        template = ChatTemplate(self.tokenizer, functions)
        whole, _ = template.write(conversation)
        (*tokens, _) = self.tokenizer.encode([whole])[0]
        if len(tokens) - 1 > self.block_size:
            return tokens, []
        text, spans = template.turns(conversation, numbers)
        if lost := set(template.left_out(conversation, text)).difference(self.layout.may_omit):
            raise Unusable(
                f"the chat template does not write {', '.join(sorted(lost))}; use a template that does, "
                'remove them (in calls, write "arguments"), or name them in data.messages.may_omit'
            )
        return encode_parts(self.tokenizer, text, [*chain(*spans)])


def _check_weights(where: str, message: Mapping[str, Any], is_predicted: bool) -> None:
    """Raise Unusable if a message says that it is trained on, or not, and that is not what `train_on` says."""
    for key, value in message.items():
        if key in WEIGHTS:
            is_wanted = value
        elif key in MASKS and message["role"] == "assistant":
            is_wanted = not value
        else:
            continue
        if isinstance(value, str):
            raise Unusable(f"{where} has {key} {short(value)}; write a number, true or false")
        if is_wanted != is_predicted:
            raise Unusable(
                f"{where} has {key} {short(value)}, but is {'' if is_predicted else 'not '}predicted: "
                f"messages.train_on chooses all turns of the assistant, or the last, not single ones; remove {key}"
            )


def conversation_of(value: Any, system: Any, layout: Messages) -> Conversation:
    """The messages of a row, or of its JSON, with the names of keys and roles that chat templates know.

    The text of the row's column for the system, if it has any, comes first.
    """
    messages = _from_json(layout.column, value)
    if not isinstance(messages, list) or not messages:
        raise Unusable(f"{layout.column} is {short(messages)}; write a list of messages")
    if messages is value and any(
        _has_null(each.get("arguments")) for each in all_in(messages) if isinstance(each, dict)
    ):
        raise Unusable(f"the arguments of its calls {FILLED}")
    conversation = [_message(f"message {number}", message, layout) for number, message in enumerate(messages)]
    if not isinstance(system, str | None):
        raise Unusable(f"the system's column has {short(system)}; write text")
    if system and system.strip():
        if conversation[0]["role"] != "system":
            return [{"role": "system", "content": system}, *conversation]
        if conversation[0].get("content") != system:
            raise Unusable("the system has a message and another text in its column; keep one of them")
    return conversation


def _message(where: str, value: Any, layout: Messages) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise Unusable(f"{where} is {short(value)}; write an object with {layout.role} and {layout.content}")
    # As ShareGPT has "from" and "value".
    if layout.role not in value:
        keys = f"{', '.join(value)}; name its keys in data.messages.role and data.messages.content"
        raise Unusable(f"{where} has no {layout.role}, only {keys}")
    named = value[layout.role]
    content = value.get(layout.content)
    role = layout.roles.get(named, named) if isinstance(named, str) else named
    if role not in get_args(Role):
        known = f"write one of {', '.join(get_args(Role))}, or what it means in data.messages.roles"
        raise Unusable(f"{where} has the {layout.role} {short(named)}; {known}")
    # `datasets` fills keys that only other rows have with null, which templates would write as text.
    apart = (layout.role, layout.content)
    message = {key: item for key, item in value.items() if item is not None and key not in apart}
    if message.get("role", role) not in (role, named):
        raise Unusable(f"{where} has {layout.role} and another role in role; keep one of them")
    message["role"] = role
    if (message.get("content") or content) != content:
        raise Unusable(f"{where} has {layout.content} and another text in content; keep one of them")
    if role == "function_call":
        if message.get("tool_calls"):
            raise Unusable(f"{where} is a function_call and has tool_calls; keep one of them")
        calls = _calls(where, _from_json(f"the {layout.content} of {where}", content))
        functions = [{"type": "function"} | (call if "function" in call else {"function": call}) for call in calls]
        return message | {"role": "assistant", "tool_calls": functions}
    if "function_call" in message:
        called = 'is an earlier form of calls; write "tool_calls": [{"type": "function", "function": …}] instead'
        raise Unusable(f"{where} has function_call, which {called}")
    if "tool_calls" in message:
        message["tool_calls"] = _calls(where, message["tool_calls"])
    is_needed = not (role == "assistant" and message.get("tool_calls"))
    if content is None and not is_needed:
        return message
    text = _text_of(content)
    if not isinstance(text, str) or (is_needed and role in ("user", "assistant") and not text.strip()):
        raise Unusable(f"{where} has the {layout.content} {short(content)}; write text, or parts with only that")
    return message | {"content": text}


def _text_of(content: Any) -> Any:
    """Parts of the type "text" one after the other, as templates that know parts write them; anything else as it is."""
    is_text = isinstance(content, list) and all(
        isinstance(part, dict)
        and part.get("type") == "text"
        and isinstance(part.get("text"), str)
        and {key for key, value in part.items() if has_text(value)} <= {"type", "text", "cache_control"}
        for part in content
    )
    return "".join(part["text"] for part in content) if is_text else content


def _calls(where: str, value: Any) -> list[dict[str, Any]]:
    """Calls of functions, with arguments as objects, as templates expect them, instead of their JSON."""
    calls = []
    for call in value if isinstance(value, list) else [value]:
        function = call.get("function", call) if isinstance(call, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise Unusable(f"{where} has the tool_calls {short(value)}; write a list of functions")
        arguments = _from_json(f"the arguments of {where}", function.get("arguments"))
        # Some programs write "" or null for none.
        if not isinstance(arguments, dict | None) and arguments != "":
            raise Unusable(f"{where} has the arguments {short(arguments)}; write an object, or its JSON")
        function = function | {"arguments": arguments or {}}
        calls.append(call | {"function": function} if "function" in call else function)
    return calls


def tools_of(value: Any) -> Tools:
    """A row's tools, which may be JSON; None if there are none."""
    tools = _from_json("tools", value)
    if tools is value and _has_null(tools):
        raise Unusable(f"tools {FILLED}")
    if tools and not (isinstance(tools, list) and all(isinstance(tool, dict) for tool in tools)):
        raise Unusable(f"tools are {short(tools)}; write a list of JSON schemas of functions")
    return tools or None


def _has_null(value: Any) -> bool:
    return any(None in each.values() for each in all_in(value) if isinstance(each, dict))


def _from_json(what: str, value: Any) -> Any:
    try:
        return parse_json(value) if isinstance(value, str) and value else value
    except (ValueError, RecursionError) as error:
        if value.startswith(("['", "{'", "[{'")):
            raise Unusable(
                f"{what}, {short(value)}, is as Python shows it, not JSON; write it with json.dumps"
            ) from error
        raise Unusable(f"{what}, {short(value)}, cannot be read as JSON: {error}") from error
