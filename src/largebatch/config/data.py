"""The data sections that tasks share: one typed section per kind of data set."""

import re
from collections.abc import Mapping
from itertools import product
from typing import Annotated, ClassVar, Literal, Self

from pydantic import ConfigDict, Field, ValidationError, model_validator

from largebatch.batch.mixture import Mixture, whole_weights
from largebatch.batch.timeline import NO_EPOCHS
from largebatch.config.problems import explained
from largebatch.config.sections import (
    Fraction,
    NonEmptyList,
    NonNegativeFloat,
    PositiveFraction,
    PositiveInt,
    Section,
    Size,
)
from largebatch.errors import UserError
from largebatch.system.repositories import RepositoryKind

FORMATS = ("parquet", "json", "csv", "text", "imagefolder", "webdataset")
"""Of local files: `datasets` has others, such as "pandas", whose files are code."""
Patterns = str | NonEmptyList[str]
"""A path or glob, or several, with ranges of numbers as in "{00000..00041}.tar"."""
MAX_SHARDS = 10**6  # of a pattern
SHARDS = re.compile(r"(.*)\{(\d+)\.\.(\d+)\}(.*)", re.DOTALL)


def listed(patterns: str | list[str]) -> list[str]:
    """Several paths or globs, even if only one is given; "{008..011}" in them stands for 008, 009, 010 and 011.

    Raises:
        UserError: These are not the first and the last of some numbers.
    """
    if not isinstance(patterns, str):
        return [path for pattern in patterns for path in listed(pattern)]
    match = SHARDS.fullmatch(patterns)
    if match is None:
        return [patterns]
    before, first, last, after = match.groups()
    numbers = [f"{number:0{len(first)}}" for number in range(int(first), int(last) + 1)[:MAX_SHARDS]]
    if numbers[-1:] != [last]:
        raise UserError(
            f"{{{first}..{last}}} in {patterns!r} is not a range of at most {MAX_SHARDS:,} numbers; write the lowest "
            "and the highest as in the names of the files, such as {00000..00041}"
        )
    return listed([before + number + after for number in numbers])


class DataFiles(Section):
    """Local files for the splits "train" and "validation", for data that is not laid out as a dataset repository."""

    train: Patterns
    """File, folder or glob of the training files, or a list of them; {000..041} in a path stands for 42 numbers."""
    eval: Patterns
    """File, folder or glob of the evaluation files, or a list of them, in the same notation."""

    @property
    def by_split(self) -> dict[str, list[str]]:
        """The paths, folders and globs by the names of their splits."""
        return {"train": listed(self.train), "validation": listed(self.eval)}


def names_in(split: str) -> set[str]:
    """The names of the splits in an expression such as "train[:1%]+validation"."""
    return {part.partition("[")[0].strip() for part in split.split("+")}


class Data(Section):
    """The base of every data section: what the plan and the loader need to know about the data set."""

    is_counted: ClassVar[bool] = False
    """Whether `largebatch prepare RECIPE --write` counts the samples; otherwise, they follow from the recipe."""

    num_train_samples: PositiveInt
    """Number of training samples; stated so that plans need no data, and compared with the data when a run starts."""
    num_eval_samples: PositiveInt
    """Number of evaluation samples, compared in the same way."""
    num_workers: Annotated[int, Field(ge=0, le=1024)] = 0
    """Number of worker processes: per training process for loading, per machine for tokenizing. With 0, the training
    process does both."""

    @property
    def samples_per_epoch(self) -> int:
        """Samples after which the training set starts over."""
        return self.num_train_samples

    def sections(self) -> Mapping[str, "Data"]:
        """The section of each source of a mixture, by its name; empty if there are no sources."""
        return {}

    @property
    def mixture(self) -> Mixture | None:
        """The sources and their shares, if there are several."""
        return None

    @property
    def loss_unit(self) -> str:
        """The unit that the loss is a mean over: "samples", "tokens", or another plural noun, such as "pixels"."""
        return "samples"

    @property
    def loss_weight_per_sample(self) -> int | None:
        """The weight of each sample in the loss, in that unit; None if it differs and the source reports it."""
        return 1 if self.loss_unit == "samples" else self.tokens_per_sample

    @property
    def tokens_per_sample(self) -> int | None:
        """Target tokens of each sample; None if samples have none, or different numbers of them."""
        return None


class HubOrLocal(Data):
    """Data opened with Hugging Face `datasets`, from a hub id, a local folder or local files."""

    is_counted = True

    source: Literal["datasets"]
    path: str
    """Local folder, or ID or ID@REVISION on the hub; with `data_files`, the format: "parquet", "json", "csv", "text" or
    "imagefolder". A run stays at the commit that a tag or branch has at its start."""
    config_name: str | None = None
    """Configuration of the data set on the hub, if it has several."""
    data_files: DataFiles | None = None
    """Local files, with their format in `path`."""
    train_split: str = "train"
    """Split to train on, or a part of it, such as "train[1%:]"; with `data_files`, "train" or "validation"."""
    eval_split: str = "validation"
    """Split to evaluate on, in the same notation."""

    prepare: Literal["allow", "require"] | None = None
    """What a job does with data that `largebatch prepare` has not prepared. "allow": the job downloads and tokenizes
    it while its GPUs wait. "require": the job is refused. null: the job prepares at most 1 GiB."""

    @property
    def hub_fields(self) -> dict[str, RepositoryKind]:
        return super().hub_fields | ({"path": "dataset"} if self.data_files is None else {})

    @property
    def evaluates_training_rows(self) -> bool:
        """Whether both splits surely have rows in common; different parts of one, as "train[1%:]", are not compared."""
        files = self.data_files.by_split if self.data_files else {}
        for train, evaluation in product(self.train_split.split("+"), self.eval_split.split("+")):
            is_certain = "[" not in train or "[" not in evaluation or train == evaluation
            read = [{name, *files.get(name, ())} for part in (train, evaluation) for name in names_in(part)]
            if is_certain and read[0] & read[1]:
                return True
        return False

    @model_validator(mode="after")
    def _files_are_read(self) -> Self:
        """Refuse splits meant for a data set on the hub, which stay when `data_files` alone is overridden."""
        if self.data_files is None:
            return self
        if self.config_name is not None:
            raise ValueError(f"config_name {self.config_name!r} has no effect on data_files; remove it")
        if self.path and self.path not in FORMATS:
            raise ValueError(
                f"path {self.path!r} is not a format of data_files that is read; write one of {', '.join(FORMATS)}"
            )
        files = self.data_files.by_split
        names = names_in(self.train_split) | names_in(self.eval_split)
        read = [files[name] for name in names & files.keys()]
        if not names <= files.keys() or any(patterns not in read for patterns in files.values()):
            raise ValueError(
                f"train_split {self.train_split!r} and eval_split {self.eval_split!r} do not read both data_files; "
                'write "train" and "validation", or parts of them'
            )
        return self


class MixedSource(Section):
    """A source of a mixture. It may also have fields of the section, which then differ for this source."""

    model_config = ConfigDict(extra="allow")

    name: Annotated[str, Field(pattern=r"^[\w.+-]+$")]
    """Name of the source, in the plan and in evaluations: letters, digits, and _ . + -."""
    weight: NonNegativeFloat | None = None
    """Share of the training samples, in proportion to the other weights; 0 for a source that is only evaluated."""


class Mixable(HubOrLocal):
    """Data that may be mixed from several sources."""

    path: str = ""
    """Local folder, or ID or ID@REVISION on the hub; with `data_files`, the format: "parquet", "json", "csv" or "text";
    not needed if each of `sources` has its own."""
    sources: Annotated[list[MixedSource], Field(min_length=2)] | None = None
    """Sources to mix, such as [{"name": "web", "weight": 0.8, "path": …}, {"name": "code", "weight": 0.2, "path": …}].
    Each source inherits the fields of this section and may override them. It must have its own "num_train_samples" and
    "num_eval_samples", which add up to those of the section. Each global batch has its exact share of each source, and
    each source goes through its own shuffled epochs."""
    weights: Literal["by_size"] | None = None
    """"by_size": the weight of each source is its number of training samples, and an epoch reads each sample of all
    sources once, as if they were one. null: sources have weights, and there are no epochs."""

    per_source_fields: ClassVar[tuple[str, ...]] = ()
    """Fields, besides those of every `HubOrLocal`, that sources may give for themselves; all share the others."""
    other_kinds: ClassVar[Mapping[str, type[Data]]] = {}
    """The sections of sources that `datasets` does not read, by their `source`."""

    def sections(self) -> Mapping[str, Data]:
        return {
            source.name: self._section(source, f"sources[{number}]") for number, source in enumerate(self.sources or ())
        }

    def _section(self, source: MixedSource, place: str) -> Data:
        own = dict(source.model_extra or {})
        kinds = {self.source: type(self), **self.other_kinds}
        name = own.get("source", self.source)
        kind = kinds.get(str(name))
        if kind is None:
            known = ", ".join(kinds)
            raise ValueError(f"{place}.source ({source.name}): {name!r} is unknown here; write one of {known}")
        common = type(self).model_fields.keys() - {*HubOrLocal.model_fields, *self.per_source_fields}
        for field in sorted(own.keys() & common):
            remedy = "must be the same for all sources; write it outside of them"
            raise ValueError(f"{place}.{field} ({source.name}): {remedy}")
        of_a_mixture = {"sources", "weights", "num_train_samples", "num_eval_samples"}
        shared = (self.model_fields_set & kind.model_fields.keys()) - of_a_mixture
        try:
            return kind.model_validate({name: getattr(self, name) for name in shared} | own)
        except ValidationError as error:
            schema = kind.model_json_schema()
            fields = {name: field for name, field in schema["properties"].items() if name not in common}
            schema["properties"] = MixedSource.model_json_schema()["properties"] | fields
            told = [f"{place}{at and f'.{at}'} ({source.name}): {what}" for at, what in explained(error, schema)]
            raise ValueError("; ".join(told)) from None

    @property
    def samples_per_epoch(self) -> int:
        return NO_EPOCHS if self.sources and self.weights is None else self.num_train_samples

    @property
    def mixture(self) -> Mixture | None:
        if not self.sources:
            return None
        sections = self.sections()
        sizes = tuple(section.num_train_samples for section in sections.values())
        weights = sizes if self.weights else [source.weight or 0.0 for source in self.sources]
        return Mixture(tuple(sections), sizes, whole_weights(weights))

    @model_validator(mode="after")
    def _sources_fit(self) -> Self:
        if not self.path and not self.sources:
            raise ValueError("path is missing; write a hub id, a local folder or, with data_files, a format")
        if self.sources is None:
            if self.weights:
                raise ValueError("weights: is for sources; write sources, or remove it")
            return self
        for number, source in enumerate(self.sources):
            if (source.weight is None) == (self.weights is None):
                raise ValueError(f'sources[{number}].weight: write either that or "weights": "by_size"')
        names = [source.name for source in self.sources]
        if len(set(names)) < len(names):
            raise ValueError(f"sources: duplicate name in {', '.join(names)}; give each source a name of its own")
        if self.weights is None and not any(source.weight for source in self.sources):
            raise ValueError("sources: all weights are 0; give each source to train on a weight above 0")
        sizes = {"num_train_samples", "num_eval_samples"}
        if len({section.model_dump_json(exclude=sizes) for section in self.sections().values()}) < len(names):
            raise ValueError("sources: two of them read the same data; remove one, and add their weights")
        given = self.model_dump(exclude_defaults=True).keys() - {"source", *Data.model_fields}
        for field in sorted(given.intersection(*(source.model_extra or {} for source in self.sources))):
            raise ValueError(f"{field} has no effect, because each source has its own; remove it here")
        return self


class DigitsData(Data):
    """The 1,797 handwritten digits of 8 x 8 pixels that ship with scikit-learn; every fifth is for evaluation."""

    source: Literal["digits"]
    image_size: Annotated[Size, Field(multiple_of=8)] = 32
    """Side in pixels that the 8 x 8 images are enlarged to; a multiple of 8."""
    num_train_samples: Literal[1437] = 1437
    num_eval_samples: Literal[360] = 360
    num_classes: Literal[10] = 10
    num_channels: ClassVar[int] = 1
    # Over all 1,797 images, on a scale from 0 to 1.
    mean: ClassVar[tuple[float, ...]] = (0.3053,)
    std: ClassVar[tuple[float, ...]] = (0.3762,)


class EncodedImages(HubOrLocal):
    """Encoded images, each with a label or a text, in tars or opened with Hugging Face `datasets`."""

    image_column: str = "image"
    """Column with the encoded images; in tars (`"path": "webdataset"`), the ending of their names, such as "jpg", or
    several: "jpg;png"."""
    image_size: Size
    """Side in pixels of the crops that the model sees."""
    mean: tuple[Fraction, Fraction, Fraction]
    """Mean of each color over the training set, on a scale from 0 to 1."""
    std: tuple[PositiveFraction, PositiveFraction, PositiveFraction]
    """Standard deviation of each color, on the same scale."""
    num_channels: ClassVar[int] = 3


class HubImages(EncodedImages):
    """Labeled images, opened with Hugging Face `datasets`."""

    label_column: str = "label"
    """Column with the class indices; in tars the ending of the files that hold them, such as "cls"."""
    num_classes: Size
    """Number of classes."""
    train_augmentation: Literal["inception_crop", "padded_crop", "none"]
    """Augmentation of training images. "inception_crop": a random crop of 8 to 100 % of the area with an aspect ratio
    of 3/4 to 4/3, and a random flip (Szegedy et al. 2015, as in Goyal et al. 2017, 5.1). "padded_crop", for small
    images: a random crop of the image padded with black by an eighth of its side (4 of 32 pixels), and a random flip
    (He et al. 2016, 4.2). "none": the center crop of the evaluation."""


class TextData(Data):
    """Text: documents are joined and cut into blocks, which are the samples, and each token is predicted once."""

    block_size: Size
    """Tokens per sample."""

    @property
    def loss_unit(self) -> str:
        return "tokens"

    @property
    def tokens_per_sample(self) -> int:
        return self.block_size


class PydocData(TextData):
    """The language reference that ships with every Python (`pydoc_data.topics`), as bytes.

    The text differs between Python versions, so exactly the first num_train_samples + num_eval_samples samples are
    used; the last of them are the evaluation samples.
    """

    source: Literal["pydoc"]
    tokenizer: ClassVar[str] = "bytes"


class Tokenized(Data):
    """Data with texts, which a tokenizer turns into tokens."""

    tokenizer: str
    """Local folder, or ID or ID@REVISION on the hub, of a `transformers` tokenizer, or "bytes"; docs/data.md shows how
    to train one."""

    @property
    def hub_fields(self) -> dict[str, RepositoryKind]:
        return super().hub_fields | ({} if self.tokenizer == "bytes" else {"tokenizer": "model"})


class TokenizedText(Tokenized, TextData):
    """Documents as tokens; the first `num_train_samples` samples are used, and a run prints how many there are."""

    is_counted = True

    attention: Literal["block", "document"] = "block"
    """Tokens that a token of a block attends to: "block", all tokens before it; "document", only those of its own
    document, with positions that start at 0 in each document and in each block."""


class MegatronText(TokenizedText):
    """Documents that Megatron-LM has tokenized, in pairs of .bin and .idx files, which are read as they are: in their
    stored order, without adding end-of-text tokens."""

    source: Literal["megatron"]
    train: Patterns
    """Path or glob of the training files, without .bin or .idx, or a list of them."""
    eval: Patterns
    """Path or glob of the evaluation files, in the same way."""


class HubText(Mixable, TokenizedText):
    """Text documents, opened with Hugging Face `datasets` and tokenized. Each is followed by the end-of-text token, or
    by the separator if there is none. The first `num_train_samples` samples are used; a run prints how many there
    are."""

    text_column: str = "text"
    """Column with the documents."""

    per_source_fields: ClassVar[tuple[str, ...]] = ("text_column",)
    other_kinds: ClassVar[Mapping[str, type[Data]]] = {"megatron": MegatronText}
