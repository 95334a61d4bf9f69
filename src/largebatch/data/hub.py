"""Opens a data set through Hugging Face `datasets`: from the hub, a local folder, or local files."""

import errno
import json
import re
import socket
from collections.abc import Iterable
from glob import has_magic
from itertools import chain, product
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn
from zipfile import ZipFile

import fsspec
from fsspec.utils import infer_compression
from huggingface_hub.constants import HF_HOME

from largebatch.config.data import HubOrLocal, names_in
from largebatch.data.columns import Uses, no_column
from largebatch.data.damage import damage_told
from largebatch.data.forked import forked_by_datasets
from largebatch.data.local_files import LocalFile, check_endings, check_no_links, found_files, local_file
from largebatch.data.preparation import MAX_BYTES_IN_A_JOB, Preparation, write_errors
from largebatch.data.unread import name_columns, name_files, tell_of_shared_rows
from largebatch.errors import DataError, file_errors, is_transient, reason_of
from largebatch.system.repositories import COMMIT, find
from largebatch.system.variables import whole_number

if TYPE_CHECKING:
    import datasets
    from datasets.data_files import DataFilesList

CACHE_WRITE_ERRNOS = (errno.EACCES, errno.EROFS, errno.ENOSPC, errno.EDQUOT)
DOWNLOAD = "run `hf download ID --repo-type dataset --local-dir FOLDER`, and write FOLDER as data.path"
COMPRESSION = 4  # bytes of text in a byte of a compressed file, about
IMAGE_FOLDERS = (
    "write folders of the form SPLIT/CLASS/FILE or, if the innermost ones are meant, data_files with a glob of their "
    "depth, such as images/train/*/*/*"
)
NETWORK_ERRORS = (ConnectionError, TimeoutError, socket.gaierror)


def open_splits(
    config: HubOrLocal, preparation: Preparation, uses: Uses | None = None
) -> "tuple[datasets.Dataset, datasets.Dataset]":
    """The training and evaluation splits that the config names, which are prepared before if that is allowed.

    Args:
        config: The section.
        preparation: Who prepares them.
        uses: The columns that are used. Of local CSV, JSON and Parquet files only these are read; those of CSV and JSON
            as text as it stands in the files. With None, `datasets` reads all, and decides their types.

    Raises:
        DataError: They cannot be found or read, may not be prepared, or have no such columns.
    """
    import datasets
    from datasets.packaged_modules.arrow.arrow import Arrow
    from datasets.packaged_modules.parquet.parquet import Parquet

    from largebatch.data.parquet_types import check_types

    # It warns of files that are fewer than processes.
    datasets.logging.set_verbosity_error()
    arguments = _arguments(config)
    splits = (config.train_split, config.eval_split)
    try:
        builder = _with_exact_values(_builder(arguments, splits), uses)
        is_new = not Path(builder.cache_dir).is_dir()
        if is_new:
            preparation.check(config, _size(builder))
            if isinstance(builder, Arrow | Parquet):
                check_types(_local_files(builder), uses)
        _prepare(builder, preparation.num_workers)
        if config.data_files is not None:
            for name, split in builder.info.splits.items():
                if not split.num_examples:
                    raise DataError(f"data.data_files: no file of {name!r} has a row; name files that have some")
        train, evaluation = (builder.as_dataset(split) for split in splits)
    # `datasets` raises exceptions of many kinds for data that cannot be reached, parsed or found.
    except Exception as error:
        _raise_explained(error, config.path, splits)
    for dataset in (train, evaluation):
        _check_columns(dataset, uses or {})
    is_told = preparation.allowed == "everything"
    if is_told or is_new:
        name_files(config, builder, _local_files(builder))
    # What is new is told by the process that prepares it, and this by one of a job.
    if whole_number("RANK", 0) == 0:
        tell_of_shared_rows(config, builder)
    if is_told:
        name_columns(builder, train.column_names, uses)
    return train, evaluation


def _arguments(config: HubOrLocal) -> dict[str, Any]:
    """What tells `datasets` where the data is."""
    if config.data_files is not None:
        files = {split: _listed(files) for split, files in found_files(config).items()}
        return {"path": config.path, "data_files": files}
    place = find(config.path, "data.path")
    path = place.name
    if place.folder:
        if has_magic(str(place.folder.resolve())):
            raise DataError(
                f"data.path: `datasets` would take the name of {place.folder.resolve()} for a glob; rename it without "
                "brackets, * and ?"
            )
        check_no_links(place.folder)
        # By a name alone, such as "csv", it would read the files beside the folder.
        path = str(place.folder.absolute())
    return {"path": path, "name": config.config_name, "revision": place.revision}


def _builder(arguments: dict[str, Any], splits: tuple[str, str]) -> "datasets.DatasetBuilder":
    """The builder that `datasets` chooses, of the right files."""
    import datasets

    builder = datasets.load_dataset_builder(**arguments)
    if "data_files" not in arguments and _local_files(builder):
        builder = _of_files_alone(builder, splits)
    _check_commit(builder, arguments.get("revision"))
    return builder


def _with_exact_values(builder: "datasets.DatasetBuilder", uses: Uses | None) -> "datasets.DatasetBuilder":
    """The builder, or one that reads values of the used columns as they stand in the files, where `datasets` guesses.

    Raises:
        DataError: They could not be read so.
    """
    from largebatch.data.parquet_types import ROWS_AT_ONCE, with_used_columns
    from largebatch.data.text_rows import with_exact_text

    if builder.name == "text":
        # A byte order mark is not text.
        builder.config.encoding = "utf-8-sig"
    if builder.name == "parquet":
        # By default it is the number of rows of a file's first row group, which may be empty.
        builder.config.batch_size = ROWS_AT_ONCE
        files = _local_files(builder)
        if files and uses is not None:
            builder = with_used_columns(builder, files, uses)
    elif uses is not None:
        builder = with_exact_text(builder, uses)
        if builder.name == "csv":
            raise DataError(f"data.path: `datasets` would take cells of the hub's CSV files for numbers; {DOWNLOAD}")
        if builder.name == "imagefolder":
            _check_image_folder(builder, uses)
    return builder


def _prepare(builder: "datasets.DatasetBuilder", num_workers: int | None) -> None:
    """Download the data and convert it to Arrow, unless that was done before."""
    from datasets.exceptions import DatasetGenerationError

    with forked_by_datasets():
        try:
            builder.download_and_prepare(num_proc=num_workers)
        except DatasetGenerationError:
            if num_workers in (None, 1):
                raise
            print("preparing the data has failed: once more in one process, which can tell why")
            builder.download_and_prepare()


def _check_columns(dataset: "datasets.Dataset", uses: Uses) -> None:
    """Raise DataError if a used column is missing, or is text of another type than `datasets` has guessed."""
    for name, use in uses.items():
        if name in dataset.column_names or use.is_optional:
            continue
        if (dataset.builder_name, name) == ("imagefolder", "label"):
            raise no_class(str(dataset.split))
        raise no_column(name, use.field, dataset.column_names)
    if dataset.builder_name != "json":
        return
    # Those of JSON on the hub.
    for name, use in uses.items():
        kind = dataset.features.get(name)
        if use.kind == "text" and kind is not None and getattr(kind, "dtype", None) not in ("string", "null", "int64"):
            raise DataError(f"data.{use.field}: `datasets` has taken the hub's JSON in {name!r} for {kind}; {DOWNLOAD}")


def no_class(split: str) -> DataError:
    """The error that `datasets` finds no classes in the folders of a split's images."""
    return DataError(
        f"data.path: images of {split!r} have no class: they are in one folder, or the paths of all images, also of "
        f"other splits, have different depths, or metadata has no column 'label'; {IMAGE_FOLDERS}"
    )


def _raise_explained(error: Exception, path: str, splits: tuple[str, str]) -> NoReturn:
    """Raise an error of `datasets` as one that tells the user what to do: by its first cause, or by ours among them."""
    cause: BaseException = error
    while cause.__cause__ is not None and not isinstance(cause, DataError):
        cause = cause.__cause__
    if isinstance(cause, DataError):
        raise cause from None
    if isinstance(cause, ImportError):
        raise DataError(f"data.path: {path!r} needs a package: {cause}; install it with pip") from error
    if isinstance(cause, OSError) and cause.errno in CACHE_WRITE_ERRNOS:
        with write_errors(Path(HF_HOME)):
            raise cause from None
    if is_transient(cause) and not isinstance(cause, NETWORK_ERRORS):
        with file_errors(f"data.path: {path!r} cannot be read now"):
            raise cause from None
    raise DataError(
        f"data.path: {path!r} could not be loaded with splits {splits}: {reason_of(cause)}; correct that or, for local "
        "data, write its folder, or data_files whose rows all have the same columns and types"
    ) from error


def _local_files(builder: "datasets.DatasetBuilder") -> list[Path]:
    """The files of a builder that are on this machine."""
    splits = (builder.config.data_files or {}).values()
    return [Path(file) for files in splits for file in files if "://" not in file]


def _of_files_alone(builder: "datasets.DatasetBuilder", splits: tuple[str, str]) -> "datasets.DatasetBuilder":
    """The builder of a local folder's files of the splits that the config names, without its README.

    By a README, `datasets` would cast columns to other types. Of a folder with one, it also takes rows from its cache
    after files have changed, or those of another folder.

    Raises:
        DataError: There is no such split; it has files of several endings; or splits of two names, one for training and
            one for evaluation, have a file in common.
    """
    import datasets

    found = {str(name): [*map(Path, files)] for name, files in builder.config.data_files.items()}
    names = [sorted(names_in(split)) for split in splits]
    listed = {}
    for name in dict.fromkeys(chain(*names)):
        if name not in found:
            remedies = ["one of them"] if len(found) > 1 else []
            whole = "train" if "train" in found else min(found)
            # A part of a folder of images has some of its classes.
            if builder.name != "imagefolder":
                remedies.append(f'parts such as "{whole}[:90%]" and "{whole}[90%:]"')
            write = " or ".join([*remedies, "data_files"])
            raise DataError(f"data.path: there is no split {name!r}, only {', '.join(found)}; write {write}")
        files = _saved(found[name]) if builder.name == "arrow" else found[name]
        check_endings(files, builder.name, "data.path")
        listed[name] = _listed([local_file(file, "data.path") for file in files])
    for train, evaluation in product(*names):
        if train != evaluation:
            for file in sorted({*listed[train]} & {*listed[evaluation]}):
                raise DataError(f"data.path: the splits {train} and {evaluation} both have {file}; write data_files")
    general = vars(datasets.BuilderConfig())
    # As `drop_labels` of a folder of images.
    options = {name: value for name, value in vars(builder.config).items() if name not in general}
    return datasets.load_dataset_builder(builder.name, data_files=listed, **options)


def _check_image_folder(builder: "datasets.DatasetBuilder", uses: Uses) -> None:
    """Raise DataError for images that `datasets` would give other classes, or texts that it would take for nothing."""
    files = [file for files in builder.config.data_files.values() for file in files]
    # Images in a zip get the class of the folder that the zip is in.
    zips = [file for file in files if file.lower().endswith(".zip")]
    if zips and any(use.field == "label_column" for use in uses.values()):
        raise DataError(
            f"data.path: images in {zips[0]} would get other classes, or none; unpack it, or remove it from the data"
        )
    texts = [use.field for use in uses.values() if use.kind == "text" and use.field != "image_column"]
    tables = [file for file in _local_files(builder) if file.name == "metadata.csv"]
    if tables and texts:
        raise DataError(
            f"data.{texts[0]}: `datasets` would take texts such as NA in {tables[0]} for nothing; write metadata.jsonl "
            "instead"
        )


def _saved(files: list[Path]) -> list[Path]:
    """The files without those that `map` and `filter` have left in folders of `save_to_disk`."""
    rows = {
        folder: {part["filename"] for part in json.loads((folder / "state.json").read_bytes())["_data_files"]}
        for folder in {file.parent for file in files}
        if (folder / "state.json").is_file()
    }
    return [file for file in files if file.name in rows.get(file.parent, {file.name})]


def _check_commit(builder: "datasets.DatasetBuilder", revision: str | None) -> None:
    """Raise DataError for another commit, which `datasets` takes from its cache if the hub cannot be reached."""
    if revision is not None and COMMIT.fullmatch(revision) and builder.hash != revision:
        raise DataError(
            f"data.path: the hub cannot be reached, and {builder.hash} is the latest commit of {builder.repo_id} in "
            f"the cache, not {revision}; run `largebatch prepare` where it can be, or write the other one: ID@COMMIT"
        )


def _listed(files: list[LocalFile]) -> "DataFilesList":
    """Files as `datasets` lists them, with what tells it that one has changed."""
    from datasets.data_files import DataFilesList

    return DataFilesList(
        [str(file.path.absolute()) for file in files], [(f"{file.changed} {file.size}",) for file in files]
    )


def _size(builder: "datasets.DatasetBuilder") -> int:
    """Bytes of a data set's files, about what local ones hold if they are compressed."""
    files = [file for split in (builder.config.data_files or {}).values() for file in split]
    local = _local_files(builder)
    if local or not files:
        sizes = [file.stat().st_size * (COMPRESSION if infer_compression(file.name) else 1) for file in local]
        # Some hold far more, so what a job may prepare is counted.
        return sum(sizes) if sum(sizes) > MAX_BYTES_IN_A_JOB else _held(local)
    from huggingface_hub import HfFileSystem

    # datasets/USER/NAME@COMMIT, whose files are listed with one request for each thousand.
    repository = re.match(r"hf://(datasets/[^@]*@[^/]*)/", files[0])
    if repository is None:
        return builder.info.download_size or 0
    found: Any = HfFileSystem().find(repository[1], detail=True)
    return sum(found.get(file.removeprefix("hf://"), {}).get("size", 0) for file in files)


def _held(files: Iterable[Path]) -> int:
    """Bytes in files, which may be compressed; not much more than a job may prepare, even if they hold more."""
    total = 0
    for file in files:
        compression = infer_compression(file.name)
        if compression is None:
            total += file.stat().st_size
        elif compression == "zip":
            with damage_told(file), ZipFile(file) as archive:
                total += sum(member.file_size for member in archive.infolist())
        else:
            with damage_told(file), fsspec.open(file, "rb", compression=compression) as opened:
                while total <= MAX_BYTES_IN_A_JOB and (block := opened.read(2**20)):
                    total += len(block)
    return total
