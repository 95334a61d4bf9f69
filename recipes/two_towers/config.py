"""The config of this folder's recipes: pairs of images and texts."""

from typing import Annotated, ClassVar, Literal

from pydantic import Field

from largebatch.config.data import EncodedImages, Mixable

MAX_PIXELS = 2**30 // 4 // 3
"""Above this, Pillow warns of a file that may be a decompression bomb (`PIL.Image.MAX_IMAGE_PIXELS`)."""


class CaptionedImages(Mixable, EncodedImages):
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

    per_source_fields: ClassVar[tuple[str, ...]] = ("image_column", "caption_column", "on_invalid")
