"""The config of this folder's recipes: prompts with their answers, and any causal language model."""

import re
from collections.abc import Iterator
from string import Formatter
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import Field, field_validator, model_validator

from largebatch.config import RecipeConfig, check
from largebatch.config.data import Data, HubOrLocal, Mixable, Tokenized
from largebatch.config.models import Model
from largebatch.config.sections import BelowOne, Evaluation, NonEmptyList, PositiveFloat, PositiveInt, Section, Size
from largebatch.system.repositories import RepositoryKind


class PairData(Data):
    """Prompts with their answers; the answers are predicted, followed by the end-of-text token."""

    block_size: Size
    """Maximum tokens a sample predicts from: a pair's tokens except its last one, or those of all pairs of a pack."""
    packing: bool = False
    """Whether a training sample is a pack: as many consecutive pairs, in their stored order, as `block_size` tokens
    hold. Pairs do not attend to each other, so each has the same loss as alone. `num_train_samples` then counts packs;
    evaluation samples are always single pairs."""

    @property
    def loss_unit(self) -> str:
        return "tokens"


class AdditionData(PairData):
    """The 10,000 sums of two numbers below 100, "12+35=" with the answer "47", as bytes.

    In a fixed random order, the first 9,000 are for training and the last 1,000 for evaluation.
    """

    source: Literal["addition"]
    tokenizer: ClassVar[str] = "bytes"
    prompt: ClassVar[str] = "{prompt}"
    answer: ClassVar[str] = "{answer}"
    format: ClassVar[Literal["plain"]] = "plain"
    on_invalid: ClassVar[Literal["refuse"]] = "refuse"


Role = Literal["system", "developer", "user", "assistant", "function_call", "tool"]
"""A turn of the assistant as "function_call" has calls of functions, as JSON, for its text."""


class Messages(Section):
    """Where conversations are in the data, and which turns of them are predicted."""

    column: str = "messages"
    """Column with the list of a conversation's messages."""
    role: str = "role"
    """Key of a message's role, "from" in ShareGPT's conversations."""
    content: str = "content"
    """Key of a message's text, "value" in ShareGPT's conversations."""
    roles: dict[str, Role] = Field(default_factory=dict)
    """The data's own names of roles and what they mean, such as {"human": "user", "gpt": "assistant", "observation":
    "tool"}."""
    system: str | None = None
    """Column with a text that comes first, as the message of the system; null: "system", if there is such a column."""
    tools: str | None = None
    """Column with the functions that the assistant may call, JSON schemas or their text, which the chat template gets;
    null: "tools", if there is such a column."""
    train_on: Literal["all", "last"] = "all"
    """Turns of the assistant that are predicted."""
    may_omit: list[str] = Field(default_factory=list)
    """Keys of messages, or "tools", whose text the chat template may leave out, such as ["name"]. A conversation with
    any other text that the template does not write is not used."""

    @field_validator("roles")
    @classmethod
    def _calls_are_calls(cls, roles: dict[str, Role]) -> dict[str, Role]:
        for name, role in roles.items():
            if name in ("function_call", "tool_call") and role == "assistant":
                raise ValueError(
                    f'"{name}" as "assistant" would be trained as bare JSON, not as the chat template writes calls; '
                    'write "function_call"'
                )
        return roles


def columns_of(template: str) -> list[str]:
    """The names in braces, in their order."""
    return [name for _, name, _, _ in Formatter().parse(template) if name is not None]


class HubPairs(Mixable, Tokenized, PairData):
    """Prompts with their answers, or conversations, through Hugging Face `datasets`.

    The first `num_train_samples` samples are used; a run prints how many there are.
    """

    prompt: str = ""
    """Template of the model's input, with names of columns in braces, such as "Question: {question}\nAnswer: "; not
    needed if each of `sources` has its own, nor for "messages"."""
    answer: str = ""
    """Template of the text that it learns to write, such as "{answer}"; not needed if each of `sources` has its own,
    nor for "messages"."""
    format: Literal["plain", "chat", "messages"] = "plain"
    """"plain": the tokens of the prompt, those of the answer, and the tokenizer's end-of-text token. "chat": the
    tokenizer's chat template, with the prompt as the user's message; everything that the template writes from the
    assistant's answer on is predicted. "messages": conversations, each written by the chat template as a whole."""
    messages: Messages = Messages()
    """Layout of the conversations, for "messages"."""
    on_invalid: Literal["refuse", "skip"] = "refuse"
    """How to treat pairs that have more than `block_size` tokens, or a prompt or an answer whose columns are all empty,
    and conversations that are too long or damaged: a run prints how many there are, and either does not start or skips
    them."""

    per_source_fields = ("prompt", "answer", "format", "messages", "on_invalid")

    @field_validator("prompt", "answer")
    @classmethod
    def _names_columns(cls, template: str) -> str:
        if re.search(r"\{[^{}]*[.:!\[][^{}]*\}", template.replace("{{", "").replace("}}", "")):
            raise ValueError(f"{template!r} has a column name with ., :, ! or [ in it; rename the column")
        try:
            names = columns_of(template)
        except ValueError as error:
            raise ValueError(
                f"{template!r} is not a template: {error}; a brace itself is written {{{{ or }}}}"
            ) from error
        if not template:  # as written by `model_dump`
            return template
        if "\\n" in template and "\n" not in template:
            raise ValueError(
                f"{template!r} has a backslash and an n where a newline may be meant; in JSON write \\n, in a shell "
                "$'…\\n…', or the whole section as JSON"
            )
        if not names or any(not name or name.isdigit() for name in names):
            raise ValueError(
                f'{template!r} is not a template; write column names in braces, and nothing else in them: "{{answer}}"'
            )
        return template

    @model_validator(mode="after")
    def _has_what_its_format_needs(self) -> Self:
        unused = ("prompt", "answer") if self.format == "messages" else ("messages",)
        given = [name for name in unused if getattr(self, name) not in ("", Messages())]
        if given and self.sources is None:
            raise ValueError(f'format "{self.format}" does not use {given[0]}; remove that, or correct format')
        missing = [name for name in ("prompt", "answer") if not getattr(self, name)]
        if missing and self.sources is None and self.format != "messages":
            raise ValueError(f'{missing[0]} is missing; write a template, such as "{{{missing[0]}}}"')
        if self.format != "plain" and self.tokenizer == "bytes":
            raise ValueError(
                f'format "{self.format}" needs a tokenizer with a chat template, and "bytes" has none; write another '
                'tokenizer, or format "plain" with `prompt` and `answer`'
            )
        return self


class Lora(Section):
    """Low-rank adapters (LoRA, arXiv 2106.09685) through `peft`: only they are trained, and exported at the end."""

    rank: Size
    """Rank of the update of each weight, r in the paper."""
    alpha: PositiveFloat
    """The update is multiplied by alpha / rank."""
    dropout: BelowOne = 0.0
    """Dropout on the adapters' inputs; `peft` has none for experts and routers."""
    target_modules: Literal["all-linear"] | NonEmptyList[str] = "all-linear"
    """Names of the layers that get an adapter, such as ["q_proj", "v_proj"]; "all-linear": all but the output, with
    experts and their routers."""


class AutoCausalLM(Model):
    """Any causal language model of `transformers`: pretrained weights, or random ones.

    The model's own dropout and the noise of its routers are turned off, whatever its configuration says, so that a
    sample's loss depends only on the sample. Text alone is trained on: other parts, such as those for images, are kept
    as they are.
    """

    architecture: Literal["auto"]
    path: str | None = None
    """Local folder, or ID or ID@REVISION on the hub, of the pretrained weights; they are trained in the precision of
    the recipe, whatever their stored precision."""
    config: dict[str, Any] | None = None
    """Instead of `path`, the configuration of a model with random weights, such as {"model_type": "llama",
    "hidden_size": 64}. Settings that training would not use, such as dropout, are refused."""
    lora: Lora | None = None
    """Adapters to train instead of the weights; null trains all weights."""

    frozen_dtype: Literal["fp32", "bf16"] = "fp32"
    """How weights that `lora` freezes are stored. "bf16": those of layers for which autocast casts them to bf16 anyway
    (all but embeddings, norms and biases), so that losses do not change if the model's files are in bf16, too."""

    @property
    def stores_frozen_in_bf16(self) -> bool:
        return self.frozen_dtype == "bf16"

    @property
    def hub_fields(self) -> dict[str, RepositoryKind]:
        return {} if self.path is None else {"path": "model"}

    @property
    def read_in_parts_from(self) -> str | None:
        return self.path

    @property
    def uses_dropout(self) -> bool:
        return self.lora is not None and self.lora.dropout > 0

    @model_validator(mode="after")
    def _pretrained_or_random(self) -> Self:
        if (self.path is None) == (self.config is None):
            raise ValueError("write either path, for pretrained weights, or config, for random ones")
        if self.config is not None and not isinstance(self.config.get("model_type"), str):
            raise ValueError('config needs a model_type, such as "llama"')
        return self


class AnsweredEvaluation(Evaluation):
    """When to evaluate, and whether the model also writes answers; the end of the run is always evaluated."""

    answers: PositiveInt | None = None
    """Number of prompts, from the start of the evaluation set, to which the model writes answers at each evaluation; in
    a conversation, a prompt is all that precedes the assistant's last turn. null: none."""
    max_answer_tokens: PositiveInt = 128
    """The most tokens of such an answer."""


class Config(RecipeConfig):
    """Supervised fine-tuning of a causal language model."""

    data: Annotated[AdditionData | HubPairs, Field(discriminator="source")]
    model: AutoCausalLM
    evaluation: AnsweredEvaluation = AnsweredEvaluation()

    def tiny_data(self) -> dict[str, Any] | None:
        if not isinstance(self.data, HubOrLocal):
            return None
        return {"data": {"source": "addition", "block_size": 32, "num_train_samples": 256, "num_eval_samples": 16}}

    @check
    def _answers_that_are_written(self) -> Iterator[str]:
        if self.evaluation.answers is None:
            yield from self.without_effect("evaluation.max_answer_tokens", "evaluation.answers is null")

    @check
    def _frozen_weights_that_autocast_casts(self) -> Iterator[str]:
        if self.model.stores_frozen_in_bf16 and (self.model.lora is None or self.precision != "bf16"):
            yield 'model.frozen_dtype: "bf16" needs model.lora and precision "bf16"; add them, or write "fp32"'

    @check
    def _norms_in_fp64(self) -> Iterator[str]:
        if self.precision == "fp64":
            yield (
                'precision: "fp64" would not be fp64 throughout: norms of many models of `transformers`, RMSNorm among '
                'them, compute in fp32 whatever their input; write "fp32"'
            )
