"""Images in tar files: equal to reading each member by hand, without a copy, and refused where they are not such."""

import tarfile

import numpy as np
import pytest

import tasks
from largebatch.config import load_config
from largebatch.data import preparation, tars
from largebatch.data.preparation import NotPrepared, Preparation
from largebatch.errors import DataError
from paths import CIFAR
from pictures import png, write_tar


@pytest.fixture(autouse=True)
def _own_cache(tmp_path, monkeypatch):
    monkeypatch.setattr(preparation, "HF_HOME", str(tmp_path / "cache"))


def square(gray):
    return png(np.full((32, 32, 3), gray, np.uint8))


def write(path, numbers, mode="w", without=None):
    """Members as WebDataset names them, not all in the same order, with others between them."""
    members = {}
    for number in numbers:
        content = {"png": square(30 * number), "cls": str(number % 3).encode(), "json": b"{}"}
        for ending in sorted(content, reverse=bool(number % 2)):
            if ending != without:
                members[f"n0/{number:03d}.{ending}"] = content[ending]
    write_tar(path, members, mode)


@pytest.fixture
def shards(tmp_path):
    write(tmp_path / "train-0.tar", range(4))
    write(tmp_path / "train-1.tar", range(4, 7))
    write(tmp_path / "val.tar", (1, 2))
    return tmp_path


def config_of(folder, *words):
    return load_config(
        CIFAR,
        [
            "--data.path=webdataset",
            f'--data.data_files={{"train": "{folder}/train-*.tar", "eval": "{folder}/val.tar"}}',
            "--data.train_split=train",
            "--data.eval_split=validation",
            "--data.image_column=jpg;png",
            "--data.label_column=cls",
            "--data.train_augmentation=none",
            "--data.num_train_samples=7",
            "--data.num_eval_samples=2",
            "--data.num_workers=0",
            '--batch={"global_batch_size": 4, "micro_batch_size": 2}',
            *words,
        ],
    )


opened = tasks.sources("image_classification")


def assert_refused(shards, told, *words):
    with pytest.raises(DataError, match=told):
        opened(config_of(shards, *words))


def test_samples_are_those_of_the_members(shards):
    train, evaluation = opened(config_of(shards))
    assert (len(train), len(evaluation)) == (7, 2)
    order = np.array([6, 0, 3, 4])
    for source, indices, numbers in ((train, order, order), (evaluation, np.array([1, 0]), (2, 1))):
        batch = source.fetch(indices, None)
        assert batch["pixel_values"][:, 0, 0, 0].tolist() == [30 * number for number in numbers]
        assert batch["labels"].tolist() == [number % 3 for number in numbers]


def test_endings_in_capitals_are_the_same_endings(shards):
    write_tar(shards / "val.tar", {"README": b"", "a.PNG": square(90), "a.Cls": b"1"})
    _, evaluation = opened(config_of(shards, "--data.num_eval_samples=1", "--data.image_column=JPG;png"))
    batch = evaluation.fetch(np.array([0]), None)
    assert (batch["pixel_values"][0, 0, 0, 0], batch["labels"][0]) == (90, 1)


def test_the_index_is_made_once_by_who_may_and_holds_no_image(shards, monkeypatch):
    config = config_of(shards)
    with pytest.raises(NotPrepared, match=r"about 0\.0 MiB of data must still be prepared"):
        opened(config, Preparation(allowed="nothing"))
    opened(config)
    made = [*(shards / "cache/largebatch").iterdir()]
    assert sum(path.stat().st_size for path in made) < 1000
    with monkeypatch.context() as without_tars:
        without_tars.setattr(tars.tarfile, "open", None)
        opened(config)
    # Other files of the same names have another index.
    write(shards / "train-1.tar", range(4, 6))
    assert len(opened(config_of(shards))[0]) == 6


def test_an_image_that_cannot_be_decoded_is_named_by_its_place(shards):
    content = bytearray((shards / "train-1.tar").read_bytes())
    start = content.index(b"\x89PNG", content.index(b"\x89PNG") + 1)
    content[start] ^= 1
    (shards / "train-1.tar").write_bytes(content)
    train, _ = opened(config_of(shards))
    with pytest.raises(DataError, match=rf"cannot be decoded: .*, in .*train-1\.tar at byte {start:,}; replace"):
        train.fetch(np.arange(len(train)), None)


def test_what_cannot_be_read_is_refused(shards):
    for mode, without, told in (
        ("w:gz", None, r"train-2\.tar cannot be read: .*; write tars without compression"),
        ("w", "cls", r"'n0/001' in .*train-2\.tar has png, json, and must have exactly one of cls; write each image's"),
        ("w", "png", r"has json, cls, and must have exactly one of jpg, png; write other endings"),
    ):
        write(shards / "train-2.tar", [1], mode, without)
        assert_refused(shards, told)
    write_tar(shards / "train-2.tar", {"n0/001": square(1)})
    assert_refused(
        shards / "..",
        "the tars of 'train' have no files with endings; write names such as 17.jpg",
        *[f'--data.data_files={{"train": "{shards}/train-2.tar", "eval": "{shards}/val.tar"}}'],
    )
    # As `tar --append` does it with a member that is there.
    write(shards / "train-2.tar", [1])
    write(shards / "train-2.tar", [1], "a")
    assert_refused(shards, r"train-2\.tar has two files n0/001\.png; remove one of them")
    with tarfile.open(shards / "train-2.tar", "w") as tar:
        for name in ("latest", "n0/002.png"):
            link = tarfile.TarInfo(name)
            link.type = tarfile.SYMTYPE
            tar.addfile(link)
    assert_refused(shards, r"train-2\.tar has a link, n0/002\.png; write it with the files themselves")
    (shards / "train-2.tar").unlink()
    # As `img2dataset` writes classes.
    assert_refused(
        shards,
        r"label_column: 'n0/000\.json' in .* has b'\{\}'; write each image's class, as",
        "--data.label_column=json",
    )
    assert_refused(
        shards,
        r"has cls, json, png, and must have exactly one of png, json; write other",
        "--data.image_column=png;json",
    )
    assert_refused(shards, r"sample 2 of 'train' has the label 2; .*data\.num_classes 2", "--data.num_classes=2")
    assert_refused(shards, "tars have no parts", "--data.train_split=train[:50%]")


def offset_of(path, member):
    with tarfile.open(path) as tar:
        return tar.getmembers()[member].offset


def planted(path, member, place, content):
    """A tar of which a field of a member's header is other bytes, with the right checksum."""
    data = bytearray(path.read_bytes())
    start = offset_of(path, member)
    data[start + place : start + place + len(content)] = content
    data[start + 148 : start + 156] = b" " * 8
    data[start + 148 : start + 156] = b"%06o\0 " % sum(data[start : start + 512])
    path.write_bytes(data)


def header(kind, size, name="x"):
    """A member's header as GNU tar writes it."""
    info = tarfile.TarInfo(name)
    info.type = kind
    info.size = size
    return info.tobuf(tarfile.GNU_FORMAT)


def extended(field):
    """An extended header with one field, which begins with its own length."""
    return header(tarfile.XHDTYPE, len(field)) + field.ljust(512, b"\0")


# Of each kind of error that `tarfile` raises; and a sparse file, which it would read.
HOSTILE = {
    "a long name of 2**62 bytes": header(tarfile.GNUTYPE_LONGNAME, 2**62),
    "a hole at a word": extended(b"22 GNU.sparse.map=x,y\n") + header(tarfile.REGTYPE, 0),
    "2,000 extended headers": extended(b"13 comment=x\n") * 2000 + header(tarfile.REGTYPE, 0),
    "a sparse file": extended(b"22 GNU.sparse.map=0,0\n") + header(tarfile.REGTYPE, 0),
}


@pytest.mark.parametrize("what", HOSTILE)
def test_headers_that_ask_for_anything_are_a_sentence(what, shards):
    file = shards / "train-0.tar"
    file.write_bytes(HOSTILE[what] + file.read_bytes())
    assert_refused(shards, r"train-0\.tar cannot be read: .*; write tars without compression")


def test_damage_is_no_end_and_no_label(shards):
    """Each would otherwise lose samples, never end, or be a traceback."""
    file = shards / "train-0.tar"
    whole = file.read_bytes()

    def refused(told):
        assert_refused(shards, rf"train-0\.tar cannot be read: {told}.*; write tars without compression")
        file.write_bytes(whole)

    # One bit of the fifth header; `tarfile` ends there.
    start = offset_of(file, 4)
    file.write_bytes(whole[: start + 1] + bytes([whole[start + 1] ^ 1]) + whole[start + 2 :])
    refused(f"it has neither a header nor the mark of its end at byte {start:,}: it is damaged or cut off")
    # Cut between two members.
    file.write_bytes(whole[:start])
    refused(f"it has neither a header nor the mark of its end at byte {start:,}")
    file.write_bytes(whole + (shards / "train-1.tar").read_bytes())
    refused(r"it goes on after its end at byte [\d,]+: it is damaged, or joined of several")
    with file.open("wb") as longer:
        longer.write(whole)
        longer.truncate(2**25)
    refused(r"it goes on after its end at byte [\d,]+: it is damaged, or joined of several")
    # Its size, as GNU tar writes a number in base 256.
    planted(file, 2, 124, (-512).to_bytes(12, "big", signed=True))
    # Newer versions of `tarfile` end there.
    refused("(the header of 'n0/000.png' is damaged|it has neither a header nor the mark of its end)")
    planted(file, 2, 124, b"\x80" + (2**62).to_bytes(11, "big"))
    refused("the header of 'n0/000.png' is damaged, of a sparse file, or of one cut off")
    write_tar(file, {"0.png": square(0), "0.cls": b"1" * 4000})
    assert_refused(shards, r"label_column: '0\.cls' in .* has b'1111111111111111111'; write each image's")


def test_what_is_no_index(shards):
    opened(config_of(shards))
    for path in (shards / "cache/largebatch").iterdir():
        whole = path.read_bytes()
        # Cut off, or with another shape or type in a header that can be read.
        other = (whole.replace(b"5), }", b"1), }"), whole.replace(b"<i8", b"<f8"))
        assert whole not in other
        for content in (b"", b"text", whole[:100], *other):
            path.write_bytes(content)
            assert_refused(shards, r"tars_.*\.npy is damaged; remove it, and prepare the data again")
        path.unlink()
    assert len(opened(config_of(shards))[0]) == 7
