"""The config of this folder's recipes: pairs of images and texts, or of texts; two towers; the loss between them."""

from collections.abc import Iterator
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import Field, model_validator

from largebatch.config import RecipeConfig, check
from largebatch.config.data import DigitsData, EncodedImages, HubOrLocal, Mixable, Patterns, Tokenized
from largebatch.config.models import LargeModel, Transformer
from largebatch.config.sections import NonEmptyList, NonNegativeInt, NumLayers, PositiveFloat, Section, Size

MAX_PIXELS = 2**30 // 4 // 3
"""Above this, Pillow warns of a file that may be a decompression bomb (`PIL.Image.MAX_IMAGE_PIXELS`)."""
DIGIT_NAMES = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")


class Texts(Tokenized):
    """How the texts of pairs become tokens."""

    tokenizer: str = "bytes"
    """Local folder, or ID or ID@REVISION on the hub, of a `transformers` tokenizer, or "bytes"; docs/data.md shows how
    to train one."""
    max_tokens: Size
    """Tokens of a text, with those that begin and end it; what is longer is cut off."""


class NamedDigits(DigitsData, Texts):
    """Handwritten digits with their names in words, such as "a photo of the number seven"."""


class CaptionedImages(Mixable, EncodedImages, Texts):
    """Images with their captions, in WebDataset's tars (`"path": "webdataset"`, `"image_column": "jpg;png;webp"`,
    `"caption_column": "txt"`) or through Hugging Face `datasets`: Parquet, or CSV and JSON with the paths of images,
    which are relative to the folder that the job starts in."""

    caption_column: str = "caption"
    """Column with the captions; in tars the ending of the files that hold them, such as "txt"."""
    train_augmentation: Literal["random_crop", "none"] = "random_crop"
    """Augmentation of training images. "random_crop": a random crop of 90 to 100 % of the area with an aspect ratio of
    3/4 to 4/3, as in open_clip. "none": the center crop of the evaluation, whose side is the image's shorter side."""
    max_pixels: Annotated[int, Field(ge=1, le=MAX_PIXELS)] = MAX_PIXELS
    """The most pixels that an image may have; larger ones are not used, because decoding them takes long and much
    memory."""
    on_invalid: Literal["refuse", "skip"] = "refuse"
    """How to treat samples without a caption, or with an image that is missing, damaged or too large: a run prints how
    many there are, and either does not start or skips them. With "skip", an image that is damaged later is replaced by
    another sample, the same one in each run with this seed, with a warning."""

    per_source_fields = ("image_column", "caption_column", "on_invalid")

    @model_validator(mode="after")
    def _captions_are_text(self) -> Self:
        if self.path == "webdataset" and any(each.endswith("json") for each in self.caption_column.split(";")):
            raise ValueError(
                f'caption_column "{self.caption_column}": a .json file would be read as a whole, with all else that it '
                'says of the image, as its caption; write the ending of files that hold only that, such as "txt"'
            )
        return self


Images = NamedDigits | CaptionedImages


class Headings(Texts):
    """The language reference that ships with every Python (`pydoc_data.topics`): the headings above a paragraph, and
    the paragraph. The text differs between Python versions; exactly the first num_train_samples + num_eval_samples
    pairs are used, of which evaluation has evenly spaced ones."""

    source: Literal["pydoc"]


class TextPairs(Mixable, Texts):
    """Pairs of texts through Hugging Face `datasets`: a query, the passage that answers it, and hard negatives."""

    source: Literal["texts"]  # type: ignore[assignment]
    query_column: str = "query"
    """Column with the queries."""
    passage_column: str = "positive"
    """Column with the passages that answer them."""
    negative_columns: tuple[str, ...] = ()
    """Columns with passages that do not: the hard negatives of each query."""
    query_prefix: str = ""
    """What every query begins with, such as "query: "."""
    passage_prefix: str = ""
    """What every passage begins with, such as "passage: "."""

    per_source_fields = ("query_column", "passage_column", "query_prefix", "passage_prefix")

    @model_validator(mode="after")
    def _columns_differ(self) -> Self:
        columns = [self.query_column, self.passage_column, *self.negative_columns]
        for name in columns:
            if columns.count(name) > 1:
                raise ValueError(
                    f"query_column, passage_column and negative_columns have {name!r} twice; name different columns"
                )
        return self


class Tower(Transformer):
    """A transformer over the patches of an image, or over tokens."""


class ImageText(LargeModel):
    """A tower for images and one for texts."""

    text: Tower
    """The tower of texts."""
    vocab_size: Size
    """Rows of the embedding of tokens; at least the tokenizer's number of tokens."""
    end_of_text: NonNegativeInt
    """The tokenizer's token that ends a text, at which CLIP takes its features: 0 for bytes, 49407 for CLIP's."""
    features: Size
    """Size of the vectors that are compared."""


class TransformerTowers(ImageText):
    """A Vision Transformer and a transformer for texts, as in `transformers`."""

    architecture: Literal["clip", "siglip"]
    """"clip" (`CLIPModel`): both towers project to `features`; texts are read from left to right. "siglip"
    (`SiglipModel`): images are pooled by attention; `features` is the width of the towers."""
    image: Tower
    """The tower of images."""
    patch_size: Size
    """Side in pixels of the patches that an image is cut into."""


class AttentionPooledResNet(Section):
    """CLIP's ResNet, whose last stage is pooled by attention with heads of 64 channels."""

    width: Annotated[Size, Field(multiple_of=2)]
    """Channels of the first stage's 3 x 3 convolutions, which double in each stage: 64 for a ResNet-50."""
    depths: Annotated[list[NumLayers], Field(min_length=4, max_length=4)]
    """Blocks of the four stages: [3, 4, 6, 3] for a ResNet-50."""


class ResNetTowers(ImageText):
    """A ResNet and a transformer for texts, as CLIP's RN50."""

    architecture: Literal["clip_resnet"]
    image: AttentionPooledResNet
    """The tower of images."""

    patch_size: ClassVar[int] = 32
    """Side in pixels of what becomes one position of the last stage."""

    @property
    def uses_batch_norm(self) -> bool:
        return True


class SharedText(Transformer, LargeModel):
    """One BERT for both sides, as in `transformers` (`BertModel`); a text's vector is the mean over its tokens."""

    architecture: Literal["bert"]
    vocab_size: Size
    """Rows of the embedding of tokens; at least the tokenizer's number of tokens."""
    max_positions: Size = 512
    """Learned positions; at least `data.max_tokens`."""

    @property
    def features(self) -> int:
        """Size of the vectors that are compared."""
        return self.hidden_size


class Loss(Section):
    """The loss between all pairs of the global batch."""

    name: Literal["clip", "one_way", "sigmoid"]
    """"clip": InfoNCE in both directions (Radford et al. 2021, arXiv 2103.00020). "one_way": from the first to the
    second of a pair and its hard negatives (Karpukhin et al. 2020, arXiv 2004.04906). "sigmoid": each pair alone
    (Zhai et al. 2023, arXiv 2303.15343)."""
    temperature: PositiveFloat
    """Divides the cosines; its initial value if it is learned. The papers': 0.07 for CLIP, 0.1 for SigLIP, 0.01 for
    E5."""
    learned: bool
    """Whether the temperature is trained, as one parameter, which "bert" does not have."""
    bias: float = 0.0
    """Initial bias of "sigmoid", which is trained: -10 in the paper, where almost all pairs are negative."""
    min_temperature: PositiveFloat = 0.01
    """A learned temperature stays above this: CLIP's is never under 0.01."""
    duplicates: Literal["negatives", "left_out"] = "left_out"
    """What pairs that share an image or a text are to each other. "left_out": neither positive nor negative."""


class LabeledImages(Section):
    """Images of known classes, such as ImageNet's validation set, which are not trained on."""

    path: Literal["imagefolder", "webdataset", "parquet", "csv", "json"]
    """Their format, as for `image_classification`."""
    files: Patterns
    """File, folder or glob, or a list of them; {000..041} in a path stands for 42 numbers."""
    image_column: str = "image"
    """Column with the images; in tars the ending of their names, such as "jpg"."""
    label_column: str = "label"
    """Column with the class indices; in tars the ending of the files that hold them, such as "cls"."""


class ZeroShot(Section):
    """Classification by the names of classes: that of the nearest name, which is a mean over templates."""

    class_names: list[str]
    """The name of each class, in the order of the labels."""
    templates: NonEmptyList[Annotated[str, Field(pattern=r"\{\}")]]
    """Texts with {} for the name, such as "a photo of a {}."."""
    images: LabeledImages | None = None
    """The images, which `evaluation.sets.zero_shot` says when to classify; null: the evaluation images of digits."""


class Config(RecipeConfig):
    """Contrastive learning of two towers."""

    data: Annotated[Images | Headings | TextPairs, Field(discriminator="source")]
    model: Annotated[TransformerTowers | ResNetTowers | SharedText, Field(discriminator="architecture")]
    loss: Loss
    zero_shot: ZeroShot | None = None

    free_on_resume = ("zero_shot",)
    further_sets = ("zero_shot",)

    @property
    def vectors_per_sample(self) -> int:
        """An image and its text; or a query, its passage and hard negatives."""
        return 2 + (len(self.data.negative_columns) if isinstance(self.data, TextPairs) else 0)

    @property
    def coupled_features(self) -> int:
        return self.vectors_per_sample * self.model.features

    def tiny_data(self) -> dict[str, Any] | None:
        if not isinstance(self.data, HubOrLocal):
            return None
        if isinstance(self.model, SharedText):
            data = {"source": "pydoc", "num_train_samples": 512, "num_eval_samples": 64, "max_tokens": 32}
            return {"data": data, "model.vocab_size": 256}
        # A ResNet's last stage has four positions of these pixels.
        size = 2 * self.model.patch_size if isinstance(self.model, ResNetTowers) else 32
        data = {"source": "digits", "image_size": size, "max_tokens": 32}
        without: dict[str, Any] = {"zero_shot": None, "evaluation.sets": {}} if self.zero_shot else {}
        return {"data": data, "model.vocab_size": 256, "model.end_of_text": 0, **without}

    @check
    def _models_of_the_data(self) -> Iterator[str]:
        data = self.data
        model = self.model
        if isinstance(data, Images) != isinstance(model, ImageText):
            yield 'model.architecture: "bert" is for pairs of texts, the others are for images; change it or data'
        elif isinstance(data, Images) and not isinstance(model, SharedText) and data.image_size % model.patch_size:
            size = f"data.image_size: {data.image_size}"
            yield f"{size} is not a multiple of {model.patch_size}, the side of a patch; change it"
        if isinstance(model, SharedText) and self.loss.learned:
            yield "loss.learned: a BERT has no parameter for a temperature; write false"
        if isinstance(model, SharedText) and data.max_tokens > model.max_positions:
            yield f"data.max_tokens: {data.max_tokens} is more than model.max_positions; write fewer"
        if isinstance(model, ImageText) and model.architecture != "siglip" and model.end_of_text == 2:
            # It takes 2 for the mark of an earlier release, which wrote it for any token.
            yield (
                "model.end_of_text: with 2, `CLIPModel` would read a text's features at its largest token instead of "
                "its end; use a tokenizer with another end of text"
            )
        if model.architecture == "siglip" and model.features != model.image.hidden_size:
            yield f"model.features: it is the width of siglip's image tower; write {model.image.hidden_size}"

    @check
    def _fitting_loss(self) -> Iterator[str]:
        if (self.loss.name == "sigmoid") != (self.model.architecture == "siglip"):
            yield 'loss.name: "sigmoid" and model.architecture "siglip" go together; write both, or neither'
        if self.loss.name != "sigmoid":
            yield from self.without_effect("loss.bias", 'only "sigmoid" has one')
        if self.loss.name == "sigmoid" and self.loss.duplicates == "left_out":
            yield 'loss.duplicates: "sigmoid" tells each pair alone, so equal texts are negatives; write "negatives"'
        if not self.loss.learned:
            yield from self.without_effect("loss.min_temperature", "loss.learned is false")
        elif self.loss.temperature < self.loss.min_temperature:
            yield f"loss.temperature: {self.loss.temperature:g} is below min_temperature; write more"
        if self.vectors_per_sample > 2 and self.loss.name != "one_way":
            yield 'data.negative_columns: only "one_way" compares with hard negatives; write it as loss.name'

    @check
    def _names_of_all_classes(self) -> Iterator[str]:
        zero_shot = self.zero_shot
        has_images = zero_shot is not None and zero_shot.images is not None
        if ("zero_shot" in self.evaluation.sets) != has_images:
            yield 'evaluation.sets: "zero_shot" and zero_shot.images go together; write both, or neither'
        if zero_shot is None:
            return
        if not isinstance(self.data, NamedDigits):
            if not has_images or not isinstance(self.data, Images):
                yield "zero_shot: this data has no classes; write zero_shot.images for captioned images, or remove it"
        elif has_images:
            yield "zero_shot.images: digits have classes and one color; remove it"
        elif len(zero_shot.class_names) != len(DIGIT_NAMES):
            yield f"zero_shot.class_names: {len(zero_shot.class_names)} names for {len(DIGIT_NAMES)} classes"
