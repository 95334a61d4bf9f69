"""What a recipe's JSON may say of its data: one typed section a kind of data set."""

from typing import Literal, Self

from pydantic import model_validator

from largebatch.config.sections import Fraction, NonNegativeInt, PositiveFraction, PositiveInt, Section


class DataFiles(Section):
    """Local files, for data that is not laid out as a data-set repository: of the splits "train" and "validation"."""

    train: str
    """Path or glob of the training files."""
    eval: str
    """Path or glob of the evaluation files."""


class Data(Section):
    """What the plan and the loader need to know of any data set."""

    num_train_samples: PositiveInt
    """Training samples. Stated here so that plans need no data; checked against the data when a run starts."""
    num_eval_samples: PositiveInt
    """Evaluation samples, checked likewise."""
    num_workers: NonNegativeInt = 0
    """Loader processes per training process, and tokenizing ones per machine; 0 does both in the training process."""

    @property
    def loss_unit(self) -> str:
        """What the loss is a mean over: "samples", "tokens", or another plural noun, such as "pixels"."""
        return "samples"

    @property
    def loss_weight_per_sample(self) -> int | None:
        """What each sample counts in the loss, in that unit; None if samples count unequally, as their source says."""
        return 1 if self.loss_unit == "samples" else self.tokens_per_sample

    @property
    def tokens_per_sample(self) -> int | None:
        """Target tokens of each sample; None where samples have none, or unequal numbers."""
        return None


class HubOrLocal(Data):
    """Where Hugging Face `datasets` finds the data: a hub id, a local folder, or local files."""

    source: Literal["datasets"]
    path: str
    """Hub id or local folder; with `data_files`, the format: "parquet", "json", "csv", "text" or "imagefolder"."""
    name: str | None = None
    """Configuration of the data set on the hub, where it has several."""
    data_files: DataFiles | None = None
    """Local files, with their format in `path`."""
    train_split: str = "train"
    """Split to train on, or a part of it, such as "train[1%:]"; with `data_files`, of "train" or "validation"."""
    eval_split: str = "validation"
    """Split to evaluate on, likewise."""

    @model_validator(mode="after")
    def _files_are_read(self) -> Self:
        """A recipe's splits of a data set on the hub stay where only `data_files` are overridden."""
        if self.data_files is None:
            return self
        files = {"train": self.data_files.train, "validation": self.data_files.eval}
        read = set()
        for field, usual in (("train_split", "train"), ("eval_split", "validation")):
            split = getattr(self, field)
            # As in "train[:1%]+validation".
            names = {part.partition("[")[0].strip() for part in split.split("+")}
            if not names <= files.keys():
                raise ValueError(f'{field} is {split!r}, and data_files are "train" and "validation"; write "{usual}"')
            read |= {files[name] for name in names}
        for (name, file), field in zip(files.items(), ("train", "eval"), strict=True):
            if file not in read:
                raise ValueError(
                    f"data_files.{field} would not be read: train_split is {self.train_split!r}, eval_split "
                    f'{self.eval_split!r}; write {field}_split "{name}", or the same files for both'
                )
        return self


class DigitsData(Data):
    """The 1,797 handwritten digits of 8 x 8 pixels that ship with scikit-learn; every fifth one is for evaluation."""

    source: Literal["digits"]
    image_size: PositiveInt = 32
    """Side in pixels that the 8 x 8 images are enlarged to; a multiple of 8."""
    num_train_samples: Literal[1437] = 1437
    num_eval_samples: Literal[360] = 360
    num_classes: Literal[10] = 10
    num_channels: Literal[1] = 1

    @model_validator(mode="after")
    def _whole_enlargement(self) -> Self:
        if self.image_size % 8:
            raise ValueError(f"image_size {self.image_size} is not a multiple of 8; write 8, 16, 24 or 32")
        return self


class HubImages(HubOrLocal):
    """Labeled images through Hugging Face `datasets`."""

    image_column: str = "image"
    """Column that holds the encoded images."""
    label_column: str = "label"
    """Column that holds the class indices."""
    num_classes: PositiveInt
    """Number of classes."""
    image_size: PositiveInt
    """Side in pixels of the crops the model sees."""
    train_augmentation: Literal["inception_crop", "padded_crop", "none"]
    """"inception_crop": a random crop of 8 to 100 % of the area and aspect ratio 3/4 to 4/3, and a random flip
    (Szegedy et al. 2015, as in Goyal et al. 2017, 5.1); "padded_crop", for small images: a random crop of the image
    padded by an eighth of its side in black (4 of 32 pixels), and a random flip (He et al. 2016, 4.2); "none": the
    evaluation's center crop."""
    mean: tuple[Fraction, Fraction, Fraction]
    """Mean of each color over the training set, on a 0 to 1 scale."""
    std: tuple[PositiveFraction, PositiveFraction, PositiveFraction]
    """Standard deviation of each color, on the same scale."""
    num_channels: Literal[3] = 3


class TextData(Data):
    """Text as samples of tokens."""

    samples: Literal["blocks", "documents"] = "blocks"
    """"blocks": documents are joined and cut into blocks of `block_size` tokens, each token being predicted once.
    "documents": each document is a sample, cut off after `block_size` tokens; padding behind shorter ones is not
    predicted, so that samples have unequal numbers of target tokens."""
    block_size: PositiveInt
    """Tokens per sample; for "documents", at most."""

    @property
    def loss_unit(self) -> str:
        return "tokens"

    @property
    def tokens_per_sample(self) -> int | None:
        return self.block_size if self.samples == "blocks" else None


class PydocData(TextData):
    """The Python reference that ships with every Python (`pydoc_data.topics`), as bytes; its documents are paragraphs.

    The text differs between Python versions, so exactly the first num_train_samples + num_eval_samples samples are
    used; the evaluation samples are the last ones.
    """

    source: Literal["pydoc"]


class HubText(HubOrLocal, TextData):
    """Text documents through Hugging Face `datasets`, tokenized, with an end-of-text token after each (where a
    tokenizer has none, its separator).

    The first `num_train_samples` samples are used; a run says how many there are.
    """

    text_column: str = "text"
    """Column that holds the documents."""
    tokenizer: str
    """Hub id or local folder of a `transformers` tokenizer, or "bytes"; `largebatch train-tokenizer` makes one."""
    attention: Literal["block", "document"] = "block"
    """What a token of a block attends to: "block", all tokens before it; "document", those of its own document alone,
    with positions that begin at 0 in each document, and in each block."""
