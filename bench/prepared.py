"""Kill the preparation of a corpus at random moments, with three processes, and compare its tokens with a plain loop's.

    python bench/prepared.py [--kills 50]

The corpus is that of LARGEBATCH_TEST_DATA, 22 MB in two parquet files, with a tokenizer trained on it. After each kill,
every finished shard must have the checksums in its JSON. When all shards are finished, the first 10,000 and the last
1,000 samples must be those of a plain loop over the documents, by their SHA-256, and the next kills start over. The
same samples are compared for a stream of 10^8 documents of random lengths, whose tokens are computed. Takes some three
minutes.
"""

import argparse
import hashlib
import json
import os
import tempfile
import time
from collections.abc import Iterable, Iterator
from contextlib import redirect_stdout
from dataclasses import asdict
from functools import partial
from itertools import count
from multiprocessing import get_context
from pathlib import Path
from typing import Any

os.environ["TOKENIZERS_PARALLELISM"] = "false"
os.environ["HF_HUB_OFFLINE"] = "1"

import datasets
import numpy as np
import pyarrow.parquet as parquet

from largebatch.config import load_config
from largebatch.data import prepared
from largebatch.data.preparation import Preparation
from largebatch.data.text import TokenBlocks
from largebatch.data.token_stream import Part, TokenStream
from largebatch.data.tokenizer import PretrainedTokenizer
from largebatch.storage.files import read_record
from record import RESULTS, ROOT, take_facts, write_verdicts
from trained_tokenizer import train_tokenizer

DATA = Path(os.environ.get("LARGEBATCH_TEST_DATA", ROOT.parent / "shared/data")) / "corpus"
BLOCK, VOCABULARY, WORKERS = 128, 16_384, 3
FIRST, LAST = 10_000, 1_000
MAX_SECONDS = 4.0  # until a kill; the whole corpus takes some five seconds
DOCUMENTS, PARTS, MODULUS = 10**8, 20, 65_521


def digest(samples: Iterable[np.ndarray]) -> str:
    """SHA-256 of samples, as 32-bit numbers."""
    found = hashlib.sha256()
    for sample in samples:
        found.update(np.asarray(sample, dtype=np.int32).tobytes())
    return found.hexdigest()


def digest_of(stream: TokenStream) -> str:
    """The checksum of the first and last samples of a stream, as training reads them."""
    number = (len(stream) - 1) // BLOCK
    blocks = TokenBlocks(stream, BLOCK, number, "samples")
    chosen = [*range(FIRST), *range(number - LAST, number)]
    return digest(blocks.fetch(np.array([each]), 0)["input_ids"].numpy() for each in chosen)


def plain(tokens: np.ndarray) -> str:
    """The same of tokens in memory."""
    number = (len(tokens) - 1) // BLOCK
    return digest(tokens[each * BLOCK : (each + 1) * BLOCK] for each in [*range(FIRST), *range(number - LAST, number)])


def wrong_files(shards: Iterable[Path]) -> list[str]:
    """The files of finished shards whose checksums differ from those in the shard's JSON, which `shards` names."""
    return [
        f"{shard}: {ending}"
        for shard in shards
        for ending, record in json.loads(shard.read_text())["files"].items()
        if asdict(read_record(shard.with_suffix(f".{ending}"))) != record
    ]


def survive_kills(kills: int, folder: Path) -> Iterator[dict[str, Any]]:
    """A row for each kill, and for each time that all shards were finished."""
    files = {"train": str(DATA / "train.parquet"), "eval": str(DATA / "valid.parquet")}
    words = ["--data.path=parquet", f"--data.data_files={json.dumps(files)}", "--data.name=null"]
    words += ["--data.train_split=train", "--data.eval_split=validation", f"--data.tokenizer={folder / 'tokenizer'}"]
    config = load_config(ROOT / "recipes/causal_lm/gpt2_124m.json", words)
    documents = parquet.read_table(files["train"]).column("text").to_pylist()
    train_tokenizer(documents, VOCABULARY, folder / "tokenizer")
    tokenizer = PretrainedTokenizer(config.data.tokenizer)
    whole = plain(
        np.concatenate([[*tokenizer.tokenizer(each)["input_ids"], tokenizer.end_of_text] for each in documents])
    )
    preparation = Preparation("", "everything", num_workers=WORKERS)

    def prepare() -> TokenStream:
        with Path(os.devnull).open("w") as nowhere, redirect_stdout(nowhere):
            return prepared.open_prepared(config.data, tokenizer, preparation)[0]

    random = np.random.default_rng(0)
    homes = count()
    prepared.HF_HOME = str(folder / f"home_{next(homes)}")
    for kill in range(kills):
        seconds = float(random.uniform(0.0, MAX_SECONDS))
        process = get_context("fork").Process(target=prepare)
        process.start()
        time.sleep(seconds)
        process.kill()
        process.join()
        shards = list(Path(prepared.HF_HOME).rglob("0*.json"))
        wrong = wrong_files(shards)
        row = {"what": "kill", "number": kill + 1, "seconds": round(seconds, 2), "finished shards": len(shards)}
        yield row | {"verdict": "wrong" if wrong else "right", "wrong": wrong}
        if list(Path(prepared.HF_HOME).rglob("manifest.json")) or kill == kills - 1:
            verdict = "right" if digest_of(prepare()) == whole else "wrong"
            yield {"what": "samples", "number": kill + 1, "verdict": verdict}
            prepared.HF_HOME = str(folder / f"home_{next(homes)}")


class Computed:
    """A part's tokens: the remainders of their places in the whole stream."""

    def __init__(self, start: int, stop: int):
        self.start, self.stop = start, stop

    def __getitem__(self, places: slice) -> np.ndarray:
        return np.arange(self.start + places.start, min(self.start + places.stop, self.stop)) % MODULUS


def read_many_documents() -> dict[str, Any]:
    """Blocks and documents of 10^8 documents, compared with where they must be."""
    lengths = np.random.default_rng(0).geometric(1 / 600, DOCUMENTS).astype(np.int64)
    ends = np.cumsum(lengths)
    parts = np.split(ends, PARTS)
    starts = [0, *(int(part[-1]) for part in parts)]
    stream = TokenStream(
        [
            Part(
                int(part[-1]) - start,
                len(part),
                partial(Computed, start, int(part[-1])),
                partial(np.subtract, part, start),
            )
            for start, part in zip(starts, parts, strict=False)
        ]
    )
    number = (len(stream) - 1) // BLOCK
    chosen = [*range(FIRST), *range(number - LAST, number)]
    right = digest_of(stream) == digest(np.arange(each * BLOCK, (each + 1) * BLOCK) % MODULUS for each in chosen)
    for each in [*range(FIRST), *range(DOCUMENTS - LAST, DOCUMENTS)]:
        first = int(ends[each] - lengths[each])
        expected = np.arange(first, min(first + BLOCK, int(ends[each]))) % MODULUS
        right = right and np.array_equal(stream.read_document(each, BLOCK), expected)
    right = right and np.array_equal(stream.lengths(), lengths)
    return {"what": "10^8 documents", "number": len(stream), "verdict": "right" if right else "wrong"}


def main() -> None:
    """Kill, compare and write."""
    parser = argparse.ArgumentParser(description="Kill the preparation of a corpus, and compare its tokens.")
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--output", type=Path, default=RESULTS / "prepared/prepared.json")
    options = parser.parse_args()
    datasets.disable_progress_bars()
    facts, rows = take_facts(("datasets", "tokenizers", "transformers", "numpy")), []
    with tempfile.TemporaryDirectory() as folder:
        for row in survive_kills(options.kills, Path(folder)):
            rows.append(row)
            print(*(f"{value!s:<12}" for value in row.values()), flush=True)
    rows.append(read_many_documents())
    write_verdicts(rows, "right", facts, options.output)


if __name__ == "__main__":
    main()
