"""Prompts with their answers, which are predicted, as tokens.

A pair is the prompt's tokens, the answer's, and the tokens that end it. No token spans both, and a prompt has the same
tokens as when the model answers it: they are tokenized apart or, by a tokenizer that would add something to the answer,
together.
"""

from decimal import Decimal
from itertools import chain
from typing import Any

from largebatch.data.columns import Use
from largebatch.data.tokenizer import PretrainedTokenizer, Tokenizer, encode_parts
from largebatch.errors import DataError

from .chat_template import ChatTemplate
from .config import AdditionData, HubPairs, columns_of
from .encoding import Encoder, InexactTemplate, Unusable


class PairEncoder(Encoder):
    """Turns rows with the columns of prompts and answers into tokens.

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
        super().__init__(dict.fromkeys(of_answer, Use("answer")) | dict.fromkeys(of_prompt, Use("prompt")), tokenizer)
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

    def encode(self, *values: Any) -> tuple[list[int], list[int]]:
        prompt, answer = self._texts(*values)
        if self.template:
            return self._encode_chat(self.template, prompt, answer)
        if isinstance(self.tokenizer, PretrainedTokenizer) and self.tokenizer.adds_to_parts:
            tokens, (count,) = encode_parts(self.tokenizer, prompt + answer, [len(prompt)])
        else:
            # The tokenizer ends each text, which is left to `self.end`.
            (*before, _), (*after, _) = self.tokenizer.encode([prompt, answer])
            tokens = before + after
            count = len(before)
        tokens = [*self.begin, *tokens, *self.end]
        start = len(self.begin) + count
        if not start:
            raise Unusable("an empty prompt or answer")
        return tokens, [start, len(tokens)]

    def _encode_chat(self, template: ChatTemplate, prompt: str, answer: str) -> tuple[list[int], list[int]]:
        assert isinstance(self.tokenizer, PretrainedTokenizer)
        conversation = [{"role": "user", "content": prompt}, {"role": "assistant", "content": answer}]
        try:
            text, spans = template.turns(conversation, [1])
        except (InexactTemplate, Unusable) as error:
            raise type(error)(f'{error}; or write format "plain", with templates of your own') from error
        return encode_parts(self.tokenizer, text, [*chain(*spans)])

    def _texts(self, *values: Any) -> tuple[str, str]:
        """A prompt, and the text to predict after it."""
        row = {name: _as_text(name, value) for name, value in zip(self.uses, values, strict=True)}
        for names in self.columns:
            if not any(row[name].strip() for name in names):
                raise Unusable("an empty prompt or answer")
        for name, text in row.items():
            self.check_text(name, text)
        return self.prompt.format(**row), self.answer.format(**row)


def _as_text(name: str, value: Any) -> str:
    """A column's value as text; empty if there is none."""
    if value is None:
        return ""
    # Python would write the zero of a column with ten decimals as 0E-10.
    if isinstance(value, Decimal):
        return format(value, "f")
    if isinstance(value, str | int | float) and not isinstance(value, bool):
        return str(value)
    raise DataError(
        f"data: the column {name!r} has {str(value)[:60]!r}, a {type(value).__name__}, neither text nor a number; "
        "convert it to a column of text, and name that in data.prompt or data.answer"
    )
