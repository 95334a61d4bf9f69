"""What is trained of an image file: what a viewer shows, against numpy by hand and Pillow's `ImageOps`."""

import io
import struct
import zlib

import numpy as np
import PIL
import pytest
from PIL import Image, ImageCms, ImageOps, PngImagePlugin

from largebatch.data.crops import center_crop
from largebatch.data.images import FORMATS
from largebatch.data.viewer import opaque

RANDOM = np.random.default_rng(0)
GRAY = RANDOM.integers(256, size=(8, 8), dtype=np.uint8)
COLORS = RANDOM.integers(256, size=(8, 8, 3), dtype=np.uint8)
ALPHA = RANDOM.integers(256, size=(8, 8), dtype=np.uint8)
DEEP = RANDOM.integers(2**16, size=(8, 8), dtype=np.uint16)
DEEP.flat[:4] = (0, 128, 129, 65535)
# Tags of TIFF and EXIF.
BITS = 258
PHOTOMETRIC = 262
ORIENTATION = 274
PLANES = 284
COLORS_OF_PALETTE = 320
EXTRA = 338


def saved(image, kind, **options):
    content = io.BytesIO()
    image.save(content, kind, **options)
    return content.getvalue()


def as_png(pixels, **options):
    return saved(Image.fromarray(pixels), "PNG", **options)


def png_of(pixels, depth, color_type, *chunks):
    """A PNG that Pillow does not write, from the bytes of its rows."""
    parts = [
        (b"IHDR", struct.pack(">IIBBBBB", 8, 8, depth, color_type, 0, 0, 0)),
        *chunks,
        (b"IDAT", zlib.compress(b"".join(b"\0" + row.tobytes() for row in pixels))),
        (b"IEND", b""),
    ]
    return b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data)) for name, data in parts
    )


def tiff(pixels, tag, usual, value):
    """A TIFF of which a tag is changed afterward, as other programs write it."""
    content = saved(Image.fromarray(pixels), "TIFF")
    # One number of 16 bits.
    before, after = (struct.pack("<HHIH", tag, 3, 1, number) for number in (usual, value))
    assert content.count(before) == 1
    return content.replace(before, after)


def tiff_with_colors_of_8_bits():
    content = saved(PALETTE, "TIFF")
    colors = np.array(Image.open(io.BytesIO(content)).tag_v2[COLORS_OF_PALETTE], "<u2")
    return content.replace(colors.tobytes(), (colors // 256).tobytes())


def gif_around(frame, height):
    """A GIF that is higher than its frame."""
    content = bytearray(saved(frame, "GIF"))
    struct.pack_into("<H", content, 8, height)
    return bytes(content)


def bmp(pixels):
    """With a mask for opacity, as version 4 has it."""
    body = pixels[::-1, :, [2, 1, 0, 3]].tobytes()
    height, width, _ = pixels.shape
    header = struct.pack("<3I2H6I", 108, width, height, 1, 32, 3, len(body), 0, 0, 0, 0)
    masks = struct.pack("<4I", 0xFF0000, 0xFF00, 0xFF, 0xFF000000)
    return struct.pack("<2s3I", b"BM", 122 + len(body), 0, 122) + header + masks + bytes(52) + body


def seen(encoded, size=8):
    """Pixels of shape (size, size, 3): at 8, the evaluation's crop of these images is the whole."""
    return center_crop(opaque(Image.open(io.BytesIO(encoded), formats=FORMATS)), size).transpose(1, 2, 0)


def gray(values):
    return np.repeat(np.asarray(values)[:, :, None], 3, axis=2)


def over_white(colors, alpha):
    return np.round((colors * alpha[..., None].astype(float) + 255.0 * (255 - alpha[..., None])) / 255)


def swapped_profile():
    """sRGB whose red is blue and whose blue is red."""
    profile = ImageCms.ImageCmsProfile(ImageCms.createProfile("sRGB")).tobytes()
    return profile.replace(b"rXYZ", b"----").replace(b"bXYZ", b"rXYZ").replace(b"----", b"bXYZ")


def gray_profile():
    """Of linear grays: an ICC header, a table of two tags, white, and a tone curve without points."""
    white = struct.pack(">3i", 63190, 65536, 54061)
    tags = b"XYZ \0\0\0\0" + white + b"curv" + bytes(8)
    table = struct.pack(">I4sII4sII", 2, b"wtpt", 156, 20, b"kTRC", 176, 12)
    start = struct.pack(">I4x4s4s4s4s12x4s28x", 188, b"\x02\x10\0\0", b"mntr", b"GRAY", b"XYZ ", b"acsp")
    return (start + white).ljust(128, b"\0") + table + tags


RGBA = np.dstack([COLORS, ALPHA])
PALETTE = Image.fromarray(GRAY % 4)
PALETTE.putpalette([0, 0, 0, 50, 60, 70, 200, 100, 0, 255, 255, 255])
PALETTE_COLORS = np.array([[0, 0, 0], [50, 60, 70], [200, 100, 0], [255, 255, 255]])[GRAY % 4]
ROUNDED = gray(np.round(DEEP / 257))
TRANSPARENT = {
    "RGBA": (as_png(RGBA), over_white(COLORS, ALPHA)),
    "RGBA of 16 bits": (png_of(RGBA.astype(">u2") * 257, 16, 6), over_white(COLORS, ALPHA)),
    "BMP": (bmp(RGBA), over_white(COLORS, ALPHA)),
    "LA": (as_png(np.dstack([GRAY, ALPHA])), over_white(gray(GRAY), ALPHA)),
    "LA as TIFF, multiplied": (
        tiff(np.dstack([np.round(GRAY * (ALPHA / 255)).astype(np.uint8), ALPHA]), EXTRA, 2, 1),
        over_white(gray(GRAY), ALPHA),
    ),
    "a color": (
        as_png(COLORS, transparency=tuple(COLORS[2, 3].tolist())),
        np.where((COLORS[2, 3] == COLORS).all(axis=2, keepdims=True), 255, COLORS),
    ),
    "a gray": (
        as_png(GRAY, transparency=int(GRAY[2, 3])),
        gray(np.where(GRAY[2, 3] == GRAY, 255, GRAY)),
    ),
    "a palette": (
        saved(PALETTE, "PNG", transparency=b"\xff\x80\x00"),
        over_white(PALETTE_COLORS, np.array([255, 128, 0, 255])[GRAY % 4]),
    ),
    "GIF": (
        saved(PALETTE, "GIF", transparency=2),
        over_white(PALETTE_COLORS, np.array([255, 255, 0, 255])[GRAY % 4]),
    ),
    "GIF with a small frame": (
        gif_around(PALETTE.crop((0, 0, 8, 6)), 8),
        np.where(np.arange(8)[:, None, None] < 6, PALETTE_COLORS, 255),
    ),
}
if int(PIL.__version__.partition(".")[0]) < 13:
    # Pillow refuses it.
    del TRANSPARENT["LA as TIFF, multiplied"]
OPAQUE = {
    "1": (as_png(GRAY > 99), gray((GRAY > 99) * 255)),
    "L": (as_png(GRAY), gray(GRAY)),
    "BMP of no opacity": (bmp(np.dstack([COLORS, 0 * ALPHA])), COLORS),
    "L whose 0 is white": (tiff(GRAY, PHOTOMETRIC, 1, 0), gray(255 - GRAY)),
    "P": (saved(PALETTE, "PNG"), PALETTE_COLORS),
    "16 bits": (as_png(DEEP), ROUNDED),
    "16 bits as TIFF": (saved(Image.fromarray(DEEP), "TIFF"), ROUNDED),
    "16 bits as TIFF of a Mac": (
        saved(Image.frombytes("I;16B", (8, 8), DEEP.astype(">u2").tobytes()), "TIFF"),
        ROUNDED,
    ),
    "16 bits a color": (png_of(np.dstack([DEEP] * 3).astype(">u2"), 16, 2), gray(DEEP // 256)),
    "CMYK": (
        saved(Image.fromarray(np.dstack([COLORS, 0 * GRAY]), "CMYK"), "TIFF"),
        255 - COLORS.astype(int),
    ),
    "2 MiB of text": (png_of(GRAY, 8, 0, (b"zTXt", b"x\0\0" + zlib.compress(b"a" * 2**21))), gray(GRAY)),
    "a profile": (as_png(COLORS, icc_profile=swapped_profile()), COLORS[..., ::-1]),
    "a profile that is damaged": (as_png(COLORS, icc_profile=b"damaged"), COLORS),
    "a profile of other channels": (as_png(GRAY, icc_profile=swapped_profile()), gray(GRAY)),
}


@pytest.mark.parametrize("name", [*OPAQUE, *TRANSPARENT])
def test_pixels_are_those_that_a_viewer_shows(name):
    encoded, expected = (OPAQUE | TRANSPARENT)[name]
    # Pillow divides by 255 in whole numbers.
    assert np.abs(seen(encoded) - expected).max() <= (name in TRANSPARENT)
    smaller = center_crop(Image.fromarray(np.asarray(expected, np.uint8)), 4).transpose(1, 2, 0).astype(int)
    assert np.abs(seen(encoded, 4) - smaller).max() <= 1


def test_a_gray_profile_is_for_gray_with_transparency_too():
    profile = gray_profile()
    plain = seen(as_png(GRAY, icc_profile=profile))
    # As the formula of sRGB has it, but near black, where Little CMS is coarse.
    linear = GRAY / 255
    np.testing.assert_allclose(
        plain, gray(255 * np.where(linear <= 0.0031308, 12.92 * linear, 1.055 * linear ** (1 / 2.4) - 0.055)), atol=9
    )
    assert (seen(as_png(np.dstack([GRAY, np.full_like(GRAY, 255)]), icc_profile=profile)) == plain).all()


UNCLEAR = {
    "floats": saved(Image.fromarray(DEEP.astype(np.float32) / 65535), "TIFF"),
    "integers of 32 bits": saved(Image.fromarray(DEEP.astype(np.int32)), "TIFF"),
    "12 bits": tiff(DEEP, BITS, 16, 12),
    "16 bits whose 0 is white": tiff(DEEP, PHOTOMETRIC, 1, 0),
    "16 bits in planes": tiff(COLORS, PLANES, 1, 2).replace(b"\x08\0" * 3, b"\x10\0" * 3),
    "a palette of 8 bits": tiff_with_colors_of_8_bits(),
    "a transparent gray of 2 bits": png_of(GRAY[:, :2], 2, 0, (b"tRNS", b"\0\3")),
    "a transparent gray of 16 bits": png_of(DEEP.astype(">u2"), 16, 0, (b"tRNS", b"\0\0")),
    "a transparent color of 16 bits": png_of(np.dstack([DEEP] * 3).astype(">u2"), 16, 2, (b"tRNS", bytes(6))),
}


@pytest.mark.parametrize("encoded", UNCLEAR.values(), ids=UNCLEAR)
def test_what_cannot_be_told_is_refused(encoded):
    with pytest.raises(ValueError, match=r"cannot be told; save it as a PNG of 8 or 16 bits"):
        seen(encoded)


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP", "TIFF"])
def test_images_are_upright(kind):
    picture = Image.fromarray(COLORS).resize((300, 200), Image.Resampling.BICUBIC)
    exif = Image.Exif()
    for orientation in range(1, 9):
        exif[ORIENTATION] = orientation
        encoded = saved(picture, kind, exif=exif, quality=95)
        upright = ImageOps.exif_transpose(Image.open(io.BytesIO(encoded)))
        # 200 is the shorter side; at 64, a JPEG is decoded at a smaller scale.
        for size, at_most in ((200, 0), (64, 6)):
            expected = center_crop(upright, size).transpose(1, 2, 0).astype(int)
            assert np.abs(seen(encoded, size) - expected).max() <= at_most


def test_damaged_exif_and_an_orientation_in_xmp():
    xmp = PngImagePlugin.PngInfo()
    xmp.add_itxt("XML:com.adobe.xmp", '<rdf:Description tiff:Orientation="3"/>')
    for encoded, expected in (
        (as_png(COLORS, exif=b"Exif\0\0damaged"), COLORS),
        (as_png(COLORS, exif=b"Exif\0\0MM\0*"), COLORS),
        (as_png(COLORS, pnginfo=xmp), COLORS[::-1, ::-1]),
    ):
        assert np.array_equal(seen(encoded), expected)


@pytest.mark.parametrize("tag", [None, 1, 6])
def test_a_tag_of_a_tiff_goes_before_its_xmp(tag):
    """As programs leave it that turn the pixels."""
    tags = {700: b'<rdf:Description tiff:Orientation="3"/>'} | ({} if tag is None else {ORIENTATION: tag})
    expected = {None: COLORS[::-1, ::-1], 1: COLORS, 6: np.rot90(COLORS, -1)}[tag]
    assert np.array_equal(seen(saved(Image.fromarray(COLORS), "TIFF", tiffinfo=tags)), expected)
