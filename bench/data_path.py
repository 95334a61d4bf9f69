"""What data costs on a CPU: order and fetching at any size, preparing, packing, tars, and all of it beside a model.

    .venv/bin/pip install webdataset
    .venv/bin/python bench/data_path.py

Everything is interleaved. Takes some five minutes.
"""

import argparse
import io
import itertools
import os
import tarfile
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import redirect_stdout
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"

import datasets
import numpy as np
import torch
from PIL import Image
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from largebatch.batch import Length, Timeline
from largebatch.config import load_config
from largebatch.data import prepared
from largebatch.data.crops import Crop, center_crop
from largebatch.data.hub import open_splits
from largebatch.data.images import decode
from largebatch.data.order import TrainingOrder
from largebatch.data.preparation import Preparation
from largebatch.data.prepared import MAX_SHARD_BYTES, open_prepared
from largebatch.data.source import Batch
from largebatch.data.text import TokenBlocks
from largebatch.data.token_stream import Part, TokenStream
from largebatch.data.tokenizer import PretrainedTokenizer
from largebatch.task_folders import import_from
from paired import interleave
from peers.gpt.job import build_model, mean_loss
from record import OURS, ROOT, Comparison, Figure, Record, add_output_options, take_facts, write_record

of_sft = import_from(ROOT / "recipes/sft", "pairs")
of_two_towers = import_from(ROOT / "recipes/two_towers", "data")

RECIPE = ROOT / "recipes/causal_lm/gpt2_124m.json"
CLIP = ROOT / "recipes/two_towers/clip_b32_32k.json"
SIZES = (10**4, 10**5, 10**6, 10**7, 10**8, 10**9)
BATCH = 64
BLOCK = 128
MAX_RATIO = 1.25
READ_TOKENS = 10**6
SHARD_TOKENS = MAX_SHARD_BYTES // 4  # of the largest shards, at four bytes of text for a token
COPIES = 40
VOCABULARY = 4096
SLOWEST_RATIO = 1 / 0.9
NUM_PAIRS = 20_000
PACK = 2048
END_OF_TEXT = "<|endoftext|>"
# What a step of GPT-2 124M is to read on one GPU (bench/gpu/jobs.py), and as much again.
TOKENS_PER_SECOND = 2 * 500_000
ROOM = 0.5
TARS = 20
PAIRS_OF_A_TAR = 50
IMAGE_SIDE = 384
ABOUT = f"""What data costs on a CPU. *Order* is computing which samples come next (`order.TrainingOrder`), in the
middle of a run. *Fetching* reads their blocks of {BLOCK} tokens from the shards of a prepared set, in micro-batches of
{BATCH}; all shards of a set, up to 10⁹ rows, are the same {READ_TOKENS:,} tokens in memory, so this measures finding
them and not a disk. *Preparing* turns Python's reference in a parquet file, {COPIES} times, into token files with their
checksums, by one process and by two, with a tokenizer trained on it; *encode_batch_fast* is this tokenizer's call for
the same documents in memory, in one thread, which writes nothing. *Packing* puts pairs of a few hundred tokens into
{PACK}. *Tars* reads, decodes and crops pairs from {TARS} tars of {PAIRS_OF_A_TAR}, JPEGs of {IMAGE_SIDE} pixels:
*webdataset* in the order of the files, ours in a random order. *Beside the model* compares all that a micro-batch of
2 x {BLOCK} tokens needs before its forward pass with the passes of a GPT-2 of 3 million parameters on the same core."""


def seconds(work: Callable[[], Any]) -> float:
    """Seconds of one call."""
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


def size_name(size: int) -> str:
    """Such as "10^4 rows"."""
    return f"10^{len(str(size)) - 1} rows"


# --- order and fetching -----------------------------------------------------------------------------------------------


class Repeated:
    """As many tokens as in the largest shard, of which only `READ_TOKENS` are in memory."""

    tokens = np.arange(READ_TOKENS, dtype=np.uint16)

    def __getitem__(self, places: slice) -> np.ndarray:
        start = places.start % (READ_TOKENS - BLOCK)
        return self.tokens[start : start + min(places.stop, SHARD_TOKENS) - places.start]


def simulated_blocks(rows: int) -> TokenBlocks:
    """A prepared set of so many blocks."""
    num_shards = rows * BLOCK // SHARD_TOKENS + 1
    shard = Part(SHARD_TOKENS, Repeated)  # type: ignore[arg-type]
    return TokenBlocks(TokenStream([shard] * num_shards), BLOCK, rows)


def indices_from_the_middle(rows: int) -> Iterator[np.ndarray]:
    """The sample indices of each micro-batch of a run, from the middle of the first epoch on."""
    order = TrainingOrder(Timeline.build(rows, [(Length("steps", 0), BATCH)]), BATCH, 1, 0)
    for work in order.micro_batches(((step, 0) for step in itertools.count(rows // BATCH // 2)), rank=0):
        yield work.indices


def compare_sizes(rounds: int, batches: int) -> list[Comparison]:
    """Microseconds per sample at every size: of order alone, and with fetching."""
    sizes = {size_name(size): size for size in SIZES}
    sources = {name: simulated_blocks(size) for name, size in sizes.items()}

    def order(name: str) -> float:
        # It takes so little that more of it is needed.
        work = indices_from_the_middle(sizes[name])
        number = 16 * batches
        return seconds(lambda: [next(work) for _ in range(number)]) / (number * BATCH) * 1e6

    def order_and_fetch(name: str) -> float:
        work = indices_from_the_middle(sizes[name])
        source = sources[name]
        return seconds(lambda: [source.fetch(next(work), 0) for _ in range(batches)]) / (batches * BATCH) * 1e6

    base, *others = sizes
    limits = dict.fromkeys(others, MAX_RATIO)
    return [
        Comparison("µs per sample", base, interleave(list(sizes), rounds, measure), case, limits)
        for case, measure in (("order", order), ("order and fetching", order_and_fetch))
    ]


# --- preparing --------------------------------------------------------------------------------------------------------


def train_tokenizer(documents: Iterable[str], vocab_size: int, folder: Path) -> None:
    """Train a tokenizer on documents, as docs/data.md shows, and save it."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(documents, trainer)
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=END_OF_TEXT).save_pretrained(folder)


def text_recipe(folder: Path) -> Any:
    """A recipe on Python's reference in a parquet file, with a tokenizer trained on it."""
    file = folder / "reference.parquet"
    datasets.Dataset.from_dict({"text": [topics[name] for name in sorted(topics)] * COPIES}).to_parquet(file)
    words = [
        "--data.path=parquet",
        f'--data.data_files={{"train": "{file}", "eval": "{file}"}}',
        "--data.train_split=train",
        "--data.eval_split=validation",
        "--data.config_name=null",
        "--data.num_workers=0",
        f"--data.tokenizer={folder / 'tokenizer'}",
    ]
    config = load_config(RECIPE, words)
    documents, _ = open_splits(config.data, Preparation())
    train_tokenizer(documents["text"], VOCABULARY, folder / "tokenizer")
    return config


def compare_preparing(rounds: int, folder: Path) -> tuple[Comparison, list[Figure]]:
    """Seconds for the whole text; tokens per second of ours, and of reading them again in blocks of 1,024."""
    config = text_recipe(folder)
    tokenizer = PretrainedTokenizer(config.data.tokenizer)
    encode = tokenizer.tokenizer.backend_tokenizer.encode_batch_fast
    documents = [topics[name] for name in sorted(topics)] * COPIES
    once = config.data.model_copy(update={"eval_split": "train"})

    def prepare(num_workers: int) -> TokenStream:
        prepared.HF_HOME = tempfile.mkdtemp(dir=folder)
        how = Preparation("", allowed="everything", num_workers=num_workers)
        return open_prepared(once, tokenizer, how)[0]

    ways = {
        "encode_batch_fast": lambda: encode(documents, add_special_tokens=False),
        OURS: lambda: prepare(1),
        f"{OURS}, two processes": lambda: prepare(2),
    }
    ways[OURS]()
    with redirect_stdout(None):
        measured = interleave(list(ways), rounds, lambda name: seconds(ways[name]))
        stream = prepare(2)
    blocks = TokenBlocks(stream, 1024, len(stream))
    order = np.random.default_rng(0).permutation(len(blocks) // 16 * 16).reshape(-1, 16)
    reading = [seconds(lambda: [blocks.fetch(indices, 0) for indices in order]) for _ in range(rounds)]
    limits = {OURS: SLOWEST_RATIO, f"{OURS}, two processes": SLOWEST_RATIO / 2}
    return Comparison("s for the text", "encode_batch_fast", measured, "preparing", limits), [
        Figure("preparing, one process", "tokens/s", [len(stream) / each[OURS] for each in measured]),
        Figure(
            "fetching blocks of 1,024, one loader process (a GPU is to train on half as many)",
            "tokens/s",
            [order.size * 1024 / each for each in reading],
            at_least=TOKENS_PER_SECOND,
        ),
    ]


# --- packing ----------------------------------------------------------------------------------------------------------


def measure_packing(rounds: int) -> list[Figure]:
    """Pairs per second that are assigned to packs, and tokens per second of packs that are put together."""
    random = np.random.default_rng(0)
    lengths = np.clip(random.lognormal(5.5, 0.8, NUM_PAIRS).astype(int), 8, PACK)
    tokens = [random.integers(0, VOCABULARY, length + 1) for length in lengths]
    answers = np.stack([lengths // 4 + 1, lengths + 1], axis=1)
    rows = {"input_ids": tokens, "predicted": answers, "num_tokens": lengths + 1}
    section = of_sft.AdditionData(
        source="addition", block_size=PACK, packing=True, num_train_samples=1, num_eval_samples=1
    )
    samples = of_sft.PairSamples(datasets.Dataset.from_dict(rows), section, "training")
    chosen = random.permutation(samples.num_available // 8 * 8)[:256].reshape(-1, 8)
    fetched = sum(samples.weight(samples.fetch(indices, 0)) for indices in chosen)
    assigning = [seconds(lambda: of_sft.starts_of_packs(samples.lengths, PACK)) for _ in range(rounds)]
    fetching = [seconds(lambda: [samples.fetch(indices, 0) for indices in chosen]) for _ in range(rounds)]
    return [
        Figure("assigning pairs to packs", "pairs/s", [NUM_PAIRS / each for each in assigning]),
        Figure("fetching packs, one loader process", "target tokens/s", [fetched / each for each in fetching]),
    ]


# --- tars -------------------------------------------------------------------------------------------------------------


def write_tars(folder: Path) -> list[str]:
    """Tars of smooth random images with captions."""
    random = np.random.default_rng(0)
    files = [str(folder / f"{number:05d}.tar") for number in range(TARS)]
    for file in files:
        with tarfile.open(file, "w") as tar:
            for number in range(PAIRS_OF_A_TAR):
                jpeg = io.BytesIO()
                small = Image.fromarray(random.integers(0, 256, (24, 24, 3), dtype=np.uint8))
                small.resize((IMAGE_SIDE, IMAGE_SIDE)).save(jpeg, "JPEG", quality=95)
                for ending, content in (("jpg", jpeg.getvalue()), ("txt", b"a picture")):
                    member = tarfile.TarInfo(f"{Path(file).stem}{number:04d}.{ending}")
                    member.size = len(content)
                    tar.addfile(member, io.BytesIO(content))
    return files


def compare_tars(rounds: int, folder: Path) -> Comparison:
    """Milliseconds per pair of decoded and cropped images, in one process."""
    import webdataset

    files = write_tars(folder)
    number = TARS * PAIRS_OF_A_TAR
    words = [
        f'--data.data_files={{"train": "{folder}/*.tar", "eval": "{files[0]}"}}',
        "--data.train_augmentation=none",
        "--data.tokenizer=bytes",
        "--model.end_of_text=0",
    ]
    config = load_config(CLIP, words)
    data = config.data
    source, _ = of_two_towers.open_captioned(
        data, Preparation("", allowed="everything"), of_two_towers.Texts(config), 0
    )
    order = np.random.default_rng(0).permutation(number).reshape(-1, PAIRS_OF_A_TAR)

    def take(image: Image.Image) -> Crop:
        return Crop(center_crop(image, data.image_size, part=1))

    def theirs() -> None:
        pairs = webdataset.WebDataset(files, shardshuffle=False).to_tuple("jpg", "txt")
        for place, (image, _) in enumerate(pairs):
            decode({"bytes": image, "path": None}, place, take)

    ways = {"webdataset": theirs, OURS: lambda: [source.fetch(indices, 0) for indices in order]}
    measured = interleave(list(ways), rounds, lambda name: seconds(ways[name]) / number * 1e3)
    return Comparison("ms per pair", "webdataset", measured, "tars", {OURS: SLOWEST_RATIO})


# --- beside the model -------------------------------------------------------------------------------------------------


def compare_with_model(rounds: int, batches: int) -> Comparison:
    """Milliseconds a micro-batch of the model's passes, and of everything before them."""
    source = simulated_blocks(10**6)
    model = build_model()
    work = (indices % 10**6 for indices in indices_from_the_middle(10**6))
    pieces = (part for indices in work for part in np.split(indices, BATCH // 2))

    def load() -> Batch:
        batch = source.fetch(next(pieces), 0)
        source.weight(batch)
        return batch

    batch = {name: tensor % 256 for name, tensor in load().items()}
    ways = {
        "model": lambda: mean_loss(model, batch["input_ids"], batch["labels"]).backward(),
        "loading": load,
    }
    ways["model"]()
    rounds_of = interleave(
        list(ways), rounds, lambda name: seconds(lambda: [ways[name]() for _ in range(batches)]) / batches * 1e3
    )
    return Comparison("ms per micro-batch", "model", rounds_of, "beside the model", {"loading": ROOM})


def main() -> None:
    """Measure and write."""
    parser = argparse.ArgumentParser(description="What order, fetching, preparing and packing cost on a CPU.")
    add_output_options(parser, "data_path")
    parser.add_argument("--rounds", type=int, default=11, help="samples of each; default: 11")
    parser.add_argument("--batches", type=int, default=256, help="micro-batches of a sample; default: 256")
    options = parser.parse_args()
    torch.set_num_threads(1)
    datasets.disable_progress_bars()
    facts = take_facts(("datasets", "numpy", "tokenizers", "transformers", "torch", "webdataset"))
    comparisons = compare_sizes(options.rounds, options.batches)
    with tempfile.TemporaryDirectory() as folder:
        preparing, figures = compare_preparing(options.rounds, Path(folder))
        tars = compare_tars(options.rounds, Path(folder))
    comparisons += [preparing, tars, compare_with_model(options.rounds, max(1, options.batches // 32))]
    record = Record(
        program="data_path",
        title="Data",
        about=ABOUT,
        settings={"rounds": options.rounds, "batches": options.batches, "documents": len(topics) * COPIES},
        facts=facts,
        comparisons=comparisons,
        figures=[*figures, *measure_packing(options.rounds)],
    )
    write_record(record, options)


if __name__ == "__main__":
    main()
