"""An image as a viewer shows it: all of its bits, over white, upright, and in sRGB.

A crop is turned and colored like its whole image. So `opaque` is for the image, and `finished` for the small crop.
"""

import io
import struct
from contextlib import suppress
from functools import lru_cache

from PIL import Image, ImageCms, ImageOps, PngImagePlugin
from PIL.ExifTags import Base

# Editors keep compressed text of many MiB in a file; the limit of all its text remains.
PngImagePlugin.MAX_TEXT_CHUNK = PngImagePlugin.MAX_TEXT_MEMORY


def opaque(image: Image.Image) -> Image.Image:
    """An image of mode L, RGB or CMYK, over white where it is transparent; a JPEG remains to be decoded.

    Raises:
        ValueError: The file does not say what is white, or Pillow would misread it.
    """
    if image.format in ("JPEG", "MPO"):
        return image
    gray = image.mode.startswith("I;")
    tiles = image.tile[:1]
    misread = False
    if image.format == "TIFF":
        tags = image.tag_v2
        bits = tags.get(Base.BitsPerSample, (1,))
        # Pillow takes 12 bits for 16, and 16 bits whose 0 is white for those whose 0 is black.
        gray = gray and (bits, tags.get(Base.PhotometricInterpretation)) == ((16,), 1)
        # It takes the bytes in a plane of 16 bits for pixels of 8, and the colors of any palette for ones of 16.
        in_planes = tags.get(Base.PlanarConfiguration) == 2 and [tile.codec_name for tile in tiles] == ["raw"]
        misread = (bits[0] > 8 and in_planes) or (image.mode == "P" and 0 < max(tags[Base.ColorMap]) < 256)
    # It compares a PNG's transparent color, which has the file's bits, with pixels of 8 bits.
    keyed = "transparency" in image.info and [tile.args for tile in tiles] in (["L;2"], ["L;4"], ["I;16B"], ["RGB;16B"])
    if misread or keyed or (image.mode[0] in "IF" and not gray):
        raise ValueError(
            f"what is black, white or transparent in this {image.format} of mode {image.mode} cannot be told; save it "
            "as a PNG of 8 or 16 bits, with an alpha channel where it is transparent"
        )
    # Loading turns it as its tag says, which a crop does not have.
    is_turned = image.format == "TIFF" and Base.Orientation in image.tag_v2
    image.load()
    if is_turned:
        image.info.pop("xmp", None)
    if gray:
        # 0 to 65,535 as 0 to 255, rounded.
        return image.convert("I").point(lambda value: value / 257 + 0.5).convert("L")
    if image.format == "GIF" and not image.has_transparency_data:
        # A first frame may be smaller than the picture, which is transparent around it.
        colors = image.convert("RGB")
        white = colors.point(lambda _: 255)
        white.paste(colors.crop(tiles[0].extents), tiles[0].extents)
        return white
    # Viewers take it for opaque: programs leave these bytes empty.
    if (image.format, image.mode) == ("BMP", "RGBA") and not any(image.getextrema()[3]):
        image.putalpha(255)
    if image.mode == "La":
        image = image.convert("LA")
    # Other modes would not fit their profile.
    mode = {"L": "L", "LA": "L", "CMYK": "CMYK"}.get(image.mode, "RGB")
    if not image.has_transparency_data:
        return image.convert(mode)
    colors = image.convert("RGBA")
    # Made from the image, white keeps its profile and its EXIF.
    white = colors.point(lambda _: 255)
    return Image.alpha_composite(white, colors).convert(mode)


def finished(crop: Image.Image) -> Image.Image:
    """A crop in RGB, turned upright as its EXIF says, and in sRGB."""
    # Damaged EXIF does not make an image unreadable.
    with suppress(SyntaxError, ValueError, struct.error):
        ImageOps.exif_transpose(crop, in_place=True)
    conversion = _to_srgb(crop.info.get("icc_profile", b""), crop.mode)
    if conversion is not None:
        return conversion.apply(crop)
    # `convert` would copy a crop that is already in RGB.
    return crop if crop.mode == "RGB" else crop.convert("RGB")


@lru_cache(32)
def _to_srgb(profile: bytes, mode: str) -> ImageCms.ImageCmsTransform | None:
    """The conversion from an ICC profile; None without one that fits the mode, as in viewers."""
    try:
        source = ImageCms.ImageCmsProfile(io.BytesIO(profile))
        return ImageCms.buildTransform(source, ImageCms.createProfile("sRGB"), mode, "RGB")
    except (OSError, ImageCms.PyCMSError):
        return None
