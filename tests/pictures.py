"""Pictures made in tests, and the files that hold them."""

import io
import tarfile
from pathlib import Path

import datasets
import numpy as np
from PIL import Image


def jpeg(pixels: np.ndarray) -> bytes:
    """Encoded, from uint8 of shape (height, width, 3)."""
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, "JPEG", quality=95)
    return buffer.getvalue()


def png(pixels: np.ndarray) -> bytes:
    """Encoded without loss, from uint8 of shape (height, width, 3)."""
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, "PNG")
    return buffer.getvalue()


def gradient_image(width: int, height: int) -> Image.Image:
    """Red grows to the right, green downwards: a pixel's color tells where it was."""
    x = np.broadcast_to(np.linspace(0, 255, width), (height, width))
    y = np.broadcast_to(np.linspace(0, 255, height)[:, None], (height, width))
    return Image.fromarray(np.stack([x, y, np.zeros_like(x)], axis=-1).round().astype(np.uint8))


def write_tar(path: Path, members: dict[str, bytes], mode: str = "w") -> None:
    """A tar with these contents by their names."""
    with tarfile.open(path, mode) as tar:
        for name, content in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))


def write_parquet(file: Path, encoded: list[bytes], labels: list[int]) -> None:
    """A data set as on the hub, with the columns "image" and "label"."""
    features = datasets.Features({"image": datasets.Image(), "label": datasets.Value("int64")})
    images = [{"bytes": picture, "path": None} for picture in encoded]
    datasets.Dataset.from_dict({"image": images, "label": labels}, features=features).to_parquet(file)
