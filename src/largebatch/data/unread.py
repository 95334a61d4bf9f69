"""Tells which files of a data set are read, and what somebody may not expect: what nothing reads, and shared rows."""

import os
from collections import Counter
from collections.abc import Sequence
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING

from largebatch.config.data import HubOrLocal
from largebatch.data.columns import Uses
from largebatch.words import counted

if TYPE_CHECKING:
    import datasets

MAX_SHOWN = 10  # names of files


def name_files(config: HubOrLocal, builder: "datasets.DatasetBuilder", listed: list[Path]) -> None:
    """Print the files of each split that has several, and which of a folder, or of those listed, are not read."""
    if listed and builder.name != "imagefolder":
        for split, files in builder.config.data_files.items():
            if len(files) > 1:
                folder = os.path.commonpath(files)
                names = [os.path.relpath(file, folder) for file in files[:MAX_SHOWN]] + ["…"] * (len(files) > MAX_SHOWN)
                print(f"{split}: {len(files):,} files in {folder}: {', '.join(names)}")
    present = listed
    read = {*listed}
    if not config.data_files:
        # Of a folder, `datasets` takes the files of one kind, some only if it knows their names.
        folder = Path(config.path).expanduser().absolute()
        inside = folder.rglob("[!._]*")
        present = [file for file in inside if "/." not in f"/{file.relative_to(folder)}" and file.name != "README.md"]
    if builder.name == "imagefolder":
        images = [file for file in listed if file.suffix.lower() in builder.EXTENSIONS]
        read = {*images, *(file for file in listed if file.stem == "metadata")}
        left_out = len(images) - sum(split.num_examples for split in builder.info.splits.values())
        if left_out > 0:
            print(f"{counted(left_out, 'image')} that nothing reads: the metadata does not list all")
    others = Counter(file.suffix.lower() for file in present if file not in read and file.is_file())
    for suffix, count in others.items():
        print(f"{counted(count, 'file')} that nothing reads: {suffix or 'without an ending'}")


def tell_of_shared_rows(config: HubOrLocal, builder: "datasets.DatasetBuilder") -> None:
    """Print how many rows both splits have, such as `train[:90%]` and `train[80%:]`, unless the plan has told that."""
    from datasets import ReadInstruction

    if config.evaluates_training_rows:
        return
    splits = (config.train_split, config.eval_split)
    lengths = {name: split.num_examples for name, split in builder.info.splits.items()}
    train, evaluation = (ReadInstruction.from_spec(split).to_absolute(lengths) for split in splits)
    shared = sorted(
        (one.splitname, max(one.from_, other.from_), min(one.to, other.to))
        for one, other in product(train, evaluation)
        if one.splitname == other.splitname
    )
    count = 0
    # Parts may name rows twice.
    reached = dict.fromkeys(lengths, 0)
    for name, start, stop in shared:
        count += max(0, stop - max(start, reached[name]))
        reached[name] = max(stop, reached[name])
    if count:
        print(f"{counted(count, 'row')} of the data for both training and evaluation")


def name_columns(builder: "datasets.DatasetBuilder", columns: Sequence[str], uses: Uses | None) -> None:
    """Print the columns that are not used, and what separates those of a CSV file; without uses, any may be."""
    from largebatch.data.parquet_types import UsedColumns
    from largebatch.data.text_rows import TextRows

    if uses is None:
        return
    if isinstance(builder, TextRows | UsedColumns):
        columns = builder.first_columns()
    if isinstance(builder, TextRows) and (separators := builder.separators()):
        print(f"cells of the data are separated by {' or '.join(map(repr, separators))}")
    if unread := [name for name in columns if name not in uses]:
        print(f"{counted(len(unread), 'column')} of the data that nothing reads: {', '.join(unread)}")
