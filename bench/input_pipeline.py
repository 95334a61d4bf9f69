"""Images per second and core of the ImageNet input pipeline, beside the usual one, on generated photographs.

    .venv/bin/python bench/input_pipeline.py bench/results/input_pipeline

What a loader process does to a micro-batch is measured in this process, on one thread, in its CPU time: fetching the
encoded images, decoding, cropping, resizing, stacking. "Ours" is `HubImageSource.fetch`, which leaves mirroring and
normalising to the device; the usual pipeline decodes the whole image, cuts out, resizes, mirrors and normalises in
floats, image by image. Both make the same crops, and what the model sees of them is compared. The two are paired and
interleaved, take turns in who comes first, and are judged by the median of the pairs' ratios. What is left to the
device is measured on this CPU, as a bound. Takes some three minutes.
"""

import argparse
import io
import json
import os
import platform
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"

import datasets
import numpy as np
import torch
from PIL import Image, features

from largebatch.config import load_config
from largebatch.data.images import HubImageSource
from largebatch.data.order import derive_seed
from largebatch.data.source import Batch
from largebatch.task_folders import import_from

ROOT = Path(__file__).resolve().parents[1]
RECIPE = ROOT / "recipes/image_classification/resnet50_imagenet_8k.json"
data = import_from(RECIPE.parent, "data")
# ImageNet's images have 469 x 387 pixels and 110 kB on average; a few are photographs as a camera makes them.
SIZES = {"typical": (500, 375), "large": (1600, 1200)}
QUALITY = 95


def photograph(width: int, height: int, random: np.random.Generator) -> bytes:
    """A JPEG of noise with as much power in each octave, which photographs have about; 3 channels that go together."""
    picture = np.zeros((height, width, 3))
    side = 4
    while side <= width:
        shape = (max(2, side * height // width), side)
        noise = random.normal(size=(*shape, 1)) + 0.3 * random.normal(size=(*shape, 3))
        for channel in range(3):
            layer = Image.fromarray(noise[:, :, channel].astype(np.float32)).resize(
                (width, height), Image.Resampling.BICUBIC
            )
            picture[:, :, channel] += np.asarray(layer) * 96 / side**0.5
        side *= 2
    buffer = io.BytesIO()
    Image.fromarray(np.clip(picture + 128, 0, 255).astype(np.uint8)).save(buffer, "JPEG", quality=QUALITY)
    return buffer.getvalue()


def usual_fetch(source: HubImageSource, indices: np.ndarray, epoch: int | None) -> Batch:
    """The same samples in the usual steps, image by image in floats, normalised and mirrored."""
    config = source.config
    mean, std = (np.array(values, dtype=np.float32)[:, None, None] for values in (config.mean, config.std))
    rows = source.dataset[indices]
    pictures = []
    for encoded, index in zip(rows[config.image_column], indices, strict=True):
        image = Image.open(io.BytesIO(encoded["bytes"])).convert("RGB")
        box, mirrored = _usual_box(
            image, epoch, derive_seed(source.augmentation_seed or 0, "augmentation", epoch or 0, int(index))
        )
        resized = image.crop(box).resize((config.image_size, config.image_size), Image.Resampling.BILINEAR)
        picture = np.asarray(resized, dtype=np.float32).transpose(2, 0, 1) / 255
        picture = (picture - mean) / std
        pictures.append(np.ascontiguousarray(picture[:, :, ::-1] if mirrored else picture))
    return {"pixel_values": torch.from_numpy(np.stack(pictures)), "labels": torch.tensor(rows[config.label_column])}


def _usual_box(image: Image.Image, epoch: int | None, seed: int) -> tuple[tuple[int, int, int, int], bool]:
    """The crop of `center_crop`, in whole pixels, or that of `inception_crop`, and whether it is mirrored."""
    if epoch is None:
        side = round(min(image.size) * 0.875)
        left, top = round((image.width - side) / 2), round((image.height - side) / 2)
        return (left, top, left + side, top + side), False
    random = np.random.default_rng(seed)
    while True:
        area = image.width * image.height * random.uniform(0.08, 1.0)
        ratio = np.exp(random.uniform(np.log(3 / 4), np.log(4 / 3)))
        width, height = round(np.sqrt(area * ratio)), round(np.sqrt(area / ratio))
        if 0 < width <= image.width and 0 < height <= image.height:
            left = int(random.integers(image.width - width + 1))
            top = int(random.integers(image.height - height + 1))
            return (left, top, left + width, top + height), bool(random.random() < 0.5)


def cpu_seconds(work: Callable[[], Any]) -> float:
    started = time.process_time()
    work()
    return time.process_time() - started


def measure(name: str, epoch: int | None, settings: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """The pairs of one size of images, in training (with an epoch) or in evaluation."""
    random = np.random.default_rng(settings.seed)
    encoded = [photograph(*SIZES[name], random) for _ in range(settings.images)]
    file = folder / f"{name}.parquet"
    columns = {"image": datasets.Image(), "label": datasets.Value("int64")}
    rows = {"image": [{"bytes": one, "path": None} for one in encoded], "label": [0] * len(encoded)}
    datasets.Dataset.from_dict(rows, features=datasets.Features(columns)).to_parquet(file)
    words = [
        "--data.path=parquet",
        f'--data.data_files={{"train": "{file}", "eval": "{file}"}}',
        f"--data.num_train_samples={len(encoded)}",
        f"--data.num_eval_samples={len(encoded)}",
        f"--batch.global_batch_size={settings.batch}",
        f"--batch.micro_batch_size={settings.batch}",
    ]
    config = load_config(RECIPE, words)
    source = data.sources(config)[0 if epoch is not None else 1]
    assert isinstance(source, HubImageSource)
    batches = np.arange(len(encoded)).reshape(-1, settings.batch)

    ways: dict[str, Callable[[np.ndarray], Any]] = {
        "ours": lambda indices: source.fetch(indices, epoch),
        "usual": lambda indices: usual_fetch(source, indices, epoch),
    }
    seen = data.model_input(ways["ours"](batches[0]), config.data)
    difference = (seen - ways["usual"](batches[0])["pixel_values"]).abs().mean().item()
    # Deviations of a color; a crop of another place differs by about one.
    assert difference < 0.1, difference
    rounds = []
    for number in range(settings.pairs):
        order = sorted(ways, reverse=number % 2 == 1)
        rounds.append({way: cpu_seconds(lambda way=way: [ways[way](indices) for indices in batches]) for way in order})
    prepared = source.fetch(batches[0], epoch)
    device = [
        cpu_seconds(lambda: data.model_input(prepared, config.data)) / settings.batch for _ in range(settings.pairs)
    ]
    return {
        "pixels": SIZES[name],
        "kilobytes": round(statistics.mean(len(one) for one in encoded) / 1000, 1),
        "mean_difference": difference,
        "images": len(encoded),
        "seconds": rounds,
        "device_part_ms_per_image_on_this_cpu": 1000 * statistics.median(device),
    }


def row(name: str, result: dict[str, Any]) -> str:
    def images_per_second(way: str) -> float:
        return result["images"] / statistics.median(one[way] for one in result["seconds"])

    ratios: Sequence[float] = sorted(one["usual"] / one["ours"] for one in result["seconds"])
    low, middle, high = statistics.quantiles(ratios, n=4)
    return (
        f"{name:<22}{result['kilobytes']:>7.0f}{images_per_second('ours'):>9.0f}{images_per_second('usual'):>9.0f}"
        f"{middle:>8.2f}  {low:.2f} .. {high:.2f}  {result['device_part_ms_per_image_on_this_cpu']:>9.2f}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure the image input pipeline on one core.")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--images", type=int, default=128)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--pairs", type=int, default=15)
    parser.add_argument("--seed", type=int, default=0)
    settings = parser.parse_args()
    torch.set_num_threads(1)
    facts = {
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": f"{os.cpu_count()} CPU cores, {platform.machine()}, {_cpu_name()}",
        "load average before": os.getloadavg()[0],
        "commit": subprocess.run(
            ["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True
        ).stdout.strip(),
        "versions": {"python": platform.python_version()}
        | {name: version(name) for name in ("pillow", "torch", "datasets", "numpy")},
        "jpeg": f"libjpeg-turbo {features.version('libjpeg_turbo')}",
    }
    results = {}
    with tempfile.TemporaryDirectory() as folder:
        for name in SIZES:
            for mode, epoch in (("training", 0), ("evaluation", None)):
                results[f"{name}, {mode}"] = measure(name, epoch, settings, Path(folder))
    text = f"{'':<22}{'kB':>7}{'ours/s':>9}{'usual/s':>9}{'ratio':>8}  {'quartiles':<14}{'device ms':>9}\n"
    text += "".join(row(name, result) + "\n" for name, result in results.items())
    print(text)
    settings.folder.mkdir(parents=True, exist_ok=True)
    options = {"images": settings.images, "batch": settings.batch, "pairs": settings.pairs, "quality": QUALITY}
    written = facts | {"load average after": os.getloadavg()[0], "settings": options, "results": results}
    (settings.folder / "cpu.json").write_text(json.dumps(written, indent=1) + "\n", encoding="utf-8")
    (settings.folder / "cpu.txt").write_text(text, encoding="utf-8")


def _cpu_name() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    return next((line.partition(": ")[2] for line in lines if line.startswith("model name")), "unknown CPU")


if __name__ == "__main__":
    main()
